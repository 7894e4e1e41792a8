"""Device blocks that vLLM still takes for those of a prefix although they are not: two gaps in its own books."""

from collections.abc import Collection, Iterable
from typing import Any


def forget_window_blocks(statuses: Iterable[Any], window_groups: Iterable[int], blocks_per_chunk: int) -> None:
    """Forget, before a reset, which blocks of sliding windows were stored: they may belong to others by now.

    After a reset vLLM offers all chunks of running requests once more, by ids that it keeps up to date only where it
    has not stored yet. An id of 0 is passed over.
    """
    groups = tuple(window_groups)
    for status in statuses:
        for group in groups:
            state = status.group_states[group]
            stored = min(state.next_stored_chunk_idx * blocks_per_chunk, len(state.block_ids))
            state.block_ids[:stored] = [0] * stored


def blocks_behind(invalid: Collection[int], tables: Iterable[list[int]]) -> set[int]:
    """Return the blocks that a load failed to fill, and all that requests have computed from them.

    `tables` are the block ids of each request, in order. vLLM computes such requests again but goes on finding these
    blocks in its prefix cache, also if a request is preempted or aborted before it is through.
    """
    spoiled = set(invalid)
    for table in tables:
        first = next((place for place, block in enumerate(table) if block in invalid), len(table))
        spoiled.update(table[first:])
    spoiled.discard(0)
    return spoiled
