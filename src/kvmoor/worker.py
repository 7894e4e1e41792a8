"""The half that moves bytes: it owns the device, the lanes and the arena, and it always closes.

What does not depend on the arena being its own is in `LaneWorker`; `ReadingWorker` loads from the arena of another.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.device import Device, DeviceEvent, Direction
from kvmoor.host_memory.arena import CLOSE_TIMEOUT_S, PAUSE_TIMEOUT_S, Arena
from kvmoor.host_memory.arena_plan import ArenaPlan
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.slab_registration import Pin
from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.lane_worker import LaneWorker, TakeStep
from kvmoor.observation import Observer
from kvmoor.transfer_messages import Order, OrderKind, SlotRange
from kvmoor.transfers.copy_plan import DeviceBlocks, plan_copies
from kvmoor.transfers.slot_status import SlotStatus
from kvmoor.transfers.staging import STAGING_NBYTES
from kvmoor.worker_reports import CloseStep, WorkerStatistics


class TransferWorker(LaneWorker):
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
        super().__init__(layout, device, observer=observer, job_timeout_s=job_timeout_s, clock=clock)
        staging_nbytes = min(STAGING_NBYTES, plan.nbytes // 128) if staging_nbytes is None else staging_nbytes
        with ExitStack() as opened:
            opened.push(self._give_device_back)
            device.check_layout(layout)
            shared = backing is Backing.MEMFD
            self._slots = self._status = SlotStatus(plan, layout, engine_id=engine_id, rank=rank, required=shared)
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
        self._finish_opening(self._store_lane, self._load_lane, self._expedited_lane)

    def __repr__(self) -> str:
        return f"<TransferWorker on {self._device.name}, {self._arena!r}{', closed' if self.closed else ''}>"

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
        is_store = order.kind is OrderKind.DEVICE_TO_SLOT
        loads = self._expedited_lane if expedited else self._load_lane
        self._queue(self._store_lane if is_store else loads, order, plan, wait_for, is_watched=is_store)

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

    def statistics(self) -> WorkerStatistics:
        """Return what runs now and what was moved so far."""
        with self._lock:
            return WorkerStatistics(
                **self._job_counts(),
                stored_nbytes=self._moved_nbytes[OrderKind.DEVICE_TO_SLOT],
                arena=self._arena.statistics(),
            )

    def _close_books(self, step: TakeStep) -> list[CloseStep]:
        return [step("status segment", self._status.close)]

    def _close_memory(self, step: TakeStep) -> list[CloseStep]:
        arena = step("arena", self._arena.close)
        return [replace(arena, error=arena.error or self._arena.quarantine_reason)]

    def _quarantine(self, reason: str, keep_alive: tuple[object, ...]) -> int:
        self._arena.quarantine(reason, keep_alive=keep_alive)
        return self._arena.mapped_nbytes
