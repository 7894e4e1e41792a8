"""The half that moves bytes: it owns the device, the lanes and the arena, and it always closes.

    orders  ->  submit()  ->  lane (store | load | expedited load)  ->  [staging ring]  ->  device queue
    reports <-  poll_reports()  <-  completion word of each lane

A ring takes part only where the device does not reach a slot itself.

Closing ends by its deadline whatever the device does. Memory that a copy may still touch is never unmapped: it is
quarantined, which means kept until the process ends, and the report of `close` says so.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self

from kvmoor.block_layout import BlockLayout
from kvmoor.deadlines import checked_timeout
from kvmoor.devices.device import Device, DeviceEvent, Direction
from kvmoor.errors import BusyError, ClosedError, RequestError, TransferTimeoutError
from kvmoor.host_memory.arena import CLOSE_TIMEOUT_S, PAUSE_TIMEOUT_S, Arena
from kvmoor.host_memory.arena_plan import ArenaPlan
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.slab_registration import Pin
from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.observation import LaneBroke, Observer, SilentObserver, TransferEnded, notify
from kvmoor.process_end import register
from kvmoor.transfer_messages import Order, OrderId, OrderKind, Outcome, Report, SlotRange
from kvmoor.transfers.copy_plan import CopyPlan, DeviceBlocks, plan_copies
from kvmoor.transfers.lane import TransferLane
from kvmoor.transfers.slot_status import SlotStatus
from kvmoor.transfers.staging import STAGING_NBYTES, Staging
from kvmoor.transfers.transfer import Transfer, TransferState
from kvmoor.worker_reports import CloseReport, WorkerStatistics, take_step

_log = logging.getLogger("kvmoor")

QUEUE_CLOSE_TIMEOUT_S: Final = 0.03
"""What ending a queue may take once the deadline has passed: enough for a thread that only has to see its stop flag."""


class TransferWorker:
    """Move blocks between a device and the arena it owns.

    The worker takes over `device` and closes it, also when its own constructor fails. All methods may be called from
    any thread; none blocks except `wait` and `close`, which take a deadline.
    """

    def __init__(
        self,
        layout: BlockLayout,
        plan: ArenaPlan,
        device: Device,
        *,
        observer: Observer | None = None,
        job_timeout_s: float = 30.0,
        mapping: Literal["background", "eager"] = "background",
        pin: Pin = "background",
        staging_nbytes: int | None = None,
        backing: Backing = Backing.ANONYMOUS,
        engine_id: str = "",
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the lanes and the arena. Raises `LayoutError` if the device cannot reach the layout's tensors.

        `mapping` and `pin` are the arena's; without a `Device.registrar` nothing is pinned. `staging_nbytes` is what
        staging may take each way (None: 32 MiB, or less beside a small arena), if needed, and one slot a lane at least.
        `backing` MEMFD is for an arena that other processes read (`ticket`). `engine_id` and `rank` name the status
        segment, by which others find this worker; without them it is named after the process.
        """
        self._layout = layout
        self._device = device
        self._observer = observer or SilentObserver()
        self._job_timeout_s = job_timeout_s
        self._clock = clock
        # Guards the lanes, the counters and `_closing`. Held for bookkeeping only, never while waiting or copying.
        self._lock = threading.Lock()
        # Held by the one thread that closes.
        self._close_lock = threading.Lock()
        self._closing = self._inherited = False
        self._close_report: CloseReport | None = None
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._moved_nbytes = dict.fromkeys(OrderKind, 0)
        self._staging = Staging(device, layout)
        staging_nbytes = min(STAGING_NBYTES, plan.nbytes // 128) if staging_nbytes is None else staging_nbytes
        with ExitStack() as opened:
            opened.push(self._give_device_back)
            device.check_layout(layout)
            shared = backing is Backing.MEMFD
            self._status = SlotStatus(plan, layout, engine_id=engine_id, rank=rank, required=shared)
            opened.callback(self._status.close)
            self._arena = Arena(
                plan,
                backing=backing,
                mapping=mapping,
                pin=pin,
                registrar=device.registrar,
                observer=self._observer,
                name=self._status.name,
            )
            opened.callback(self._arena.close, CLOSE_TIMEOUT_S)  # unregistering takes its time
            self._store_lane = self._open_lane(opened, "store", Direction.DEVICE_TO_HOST, staging_nbytes)
            # A ring for each load lane, or an expedited load would wait for the others after all.
            loading = Direction.HOST_TO_DEVICE, staging_nbytes // 2
            self._load_lane = self._open_lane(opened, "load", *loading)
            self._expedited_lane = self._open_lane(opened, "expedited load", *loading)
            opened.pop_all()
        self._lanes: tuple[TransferLane, ...] = (self._store_lane, self._load_lane, self._expedited_lane)
        self._at_exit = register(self, close=self.close)
        register(self, forked=self._forked)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lanes") and not self._closing:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<TransferWorker on {self._device.name}, {self._arena!r}{', closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Say whether `close` has begun."""
        return self._closing

    @property
    def arena(self) -> Arena:
        """Return the arena, for its numbers; only the worker opens, copies and closes."""
        return self._arena

    def submit(
        self,
        order: Order,
        device_blocks: DeviceBlocks,
        *,
        wait_for: DeviceEvent | None = None,
        expedited: bool = False,
    ) -> None:
        """Queue an order and return at once.

        The copy starts after `wait_for`; without one, after the work on the engine's stream as of this call. The source
        may not change and the destination may not be read before the report. Raises `RequestError` for blocks or slots
        that do not exist, `BusyError` for device blocks that a load which was given up may still write, and
        `BrokenError` for a broken lane; then nothing was queued.
        """
        self._check_not_inherited()
        are_reachable = None if self._device.registrar is None else self._arena.are_registered
        plan = plan_copies(self._layout, order.parts, device_blocks, self._arena.slot_addresses, are_reachable)
        if wait_for is not None and not isinstance(wait_for, DeviceEvent):
            raise RequestError(f"wait_for is a {type(wait_for).__name__}: give an event of the device, or None")
        event = wait_for if wait_for is not None else self._device.record_event()
        if order.kind is OrderKind.DEVICE_TO_SLOT:
            lane = self._store_lane
        else:
            lane = self._expedited_lane if expedited else self._load_lane
        with self._lock:
            self._check_open()
            if order.order_id < 1:
                raise RequestError(
                    f"the id of an order is {order.order_id}: give 1 or more, 0 says that nothing is there"
                )
            if self._find(order.order_id) is not None:
                raise RequestError(f"order {order.order_id} is running already: give each order an id of its own")
            self._refuse_withheld_blocks(plan)
            if order.kind is OrderKind.DEVICE_TO_SLOT:
                self._status.begin(order.order_id, plan.slots)
            try:
                lane.submit(order, plan, wait_for=event, timeout_s=self._job_timeout_s)
            finally:
                if lane.transfer(order.order_id) is None:  # refused
                    self._status.end(order.order_id, whole=False)
            broken = lane.broken
        if broken:
            notify(self._observer, LaneBroke(lane.name, broken))

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
            reports = [report for lane in self._lanes for report in lane.poll()]
            for report in reports:
                self._count(report)
                self._status.note_report(report)
            self._status.beat()
        return reports

    def observe(self, reports: Iterable[Report]) -> None:
        """Tell the observer of reports."""
        for report in reports:
            event = TransferEnded(report.kind, report.outcome, report.nbytes, report.seconds, report.reason)
            notify(self._observer, event)

    def take_published(self) -> list[SlotRange]:
        """Return the slots that became usable since the last call."""
        with self._lock:
            published = self._arena.take_published()
            self._status.publish(published)
        return published

    def ticket(self) -> ArenaTicket:
        """Return what a process of this host needs to read the arena (`AttachedArena`); only with `backing` MEMFD."""
        return self._status.ticket(self._arena)

    def note_step(self) -> None:
        """Take note that the engine begins a step, so that page-locking keeps out of its way. Takes a microsecond."""
        self._arena.pacer.note_step()

    def note_step_end(self) -> None:
        """Take note that the step has ended. Noted or not, but if once then always: see `StepPacer`."""
        self._arena.pacer.note_step_end()

    def pause_registration(self, timeout_s: float = PAUSE_TIMEOUT_S) -> bool:
        """Let no page-locking begin before `resume_registration`; say whether none is under way any more.

        See `Arena.pause_registration`: pauses add up.
        """
        return self._arena.pause_registration(timeout_s)

    def resume_registration(self) -> None:
        """End one pause; harmless without one."""
        self._arena.resume_registration()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until every slab that is not lost can be copied to directly; False at once if that cannot come true."""
        return self._arena.wait_registered(timeout_s)

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

    def statistics(self) -> WorkerStatistics:
        """Return what runs now and what was moved so far."""
        with self._lock:
            unproven = [transfer for lane in self._lanes for transfer in lane.unproven()]
            running = sum(transfer.state is TransferState.RUNNING for transfer in unproven)
            return WorkerStatistics(
                running=running,
                abandoned=len(unproven) - running,
                done=self._outcomes[Outcome.DONE],
                failed=self._outcomes[Outcome.FAILED],
                given_up=self._outcomes[Outcome.ABANDONED],
                stored_nbytes=self._moved_nbytes[OrderKind.DEVICE_TO_SLOT],
                loaded_nbytes=self._moved_nbytes[OrderKind.SLOT_TO_DEVICE],
                staged_jobs=self._staging.staged_jobs,
                staged_nbytes=self._staging.staged_nbytes,
                staging_ring_nbytes=self._staging.ring_nbytes,
                arena=self._arena.statistics(),
            )

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

    def _forked(self) -> None:
        """Be closed in a forked child: device, lanes and arena are the parent's, and their threads are not here."""
        self._lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closing = self._inherited = True
        self._lanes = ()
        self._close_report = CloseReport(seconds=0.0, steps=())

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
        steps.append(step("status segment", self._status.close))
        # Not before all is proven: to give memory back may block behind whatever still runs on the device.
        if all(step.proven for step in steps):
            steps.append(step("staging memory", self._staging.close))
        if all(step.proven for step in steps):
            arena = step("arena", self._arena.close)
            steps.append(replace(arena, error=arena.error or self._arena.quarantine_reason))
        reason = "; ".join(f"{step.name}: {step.error or 'not proven idle'}" for step in steps if not step.proven)
        if not reason:
            return CloseReport(seconds=time.monotonic() - started, steps=tuple(steps))
        # The layout keeps the device tensors alive, the lanes keep the queues: a late copy touches both.
        self._arena.quarantine(reason, keep_alive=(self._layout, self._lanes, self._device))
        quarantined_nbytes = self._arena.mapped_nbytes + self._staging.ring_nbytes
        _log.warning("%d bytes of host memory stay mapped until the process ends: %s", quarantined_nbytes, reason)
        with self._lock:
            unproven = tuple(transfer.order.order_id for lane in self._lanes for transfer in lane.unproven())
        return CloseReport(time.monotonic() - started, tuple(steps), quarantined_nbytes, unproven, reason)

    def _wait_idle(self, deadline: float) -> None:
        """Wait until no job runs or the deadline has passed; jobs that were given up are not waited for."""
        for lane in self._lanes:
            with self._lock:
                running = [transfer for transfer in lane.unproven() if transfer.state is TransferState.RUNNING]
            for transfer in running:
                lane.wait_over(transfer, deadline - time.monotonic())

    def _refuse_withheld_blocks(self, plan: CopyPlan) -> None:
        """Raise `BusyError` for device blocks that a load which was given up may still write."""
        for lane in (self._load_lane, self._expedited_lane):
            for transfer in lane.unproven():
                if transfer.state is TransferState.ABANDONED and plan.shares_device_blocks(transfer.plan):
                    raise BusyError(
                        f"order {transfer.order.order_id} was given up and may still write to some of these device "
                        "blocks: leave them alone until its SETTLED result"
                    )

    def _find(self, order_id: OrderId) -> tuple[TransferLane, Transfer] | None:
        for lane in self._lanes:
            if (transfer := lane.transfer(order_id)) is not None:
                return lane, transfer
        return None

    def _count(self, report: Report) -> None:
        self._outcomes[report.outcome] += 1
        self._moved_nbytes[report.kind] += report.nbytes

    def _check_not_inherited(self) -> None:
        if self._inherited:
            raise ClosedError("the worker belongs to the process that forked this one: open another one here")

    def _check_open(self) -> None:
        self._check_not_inherited()
        if self._closing:
            raise ClosedError("the worker is closed: submit orders before close()")
