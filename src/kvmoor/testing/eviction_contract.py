"""The tests that every eviction policy has to pass, one's own included.

    class TestMyPolicy(EvictionContract):
        def make_policy(self) -> EvictionPolicy:
            return MyPolicy()

The tests ask what `EvictionPolicy` promises, never which blocks are the best victims. Run them with pytest.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvmoor.block_key import BlockKey
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.transfer_messages import SlotRange


class EvictionContract(ABC):
    """Check a policy against `EvictionPolicy`. Subclass it and supply `make_policy`."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Return a new policy that holds nothing."""

    def test_holds_nothing_at_first(self) -> None:
        """A new policy holds no block and gives none, but gives no blocks if none are asked for."""
        policy = self.make_policy()
        no_victims: list[bytes] = []

        _assert_holds(policy, [])
        assert no_victims == policy.evict(0, frozenset())
        assert policy.evict(1, frozenset()) is None

    def test_holds_what_is_inserted(self) -> None:
        """A policy holds the blocks of a finished store, each once."""
        policy = self.make_policy()

        policy.insert(_digests(4))

        _assert_holds(policy, _digests(4))

    def test_inserting_held_blocks_again_adds_only_the_new_ones(self) -> None:
        """A store that names blocks held already does not hold them twice."""
        policy = self.make_policy()
        policy.insert(_digests(3))

        policy.insert(_digests(5))

        _assert_holds(policy, _digests(5))

    def test_touch_changes_nothing_that_is_held(self) -> None:
        """The use of a held or of a withdrawn block neither adds nor takes one."""
        policy = self.make_policy()
        policy.insert(_digests(4))
        policy.withdraw(_digests(2))

        policy.touch(_digests(4))

        _assert_holds(policy, _digests(4)[2:])

    def test_withdrawn_blocks_are_not_evicted(self) -> None:
        """A withdrawn block is no victim, not even if nothing else is left."""
        policy = self.make_policy()
        policy.insert(_digests(4))

        policy.withdraw(_digests(2))

        _assert_holds(policy, _digests(4)[2:])
        assert policy.evict(3, frozenset()) is None
        assert set(_digests(4)[2:]) == set(policy.evict(2, frozenset()) or [])

    def test_restored_blocks_may_be_evicted(self) -> None:
        """A restored block is held like before."""
        policy = self.make_policy()
        policy.insert(_digests(4))
        policy.withdraw(_digests(4))

        policy.restore(_digests(4))

        _assert_holds(policy, _digests(4))
        assert set(_digests(4)) == set(policy.evict(4, frozenset()) or [])

    def test_removed_blocks_are_gone(self) -> None:
        """A removed block is not held, whether it was held or withdrawn before, and may be inserted as a new one."""
        policy = self.make_policy()
        policy.insert(_digests(4))
        policy.withdraw(_digests(4)[:2])

        policy.remove(_digests(4)[1:3])

        _assert_holds(policy, _digests(4)[3:])
        policy.insert(_digests(4)[1:3])
        _assert_holds(policy, _digests(4)[1:])
        policy.restore(_digests(4)[:1])
        _assert_holds(policy, _digests(4))

    def test_evicts_exactly_as_many_as_asked(self) -> None:
        """Victims are as many as asked for, different, held before and not held after."""
        for num_victims in range(6):
            policy = self.make_policy()
            policy.insert(_digests(5))

            victims = policy.evict(num_victims, frozenset())

            assert victims is not None
            assert num_victims == len(victims) == len(set(victims) & set(_digests(5)))
            _assert_holds(policy, set(_digests(5)) - set(victims))

    def test_evicts_nothing_if_it_cannot_evict_enough(self) -> None:
        """A policy that holds too few blocks says None and holds what it held."""
        policy = self.make_policy()
        policy.insert(_digests(5))

        assert policy.evict(6, frozenset()) is None
        _assert_holds(policy, _digests(5))

    def test_spares_what_is_excluded(self) -> None:
        """An excluded block is never a victim, and too few others are the same as too few blocks."""
        policy = self.make_policy()
        policy.insert(_digests(5))
        excluding = frozenset(_digests(5)[1:4])

        assert policy.evict(3, excluding) is None
        _assert_holds(policy, _digests(5))
        assert set(_digests(5)) - excluding == set(policy.evict(2, excluding) or [])
        _assert_holds(policy, excluding)

    def test_excluding_blocks_it_does_not_hold_changes_nothing(self) -> None:
        """Excluded blocks that are withdrawn or unknown do not count."""
        policy = self.make_policy()
        policy.insert(_digests(4))
        policy.withdraw(_digests(1))

        victims = policy.evict(3, frozenset([_digest(0), _digest(9)]))

        assert set(_digests(4)[1:]) == set(victims or [])

    def test_arriving_blocks_are_held_once_they_are_inserted(self) -> None:
        """Blocks that room is made for are neither held nor victims until their store has finished."""
        policy = self.make_policy()
        policy.resize(4)
        policy.insert(_digests(4))
        arriving = [_digest(10), _digest(11)]

        victims = policy.evict(2, frozenset(), arriving)

        assert victims is not None
        rest = set(_digests(4)) - set(victims)
        assert len(rest) == 2
        _assert_holds(policy, rest)
        assert policy.evict(3, frozenset(), [_digest(12), _digest(13), _digest(14)]) is None
        policy.insert(arriving)
        _assert_holds(policy, {*rest, *arriving})

    def test_arriving_blocks_may_fail_to_come(self) -> None:
        """A block whose store has failed is removed without ever having been held, and may arrive again."""
        policy = self.make_policy()
        policy.resize(4)
        policy.insert(_digests(2))
        arriving = [_digest(10), _digest(11)]
        no_victims: list[bytes] = []

        for _ in range(2):
            assert no_victims == policy.evict(0, frozenset(), arriving)
            policy.remove(arriving)
            _assert_holds(policy, _digests(2))

    def test_evicted_blocks_may_come_back(self) -> None:
        """A block that has gone may arrive and be inserted like a new one, again and again."""
        policy = self.make_policy()
        policy.resize(2)
        policy.insert(_digests(2))
        for _ in range(5):
            for digest in _digests(5):
                if digest in policy:
                    continue
                victims = policy.evict(1, frozenset(), [digest])
                assert victims is not None
                assert len(victims) == 1
                policy.insert([digest])
                assert digest in policy
                assert len(policy) == 2

    def test_more_slots_change_nothing_that_is_held(self) -> None:
        """A group that grows holds what it held."""
        policy = self.make_policy()
        policy.resize(4)
        policy.insert(_digests(4))

        policy.resize(9)

        _assert_holds(policy, _digests(4))

    def test_empty_lists_change_nothing(self) -> None:
        """Every call may name no block at all."""
        policy = self.make_policy()
        policy.insert(_digests(2))

        for change in (policy.insert, policy.touch, policy.withdraw, policy.restore, policy.remove):
            change([])

        _assert_holds(policy, _digests(2))

    def test_keeps_no_list_that_it_was_given(self) -> None:
        """What the caller does to its list afterwards does not reach the policy."""
        policy = self.make_policy()
        digests = _digests(3)
        policy.insert(digests)

        digests.clear()

        _assert_holds(policy, _digests(3))

    def test_agrees_with_a_set_on_a_random_walk(self) -> None:
        """Whatever the order of legal calls, exactly the right blocks are held."""
        for seed in range(20):
            self._walk(random.Random(seed))  # noqa: S311

    def test_serves_an_index(self) -> None:
        """An index with this policy evicts no leased block, stores what fits and balances its books."""
        index = BlockIndex(1, self.make_policy)
        index.publish(SlotRange(0, 0, 6))
        keys = [BlockKey(digest) for digest in _digests(40)]
        others = [BlockKey(_digest(number)) for number in range(100, 105)]
        for start in range(0, 36, 2):
            store = index.prepare_store(keys[start : start + 4])
            assert store is not None
            index.complete(store)
            match = index.match(keys[start : start + 2])
            assert keys[start : start + 2] == list(match.keys)
            assert index.prepare_store(others) is None
            other_store = index.prepare_store(others[:4])
            assert other_store is not None
            index.check_invariants()
            index.abort(other_store)
            assert keys[start : start + 2] == [key for key in keys if index.contains(key)]
            index.complete(match)
            index.check_invariants()
        assert not index.unresolved_leases()

    def _walk(self, rng: random.Random) -> None:
        policy = self.make_policy()
        policy.resize(12)
        held: set[bytes] = set()
        withdrawn: set[bytes] = set()
        arriving: set[bytes] = set()
        for _ in range(200):
            move = rng.choice(["insert", "touch", "withdraw", "restore", "remove", "evict"])
            if move == "insert":
                chosen = _sample(rng, set(_digests(12)) - withdrawn)
                policy.insert(chosen)
                held |= set(chosen)
                arriving -= set(chosen)
            elif move == "touch":
                policy.touch(_sample(rng, held | withdrawn))
            elif move == "withdraw":
                chosen = _sample(rng, held)
                policy.withdraw(chosen)
                held -= set(chosen)
                withdrawn |= set(chosen)
            elif move == "restore":
                chosen = _sample(rng, withdrawn)
                policy.restore(chosen)
                withdrawn -= set(chosen)
                held |= set(chosen)
            elif move == "remove":
                chosen = _sample(rng, held | withdrawn | arriving)
                policy.remove(chosen)
                held -= set(chosen)
                withdrawn -= set(chosen)
                arriving -= set(chosen)
            else:
                excluding = frozenset(_sample(rng, set(_digests(12))))
                coming = _sample(rng, set(_digests(12)) - held - withdrawn - arriving)
                num_blocks = rng.randint(0, len(coming)) if rng.random() < 0.5 else rng.randrange(6)
                victims = policy.evict(num_blocks, excluding, coming)
                if num_blocks > len(held - excluding):
                    assert victims is None
                else:
                    assert victims is not None
                    assert num_blocks == len(victims) == len(set(victims) & (held - excluding))
                    held -= set(victims)
                    arriving |= set(coming)
            _assert_holds(policy, held)


def _digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _digests(count: int) -> list[bytes]:
    return [_digest(number) for number in range(count)]


def _sample(rng: random.Random, digests: set[bytes]) -> list[bytes]:
    return rng.sample(sorted(digests), rng.randint(0, min(4, len(digests))))


def _assert_holds(policy: EvictionPolicy, digests: Iterable[bytes]) -> None:
    expected = set(digests)
    assert expected == {digest for digest in _digests(40) if digest in policy}
    assert len(expected) == len(policy)
