"""What gives way is what was used longest ago, from the end of its prompt, and never what somebody uses."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from index_steps import P, Q, R, begin_store, found, index_of, keys_of, store
from kvmoor.errors import BrokenError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.eviction.device_lru import DeviceAwareLru
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.lease import Lease
from kvmoor.index.slot_arrays import NO_SLOT, NO_SLOTS, Slots
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


@pytest.mark.parametrize("trouble", ["too few", "too many", "none", "twice", "leased", "named", "no slot"])
def test_a_policy_that_breaks_its_promise_is_named(trouble: str) -> None:
    """Victims that are not evictable are an error, never an overwritten block."""

    class Broken(TailFirstLru):
        def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
            if num_blocks == 0:  # the blocks that this test stores first fit in free slots
                return NO_SLOTS
            named, good, other, leased = index._groups[0].slots_of([key.digest for key in [*P[:3], Q[0]]]).tolist()
            victims = {
                "too few": [good],
                "too many": [good, other, named],
                "none": None,
                "twice": [good, good],
                "leased": [good, leased],
                "named": [good, named],
                "no slot": [good, NO_SLOT],
            }[trouble]
            return None if victims is None else np.array(victims, np.int32)

    index = BlockIndex(1, Broken)
    index.publish(SlotRange(0, 0, 4))
    store(index, P[:3])
    store(index, Q[:1])
    match = index.match(Q[:1])

    with pytest.raises(BrokenError, match="was asked for 2 blocks and gave"):
        index.prepare_store([P[0], R[0], R[1]])

    assert [3, 1] == found(index, P[:3], Q[:1])
    index.complete(match)


def test_what_the_device_holds_gives_way_first_if_the_policy_wants_it() -> None:
    """The index tells its policy which blocks enter and leave the device, and a store evicts accordingly."""
    index = BlockIndex(1, DeviceAwareLru)
    index.publish(SlotRange(0, 0, 6))
    store(index, P[:2])
    store(index, Q[:2])
    store(index, R[:2])
    for prompt in (Q, R):
        index.complete(index.match(prompt[:2]))
    index.enter_device([*Q[:2], *R[:2]])

    index.leave_device(Q[:2])

    assert [R[1], R[0], P[1]] == list(store(index, P[5:8]).evicted_keys)
    assert [P[0]] == list(store(index, R[7:8]).evicted_keys)


def test_blocks_that_are_not_here_have_no_place_on_the_device() -> None:
    """What is told of unknown blocks, or of such as are being written, is passed over."""
    index = BlockIndex(1, DeviceAwareLru)
    index.publish(SlotRange(0, 0, 3))
    begun = begin_store(index, P[:2])

    index.enter_device([*P[:2], *Q[:2]])
    index.leave_device(Q[:1])
    index.complete(begun)
    store(index, R[:1])
    index.complete(index.match(R[:1]))
    index.enter_device(R[:1])

    assert [R[0], P[1]] == list(store(index, Q[:2]).evicted_keys)


def test_an_index_tells_its_policy_all_that_arc_needs() -> None:
    """Slots, stores that fail, loads and resets reach the policy: its books and those of the index agree throughout."""
    rng = random.Random(5)
    index = BlockIndex(1, TailFirstArc)
    prompts = [P, Q, R, P[:3] + Q[3:], keys_of("s", 8)]
    stores: list[Lease] = []
    loads: list[Lease] = []
    for step in range(3000):
        if step % 500 == 0:
            index.publish(SlotRange(0, 2 * (step // 500), 2))
        keys = rng.choice(prompts)[: rng.randint(1, 6)]
        move = rng.choice(["store", "store", "match", "end store", "fail store", "end load", "forget", "reset"])
        if move == "store" and (lease := index.prepare_store(keys)):
            stores.append(lease)
        elif move == "match" and (match := index.match(keys)).keys:
            loads.append(match)
        elif move == "end store" and stores:
            index.complete(stores.pop(rng.randrange(len(stores))))
        elif move == "fail store" and stores:
            index.abort(stores.pop(rng.randrange(len(stores))))
        elif move == "end load" and loads:
            index.complete(loads.pop(rng.randrange(len(loads))))
        elif move == "forget":
            index.forget(keys[:1])
        elif move == "reset" and rng.random() < 0.05:
            index.reset()
        index.check_invariants()
        group = index._groups[0]
        policy = group.policy
        assert isinstance(policy, TailFirstArc)
        assert index.num_published == policy._num_slots
        blocks = [(digest, slot, group.states[slot]) for digest, slot in group.current.slot_of.items()]
        being_written = {digest for digest, _, state in blocks if state is BlockState.WRITING}
        ready = {slot: digest for digest, slot, state in blocks if state is BlockState.READY}
        assert being_written == policy._arriving_once | policy._arriving_twice
        assert ready == {**policy._once, **policy._twice, **policy._withdrawn}
        assert policy.num_ghosts <= policy._num_slots
    assert index.num_evicted > 50


def test_a_policy_that_raises_loses_no_slot_of_other_groups() -> None:
    """If the policy of one group fails, what was prepared in the groups before it is free again."""

    class Raising(TailFirstLru):
        def evict(self, num_blocks, excluding=NO_SLOTS, arriving=()):
            raise ValueError("no idea")

    policies = iter([TailFirstLru(), Raising()])
    index = BlockIndex(2, lambda: next(policies))
    for group in (0, 1):
        index.publish(SlotRange(group, 0, 4))
    keys = [*keys_of("a", 2), *keys_of("b", 2, group=1)]

    with pytest.raises(ValueError, match="no idea"):
        index.prepare_store(keys)

    assert (0, []) == (index.num_writing, index.unresolved_leases())
    assert 4 == index.slot_usage(0).free
