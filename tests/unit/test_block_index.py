"""Blocks are found exactly from the moment they are whole until they are evicted or forgotten."""

import random
from collections.abc import Callable

import pytest

from index_steps import P, Q, R, assert_no_slot_lost, begin_store, block_keys, found, index_of, keys_of, store
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.lease import Lease, StoreLease
from kvmoor.transfer_messages import SlotRange


def test_a_stored_prompt_is_found() -> None:
    """A store that completes can be matched, in the slots that it filled."""
    index = index_of(4)
    stored = begin_store(index, P[:3])
    assert [BlockState.WRITING] * 3 == [index.lookup(key) for key in P[:3]]

    assert 3 == index.complete(stored)

    match = index.match(P)
    assert (tuple(P[:3]), stored.slots) == (match.keys, match.slots)
    assert [BlockState.READY] * 3 + [BlockState.ABSENT] == [index.lookup(key) for key in P[:4]]
    index.check_invariants()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("fail", [BlockIndex.abort, BlockIndex.hold])
def test_a_block_whose_store_does_not_complete_is_never_found(
    number: int, fail: Callable[[BlockIndex, StoreLease], None]
) -> None:
    """Neither while it is written nor after it failed is a block visible, whichever of several it is (B28)."""
    index = index_of(4)
    leases = [begin_store(index, [key]) for key in P[:4]]
    assert [0] == found(index, P[:4])

    for position, lease in enumerate(leases):
        if position == number:
            fail(index, lease)
            assert BlockState.ABSENT is index.lookup(P[number])
        else:
            index.complete(lease)

    assert [position != number for position in range(4)] == [index.contains(key) for key in P[:4]]
    assert [number] == found(index, P[:4])
    assert 1 == index.slot_usage(0).free + index.num_held


def test_only_a_prefix_without_holes_is_matched() -> None:
    """A match ends in front of the first block that is absent or not whole yet."""
    index = index_of(4)
    store(index, [P[0], P[2]])
    begin_store(index, [P[1]])

    assert [1] == found(index, P[:3])
    assert [0] == found(index, P[1:3])


def test_known_blocks_are_not_stored_again() -> None:
    """Blocks that are ready or being written are left out and counted, and need no room."""
    index = index_of(3)
    store(index, P[:1])
    begin_store(index, P[1:2])

    lease = begin_store(index, P[:3])

    assert (tuple(P[2:3]), 2) == (lease.keys, lease.num_known)
    assert ((), 3) == (begin_store(index, P[:3]).keys, begin_store(index, P[:3]).num_known)


def test_an_empty_request_gets_an_empty_lease() -> None:
    """No keys, or none that is found, give a lease without blocks whose resolution is harmless."""
    index = index_of(0)
    leases: list[Lease] = [begin_store(index, []), index.match([]), index.match(P)]

    assert [0, 0, 0] == [len(lease.keys) for lease in leases]
    assert leases[:1] == index.unresolved_leases()  # an empty match may be dropped
    index.complete(leases[0])
    index.complete(leases[1])
    index.abort(leases[2])
    index.check_invariants()


def test_an_index_without_slots_declines() -> None:
    """Before a slot is published every store is declined, and afterwards it is served."""
    index = BlockIndex(1)
    assert index.prepare_store(P[:1]) is None
    assert 0 == index.num_published

    index.publish(SlotRange(0, 0, 1))

    assert (0,) == begin_store(index, P[:1]).slots


def test_one_slot_serves_one_block_after_the_other() -> None:
    """A capacity of one is enough to work with."""
    index = index_of(1)
    for key in (P[0], Q[0], P[0]):
        lease = store(index, [key])
        assert (0,) == lease.slots
        assert [1] == found(index, [key])
    assert 2 == index.num_evicted


def test_a_request_beyond_the_capacity_is_declined_whole() -> None:
    """What can never fit evicts nothing and changes nothing."""
    index = index_of(3)
    store(index, P[:2])

    assert index.prepare_store(Q[:4]) is None

    assert [2] == found(index, P)
    assert 0 == index.num_evicted
    assert [BlockState.ABSENT] * 4 == [index.lookup(key) for key in Q[:4]]
    assert [] == index.unresolved_leases()


