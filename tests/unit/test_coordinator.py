"""What the deciding half promises to those who ask: requests own what they hold, and time ends it."""

import pytest

from index_steps import P, Q
from kvmoor.coordinator import Coordinator
from kvmoor.errors import RequestError
from kvmoor.index.waiting import WaitState
from kvmoor.transfer_messages import Order, OrderId, Outcome, Report, SlotRange


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(clock):
    coordinator = Coordinator(1, clock=clock)
    coordinator.publish([SlotRange(0, 0, 8)])
    yield coordinator
    coordinator.check_invariants()


def report(order: Order, outcome: Outcome = Outcome.DONE) -> Report:
    return Report(order.order_id, order.kind, outcome, 0, 0.0)


def begin_store(coordinator: Coordinator, keys) -> Order:
    order = coordinator.prepare_store(keys).order
    assert order is not None
    return order


def store(coordinator: Coordinator, keys) -> None:
    coordinator.handle_report(report(begin_store(coordinator, keys)))


def test_a_request_that_ends_gives_its_matches_back(coordinator) -> None:
    """What a request has matched and not loaded is free when it ends, however often that is said (B35, B42)."""
    store(coordinator, P[:4])
    lease = coordinator.match(P[:4], request="a")

    assert 1 == coordinator.finish_request("a")

    assert not coordinator.is_free(lease)
    assert 0 == coordinator.statistics().leased
    assert 0 == coordinator.finish_request("a")
    assert 0 == coordinator.finish_request("never seen")


def test_a_request_that_ends_leaves_its_load_alone(coordinator) -> None:
    """A load under way keeps its slots when its request is aborted, until its report comes (B35)."""
    store(coordinator, P[:4])
    order = coordinator.prepare_load(coordinator.match(P[:4], request="a", timeout_s=1.0))

    assert 0 == coordinator.finish_request("a")
    assert 4 == coordinator.statistics().leased

    coordinator.handle_report(report(order))
    assert 0 == coordinator.statistics().leased


def test_a_withdrawn_load_is_its_requests_match_again(coordinator) -> None:
    """An order that was never submitted leaves a match that its request's end releases."""
    store(coordinator, P[:2])
    lease = coordinator.match(P[:2], request="a")
    order = coordinator.prepare_load(lease)

    coordinator.withdraw(order.order_id)

    assert coordinator.is_free(lease)
    assert 1 == coordinator.finish_request("a")


def test_a_match_ends_with_its_time(coordinator, clock) -> None:
    """A match that nobody loads in time is released with the next question, and cannot be loaded any more."""
    store(coordinator, P[:2])
    late = coordinator.match(P[:2], timeout_s=5.0)
    clock.now_s += 4.9
    coordinator.match(Q[:1])
    assert coordinator.is_free(late)

    clock.now_s += 0.2
    coordinator.match(Q[:1])

    assert not coordinator.is_free(late)
    assert 0 == coordinator.statistics().leased


def test_a_load_in_time_is_not_ended_by_time(coordinator, clock) -> None:
    """Once its load has begun, a match is over when the copy is, not when its time is up."""
    store(coordinator, P[:2])
    order = coordinator.prepare_load(coordinator.match(P[:2], timeout_s=5.0))
    clock.now_s += 6.0
    coordinator.match(Q[:1])

    assert 2 == coordinator.statistics().leased
    coordinator.handle_report(report(order))
    assert 2 == coordinator.statistics().loaded


@pytest.mark.parametrize("outcome", list(Outcome)[:3])
def test_all_who_wait_for_a_store_go_on_when_it_ends(coordinator, outcome) -> None:
    """However a store ends, every request that joined it hears of it once, with what there is then (B36)."""
    store(coordinator, P[:2])
    order = begin_store(coordinator, P[:4])
    waiters = [coordinator.join(P[:4], request=number, timeout_s=9.0) for number in range(3)]
    assert [] == coordinator.take_ended_waiters()

    coordinator.handle_report(report(order, outcome))

    assert waiters == coordinator.take_ended_waiters()
    expected = (WaitState.READY, 4) if outcome is Outcome.DONE else (WaitState.PARTIAL, 2)
    assert [expected] * 3 == [(waiter.state, len(waiter.lease)) for waiter in waiters]
    assert [1, 1, 1] == [coordinator.finish_request(number) for number in range(3)]
    if outcome is Outcome.ABANDONED:
        coordinator.handle_report(report(order, Outcome.SETTLED))


