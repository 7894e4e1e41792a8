"""A worker that only loads: from an arena that another process of this host owns, fills and tells about.

    owner's process   TransferWorker --ticket-->  attach()
    this process      orders (loads) -> lane -> copies from the owner's slots into device blocks

Until it is attached it loads nothing. Of an owner that has ended or closed its arena it still loads what is READY, and
nothing else: every load is checked against the owner's word for its slots, before the copy and after.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.device import Device, DeviceEvent, Direction
from kvmoor.errors import BusyError, RequestError
from kvmoor.host_memory.arena import PAUSE_TIMEOUT_S
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.attached_registration import AttachedRegistration
from kvmoor.host_memory.pacing import StepPacer
from kvmoor.host_memory.process_identity import ProcessCalls
from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.lane_worker import LaneWorker, TakeStep
from kvmoor.observation import Observer
from kvmoor.transfer_messages import Order, OrderId, OrderKind, Report, SlotRange
from kvmoor.transfers.copy_plan import DeviceBlocks, GroupSlots, plan_copies
from kvmoor.transfers.slot_reads import SlotReads
from kvmoor.transfers.staging import STAGING_NBYTES
from kvmoor.worker_reports import CloseStep, ReadingStatistics


class ReadingWorker(LaneWorker):
    """Load blocks from the arena of another process into a device.

    The worker takes over `device` and closes it, also when its own constructor fails. All methods may be called from
    any thread; none blocks except `wait` and `close`, which take a deadline, and `attach`, which takes milliseconds.
    """

    def __init__(
        self,
        layout: BlockLayout,
        device: Device,
        *,
        observer: Observer | None = None,
        job_timeout_s: float = 30.0,
        pin: Literal["background", "off"] = "background",
        staging_nbytes: int = STAGING_NBYTES,
        name: str = "arena",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the lanes. Raises `LayoutError` if the device cannot reach the layout's tensors.

        With `pin` "background" and a `Device.registrar` what is read is page-locked slab by slab, at the pace that
        `note_step` leaves; what is not, or not yet, goes through rings of up to `staging_nbytes`.
        """
        super().__init__(layout, device, observer=observer, job_timeout_s=job_timeout_s, clock=clock)
        self._pin: Literal["background", "off"] = pin
        self._name = name
        self._pacer = StepPacer()
        self._slots = _NothingToRead()
        self._attaching = False  # guarded by the lock, as the next two, which change once
        self._attached: AttachedArena | None = None
        self._registration: AttachedRegistration | None = None
        with ExitStack() as opened:
            opened.push(self._give_device_back)
            device.check_layout(layout)
            # A ring for each lane, or an expedited load would wait for the others after all.
            loading = Direction.HOST_TO_DEVICE, staging_nbytes // 2
            self._load_lane = self._open_lane(opened, "load", *loading)
            self._expedited_lane = self._open_lane(opened, "expedited load", *loading)
            opened.pop_all()
        self._finish_opening(self._load_lane, self._expedited_lane)

    def __repr__(self) -> str:
        arena = "attached to nothing" if self._attached is None else f"{self._attached!r}"
        return f"<ReadingWorker on {self._device.name}, {arena}{', closed' if self.closed else ''}>"

    @property
    def attached(self) -> AttachedArena | None:
        """Return what is read, for its numbers; only the worker attaches and closes. None before `attach`."""
        return self._attached

    def attach(self, ticket: ArenaTicket, *, calls: ProcessCalls | None = None) -> None:
        """Read the arena that a ticket names, from now on and once for all.

        Raises what `AttachedArena` raises, and then may be called again; `BusyError` if it is attached already, and
        `ClosedError` after `close`.
        """
        with self._lock:
            self._check_open()
            if self._attaching or self._attached is not None:
                raise BusyError(f"{self!r} reads an arena already: open another worker for another arena")
            self._attaching = True
        try:
            with ExitStack() as opened:
                attached = opened.enter_context(
                    AttachedArena(ticket, self._layout, observer=self._observer, calls=calls)
                )
                with self._lock:
                    self._check_open()  # whoever closes from here on finds all of it
                    self._registration = AttachedRegistration(
                        attached,
                        self._device.registrar,
                        pin=self._pin,
                        pacer=self._pacer,
                        observer=self._observer,
                        name=self._name,
                    )
                    self._attached, self._slots = attached, SlotReads(attached)
                opened.pop_all()
        finally:
            with self._lock:
                self._attaching = False

    def submit(
        self,
        order: Order,
        device_blocks: DeviceBlocks,
        *,
        wait_for: DeviceEvent | None = None,
        expedited: bool = False,
    ) -> None:
        """Queue a load and return at once.

        The copy starts after `wait_for`; without one, after the work on the engine's stream as of this call. The
        destination may not be read before the report. Raises `RequestError` for a store, for blocks or slots that do
        not exist or are not READY, and for everything before `attach`; `BusyError` for device blocks that a load which
        was given up may still write, and `BrokenError` for a broken lane; then nothing was queued.
        """
        self._check_not_inherited()
        if order.kind is not OrderKind.SLOT_TO_DEVICE:
            raise RequestError(f"order {order.order_id} is a store: only the owner of an arena writes to it")
        if self._attached is None or self._registration is None:
            raise RequestError(f"order {order.order_id} came before the ticket of the arena: attach first")
        are_reachable = None if self._device.registrar is None else self._registration.are_registered
        plan = plan_copies(self._layout, order.parts, device_blocks, self._attached.slot_addresses, are_reachable)
        lane = self._expedited_lane if expedited else self._load_lane
        self._queue(lane, order, plan, wait_for, is_watched=True)

    def take_published(self) -> list[SlotRange]:
        """Return nothing: the owner tells which slots there are."""
        return []

    def note_step(self) -> None:
        """Take note that the engine begins a step, so that page-locking keeps out of its way. Takes a microsecond."""
        self._pacer.note_step()

    def note_step_end(self) -> None:
        """Take note that the step has ended. Noted or not, but if once then always: see `StepPacer`."""
        self._pacer.note_step_end()

    def pause_registration(self, timeout_s: float = PAUSE_TIMEOUT_S) -> bool:
        """Let no page-locking begin before `resume_registration`; say whether none is under way any more.

        Pauses add up. Before `attach` there is nothing to pause.
        """
        return self._registration is None or self._registration.pause(timeout_s)

    def resume_registration(self) -> None:
        """End one pause; harmless without one."""
        if self._registration is not None:
            self._registration.resume()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until every slab can be copied from directly; False at once if that cannot come true, or unattached."""
        return self._registration is not None and self._registration.wait_registered(timeout_s)

    def statistics(self) -> ReadingStatistics:
        """Return what runs now, what was moved so far, and how far what is read is page-locked."""
        registration = self._registration
        with self._lock:
            return ReadingStatistics(
                **self._job_counts(),
                attached_nbytes=0 if self._attached is None or self._attached.closed else self._attached.nbytes,
                registered_nbytes=0 if registration is None else registration.registered_nbytes,
                failed_registrations=0 if registration is None else registration.num_failures,
                registration_mode=None if registration is None else registration.mode,
                registration_reason="" if registration is None else registration.reason,
            )

    def _forked(self) -> None:
        super()._forked()
        self._pacer.forked()

    def _close_books(self, _step: TakeStep) -> list[CloseStep]:
        return []

    def _close_memory(self, step: TakeStep) -> list[CloseStep]:
        attached, registration = self._attached, self._registration
        if attached is None or registration is None:
            return []
        reasons: list[str] = []

        def unregister(timeout_s: float) -> bool:
            reasons.append(registration.close(timeout_s))
            return not reasons[-1]

        undone = step("page-locking", unregister)
        steps = [replace(undone, error=undone.error or "".join(reasons))]
        if undone.proven:
            steps.append(step("attached arena", attached.close))
        return steps

    def _quarantine(self, reason: str, keep_alive: tuple[object, ...]) -> int:
        if self._attached is None or self._registration is None:
            return 0
        self._registration.stop()
        self._attached.quarantine(reason, keep_alive=(*keep_alive, self._registration))
        return self._attached.nbytes


class _NothingToRead:
    """Watch no slots: a worker that is not attached queues nothing."""

    def begin(self, _order_id: OrderId, _parts: tuple[GroupSlots, ...]) -> None:
        """Do nothing."""

    def end(self, order_id: OrderId, *, whole: bool) -> None:
        """Do nothing."""

    def note_report(self, report: Report) -> Report:
        """Return the report."""
        return report

    def beat(self) -> None:
        """Do nothing."""
