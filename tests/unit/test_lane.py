"""A lane tells from one number which jobs are over, and promises nothing about those that are not."""

from collections.abc import Callable, Sequence

import pytest

from kvmoor.devices.device import BlockCopies, DeviceEvent
from kvmoor.errors import BrokenError, ClosedError, DeviceError, RequestError
from kvmoor.transfer_messages import Order, OrderId, OrderKind, Outcome, Report
from kvmoor.transfers.copy_plan import CopyPlan
from kvmoor.transfers.lane import TransferLane


class HandQueue:
    """A queue whose completion word is moved by hand."""

    def __init__(self) -> None:
        self.word = 0
        self.failures: dict[int, DeviceError] = {}
        self.enqueued: list[int] = []
        self.refuse_from = 10**9
        self.refuse_with: Exception = DeviceError("the driver took 3 of 5 launches")
        self.probes = 0
        self.at_probe: Callable[[], None] = lambda: None
        self.ordered: list[tuple[object, int]] = []

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        if sequence >= self.refuse_from:
            raise self.refuse_with
        self.enqueued.append(sequence)

    def completed(self) -> int:
        return self.word

    def failure(self, sequence: int) -> DeviceError | None:
        return self.failures.pop(sequence, None)

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        assert timeout_s >= 0
        return self.word >= sequence

    def probe(self) -> None:
        self.probes += 1
        self.at_probe()

    def order_after(self, stream: object, sequence: int) -> None:
        self.ordered.append((stream, sequence))

    def close(self, timeout_s: float) -> bool:
        return self.word >= len(self.enqueued)


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def queue() -> HandQueue:
    return HandQueue()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def lane(queue: HandQueue, clock: HandClock) -> TransferLane:
    return TransferLane("store", queue, clock=clock)


def submit(lane: TransferLane, number: int, timeout_s: float = 10.0) -> None:
    order = Order(OrderId(number), OrderKind.DEVICE_TO_SLOT, ())
    lane.submit(order, CopyPlan((), 1, 1000 + number), wait_for=None, timeout_s=timeout_s)


def outcomes(reports: list[Report]) -> list[tuple[int, Outcome]]:
    return [(report.order_id, report.outcome) for report in reports]


def test_jobs_end_when_their_number_is_reached(lane: TransferLane, queue: HandQueue, clock: HandClock) -> None:
    """Reaching the number of a job ends that job and the older ones, and no other."""
    for number in (11, 12, 13):
        submit(lane, number)
    assert [] == lane.poll()

    queue.word, clock.now = 2, 101.5
    reports = lane.poll()

    assert [(11, Outcome.DONE), (12, Outcome.DONE)] == outcomes(reports)
    assert [(1011, 1.5), (1012, 1.5)] == [(report.nbytes, report.seconds) for report in reports]
    assert [13] == [transfer.order.order_id for transfer in lane.unproven()]


def test_each_job_is_reported_once(lane: TransferLane, queue: HandQueue) -> None:
    """A job that was reported is never reported again, however often one polls."""
    submit(lane, 11)
    queue.word = 1

    assert [(11, Outcome.DONE)] == outcomes(lane.poll())
    assert [] == lane.poll()


def test_a_failed_copy_is_a_failed_job_with_its_reason(lane: TransferLane, queue: HandQueue) -> None:
    """A failure of the device becomes the reason of that job alone, and no bytes are counted."""
    submit(lane, 11)
    submit(lane, 12)
    queue.failures[1] = DeviceError("copy 3 failed")
    queue.word = 2

    first, second = lane.poll()

    assert (Outcome.FAILED, "copy 3 failed", 0) == (first.outcome, first.reason, first.nbytes)
    assert Outcome.DONE == second.outcome


def test_a_late_job_is_abandoned_then_settled(lane: TransferLane, queue: HandQueue, clock: HandClock) -> None:
    """Past its deadline a job is given up once, stays unproven, and is settled when its number comes late (B24)."""
    for number in (11, 12):
        submit(lane, number, timeout_s=2.0)
    queue.word, clock.now = 1, 102.0

    assert [(11, Outcome.DONE), (12, Outcome.ABANDONED)] == outcomes(lane.poll())
    assert [] == lane.poll()
    assert [12] == [transfer.order.order_id for transfer in lane.unproven()]

    queue.word = 2
    assert [(12, Outcome.SETTLED)] == outcomes(lane.poll())
    assert [] == lane.unproven()


def test_a_dead_device_fails_its_jobs_instead_of_keeping_them(
    lane: TransferLane, queue: HandQueue, clock: HandClock
) -> None:
    """Before a job is given up the device is asked whether it lives: what a dead one has is over, and failed."""
    for number, timeout_s in ((11, 2.0), (12, 9.0)):
        submit(lane, number, timeout_s=timeout_s)

    def die() -> None:
        queue.word = 2
        queue.failures = {1: DeviceError("the GPU fell off the bus"), 2: DeviceError("the GPU fell off the bus")}

    queue.at_probe = die
    clock.now = 101.9
    assert ([], 0) == (lane.poll(), queue.probes)
    clock.now = 102.0
    first, second = lane.poll()

    assert (Outcome.FAILED, "the GPU fell off the bus") == (first.outcome, first.reason)
    assert Outcome.FAILED == second.outcome
    assert [] == lane.unproven()


