"""Least recently used, eating prompts from their ends."""

from collections.abc import Sequence

import numpy as np

from kvmoor.index.eviction.use_order import UseOrder
from kvmoor.index.slot_arrays import NO_SLOTS, Slots


class TailFirstLru:
    """Evict what was used longest ago, and of one prompt the end first. An `EvictionPolicy`.

    Blocks named in one call are ordered as if the last of them had been used first, because the beginning of a prompt
    is of use without its end and not the other way round.

    A block is in use until the last lease on it ends, so that moment counts, not the one of its match. As every match
    that covers a block covers all before it, no block of a prompt then becomes older than those behind it.
    """

    def __init__(self) -> None:
        self._order = UseOrder()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, slot: object) -> bool:
        return slot in self._order

    def resize(self, num_slots: int, slot_limit: int) -> None:  # noqa: ARG002  (what was used last does not depend on it)
        """Make room for the slots below `slot_limit`."""
        self._order.resize(slot_limit)

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:  # noqa: ARG002  (who they are does not matter)
        """Make blocks the most recent ones, the first of the list the very most."""
        self._order.use(slots[::-1])

    def touch(self, slots: Slots) -> None:
        """Make the held ones the most recent ones; a leased block gets its place when it is restored."""
        if len(slots):
            self._order.use(slots[self._order.holds(slots)][::-1])

    def withdraw(self, slots: Slots) -> None:
        """Hold the blocks no longer."""
        self._order.discard(slots)

    def restore(self, slots: Slots) -> None:
        """Hold the blocks again, as the most recent ones."""
        self._order.use(slots[::-1])

    def remove(self, slots: Slots) -> None:
        """Forget the blocks, held or not."""
        self._order.discard(slots)

    def give_up(self, digests: Sequence[bytes]) -> None:
        """Do nothing: a block that arrives is not noted before it is inserted."""

    def enter_device(self, slots: Slots) -> None:
        """Do nothing: where else a block is does not matter to it."""

    def leave_device(self, slots: Slots) -> None:
        """Do nothing."""

    def evict(
        self,
        num_blocks: int,
        excluding: Slots = NO_SLOTS,
        arriving: Sequence[bytes] = (),  # noqa: ARG002  (recency asks only about what is there)
    ) -> Slots | None:
        """Give up the oldest blocks, whatever arrives. Looks at `num_blocks` and as many as it has to pass over."""
        if num_blocks > len(self._order) - np.count_nonzero(self._order.holds(excluding)):
            return None
        return self._order.take_oldest(num_blocks, excluding)
