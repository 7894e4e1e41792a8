"""Replay a trace through the index and the policies that `Offloader` uses: not a model of them.

A request is atomic: it looks up the longest prefix that is there, then it stores the rest. Its own blocks cannot be
its victims; if they do not all fit, its leading ones are stored. The cache starts empty, and only full blocks count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from kvmoor.errors import SettingsError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.policies import POLICIES, PolicyFactory
from kvmoor.simulation.reachability import Reachability
from kvmoor.simulation.trace import Trace
from kvmoor.simulation.trace_keys import TraceKeys, numbers_of
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
        self._keys = TraceKeys(trace)

    def replay(
        self, capacity_blocks: int, *, policy: str = "lru", on_progress: Callable[[int], None] | None = None
    ) -> ReplayResult:
        """Replay the trace through a cache of `capacity_blocks` blocks that starts empty.

        `on_progress` is told after each request how many blocks it referred to. A capacity of 0 saves nothing.
        """
        started = perf_counter()
        # More slots than there are blocks change nothing but the memory that the replay takes.
        index = new_index(min(capacity_blocks, self._trace.num_unique_blocks), policy_named(policy))
        reachability = Reachability(self._trace)
        hit_blocks = stored_blocks = 0
        for request in self._trace.requests:
            keys = self._keys.of_blocks(request.blocks)
            match = index.match(keys)
            hit_blocks += len(match)
            index.complete(match)
            # Nothing is leased now, so as many leading blocks fit as there are slots.
            store = index.prepare_store(keys[:capacity_blocks])
            assert store is not None, "the leading blocks always fit"
            stored_blocks += index.complete(store)
            reachability.note(
                evicted=numbers_of(digest for _, digests in store.evicted for digest in digests),
                stored=numbers_of(digest for part in store.parts for digest in part.digests),
            )
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


def policy_named(name: str) -> PolicyFactory:
    """Return what makes the policies of a name. Raises `SettingsError` for an unknown one."""
    if name not in POLICIES:
        raise SettingsError(f"there is no policy {name!r}: choose from {', '.join(POLICIES)}")
    return POLICIES[name]


def new_index(capacity_blocks: int, policy: PolicyFactory) -> BlockIndex:
    """Return an empty index with so many slots. Raises `SettingsError` for fewer than none."""
    if capacity_blocks < 0:
        raise SettingsError(f"the capacity is {capacity_blocks} blocks: give 0 or more")
    index = BlockIndex(1, policy)
    index.publish(SlotRange(0, 0, capacity_blocks))
    return index
