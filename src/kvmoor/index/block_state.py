"""The states of a block, and the one place where they change.

    ABSENT -> WRITING -> READY -> EVICTED -> ABSENT
                 `----> FAILED -> ABSENT

A block in a slot may be leased in WRITING (by its store) and in READY (by loads). A READY block whose key is dropped
while loads lease it waits in EVICTED until the last of them ends; an abandoned store waits in FAILED until its copy is
proven over. All others pass through these two at once.
"""

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.index.slot_arrays import Slots


class BlockState(IntEnum):
    """Say what a slot holds. The numbers are bytes of `BlockStates`."""

    ABSENT = 0
    """No block: the slot is free, or not published."""
    WRITING = 1
    """A store fills it; nobody may read it."""
    READY = 2
    """Whole."""
    EVICTED = 3
    """Whole, but its key is gone: leased loads may finish, nobody finds it any more."""
    FAILED = 4
    """Not whole, and a copy may still write to it."""


_LEGAL_MOVES: Final = (
    frozenset({BlockState.WRITING}),
    frozenset({BlockState.READY, BlockState.FAILED}),
    frozenset({BlockState.EVICTED}),
    frozenset({BlockState.ABSENT}),
    frozenset({BlockState.ABSENT}),
)
_STATES: Final = tuple(BlockState)

# An enum looks its members up at each use, which takes longer than all else that a lookup does.
ABSENT: Final = BlockState.ABSENT
WRITING: Final = BlockState.WRITING
READY: Final = BlockState.READY
EVICTED: Final = BlockState.EVICTED
FAILED: Final = BlockState.FAILED


class BlockStates:
    """Keep the state of every slot of one group, one byte each, and how many slots are in each state."""

    def __init__(self) -> None:
        self._num_slots = 0
        self._counts = [0] * len(BlockState)
        # One memory, seen twice: a single byte is read fastest from the one, many from the other. The last is a spare
        # that stays ABSENT, which NO_SLOT leads to.
        self._bytes = bytearray(1)
        self._array = np.frombuffer(self._bytes, np.uint8)

    def __len__(self) -> int:
        return self._num_slots

    def __getitem__(self, slot: int) -> BlockState:
        return _STATES[self._bytes[slot]]

    def grow(self, num_slots: int) -> None:
        """Make room for slots up to ``num_slots - 1``, ABSENT at first."""
        if num_slots >= len(self._bytes):
            self._bytes = self._bytes.ljust(max(num_slots + 1, 2 * len(self._bytes)), b"\0")
            self._array = np.frombuffer(self._bytes, np.uint8)
        self._counts[BlockState.ABSENT] += max(0, num_slots - self._num_slots)
        self._num_slots = max(num_slots, self._num_slots)

    def count(self, state: BlockState) -> int:
        """Return how many slots are in a state."""
        return self._counts[state]

    def are(self, slots: Slots, state: BlockState) -> NDArray[np.bool_]:
        """Return which of `slots` are in a state; `NO_SLOT` is ABSENT."""
        # int(): of an enum numpy asks first, at length, whether it is an array.
        found: NDArray[np.bool_] = self._array.take(slots) == int(state)
        return found

    def move(self, slots: Slots, origin: BlockState, to: BlockState) -> None:
        """Move `slots`, which are all in `origin`, to another state.

        Nothing else changes one; a move outside the table is our own bug.
        """
        if not len(slots):
            return
        assert to in _LEGAL_MOVES[origin], f"no slot may go from {origin.name} to {to.name}"
        num_there = self._array.take(slots).tobytes().count(origin)
        assert num_there == len(slots), f"{len(slots) - num_there} of slots {slots} are not {origin.name}"
        self._array[slots] = int(to)
        self._counts[origin] -= len(slots)
        self._counts[to] += len(slots)

    def check_invariants(self) -> None:
        """Raise AssertionError if a count is wrong; for tests."""
        counted = np.bincount(self._array[: self._num_slots], minlength=len(BlockState)).tolist()
        assert counted == self._counts, f"{counted} slots are in the states, the books say {self._counts}"
        assert not self._array[self._num_slots :].any(), "a slot that does not exist has a state"
