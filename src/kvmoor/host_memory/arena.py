"""The host memory of one rank: who owns it, when its slots can be used, and how it ends.

    OPENING -> OPEN -> CLOSING -> CLOSED      everything is given back
                 |        |
                 +--------+-----> QUARANTINED   mapped until the process ends

The owner proves that no copy touches the memory any more before it calls `close`; if it cannot, it calls `quarantine`.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvmoor.byte_sizes import format_nbytes
from kvmoor.errors import BrokenError, ClosedError, KvmoorError, NoRoomError, RequestError, SettingsError
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.arena_state import LEGAL_MOVES, ArenaState, ArenaStatistics
from kvmoor.host_memory.limits import MemoryLimits, read_memory_limits
from kvmoor.host_memory.memfd import MAX_NAME_NBYTES
from kvmoor.host_memory.pacing import StepPacer
from kvmoor.host_memory.page_mapping import Residency, SystemCalls
from kvmoor.host_memory.quarantine import QuarantinedArena, keep_until_exit
from kvmoor.host_memory.slab_mapper import SlabMapper
from kvmoor.host_memory.slab_memory import Backing, SlabMemory
from kvmoor.host_memory.slab_registration import Pin
from kvmoor.observation import ArenaQuarantined, Observer, SilentObserver, notify
from kvmoor.process_end import register
from kvmoor.registration import Registrar
from kvmoor.transfer_messages import SlotRange

__all__ = ["Arena", "ArenaState", "ArenaStatistics"]

_log = logging.getLogger("kvmoor")

CLOSE_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the mapping thread unless told otherwise; the thread needs milliseconds to stop."""
PAUSE_TIMEOUT_S: Final = 5.0
"""How long `pause_registration` waits for a running call; one takes 3 ms (64 MiB, H200). Guessed."""
_MAX_EAGER_THREADS: Final = 8
"""16 threads map 16 GiB 8 times as fast as one (H200 host); fewer were not measured there."""
_EAGER_STALL_S: Final = 300.0
"""An eager constructor gives up if nothing became of any slab for so long. Other processes that page-lock can hold up
a driver for minutes (12 minutes were seen for 700 GB in one call). Guessed."""


