"""A block goes from state to state only as the table says."""

import pytest

from kvmoor.index.block_state import BlockState, BlockStates


def test_states_move_only_as_the_table_says() -> None:
    """Each legal move works, every other one is caught, and the counts follow."""
    legal = {
        (BlockState.ABSENT, BlockState.WRITING),
        (BlockState.WRITING, BlockState.READY),
        (BlockState.WRITING, BlockState.FAILED),
        (BlockState.READY, BlockState.EVICTED),
        (BlockState.EVICTED, BlockState.ABSENT),
        (BlockState.FAILED, BlockState.ABSENT),
    }
    path = {
        BlockState.ABSENT: [],
        BlockState.WRITING: [BlockState.WRITING],
        BlockState.READY: [BlockState.WRITING, BlockState.READY],
        BlockState.EVICTED: [BlockState.WRITING, BlockState.READY, BlockState.EVICTED],
        BlockState.FAILED: [BlockState.WRITING, BlockState.FAILED],
    }
    for start in BlockState:
        for end in BlockState:
            states = BlockStates()
            states.grow(2)
            for step in path[start]:
                states.move([1], step)
            if (start, end) in legal:
                states.move([1], end)
                assert end is states[1]
                assert BlockState.ABSENT is states[0]
                assert (end is BlockState.ABSENT) + 1 == states.count(BlockState.ABSENT)
            else:
                with pytest.raises(AssertionError, match=f"may not go from {start.name} to {end.name}"):
                    states.move([1], end)
            states.check_invariants()