def test_a_device_is_asked_once_for_each_job_that_is_late(
    lane: TransferLane, queue: HandQueue, clock: HandClock
) -> None:
    """A job that was given up costs no more questions, nor does one that is over."""
    for number in (11, 12):
        submit(lane, number, timeout_s=2.0)
    queue.word, clock.now = 2, 102.0
    lane.poll()
    assert 0 == queue.probes
    submit(lane, 13, timeout_s=2.0)
    clock.now = 105.0
    assert [(13, Outcome.ABANDONED)] == outcomes(lane.poll())
    lane.poll()
    assert 1 == queue.probes


def test_a_late_success_is_never_reported_as_done(lane: TransferLane, queue: HandQueue, clock: HandClock) -> None:
    """A job that was given up never becomes DONE, so nobody can see a block that was reported lost."""
    submit(lane, 11, timeout_s=1.0)
    clock.now = 200.0
    lane.poll()
    queue.word = 1

    (report,) = lane.poll()

    assert (Outcome.SETTLED, 0) == (report.outcome, report.nbytes)


def test_a_job_over_at_its_deadline_is_done(lane: TransferLane, queue: HandQueue, clock: HandClock) -> None:
    """A job whose number has been reached is done, even if nobody looked before its deadline passed."""
    submit(lane, 11, timeout_s=1.0)
    queue.word, clock.now = 1, 500.0

    assert [(11, Outcome.DONE)] == outcomes(lane.poll())


def test_half_a_job_breaks_the_lane(lane: TransferLane, queue: HandQueue) -> None:
    """When a device takes only part of a job, the job is unproven, later ones are refused, earlier ones still end."""
    submit(lane, 11)
    queue.refuse_from = 2
    submit(lane, 12)

    assert "3 of 5 launches" in lane.broken
    assert [(12, Outcome.ABANDONED)] == outcomes(lane.poll())
    with pytest.raises(BrokenError, match=r"3 of 5 launches.*open a new one"):
        submit(lane, 13)
    queue.word = 1
    assert [(11, Outcome.DONE)] == outcomes(lane.poll())
    assert [12] == [transfer.order.order_id for transfer in lane.unproven()]
    assert [1] == queue.enqueued


@pytest.mark.parametrize("error", [RequestError("a foreign event"), ClosedError("the queue is closed")], ids=repr)
def test_a_job_of_which_nothing_was_queued_leaves_no_trace(
    lane: TransferLane, queue: HandQueue, error: Exception
) -> None:
    """A refusal with nothing queued reaches the caller, and the lane goes on as if the job had never been."""
    submit(lane, 11)
    queue.refuse_from, queue.refuse_with = 2, error
    with pytest.raises(type(error)):
        submit(lane, 12)

    assert ("", [11]) == (lane.broken, [transfer.order.order_id for transfer in lane.unproven()])
    queue.refuse_from = 10**9
    submit(lane, 12)
    queue.word = queue.enqueued[-1]
    assert [(11, Outcome.DONE), (12, Outcome.DONE)] == outcomes(lane.poll())


def test_a_stream_is_ordered_after_a_job_by_its_number(lane: TransferLane, queue: HandQueue) -> None:
    """The device is told the number that the job has on its queue, and the stream as it was given."""
    for number in (11, 12, 13):
        submit(lane, number)
    transfer = lane.transfer(OrderId(12))
    assert transfer is not None

    lane.order_after(transfer, "a stream")

    assert [("a stream", 2)] == queue.ordered


def test_a_closed_lane_takes_nothing(lane: TransferLane, queue: HandQueue) -> None:
    """After close has begun no order is queued, and what is queued may still end."""
    submit(lane, 11)
    lane.refuse_new_work()

    with pytest.raises(ClosedError):
        submit(lane, 12)
    queue.word = 1
    assert [(11, Outcome.DONE)] == outcomes(lane.poll())


def test_closing_tells_whether_copies_may_run(lane: TransferLane, queue: HandQueue) -> None:
    """Close says no while the device cannot prove that its copies ended, and may be asked again."""
    submit(lane, 11)

    assert not lane.close(0.0)
    assert [] == lane.poll()
    queue.word = 1
    assert lane.close(0.0)
    assert [(11, Outcome.DONE)] == outcomes(lane.poll())


def test_a_lane_proven_idle_reports_every_job(lane: TransferLane, queue: HandQueue, clock: HandClock) -> None:
    """Once the end of the queue is proven, jobs that never got their number are failed or settled, not forgotten."""
    submit(lane, 11, timeout_s=1.0)
    clock.now = 200.0
    lane.poll()
    submit(lane, 12)
    queue.close = lambda timeout_s: True  # type: ignore[method-assign]

    assert lane.close(0.0)
    settled, dropped = lane.poll()

    assert (Outcome.SETTLED, Outcome.FAILED) == (settled.outcome, dropped.outcome)
    assert "dropped" in dropped.reason
