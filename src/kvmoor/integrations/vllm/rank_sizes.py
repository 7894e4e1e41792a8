"""What ranks say of their host memory at start, and what it makes of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmoor.errors import SettingsError


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Say what one rank has room for: `num_slots` of each group in the end; None if it reads those of another rank.

    `shape` is what has to be the same on all ranks, for their parts of a block to belong together.
    """

    rank: int
    num_slots: tuple[int, ...] | None
    shape: tuple[object, ...]


def least_slots(ranks: Sequence[RankSizes], *, num_ranks: int) -> tuple[int, ...]:
    """Return how many slots each group has on every rank that keeps some.

    Raises `SettingsError` for ranks that do not fit together.
    """
    if len(ranks) != num_ranks:
        raise SettingsError(
            f"{len(ranks)} of {num_ranks} ranks said how much host memory they have: vLLM mixes up the ranks of "
            "prefill context parallelism without decode context parallelism; run without it"
        )
    if len({each.shape for each in ranks}) > 1:
        found = "; ".join(f"rank {each.rank}: {each.shape}" for each in ranks)
        raise SettingsError(f"the ranks do not lay out blocks alike ({found}): install one version on all hosts")
    return tuple(map(min, zip(*(each.num_slots for each in ranks if each.num_slots is not None), strict=True)))
