"""The numbers that an index can be asked for, over all groups."""

from collections.abc import Iterable

from kvmoor.errors import RequestError
from kvmoor.index.block_group import BlockGroup, SlotUsage
from kvmoor.index.block_state import WRITING


class IndexCounts:
    """Count what the groups of an index hold; `BlockIndex` is one, and changes them."""

    def __init__(self, groups: Iterable[BlockGroup]) -> None:
        self._groups = tuple(groups)
        self._num_evicted = 0

    @property
    def num_groups(self) -> int:
        """Return how many groups there are."""
        return len(self._groups)

    @property
    def num_published(self) -> int:
        """Return how many slots there are, in all groups; so do the other numbers."""
        return sum(group.pool.num_published for group in self._groups)

    @property
    def num_ready(self) -> int:
        """Return how many blocks can be found."""
        return sum(group.current.num_ready for group in self._groups)

    @property
    def num_writing(self) -> int:
        """Return how many slots are being filled, also for keys that were forgotten meanwhile."""
        return sum(group.states.count(WRITING) for group in self._groups)

    @property
    def num_leased(self) -> int:
        """Return how many whole blocks are covered by at least one open match."""
        return sum(group.num_leased for group in self._groups)

    @property
    def num_held(self) -> int:
        """Return how many slots wait for `release_held`."""
        return sum(group.pool.num_held for group in self._groups)

    @property
    def num_evicted(self) -> int:
        """Return how many blocks that could be found have given way to others since the start."""
        return self._num_evicted

    def slot_usage(self, group: int) -> SlotUsage:
        """Return what the slots of one group are used for."""
        return self._group(group).usage()

    def _group(self, number: int) -> BlockGroup:
        if not 0 <= number < len(self._groups):
            raise self._no_such_group(number)
        return self._groups[number]

    def _no_such_group(self, number: int) -> RequestError:
        return RequestError(f"group {number} does not exist: the index has groups 0 to {len(self._groups) - 1}")