class Arena:
    """Own host memory: map it, hand out the addresses of its slots, give it back or keep it until the process ends.

    With `mapping` "background" the constructor returns at once and a thread publishes slab after slab; "eager" maps all
    before it returns, with several threads; slabs that find no room within the memory limits are tried again later.
    `backing` MEMFD is for an arena that other processes will read. `calls` and `read_limits` are replaced in tests.

    With a `registrar` slabs are page-locked before they are published: with `pin` "background" at the pace that
    `note_step` leaves, "eager" before the constructor returns, "off" never. What cannot be page-locked is published all
    the same, and copies to and from it have to be staged; without a registrar all copies are direct.

    Any thread may call any method. Raises `SettingsError` for arguments, `NoRoomError` and `BrokenError` for what the
    system refuses; a constructor that fails leaves nothing behind.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        backing: Backing = Backing.ANONYMOUS,
        mapping: Literal["background", "eager"] = "background",
        pin: Pin = "background",
        registrar: Registrar | None = None,
        pacer: StepPacer | None = None,
        observer: Observer | None = None,
        name: str = "arena",
        calls: SystemCalls | None = None,
        read_limits: Callable[[], MemoryLimits] = read_memory_limits,
    ) -> None:
        if mapping not in ("background", "eager"):
            raise SettingsError(f'mapping is {mapping!r}: give "background" or "eager"')
        if pin not in ("background", "eager", "off"):
            raise SettingsError(f'pin is {pin!r}: give "background", "eager" or "off"')
        if pin == "eager":
            mapping = "eager"
        # The registrar may block and changes how the driver sees a thread, so it is never called on the user's.
        on_own_thread = mapping == "background" or (registrar is not None and pin != "off")
        if not name or "\0" in name or len(name.encode()) > MAX_NAME_NBYTES:
            raise SettingsError(f"the name of an arena is {name!r}: give 1 to {MAX_NAME_NBYTES} bytes of text")
        self._plan = plan
        self._backing = backing
        self._observer: Observer = observer or SilentObserver()
        self._name = name
        self._pacer = pacer or StepPacer()
        # Held by the one thread that closes or quarantines. Guards `_state` once the arena is open.
        self._close_lock = threading.Lock()
        self._state = ArenaState.OPENING
        self._quarantine_reason = ""
        with ExitStack() as opened:
            self._memory = SlabMemory(plan, backing, name, calls or SystemCalls())
            opened.callback(self._memory.close)
            self._mapper = SlabMapper(
                plan,
                self._memory,
                observer=self._observer,
                read_limits=read_limits,
                name=name,
                num_threads=min(_MAX_EAGER_THREADS, len(os.sched_getaffinity(0))) if mapping == "eager" else 1,
                registrar=registrar,
                pin=pin,
                pacer=self._pacer,
            )
            register(self, forked=self._forked)
            # From here on threads may touch the memory, so giving it back is the business of `close`.
            opened.pop_all()
            opened.callback(self.close)
            if on_own_thread:
                self._mapper.start()
            else:
                self._mapper.run_once()
            if mapping == "eager":
                self._wait_eager(registers=pin == "eager")
                self._check_every_group_has_slots()
                if not on_own_thread and self._mapper.slabs_without_room():
                    self._mapper.start()
            self._move(ArenaState.OPEN)
            opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Only a warning: a copy may still be running, so the memory stays.
        if getattr(self, "_state", None) is ArenaState.OPEN:
            message = f"{self!r} was never closed: its memory stays mapped"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return (
            f"<Arena {self._name!r} {self._state.value}, {format_nbytes(self.mapped_nbytes)} of "
            f"{format_nbytes(self.nbytes)} mapped>"
        )

    @property
    def plan(self) -> ArenaPlan:
        """Return the plan that this arena follows."""
        return self._plan

    @property
    def state(self) -> ArenaState:
        """Return where in its life the arena is."""
        return self._state

    @property
    def closed(self) -> bool:
        """Say whether the memory was given back."""
        return self._state is ArenaState.CLOSED

    @property
    def nbytes(self) -> int:
        """Return how many bytes will be resident once everything is mapped."""
        return self._plan.nbytes

    @property
    def mapped_nbytes(self) -> int:
        """Return how many bytes are resident; 0 once closed. They are published unless they wait to be page-locked."""
        return 0 if self.closed else self._mapper.mapped_nbytes

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors of a MEMFD arena, which the arena keeps; none for anonymous memory."""
        return self._memory.descriptors

    def slot_addresses(self, group: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where slots begin, int64 in the shape of `slots`; 0 for slots of a group without tensors.

        The memory is mapped until `close` succeeds. Raises `RequestError` for a group or a slot that does not exist or
        is not published yet, and `ClosedError` once the arena is closed, closing or quarantined.
        """
        if self._state is not ArenaState.OPEN:
            raise ClosedError(f"{self!r} is {self._state.value}: its slots cannot be used any more")
        plan = self._find_group(group)
        numbers = np.asarray(slots)
        if not numbers.size:
            return np.zeros(numbers.shape, np.int64)
        if numbers.dtype.kind not in "iu":
            raise RequestError(f"slots have the type {numbers.dtype}: give whole numbers")
        published = self._mapper.are_published(group, numbers)
        if not published.all():
            raise RequestError(
                f"slot {numbers[~published].flat[0]} of group {group} cannot be used: {self.num_published(group)} of "
                f"{plan.num_slots} slots are published; use those that take_published returned"
            )
        if not plan.slot_nbytes:
            return np.zeros(numbers.shape, np.int64)
        slabs, places = np.divmod(numbers.astype(np.int64, copy=False), plan.slots_per_slab)
        first = self._memory.base + plan.offset
        addresses: NDArray[np.int64] = first + slabs * plan.slab_pitch + places * plan.slot_nbytes
        return addresses

    def are_registered(self, group: int, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each slot whether copies may go there directly, bool in the shape of `slots`.

        The answer for a published slot does not change. True for all without a registrar, and for a group without
        tensors; False for slots of refused slabs, and for those not published yet or that do not exist.
        """
        self._find_group(group)
        return self._mapper.are_registered(group, np.asarray(slots))

    @property
    def pacer(self) -> StepPacer:
        """Return what paces registrations: tell it of the engine's steps."""
        return self._pacer

    @property
    def quarantine_reason(self) -> str:
        """Return why the arena was quarantined; empty if it was not."""
        return self._quarantine_reason

    def pause_registration(self, timeout_s: float = PAUSE_TIMEOUT_S) -> bool:
        """Let no call of the registrar begin before `resume_registration`; mapping goes on, and so does `close`.

        Returns True when no call is running, and False if one still is at the deadline; no other begins then either.
        Pauses add up: each, also one that returned False, needs its own `resume_registration`.
        """
        return self._mapper.registration.pause(timeout_s)

    def resume_registration(self) -> None:
        """End one pause; harmless without one."""
        self._mapper.registration.resume()

    def cancel_registration(self) -> None:
        """Page-lock nothing any more after the slab that is under way; the rest is published as it is. Never blocks."""
        self._mapper.registration.cancel()

    def take_published(self) -> list[SlotRange]:
        """Return the slots published since the last call, each once. Never blocks."""
        return self._mapper.take_published()

    def num_published(self, group: int) -> int:
        """Return how many slots of a group became usable."""
        self._find_group(group)
        return self._mapper.num_published(group)

    def wait_published(self, timeout_s: float) -> bool:
        """Wait until every group with tensors has a slot.

        False at the deadline, at once if a group can get none because its slabs are lost, and when the arena closes.
        """
        return self._mapper.wait_published(timeout_s)

    def wait_mapped(self, timeout_s: float) -> bool:
        """Wait until every slab is published or lost; False at the deadline, and when the arena closes before."""
        return self._mapper.wait_mapped(timeout_s)

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until every slab that is not lost can be copied to directly.

        False at the deadline, and at once where that cannot come true any more: a slab was refused, registration was
        cancelled or is off, or the arena closes.
        """
        return self._mapper.wait_registered(timeout_s)

    def read_residency(self) -> Residency | None:
        """Return what the kernel says is in memory, and in huge pages; None if it does not tell. Takes milliseconds."""
        return self._memory.read_residency() if not self.closed else None

    def statistics(self) -> ArenaStatistics:
        """Return how far the arena is mapped and page-locked."""
        lost = self._mapper.lost_slabs()
        waiting = self._mapper.slabs_without_room()
        registered_nbytes, staged_nbytes = (0, 0) if self.closed else self._mapper.registered_nbytes()
        registration = self._mapper.registration
        return ArenaStatistics(
            state=self._state,
            backing=self._backing,
            nbytes=self.nbytes,
            mapped_nbytes=self.mapped_nbytes,
            lost_nbytes=sum(slab.resident_nbytes for slab, _ in lost),
            waiting_nbytes=sum(slab.resident_nbytes for slab, _ in waiting),
            num_slabs=len(self._plan.slabs),
            num_lost_slabs=len(lost),
            num_slots=tuple(group.num_slots for group in self._plan.groups),
            num_published=tuple(self._mapper.num_published(group.group) for group in self._plan.groups),
            lost_reason=next((reason for _, reason in lost + waiting), ""),
            placement_notes=self._memory.placement_notes,
            registered_nbytes=registered_nbytes,
            staged_nbytes=staged_nbytes,
            failed_registrations=registration.num_failures,
            registration_mode=registration.mode,
            registration_reason=registration.reason,
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Stop mapping, unregister and unmap everything, close the descriptors; return whether that was done.

        Caller: no copy touches the memory any more, and the device still lives. The mapping thread ends after at most
        one 2 MiB write or one call of the registrar. If it does not by the deadline, if not every registered range is
        proven unregistered by then, or if the memory cannot be unmapped, the arena is quarantined and the answer is
        False, as for an arena that was quarantined before, or that another thread is still closing. A second call is
        harmless. The deadline is for the threads; unregistering takes 20 ms a GB (H200 host), unmapping 3 ms a GB in
        huge pages and 60 ms a GB of memfd (2-core machine).
        """
        deadline = time.monotonic() + timeout_s
        if not self._close_lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        event = None
        try:
            if self._state not in (ArenaState.CLOSED, ArenaState.QUARANTINED) and (reason := self._give_back(deadline)):
                _log.warning("%r is kept until the process ends: %s", self, reason)
                event = self._keep(reason, ())
        finally:
            self._close_lock.release()
        if event is not None:
            notify(self._observer, event)
        return self.closed

    def quarantine(self, reason: str, *, keep_alive: tuple[object, ...] = ()) -> None:
        """Keep the memory mapped until the process ends, because a copy may still touch it; stops mapping.

        `keep_alive` is kept as long: what else a late copy needs, such as the layout that owns the device tensors. May
        be called again to keep more. Raises `ClosedError` if the memory was given back already.
        """
        with self._close_lock:  # another holder is in `close`, which ends by its deadline
            if self.closed:
                raise ClosedError(f"{self!r} is unmapped already: quarantine an arena instead of closing it")
            event = self._keep(reason, keep_alive)
        if event is not None:
            notify(self._observer, event)

    def _forked(self) -> None:
        """Be closed in a forked child: the memory is the parent's and not mapped here, and there are no threads."""
        self._close_lock = threading.Lock()
        self._pacer.forked()
        self._mapper.forked()
        self._memory.forked()
        self._state = ArenaState.CLOSED

    def _give_back(self, deadline: float) -> str:
        """Return why the memory could not be given back, or nothing."""
        if self._state is not ArenaState.CLOSING:  # a close that was interrupted is taken up again
            self._move(ArenaState.CLOSING)
        self._mapper.stop()
        if not self._mapper.join(max(0.0, deadline - time.monotonic())):
            call = self._mapper.registration.current_call
            return f"{call} did not end in time" if call else "the thread that maps it did not stop in time"
        if reason := self._mapper.registration.unregister_all(max(0.0, deadline - time.monotonic())):
            return reason
        try:
            self._memory.close()
        except (KvmoorError, OSError) as error:
            return str(error)
        self._move(ArenaState.CLOSED)
        return ""

    def _keep(self, reason: str, keep_alive: tuple[object, ...]) -> ArenaQuarantined | None:
        """Move to QUARANTINED; return what to report, or nothing if it was quarantined before."""
        self._mapper.stop()
        if self._state is ArenaState.QUARANTINED:
            if keep_alive:
                keep_until_exit(QuarantinedArena(self, reason, 0, keep_alive))
            return None
        self._move(ArenaState.QUARANTINED)
        self._quarantine_reason = reason
        nbytes = self.mapped_nbytes
        keep_until_exit(QuarantinedArena(self, reason, nbytes, keep_alive))
        return ArenaQuarantined(nbytes, reason)

    def _move(self, state: ArenaState) -> None:
        """Change the state; the only place that does."""
        assert state in LEGAL_MOVES[self._state], f"an arena cannot go from {self._state.value} to {state.value}"
        self._state = state

    def _find_group(self, group: int) -> GroupPlan:
        if not 0 <= group < len(self._plan.groups):
            raise RequestError(f"group {group} does not exist: the arena has groups 0 to {len(self._plan.groups) - 1}")
        return self._plan.groups[group]

    def _wait_eager(self, *, registers: bool) -> None:
        if not self._mapper.wait_tried(_EAGER_STALL_S):
            call = self._mapper.registration.current_call
            rival = 'page-locks memory, or pass pin="background"' if registers else "takes memory"
            raise BrokenError(
                f"opening host memory got nowhere for {_EAGER_STALL_S:g} s ({call or 'mapping'}): look for what else "
                f"on this machine {rival}"
            )

    def _check_every_group_has_slots(self) -> None:
        if not self._mapper.wait_published(0.0):
            slab, reason = (self._mapper.lost_slabs() + self._mapper.slabs_without_room())[0]
            raise NoRoomError(f"no slot of group {slab.group} could be mapped: {reason}")
