"""Which slots every rank has ready."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvmoor.transfer_messages import SlotRange


class SlotTally:
    """Count the ranks that have made a slot ready: it may be used once all have. Not thread-safe.

    Ranks map their memory at their own pace, and one with larger slots has fewer of them.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: dict[int, NDArray[np.int32]] = {}

    def add(self, ranges: Iterable[SlotRange]) -> list[SlotRange]:
        """Take note of slots that one rank has made ready, each once; return those that all ranks have by now."""
        complete: list[SlotRange] = []
        for each in ranges:
            end = each.first + each.num_slots
            counts = self._counts.get(each.group, np.zeros(0, np.int32))
            if len(counts) < end:
                counts = self._counts[each.group] = np.pad(counts, (0, max(end, 2 * len(counts)) - len(counts)))
            counts[each.first : end] += 1
            complete += slot_runs(each.group, each.first, counts[each.first : end] == self._num_ranks)
        return complete


def slot_runs(group: int, first: int, chosen: NDArray[np.bool_]) -> list[SlotRange]:
    """Return the runs of chosen slots, the first of which has number `first`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    return [
        SlotRange(group, first + int(begin), int(end - begin))
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
    ]
