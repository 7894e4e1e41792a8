"""Measuring on the machine at hand how copies are best made, and keeping the answer.

    page size x number of bytes x direction x way of copying (page kernel of 2, 4, 8, 16 thread blocks; copy engine)

It takes a few hundred milliseconds, uses queues and memory of its own, waits for nothing with the driver, and is given
up at a deadline. Whatever goes wrong, the defaults of `CopyStrategy` are used. What was measured beside a busy engine
is worth less; who wants to be sure measures again on an idle GPU (``kvmoor bench copies``).
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.devices.cuda.calibration_file import read_json, write_json
from kvmoor.devices.cuda.compiler import page_copy_source
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.copy_queue import CudaCopyQueue
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.driver import Driver
from kvmoor.devices.cuda.holdings import Holdings
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import DeviceError

_log = logging.getLogger("kvmoor")

DEADLINE_S: Final = 1.0
"""When measuring is given up. It takes 0.15 s on a link of 50 GB/s and 0.6 s on one of 12 GB/s. (Computed.)"""
THREAD_BLOCKS: Final = (2, 4, 8, 16)
PAGE_NBYTES: Final = tuple(1024 * kib for kib in (4, 16, 64, 256, 1024, 2048))
TOTAL_NBYTES: Final = (2 * 2**20, 16 * 2**20)
_ENGINE_FROM_NBYTES: Final = 64 * 1024
"""Below this a call of the copy engine for each page is slower on every machine, by far; it is not measured."""
_SLOW_S: Final = 0.002
"""A copy that takes longer is not repeated."""
_REPEATS: Final = 3
_ENOUGH_OF_BEST: Final = 0.95
"""A share of the best speed at which fewer thread blocks are preferred: they leave more of the GPU to the engine."""
_ENGINE_SHARE: Final = 0.98
"""A share of the page kernel's speed at which the copy engine is preferred: it takes nothing of the GPU."""
_FORMAT: Final = 1

OpenQueue = Callable[[str, Direction, CopyStrategy], CudaCopyQueue]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way to copy `total_nbytes` in scattered pages: the best of some tries. `thread_blocks` 0: the copy engine."""

    direction: str
    page_nbytes: int
    total_nbytes: int
    thread_blocks: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Return the speed in units of 1e9 bytes per second, submission included."""
        return self.total_nbytes / self.seconds / 1e9


class Calibration:
    """Know what was measured on one GPU. `folder`: where that is kept; None: in this object only."""

    def __init__(self, driver: Driver, context: CudaContext, folder: Path | None) -> None:
        self._folder = folder
        self._driver = driver
        self._context = context
        self._measurements: list[Measurement] = []

    def find(self, layout: BlockLayout | None) -> CopyStrategy | None:
        """Return the best strategy for the pages of a layout, or None if nothing was measured so far."""
        if not self._measurements and self._folder is not None:
            self._measurements = self._read()
        return choose_strategy(self._measurements, page_class(layout)) if self._measurements else None

    def measure(self, holdings: Holdings, open_queue: OpenQueue) -> bool:
        """Measure now and keep it; return whether that worked. Its queues stay with whoever opens them."""
        try:
            self.keep(measure_copies(holdings, open_queue, deadline=time.monotonic() + DEADLINE_S))
        except DeviceError as error:
            _log.warning("copies could not be calibrated (%s): the defaults are used", error)
            return False
        return True

    def keep(self, measurements: list[Measurement]) -> None:
        """Use these from now on, here and in later processes."""
        self._measurements = measurements
        if self._folder is not None:
            with suppress(DeviceError):  # a GPU that does not say who it is
                key = self._key()
                write_json(self._file(key), {"key": key, "measurements": [asdict(each) for each in measurements]})

    def _read(self) -> list[Measurement]:
        try:
            key = self._key()
            content = read_json(self._file(key))
            if content is None or content["key"] != key:
                return []
            measurements = [Measurement(**each) for each in content["measurements"]]
            if not all(math.isfinite(each.seconds) and each.seconds > 0 for each in measurements):
                raise ValueError("some copy took no time, or endless time")
            for page_nbytes in PAGE_NBYTES:
                choose_strategy(measurements, page_nbytes)  # fails unless all is there
        except (DeviceError, TypeError, KeyError, ValueError, ZeroDivisionError) as error:
            _log.info("the calibration in %s is of no use (%r)", self._folder, error)
            return []
        return measurements

    def _key(self) -> dict[str, Any]:
        """Return all that the measurements depend on."""
        return {
            "format": _FORMAT,
            "name": self._driver.device_name(self._context.device),
            "uuid": self._driver.device_uuid(self._context.device),
            "driver": self._driver.driver_version(),
            "kernel": blake3(page_copy_source().encode()).hexdigest(16),
        }

    def _file(self, key: dict[str, Any]) -> Path:
        assert self._folder is not None
        digest = blake3(json.dumps(key, sort_keys=True).encode()).hexdigest(16)
        return self._folder / f"{digest}.json"