def test_an_abandoned_store_keeps_its_slots() -> None:
    """A given-up store is absent at once; its slots come back when its late end is seen, and no count is off (B24)."""
    index = index_of(4)
    lost = begin_store(index, P[:2])
    others = begin_store(index, Q[:2])

    index.hold(lost)
    index.complete(others)

    index.check_invariants()
    assert (2, 0) == (index.num_held, index.slot_usage(0).free)
    assert [0, 2] == found(index, P[:2], Q[:2])
    assert index.prepare_store(R[:3]) is None
    assert (Q[1],) == store(index, P[:1]).evicted_keys  # the same block may be stored anew meanwhile
    index.release_held(lost)
    index.check_invariants()
    assert (0, 2) == (index.num_held, index.slot_usage(0).free)
    assert [1] == found(index, P[:2])


def test_forgotten_blocks_are_not_found() -> None:
    """Forgetting drops ready blocks at once and frees their slots; unknown keys do no harm."""
    index = index_of(3)
    store(index, P[:3])

    assert 2 == index.forget([P[1], P[2], Q[0]])

    assert [1] == found(index, P[:3])
    assert 2 == index.slot_usage(0).free
    assert 0 == index.num_evicted


def test_forgetting_does_not_disturb_a_load() -> None:
    """A leased block that is forgotten is not found any more, but its slot is free only when its lease ends."""
    index = index_of(2)
    store(index, P[:2])
    match = index.match(P[:2])

    assert 1 == index.forget(P[1:2])

    index.check_invariants()
    assert (1, 2) == (index.slot_usage(0).draining, index.num_leased)
    assert [1] == found(index, P[:2])
    assert index.prepare_store(Q[:1]) is None
    match.keep(1)
    index.check_invariants()
    assert (0, 1) == (index.slot_usage(0).draining, index.slot_usage(0).free)


def test_a_forgotten_store_does_not_become_visible() -> None:
    """A block forgotten while it was written is absent after its store completes, and its slot is free."""
    index = index_of(2)
    lease = begin_store(index, P[:2])

    assert 0 == index.forget(P[:1])

    assert 1 == index.complete(lease)
    index.check_invariants()
    assert [False, True] == [index.contains(key) for key in P[:2]]
    assert 1 == index.slot_usage(0).free


def test_an_old_load_leaves_a_block_stored_anew_alone() -> None:
    """The end of a lease on a forgotten block does not touch the block that was stored under its key since."""
    index = index_of(2)
    store(index, P[:1])
    old = index.match(P[:1])
    index.forget(P[:1])
    store(index, P[:1])
    new = index.match(P[:1])
    assert old.slots != new.slots

    index.complete(old)

    index.check_invariants()
    assert (1, 1) == (index.num_leased, index.slot_usage(0).free)
    assert index.prepare_store(Q[:2]) is None


def test_declined_blocks_can_be_stored_later() -> None:
    """Of a prompt stored in steps that declined some blocks once, all are found, and stored == indexed (B44)."""
    prompt = keys_of("long", 217)
    index = index_of(89)
    accepted = index.complete(begin_store(index, prompt[:40])) + index.complete(begin_store(index, prompt[51:100]))
    pressure = [index.match(prompt[:40]), index.match(prompt[51:100])]
    assert index.prepare_store(prompt[40:51]) is None
    assert index.prepare_store(prompt[:100]) is None
    assert [40] == found(index, prompt)
    for lease in pressure:
        index.complete(lease)
    index.publish(SlotRange(0, 89, 128))

    for num_computed in (200, 217):
        accepted += index.complete(begin_store(index, block_keys(prompt[:num_computed])))
        assert [num_computed] == found(index, prompt)

    assert 217 == accepted == index.num_ready == index.slot_usage(0).ready
    assert 0 == index.num_evicted


