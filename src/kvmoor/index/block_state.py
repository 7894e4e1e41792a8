"""The states of a block, and the one place where they change.

    ABSENT -> WRITING -> READY -> EVICTED -> ABSENT
                 `----> FAILED -> ABSENT

A block in a slot may be leased in WRITING (by its store) and in READY (by loads). A READY block whose key is dropped
while loads lease it waits in EVICTED until the last of them ends; an abandoned store waits in FAILED until its copy is
proven over. All others pass through these two at once.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final


class BlockState(IntEnum):
    """Say what a slot holds. The numbers are indices of the table below and bytes of `BlockStates`."""

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


class BlockStates:
    """Keep the state of every slot of one group, one byte each, and how many slots are in each state."""

    def __init__(self) -> None:
        self._states = bytearray()
        self._counts = [0] * len(BlockState)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, slot: int) -> BlockState:
        return BlockState(self._states[slot])

    def grow(self, num_slots: int) -> None:
        """Make room for slots up to ``num_slots - 1``, ABSENT at first."""
        added = max(0, num_slots - len(self._states))
        self._states.extend(bytes(added))
        self._counts[BlockState.ABSENT] += added

    def count(self, state: BlockState) -> int:
        """Return how many slots are in a state."""
        return self._counts[state]

    def move(self, slots: Iterable[int], to: BlockState) -> None:
        """Move each of `slots` to another state. Nothing else changes one; a move outside the table is our own bug."""
        states, counts = self._states, self._counts
        for slot in slots:
            state = states[slot]
            assert to in _LEGAL_MOVES[state], f"slot {slot} may not go from {BlockState(state).name} to {to.name}"
            states[slot] = to
            counts[state] -= 1
            counts[to] += 1

    def check_invariants(self) -> None:
        """Raise AssertionError if a count is wrong; for tests."""
        counted = [self._states.count(state) for state in BlockState]
        assert counted == self._counts, f"{counted} slots are in the states, the books say {self._counts}"
