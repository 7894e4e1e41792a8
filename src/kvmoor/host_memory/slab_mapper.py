"""The one thread of an arena: it maps slab after slab by touching it, then publishes its slots.

    RESERVED slab  ->  room left?  ->  allocate, map  ->  touch  ->  publish  ->  READY
                            |               |
                            +---------------+-------------------------------->  LOST

The work between touching and publishing belongs to this thread too, so slots are never seen before they are usable.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.errors import KvmoorError, NoRoomError
from kvmoor.host_memory.arena_plan import ArenaPlan, SlabPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.page_mapping import TOUCH_NBYTES
from kvmoor.host_memory.slab import Slab, SlabState
from kvmoor.host_memory.slab_memory import SlabMemory
from kvmoor.observation import Event, MappingFailed, Observer, SlotsPublished, notify
from kvmoor.transfer_messages import SlotRange

_log = logging.getLogger("kvmoor")

_MIN_PART_NBYTES: Final = 8 * 2**20
"""What is worth a thread when several touch one slab. Guessed."""


class SlabMapper:
    """Map the slabs of one arena and publish their slots, on its own thread or on the caller's.

    All methods may be called from any thread. Events are reported after the lock is released.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        memory: SlabMemory,
        *,
        observer: Observer,
        read_limits: Callable[[], MemoryLimits],
        name: str,
        num_threads: int,
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._observer = observer
        self._read_limits = read_limits
        self._name = f"kvmoor-mapper-{name}"
        self._num_threads = num_threads
        self._stop = threading.Event()
        # Threads that may be writing to the arena. Appended to by whoever starts one, read by `join`.
        self._threads: list[threading.Thread] = []
        # Guards all fields below. Notified when slots are published, when a slab is lost, and at the end.
        self._changed = threading.Condition()
        self._slabs = [Slab(slab) for slab in plan.slabs]
        self._over = False
        self._num_reserved = [group.num_slabs for group in plan.groups]  # slabs that are neither ready nor lost
        self._pending: list[SlotRange] = []
        self._num_published = [0] * len(plan.groups)
        self._mapped_nbytes = 0
        # Whether each slab of a group is ready. Elements only go from False to True, so readers need no lock.
        self._ready = [np.zeros(group.num_slabs, dtype=np.bool_) for group in plan.groups]

    @property
    def mapped_nbytes(self) -> int:
        """Return how many bytes are resident and published."""
        with self._changed:
            return self._mapped_nbytes

    def are_published(self, group: int, slots: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return for each slot of a group whether it exists and is published, bool in the shape of `slots`."""
        plan = self._plan.groups[group]
        exists = (slots >= 0) & (slots < plan.num_slots)
        if not plan.slot_nbytes:
            return exists & (self.num_published(group) > 0)
        published: NDArray[np.bool_] = exists & self._ready[group][np.where(exists, slots, 0) // plan.slots_per_slab]
        return published

    def start(self) -> None:
        """Begin to map on a thread of its own and return at once."""
        self._start_thread(self.run)

    def run(self) -> None:
        """Map slab after slab until all are ready or lost, or until `stop`; touches with several threads if told so."""
        try:
            for group in self._plan.groups:
                if not group.slot_nbytes and not self._stop.is_set():
                    self._publish(SlotRange(group.group, 0, group.num_slots), None)
            for slab in self._slabs:
                if self._stop.is_set():
                    return
                self._map(slab)
        except Exception as error:
            # A bug, but waiters and the engine must not be left hanging: what is not mapped will never be.
            _log.exception("mapping host memory ended early; the arena goes on with what it has")
            for slab in self._slabs:
                if slab.state is SlabState.RESERVED:
                    self._lose(slab, f"mapping ended early ({type(error).__name__}: {error})")
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def stop(self) -> None:
        """Ask for the end and return at once; nothing is published any more. `join` proves it."""
        with self._changed:
            self._stop.set()
            self._over = True
            self._pending.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after `stop`; return whether it is proven that none touches the arena any more."""
        deadline = time.monotonic() + timeout_s
        for thread in tuple(self._threads):
            if thread is threading.current_thread():
                return False  # an observer that closes from within an event
            if thread.ident is not None:  # else it never ran, and if it still does, it sees the stop flag first
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    return False
        return True

    def take_published(self) -> list[SlotRange]:
        """Return the slots published since the last call, each once."""
        with self._changed:
            pending, self._pending = self._pending, []
            return pending

    def num_published(self, group: int) -> int:
        """Return how many slots of a group are usable."""
        with self._changed:
            return self._num_published[group]

    def lost_slabs(self) -> list[tuple[SlabPlan, str]]:
        """Return the slabs that could not be mapped, each with its reason."""
        with self._changed:
            return [(slab.plan, slab.reason) for slab in self._slabs if slab.state is SlabState.LOST]

    def wait_published(self, timeout_s: float) -> bool:
        """Wait until every group with tensors has a slot; False at the deadline, or once one can get none."""
        with self._changed:
            self._changed.wait_for(self._first_slots_are_decided, max(0.0, timeout_s))
            return not self._groups_without_slots()

    def wait_mapped(self, timeout_s: float) -> bool:
        """Wait until every slab is ready or lost; False at the deadline, or if mapping was stopped before."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, max(0.0, timeout_s))
            return not any(self._num_reserved)

    def _groups_without_slots(self) -> list[int]:
        return [group.group for group in self._plan.groups if group.num_slabs and not self._num_published[group.group]]

    def _first_slots_are_decided(self) -> bool:
        missing = self._groups_without_slots()
        return self._over or not missing or any(not self._num_reserved[group] for group in missing)

    def _map(self, slab: Slab) -> None:
        try:
            self._check_room(slab.plan)
            if not (self._memory.map_slab(slab.plan, self._stop.is_set) and self._touch(slab.plan)):
                return  # stopped
        except (KvmoorError, OSError) as error:
            self._lose(slab, str(error))
            return
        self._publish(SlotRange(slab.plan.group, slab.plan.first_slot, slab.plan.num_slots), slab)

    def _check_room(self, slab: SlabPlan) -> None:
        """Look at the limits again: other processes grow too, and going over a cgroup's limit is a kill."""
        if self._plan.memory_check != "refuse":
            return
        limits = self._read_limits()
        room = limits.room_nbytes
        if room is not None and slab.resident_nbytes > room:
            raise NoRoomError(
                f"{format_nbytes(slab.resident_nbytes)} of host memory were to be mapped, {format_nbytes(room)} "
                f"are left within {limits.tightest}: these slots stay unused; lower host_memory or make room"
            )

    def _touch(self, slab: SlabPlan) -> bool:
        """Touch a slab, in parts on several threads if it is large enough; return False if stopped.

        Returns or raises only after every thread has ended, so that nothing is zeroed once it is published.
        """
        num_parts = max(1, min(self._num_threads, slab.nbytes // _MIN_PART_NBYTES))
        part_nbytes = round_up(-(-slab.nbytes // num_parts), TOUCH_NBYTES)
        parts = [
            (slab.offset + start, min(part_nbytes, slab.nbytes - start)) for start in range(0, slab.nbytes, part_nbytes)
        ]
        if len(parts) == 1:
            return self._memory.touch(slab.offset, slab.nbytes, self._stop.is_set)
        return self._touch_parts(parts)

    def _touch_parts(self, parts: Sequence[tuple[int, int]]) -> bool:
        outcomes: list[bool | Exception] = []

        def touch(offset: int, nbytes: int) -> None:
            try:
                outcomes.append(self._memory.touch(offset, nbytes, self._stop.is_set))
            except Exception as error:
                outcomes.append(error)

        own = [parts[0]]
        threads = []
        for part in parts[1:]:
            try:
                threads.append(self._start_thread(touch, part))
            except NoRoomError:
                own.append(part)
        for part in own:
            touch(*part)
        for thread in threads:
            while thread.is_alive():  # it ends: it does nothing but write zeros
                thread.join(1.0)
            self._threads.remove(thread)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return len(outcomes) == len(parts) and all(outcomes)

    def _start_thread(self, target: Callable[..., None], args: tuple[int, ...] = ()) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=self._name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.remove(thread)
            raise NoRoomError(
                f"a thread that maps host memory cannot start ({error}): raise the limit of threads (ulimit -u, or the "
                "pids limit of the container)"
            ) from error
        return thread

    def _publish(self, slots: SlotRange, slab: Slab | None) -> None:
        """Make slots usable; `slab` is None for a group without tensors."""
        with self._changed:
            if self._stop.is_set():
                return
            if slab is not None:
                slab.move(SlabState.READY)
                self._num_reserved[slots.group] -= 1
                self._mapped_nbytes += slab.plan.resident_nbytes
                self._ready[slots.group][slots.first // self._plan.groups[slots.group].slots_per_slab] = True
            self._num_published[slots.group] += slots.num_slots
            self._pending.append(slots)
            mapped_nbytes = self._mapped_nbytes
            self._changed.notify_all()
        self._notify(SlotsPublished(slots.group, slots.num_slots, mapped_nbytes, self._plan.nbytes))

    def _lose(self, slab: Slab, reason: str) -> None:
        with self._changed:
            slab.move(SlabState.LOST, reason)
            self._num_reserved[slab.plan.group] -= 1
            self._changed.notify_all()
        self._notify(MappingFailed(slab.plan.group, slab.plan.num_slots, reason))

    def _notify(self, event: Event) -> None:
        notify(self._observer, event)
