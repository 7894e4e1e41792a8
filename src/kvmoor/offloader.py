"""Both halves in one process: keep blocks in host memory and bring them back.

with Offloader(layout, host_memory="8GiB", device=CpuDevice()) as offloader:
    offloader.submit_store(keys, block_ids)     # returns at once
    match = offloader.match(keys)               # longest ready prefix, leased
    offloader.submit_load(match, block_ids)     # returns at once
    for result in offloader.poll_results(): ...
"""

import logging
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Literal, Self

from numpy.typing import ArrayLike

from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.block_layout import BlockLayout
from kvmoor.byte_sizes import parse_nbytes
from kvmoor.coordinator import Coordinator
from kvmoor.deadlines import checked_timeout
from kvmoor.devices.device import Device, DeviceEvent
from kvmoor.errors import ClosedError, RequestError, SettingsError
from kvmoor.host_memory.arena import PAUSE_TIMEOUT_S
from kvmoor.host_memory.arena_plan import ArenaPlan, plan_arena
from kvmoor.host_memory.limits import read_memory_limits
from kvmoor.host_memory.numa import NumaChoice
from kvmoor.index.call_keys import as_sequence
from kvmoor.index.eviction.policies import EvictionChoice
from kvmoor.observation import Observer, SilentObserver
from kvmoor.offloader_results import Match, OffloaderCloseReport, OffloaderStatistics, StoreSubmission, TransferResult
from kvmoor.process_end import register
from kvmoor.transfer_messages import OrderId, Report
from kvmoor.transfers.copy_plan import device_blocks_by_group
from kvmoor.worker import TransferWorker

_log = logging.getLogger("kvmoor")

FIRST_SLOTS_TIMEOUT_S: Final = 2.0
"""How long opening waits for the first slots, so that a store right after it is not declined. Guessed: a slab of 64 MiB
takes 0.01 s in warm memory and 0.13 s in cold guest memory (docs/decisions); past it, opening goes on without them."""


