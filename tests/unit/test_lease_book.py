"""What a request holds ends with it, or when its time is up, but never under a load that is under way."""

from collections.abc import Callable

import pytest

from index_steps import P, Q, R, assert_no_slot_lost, begin_store, found, index_of, store
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.lease import LeaseState, LoadLease
from kvmoor.index.lease_book import LeaseBook


def lease_of(holder: object = None, deadline_s: float | None = None) -> LoadLease:
    """Return a lease that is in no index."""
    return LoadLease(BlockIndex(1), (), holder, deadline_s)  # type: ignore[arg-type]


def end_by_holder(index: BlockIndex) -> int:
    return index.release_holder("r")


def end_by_deadline(index: BlockIndex) -> int:
    return index.expire(10.0)


ENDS = [(end_by_holder, LeaseState.ABORTED), (end_by_deadline, LeaseState.EXPIRED)]


def test_a_book_names_the_open_claims_of_a_holder() -> None:
    """Claims are listed oldest first, by holder, until they are over; nobody's claims are no holder's."""
    book = LeaseBook()
    first, second, other, nobodys = lease_of("a"), lease_of("a"), lease_of("b"), lease_of()
    for lease in (first, other, nobodys, second):
        book.add(lease)

    assert [first, second] == book.of_holder("a")
    assert [] == book.of_holder("c") == book.of_holder(None)
    book.remove(first)
    book.remove(first)
    book.remove(lease_of("c"))
    assert [second] == book.of_holder("a")
    assert [other, nobodys, second] == book.leases()
    assert (3, []) == (len(book), book.waiters())


def test_a_book_names_what_is_due_once() -> None:
    """A claim is due from its deadline on, earliest first and named once, unless it is over before."""
    book = LeaseBook()
    late, early, over, endless = (lease_of(deadline_s=deadline_s) for deadline_s in (3.0, 1.0, 2.0, None))
    for lease in (late, early, over, endless):
        book.add(lease)
    book.remove(over)

    assert [] == book.take_due(0.5)
    assert [early] == book.take_due(1.0)
    assert [late] == book.take_due(100.0)
    assert [] == book.take_due(100.0)


def test_a_book_forgets_claims_that_are_over() -> None:
    """Many claims with deadlines far ahead, each over soon, leave neither deadlines nor holders behind."""
    book = LeaseBook()
    staying = lease_of("stays", 5.0)
    book.add(staying)
    for number in range(2000):
        lease = lease_of(number, 1e9)
        book.add(lease)
        book.remove(lease)

    assert len(book._deadlines) < 100
    assert ["stays"] == list(book._by_holder)
    assert [staying] == book.take_due(5.0)


@pytest.mark.parametrize(("end", "state"), ENDS)
def test_what_was_matched_and_never_loaded_is_given_back(end: Callable[[BlockIndex], int], state: LeaseState) -> None:
    """The end of a request, or its time, releases its matches and nobody else's; twice does no harm (B42)."""
    index = index_of(4)
    store(index, P[:2])
    store(index, Q[:2])
    mine = [index.match(P[:2], holder="r", deadline_s=10.0), index.match(P[:1], holder="r", deadline_s=9.0)]
    other = index.match(Q[:2], holder="other", deadline_s=10.5)
    endless = index.match(Q[:1])

    assert 2 == end(index)
    assert 0 == end(index)

    index.check_invariants()
    assert [state, state] == [lease.state for lease in mine]
    assert [other, endless] == index.unresolved_leases()
    assert (P[1], P[0]) == begin_store(index, R[:2]).evicted_keys
    assert index.prepare_store(R[2:3]) is None
    with pytest.raises(RequestError, match="a lease is resolved once"):
        index.complete(mine[0])


@pytest.mark.parametrize(("end", "state"), ENDS)
def test_a_load_under_way_outlives_its_request(end: Callable[[BlockIndex], int], state: LeaseState) -> None:
    """No slot of a load in flight is given away, whatever becomes of its request; its own end releases it (B35)."""
    index = index_of(2)
    store(index, P[:2])
    lease = index.match(P[:2], holder="r", deadline_s=5.0)
    index.start_load(lease)

    assert 0 == end(index)

    assert not lease.resolved
    assert lease.in_flight
    assert index.prepare_store(Q[:1]) is None
    index.complete(lease)
    assert LeaseState.COMPLETED is lease.state
    assert 0 == end(index)
    assert_no_slot_lost(index)


@pytest.mark.parametrize(("end", "state"), ENDS)
def test_a_load_that_was_never_begun_ends_with_its_request(end: Callable[[BlockIndex], int], state: LeaseState) -> None:
    """A load that is withdrawn, also more than once, leaves its lease with holder and deadline as they were."""
    index = index_of(1)
    store(index, P[:1])
    lease = index.match(P[:1], holder="r", deadline_s=5.0)
    for _ in range(3):
        index.start_load(lease)
        index.cancel_load(lease)
    assert not lease.resolved

    assert 1 == end(index)

    assert state is lease.state
    assert_no_slot_lost(index)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda index: index.expire(2.0), id="time is up"),
        pytest.param(lambda index: index.release_holder("r"), id="request ended"),
    ],
)
def test_what_ends_during_a_load_counts_once_it_is_withdrawn(end) -> None:
    """A match whose time was up, or whose request ended, while its load was prepared ends when that is undone."""
    index = index_of(1)
    store(index, P[:1])
    lease = index.match(P[:1], holder="r", deadline_s=1.0)
    index.start_load(lease)
    assert 0 == end(index)
    assert not lease.resolved

    index.cancel_load(lease)

    assert LeaseState.ABORTED is lease.state
    assert 0 == index.expire(3.0)
    assert_no_slot_lost(index)


def test_time_passes_for_each_match_by_itself() -> None:
    """A match is open until its own deadline, not before, and one without is open for ever."""
    index = index_of(1)
    store(index, P[:1])
    leases = [index.match(P[:1], deadline_s=deadline_s) for deadline_s in (3.0, 1.0, 2.0, None)]

    for now_s, expected in [(0.9, 0), (1.0, 1), (2.5, 1), (2.9, 0), (1e9, 1)]:
        assert expected == index.expire(now_s)
        index.check_invariants()

    assert [True, True, True, False] == [lease.resolved for lease in leases]
    assert 1 == index.num_leased


def test_an_empty_match_is_nobodys() -> None:
    """A match that found nothing, or keeps nothing, has no holder and no deadline to observe."""
    index = index_of(1)
    store(index, P[:1])
    index.match(Q, holder="r", deadline_s=1.0)
    index.match(P[:1], holder="r", deadline_s=1.0).keep(0)

    assert 0 == index.release_holder("r") == index.expire(2.0)

    assert_no_slot_lost(index)


def test_a_shortened_match_ends_as_a_whole() -> None:
    """What is kept of a match is released with its holder, and only that."""
    index = index_of(3)
    store(index, P[:3])
    lease = index.match(P[:3], holder="r")
    lease.keep(2)

    assert 1 == index.release_holder("r")

    assert [3] == found(index, P)
    assert_no_slot_lost(index)


def test_a_holder_does_not_hold_stores() -> None:
    """A store goes on when the request that wanted its blocks ends, so that the next one finds them."""
    index = index_of(2)
    lease = begin_store(index, P[:2])
    index.match(P[:2], holder="r")

    assert 0 == index.release_holder("r")

    assert 2 == index.complete(lease)
    assert [2] == found(index, P)
