"""Leases: a held right to fill or to read slots, resolved exactly once.

    store:  OPEN -> COMPLETED | ABORTED | HELD -> RELEASED
    load:   OPEN -> COMPLETED | ABORTED

Only the `BlockIndex` that gave a lease changes it. Whoever asked for it owns it and has to resolve it, on every path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvmoor.block_key import BlockKey


class LeaseState(Enum):
    """Say what became of a lease; the values finish the sentence "the lease ..."."""

    OPEN = "is open"
    COMPLETED = "was completed"
    ABORTED = "was aborted"
    HELD = "is held"
    """The store was given up, but its copy may still write: the slots wait for `release_held`."""
    RELEASED = "was held and released"


class LeaseOwner(Protocol):
    """Give leases and take them back: `BlockIndex`."""

    def keep(self, lease: "LoadLease", num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks of an open lease."""


@dataclass(slots=True, eq=False)
class Lease:
    """Hold the right to one slot for each key. Its fields are set by its owner only; no two leases are equal."""

    owner: LeaseOwner = field(repr=False)
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    """The slot of each key, in the group of the key."""
    state: LeaseState = field(default=LeaseState.OPEN, init=False)

    @property
    def resolved(self) -> bool:
        """Say whether the lease is over; a held one is resolved too, only its slots are not free yet."""
        return self.state is not LeaseState.OPEN

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.keys)} blocks, {self.state.name.lower()}>"


@dataclass(slots=True, eq=False, repr=False)
class StoreLease(Lease):
    """Hold slots that a store fills: `keys` are those of the call that were not known, in the order of the call."""

    call_keys: Sequence[BlockKey]
    """All keys of the call."""
    evicted_keys: Sequence[BlockKey]
    """What gave way for this store, oldest first in each group."""

    @property
    def num_known(self) -> int:
        """Return how many keys of the call were ready or being written already; the store leaves them out."""
        return len(self.call_keys) - len(self.keys)


@dataclass(slots=True, eq=False, repr=False)
class LoadLease(Lease):
    """Hold slots that a load reads; they stay as they are until it is resolved, even if their keys are dropped."""

    def keep(self, num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks now; called under the lock of the index, like all it does.

        Raises `RequestError`, with nothing changed, for a number outside ``0 .. len(keys)`` and for a resolved lease.
        """
        self.owner.keep(self, num_blocks)