class Offloader:
    """Keep blocks of device tensors in host memory: the coordinator and the worker of one process, joined.

    Takes over `device` and closes it, also when the constructor fails. Methods may be called from any thread; only
    `wait` and `close` block, with a deadline.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        host_memory: int | str,
        device: Device,
        observer: Observer | None = None,
        job_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
        mapping: Literal["background", "eager"] = "background",
        pin: Literal["background", "eager", "off"] = "background",
        memory_check: Literal["refuse", "warn"] = "refuse",
        numa: NumaChoice = "auto",
        huge_pages: Literal["auto", "off"] = "auto",
        eviction: EvictionChoice = "lru",
    ) -> None:
        """Plan the host memory, then open it.

        `host_memory`: bytes, or "64GB" / "64GiB". `job_timeout_s`: when a copy is given up. `mapping`: with
        "background" slots become usable slab after slab while the engine works, "eager" maps all of them first. `pin`
        says the same of page-locking, and "off" that there is none; what is not page-locked is copied through a small
        ring. It concerns devices that have a registrar. `numa` ("auto", "off", "interleave" or a node) and `huge_pages`
        say where memory is taken from; what cannot be had is done without, and the plan says so.
        `eviction` says which blocks give way: "lru", "arc", "device-lru" or a factory of one's own `EvictionPolicy`,
        one for each group.
        Raises `SettingsError` or `NoRoomError` before anything is allocated.
        """
        observer = observer or SilentObserver()
        with ExitStack() as opened:
            opened.callback(device.close, 0.0)
            if not isinstance(layout, BlockLayout):
                raise SettingsError(f"the layout is a {type(layout).__name__}: build one with BlockLayout.from_tensors")
            self._layout = layout
            job_timeout_s = checked_timeout(job_timeout_s, option="job_timeout_s", at_least=0.001, error=SettingsError)
            self._close_timeout_s = checked_timeout(close_timeout_s, option="close_timeout_s", error=SettingsError)
            nbytes = parse_nbytes(host_memory, option="host_memory")
            self._plan = plan_arena(
                layout,
                nbytes,
                limits=read_memory_limits(),
                memory_check=memory_check,
                numa=numa,
                device_numa_node=device.numa_node,
                huge_pages=huge_pages,
            )
            _log.info("%s", self._plan.describe())
            self._coordinator = Coordinator(len(layout.groups), observer=observer, eviction=eviction)
            opened.pop_all()  # from here on the worker closes the device
            self._worker = TransferWorker(
                layout, self._plan, device, observer=observer, job_timeout_s=job_timeout_s, mapping=mapping, pin=pin
            )
            opened.callback(self._worker.close, self._close_timeout_s)
            self._worker.arena.wait_published(FIRST_SLOTS_TIMEOUT_S)
            opened.pop_all()
        # Held while reports go from the worker to the coordinator, so that they arrive in order; guards both below.
        self._reports_lock = threading.Lock()
        self._reports: deque[Report] = deque()
        self._results: list[TransferResult] = []
        register(self, forked=self._forked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Offloader over {self._worker!r}>"

    @property
    def plan(self) -> ArenaPlan:
        """Return how host memory is divided: bytes, slots and tokens of each group."""
        return self._plan

    @property
    def closed(self) -> bool:
        """Say whether `close` has begun."""
        return self._worker.closed

    def submit_store(
        self, keys: Sequence[BlockKey], block_ids: ArrayLike, *, wait_for: DeviceEvent | None = None
    ) -> StoreSubmission:
        """Begin to copy blocks into host memory and return at once.

        `block_ids`: for each key in turn the `blocks_per_chunk` device blocks that hold it, also for keys that are
        stored already (those are not copied again). The copy starts after `wait_for`, or else after the work on the
        engine's stream as of this call; the device blocks may not change before the job's result. All new blocks are
        taken, or none. Raises `RequestError` for bad keys or ids, with nothing changed.
        """
        keys = _checked_keys(keys)
        worker = self._worker_for(len(keys))
        blocks = device_blocks_by_group(self._layout, _groups_of(keys), block_ids)
        decision = self._coordinator.prepare_store(keys)
        order = decision.order
        if order is None:
            return StoreSubmission(None, 0, decision.num_known, decision.declined)
        chosen = {group: blocks[group][positions] for group, positions in decision.positions.items()}
        try:
            worker.submit(order, chosen, wait_for=wait_for)
        except BaseException:
            # An interrupt can strike behind the queueing; then the report resolves the order, since the copy may run.
            if not worker.may_touch(order.order_id):
                self._coordinator.withdraw(order.order_id)
            raise
        return StoreSubmission(order.order_id, len(keys) - decision.num_known, decision.num_known)

    def match(self, keys: Sequence[BlockKey], *, request: Hashable = None, timeout_s: float | None = None) -> Match:
        """Find the longest prefix of `keys` that is in host memory, and lease it until it is loaded or released.

        `finish_request` of its `request` releases it too, and so does time if it is not loaded within `timeout_s`.
        """
        self._worker_for(1)
        lease = self._coordinator.match(as_sequence(keys), request=request, timeout_s=timeout_s)  # it looks at each key
        return Match(self._coordinator, lease)

    def finish_request(self, request: Hashable) -> int:
        """Release the matches of a request that ended or was aborted, but not those being loaded; return how many.

        A request that is not known, or has ended before, has none.
        """
        return self._coordinator.finish_request(request)

    def submit_load(
        self, match: Match, block_ids: ArrayLike, *, wait_for: DeviceEvent | None = None, expedited: bool = False
    ) -> OrderId:
        """Begin to copy a match into device blocks and return at once; uses the match up.

        `block_ids`: for each key of the match in turn its `blocks_per_chunk` device blocks. Nobody may read or write
        them before the job's result; after an ABANDONED result they stay withheld until the SETTLED one. `expedited`
        loads do not queue behind others. Raises `RequestError`, with the match as it was.
        """
        if not isinstance(match, Match):
            raise RequestError(f"the match is a {type(match).__name__}: give what `match` returned")
        worker = self._worker_for(match.num_blocks)
        blocks = device_blocks_by_group(self._layout, _groups_of(match.keys), block_ids)
        order = self._coordinator.prepare_load(match.lease)
        try:
            worker.submit(order, blocks, wait_for=wait_for, expedited=expedited)
        except BaseException:
            if not worker.may_touch(order.order_id):
                self._coordinator.withdraw(order.order_id)
            raise
        return order.order_id

    def poll_results(self) -> list[TransferResult]:
        """Return what ended since the last call, stores and loads alike. Never blocks; works after `close` as well.

        Call it as long as jobs are submitted: results are kept until it is called.
        """
        self._catch_up()
        with self._reports_lock:
            results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[OrderId | None], timeout_s: float) -> None:
        """Return once these jobs touch nothing any more; their results still come out of `poll_results`.

        None, the id of a store that had nothing to copy, is over. Raises `TransferTimeoutError` at the deadline: the
        device blocks of these jobs must not be reused then.
        """
        self._worker.wait([job_id for job_id in job_ids if job_id is not None], timeout_s)

    def order_after(self, job_id: OrderId | None, stream: object) -> None:
        """Let what is queued on a stream of the engine's from now on begin after a job; returns at once.

        For kernels that use the blocks of a load whose result was not seen yet. They run also if it fails, so what they
        compute is good only once the result is. `stream` is one of the device's: a `CpuStream`, or a CUDA stream in any
        form. A job that is over, or None, is not waited for. Raises `RequestError` for what is no stream, `DeviceError`
        if the device failed, and `UnsupportedError` for a job that is copied by way of a ring: wait for that one.
        """
        if job_id is not None:
            self._worker.order_after(job_id, stream)

    def note_step(self) -> None:
        """Take note that the engine begins a step, so that page-locking keeps out of its way. Takes a microsecond."""
        self._worker.note_step()

    def note_step_end(self) -> None:
        """Take note that the step has ended. Noted or not, but if once then always: a long step is then no rest."""
        self._worker.note_step_end()

    def pause_registration(self, timeout_s: float = PAUSE_TIMEOUT_S) -> bool:
        """Let no page-locking begin before `resume_registration`; say whether none is under way any more.

        For what the engine cannot have disturbed, such as a graph capture. Pauses add up; mapping goes on.
        """
        return self._worker.pause_registration(checked_timeout(timeout_s, option="timeout_s"))

    def resume_registration(self) -> None:
        """End one pause; harmless without one."""
        self._worker.resume_registration()

    def cancel_registration(self) -> None:
        """Page-lock nothing any more after the slab that is under way: the rest is staged. Never blocks."""
        self._worker.arena.cancel_registration()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until all host memory can be copied to directly; False at once if that cannot come true."""
        return self._worker.wait_registered(checked_timeout(timeout_s, option="timeout_s"))

    def touch(self, keys: Sequence[BlockKey]) -> int:
        """Count a use of blocks that the engine found in its own cache; return how many of them are stored here."""
        return self._coordinator.touch(as_sequence(keys))

    def enter_device(self, keys: Sequence[BlockKey]) -> None:
        """Take note that the engine's own cache holds these blocks; see ``eviction="device-lru"``."""
        self._coordinator.enter_device(as_sequence(keys))

    def leave_device(self, keys: Sequence[BlockKey]) -> None:
        """Take note that the engine's own cache has just dropped these blocks."""
        self._coordinator.leave_device(as_sequence(keys))

    def reset(self, *, keep: bool = False) -> None:
        """Forget every block, stores in flight included: what was computed with other weights must not return.

        `keep`: the blocks are right still (the engine slept, its weights are the same), so forget nothing.
        """
        self._coordinator.reset(keep=keep)

    def statistics(self) -> OffloaderStatistics:
        """Return the numbers of both halves."""
        return OffloaderStatistics(self._coordinator.statistics(), self._worker.statistics())

    def close(self, timeout_s: float | None = None) -> OffloaderCloseReport:
        """End by the deadline (`close_timeout_s` if none is given) and report what could not be given back.

        See `TransferWorker.close`. Closing twice does no harm; a second thread waits for the first one's report, and
        gets a `BusyError` if its own time is up before.
        """
        report = self._worker.close(self._close_timeout_s if timeout_s is None else timeout_s)
        self._catch_up()
        return OffloaderCloseReport(report, tuple(self._coordinator.unresolved_keys()))

    def _forked(self) -> None:
        """Be closed in a forked child, as the worker is; results are the parent's."""
        self._reports_lock = threading.Lock()
        self._results = []

    def _worker_for(self, num_blocks: int) -> TransferWorker:
        if self._worker.closed:
            raise ClosedError("the offloader is closed: use it before close(), inside its `with` block")
        if num_blocks == 0:
            raise RequestError("no blocks were given: pass at least one key, or a match that is not empty")
        self._catch_up()
        return self._worker

    def _catch_up(self) -> None:
        """Take note of new slots and ended jobs, so that every decision rests on what is true now."""
        with self._reports_lock:
            self._coordinator.publish(self._worker.take_published())
            self._reports.extend(reports := self._worker.take_reports())
            while self._reports:
                report = self._reports[0]  # taken off when it is dealt with, so that an interrupt loses none
                num_blocks = self._coordinator.handle_report(report)
                self._results.append(
                    TransferResult(
                        job_id=report.order_id,
                        kind=report.kind,
                        outcome=report.outcome,
                        num_blocks=num_blocks,
                        nbytes=report.nbytes,
                        seconds=report.seconds,
                        reason=report.reason,
                    )
                )
                self._reports.popleft()
        self._worker.observe(reports)


def _checked_keys(keys: Iterable[BlockKey]) -> Sequence[BlockKey]:
    found = as_sequence(keys)
    if isinstance(found, BlockKeys):
        return found
    for position, key in enumerate(found):
        if not isinstance(key, BlockKey):
            raise RequestError(f"key {position} is a {type(key).__name__}: give BlockKey objects")
    return found


def _groups_of(keys: Sequence[BlockKey]) -> Sequence[int]:
    return [keys.group] * len(keys) if isinstance(keys, BlockKeys) else [key.group for key in keys]
