"""Replay one trace at several capacities, with several policies, and hold each against the offline optimum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmoor.simulation.offline_optimum import OfflineOptimum
from kvmoor.simulation.replay import Replayer, ReplayResult
from kvmoor.simulation.trace import Trace


@dataclass(frozen=True, slots=True)
class ComparedReplay:
    """Hold a replay against what was possible."""

    replay: ReplayResult
    optimum_hit_blocks: int
    """What the best cache of this capacity finds; see `OfflineOptimum`."""
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
) -> list[ComparedReplay]:
    """Replay with each policy at each capacity, ascending. `on_progress` is told how many blocks were referred to."""
    optimum = OfflineOptimum(trace)
    replayer = Replayer(trace)
    possible = {capacity: optimum.hit_blocks(capacity) for capacity in sorted(set(capacities_blocks))}
    num_tokens = max(1, trace.num_tokens)
    compared = []
    for policy in dict.fromkeys(policies):
        for capacity, most in possible.items():
            replay = replayer.replay(capacity, policy=policy, on_progress=on_progress)
            hit_ratio = replay.hit_tokens / num_tokens
            compared.append(ComparedReplay(replay, most, hit_ratio, most * trace.block_size / num_tokens))
    return compared
