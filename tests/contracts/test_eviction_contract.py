"""Every eviction policy of the package keeps the promises of `EvictionPolicy`, and then its own."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.eviction.device_lru import DeviceAwareLru
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.slot_arrays import NO_SLOTS, Slots
from kvmoor.testing.eviction_contract import EvictionContract

A, B, C, D, E = range(5)


class TestTailFirstLru(EvictionContract):
    def make_policy(self) -> EvictionPolicy:
        return TailFirstLru()


class TestTailFirstArc(EvictionContract):
    def make_policy(self) -> EvictionPolicy:
        return TailFirstArc()


class TestDeviceAwareLru(EvictionContract):
    def make_policy(self) -> EvictionPolicy:
        return DeviceAwareLru()


def test_the_suite_is_passed_by_all_that_have_a_name() -> None:
    """No policy that a user can choose by its name is left out above."""
    tested = {
        type(suite().make_policy()) for suite in EvictionContract.__subclasses__() if suite.__module__ == __name__
    }

    assert set(POLICIES.values()) <= tested


class _EvictsTooMuch(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        return super().evict(min(num_blocks + 1, len(self)), excluding)


class _EvictsPartly(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        return super().evict(min(num_blocks, len(self)), excluding)


class _EvictsBeforeItRefuses(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        victims = self._order.take_oldest(num_blocks, excluding)
        return victims if len(victims) == num_blocks else None


class _EvictsLists(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        victims = super().evict(num_blocks, excluding)
        return victims if victims is None else victims.tolist()


class _IgnoresExclusions(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        return super().evict(num_blocks)


class _CountsAllExclusions(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        return None if num_blocks > len(self) - len(excluding) else super().evict(num_blocks, excluding)


class _ForgetsWhatItSpares(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        victims = super().evict(num_blocks, excluding)
        self._order.discard(excluding)
        return victims


class _HoldsVictims(TailFirstLru):
    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        victims = super().evict(num_blocks, excluding)
        self._order.use(NO_SLOTS if victims is None else victims)
        return victims


class _LosesWhatArrives(TailFirstLru):
    def __init__(self) -> None:
        super().__init__()
        self.arriving: set[bytes] = set()

    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        self.arriving |= set(arriving)
        return super().evict(num_blocks, excluding)

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        super().insert(slots[[digest not in self.arriving for digest in digests]], digests)


class _FailsOnFailedStores(TailFirstLru):
    def give_up(self, digests: Sequence[bytes]) -> None:
        raise KeyError(*digests)


class _HoldsByDigest(TailFirstLru):
    """A block that comes back has to be in the slot where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_of: dict[bytes, int] = {}

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        super().insert(
            np.array(
                [self.slot_of.setdefault(digest, slot) for slot, digest in zip(slots, digests, strict=True)], np.int32
            ),
            digests,
        )


class _NeedsSortedSlots(TailFirstLru):
    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        super().insert(np.arange(min(slots), max(slots) + 1, dtype=np.int32) if len(slots) else slots, digests)


class _InsertsTwice(TailFirstLru):
    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        super().insert(slots, digests)
        self._order._num_held += np.count_nonzero(slots == 0)


class _NeverWithdraws(TailFirstLru):
    def withdraw(self, slots: Slots) -> None:
        pass


class _NeverRestores(TailFirstLru):
    def restore(self, slots: Slots) -> None:
        pass


class _NeverForgets(TailFirstLru):
    def remove(self, slots: Slots) -> None:
        pass


class _RestoresTouched(TailFirstLru):
    def touch(self, slots: Slots) -> None:
        self._order.use(slots)


class _StartsAnew(TailFirstLru):
    def resize(self, num_slots: int, slot_limit: int) -> None:
        self.__init__()  # type: ignore[misc]
        super().resize(num_slots, slot_limit)


class _HoldsWhatLeavesTheDevice(TailFirstLru):
    def leave_device(self, slots: Slots) -> None:
        self._order.use(slots)


class _DropsWhatEntersTheDevice(TailFirstLru):
    def enter_device(self, slots: Slots) -> None:
        self._order.discard(slots)


class _FailsOnEmptyLists(TailFirstLru):
    def restore(self, slots: Slots) -> None:
        slots.max()
        super().restore(slots)


class _KeepsItsArgument(TailFirstLru):
    """Takes in what was inserted when it is asked next."""

    last: Slots = NO_SLOTS

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        self._order.use(self.last)
        self.last = slots

    def __contains__(self, slot: object) -> bool:
        return slot in self.last or super().__contains__(slot)

    def __len__(self) -> int:
        return super().__len__() + len(self.last)