def test_two_requests_that_hold_what_the_other_needs_both_finish() -> None:
    """Where two half-loaded requests leave no room, the one that gives its match back lets the other finish (B40)."""
    index = index_of(20)
    first, second = keys_of("a", 14), keys_of("b", 14)
    store(index, first[:8])
    store(index, second[:8])
    index.match(first[:8], holder="first")
    index.match(second[:8], holder="second")
    for prompt in (first, second):
        assert index.prepare_store(prompt) is None

    assert 1 == index.release_holder("second")
    store(index, first)
    assert 1 == index.release_holder("first")
    store(index, second)

    assert [14] == found(index, second)
    assert_no_slot_lost(index)


def test_a_touch_is_a_use_without_a_lease() -> None:
    """Touched blocks outlive others of the same age; only ready ones are counted, and nothing is leased."""
    index = index_of(5)
    store(index, P[:2])
    store(index, Q[:2])
    begin_store(index, R[:1])

    assert 2 == index.touch([*P[:3], R[0]])
    assert 0 == index.touch([])

    assert (0, 1) == (index.num_leased, len(index.unresolved_leases()))
    assert (Q[1], Q[0], P[1]) == begin_store(index, R[1:4]).evicted_keys
    index.check_invariants()


def test_a_touch_of_a_leased_block_changes_nothing() -> None:
    """A leased block stays out of reach of eviction and is the most recent one at its release."""
    index = index_of(2)
    store(index, P[:1])
    store(index, Q[:1])
    match = index.match(P[:1])

    assert 1 == index.touch(P[:1])

    index.check_invariants()
    assert index.prepare_store(R[:2]) is None
    index.complete(match)
    assert (Q[0],) == begin_store(index, R[:1]).evicted_keys


def test_the_repr_tells_how_full_it_is() -> None:
    """What a log shows of an index is what its slots are used for."""
    index = index_of(5)
    store(index, P[:3])
    begin_store(index, Q[:1])
    index.match(P[:2])

    assert "<BlockIndex: 5 slots, 3 ready, 1 writing, 2 leased, 2 leases open>" == repr(index)
    assert (5, 1, 3, 1, 0, 2, 1) == (
        index.num_published,
        index.num_groups,
        index.num_ready,
        index.num_writing,
        index.num_held,
        index.num_leased,
        index.slot_usage(0).free,
    )


def test_nothing_leaks_on_a_random_walk() -> None:
    """10,000 stores, matches, ends and resets on 8 keys and 4 slots end with no lease and full capacity (B42)."""
    rng = random.Random(42)
    index = index_of(4)
    open_leases: list[Lease] = []
    held: list[StoreLease] = []
    moves = ["store", "match", "match", "complete", "complete", "abort", "hold", "keep", "forget", "end", "expire"]
    for now_s in range(10_000):
        keys = rng.sample(P, rng.randint(0, 4))
        move = rng.choice(moves)
        chosen = open_leases.pop(rng.randrange(len(open_leases))) if open_leases else None
        if move == "store" and (lease := index.prepare_store(keys)) is not None:
            open_leases.append(lease)
        elif move == "match":
            open_leases.append(index.match(keys, holder=rng.choice([None, 1, 2]), deadline_s=now_s + rng.randint(0, 9)))
        elif move == "forget":
            index.forget(keys[:1])
        elif move == "end":
            index.release_holder(rng.choice([1, 2]))
        elif move == "expire":
            index.expire(now_s)
        if rng.random() < 0.02:
            index.reset()
        if chosen is None or chosen.resolved:
            continue
        if move in {"store", "match", "forget", "end", "expire"}:
            open_leases.append(chosen)
        elif move == "hold" and isinstance(chosen, StoreLease):
            index.hold(chosen)
            held.append(chosen)
        elif move == "keep" and not isinstance(chosen, StoreLease):
            index.keep(chosen, rng.randint(0, len(chosen)))
            open_leases.append(chosen)
        elif move == "complete":
            index.complete(chosen)
        else:
            index.abort(chosen)
        if held and rng.random() < 0.5:
            index.release_held(held.pop())
        index.check_invariants()
        open_leases = [lease for lease in open_leases if not lease.resolved]
    for lease in open_leases:
        index.abort(lease)
    for lease in held:
        index.release_held(lease)

    usage = index.slot_usage(0)
    assert (0, 0, 0, 0) == (usage.writing, usage.leased, usage.draining, usage.held)
    assert_no_slot_lost(index)
