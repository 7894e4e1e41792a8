"""Whoever needs blocks that are being written waits for that one transfer, and goes on however it ends."""

from collections.abc import Callable

import numpy as np
import pytest

from index_steps import P, Q, R, assert_no_slot_lost, begin_store, found, index_of, keys_of, store
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.lease import LeaseState, LoadLease, StoreLease
from kvmoor.index.waiting import Waiter, WaitingList, WaitState


def outcome(waiter: Waiter) -> tuple[WaitState, int, int]:
    """Return what came of waiting, how many blocks are leased and how many still pending."""
    return waiter.state, len(waiter.lease), waiter.num_pending


def test_all_who_joined_a_transfer_go_on_when_it_ends() -> None:
    """Fifty requests for one prompt cause one store, and each gets its blocks when that ends, first come first told."""
    index = index_of(4)
    lease = begin_store(index, P[:4])
    waiters = [index.join(P[:4], holder=number) for number in range(50)]
    assert {(WaitState.WAITING, 0, 4)} == set(map(outcome, waiters))
    assert 0 == len(begin_store(index, P[:4]))
    assert [] == index.take_ended_waiters()
    index.check_invariants()

    assert 4 == index.complete(lease)

    assert waiters == index.take_ended_waiters()
    assert {(WaitState.READY, 4, 0)} == set(map(outcome, waiters))
    index.check_invariants()
    for waiter in waiters:
        assert lease.slots == waiter.lease.slots
        index.complete(waiter.lease)
    assert 0 == index.num_leased
    assert [] == index.take_ended_waiters()


def test_who_has_nothing_to_wait_for_is_ready_at_once() -> None:
    """Where no block is being written the answer is what a match would give, and nothing ends later."""
    index = index_of(2)
    store(index, P[:2])

    assert [
        (WaitState.READY, 2, 0),
        (WaitState.READY, 1, 0),
        (WaitState.READY, 0, 0),
        (WaitState.READY, 0, 0),
    ] == [outcome(index.join(keys)) for keys in (P[:4], P[1:], Q, [])]

    assert [] == index.take_ended_waiters()
    index.check_invariants()


def test_what_is_absent_is_not_waited_for() -> None:
    """Keys from the first absent one on are left out, even if they are being written."""
    index = index_of(4)
    store(index, P[:1])
    begin_store(index, P[1:2])
    behind = begin_store(index, P[3:4])

    waiter = index.join(P[:4])

    assert P[:2] == list(waiter.keys)
    assert (WaitState.WAITING, 1, 1) == outcome(waiter)
    index.complete(behind)
    assert [] == index.take_ended_waiters()


def test_who_waits_for_two_stores_waits_for_both() -> None:
    """The waiting ends with the last of several transfers, in whichever order they end."""
    for order in ([0, 1], [1, 0]):
        index = index_of(4)
        leases = [begin_store(index, P[:2]), begin_store(index, P[2:4])]
        waiter = index.join(P[:4])

        index.complete(leases[order[0]])
        assert (WaitState.WAITING, 0, 2) == outcome(waiter)
        assert [] == index.take_ended_waiters()
        index.complete(leases[order[1]])

        assert [waiter] == index.take_ended_waiters()
        assert (WaitState.READY, 4, 0) == outcome(waiter)


def test_who_waits_over_groups_waits_for_all_of_them() -> None:
    """Blocks of several groups are waited for together, and slots of equal numbers are not mixed up."""
    index = index_of(2, 2)
    keys = [*keys_of("p", 1, 0), *keys_of("p", 1, 1), *keys_of("q", 1, 0)]
    leases = [begin_store(index, [key]) for key in (keys[1], keys[0], keys[2])]
    other = index.join(keys[1:2])
    waiter = index.join(keys)

    index.complete(leases[0])
    assert [other] == index.take_ended_waiters()
    index.complete(leases[1])
    assert (WaitState.WAITING, 0, 1) == outcome(waiter)
    index.complete(leases[2])

    assert [waiter] == index.take_ended_waiters()
    assert (WaitState.READY, 3, 0) == outcome(waiter)
    assert (0, 0, 1) == waiter.lease.slots
    index.check_invariants()