def test_nobody_waits_beyond_the_deadline_of_the_own_request(coordinator, clock) -> None:
    """Each request has a deadline of its own for what others bring; the store goes on without those who left."""
    order = begin_store(coordinator, P[:2])
    impatient = coordinator.join(P[:2], request="a", timeout_s=1.0)
    patient = coordinator.join(P[:2], request="b", timeout_s=10.0)
    clock.now_s += 1.5

    assert [impatient] == coordinator.take_ended_waiters()
    assert WaitState.EXPIRED is impatient.state

    coordinator.handle_report(report(order))
    assert [patient] == coordinator.take_ended_waiters()
    assert (WaitState.READY, 2) == (patient.state, len(patient.lease))
    coordinator.finish_request("b")


@pytest.mark.parametrize("is_there", [False, True])
def test_what_was_waited_for_is_not_kept_for_ever(coordinator, clock, is_there) -> None:
    """Who has waited has as long again to begin the load; then the blocks may be evicted, whoever forgot them."""
    if is_there:
        store(coordinator, P[:2])
    else:
        order = begin_store(coordinator, P[:2])
    waiter = coordinator.join(P[:2], request=None, timeout_s=5.0)
    if not is_there:
        coordinator.handle_report(report(order))
    assert 2 == coordinator.statistics().leased

    clock.now_s += 10.1
    coordinator.match(Q[:1])

    assert waiter.lease.resolved
    assert 0 == coordinator.statistics().leased


def test_a_request_that_ended_hears_of_nothing(coordinator) -> None:
    """What a request waited for comes, then the request ends: nobody is told to load what is released already."""
    order = begin_store(coordinator, P[:2])
    coordinator.join(P[:2], request="a", timeout_s=5.0)
    coordinator.handle_report(report(order))

    coordinator.finish_request("a")

    assert [] == coordinator.take_ended_waiters()


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, "1", True])
def test_bad_times_are_refused_with_nothing_leased(coordinator, timeout_s) -> None:
    """A time that is none would hide the deadlines of others: it is refused before anything is leased."""
    store(coordinator, P[:2])

    with pytest.raises(RequestError, match="timeout_s is"):
        coordinator.match(P[:2], timeout_s=timeout_s)
    with pytest.raises(RequestError, match="timeout_s is"):
        coordinator.join(P[:2], request="a", timeout_s=timeout_s)

    assert 0 == coordinator.statistics().leased


def test_keys_may_come_one_by_one(coordinator) -> None:
    """A generator of keys is stored and found like a list of them; what is no collection is refused."""
    decision = coordinator.prepare_store(key for key in P[:3])
    coordinator.handle_report(report(decision.order))

    lease = coordinator.match(key for key in P[:3])
    assert 3 == len(lease)
    coordinator.release(lease)
    for keys in (None, 5, P[0]):
        with pytest.raises(RequestError, match="give a sequence of BlockKey objects"):
            coordinator.match(keys)


def test_keeping_at_a_reset_keeps_stores_in_flight_too(coordinator) -> None:
    """Where the weights stay, a reset with keep=True drops nothing, not even what is being stored (B37)."""
    store(coordinator, P[:2])
    order = begin_store(coordinator, Q[:2])

    coordinator.reset(keep=True)
    coordinator.handle_report(report(order))

    for prompt in (P[:2], Q[:2]):
        lease = coordinator.match(prompt)
        assert 2 == len(lease)
        coordinator.release(lease)


def test_a_reset_reaches_what_is_in_flight(coordinator) -> None:
    """After a reset neither what was stored nor what is being stored is found, and no slot is lost (B37)."""
    store(coordinator, P[:2])
    order = begin_store(coordinator, Q[:2])

    coordinator.reset()
    coordinator.handle_report(report(order))

    assert (0, 0) == (len(coordinator.match(P[:2])), len(coordinator.match(Q[:2])))
    store(coordinator, [*P[:4], *Q[:4]])
    assert 8 == coordinator.statistics().ready


def test_reports_of_unknown_orders_are_counted(coordinator) -> None:
    """A report for an order that never was, or that ended, changes nothing (B35)."""
    order = begin_store(coordinator, P[:2])
    coordinator.handle_report(report(order))

    coordinator.handle_report(report(order))
    coordinator.handle_report(Report(OrderId(99), order.kind, Outcome.DONE, 0, 0.0))

    assert (2, 2) == (coordinator.statistics().unknown_reports, coordinator.statistics().ready)