class _HoldsTheFirstSlot(TailFirstLru):
    def resize(self, num_slots: int, slot_limit: int) -> None:
        super().resize(num_slots, slot_limit)
        if not len(self):
            self._order.use(np.array([0], np.int32))


BROKEN = [
    _CountsAllExclusions,
    _DropsWhatEntersTheDevice,
    _EvictsBeforeItRefuses,
    _EvictsLists,
    _EvictsPartly,
    _EvictsTooMuch,
    _FailsOnEmptyLists,
    _FailsOnFailedStores,
    _ForgetsWhatItSpares,
    _HoldsByDigest,
    _HoldsTheFirstSlot,
    _HoldsVictims,
    _HoldsWhatLeavesTheDevice,
    _IgnoresExclusions,
    _InsertsTwice,
    _KeepsItsArgument,
    _LosesWhatArrives,
    _NeedsSortedSlots,
    _NeverForgets,
    _NeverRestores,
    _NeverWithdraws,
    _RestoresTouched,
    _StartsAnew,
]


@cache
def failed_tests(policy: type[TailFirstLru]) -> set[str]:
    """Return the names of the tests of the suite that a policy fails."""

    class Suite(EvictionContract):
        def make_policy(self) -> EvictionPolicy:
            return policy()

    suite = Suite()
    failed = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:
                failed.add(name)
    return failed


@pytest.mark.parametrize("broken", BROKEN)
def test_the_suite_finds_broken_policies(broken: type[TailFirstLru]) -> None:
    """A policy that breaks one of its promises fails at least one test of the suite."""
    assert set() != failed_tests(broken)


def test_each_test_of_the_suite_finds_something() -> None:
    """No test of the suite is passed by all the broken policies."""
    names = {name for name in dir(EvictionContract) if name.startswith("test_")}

    assert names == set().union(*(failed_tests(broken) for broken in BROKEN))


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def insert(policy: EvictionPolicy, *numbers: int) -> None:
    policy.insert(slots_of(*numbers), [bytes([number]) * 32 for number in numbers])


def lru() -> TailFirstLru:
    policy = TailFirstLru()
    policy.resize(8, 8)
    return policy


def order(policy: TailFirstLru) -> list[int]:
    """Empty the policy and return what it held, first victim first."""
    victims = policy.evict(len(policy))
    assert victims is not None
    return victims.tolist()


def test_a_prompt_is_eaten_from_its_end() -> None:
    """Within one call the later blocks are the older ones."""
    policy = lru()

    insert(policy, A, B, C)

    assert [C, B, A] == order(policy)


def test_prompts_are_evicted_in_the_order_of_their_use() -> None:
    """What was inserted or touched longest ago goes first."""
    policy = lru()
    insert(policy, A, B)
    insert(policy, C, D)

    policy.touch(slots_of(A, B))

    assert [D, C, B, A] == order(policy)


def test_a_longer_prompt_renews_its_known_beginning() -> None:
    """Known blocks of a finished store take their place in front of the new ones, wherever in the prompt they stand."""
    policy = lru()
    insert(policy, A, C)
    insert(policy, E)

    insert(policy, A, B, C, D)

    assert [E, D, C, B, A] == order(policy)


def test_the_end_of_a_lease_counts_as_the_last_use() -> None:
    """A restored block is more recent than what was used while it was leased, and tail-first among its own."""
    policy = lru()
    insert(policy, A, B)
    policy.withdraw(slots_of(A, B))
    insert(policy, C)
    policy.touch(slots_of(C))

    policy.restore(slots_of(A, B))

    assert [C, B, A] == order(policy)


def test_touching_a_leased_block_does_not_make_it_a_victim() -> None:
    """A second lease on a block is noted without holding the block."""
    policy = lru()
    insert(policy, A, B)
    policy.withdraw(slots_of(A))

    policy.touch(slots_of(A, B))

    assert [B] == order(policy)


def test_a_failed_eviction_leaves_the_order() -> None:
    """After an eviction that was refused the victims are the same as before."""
    policy = lru()
    insert(policy, A, B)
    insert(policy, C)

    assert policy.evict(2, slots_of(A, B)) is None

    assert [B, A, C] == order(policy)


def test_what_is_on_the_device_does_not_matter_to_lru() -> None:
    """The order is the same whatever is told of the device."""
    policy = lru()
    insert(policy, A, B)
    insert(policy, C)

    policy.enter_device(slots_of(C))
    policy.leave_device(slots_of(A, B))

    assert [B, A, C] == order(policy)
