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
            f"{len(ranks)} of {num_ranks} ranks said how much host memory they have, and all have to: see the logs of "
            "the workers. One known cause is prefill context parallelism without decode context parallelism, whose "
            "ranks vLLM mixes up: run without it"
        )
    if len({each.shape for each in ranks}) > 1:
        found = "; ".join(f"rank {each.rank}: {each.shape}" for each in ranks)
        raise SettingsError(f"the ranks do not lay out blocks alike ({found}): install one version on all hosts")
    sizes = {each.rank: each.num_slots for each in ranks if each.num_slots is not None}
    if not sizes:
        raise SettingsError(
            f"none of {num_ranks} ranks keeps blocks in host memory, all read those of another: install one version on "
            "all hosts"
        )
    if len(set(map(len, sizes.values()))) > 1:
        found = "; ".join(f"rank {rank}: {len(num_slots)}" for rank, num_slots in sizes.items())
        raise SettingsError(
            f"the ranks have different numbers of groups of KV caches ({found}): serve a model whose ranks have the "
            "same groups, with one version on all hosts"
        )
    return tuple(map(min, zip(*sizes.values(), strict=True)))
