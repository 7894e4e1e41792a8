"""What gives way is what was used longest ago, from the end of its prompt, and never what somebody uses."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest

from index_steps import P, Q, R, begin_store, found, index_of, keys_of, store
from kvmoor.errors import BrokenError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.transfer_messages import SlotRange


def test_the_oldest_prompt_is_eaten_from_its_end() -> None:
    """Room is made by the end of the prompt that was used longest ago, and the lease says what went."""
    index = index_of(6)
    store(index, P[:3])
    store(index, Q[:3])

    lease = store(index, R[:2])

    assert (P[2], P[1]) == lease.evicted_keys
    assert [1, 3, 2] == found(index, P[:3], Q[:3], R[:3])
    assert 2 == index.num_evicted


def test_a_match_makes_its_blocks_recent() -> None:
    """A prompt that returned outlives one that was stored later."""
    index = index_of(6)
    store(index, P[:3])
    store(index, Q[:3])
    found(index, P[:3])

    store(index, R[:3])

    assert [3, 0, 3] == found(index, P[:3], Q[:3], R[:3])


def test_recency_is_the_end_of_the_last_lease() -> None:
    """A block that is leased while others come and go is the most recent one once it is released."""
    index = index_of(4)
    store(index, P[:2])
    match = index.match(P[:2])
    store(index, Q[:2])
    index.complete(match)

    lease = store(index, R[:2])

    assert (Q[1], Q[0]) == lease.evicted_keys


def test_a_growing_prompt_keeps_its_beginning_longest() -> None:
    """Known blocks that a store names are as recent as its new ones, and evicted after them."""
    index = index_of(5)
    store(index, P[:2])
    store(index, Q[:1])
    store(index, P[:4])

    lease = store(index, R[:3])

    assert (Q[0], P[3], P[2]) == lease.evicted_keys


def test_blocks_that_a_running_store_builds_on_are_recent() -> None:
    """The known beginning of a prompt is not the next victim while its end is still being written."""
    index = index_of(5)
    store(index, P[:2])
    store(index, Q[:2])
    begin_store(index, P[:3])

    assert (Q[1],) == begin_store(index, R[:1]).evicted_keys


def test_a_store_that_fills_a_hole_keeps_the_order_of_the_prompt() -> None:
    """A block stored later than those around it takes its place among them."""
    index = index_of(4)
    store(index, [P[0], P[2], P[3]])
    store(index, P[:4])

    assert (P[3], P[2], P[1]) == store(index, Q[:3]).evicted_keys


def test_leased_blocks_are_never_evicted() -> None:
    """A store that would need a leased slot is declined; after the release it is served."""
    index = index_of(3)
    store(index, P[:3])
    match = index.match(P[:2])

    assert index.prepare_store(Q[:2]) is None
    assert (P[2],) == begin_store(index, Q[:1]).evicted_keys
    index.complete(match)

    assert (P[1], P[0]) == begin_store(index, Q[1:3]).evicted_keys
    index.check_invariants()


def test_a_block_leased_twice_is_kept_until_both_are_over() -> None:
    """The last of several leases decides."""
    index = index_of(1)
    store(index, P[:1])
    first, second = index.match(P[:1]), index.match(P[:1])

    index.complete(first)
    assert index.prepare_store(Q[:1]) is None
    index.abort(second)

    assert (P[0],) == begin_store(index, Q[:1]).evicted_keys


def test_blocks_being_written_are_never_evicted() -> None:
    """A slot that a copy fills is not given to another block."""
    index = index_of(2)
    begin_store(index, P[:2])

    assert index.prepare_store(Q[:1]) is None


def test_a_store_does_not_evict_what_it_names() -> None:
    """A prompt that grows is not eaten to make room for its own end."""
    index = index_of(3)
    store(index, P[:3])

    assert index.prepare_store(P[:4]) is None
    assert [3] == found(index, P[:4])
    assert (P[2],) == begin_store(index, [*P[:2], P[3]]).evicted_keys


def test_groups_have_slots_and_orders_of_their_own() -> None:
    """Slots of one group do not serve another, and slot numbers may be equal."""
    index = index_of(1, 2)
    mixed = [keys_of("p", 1, 1)[0], keys_of("p", 1, 0)[0], keys_of("q", 1, 1)[0]]

    lease = store(index, mixed)

    assert (tuple(mixed), (0, 0, 1)) == (lease.keys, lease.slots)
    assert [3] == found(index, mixed)
    assert [1, 2] == [index.slot_usage(group).ready for group in range(2)]


def test_a_store_over_several_groups_is_all_or_nothing() -> None:
    """If one group has no room, nothing is evicted from any other."""
    index = index_of(2, 2)
    store(index, keys_of("p", 2, 0) + keys_of("p", 2, 1))
    match = index.match(keys_of("p", 1, 1))

    for keys in (
        keys_of("q", 2, 0) + keys_of("q", 2, 1),
        keys_of("q", 2, 1) + keys_of("q", 2, 0),
    ):
        assert index.prepare_store(keys) is None
        assert 0 == index.num_evicted
        assert [2, 2] == found(index, keys_of("p", 2, 0), keys_of("p", 2, 1))
        index.check_invariants()

    index.complete(match)
    assert 4 == len(begin_store(index, keys_of("q", 2, 0) + keys_of("q", 2, 1)).evicted_keys)
    index.check_invariants()


@pytest.mark.parametrize("trouble", ["too few", "none", "twice", "leased", "named"])
def test_a_policy_that_breaks_its_promise_is_named(trouble: str) -> None:
    """Victims that are not evictable are an error, never an overwritten block."""

    class Broken(TailFirstLru):
        def evict(
            self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
        ) -> list[bytes] | None:
            if num_blocks == 0:  # the blocks that this test stores first fit in free slots
                return []
            return {
                "too few": [P[1].digest],
                "none": None,
                "twice": [P[1].digest, P[1].digest],
                "leased": [P[1].digest, Q[0].digest],
                "named": [P[1].digest, P[0].digest],
            }[trouble]

    index = BlockIndex(1, Broken)
    index.publish(SlotRange(0, 0, 4))
    store(index, P[:3])
    store(index, Q[:1])
    match = index.match(Q[:1])

    with pytest.raises(BrokenError, match="was asked for 2 blocks and gave"):
        index.prepare_store([P[0], R[0], R[1]])

    assert [3, 1] == found(index, P[:3], Q[:1])
    index.complete(match)
