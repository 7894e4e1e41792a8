"""Leases: a held right to fill or to read slots, resolved exactly once.

    store:  OPEN -> COMPLETED | ABORTED | HELD -> RELEASED
    load:   OPEN -> COMPLETED | ABORTED | EXPIRED

Only the `BlockIndex` that gave a lease changes it. Whoever asked for it owns it and has to resolve it, on every path. A
lease that was given a *holder* (a request, say) ends with it, and one with a deadline ends then, unless a load is under
way.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.index.generation import Generation
from kvmoor.index.slot_arrays import Slots


class LeaseState(Enum):
    """Say what became of a lease; the values finish the sentence "the lease ..."."""

    OPEN = "is open"
    COMPLETED = "was completed"
    ABORTED = "was aborted"
    EXPIRED = "was open past its deadline"
    HELD = "is held"
    """The store was given up, but its copy may still write: the slots wait for `release_held`."""
    RELEASED = "was held and released"


# An enum looks its members up at each use, so the ones of the way that every request takes have names of their own.
OPEN: Final = LeaseState.OPEN
COMPLETED: Final = LeaseState.COMPLETED


@dataclass(frozen=True, slots=True, eq=False)
class LeasePart:
    """The slots of a lease in one group, in the order of the call."""

    group: int
    digests: Sequence[bytes]
    slots: Slots
    positions: NDArray[np.intp]
    """Where in the call the blocks stand."""
    generation: Generation = field(repr=False)

    def __len__(self) -> int:
        return len(self.digests)

    def split(self, num_call_keys: int) -> tuple["LeasePart", "LeasePart"]:
        """Return what stands among the first keys of the call, and the rest."""
        at = int(np.searchsorted(self.positions, num_call_keys))
        return self._piece(slice(None, at)), self._piece(slice(at, None))

    def _piece(self, piece: slice) -> "LeasePart":
        return LeasePart(self.group, self.digests[piece], self.slots[piece], self.positions[piece], self.generation)


@dataclass(frozen=True, slots=True, eq=False)
class StorePart(LeasePart):
    """The slots that a store fills in one group, and all blocks of that group that the call named."""

    new_at: NDArray[np.intp]
    """Where `slots` stand among the blocks of this group that the call named."""
    call_digests: Sequence[bytes]
    call_slots: Slots
    call_fills: NDArray[np.uint32]
    """Which filling of its slot each block was at the time of the call."""


class LeaseOwner(Protocol):
    """Give leases and take them back: `BlockIndex`."""

    def keep(self, lease: "LoadLease", num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks of an open lease."""


@dataclass(slots=True, eq=False)
class Lease:
    """Hold the right to one slot for each key. Its fields are set by its owner only; no two leases are equal."""

    owner: LeaseOwner = field(repr=False)
    parts: Sequence[LeasePart]
    """One for each group that has keys in it."""
    holder: Hashable = None
    deadline_s: float | None = None
    state: LeaseState = field(default=OPEN, init=False)
    in_flight: bool = field(default=False, init=False)
    """Whether a load reads the slots: then neither its holder's end nor a deadline ends the lease."""
    ends_with_load: bool = field(default=False, init=False)
    """Whether its holder or its time has ended since the load began."""

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def keys(self) -> Sequence[BlockKey]:
        """Return the keys in the order of the call."""
        if len(self.parts) == 1:
            return BlockKeys._of(tuple(self.parts[0].digests), self.parts[0].group)  # noqa: SLF001, checked before
        return tuple(BlockKey(digest, group) for digest, group, _ in self._in_order())

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the slot of each key, in the group of the key."""
        return tuple(slot for _, _, slot in self._in_order())

    @property
    def resolved(self) -> bool:
        """Say whether the lease is over; a held one is resolved too, only its slots are not free yet."""
        return self.state is not OPEN

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} blocks, {self.state.name.lower()}>"

    def _in_order(self) -> Iterator[tuple[bytes, int, int]]:
        found = sorted(
            (position, digest, part.group, slot)
            for part in self.parts
            for position, digest, slot in zip(part.positions.tolist(), part.digests, part.slots.tolist(), strict=True)
        )
        return ((digest, group, slot) for _, digest, group, slot in found)


@dataclass(slots=True, eq=False, repr=False)
class StoreLease(Lease):
    """Hold slots that a store fills: `keys` are those of the call that were not known, in the order of the call."""

    parts: Sequence[StorePart]
    call_keys: Sequence[BlockKey] = ()
    """All keys of the call."""
    evicted: Sequence[tuple[int, Sequence[bytes]]] = ()
    """What gave way for this store: digests by group, oldest first."""

    @property
    def evicted_keys(self) -> tuple[BlockKey, ...]:
        """Return the keys of what gave way for this store, oldest first in each group."""
        return tuple(BlockKey(digest, group) for group, digests in self.evicted for digest in digests)

    @property
    def num_evicted(self) -> int:
        """Return how many blocks gave way."""
        return sum(len(digests) for _, digests in self.evicted)

    @property
    def num_known(self) -> int:
        """Return how many keys of the call were ready or being written already; the store leaves them out."""
        return len(self.call_keys) - len(self)


@dataclass(slots=True, eq=False, repr=False)
class LoadLease(Lease):
    """Hold slots that a load reads; they stay as they are until it is resolved, even if their keys are dropped."""

    def keep(self, num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks now; called under the lock of the index, like all it does.

        Raises `RequestError`, with nothing changed, for a number outside ``0 .. len(lease)``, for a resolved lease and
        for one whose load is under way.
        """
        self.owner.keep(self, num_blocks)
