"""Queueing one job after the other on a stream: waits, copies of the copy engine, launches, and the job's number."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.cuda.backlog import StreamBacklog
from kvmoor.devices.cuda.completion import CompletionMemory
from kvmoor.devices.cuda.copy_calls import queue_copies
from kvmoor.devices.cuda.copy_runs import CopyRuns, RunFinder
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.device_tables import DeviceTable, DeviceTables
from kvmoor.devices.cuda.driver import Driver
from kvmoor.devices.cuda.launches import KernelFunctions, PageLaunches
from kvmoor.devices.cuda.streams import CudaEvent
from kvmoor.devices.device import BlockCopies, Direction

TICKET_NBYTES: Final = 256
"""Device memory that a queue needs: 4 bytes for the ticket counter of its launches, and a page of nothing."""
_NOTHING_OFFSET: Final = 128


class JobSubmission:
    """Queue jobs on one stream in one direction. One thread at a time, with the context current and capture-relaxed."""

    def __init__(
        self,
        driver: Driver,
        stream: int,
        direction: Direction,
        *,
        strategy: CopyStrategy,
        functions: KernelFunctions,
        tables: DeviceTables,
        completion: CompletionMemory,
        ticket_address: int,
        writes_numbers: bool,
        range_starts: Callable[[], NDArray[np.int64]],
    ) -> None:
        """Prepare the stream, which has to be new.

        `ticket_address`: `TICKET_NBYTES` of device memory. `writes_numbers`: whether the device can write 64-bit
        numbers in stream order. `range_starts`: where ranges of host memory begin that were registered one by one.
        """
        self._driver = driver
        self._stream = stream
        self._direction = direction
        self._strategy = strategy
        self._thread_blocks = strategy.thread_blocks(direction)
        self._functions = functions
        self._tables = tables
        self._completion = completion
        self._ticket_address = ticket_address
        self._writes_numbers = writes_numbers
        self._range_starts = range_starts
        self._backlog = StreamBacklog(driver, stream, completion.read)
        self._groups: dict[int, _GroupCopies] = {}  # by id of the group, which the value keeps alive
        driver.memset_async(ticket_address, 0, TICKET_NBYTES, stream)
        if not writes_numbers:
            page = TensorPages(ticket_address + _NOTHING_OFFSET, 1, 16, 16)
            self._nothing = GroupLayout((page,), 1)
            self.prepare(self._nothing)

    @property
    def streams(self) -> tuple[int, ...]:
        """Return the streams that jobs run on."""
        return (self._stream,)

    def prepare(self, group: GroupLayout) -> None:
        """Make ready what copies of a group need; nothing of the stream's waits for the host afterwards."""
        if id(group) not in self._groups:
            self._add(group)

    def submit(
        self,
        copies: Sequence[BlockCopies],
        sequence: int,
        wait_for: CudaEvent | None,
        *,
        is_given_up: Callable[[], bool],
    ) -> None:
        """Queue a job. What it raises leaves open how much of the job is queued.

        `is_given_up`: whether to stop waiting for room on a stream that is full.
        """
        all_runs: list[CopyRuns] = []
        kernel_parts: list[tuple[PageLaunches, BlockCopies]] = []
        for part in copies:
            if len(part.slot_addresses) and part.group.tensors:
                group = self._groups.get(id(part.group)) or self._add(part.group)
                runs, rest = group.finder.split(part, self._range_starts())
                if runs is not None:
                    all_runs.append(runs)
                if rest is not None:
                    kernel_parts.append((group.launches, rest))
        if wait_for is None:
            self._backlog.make_room(1, is_given_up)
        else:
            self.take_places(1, is_given_up)
            wait_for.order_before(self._stream)
        for runs in all_runs:
            self._copy_runs(runs, is_given_up)
        # The kernels come last: the last one stores the number when all before it on the stream is over as well.
        if kernel_parts:
            begin_address, end_address = self._completion.next_times(sequence)
            for launches, rest in kernel_parts[:-1]:
                self._launch(launches, rest, 0, begin_address, 0, is_given_up)
                begin_address = 0
            self._launch(*kernel_parts[-1], sequence, begin_address, end_address, is_given_up)
        else:
            self._store_number(sequence, is_given_up)
        self._backlog.end_job(sequence)

    def launch_pages(
        self, copies: BlockCopies, sequence: int, *, thread_blocks: int, is_given_up: Callable[[], bool]
    ) -> None:
        """Queue a part of a job by the page kernel alone; a `sequence` that is not 0 ends the job.

        The addresses of slots may be any that the device reaches.
        """
        group = self._groups.get(id(copies.group)) or self._add(copies.group)
        self._launch(group.launches, copies, sequence, 0, 0, is_given_up, thread_blocks)

    def take_places(self, num: int, is_given_up: Callable[[], bool]) -> None:
        """Wait for room for what somebody else queues on the stream, such as waits and records."""
        self._backlog.make_room(num, is_given_up)
        self._backlog.count(num)

    def end_job(self, sequence: int) -> None:
        """Take note that a job was queued whole; `submit` does so itself."""
        self._backlog.end_job(sequence)

    def close(self) -> None:
        """Give events and tables back. Caller: nothing of the stream's runs any more."""
        self._groups.clear()
        self._backlog.close()

    def _add(self, group: GroupLayout) -> "_GroupCopies":
        table = self._tables.find(group, self._functions.variant.piece_nbytes)
        self._driver.stream_wait_event(self._stream, table.uploaded)
        launches = PageLaunches(
            table.table,
            self._functions,
            self._direction,
            table_address=table.address,
            word_address=self._completion.word_address,
            ticket_address=self._ticket_address,
        )
        finder = RunFinder(group, self._strategy.copy_engine_from_nbytes)
        added = self._groups[id(group)] = _GroupCopies(table, launches, finder)
        return added

    def _launch(
        self,
        launches: PageLaunches,
        copies: BlockCopies,
        sequence: int,
        begin_address: int,
        end_address: int,
        is_given_up: Callable[[], bool],
        thread_blocks: int = 0,
    ) -> None:
        for function, grid, block, shared_nbytes, parameters_address in launches.launches(
            copies.block_ids,
            copies.slot_addresses,
            thread_blocks=thread_blocks or self._thread_blocks,
            sequence=sequence,
            begin_address=begin_address,
            end_address=end_address,
        ):
            self._backlog.make_room(1, is_given_up)
            self._driver.launch(function, grid, block, shared_nbytes, self._stream, parameters_address)
            self._backlog.count(1)

    def _copy_runs(self, runs: CopyRuns, is_given_up: Callable[[], bool]) -> None:
        targets, sources = runs.host_addresses, runs.device_addresses
        if self._direction is Direction.HOST_TO_DEVICE:
            targets, sources = sources, targets
        queue_copies(self._driver, self._stream, self._backlog, targets, sources, runs.nbytes, is_given_up)

    def _store_number(self, sequence: int, is_given_up: Callable[[], bool]) -> None:
        """Store the number of a job without a kernel, in stream order.

        Where the stream cannot write numbers, a launch that copies nothing stores it. (Not a copy of 8 bytes: between
        two places in host memory the driver copies at once and waits for the stream, as CUDA's documentation of API
        synchronization behavior says, and nothing says that 8 bytes arrive as one.)
        """
        self._backlog.make_room(1, is_given_up)
        if self._writes_numbers:
            self._driver.stream_write_value64(self._stream, self._completion.word_address, sequence)
            self._backlog.count(1)
            return
        nowhere = np.array([self._completion.word_address], np.int64)
        nothing = BlockCopies(self._nothing, np.array([-1], np.int64), nowhere)
        self._launch(self._groups[id(self._nothing)].launches, nothing, sequence, 0, 0, is_given_up)


class _GroupCopies:
    """What a queue keeps for each group."""

    __slots__ = ("finder", "launches", "table")

    def __init__(self, table: DeviceTable, launches: PageLaunches, finder: RunFinder) -> None:
        self.table = table
        self.launches = launches
        self.finder = finder
