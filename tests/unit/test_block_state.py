"""A block goes from state to state only as the table says."""

import numpy as np
import pytest

from kvmoor.index.block_state import BlockState, BlockStates
from kvmoor.index.slot_arrays import NO_SLOT, NO_SLOTS, Slots

PATHS = {
    BlockState.ABSENT: [],
    BlockState.WRITING: [BlockState.WRITING],
    BlockState.READY: [BlockState.WRITING, BlockState.READY],
    BlockState.EVICTED: [BlockState.WRITING, BlockState.READY, BlockState.EVICTED],
    BlockState.FAILED: [BlockState.WRITING, BlockState.FAILED],
}


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def states_with(num_slots: int, slots: Slots, state: BlockState) -> BlockStates:
    """Return states in which `slots` have come to `state` and all others are ABSENT."""
    states = BlockStates()
    states.grow(num_slots)
    origin = BlockState.ABSENT
    for step in PATHS[state]:
        states.move(slots, origin, step)
        origin = step
    return states


@pytest.mark.parametrize("start", BlockState)
@pytest.mark.parametrize("end", BlockState)
def test_states_move_only_as_the_table_says(start: BlockState, end: BlockState) -> None:
    """Each legal move works, every other one is caught and changes nothing, and the counts follow."""
    legal = {
        (BlockState.ABSENT, BlockState.WRITING),
        (BlockState.WRITING, BlockState.READY),
        (BlockState.WRITING, BlockState.FAILED),
        (BlockState.READY, BlockState.EVICTED),
        (BlockState.EVICTED, BlockState.ABSENT),
        (BlockState.FAILED, BlockState.ABSENT),
    }
    states = states_with(3, slots_of(0, 2), start)
    if (start, end) in legal:
        states.move(slots_of(2, 0), start, end)
        assert [end, BlockState.ABSENT, end] == [states[slot] for slot in range(3)]
        assert 2 + (end is BlockState.ABSENT) == states.count(end)
        assert (start is BlockState.ABSENT) == states.count(start)
    else:
        with pytest.raises(AssertionError, match=f"no slot may go from {start.name} to {end.name}"):
            states.move(slots_of(2, 0), start, end)
        assert [start, BlockState.ABSENT, start] == [states[slot] for slot in range(3)]
    states.check_invariants()


@pytest.mark.parametrize("actual", [state for state in BlockState if state is not BlockState.WRITING])
def test_a_slot_moves_only_from_where_it_is(actual: BlockState) -> None:
    """If one of several slots is not in the state that it is moved from, none moves."""
    states = states_with(3, slots_of(1), actual)
    states.move(slots_of(0, 2), BlockState.ABSENT, BlockState.WRITING)

    with pytest.raises(AssertionError, match="are not WRITING"):
        states.move(slots_of(0, 1, 2), BlockState.WRITING, BlockState.READY)

    assert [BlockState.WRITING, actual, BlockState.WRITING] == [states[slot] for slot in range(3)]
    states.check_invariants()


def test_no_slot_is_absent_whatever_the_others_are() -> None:
    """The number that stands for no slot is ABSENT, before and after the states have grown."""
    states = BlockStates()
    for num_slots in (0, 1, 2, 3, 100):
        states.grow(num_slots)
        every_slot = np.arange(num_slots, dtype=np.int32)
        absent = every_slot[states.are(every_slot, BlockState.ABSENT)]
        states.move(absent, BlockState.ABSENT, BlockState.WRITING)
        assert [True, False] == [
            bool(states.are(slots_of(NO_SLOT), state)[0]) for state in (BlockState.ABSENT, BlockState.WRITING)
        ]
        assert BlockState.ABSENT is states[NO_SLOT]
        states.check_invariants()


def test_many_are_asked_in_the_order_they_are_named() -> None:
    """The answer for several slots is one for each, and for none it is empty."""
    states = states_with(4, slots_of(1, 3), BlockState.READY)

    assert [True, False, True, False] == states.are(slots_of(3, 0, 1, NO_SLOT), BlockState.READY).tolist()
    assert [] == states.are(NO_SLOTS, BlockState.READY).tolist()
    states.move(NO_SLOTS, BlockState.READY, BlockState.EVICTED)
    assert 2 == states.count(BlockState.READY)


def test_growing_keeps_what_is_there() -> None:
    """Slots that are added are ABSENT, the others stay as they were, and fewer slots change nothing."""
    states = states_with(2, slots_of(0, 1), BlockState.READY)

    for num_slots in (3, 50, 7, 0):
        states.grow(num_slots)

    assert 50 == len(states)
    assert [BlockState.READY, BlockState.READY, BlockState.ABSENT] == [states[slot] for slot in range(3)]
    assert (48, 2) == (states.count(BlockState.ABSENT), states.count(BlockState.READY))
    states.check_invariants()
