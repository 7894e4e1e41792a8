"""Which device blocks are no longer what vLLM takes them for."""

from types import SimpleNamespace

from kvmoor.integrations.vllm.stale_blocks import blocks_behind, forget_window_blocks


def status(*groups):
    """Return the books of a request: for each group how many chunks are stored, and its block ids."""
    states = [SimpleNamespace(next_stored_chunk_idx=stored, block_ids=ids) for stored, ids in groups]
    return SimpleNamespace(group_states=states)


def test_stored_blocks_of_windows_are_forgotten() -> None:
    """They may be others' by now; what was not stored yet vLLM follows itself, and other groups keep theirs."""
    request = status((2, [1, 2, 3]), (2, [4, 5, 6]))

    forget_window_blocks([request], [1], 1)

    assert [[1, 2, 3], [0, 0, 6]] == [state.block_ids for state in request.group_states]


def test_stored_chunks_may_be_ahead_of_the_blocks() -> None:
    """A preempted request has no blocks, and none are made up; chunks count as many blocks as they have."""
    preempted, running = status((3, [])), status((1, [7, 8, 9]))

    forget_window_blocks([preempted, running], [0], 2)

    assert [] == preempted.group_states[0].block_ids
    assert [0, 0, 9] == running.group_states[0].block_ids


def test_what_follows_a_block_that_was_not_filled_is_spoiled() -> None:
    """From the first such block of each request on, and the blocks themselves if nobody has them any more."""
    assert {3, 4, 5, 9} == blocks_behind({3, 9}, [[1, 2, 3, 4, 0], [1, 2, 3, 5], [1, 6], []])
