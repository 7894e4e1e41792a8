"""Least recently used, for a host tier behind a device that has a cache of its own."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmoor.index.eviction.use_order import UseOrder
from kvmoor.index.slot_arrays import NO_SLOTS, Slots, grown


class DeviceAwareLru:
    """Evict first what the device's own cache still holds, then what left it longest ago. An `EvictionPolicy`.

    A block that is on the device is found there: its copy is of use only once the device has dropped it. So the copies
    of such blocks (*doubled* ones) go first, and the others (*single* ones) are as old as the time since the device has
    dropped them, or since their last use if that was later. Both kinds are in the order of `TailFirstLru`: by the end
    of the last use, and of one prompt the end first.

    It is for blocks that are stored when the device is about to drop them: then the two caches hold different blocks,
    and a copy that went too early is made again. Where blocks are stored as soon as they are computed, all new copies
    are doubled, and each makes room for the next before it is ever of use: take `TailFirstLru` there. (A replay of
    mc_conversation, 5,000 blocks on the device and 20,000 here: 30 % of the blocks are found with that one, 15 % with
    this one. Stored when they leave the device: 32 and 33 %.)

    Nothing is on the device before `enter_device` says so. Whoever never tells gets `TailFirstLru`.

    Among the doubled ones the least recently used go first too. The device will drop just these next, so the opposite
    makes fewer copies anew: in the replays it finds the same blocks, with 5 % fewer stores at best. That was not worth
    an order of its own.
    """

    def __init__(self) -> None:
        self._doubled = UseOrder()
        self._single = UseOrder()
        # By slot, also of withdrawn blocks. `evict` and `remove` clear it: the next block of the slot is another one.
        self._on_device: NDArray[np.bool_] = np.zeros(1, np.bool_)

    def __repr__(self) -> str:
        return f"<DeviceAwareLru: {len(self._doubled)} blocks that are on the device too, {len(self._single)} others>"

    def __len__(self) -> int:
        return len(self._doubled) + len(self._single)

    def __contains__(self, slot: object) -> bool:
        return slot in self._doubled or slot in self._single

    def resize(self, num_slots: int, slot_limit: int) -> None:  # noqa: ARG002  (what was used last does not depend on it)
        """Make room for the slots below `slot_limit`."""
        self._doubled.resize(slot_limit)
        self._single.resize(slot_limit)
        self._on_device = grown(self._on_device, slot_limit)

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:  # noqa: ARG002  (who they are does not matter)
        """Make blocks the most recent ones of their kind, the first of the list the very most."""
        self._use(slots)

    def touch(self, slots: Slots) -> None:
        """Make the held ones the most recent ones of their kind; a leased block gets its place when it is restored."""
        self._use(slots[self._holds(slots)])

    def withdraw(self, slots: Slots) -> None:
        """Hold the blocks no longer."""
        self._doubled.discard(slots)
        self._single.discard(slots)

    def restore(self, slots: Slots) -> None:
        """Hold the blocks again, as the most recent ones of the kind that they are now."""
        self._use(slots)

    def remove(self, slots: Slots) -> None:
        """Forget the blocks, held or not, and where else they are."""
        self.withdraw(slots)
        self._on_device[slots] = False

    def give_up(self, digests: Sequence[bytes]) -> None:
        """Do nothing: a block that arrives is not noted before it is inserted."""

    def enter_device(self, slots: Slots) -> None:
        """Make blocks doubled ones, the held ones the most recent of these; those doubled already keep their place."""
        self._on_device[slots] = True
        entering = slots[self._single.holds(slots)]
        self._single.discard(entering)
        self._doubled.use(entering[::-1])

    def leave_device(self, slots: Slots) -> None:
        """Make blocks single ones, the held ones the most recent of these, also if nobody told that they entered."""
        self._on_device[slots] = False
        leaving = slots[self._holds(slots)]
        self._doubled.discard(leaving)
        self._single.use(leaving[::-1])

    def evict(
        self,
        num_blocks: int,
        excluding: Slots = NO_SLOTS,
        arriving: Sequence[bytes] = (),  # noqa: ARG002  (asks only about what is there)
    ) -> Slots | None:
        """Give up the oldest doubled blocks, and if these do not suffice the oldest single ones too."""
        if num_blocks > len(self) - np.count_nonzero(self._holds(excluding)):
            return None
        doubled = self._doubled.take_oldest(num_blocks, excluding)
        self._on_device[doubled] = False
        if len(doubled) == num_blocks:
            return doubled
        return np.concatenate([doubled, self._single.take_oldest(num_blocks - len(doubled), excluding)])

    def _holds(self, slots: Slots) -> NDArray[np.bool_]:
        return self._doubled.holds(slots) | self._single.holds(slots)

    def _use(self, slots: Slots) -> None:
        on_device = self._on_device[slots]
        self._doubled.use(slots[on_device][::-1])
        self._single.use(slots[~on_device][::-1])
