"""Least recently used, for a host tier behind a device that has a cache of its own."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmoor.index.eviction.use_order import UseOrder
from kvmoor.index.slot_arrays import NO_SLOTS, Slots, grown


class DeviceAwareLru:
    """Evict first copies of what was loaded and is on the device, then what left it longest ago. An `EvictionPolicy`.

    A block that was loaded from here is found on the device from then on: its copy here is of use only once the device
    has dropped it. So the copies of such blocks (*doubled* ones) go first, all others (*single* ones) later. Leaving
    the device counts as a use, so a single block is as old as the time since then, or since its last use if that was
    later. Both kinds are in the order of `TailFirstLru`: by the end of the last use, and of one prompt the end first.

    A block that was stored here after it was computed is single though the device has it too: were it doubled, each new
    copy would make room for the next before any was of use. A store that names a doubled block makes it single for the
    same reason: whoever stores at once does not store it again when it leaves.

    Blocks stored when the device is about to drop them make the most of it: the two caches then hold different blocks,
    and a copy that went too early is made again. Where blocks are stored as soon as they are computed, it finds what
    `TailFirstLru` finds, and more where host memory is hardly larger than the device. That holds as long as stores name
    the whole prompt: of a loaded block that no store ever names again, the only copy may go while the device has it.

    Nothing is on the device before `enter_device` says so. Whoever tells nothing gets `TailFirstLru`.

    Among the doubled ones the least recently used go first too. The device will drop just these next, so the opposite
    makes fewer copies anew: in the replays it finds the same blocks, with 5 % fewer stores at best. That was not worth
    an order of its own.
    """

    def __init__(self) -> None:
        self._doubled = UseOrder()
        self._single = UseOrder()
        # By slot, also of withdrawn blocks: whether a load has leased it, and whether it entered the device after that.
        # `insert` and `leave_device` clear both, so nothing is left of the block that was in a slot before.
        self._was_leased: NDArray[np.bool_] = np.zeros(1, np.bool_)
        self._is_doubled: NDArray[np.bool_] = np.zeros(1, np.bool_)

    def __repr__(self) -> str:
        return (
            f"<DeviceAwareLru: {len(self._doubled)} loaded blocks that are on the device, {len(self._single)} others>"
        )

    def __len__(self) -> int:
        return len(self._doubled) + len(self._single)

    def __contains__(self, slot: object) -> bool:
        return slot in self._doubled or slot in self._single

    def resize(self, num_slots: int, slot_limit: int) -> None:  # noqa: ARG002  (what was used last does not depend on it)
        """Make room for the slots below `slot_limit`."""
        self._doubled.resize(slot_limit)
        self._single.resize(slot_limit)
        self._was_leased = grown(self._was_leased, slot_limit)
        self._is_doubled = grown(self._is_doubled, slot_limit)

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:  # noqa: ARG002  (who they are does not matter)
        """Make blocks the most recent single ones, the first of the list the very most."""
        self._forget_device(slots)
        self._doubled.discard(slots)
        self._single.use(slots[::-1])

    def touch(self, slots: Slots) -> None:
        """Make the held ones the most recent ones of their kind; a leased block gets its place when it is restored."""
        self._use(slots[self._holds(slots)])

    def withdraw(self, slots: Slots) -> None:
        """Hold the blocks no longer; what enters the device from now on was loaded."""
        self._was_leased[slots] = True
        self._discard(slots)

    def restore(self, slots: Slots) -> None:
        """Hold the blocks again, as the most recent ones of the kind that they are now."""
        self._use(slots)

    def remove(self, slots: Slots) -> None:
        """Forget the blocks, held or not."""
        self._discard(slots)

    def give_up(self, digests: Sequence[bytes]) -> None:
        """Do nothing: a block that arrives is not noted before it is inserted."""

    def enter_device(self, slots: Slots) -> None:
        """Make loaded blocks doubled, the held ones the most recent of these; all others are what and where they were.

        A load may still be under way.
        """
        entering = slots[self._was_leased[slots]]
        self._is_doubled[entering] = True
        held = entering[self._single.holds(entering)]
        self._single.discard(held)
        self._doubled.use(held[::-1])

    def leave_device(self, slots: Slots) -> None:
        """Make blocks single, the held ones the most recent of these, also if nobody told that they entered."""
        self._forget_device(slots)
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
        if len(doubled) == num_blocks:
            return doubled
        return np.concatenate([doubled, self._single.take_oldest(num_blocks - len(doubled), excluding)])

    def _holds(self, slots: Slots) -> NDArray[np.bool_]:
        return self._doubled.holds(slots) | self._single.holds(slots)

    def _discard(self, slots: Slots) -> None:
        self._doubled.discard(slots)
        self._single.discard(slots)

    def _forget_device(self, slots: Slots) -> None:
        self._was_leased[slots] = False
        self._is_doubled[slots] = False

    def _use(self, slots: Slots) -> None:
        is_doubled = self._is_doubled[slots]
        self._doubled.use(slots[is_doubled][::-1])
        self._single.use(slots[~is_doubled][::-1])