@pytest.mark.parametrize("fail", [BlockIndex.abort, BlockIndex.hold])
@pytest.mark.parametrize("failed", range(3))
def test_waiting_ends_with_a_failure_too(fail: Callable[[BlockIndex, StoreLease], None], failed: int) -> None:
    """If one of several transfers fails, all who waited go on with the blocks in front of it."""
    index = index_of(4)
    store(index, P[:1])
    leases = [begin_store(index, [key]) for key in P[1:4]]
    waiters = [index.join(P[:4]), index.join(P[:4])]

    for number, lease in enumerate(leases):
        assert [] == index.take_ended_waiters()
        if number == failed:
            fail(index, lease)
        else:
            index.complete(lease)

    assert waiters == index.take_ended_waiters()
    assert [(WaitState.PARTIAL, 1 + failed, 0)] * 2 == [outcome(waiter) for waiter in waiters]
    assert 1 + failed == index.num_leased
    index.check_invariants()


def test_nobody_waits_beyond_its_own_deadline() -> None:
    """Each request goes on at its own deadline with what is there, and the others wait on."""
    index = index_of(4)
    store(index, P[:2])
    lease = begin_store(index, P[2:4])
    early, late, patient = (index.join(P[:4], deadline_s=deadline_s) for deadline_s in (1.0, 2.0, None))

    assert 0 == index.expire(0.9)
    assert 1 == index.expire(1.0)
    assert [early] == index.take_ended_waiters()
    assert 1 == index.expire(9.0)
    assert [late] == index.take_ended_waiters()
    assert (WaitState.WAITING, 2, 2) == outcome(patient)
    index.check_invariants()
    index.complete(lease)

    assert [patient] == index.take_ended_waiters()
    assert not index._waiting
    assert [WaitState.EXPIRED, WaitState.EXPIRED, WaitState.READY] == [each.state for each in (early, late, patient)]
    assert [2, 2, 4] == [len(each.lease) for each in (early, late, patient)]
    index.check_invariants()


def test_a_reset_ends_the_waiting() -> None:
    """After a reset nobody waits for blocks of before, what was there is given back, and the old store tells nobody."""
    index = index_of(4)
    store(index, P[:2])
    lease = begin_store(index, P[2:4])
    waiters = [index.join(P[:4], holder="r", deadline_s=5.0), index.join(P[2:4])]

    index.reset()

    assert waiters == index.take_ended_waiters()
    assert {(WaitState.PARTIAL, 0)} == {outcome(waiter)[:2] for waiter in waiters}
    assert 0 == index.num_leased
    index.check_invariants()
    index.complete(lease)
    assert [] == index.take_ended_waiters()
    assert 0 == index.release_holder("r") == index.expire(9.0)
    assert_no_slot_lost(index)


def test_a_store_after_a_reset_has_waiters_of_its_own() -> None:
    """The end of an old store does not end the waiting for the same block stored anew."""
    index = index_of(4)
    old = begin_store(index, P[:1])
    index.reset()
    new = begin_store(index, P[:1])
    waiter = index.join(P[:1])

    index.complete(old)
    assert [] == index.take_ended_waiters()
    index.complete(new)

    assert [waiter] == index.take_ended_waiters()
    assert (WaitState.READY, new.slots) == (waiter.state, waiter.lease.slots)


def test_a_request_that_ends_waits_no_longer() -> None:
    """Its beginning is given back and it is told of nothing, while store and other requests go on."""
    index = index_of(4)
    store(index, P[:2])
    lease = begin_store(index, P[2:4])
    gone, other = index.join(P[:4], holder="gone", deadline_s=5.0), index.join(P[2:4], holder="other")
    assert 2 == index.num_leased

    assert 0 < index.release_holder("gone")
    assert 0 == index.release_holder("gone")

    assert (WaitState.CANCELLED, 0) == (gone.state, index.num_leased)
    assert gone.lease.resolved
    assert 0 == index.expire(9.0)
    index.complete(lease)
    assert [other] == index.take_ended_waiters()
    assert (WaitState.READY, 2, 0) == outcome(other)
    index.check_invariants()


def test_who_waits_no_longer_is_forgotten() -> None:
    """A store that never ends does not remember the requests that have joined it and gone."""
    index = index_of(2)
    begin_store(index, P[:2])
    for end in (lambda: index.release_holder("r"), lambda: index.expire(9.0)):
        for _ in range(3):
            index.join(P[:2], holder="r", deadline_s=5.0)

        assert 3 == end()

        assert not index._waiting
        index.check_invariants()


