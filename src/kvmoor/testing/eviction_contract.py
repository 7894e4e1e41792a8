"""The tests that every eviction policy has to pass, one's own included.

    class TestMyPolicy(EvictionContract):
        def make_policy(self) -> EvictionPolicy:
            return MyPolicy()

The tests ask what `EvictionPolicy` promises, never which blocks are the best victims. Run them with pytest.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.slot_arrays import NO_SLOTS
from kvmoor.testing.eviction_walk import SLOT_LIMIT, EvictionWalk, assert_holds, digest_of, slots_of, victims_of
from kvmoor.transfer_messages import SlotRange


class EvictionContract(ABC):
    """Check a policy against `EvictionPolicy`. Subclass it and supply `make_policy`."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Return a new policy that holds nothing."""

    def test_holds_nothing_at_first(self) -> None:
        """A new policy holds no block and gives none, but gives no blocks if none are asked for."""
        policy = self.make_policy()
        assert_holds(policy, [])
        policy.resize(4, SLOT_LIMIT)

        assert_holds(policy, [])
        assert set() == victims_of(policy, 0)
        assert policy.evict(1) is None

    def test_holds_what_is_inserted(self) -> None:
        """A policy holds the blocks of a finished store, each once."""
        policy = self._policy()

        _insert(policy, [0, 1, 2, 3])

        assert_holds(policy, [0, 1, 2, 3])

    def test_inserting_held_blocks_again_adds_only_the_new_ones(self) -> None:
        """A store that names blocks held already does not hold them twice."""
        policy = self._policy([0, 1, 2])

        _insert(policy, [0, 1, 2, 3, 4])

        assert_holds(policy, [0, 1, 2, 3, 4])

    def test_slots_may_have_any_numbers(self) -> None:
        """Blocks stand in any slots below the limit, in any order, and numbers of slots may be numpy's."""
        policy = self._policy([SLOT_LIMIT - 1, 0, 17])

        assert_holds(policy, [0, 17, SLOT_LIMIT - 1])
        assert np.int32(17) in policy
        assert {0, 17, SLOT_LIMIT - 1} == victims_of(policy, 3)

    def test_touch_changes_nothing_that_is_held(self) -> None:
        """The use of a held or of a withdrawn block neither adds nor takes one."""
        policy = self._policy([0, 1, 2, 3])
        policy.withdraw(slots_of(0, 1))

        policy.touch(slots_of(0, 1, 2, 3))

        assert_holds(policy, [2, 3])

    def test_withdrawn_blocks_are_not_evicted(self) -> None:
        """A withdrawn block is no victim, not even if nothing else is left."""
        policy = self._policy([0, 1, 2, 3])

        policy.withdraw(slots_of(0, 1))

        assert_holds(policy, [2, 3])
        assert policy.evict(3) is None
        assert {2, 3} == victims_of(policy, 2)

    def test_restored_blocks_may_be_evicted(self) -> None:
        """A restored block is held like before."""
        policy = self._policy([0, 1, 2, 3])
        policy.withdraw(slots_of(0, 1, 2, 3))

        policy.restore(slots_of(0, 1, 2, 3))

        assert_holds(policy, [0, 1, 2, 3])
        assert {0, 1, 2, 3} == victims_of(policy, 4)

    def test_removed_blocks_are_gone(self) -> None:
        """A removed block is not held, whether it was held or withdrawn before, and another may come to its slot."""
        policy = self._policy([0, 1, 2, 3])
        policy.withdraw(slots_of(0, 1))

        policy.remove(slots_of(1, 2))

        assert_holds(policy, [3])
        _insert(policy, [1, 2], [digest_of(11), digest_of(12)])
        assert_holds(policy, [1, 2, 3])
        policy.restore(slots_of(0))
        assert_holds(policy, [0, 1, 2, 3])

    def test_evicts_exactly_as_many_as_asked(self) -> None:
        """Victims are as many as asked for, different, held before and not held after."""
        for num_victims in range(6):
            policy = self._policy([0, 1, 2, 3, 4])

            victims = victims_of(policy, num_victims)

            assert num_victims == len(victims)
            assert_holds(policy, {0, 1, 2, 3, 4} - victims)

    def test_evicts_nothing_if_it_cannot_evict_enough(self) -> None:
        """A policy that holds too few blocks says None and holds what it held."""
        policy = self._policy([0, 1, 2, 3, 4])

        assert policy.evict(6) is None
        assert_holds(policy, [0, 1, 2, 3, 4])

    def test_spares_what_is_excluded(self) -> None:
        """An excluded block is never a victim, and too few others are the same as too few blocks."""
        policy = self._policy([0, 1, 2, 3, 4])

        assert policy.evict(3, slots_of(1, 2, 3)) is None
        assert_holds(policy, [0, 1, 2, 3, 4])
        assert {0, 4} == victims_of(policy, 2, slots_of(1, 2, 3))
        assert_holds(policy, [1, 2, 3])

    def test_excluded_blocks_are_spared_once(self) -> None:
        """A block that was excluded may be the next victim."""
        policy = self._policy([0, 1, 2])
        victims_of(policy, 1, slots_of(0, 1))

        assert {0, 1} == victims_of(policy, 2)

    def test_excluding_blocks_it_does_not_hold_changes_nothing(self) -> None:
        """Excluded blocks that are withdrawn or unknown do not count."""
        policy = self._policy([0, 1, 2, 3])
        policy.withdraw(slots_of(0))

        assert {1, 2, 3} == victims_of(policy, 3, slots_of(0, 9))

    def test_arriving_blocks_are_held_once_they_are_inserted(self) -> None:
        """Blocks that room is made for are neither held nor victims until their store has finished."""
        policy = self._policy([0, 1, 2, 3], num_slots=4)

        freed = victims_of(policy, 2, arriving=[digest_of(10), digest_of(11)])

        rest = {0, 1, 2, 3} - freed
        assert len(rest) == 2
        assert_holds(policy, rest)
        assert policy.evict(3, arriving=[digest_of(12), digest_of(13), digest_of(14)]) is None
        _insert(policy, sorted(freed), [digest_of(10), digest_of(11)])
        assert_holds(policy, [0, 1, 2, 3])

    def test_arriving_blocks_may_fail_to_come(self) -> None:
        """A block whose store has failed is given up without ever having been held, and may arrive again."""
        policy = self._policy([0, 1], num_slots=4)

        for _ in range(2):
            assert set() == victims_of(policy, 0, arriving=[digest_of(10), digest_of(11)])
            policy.give_up([digest_of(10), digest_of(11)])
            assert_holds(policy, [0, 1])

    def test_evicted_blocks_may_come_back(self) -> None:
        """A block that has gone may arrive and be inserted like a new one, in whichever slot, again and again."""
        policy = self._policy([0, 1], num_slots=2)
        digest_in = [digest_of(0), digest_of(1)]
        for number in [*range(5)] * 5:
            if digest_of(number) in digest_in:
                continue
            (slot,) = victims_of(policy, 1, arriving=[digest_of(number)])
            _insert(policy, [slot], [digest_of(number)])
            digest_in[slot] = digest_of(number)
            assert_holds(policy, [0, 1])

    def test_more_slots_change_nothing_that_is_held(self) -> None:
        """A group that grows holds what it held, and then more."""
        policy = self.make_policy()
        policy.resize(4, 4)
        _insert(policy, [0, 1, 2, 3])

        policy.resize(9, SLOT_LIMIT)

        assert_holds(policy, [0, 1, 2, 3])
        _insert(policy, [SLOT_LIMIT - 1])
        assert_holds(policy, [0, 1, 2, 3, SLOT_LIMIT - 1])

    def test_what_the_device_holds_changes_nothing_that_is_held(self) -> None:
        """Blocks that enter or leave the device, known to be there or not, held or withdrawn, stay what they were."""
        policy = self._policy([0, 1, 2, 3, 4, 5])
        policy.withdraw(slots_of(0, 1))

        for tell in (policy.enter_device, policy.enter_device, policy.leave_device, policy.leave_device):
            tell(slots_of(0, 2, 3))
            assert_holds(policy, [2, 3, 4, 5])
            policy.restore(slots_of(0))
            policy.withdraw(slots_of(0))
            assert_holds(policy, [2, 3, 4, 5])
        policy.enter_device(slots_of(2, 0))
        assert policy.evict(4, slots_of(2)) is None
        assert {3, 4, 5} == victims_of(policy, 3, slots_of(2))
        assert {2} == victims_of(policy, 1)
        policy.restore(slots_of(0, 1))
        assert {0, 1} == victims_of(policy, 2)

    def test_empty_lists_change_nothing(self) -> None:
        """Every call may name no block at all."""
        policy = self._policy([0, 1])

        policy.insert(NO_SLOTS, [])
        for change in (policy.touch, policy.withdraw, policy.restore, policy.remove):
            change(NO_SLOTS)
        policy.enter_device(NO_SLOTS)
        policy.leave_device(NO_SLOTS)
        policy.give_up([])

        assert_holds(policy, [0, 1])

    def test_keeps_no_list_that_it_was_given(self) -> None:
        """What the caller does to its arrays and lists afterwards does not reach the policy."""
        policy = self._policy()
        slots = np.array([0, 1, 2], np.int32)
        digests = [digest_of(0), digest_of(1), digest_of(2)]
        policy.insert(slots, digests)

        slots[:] = 7
        digests.clear()

        assert_holds(policy, [0, 1, 2])
        excluded = np.array([0, 1], np.int32)
        victims_of(policy, 1, excluded)
        excluded[:] = 7
        assert_holds(policy, [0, 1])

    def test_agrees_with_a_set_on_a_random_walk(self) -> None:
        """Whatever the order of legal calls, exactly the right blocks are held."""
        for seed in range(20):
            walk = EvictionWalk(self.make_policy(), random.Random(seed))  # noqa: S311
            for _ in range(200):
                walk.step()

    def test_serves_an_index(self) -> None:
        """An index with this policy evicts no leased block, stores what fits and balances its books."""
        index = BlockIndex(1, self.make_policy)
        index.publish(SlotRange(0, 0, 6))
        keys = BlockKeys([digest_of(number) for number in range(40)])
        others = [BlockKey(digest_of(number)) for number in range(100, 105)]
        for start in range(0, 36, 2):
            store = index.prepare_store(keys[start : start + 4])
            assert store is not None
            index.complete(store)
            match = index.match(keys[start : start + 2])
            assert list(keys[start : start + 2]) == list(match.keys)
            assert index.prepare_store(others) is None
            other_store = index.prepare_store(others[:4])
            assert other_store is not None
            index.check_invariants()
            index.abort(other_store)
            assert list(keys[start : start + 2]) == [key for key in keys if index.contains(key)]
            index.complete(match)
            index.check_invariants()
        assert not index.unresolved_leases()

    def _policy(self, slots: Sequence[int] = (), num_slots: int = 16) -> EvictionPolicy:
        """Return a new policy of `num_slots` slots that holds blocks in some of them."""
        policy = self.make_policy()
        policy.resize(num_slots, SLOT_LIMIT)
        if slots:
            _insert(policy, slots)
        return policy


def _insert(policy: EvictionPolicy, slots: Sequence[int], digests: Sequence[bytes] | None = None) -> None:
    """Insert blocks, whose digests have the numbers of their slots unless they are given."""
    policy.insert(slots_of(*slots), [digest_of(slot) for slot in slots] if digests is None else digests)
