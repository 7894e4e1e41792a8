"""What every worker does, whatever memory it copies to: run orders on the lanes of one device, and always close.

    orders  ->  lane (store | load | expedited load)  ->  [staging ring]  ->  device queue
    reports <-  poll_reports()  <-  completion word of each lane

A ring takes part only where the device does not reach a slot itself.

Closing ends by its deadline whatever the device does. Memory that a copy may still touch is never unmapped: it is
quarantined, which means kept until the process ends, and the report of `close` says so.
"""

import logging
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self

from kvmoor.block_layout import BlockLayout
from kvmoor.deadlines import checked_timeout
from kvmoor.devices.device import Device, DeviceEvent, Direction
from kvmoor.errors import BusyError, ClosedError, RequestError, TransferTimeoutError
from kvmoor.observation import LaneBroke, Observer, SilentObserver, TransferEnded, notify
from kvmoor.process_end import register
from kvmoor.transfer_messages import Order, OrderId, OrderKind, Outcome, Report
from kvmoor.transfers.copy_plan import CopyPlan, GroupSlots
from kvmoor.transfers.lane import TransferLane
from kvmoor.transfers.staging import Staging
from kvmoor.transfers.transfer import Transfer, TransferState
from kvmoor.worker_reports import CloseReport, CloseStep, take_step

_log = logging.getLogger("kvmoor")

QUEUE_CLOSE_TIMEOUT_S: Final = 0.03
"""What ending a queue may take once the deadline has passed: enough for a thread that only has to see its stop flag."""

TakeStep = Callable[[str, Callable[[float], bool]], CloseStep]
"""Takes one step of closing with the time that is left."""


class SlotWatch(Protocol):
    """Keeps an eye on the slots of orders while they run. The worker calls it under its lock."""

    def begin(self, order_id: OrderId, parts: tuple[GroupSlots, ...], /) -> None:
        """Take note that an order is about to be queued; raises, and then it is not."""

    def end(self, order_id: OrderId, *, whole: bool) -> None:
        """Take note that an order touches its slots no more; harmless for those that never began."""

    def note_report(self, report: Report, /) -> Report:
        """Act on the end of an order, and return the report that counts."""

    def beat(self) -> None:
        """Take note that reports were looked for."""


