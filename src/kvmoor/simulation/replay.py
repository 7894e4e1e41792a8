"""Replay a trace through the index and the policies that `Offloader` uses: not a model of them.

A request is atomic: it looks up the longest prefix that is there, then it stores the rest. Its own blocks cannot be
its victims; if they do not all fit, its leading ones are stored. The cache starts empty, and only full blocks count.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from kvmoor.block_key import DIGEST_NBYTES, BlockKey
from kvmoor.errors import SettingsError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.simulation.trace import FIRST, Trace
from kvmoor.transfer_messages import SlotRange


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Say what came of one replay."""

    policy: str
    capacity_blocks: int
    hit_blocks: int
    """Blocks of all prompts that did not have to be computed."""
    hit_tokens: int
    stored_blocks: int
    """Blocks written into the cache."""
    evicted_blocks: int
    unreachable_blocks: int
    """The most blocks at any time that were cached while the one right in front of them was not: memory without use."""
    seconds: float
    """How long the replay took."""


class Replayer:
    """Replay one trace with any number of policies and capacities."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._keys = [BlockKey(_digest(number)) for number in range(trace.num_unique_blocks)]

    def replay(
        self, capacity_blocks: int, *, policy: str = "lru", on_progress: Callable[[int], None] | None = None
    ) -> ReplayResult:
        """Replay the trace through a cache of `capacity_blocks` blocks that starts empty.

        `on_progress` is told after each request how many blocks it referred to. A capacity of 0 saves nothing.
        """
        if capacity_blocks < 0:
            raise SettingsError(f"the capacity is {capacity_blocks} blocks: give 0 or more")
        if policy not in POLICIES:
            raise SettingsError(f"there is no policy {policy!r}: choose from {', '.join(POLICIES)}")
        started = perf_counter()
        index = BlockIndex(1, POLICIES[policy])
        index.publish(SlotRange(0, 0, capacity_blocks))
        reachability = _Reachability(self._trace)
        hit_blocks = stored_blocks = 0
        for request in self._trace.requests:
            keys = [self._keys[block] for block in request.blocks.tolist()]
            match = index.match(keys)
            hit_blocks += len(match.keys)
            index.complete(match)
            # Nothing is leased now, so as many leading blocks fit as there are slots.
            store = index.prepare_store(keys[:capacity_blocks])
            assert store is not None, "the leading blocks always fit"
            stored_blocks += index.complete(store)
            reachability.note(evicted=store.evicted_keys, stored=store.keys)
            if on_progress is not None:
                on_progress(len(keys))
        return ReplayResult(
            policy=policy,
            capacity_blocks=capacity_blocks,
            hit_blocks=hit_blocks,
            hit_tokens=hit_blocks * self._trace.block_size,
            stored_blocks=stored_blocks,
            evicted_blocks=index.num_evicted,
            unreachable_blocks=reachability.most_unreachable,
            seconds=perf_counter() - started,
        )


class _Reachability:
    """Count the cached blocks whose predecessor is not cached."""

    def __init__(self, trace: Trace) -> None:
        self._predecessors = trace.predecessors.tolist()
        self._cached = bytearray(trace.num_unique_blocks)
        self._num_cached_behind = [0] * trace.num_unique_blocks
        self._num_unreachable = 0
        self.most_unreachable = 0

    def note(self, *, evicted: Iterable[BlockKey], stored: Iterable[BlockKey]) -> None:
        """Note what one store changed."""
        predecessors, cached, num_behind = self._predecessors, self._cached, self._num_cached_behind
        for key in evicted:
            block = _number(key)
            before = predecessors[block]
            cached[block] = 0
            self._num_unreachable += num_behind[block]
            if before != FIRST:
                num_behind[before] -= 1
                self._num_unreachable -= not cached[before]
        for key in stored:
            block = _number(key)
            before = predecessors[block]
            cached[block] = 1
            self._num_unreachable -= num_behind[block]
            if before != FIRST:
                num_behind[before] += 1
                self._num_unreachable += not cached[before]
        self.most_unreachable = max(self.most_unreachable, self._num_unreachable)


def _digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_NBYTES, "little")


def _number(key: BlockKey) -> int:
    return int.from_bytes(key.digest, "little")
