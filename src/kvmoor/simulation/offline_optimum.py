"""The best that any cache of one size can do on a trace, because it knows the future: Belady's rule for prefixes.

After each request the cache keeps, of what it has and of the request's own blocks, those that are used again soonest;
of blocks that are used again at the same time the deeper ones give way first. It may decline to keep a block, which
an online policy cannot do as wisely. A block is never used again before the blocks in front of it, so the blocks that
are kept are always whole prefixes, and no other choice has more hits.

So it is enough to count how many cached blocks are used next by request j: they are its first blocks, and its hits.
What gives way is counted off from the request furthest in the future. The work is proportional to the runs of blocks
with one next use, not to the blocks.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from kvmoor.errors import SettingsError
from kvmoor.simulation.trace import Trace


class OfflineOptimum:
    """Count the hits of the offline optimum on one trace, for any number of capacities."""

    def __init__(self, trace: Trace) -> None:
        self._next_uses = _next_uses(trace)

    def hit_blocks(self, capacity_blocks: int) -> int:
        """Return how many blocks the best cache of a size finds, from a cold start to the end of the trace."""
        if capacity_blocks < 0:
            raise SettingsError(f"the capacity is {capacity_blocks} blocks: give 0 or more")
        cached = [0] * len(self._next_uses)  # by the request that uses the blocks next
        furthest: list[int] = []  # a heap of the negated requests with cached blocks, and of some past ones
        num_cached = num_hits = 0
        for request, runs in enumerate(self._next_uses):
            num_hits += cached[request]
            num_cached -= cached[request]
            cached[request] = 0
            for next_use, length in runs:
                if not cached[next_use]:
                    heappush(furthest, -next_use)
                cached[next_use] += length
                num_cached += length
            while num_cached > capacity_blocks:
                victim = -furthest[0]
                evicted = min(num_cached - capacity_blocks, cached[victim])
                cached[victim] -= evicted
                num_cached -= evicted
                if not cached[victim]:
                    heappop(furthest)
        return num_hits


def _next_uses(trace: Trace) -> Sequence[Sequence[tuple[int, int]]]:
    """Return of each request the runs of blocks with one next use, as (request, number of blocks).

    Blocks that are never used again are left out: keeping them gains nothing.
    """
    never = len(trace.requests)
    next_use = np.full(trace.num_unique_blocks, never, np.int64)
    runs: list[list[tuple[int, int]]] = [[] for _ in trace.requests]
    for number in range(never - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses = next_use[blocks]
        next_use[blocks] = number
        starts = np.flatnonzero(np.diff(uses, prepend=-1))
        lengths = np.diff(starts, append=len(uses))
        found = zip(uses[starts].tolist(), lengths.tolist(), strict=True)
        runs[number] = [(use, length) for use, length in found if use != never]
    return runs
