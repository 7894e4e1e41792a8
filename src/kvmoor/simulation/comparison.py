"""Replay one trace at several capacities, with several policies, and hold each against the offline optimum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvmoor.simulation.offline_optimum import OfflineOptimum
from kvmoor.simulation.replay import Replayer, ReplayResult
from kvmoor.simulation.tiered_replay import TieredReplayer, TieredResult, TierPlan
from kvmoor.simulation.trace import Trace

Result = TypeVar("Result", ReplayResult, TieredResult)


@dataclass(frozen=True, slots=True)
class ComparedReplay(Generic[Result]):
    """Hold a replay against what was possible."""

    replay: Result
    optimum_hit_blocks: int
    """What the best cache finds that is as large as all tiers together; see `OfflineOptimum`."""
    hit_ratio: float
    """Tokens of hit blocks by all tokens of all prompts."""
    optimum_hit_ratio: float

    @property
    def share_of_optimum(self) -> float:
        """Return the hits by those of the optimum; 1 if there was nothing to find."""
        return self.replay.hit_blocks / self.optimum_hit_blocks if self.optimum_hit_blocks else 1.0


def compare(
    trace: Trace,
    capacities_blocks: Sequence[int],
    policies: Sequence[str] = ("lru",),
    *,
    on_progress: Callable[[int], None] | None = None,
) -> list[ComparedReplay[ReplayResult]]:
    """Replay with each policy at each capacity, ascending. `on_progress` is told how many blocks were referred to."""
    replayer = Replayer(trace)
    return _compare(
        trace,
        capacities_blocks,
        policies,
        lambda capacity, policy: replayer.replay(capacity, policy=policy, on_progress=on_progress),
    )


def compare_tiers(
    trace: Trace,
    capacities_blocks: Sequence[int],
    plan: TierPlan,
    policies: Sequence[str] = ("lru",),
    *,
    on_progress: Callable[[int], None] | None = None,
) -> list[ComparedReplay[TieredResult]]:
    """Do the same with tiers around host memory, whose capacities and policies these are."""
    replayer = TieredReplayer(trace)
    return _compare(
        trace,
        capacities_blocks,
        policies,
        lambda capacity, policy: replayer.replay(capacity, plan, policy=policy, on_progress=on_progress),
        blocks_beside=plan.device_blocks + plan.disk_blocks,
    )


def _compare(
    trace: Trace,
    capacities_blocks: Sequence[int],
    policies: Sequence[str],
    replay: Callable[[int, str], Result],
    blocks_beside: int = 0,
) -> list[ComparedReplay[Result]]:
    optimum = OfflineOptimum(trace)
    possible = {capacity: optimum.hit_blocks(capacity + blocks_beside) for capacity in sorted(set(capacities_blocks))}
    num_tokens = max(1, trace.num_tokens)
    compared = []
    for policy in dict.fromkeys(policies):
        for capacity, most in possible.items():
            result = replay(capacity, policy)
            hit_ratio = result.hit_tokens / num_tokens
            compared.append(ComparedReplay(result, most, hit_ratio, most * trace.block_size / num_tokens))
    return compared
