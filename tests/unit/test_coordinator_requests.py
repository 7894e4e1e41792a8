"""Requests that are aborted, time out or load early leave the coordinator with nothing open, and no block is lost."""

import pytest

from index_steps import P, Q, keys_of
from kvmoor.coordinator import Coordinator
from kvmoor.index.waiting import WaitState
from kvmoor.transfer_messages import Order, OrderId, Outcome, Report, SlotRange


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def end_order(coordinator: Coordinator, order: Order | None, outcome: Outcome = Outcome.DONE) -> int:
    """Report the end of an order, and return how many blocks it had."""
    assert order is not None
    return coordinator.handle_report(Report(order.order_id, order.kind, outcome, nbytes=0, seconds=0.0))


def coordinator_with(num_blocks: int) -> tuple[Coordinator, Clock]:
    """Return a coordinator with 4 slots in which the first blocks of P are stored."""
    clock = Clock()
    coordinator = Coordinator(1, clock=clock)
    coordinator.publish([SlotRange(0, 0, 4)])
    end_order(coordinator, coordinator.prepare_store(P[:num_blocks]).order)
    return coordinator, clock


def test_a_load_that_was_withdrawn_times_out() -> None:
    """An order that was never submitted leaves the match free, and its time still runs."""
    coordinator, clock = coordinator_with(2)
    match = coordinator.match(P, timeout_s=5.0)
    order = coordinator.prepare_load(match)
    clock.now_s = 6.0
    coordinator.match(Q)
    coordinator.withdraw(order.order_id)
    coordinator.withdraw(OrderId(999))

    coordinator.match(Q)

    assert not coordinator.is_free(match)
    assert 0 == coordinator.statistics().leased
    coordinator.check_invariants()


@pytest.mark.parametrize("moment", ["matched", "loading", "loaded", "storing", "stored", "waiting", "waited"])
def test_a_request_may_be_aborted_at_any_moment(moment: str) -> None:
    """Aborted, twice, at seven moments: no exception, and once the transfers have ended all counts are zero (B35)."""
    coordinator, _ = coordinator_with(2)
    match = coordinator.match(P[:2], request="r", timeout_s=5.0)
    transfer = None
    if moment in {"loading", "loaded"}:
        transfer = coordinator.prepare_load(match)
    elif moment != "matched":
        transfer = coordinator.prepare_store(P[:4]).order
    if moment in {"waiting", "waited"}:
        coordinator.join(P[:4], request="r", timeout_s=5.0)
    if moment in {"loaded", "stored", "waited"}:
        end_order(coordinator, transfer)
        transfer = None

    coordinator.finish_request("r")
    coordinator.finish_request("r")

    coordinator.check_invariants()
    if transfer is not None:
        assert len(transfer.parts[0].slots) == end_order(coordinator, transfer)
    coordinator.take_ended_waiters()
    numbers = coordinator.statistics()
    assert (0, 0, 0, 0) == (numbers.leased, numbers.writing, numbers.held, numbers.unknown_reports)
    assert [] == coordinator.unresolved_keys()
    coordinator.check_invariants()


@pytest.mark.parametrize("ends_first", ["store", "load"])
def test_the_beginning_can_be_loaded_while_the_rest_is_waited_for(ends_first: str) -> None:
    """A load of what was there already keeps its slots until it ends, whether the waiting ends before it or after."""
    coordinator, _ = coordinator_with(2)
    store = coordinator.prepare_store(P[:4]).order
    waiter = coordinator.join(P[:4], request="r", timeout_s=5.0)
    load = coordinator.prepare_load(waiter.lease)
    orders = [store, load] if ends_first == "store" else [load, store]

    for order in orders:
        assert 2 == end_order(coordinator, order)
        coordinator.check_invariants()

    assert [waiter] == coordinator.take_ended_waiters()
    assert (WaitState.READY, 4) == (waiter.state, len(waiter.lease))
    coordinator.release(waiter.lease)
    assert (0, 2) == (coordinator.statistics().leased, coordinator.statistics().loaded)


def test_blocks_declined_once_are_stored_by_the_next_step() -> None:
    """217 blocks in steps of 100, some declined once: all are found, and stored == indexed (B44)."""
    prompt = keys_of("long", 217)
    coordinator = Coordinator(1)
    coordinator.publish([SlotRange(0, 0, 89)])
    for keys in (prompt[:40], prompt[51:100]):
        end_order(coordinator, coordinator.prepare_store(keys).order)
    pressure = [coordinator.match(prompt[:40]), coordinator.match(prompt[51:100])]
    assert "no room" in coordinator.prepare_store(prompt[40:51]).declined
    for match in pressure:
        coordinator.release(match)
    coordinator.publish([SlotRange(0, 89, 128)])

    positions = []
    for num_computed in (200, 217):
        decision = coordinator.prepare_store(prompt[:num_computed])
        positions += decision.positions[0].tolist()
        end_order(coordinator, decision.order)

    assert [*range(40, 51), *range(100, 217)] == positions
    assert 217 == len(coordinator.match(prompt))
    numbers = coordinator.statistics()
    assert (217, 217, 11) == (numbers.stored, numbers.ready, numbers.declined)
