"""The one thread of an arena: it maps slab after slab by touching it, registers it, then publishes its slots.

    RESERVED slab  ->  room left?  ->  allocate, map  ->  touch  ->  register  ->  publish  ->  READY
                        |     ^             |                           |             ^
                        +-----+             |                           +-- refused --+
                    tried again later       +-------------------------------------------------> LOST

A slab whose turn to be registered has not come does not hold up the mapping of the next one. Slots are never seen
before they are usable.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import KvmoorError
from kvmoor.host_memory.arena_plan import ArenaPlan, SlabPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.mapping_threads import MappingThreads
from kvmoor.host_memory.pacing import Clock, StepPacer
from kvmoor.host_memory.slab import Slab, SlabState
from kvmoor.host_memory.slab_memory import SlabMemory
from kvmoor.host_memory.slab_registration import Pin, SlabRegistration
from kvmoor.observation import Event, MappingFailed, Observer, SlotsPublished, notify
from kvmoor.registration import Registrar
from kvmoor.transfer_messages import SlotRange

_log = logging.getLogger("kvmoor")

FIRST_RETRY_S: Final = 1.0
"""When slabs that found no room are tried again; each time that none finds any the interval doubles. Guessed."""
LONGEST_RETRY_S: Final = 30.0
"""The longest interval between two such tries. Guessed."""
_LONGEST_WAIT_S: Final = 60.0
"""The mapping thread looks again after this, though whatever it waits for is announced."""


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
        registrar: Registrar | None = None,
        pin: Pin = "off",
        pacer: StepPacer | None = None,
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._observer = observer
        self._read_limits = read_limits
        self._stop = threading.Event()
        self._threads = MappingThreads(memory, self._stop, name=f"kvmoor-mapper-{name}", num_threads=num_threads)
        # Guards all fields below. Notified when slots are published, when a slab is lost, and at the end.
        self._changed = threading.Condition()
        self._slabs = [Slab(slab) for slab in plan.slabs]
        self._untouched = deque(self._slabs)  # to be mapped now, in this order
        self._touched: deque[Slab] = deque()  # mapped, and not published yet
        self._lacking_room: list[Slab] = []  # to be mapped at `_retry_at`
        self._retry_s, self._retry_at = FIRST_RETRY_S, math.inf
        self._over = False
        self._num_reserved = [group.num_slabs for group in plan.groups]  # slabs that are neither ready nor lost
        self._num_tried = 0  # slabs that were published, lost, or found no room
        self._pending: list[SlotRange] = []
        self._num_published = [0] * len(plan.groups)
        self._mapped_nbytes = 0
        # Whether each slab of a group is ready, and whether copies may go there directly. Elements only go from False
        # to True, the second before the first, so readers need no lock.
        self._ready = [np.zeros(group.num_slabs, dtype=np.bool_) for group in plan.groups]
        self._direct = [np.zeros(group.num_slabs, dtype=np.bool_) for group in plan.groups]
        pacer = pacer or StepPacer()
        self._clock: Clock = pacer.clock
        self.registration: Final = SlabRegistration(
            registrar, plan, memory.base, pin=pin, pacer=pacer, changed=self._changed, observer=observer, name=name
        )

    @property
    def mapped_nbytes(self) -> int:
        """Return how many bytes are resident: touched whole, and published unless they wait to be registered."""
        with self._changed:
            return self._mapped_nbytes

    def are_published(self, group: int, slots: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return for each slot of a group whether it exists and is published, bool in the shape of `slots`."""
        plan = self._plan.groups[group]
        if not plan.slot_nbytes:
            return (slots >= 0) & (slots < plan.num_slots) & (self.num_published(group) > 0)
        return plan.look_up(self._ready[group], slots)

    def are_registered(self, group: int, slots: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return for each slot whether copies may go there directly; those of a group without tensors have none."""
        plan = self._plan.groups[group]
        if self.registration.mode == "direct" or not plan.slot_nbytes:
            return np.ones(slots.shape, np.bool_)
        return plan.look_up(self._direct[group], slots)

    def start(self) -> None:
        """Begin to map on a thread of its own and return at once."""
        self._threads.start(self.run)

    def run(self) -> None:
        """Map slab after slab until all are ready or lost, or until `stop`; touches with several threads if told so."""
        self._run(keep_trying=True)

    def run_once(self) -> None:
        """Do what `run` does, but return when each slab was tried; `run` may follow for those that found no room."""
        self._run(keep_trying=False)

    def _run(self, *, keep_trying: bool) -> None:
        try:
            for group in self._plan.groups:
                if not group.slot_nbytes and not self.num_published(group.group):
                    self._publish(SlotRange(group.group, 0, group.num_slots), None, registered=True)
            while (step := self._wait_for_step(keep_trying)) is not None:
                step()
        except Exception as error:
            # A bug, but waiters and the engine must not be left hanging: what is not mapped will never be.
            _log.exception("mapping host memory ended early; the arena goes on with what it has")
            with self._changed:
                self._lacking_room.clear()
            for slab in self._slabs:
                if slab.state is SlabState.RESERVED:
                    self._lose(slab, f"mapping ended early ({type(error).__name__}: {error})")
        finally:
            with self._changed:
                self._over = self._stop.is_set() or not self._lacking_room
                self._changed.notify_all()

    def _wait_for_step(self, keep_trying: bool) -> Callable[[], None] | None:
        """Wait for something to do and return it; None if stopped, or if there is nothing left."""
        with self._changed:
            while not self._stop.is_set():
                delay_s = math.inf
                if self._touched:
                    delay_s = self.registration.delay_s()
                    if delay_s <= 0:
                        slab = self._touched.popleft()
                        registers = self.registration.claim_turn(slab.plan)
                        return partial(self._finish, slab, registers=registers)
                if self._lacking_room and keep_trying:
                    retry_delay_s = self._retry_at - self._clock.now()
                    if retry_delay_s <= 0:
                        self._untouched.extend(self._lacking_room)
                        self._lacking_room.clear()
                        self._retry_at = math.inf
                        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)  # mapping one resets it
                    delay_s = min(delay_s, retry_delay_s)
                if self._untouched:
                    return partial(self._map, self._untouched.popleft())
                if not self._touched and not (self._lacking_room and keep_trying):
                    return None
                self._clock.wait(self._changed, min(delay_s, _LONGEST_WAIT_S))
        return None

    def stop(self) -> None:
        """Ask for the end and return at once; nothing is published any more. `join` proves it."""
        with self._changed:
            self._stop.set()
            self._over = True
            self._pending.clear()
            self._changed.notify_all()

    def forked(self) -> None:
        """End in a forked child, which has none of the threads; locks may be theirs and are replaced."""
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._stop.set()
        self._over = True
        self._pending.clear()
        self._threads.forked()
        self.registration.forked(self._changed)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after `stop`; return whether it is proven that none touches the arena any more."""
        return self._threads.join(timeout_s)

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

    def slabs_without_room(self) -> list[tuple[SlabPlan, str]]:
        """Return the slabs that found no room and are tried again, each with the reason."""
        with self._changed:
            return [(slab.plan, slab.reason) for slab in self._slabs if slab.lacks_room]

    def registered_nbytes(self) -> tuple[int, int]:
        """Return how many published bytes are registered and how many are staged; none are where all is direct."""
        if self.registration.mode == "direct":
            return 0, 0
        nbytes = [0, 0]
        with self._changed:
            for slab in self._slabs:
                if slab.state is SlabState.READY:
                    nbytes[not self._is_direct(slab.plan)] += slab.plan.resident_nbytes
        return nbytes[0], nbytes[1]

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

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until copies may go directly to every slab that is not lost; False at the deadline.

        False at once where that cannot come true: a slab was refused, the mode is "staging", or mapping was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._some_are_staged(), max(0.0, timeout_s))
            return not any(self._num_reserved) and not self._some_are_staged()

    def wait_tried(self, stall_timeout_s: float) -> bool:
        """Wait until each slab was tried once; False if for so long nothing became of any, or if stopped before."""
        with self._changed:
            seen = -1
            while seen < self._num_tried < len(self._slabs) and not self._over:
                seen = self._num_tried
                self._changed.wait_for(partial(self._has_tried_more_than, seen), stall_timeout_s)
            return self._num_tried >= len(self._slabs)

    def _has_tried_more_than(self, num_tried: int) -> bool:
        return self._over or self._num_tried > num_tried

    def _groups_without_slots(self) -> list[int]:
        return [group.group for group in self._plan.groups if group.num_slabs and not self._num_published[group.group]]

    def _first_slots_are_decided(self) -> bool:
        missing = self._groups_without_slots()
        return self._over or not missing or any(not self._num_reserved[group] for group in missing)

    def _some_are_staged(self) -> bool:
        if self.registration.mode == "direct":
            return False
        # In staging mode what comes next will be staged too; if nothing comes any more, what counts is what there is.
        staged_from_now = self.registration.mode == "staging" and any(self._num_reserved)
        return staged_from_now or any(
            not direct[ready].all() for direct, ready in zip(self._direct, self._ready, strict=True)
        )

    def _is_direct(self, slab: SlabPlan) -> bool:
        return bool(self._direct[slab.group][slab.first_slot // self._plan.groups[slab.group].slots_per_slab])

    def _map(self, slab: Slab) -> None:
        try:
            if shortage := self._find_shortage(slab.plan):
                self._put_off(slab, shortage)
                return
            if not (self._memory.map_slab(slab.plan, self._stop.is_set) and self._threads.touch(slab.plan)):
                return  # stopped
        except (KvmoorError, OSError) as error:
            self._lose(slab, str(error))
            return
        with self._changed:
            self._touched.append(slab)
            self._mapped_nbytes += slab.plan.resident_nbytes
            self._retry_s = FIRST_RETRY_S
            self._changed.notify_all()

    def _find_shortage(self, slab: SlabPlan) -> str:
        """Look at the limits again: other processes grow too, and going over a cgroup's limit is a kill."""
        return self._memory.find_shortage(slab, self._read_limits()) if self._plan.memory_check == "refuse" else ""

    def _finish(self, slab: Slab, *, registers: bool) -> None:
        """Publish a mapped slab, after its turn to be registered if it has one."""
        registered = self.registration.mode == "direct" or (registers and self.registration.register(slab.plan))
        slots = SlotRange(slab.plan.group, slab.plan.first_slot, slab.plan.num_slots)
        self._publish(slots, slab, registered=registered)

    def _put_off(self, slab: Slab, shortage: str) -> None:
        """Keep a slab for which there is no room now; it is reported the first time only."""
        with self._changed:
            again = slab.lacks_room
            slab.reason = shortage
            self._lacking_room.append(slab)
            if again:
                # Slabs of a group are as large but for the last: the others that are tried again would not fit either.
                untouched, self._untouched = self._untouched, deque()
                for other in untouched:
                    hopeless = other.lacks_room and other.plan.group == slab.plan.group
                    (self._lacking_room if hopeless else self._untouched).append(other)
            else:
                self._num_tried += 1
            self._retry_at = self._clock.now() + self._retry_s
            self._changed.notify_all()
        if not again:
            self._notify(MappingFailed(slab.plan.group, slab.plan.num_slots, shortage))

    def _publish(self, slots: SlotRange, slab: Slab | None, *, registered: bool) -> None:
        """Make slots usable; `slab` is None for a group without tensors."""
        with self._changed:
            if self._stop.is_set():
                return
            if slab is not None:
                self._num_tried += not slab.lacks_room
                slab.move(SlabState.READY)
                self._num_reserved[slots.group] -= 1
                number = slots.first // self._plan.groups[slots.group].slots_per_slab
                self._direct[slots.group][number] = registered
                self._ready[slots.group][number] = True
            self._num_published[slots.group] += slots.num_slots
            self._pending.append(slots)
            mapped_nbytes = self._mapped_nbytes
            self._changed.notify_all()
        self._notify(SlotsPublished(slots.group, slots.num_slots, mapped_nbytes, self._plan.nbytes, registered))

    def _lose(self, slab: Slab, reason: str) -> None:
        with self._changed:
            self._num_tried += not slab.lacks_room
            slab.move(SlabState.LOST, reason)
            self._num_reserved[slab.plan.group] -= 1
            self._changed.notify_all()
        self._notify(MappingFailed(slab.plan.group, slab.plan.num_slots, reason))

    def _notify(self, event: Event) -> None:
        notify(self._observer, event)
