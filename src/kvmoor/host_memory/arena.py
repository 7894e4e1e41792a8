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
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvmoor.byte_sizes import format_nbytes
from kvmoor.errors import ClosedError, KvmoorError, NoRoomError, RequestError, SettingsError
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits, read_memory_limits
from kvmoor.host_memory.memfd import MAX_NAME_NBYTES
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.quarantine import QuarantinedArena, keep_until_exit
from kvmoor.host_memory.slab_mapper import SlabMapper
from kvmoor.host_memory.slab_memory import Backing, SlabMemory
from kvmoor.observation import ArenaQuarantined, Observer, SilentObserver, notify
from kvmoor.transfer_messages import SlotRange

_log = logging.getLogger("kvmoor")

CLOSE_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the mapping thread unless told otherwise; the thread needs milliseconds to stop."""
_MAX_EAGER_THREADS: Final = 8
"""16 threads map 16 GiB 8 times as fast as one (H200 host); fewer were not measured there."""


class ArenaState(Enum):
    """Say where in its life an arena is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    QUARANTINED = "quarantined"


_LEGAL_MOVES: Final = {
    ArenaState.OPENING: frozenset({ArenaState.OPEN, ArenaState.CLOSING}),
    ArenaState.OPEN: frozenset({ArenaState.CLOSING, ArenaState.QUARANTINED}),
    ArenaState.CLOSING: frozenset({ArenaState.CLOSED, ArenaState.QUARANTINED}),
    ArenaState.CLOSED: frozenset[ArenaState](),
    ArenaState.QUARANTINED: frozenset[ArenaState](),
}


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Tell how far an arena is mapped."""

    state: ArenaState
    backing: Backing
    nbytes: int
    """What will be resident once everything is mapped."""
    mapped_nbytes: int
    """What is resident and published; 0 once closed."""
    lost_nbytes: int
    """What could not be mapped and never will be."""
    num_slabs: int
    num_lost_slabs: int
    num_slots: tuple[int, ...]
    """For each group: how many slots are planned."""
    num_published: tuple[int, ...]
    """For each group: how many of them became usable."""
    lost_reason: str
    """Why the first lost slab is lost; empty if none is."""


class Arena:
    """Own host memory: map it, hand out the addresses of its slots, give it back or keep it until the process ends.

    With `mapping` "background" the constructor returns at once and a thread publishes slab after slab; "eager" maps all
    before it returns, with several threads. `backing` MEMFD is for an arena that other processes will read. `calls` and
    `read_limits` are replaced in tests.

    Any thread may call any method. Raises `SettingsError` for arguments, `NoRoomError` and `BrokenError` for what the
    system refuses; a constructor that fails leaves nothing behind.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        backing: Backing = Backing.ANONYMOUS,
        mapping: Literal["background", "eager"] = "background",
        observer: Observer | None = None,
        name: str = "arena",
        calls: SystemCalls | None = None,
        read_limits: Callable[[], MemoryLimits] = read_memory_limits,
    ) -> None:
        if mapping not in ("background", "eager"):
            raise SettingsError(f'mapping is {mapping!r}: give "background" or "eager"')
        if not name or "\0" in name or len(name.encode()) > MAX_NAME_NBYTES:
            raise SettingsError(f"the name of an arena is {name!r}: give 1 to {MAX_NAME_NBYTES} bytes of text")
        self._plan = plan
        self._backing = backing
        self._observer: Observer = observer or SilentObserver()
        self._name = name
        # Held by the one thread that closes or quarantines. Guards `_state` once the arena is open.
        self._close_lock = threading.Lock()
        self._state = ArenaState.OPENING
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
            )
            # From here on threads may touch the memory, so giving it back is the business of `close`.
            opened.pop_all()
            opened.callback(self.close)
            if mapping == "eager":
                self._mapper.run()
                self._check_every_group_has_slots()
            else:
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
        """Return how many bytes are resident and published; 0 once closed."""
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

    def resident_nbytes(self) -> int | None:
        """Return how many bytes the kernel says are resident; None if it does not tell. Takes milliseconds."""
        residency = self._memory.read_residency() if not self.closed else None
        return residency.resident_nbytes if residency else None

    def huge_page_nbytes(self) -> int | None:
        """Return how many bytes the kernel says lie in huge pages; None if it does not tell. Takes milliseconds."""
        residency = self._memory.read_residency() if not self.closed else None
        return residency.huge_page_nbytes if residency else None

    def statistics(self) -> ArenaStatistics:
        """Return how far the arena is mapped."""
        lost = self._mapper.lost_slabs()
        return ArenaStatistics(
            state=self._state,
            backing=self._backing,
            nbytes=self.nbytes,
            mapped_nbytes=self.mapped_nbytes,
            lost_nbytes=sum(slab.resident_nbytes for slab, _ in lost),
            num_slabs=len(self._plan.slabs),
            num_lost_slabs=len(lost),
            num_slots=tuple(group.num_slots for group in self._plan.groups),
            num_published=tuple(self._mapper.num_published(group.group) for group in self._plan.groups),
            lost_reason=lost[0][1] if lost else "",
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Stop mapping, unmap everything and close the descriptors; return whether that was done.

        Caller: no copy touches the memory any more. The mapping thread ends after at most one 2 MiB write. If it does
        not by the deadline, or if the memory cannot be unmapped, the arena is quarantined and the answer is False, as
        for an arena that was quarantined before, or that another thread is still closing. A second call is harmless.
        The deadline is for the thread; unmapping takes 3 ms a GB in huge pages, 60 ms a GB of memfd (2-core machine).
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

    def _give_back(self, deadline: float) -> str:
        """Return why the memory could not be given back, or nothing."""
        if self._state is not ArenaState.CLOSING:  # a close that was interrupted is taken up again
            self._move(ArenaState.CLOSING)
        self._mapper.stop()
        if not self._mapper.join(max(0.0, deadline - time.monotonic())):
            return "the thread that maps it did not stop in time"
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
        nbytes = self.mapped_nbytes
        keep_until_exit(QuarantinedArena(self, reason, nbytes, keep_alive))
        return ArenaQuarantined(nbytes, reason)

    def _move(self, state: ArenaState) -> None:
        """Change the state; the only place that does."""
        assert state in _LEGAL_MOVES[self._state], f"an arena cannot go from {self._state.value} to {state.value}"
        self._state = state

    def _find_group(self, group: int) -> GroupPlan:
        if not 0 <= group < len(self._plan.groups):
            raise RequestError(f"group {group} does not exist: the arena has groups 0 to {len(self._plan.groups) - 1}")
        return self._plan.groups[group]

    def _check_every_group_has_slots(self) -> None:
        if not self._mapper.wait_published(0.0):
            slab, reason = self._mapper.lost_slabs()[0]
            raise NoRoomError(f"no slot of group {slab.group} could be mapped: {reason}")
