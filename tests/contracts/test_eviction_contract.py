"""Every eviction policy of the package keeps the promises of `EvictionPolicy`, and then its own."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest

from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.testing.eviction_contract import EvictionContract

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"ABCDE")


class TestTailFirstLru(EvictionContract):
    def make_policy(self) -> EvictionPolicy:
        return TailFirstLru()


class TestTailFirstArc(EvictionContract):
    def make_policy(self) -> EvictionPolicy:
        return TailFirstArc()


class _EvictsTooMuch(TailFirstLru):
    def evict(
        self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return super().evict(num_blocks + 1, excluding)


class _EvictsPartly(TailFirstLru):
    def evict(
        self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return super().evict(min(num_blocks, len(self)), excluding)


class _IgnoresExclusions(TailFirstLru):
    def evict(
        self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return super().evict(num_blocks, frozenset())


class _NeverWithdraws(TailFirstLru):
    def withdraw(self, digests: Sequence[bytes]) -> None:
        pass


class _RestoresTouched(TailFirstLru):
    def touch(self, digests: Sequence[bytes]) -> None:
        self.insert(digests)


class _NeverForgets(TailFirstLru):
    def remove(self, digests: Sequence[bytes]) -> None:
        pass


class _HoldsWhatArrives(TailFirstLru):
    def evict(
        self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        victims = super().evict(num_blocks, excluding, arriving)
        self.insert(arriving if victims is not None else [])
        return victims


class _FailsOnFailedStores(TailFirstLru):
    def remove(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            del self._oldest_first[digest]


@pytest.mark.parametrize(
    "broken",
    [
        _EvictsTooMuch,
        _EvictsPartly,
        _IgnoresExclusions,
        _NeverWithdraws,
        _RestoresTouched,
        _NeverForgets,
        _HoldsWhatArrives,
        _FailsOnFailedStores,
    ],
)
def test_the_suite_finds_broken_policies(broken: type[TailFirstLru]) -> None:
    """A policy that breaks one of its promises fails at least one test of the suite."""

    class Suite(EvictionContract):
        def make_policy(self) -> EvictionPolicy:
            return broken()

    suite = Suite()
    failed = []
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:
                failed.append(name)

    assert failed != []


def order(policy: TailFirstLru) -> list[bytes]:
    """Empty the policy and return what it held, first victim first."""
    return policy.evict(len(policy), frozenset()) or []


def test_a_prompt_is_eaten_from_its_end() -> None:
    """Within one call the later blocks are the older ones."""
    policy = TailFirstLru()

    policy.insert([A, B, C])

    assert [C, B, A] == order(policy)


def test_prompts_are_evicted_in_the_order_of_their_use() -> None:
    """What was inserted or touched longest ago goes first."""
    policy = TailFirstLru()
    policy.insert([A, B])
    policy.insert([C, D])

    policy.touch([A, B])

    assert [D, C, B, A] == order(policy)


def test_a_longer_prompt_renews_its_known_beginning() -> None:
    """Known blocks of a finished store take their place in front of the new ones, wherever in the prompt they stand."""
    policy = TailFirstLru()
    policy.insert([A, C])
    policy.insert([E])

    policy.insert([A, B, C, D])

    assert [E, D, C, B, A] == order(policy)


def test_the_end_of_a_lease_counts_as_the_last_use() -> None:
    """A restored block is more recent than what was used while it was leased, and tail-first among its own."""
    policy = TailFirstLru()
    policy.insert([A, B])
    policy.withdraw([A, B])
    policy.insert([C])
    policy.touch([C])

    policy.restore([A, B])

    assert [C, B, A] == order(policy)


def test_touching_a_leased_block_does_not_make_it_a_victim() -> None:
    """A second lease on a block is noted without holding the block."""
    policy = TailFirstLru()
    policy.insert([A, B])
    policy.withdraw([A])

    policy.touch([A, B])

    assert [B] == order(policy)


def test_a_failed_eviction_leaves_the_order() -> None:
    """After an eviction that was refused the victims are the same as before."""
    policy = TailFirstLru()
    policy.insert([A, B])
    policy.insert([C])

    policy.evict(2, frozenset([A, B]))

    assert [B, A, C] == order(policy)
