"""Blocks are found exactly from the moment they are whole until they are evicted or forgotten."""

import random

import pytest

from index_steps import P, Q, R, begin_store, found, index_of, keys_of, store
from kvmoor.block_key import BlockKey
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.lease import Lease, StoreLease
from kvmoor.transfer_messages import SlotRange


def test_a_stored_prompt_is_found() -> None:
    """A store that completes can be matched, in the slots that it filled."""
    index = index_of(4)
    stored = begin_store(index, P[:3])
    assert [BlockState.WRITING] * 3 == [index.state(key) for key in P[:3]]

    assert 3 == index.complete(stored)

    match = index.match(P)
    assert (tuple(P[:3]), stored.slots) == (match.keys, match.slots)
    assert [BlockState.READY] * 3 + [BlockState.ABSENT] == [index.state(key) for key in P[:4]]
    index.check_invariants()


@pytest.mark.parametrize("number", range(4))
def test_a_block_whose_store_does_not_complete_is_never_found(number: int) -> None:
    """Neither while it is written nor after it failed is a block visible, whichever of several it is (B28)."""
    index = index_of(4)
    leases = [begin_store(index, [key]) for key in P[:4]]
    assert [0] == found(index, P[:4])

    for position, lease in enumerate(leases):
        if position == number:
            index.abort(lease)
        else:
            index.complete(lease)

    assert [position != number for position in range(4)] == [index.contains(key) for key in P[:4]]
    assert [number] == found(index, P[:4])
    assert 1 == index.slot_usage(0).free


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
    assert [BlockState.ABSENT] * 4 == [index.state(key) for key in Q[:4]]
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


def test_a_reset_reaches_stores_in_flight() -> None:
    """After clear nothing stored or still being stored is found, and the same keys can be stored anew (B37)."""
    index = index_of(6)
    store(index, P[:2])
    slow = begin_store(index, Q[:2])
    match = index.match(P[:1])

    assert 2 == index.clear()

    index.check_invariants()
    assert [0, 0] == found(index, P, Q)
    anew = begin_store(index, Q[:2])
    assert set(slow.slots).isdisjoint(anew.slots)
    assert 0 == index.complete(slow)
    assert [0] == found(index, Q)
    assert 2 == index.complete(anew)
    index.complete(match)
    index.check_invariants()
    assert [0, 2] == found(index, P, Q)
    assert 4 == index.slot_usage(0).free


@pytest.mark.parametrize("end", [BlockIndex.abort, BlockIndex.hold])
def test_a_store_that_fails_after_a_reset_leaves_the_new_one_alone(end) -> None:
    """The end of an old store does not touch the block that was stored under its key since."""
    index = index_of(2)
    old = begin_store(index, P[:1])
    index.clear()
    store(index, P[:1])

    end(index, old)

    assert index.contains(P[0])
    index.check_invariants()


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


def test_duplicate_keys_are_refused() -> None:
    """A key named twice in one call is refused with both positions, and nothing changes."""
    index = index_of(3)
    store(index, P[:1])

    for call in (index.prepare_store, index.match, index.forget):
        with pytest.raises(RequestError, match=r"BlockKey\(.*, group=0\) stands at positions 1 and 3"):
            call([P[0], Q[0], P[1], Q[0]])

    assert (2, []) == (index.slot_usage(0).free, index.unresolved_leases())


def test_one_digest_in_two_groups_is_no_duplicate() -> None:
    """The same content in two groups is two blocks."""
    index = index_of(1, 1)

    assert [2] == found(index, store(index, [BlockKey(bytes(32), 0), BlockKey(bytes(32), 1)]).keys)


def test_groups_that_do_not_exist_are_refused() -> None:
    """A key or a range of an unknown group is refused with what exists, and nothing changes."""
    index = index_of(1, 1)
    stray = BlockKey(bytes(32), 2)

    for call in (index.prepare_store, index.match, index.forget):
        with pytest.raises(RequestError, match=r"key 1, .* the index has groups 0 to 1"):
            call([P[0], stray])
    for call in (
        lambda: index.contains(stray),
        lambda: index.publish(SlotRange(2, 0, 1)),
        lambda: index.slot_usage(-1),
    ):
        with pytest.raises(RequestError, match="does not exist: the index has groups 0 to 1"):
            call()
    assert BlockState.ABSENT is index.state(P[0])
    index.check_invariants()


def test_what_is_no_key_is_refused() -> None:
    """A bare digest is refused by position, and an index needs a group."""
    with pytest.raises(RequestError, match="key 1 is a bytes: give BlockKey objects"):
        index_of(1).match([P[0], bytes(32)])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="num_groups is 0"):
        BlockIndex(0)


def test_declined_blocks_can_be_stored_later() -> None:
    """Blocks declined under pressure leave no hole behind: stored later, all are found, and stored == indexed (B44)."""
    prompt = keys_of("long", 217)
    index = index_of(206)
    accepted = index.complete(begin_store(index, prompt[:40])) + index.complete(begin_store(index, prompt[51:]))
    pressure = [index.match(prompt[:40]), index.match(prompt[51:])]
    assert index.prepare_store(prompt[40:51]) is None
    assert [40] == found(index, prompt)
    for lease in pressure:
        index.complete(lease)
    index.publish(SlotRange(0, 206, 11))

    accepted += index.complete(begin_store(index, prompt))

    assert [217] == found(index, prompt)
    assert 217 == accepted == index.num_ready


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
    """10,000 stores, matches, aborts and resets on 8 keys and 4 slots end with no lease and full capacity (B42)."""
    rng = random.Random(42)
    index = index_of(4)
    open_leases: list[Lease] = []
    held: list[StoreLease] = []
    for _ in range(10_000):
        keys = rng.sample(P, rng.randint(0, 4))
        move = rng.choice(["store", "match", "match", "complete", "complete", "abort", "hold", "keep", "forget"])
        chosen = open_leases.pop(rng.randrange(len(open_leases))) if open_leases else None
        if move == "store" and (lease := index.prepare_store(keys)) is not None:
            open_leases.append(lease)
        elif move == "match":
            open_leases.append(index.match(keys))
        elif move == "forget":
            index.forget(keys[:1])
        if chosen is None:
            continue
        if move in {"store", "match", "forget"}:
            open_leases.append(chosen)
        elif move == "hold" and isinstance(chosen, StoreLease):
            index.hold(chosen)
            held.append(chosen)
        elif move == "complete":
            index.complete(chosen)
        else:
            index.abort(chosen)
        if held and rng.random() < 0.5:
            index.release_held(held.pop())
        index.check_invariants()
    for lease in open_leases:
        index.abort(lease)
    for lease in held:
        index.release_held(lease)

    index.check_invariants()
    usage = index.slot_usage(0)
    assert [] == index.unresolved_leases()
    assert (0, 0, 0, 0) == (usage.writing, usage.leased, usage.draining, usage.held)
    index.clear()
    assert 4 == index.slot_usage(0).free
