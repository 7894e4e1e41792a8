"""The worker's half of the plugin: vLLM's jobs on one side, a `TransferWorker` or a `ReadingWorker` on the other.

    submit_store | submit_load  ->  order on a lane  ->  report  ->  get_finished
                                                                `->  take_failed, if it went wrong

vLLM takes no answer but success. A job is therefore reported as finished when its copy is *proven over*, whether well
or not, and what went wrong is told beside it.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.device import Device, DeviceEvent
from kvmoor.errors import BrokenError, KvmoorError, TransferTimeoutError
from kvmoor.integrations.vllm.messages import HostSlots, pair_with_device
from kvmoor.integrations.vllm.thread_affinity import threads_on_all_cores
from kvmoor.reading_worker import ReadingWorker
from kvmoor.transfer_messages import Order, OrderId, OrderKind, Outcome, Report, SlotRange
from kvmoor.transfers.copy_plan import DeviceBlocks
from kvmoor.worker import TransferWorker
from kvmoor.worker_reports import CloseReport

_log = logging.getLogger("kvmoor")

LOAD_ATTEMPTS: Final = 3
"""How often a load is tried where its failure cannot be told. Guessed."""

_Lane = tuple[OrderKind, bool]
"""What a job is, and whether it is expedited: that decides on which lane of the worker it runs."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job of vLLM's whose copy is over.

    `seconds`: its part of the time that its lane was seen to work. Both are None if it failed; nobody counts its part.
    """

    job_id: int
    nbytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class FailedJob:
    """Say which job failed, and why; it is, or was, among the ended ones too."""

    job_id: int
    order_id: OrderId
    reason: str


class WorkerSide:
    """Run vLLM's jobs on one rank. All calls come from the thread that runs the model; only `wait` and `close` block.

    `failures_are_told`: somebody asks `take_failed` and has failed loads computed again. Otherwise a load that fails is
    tried again, and if that does not help, `get_finished` raises.
    """

    def __init__(
        self,
        worker: TransferWorker | ReadingWorker,
        device: Device,
        *,
        blocks_per_chunk: int,
        failures_are_told: bool,
        job_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._device = device
        self._blocks_per_chunk = blocks_per_chunk
        self._failures_are_told = failures_are_told
        self._job_timeout_s = job_timeout_s
        self._clock = clock
        self._running: dict[OrderId, _Job] = {}
        self._ended: list[EndedJob] = []
        self._idle_since: dict[_Lane, float] = {}
        self._failed: list[FailedJob] = []
        self._published: list[SlotRange] = []
        self._refused: frozenset[int] = frozenset()
        self._load_event: DeviceEvent | None = None
        self._reset_epoch = 0

    @property
    def worker(self) -> TransferWorker | ReadingWorker:
        """Return who moves the bytes, for its numbers; one that only loads where another rank keeps the slots."""
        return self._worker

    def mark_loads(self) -> None:
        """Mark the engine's stream: the loads of this step start after the work that is queued there by now."""
        self._load_event = self._device.record_event()

    def submit_store(self, job_id: int, device_side: Any, host_side: HostSlots) -> None:
        """Begin to store; the copy starts after the work that is on the engine's stream by now."""
        if job_id in self._refused:
            self._end_failed(job_id, host_side.order_id, "the device's memory was given up before the copy began")
            return
        self._submit(_Job(job_id, OrderKind.DEVICE_TO_SLOT), device_side, host_side, None)

    def submit_load(self, job_id: int, host_side: HostSlots, device_side: Any, *, expedited: bool) -> None:
        """Begin to load; the copy starts after `mark_loads`, or else as a store does."""
        job = _Job(job_id, OrderKind.SLOT_TO_DEVICE, expedited=expedited)
        self._submit(job, device_side, host_side, self._load_event)

    def get_finished(self) -> list[EndedJob]:
        """Return the jobs that ended since the last call, each once, and forget the mark of `mark_loads`."""
        self._worker.note_step()
        self._load_event = None
        self._published += self._worker.take_published()  # also for those who only look at the status segment
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def take_failed(self) -> list[FailedJob]:
        """Return what failed of the jobs that `get_finished` has returned. Call it after each."""
        failed, self._failed = self._failed, []
        return failed

    def take_published(self) -> tuple[SlotRange, ...]:
        """Return the slots that became usable since the last call."""
        published = (*self._published, *self._worker.take_published())
        self._published.clear()
        return published

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once these jobs touch no device block any more. Jobs that are over, or were never seen, are over.

        Raises `TransferTimeoutError` at the deadline (`job_timeout_s`): to return would let vLLM reuse blocks that a
        copy still touches.
        """
        wanted = set(job_ids)
        deadline = self._clock() + self._job_timeout_s
        while orders := [order_id for order_id, job in self._running.items() if job.job_id in wanted]:
            self._worker.wait(orders, max(0.0, deadline - self._clock()))
            self._collect()

    def note_reset(self, epoch: int) -> None:
        """Take note of a reset: loads under way bring back what it was to forget, so they count as failed."""
        if epoch != self._reset_epoch:
            self._reset_epoch = epoch
            for job in self._running.values():
                job.is_outdated = job.kind is OrderKind.SLOT_TO_DEVICE

    def give_up_device_memory(self, stores_to_come: Iterable[int]) -> None:
        """Wait until nothing touches device blocks; stores that vLLM still holds back will fail. Raises as `wait`."""
        self._refused = frozenset(stores_to_come)
        self.wait([job.job_id for job in self._running.values()])

    def close(self, timeout_s: float) -> CloseReport:
        """End by the deadline, whatever still runs."""
        return self._worker.close(timeout_s)

    def _submit(self, job: "_Job", device_side: Any, host_side: HostSlots, wait_for: DeviceEvent | None) -> None:
        try:
            job.order, job.blocks = pair_with_device(
                job.kind,
                host_side,
                block_ids=device_side.block_ids,
                group_sizes=device_side.group_sizes,
                block_indices=device_side.block_indices,
                blocks_per_chunk=self._blocks_per_chunk,
            )
        except KvmoorError as error:
            self._fail(job, host_side.order_id, str(error))
            return
        self._start(job, job.order, wait_for)

    def _start(self, job: "_Job", order: Order, wait_for: DeviceEvent | None) -> None:
        job.attempts += 1
        job.submitted_s = self._clock()
        try:
            # The first copy of a lane starts its threads; those of a GPU have little to do.
            with threads_on_all_cores() if isinstance(self._device, CpuDevice) else nullcontext():
                self._worker.submit(order, job.blocks, wait_for=wait_for, expedited=job.expedited)
        except KvmoorError as error:
            if not self._worker.may_touch(order.order_id):
                self._fail(job, order.order_id, f"it could not be queued: {error}")
                return
        self._running[order.order_id] = job

    def _collect(self) -> None:
        """Take note of what ended, and give up on what will not."""
        over: list[tuple[_Job, Report]] = []
        for report in self._worker.poll_reports():
            job = self._running.get(report.order_id)
            if job is None:
                continue
            if report.outcome is Outcome.ABANDONED:
                # Not over, so vLLM must not hear of it: it would reuse the blocks.
                job.abandoned_s = self._clock()
                _log.error("%s %d is not over in time: %s", report.kind.value, report.order_id, report.reason)
                continue
            del self._running[report.order_id]
            over.append((job, report))
        self._share_time([job for job, _ in over])
        for job, report in over:
            self._end(job, report)
        for order_id, job in self._running.items():
            if job.kind is OrderKind.SLOT_TO_DEVICE and self._clock() - job.abandoned_s > self._job_timeout_s:
                raise TransferTimeoutError(
                    f"load {order_id} is not proven over {2 * self._job_timeout_s:g} s after it began: its request "
                    "would wait for ever, and its device blocks cannot be given to another; restart the engine"
                )

    def _share_time(self, over: Iterable["_Job"]) -> None:
        """Give each job its part, by bytes, of the time that its lane has worked on those over at the same look.

        A lane works on one job after the other, so times from submission would count the same second for each of them.
        No job gets more than that all the same: the one before it may have been stuck.
        """
        now = self._clock()
        for lane in {job.lane for job in over}:
            together = {job: self._planned_nbytes(job) for job in over if job.lane == lane}
            begun = max(self._idle_since.get(lane, 0.0), min(job.submitted_s for job in together))
            seconds_a_byte = (now - begun) / max(1, sum(together.values()))
            for job, nbytes in together.items():
                share = nbytes * seconds_a_byte
                job.seconds = min(share, now - job.submitted_s)
            self._idle_since[lane] = now

    def _planned_nbytes(self, job: "_Job") -> int:
        parts = () if job.order is None else job.order.parts
        return sum(len(part.slots) * self._worker.layout.groups[part.group].slot_nbytes for part in parts)

    def _end(self, job: "_Job", report: Report) -> None:
        if report.outcome is not Outcome.DONE:
            self._fail(job, report.order_id, report.reason)
        elif job.is_outdated and self._failures_are_told:
            self._end_failed(job.job_id, report.order_id, "what it loads was to be forgotten by a reset meanwhile")
        else:
            self._ended.append(EndedJob(job.job_id, report.nbytes, job.seconds))

    def _fail(self, job: "_Job", order_id: OrderId, reason: str) -> None:
        """End a job whose copy is over and went wrong, or try again if nobody could be told."""
        if job.kind is OrderKind.DEVICE_TO_SLOT or self._failures_are_told:
            self._end_failed(job.job_id, order_id, reason)
        elif job.order is None or job.attempts >= LOAD_ATTEMPTS:
            raise BrokenError(
                f"load {order_id} failed {max(1, job.attempts)} times ({reason}), and vLLM's own OffloadingConnector "
                "cannot compute its request again: use KvmoorConnector"
            )
        else:
            _log.warning("load %d failed and is tried again: %s", order_id, reason)
            self._start(job, job.order, None)

    def _end_failed(self, job_id: int, order_id: OrderId, reason: str) -> None:
        _log.warning("job %d (order %d) failed: %s", job_id, order_id, reason)
        self._ended.append(EndedJob(job_id, None, None))
        if self._failures_are_told:
            self._failed.append(FailedJob(job_id, order_id, reason))


@dataclass(slots=True, eq=False)
class _Job:
    """A job of vLLM's from its submission to the proof that its copy is over."""

    job_id: int
    kind: OrderKind
    expedited: bool = False
    order: Order | None = None
    blocks: DeviceBlocks = None  # type: ignore[assignment]  # set together with `order`
    attempts: int = 0
    submitted_s: float = 0.0
    seconds: float = 0.0
    is_outdated: bool = False
    abandoned_s: float = float("inf")

    @property
    def lane(self) -> _Lane:
        """Return the lane that it runs on."""
        return self.kind, self.expedited
