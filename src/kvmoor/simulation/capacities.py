"""Which capacities to try on a trace, and which of them to buy."""

from collections.abc import Sequence
from typing import Final

DEFAULT_NUM_CAPACITIES: Final = 9
KNEE_SHARE: Final = 0.95
"""A chosen number, not a measured one: what is saved beyond it costs the most memory for the least."""


def capacity_ladder(num_unique_blocks: int, num_capacities: int = DEFAULT_NUM_CAPACITIES) -> list[int]:
    """Return capacities that double from one to the next and end with all blocks of the trace; ascending, each once."""
    return sorted({max(1, num_unique_blocks >> halvings) for halvings in range(num_capacities)})


def find_knee(hits_by_capacity: Sequence[tuple[int, int]], share: float = KNEE_SHARE) -> int | None:
    """Return the smallest capacity that has at least `share` of the hits of the largest one; None if that has none.

    `hits_by_capacity` holds (capacity, hits). Only these capacities are looked at; nothing is estimated between them.
    """
    _, most = max(hits_by_capacity)
    if not most:
        return None
    return min(capacity for capacity, hits in hits_by_capacity if hits >= share * most)
