"""Requests that wait for blocks which are being written already, so that nobody fetches a block twice.

A lower tier brings a block up, or a store copies it: its slot is WRITING. Who needs it joins that one transfer instead
of beginning another, and all who joined go on when it ends, however it ends. None waits beyond its own deadline.

    WAITING -> READY | PARTIAL | EXPIRED | CANCELLED
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvmoor.block_key import BlockKey
from kvmoor.index.lease import LoadLease
from kvmoor.index.slot_arrays import Slots


class WaitState(Enum):
    """Say what came of waiting; the values finish the sentence "the blocks ..."."""

    WAITING = "are being written"
    READY = "are all there"
    PARTIAL = "are there up to one whose transfer failed, or that was forgotten"
    EXPIRED = "did not come in time"
    CANCELLED = "are not wanted any more"


@dataclass(slots=True, eq=False)
class Waiter:
    """Wait for the end of transfers that are under way. Its fields are set by the index only."""

    keys: Sequence[BlockKey]
    """What is waited for: a prefix of what was asked for."""
    lease: LoadLease
    """What is there: while waiting, the beginning that was there before; in the end as much as there is. The waiter's
    owner resolves it like any other lease; after CANCELLED it is released."""
    holder: Hashable = None
    deadline_s: float | None = None
    lease_deadline_s: float | None = None
    """When the lease of what is there ends, if its load has not begun."""
    state: WaitState = field(default=WaitState.WAITING, init=False)
    num_pending: int = field(default=0, init=False)
    """Blocks that are being written still."""
    places: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    """Group and slot of all that was waited for."""

    def __repr__(self) -> str:
        return f"<Waiter for {len(self.keys)} blocks, {self.state.name.lower()}, {self.num_pending} pending>"


class WaitingList:
    """Know who waits for which slot. Not thread-safe: called under the lock of the index."""

    def __init__(self) -> None:
        self._by_slot: dict[tuple[int, int], dict[Waiter, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def add(self, waiter: Waiter, group: int, slots: Slots) -> None:
        """Let somebody wait for some slots, which are all WRITING."""
        places = [(group, slot) for slot in slots.tolist()]
        for place in places:
            self._by_slot.setdefault(place, {})[waiter] = None
        waiter.places += places
        waiter.num_pending += len(places)

    def end(self, group: int, slots: Slots) -> list[Waiter]:
        """Note that slots are not WRITING any more; return who waits for nothing else."""
        done = []
        for slot in slots.tolist():
            for waiter in self._by_slot.pop((group, slot), ()):
                waiter.num_pending -= 1
                if not waiter.num_pending:
                    done.append(waiter)
        return done

    def remove(self, waiter: Waiter) -> None:
        """Forget one who waits no longer."""
        for place in waiter.places:
            waiting = self._by_slot.get(place)
            if waiting is not None:
                waiting.pop(waiter, None)
                if not waiting:
                    del self._by_slot[place]

    def clear(self) -> list[Waiter]:
        """Let nobody wait; return who did, each once."""
        waiting = dict.fromkeys(waiter for waiters in self._by_slot.values() for waiter in waiters)
        self._by_slot.clear()
        return list(waiting)
