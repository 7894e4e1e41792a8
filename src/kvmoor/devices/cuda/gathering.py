"""Long jobs by way of a ring in device memory, at the speed of the link and beside work that fills the GPU.

    store   pages --kernel--> | slot | slot | ... |  one half of the ring  --copy engine--> slots in host memory
    load    pages <-kernel--- | slot | slot | ... |  one half of the ring  <-copy engine--- slots in host memory

A kernel that reads or writes host memory itself sends packets of 128 bytes over the link, which costs 6 to 8 % of it,
and its writes stand in the way of other kernels' memory accesses. The copy engine does neither, but takes a command for
each run, so it is fed whole slots, joined where they are adjacent. Between pages and ring a kernel moves bytes many
times faster than the link.

While the copy engine works on one half the kernel works on the other. A kernel of ours may have to wait for one of the
engine's to leave room, some 1-3 ms beside matrix products, so a half has to last the copy engine as long: 128 MiB at 55
GB/s do. (Measured on an H200, benchmarks/results.)
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import SLOT_ALIGNMENT, GroupLayout
from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.devices.cuda.backlog import StreamBacklog
from kvmoor.devices.cuda.completion import CompletionMemory
from kvmoor.devices.cuda.copy_calls import queue_copies
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.driver import Driver
from kvmoor.devices.cuda.holdings import Holdings
from kvmoor.devices.cuda.job_submission import JobSubmission
from kvmoor.devices.cuda.streams import CudaEvent
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import DeviceError

_log = logging.getLogger("kvmoor")

SHORTEST_JOB_NBYTES: Final = 16 * 2**20
"""What is shorter goes the direct way, which has less to set up. Guessed: 0.3 ms on a link of 55 GB/s."""
_SMALLEST_RING_NBYTES: Final = 32 * 2**20
_GATHER_THREAD_BLOCKS: Final = 8
"""Measured on an H200: 8 are fast enough between pages and ring, and 32 take 1 % more from a matmul beside them."""


class GatherPlan(NamedTuple):
    """The blocks of one group in a job, in the order of their slots in host memory."""

    group: GroupLayout
    block_ids: NDArray[np.int64]
    """[num_blocks, blocks_per_chunk]"""
    slot_addresses: NDArray[np.int64]
    begins_run: NDArray[np.bool_]
    """[num_blocks], false for a block that lies right behind the one before it, in the same registered range."""


class _Half:
    """One half of the ring: where it is, and events for when it is full and when it is free again."""

    __slots__ = ("address", "filled", "freed", "nbytes")

    def __init__(self, address: int, nbytes: int, filled: int, freed: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.filled = filled
        self.freed = freed


class GatheringSubmission:
    """Queue jobs, long ones through the ring and the others directly. Called as `JobSubmission` is."""

    def __init__(
        self,
        driver: Driver,
        holdings: Holdings,
        direct: JobSubmission,
        direction: Direction,
        *,
        copy_stream: int,
        strategy: CopyStrategy,
        completion: CompletionMemory,
        range_starts: Callable[[], NDArray[np.int64]],
    ) -> None:
        """Prepare; the ring is allocated by `open_ring`, or for the first long job.

        `copy_stream`: a new one, for the copy engine.
        """
        self._driver = driver
        self._holdings = holdings
        self._direct = direct
        self._direction = direction
        (self._stream,) = direct.streams
        self._copy_stream = copy_stream
        self._strategy = strategy
        self._completion = completion
        self._range_starts = range_starts
        self._backlog = StreamBacklog(driver, copy_stream, completion.read)
        self._halves: list[_Half] | None = None  # None: not asked for yet; empty: there is no memory for it
        self._next_half = 0
        self._numbered = 0  # an event behind the latest number that the copy stream stores
        self._must_order = False  # whether the stream of the kernels does not wait for that number yet

    @property
    def streams(self) -> tuple[int, ...]:
        """Return the streams that jobs run on."""
        return (*self._direct.streams, self._copy_stream)

    def prepare(self, group: GroupLayout) -> None:
        """Make ready what copies of a group need."""
        self._direct.prepare(group)

    def open_ring(self) -> None:
        """Allocate the ring, if there is memory for it: later that may have to wait for the engine's work."""
        self._ring()

    def submit(
        self,
        copies: Sequence[BlockCopies],
        sequence: int,
        wait_for: CudaEvent | None,
        *,
        is_given_up: Callable[[], bool],
    ) -> None:
        """Queue a job. What it raises leaves open how much of the job is queued."""
        plans = self._plan(copies)
        halves = self._ring() if plans else []
        if not halves or any(plan.group.slot_nbytes > halves[0].nbytes for plan in plans):
            self._order_after_copies(is_given_up)
            self._direct.submit(copies, sequence, wait_for, is_given_up=is_given_up)
            return
        pieces = [piece for plan in plans for piece in _cut(plan, halves[0].nbytes)]
        for number, piece in enumerate(pieces):
            half = halves[self._next_half]
            self._next_half = 1 - self._next_half
            first_wait = wait_for if number == 0 else None
            if self._direction is Direction.DEVICE_TO_HOST:
                self._store(piece, half, first_wait, is_given_up)
            else:
                self._load(piece, half, first_wait, sequence if number == len(pieces) - 1 else 0, is_given_up)
        if self._direction is Direction.DEVICE_TO_HOST:
            self._take_places(2, is_given_up, on_copy_stream=True)
            self._driver.stream_write_value64(self._copy_stream, self._completion.word_address, sequence)
            self._driver.event_record(self._numbered, self._copy_stream)
            self._must_order = True
        self._backlog.end_job(sequence)
        self._direct.end_job(sequence)

    def close(self) -> None:
        """Give events and tables back. Caller: nothing of the streams runs any more."""
        try:
            self._backlog.close()
        finally:
            self._direct.close()

    def _plan(self, copies: Sequence[BlockCopies]) -> list[GatherPlan]:
        """Return the blocks of a job in the order of their slots; nothing if the direct way is the better one."""
        wanted, long_run = self._strategy.gather_from_nbytes, self._strategy.copy_engine_from_nbytes
        parts = [part for part in copies if part.group.tensors and len(part.slot_addresses)]
        nbytes = sum(part.group.block_nbytes * len(part.slot_addresses) for part in parts)
        if wanted is None or nbytes < SHORTEST_JOB_NBYTES:
            return []
        shortest_page = min(tensor.page_nbytes for part in parts for tensor in part.group.tensors)
        if long_run is not None and shortest_page >= long_run:
            return []  # the copy engine takes pages as they are
        plans, num_runs = [], 0
        for part in parts:
            if part.block_ids.min() < 0:
                return []  # what is left out of a slot must not be overwritten with what the ring holds
            order = np.argsort(part.slot_addresses)
            addresses = part.slot_addresses[order]
            begins_run = np.ones(len(addresses), np.bool_)
            begins_run[1:] = np.diff(addresses) != part.group.block_nbytes  # padding between slots is left as it is
            if (starts := self._range_starts()).size:
                begins_run[np.searchsorted(addresses, starts).clip(max=len(addresses) - 1)] = True
            num_runs += int(np.count_nonzero(begins_run))
            ids = part.block_ids.reshape(len(addresses), -1)[order]
            plans.append(GatherPlan(part.group, ids, addresses, begins_run))
        return plans if nbytes >= num_runs * wanted else []

    def _store(
        self, piece: GatherPlan, half: _Half, wait_for: CudaEvent | None, is_given_up: Callable[[], bool]
    ) -> None:
        self._take_places(3, is_given_up)
        self._take_places(2, is_given_up, on_copy_stream=True)
        self._driver.stream_wait_event(self._stream, half.freed)
        if wait_for is not None:
            wait_for.order_before(self._stream)
        self._launch(piece, half, 0, is_given_up)
        self._driver.event_record(half.filled, self._stream)
        self._driver.stream_wait_event(self._copy_stream, half.filled)
        self._copy(piece, half, is_given_up)
        self._driver.event_record(half.freed, self._copy_stream)

    def _load(
        self,
        piece: GatherPlan,
        half: _Half,
        wait_for: CudaEvent | None,
        sequence: int,
        is_given_up: Callable[[], bool],
    ) -> None:
        self._take_places(2, is_given_up, on_copy_stream=True)
        self._take_places(3, is_given_up)
        self._driver.stream_wait_event(self._copy_stream, half.freed)
        self._copy(piece, half, is_given_up)
        self._driver.event_record(half.filled, self._copy_stream)
        self._driver.stream_wait_event(self._stream, half.filled)
        if wait_for is not None:  # only the kernel touches what the engine may still use
            wait_for.order_before(self._stream)
        self._launch(piece, half, sequence, is_given_up)
        self._driver.event_record(half.freed, self._stream)

    def _launch(self, piece: GatherPlan, half: _Half, sequence: int, is_given_up: Callable[[], bool]) -> None:
        in_ring = half.address + np.arange(len(piece.slot_addresses), dtype=np.int64) * piece.group.slot_nbytes
        copies = BlockCopies(piece.group, piece.block_ids.ravel(), in_ring)
        self._direct.launch_pages(copies, sequence, thread_blocks=_GATHER_THREAD_BLOCKS, is_given_up=is_given_up)

    def _copy(self, piece: GatherPlan, half: _Half, is_given_up: Callable[[], bool]) -> None:
        """Queue the copies between a half of the ring and host memory, one for each run of slots."""
        begins_run = piece.begins_run.copy()
        begins_run[0] = True
        first = begins_run.nonzero()[0]
        lengths = np.empty_like(first)
        lengths[:-1] = first[1:] - first[:-1]
        lengths[-1] = len(begins_run) - first[-1]
        host = piece.slot_addresses[first]
        ring = half.address + first * piece.group.slot_nbytes
        nbytes = lengths * piece.group.block_nbytes
        targets, sources = (host, ring) if self._direction is Direction.DEVICE_TO_HOST else (ring, host)
        queue_copies(self._driver, self._copy_stream, self._backlog, targets, sources, nbytes, is_given_up)

    def _order_after_copies(self, is_given_up: Callable[[], bool]) -> None:
        """Let the stream of the kernels wait for the numbers of the copy stream: they may only grow."""
        if self._must_order:
            self._take_places(1, is_given_up)
            self._driver.stream_wait_event(self._stream, self._numbered)
            self._must_order = False

    def _take_places(self, num: int, is_given_up: Callable[[], bool], *, on_copy_stream: bool = False) -> None:
        """Wait for room for waits, records and writes, which fill a stream as launches do."""
        if on_copy_stream:
            self._backlog.make_room(num, is_given_up)
            self._backlog.count(num)
        else:
            self._direct.take_places(num, is_given_up)

    def _ring(self) -> list[_Half]:
        """Return the halves of the ring, allocated at the first call; nothing if there is no memory for it."""
        if self._halves is None:
            self._halves = self._allocate_ring()
        return self._halves

    def _allocate_ring(self) -> list[_Half]:
        nbytes = self._strategy.gather_ring_nbytes
        while nbytes >= _SMALLEST_RING_NBYTES and not self._driver.broken:
            try:
                address = round_up(self._holdings.device_memory(nbytes + SLOT_ALIGNMENT), SLOT_ALIGNMENT)
            except DeviceError as error:
                _log.info("no ring of %s in device memory: %s", format_nbytes(nbytes), error)
                nbytes //= 2
                continue
            _log.info("a ring of %s in device memory, %s", format_nbytes(nbytes), self._direction.value)
            half = nbytes // 2 // SLOT_ALIGNMENT * SLOT_ALIGNMENT  # the kernel relies on where slots begin
            self._numbered = self._holdings.open_event()
            events = [self._holdings.open_event() for _ in range(4)]
            return [_Half(address + k * half, half, *events[2 * k : 2 * k + 2]) for k in range(2)]
        return []


def may_gather(strategy: CopyStrategy, group: GroupLayout) -> bool:
    """Say whether long jobs of a group go by way of the ring, if their slots have long runs."""
    long_run = strategy.copy_engine_from_nbytes
    if strategy.gather_from_nbytes is None or not group.tensors:
        return False
    return long_run is None or min(tensor.page_nbytes for tensor in group.tensors) < long_run


def _cut(plan: GatherPlan, half_nbytes: int) -> Iterator[GatherPlan]:
    """Cut a plan into pieces that fit into half of the ring, as few as possible: each kernel may have to wait."""
    num_blocks = half_nbytes // plan.group.slot_nbytes
    for start in range(0, len(plan.slot_addresses), num_blocks):
        some = slice(start, start + num_blocks)
        yield GatherPlan(plan.group, plan.block_ids[some], plan.slot_addresses[some], plan.begins_run[some])