def test_a_request_that_ends_before_it_is_told_leaves_nothing_behind() -> None:
    """What a waiter got when its waiting ended is its holder's, and ends with the holder."""
    index = index_of(2)
    lease = begin_store(index, P[:2])
    waiter = index.join(P[:2], holder="r")
    index.complete(lease)

    assert 1 == index.release_holder("r")

    assert waiter.lease.resolved
    assert_no_slot_lost(index)


def test_the_beginning_is_kept_while_the_rest_is_waited_for() -> None:
    """Blocks that were there when the waiting began cannot be evicted until it ends, and are leased without a gap."""
    index = index_of(4)
    store(index, P[:2])
    lease = begin_store(index, P[2:3])
    waiter = index.join(P[:3], holder="r")
    store(index, Q[:1])

    assert index.prepare_store(R[:2]) is None
    index.complete(lease)
    assert index.prepare_store(R[:2]) is None

    assert (WaitState.READY, 3, 0) == outcome(waiter)
    index.complete(waiter.lease)
    assert 4 == len(begin_store(index, R[:4]))


def test_a_block_forgotten_while_it_is_waited_for_is_not_there_in_the_end() -> None:
    """Whoever waits for a block that is forgotten goes on when its store ends, with what is in front of it."""
    index = index_of(3)
    lease = begin_store(index, P[:3])
    waiter = index.join(P[:3])
    index.forget(P[1:2])
    assert (WaitState.WAITING, 0, 3) == outcome(waiter)

    index.complete(lease)

    assert [waiter] == index.take_ended_waiters()
    assert (WaitState.PARTIAL, 1, 0) == outcome(waiter)
    index.check_invariants()


def test_a_beginning_that_was_given_back_is_not_given_back_twice() -> None:
    """A waiter whose owner has resolved what was there before still gets all of it in the end."""
    index = index_of(3)
    store(index, P[:2])
    lease = begin_store(index, P[2:3])
    waiter = index.join(P[:3], holder="r")
    index.abort(waiter.lease)

    index.complete(lease)

    assert (WaitState.READY, 3, 0) == outcome(waiter)
    index.check_invariants()


END_WAITING = {
    "done": lambda index, lease: index.complete(lease),
    "failed": lambda index, lease: index.abort(lease),
    "held": lambda index, lease: index.hold(lease),
    "request ended": lambda index, _: index.release_holder("r"),
    "time is up": lambda index, _: index.expire(9.0),
    "reset": lambda index, _: index.reset(),
}


@pytest.mark.parametrize("end", END_WAITING)
def test_a_load_of_the_beginning_outlives_the_waiting(end: str) -> None:
    """If what was there is being loaded already, its slots stay as they are until that load ends, whatever happens."""
    index = index_of(2)
    store(index, P[:1])
    lease = begin_store(index, P[1:2])
    waiter = index.join(P[:2], holder="r", deadline_s=5.0)
    beginning = waiter.lease
    index.start_load(beginning)

    END_WAITING[end](index, lease)

    assert WaitState.WAITING is not waiter.state
    assert LeaseState.OPEN is beginning.state
    assert beginning.in_flight
    for ended in index.take_ended_waiters():
        index.abort(ended.lease)
    index.check_invariants()
    assert 1 == index.num_leased
    assert index.prepare_store(R[:2]) is None
    index.complete(beginning)
    assert 0 == index.num_leased


def test_the_list_of_who_waits_forgets_them() -> None:
    """Once nobody waits, whether all ended, were removed or cleared, the list is empty."""
    waiting = WaitingList()
    slots = np.arange(3, dtype=np.int32)

    def joined() -> Waiter:
        waiter = Waiter((), LoadLease(BlockIndex(1), ()))
        waiting.add(waiter, 0, slots)
        assert waiting
        return waiter

    first, second = joined(), joined()
    waiting.remove(first)
    assert [] == waiting.end(0, slots[:2])
    assert [] == waiting.end(1, slots)
    assert [second] == waiting.end(0, slots)
    assert not waiting

    waiting.remove(joined())
    assert not waiting

    third = joined()
    assert [third] == waiting.clear()
    assert not waiting
    assert [] == waiting.clear()


def test_found_blocks_need_no_waiting() -> None:
    """Joining leaves an index as it was found, once its lease is over."""
    index = index_of(3)
    store(index, P[:3])
    for _ in range(3):
        index.complete(index.join(P[:3]).lease)

    assert [3] == found(index, P)
    assert_no_slot_lost(index)
