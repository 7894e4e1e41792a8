"""One in-order queue of copies in one direction, with deadlines.

A lane never waits for its device: it reads the completion word. A job whose number is reached is over; a job whose
deadline passes first is given up as ABANDONED, which promises nothing about the copy, and is reported once more as
SETTLED when its number is reached at last.
"""

import time
from collections.abc import Callable

from kvmoor.devices.device import CopyQueue, DeviceEvent
from kvmoor.errors import BrokenError, ClosedError, RequestError
from kvmoor.transfer_messages import Order, OrderId, Report
from kvmoor.transfers.copy_plan import CopyPlan
from kvmoor.transfers.transfer import Transfer, TransferState


class TransferLane:
    """Run orders one after the other on a queue it owns. Not thread-safe: the worker calls it under its lock.

    Only `wait_over` and `order_after` may be called without that lock, since they touch nothing but the queue.
    """

    def __init__(self, name: str, queue: CopyQueue, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._queue = queue
        self._clock = clock
        self._last_sequence = 0
        self._unproven: dict[OrderId, Transfer] = {}  # in the order of submission; RUNNING or ABANDONED
        self._pending_reports: list[Report] = []
        self._broken = ""
        self._closed = False
        self._proven_idle = False

    @property
    def name(self) -> str:
        """Return what the lane is for: ``"store"``, ``"load"`` or ``"expedited load"``."""
        return self._name

    @property
    def broken(self) -> str:
        """Return why the lane takes no more jobs, or an empty string."""
        return self._broken

    def submit(self, order: Order, plan: CopyPlan, *, wait_for: DeviceEvent | None, timeout_s: float) -> None:
        """Queue an order; it starts after `wait_for` and after all earlier orders. Returns at once.

        Its report comes out of `poll`, also when the device takes only a part of the job: the lane is broken then, and
        the job ABANDONED. Raises, with nothing queued, `BrokenError` or `ClosedError` if the lane takes no jobs, and
        `RequestError` for a `wait_for` that the device cannot wait for.
        """
        if self._closed:
            raise ClosedError(f"the {self._name} lane is closed: submit orders before close()")
        if self._broken:
            raise BrokenError(f"the {self._name} lane is broken ({self._broken}): close the worker and open a new one")
        now = self._clock()
        self._last_sequence += 1
        transfer = Transfer(order, plan, self._last_sequence, submitted_at=now, deadline_at=now + timeout_s)
        self._unproven[order.order_id] = transfer
        try:
            self._queue.enqueue(plan.copies, transfer.sequence, wait_for)
        except (ClosedError, RequestError):
            del self._unproven[order.order_id]  # nothing was queued
            raise
        except BaseException as error:
            # Whatever it was, some of the job may run.
            self._broken = f"a job could not be queued whole: {error!r}"
            self._pending_reports.append(transfer.end(TransferState.ABANDONED, now=self._clock(), reason=self._broken))
            if not isinstance(error, Exception):
                raise

    def poll(self) -> list[Report]:
        """Return a report for every job that ended, or was given up, since the last call. Never blocks."""
        reports, self._pending_reports = self._pending_reports, []
        completed = self._queue.completed()
        now = self._clock()
        if any(_is_late(transfer, now) and transfer.sequence > completed for transfer in self._unproven.values()):
            self._queue.probe()  # a device that is dead has failed its jobs; only a slow one is given up
            completed = self._queue.completed()
        for transfer in list(self._unproven.values()):
            if transfer.sequence <= completed or self._proven_idle:
                reports.append(self._finish(transfer, now))
            elif _is_late(transfer, now):
                seconds = transfer.deadline_at - transfer.submitted_at
                reason = f"not over after {seconds:g} s: its slots and device blocks stay withheld"
                reports.append(transfer.end(TransferState.ABANDONED, now=now, reason=reason))
        return reports

    def unproven(self) -> list[Transfer]:
        """Return the jobs that may still touch memory, oldest first."""
        if self._proven_idle:
            return []
        completed = self._queue.completed()  # `poll` has not reported all of these yet
        return [transfer for transfer in self._unproven.values() if transfer.sequence > completed]

    def transfer(self, order_id: OrderId) -> Transfer | None:
        """Return the job of an order if it may still touch memory."""
        return self._unproven.get(order_id)

    def wait_over(self, transfer: Transfer, timeout_s: float) -> bool:
        """Block until the job is over or the time has passed; say whether it is over. Any thread may call."""
        return self._queue.wait_completed(transfer.sequence, max(0.0, timeout_s))

    def order_after(self, transfer: Transfer, stream: object) -> None:
        """Let a stream of the engine's wait for the copies of a job, see `CopyQueue`. Any thread may call."""
        self._queue.order_after(stream, transfer.sequence)

    def refuse_new_work(self) -> None:
        """Take no more orders; those queued go on."""
        self._closed = True

    def close(self, timeout_s: float) -> bool:
        """End the queue; copies not begun are dropped. Return whether it is proven that none runs any more.

        May be called again. Then `poll` reports every job that is left: nothing touches its memory any more.
        """
        self._closed = True
        self._proven_idle = self._queue.close(timeout_s)
        return self._proven_idle

    def _finish(self, transfer: Transfer, now: float) -> Report:
        del self._unproven[transfer.order.order_id]
        failure: Exception | None = self._queue.failure(transfer.sequence)
        if transfer.sequence > self._queue.completed():
            failure = ClosedError("dropped: the lane was closed before the copy was whole")
        if transfer.state is TransferState.ABANDONED:
            return transfer.end(TransferState.SETTLED, now=now, reason="the copy ended after its deadline")
        if failure is not None:
            return transfer.end(TransferState.FAILED, now=now, reason=str(failure))
        return transfer.end(TransferState.DONE, now=now)


def _is_late(transfer: Transfer, now: float) -> bool:
    return transfer.state is TransferState.RUNNING and now >= transfer.deadline_at