def measure_copies(
    holdings: Holdings, open_queue: OpenQueue, *, deadline: float, on_step: Callable[[], None] = lambda: None
) -> list[Measurement]:
    """Measure every combination. Raises `DeviceError` at the deadline, or if a copy cannot be made.

    What it opens, 32 MiB of memory among it, stays until the device is closed. `on_step` is called after each.
    """
    bench = _Bench(holdings, open_queue, deadline)
    measurements = []
    for direction in Direction:
        for thread_blocks in (*THREAD_BLOCKS, 0):
            queue = bench.open(direction, thread_blocks)
            for page_nbytes in PAGE_NBYTES:
                if not thread_blocks and page_nbytes < _ENGINE_FROM_NBYTES:
                    continue
                for total_nbytes in TOTAL_NBYTES:
                    seconds = bench.measure(queue, page_nbytes, total_nbytes)
                    measurements.append(Measurement(direction.value, page_nbytes, total_nbytes, thread_blocks, seconds))
                    on_step()
    return measurements


def choose_strategy(measurements: Sequence[Measurement], page_nbytes: int) -> CopyStrategy:
    """Return the strategy for pages of this size, as of `PAGE_NBYTES`, by the largest jobs that were measured."""
    total_nbytes = max(each.total_nbytes for each in measurements)
    large = [each for each in measurements if each.total_nbytes == total_nbytes]
    speeds = {(each.direction, each.page_nbytes, each.thread_blocks): each.gb_per_s for each in large}
    blocks = {}
    for direction in Direction:
        of_blocks = {count: speeds[direction.value, page_nbytes, count] for count in THREAD_BLOCKS}
        best = max(of_blocks.values())
        blocks[direction] = min(count for count, speed in of_blocks.items() if speed >= _ENOUGH_OF_BEST * best)
    engine_from: int | None = None
    for size in sorted((size for size in PAGE_NBYTES if size >= _ENGINE_FROM_NBYTES), reverse=True):
        if not all(
            speeds[each.value, size, 0] >= _ENGINE_SHARE * speeds[each.value, size, blocks[each]] for each in Direction
        ):
            break
        engine_from = size
    return CopyStrategy(blocks[Direction.DEVICE_TO_HOST], blocks[Direction.HOST_TO_DEVICE], engine_from)


class _Bench:
    """Make copies of scattered pages between buffers of its own."""

    def __init__(self, holdings: Holdings, open_queue: OpenQueue, deadline: float) -> None:
        self._open_queue = open_queue
        self._deadline = deadline
        self._device_address = holdings.device_memory(max(TOTAL_NBYTES))
        self._host_address = holdings.host_memory(max(TOTAL_NBYTES))
        self._sequence = 0
        self._groups = {
            nbytes: GroupLayout((TensorPages(self._device_address, max(TOTAL_NBYTES) // nbytes, nbytes, nbytes),), 1)
            for nbytes in PAGE_NBYTES
        }

    def open(self, direction: Direction, thread_blocks: int) -> CudaCopyQueue:
        """Open a queue that copies in one way only, and make it ready for all sizes."""
        if thread_blocks:
            strategy = CopyStrategy(thread_blocks, thread_blocks, None, gather_from_nbytes=None)
        else:
            strategy = CopyStrategy(copy_engine_from_nbytes=1, gather_from_nbytes=None)
        queue = self._open_queue(f"calibration, {direction.value}, {thread_blocks}", direction, strategy)
        for group in self._groups.values():
            queue.prepare(group)
        self._run(queue, self._copies(max(PAGE_NBYTES), max(PAGE_NBYTES)))  # the first launch takes longer
        return queue

    def measure(self, queue: CudaCopyQueue, page_nbytes: int, total_nbytes: int) -> float:
        """Return how long a job takes, from before it is queued until it is seen to be over."""
        copies = self._copies(page_nbytes, total_nbytes)
        best = self._run(queue, copies)
        for _ in range(_REPEATS - 1):
            if best < _SLOW_S:
                best = min(best, self._run(queue, copies))
        return best

    def _copies(self, page_nbytes: int, total_nbytes: int) -> Sequence[BlockCopies]:
        """Choose pages so that no two are neighbours on both sides: odd ones of the device first, then even ones."""
        numbers = np.arange(total_nbytes // page_nbytes, dtype=np.int64)
        block_ids = np.concatenate((numbers[1::2], numbers[::2]))
        return [BlockCopies(self._groups[page_nbytes], block_ids, self._host_address + page_nbytes * numbers)]

    def _run(self, queue: CudaCopyQueue, copies: Sequence[BlockCopies]) -> float:
        started = time.monotonic()
        self._sequence += 1
        queue.enqueue(copies, self._sequence, None)
        if not queue.wait_completed(self._sequence, self._deadline - started):
            raise DeviceError("measuring took too long: the GPU or the link is slow, busy, or hangs")
        if (failure := queue.failure(self._sequence)) is not None:
            raise failure
        return time.monotonic() - started


def page_class(layout: BlockLayout | None) -> int:
    """Return which of `PAGE_NBYTES` stands for a layout: the next one below the size of the page of a median byte."""
    pages = [tensor.page_nbytes for group in layout.groups for tensor in group.tensors] if layout is not None else []
    return _largest_not_above(_weighted_median(pages)) if pages else 64 * 1024


def _weighted_median(sizes: Iterable[int]) -> int:
    """Return how large the page is that the middle one of all bytes lies in."""
    ordered = np.sort(np.fromiter(sizes, np.int64))
    sums = np.cumsum(ordered)
    return int(ordered[np.searchsorted(sums, sums[-1] / 2)])


def _largest_not_above(nbytes: int) -> int:
    return max((size for size in PAGE_NBYTES if size <= nbytes), default=PAGE_NBYTES[0])