class LaneWorker(ABC):
    """Own a device and its lanes; move what orders say. The part of a worker that does not know whose memory it is.

    The worker takes over `device` and closes it, also when a constructor fails. All methods may be called from any
    thread; none blocks except `wait` and `close`, which take a deadline.
    """

    _slots: SlotWatch

    def __init__(
        self,
        layout: BlockLayout,
        device: Device,
        *,
        observer: Observer | None,
        job_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._device = device
        self._observer: Observer = observer or SilentObserver()
        self._job_timeout_s = job_timeout_s
        self._clock = clock
        # Guards the lanes, the slot watch, the counters and `_closing`. Held for bookkeeping only, never while waiting
        # or copying.
        self._lock = threading.Lock()
        # Held by the one thread that closes.
        self._close_lock = threading.Lock()
        self._opened = self._closing = self._inherited = False
        self._close_report: CloseReport | None = None
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._moved_nbytes = dict.fromkeys(OrderKind, 0)
        self._staging = Staging(device, layout)
        self._lanes: tuple[TransferLane, ...] = ()

    def _give_device_back(
        self, _exc_type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Close the device after a constructor that failed, unless it is somebody else's."""
        if not isinstance(error, BusyError):
            self._device.close(QUEUE_CLOSE_TIMEOUT_S)

    def _open_lane(self, opened: ExitStack, name: str, direction: Direction, staging_nbytes: int) -> TransferLane:
        queue = self._device.open_copy_queue(name, direction)
        opened.callback(queue.close, QUEUE_CLOSE_TIMEOUT_S)
        queue = self._staging.wrap(queue, name, direction, staging_nbytes)
        return TransferLane(name, queue, clock=self._clock)

    def _finish_opening(self, *lanes: TransferLane) -> None:
        """Be open: the last step of a constructor."""
        self._lanes = lanes
        self._opened = True
        self._at_exit = register(self, close=self.close)
        register(self, forked=self._forked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_opened", False) and not self._closing:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    @property
    def closed(self) -> bool:
        """Say whether `close` has begun."""
        return self._closing

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of the device's tensors."""
        return self._layout

    def may_touch(self, order_id: OrderId) -> bool:
        """Say whether an order may still touch slots or device blocks: it was queued and is not proven over."""
        with self._lock:
            return self._find(order_id) is not None

    def poll_reports(self) -> list[Report]:
        """Return the reports of orders that ended, or were given up, since the last call. Never blocks."""
        reports = self.take_reports()
        self.observe(reports)
        return reports

    def take_reports(self) -> list[Report]:
        """Do as `poll_reports` and tell no observer: for who holds a lock, and calls `observe` once it is released."""
        with self._lock:
            reports = [self._slots.note_report(report) for lane in self._lanes for report in lane.poll()]
            for report in reports:
                self._outcomes[report.outcome] += 1
                self._moved_nbytes[report.kind] += report.nbytes
            self._slots.beat()
        return reports

    def observe(self, reports: Iterable[Report]) -> None:
        """Tell the observer of reports."""
        for report in reports:
            event = TransferEnded(report.kind, report.outcome, report.nbytes, report.seconds, report.reason)
            notify(self._observer, event)

    def wait(self, order_ids: Iterable[OrderId], timeout_s: float) -> None:
        """Return once these orders touch neither slots nor device blocks any more; unknown ids are over.

        Raises `TransferTimeoutError` at the deadline: the blocks must not be reused then. Reports still come out of
        `poll_reports`.
        """
        self._check_not_inherited()
        deadline = time.monotonic() + checked_timeout(timeout_s, option="timeout_s")
        for order_id in order_ids:
            with self._lock:
                found = self._find(order_id)
            if found is None:
                continue
            lane, transfer = found
            if not lane.wait_over(transfer, deadline - time.monotonic()):
                raise TransferTimeoutError(
                    f"order {order_id} ({transfer.order.kind.value}, {transfer.plan.nbytes} bytes) is not over after "
                    f"{timeout_s:g} s: its device blocks must not be reused before a result says so"
                )

    def order_after(self, order_id: OrderId, stream: object) -> None:
        """Let a stream of the engine's wait for an order and return at once: see `CopyQueue`. Unknown ids are over."""
        self._check_not_inherited()
        with self._lock:
            found = self._find(order_id)
        if found is not None:
            found[0].order_after(found[1], stream)

    def close(self, timeout_s: float = 5.0) -> CloseReport:
        """Refuse new orders, let copies end until the deadline, and give everything back.

        What cannot be proven over by then is quarantined. Returns by the deadline, within the time it takes to see a
        stop flag; raises nothing that a step raised, the report has it. A second call returns the same report.
        Raises `BusyError` if another thread is still closing when the time is up.
        """
        timeout_s = checked_timeout(timeout_s, option="timeout_s")
        if not self._close_lock.acquire(timeout=timeout_s):
            raise BusyError(f"another thread is closing this worker and is not done after {timeout_s:g} s: wait for it")
        try:
            if self._close_report is None:
                self._close_report = self._close(timeout_s)
                self._at_exit.release()
            return self._close_report
        finally:
            self._close_lock.release()

    @abstractmethod
    def _close_books(self, step: TakeStep) -> list[CloseStep]:
        """Close what touches no memory of the device; the queues are closed by now, well or not."""

    @abstractmethod
    def _close_memory(self, step: TakeStep) -> list[CloseStep]:
        """Give the slots back: nothing on the device touches them any more."""

    @abstractmethod
    def _quarantine(self, reason: str, keep_alive: tuple[object, ...]) -> int:
        """Keep the slots, and what a late copy needs beside them, until the process ends; return how many bytes."""

    def _forked(self) -> None:
        """Be closed in a forked child: device, lanes and memory are the parent's, and their threads are not here."""
        self._lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closing = self._inherited = True
        self._lanes = ()
        self._close_report = CloseReport(seconds=0.0, steps=())

    def _queue(
        self, lane: TransferLane, order: Order, plan: CopyPlan, wait_for: DeviceEvent | None, *, is_watched: bool
    ) -> None:
        """Give a checked order to a lane and return at once. Raises as the `submit` of a worker does.

        `is_watched`: the slot watch is told of it.
        """
        if wait_for is not None and not isinstance(wait_for, DeviceEvent):
            raise RequestError(f"wait_for is a {type(wait_for).__name__}: give an event of the device, or None")
        event = wait_for if wait_for is not None else self._device.record_event()
        with self._lock:
            self._check_open()
            if order.order_id < 1:
                raise RequestError(
                    f"the id of an order is {order.order_id}: give 1 or more, 0 says that nothing is there"
                )
            if self._find(order.order_id) is not None:
                raise RequestError(f"order {order.order_id} is running already: give each order an id of its own")
            self._refuse_withheld_blocks(plan)
            if is_watched:
                self._slots.begin(order.order_id, plan.slots)
            try:
                lane.submit(order, plan, wait_for=event, timeout_s=self._job_timeout_s)
            finally:
                if lane.transfer(order.order_id) is None:  # refused
                    self._slots.end(order.order_id, whole=False)
            broken = lane.broken
        if broken:
            notify(self._observer, LaneBroke(lane.name, broken))

    def _job_counts(self) -> dict[str, Any]:
        """Return the numbers that the statistics of every worker have. Called under the lock."""
        unproven = [transfer for lane in self._lanes for transfer in lane.unproven()]
        running = sum(transfer.state is TransferState.RUNNING for transfer in unproven)
        return {
            "running": running,
            "abandoned": len(unproven) - running,
            "done": self._outcomes[Outcome.DONE],
            "failed": self._outcomes[Outcome.FAILED],
            "given_up": self._outcomes[Outcome.ABANDONED],
            "loaded_nbytes": self._moved_nbytes[OrderKind.SLOT_TO_DEVICE],
            "staged_jobs": self._staging.staged_jobs,
            "staged_nbytes": self._staging.staged_nbytes,
            "staging_ring_nbytes": self._staging.ring_nbytes,
        }

    def _close(self, timeout_s: float) -> CloseReport:
        started = time.monotonic()
        deadline = started + timeout_s
        with self._lock:
            self._closing = True
            for lane in self._lanes:
                lane.refuse_new_work()
        self._wait_idle(deadline)
        step = partial(take_step, deadline=deadline, at_least_s=QUEUE_CLOSE_TIMEOUT_S)
        steps = [step(f"{lane.name} lane", lane.close) for lane in self._lanes]
        steps.append(step("device", self._device.close))
        steps += self._close_books(step)
        # Not before all is proven: to give memory back may block behind whatever still runs on the device.
        if all(step.proven for step in steps):
            steps.append(step("staging memory", self._staging.close))
        if all(step.proven for step in steps):
            steps += self._close_memory(step)
        reason = "; ".join(f"{step.name}: {step.error or 'not proven idle'}" for step in steps if not step.proven)
        if not reason:
            return CloseReport(seconds=time.monotonic() - started, steps=tuple(steps))
        # The layout keeps the device tensors alive, the lanes keep the queues: a late copy touches both.
        kept_nbytes = self._quarantine(reason, (self._layout, self._lanes, self._device)) + self._staging.ring_nbytes
        _log.warning("%d bytes of host memory stay mapped until the process ends: %s", kept_nbytes, reason)
        with self._lock:
            unproven = tuple(transfer.order.order_id for lane in self._lanes for transfer in lane.unproven())
        return CloseReport(time.monotonic() - started, tuple(steps), kept_nbytes, unproven, reason)

    def _wait_idle(self, deadline: float) -> None:
        """Wait until no job runs or the deadline has passed; jobs that were given up are not waited for."""
        for lane in self._lanes:
            with self._lock:
                running = [transfer for transfer in lane.unproven() if transfer.state is TransferState.RUNNING]
            for transfer in running:
                lane.wait_over(transfer, deadline - time.monotonic())

    def _refuse_withheld_blocks(self, plan: CopyPlan) -> None:
        """Raise `BusyError` for device blocks that a load which was given up may still write."""
        for lane in self._lanes:
            for transfer in lane.unproven():
                is_load = transfer.order.kind is OrderKind.SLOT_TO_DEVICE
                if is_load and transfer.state is TransferState.ABANDONED and plan.shares_device_blocks(transfer.plan):
                    raise BusyError(
                        f"order {transfer.order.order_id} was given up and may still write to some of these device "
                        "blocks: leave them alone until its SETTLED result"
                    )

    def _find(self, order_id: OrderId) -> tuple[TransferLane, Transfer] | None:
        for lane in self._lanes:
            if (transfer := lane.transfer(order_id)) is not None:
                return lane, transfer
        return None

    def _check_not_inherited(self) -> None:
        if self._inherited:
            raise ClosedError("the worker belongs to the process that forked this one: open another one here")

    def _check_open(self) -> None:
        self._check_not_inherited()
        if self._closing:
            raise ClosedError("the worker is closed: submit orders before close()")
