"""How fast are copies of pages beside work that fills the GPU, and what do they cost that work?

A loop of bf16 matrix products of 8192 x 8192 keeps the GPU busy; meanwhile jobs of 128 MiB are queued one behind the
other, two in flight, in one direction or in both. Given are GB/s over the jobs that ran beside the loop, and the speed
of the loop as per cent of the same loop alone just before and just after. The driver's batch call for comparison, and
the sum of both directions without other work, beside two large pinned copies at once.

    python benchmarks/cuda_beside_work.py [--out FOLDER] [--quick] [--sweep]

--sweep measures kinds of page kernel and numbers of thread blocks, and nothing else.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from cuda_parts.batch_call import BatchCall
from cuda_parts.bench_gpu import WAIT_S, BenchGpu, describe_machine, open_gpu
from cuda_parts.paged_copies import HOW_SLOTS_LIE, KIB, MIB, PagedCopies
from cuda_parts.report import Report, nbytes_name, parse_options

from kvmoor.devices.device import Direction

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
SIZE = 8192
JOB_NBYTES = 128 * MIB
IN_FLIGHT = 2
ALONE_S, BESIDE_S = 0.25, 0.6


class Matmuls:
    """A stream of large matrix products; `seconds_each` is what one took alone at the beginning."""

    def __init__(self, gpu: BenchGpu) -> None:
        torch = gpu.torch
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._left, self._right = (torch.randn((SIZE, SIZE), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._product = torch.empty_like(self._left)
        torch.cuda.synchronize()
        self.run_s(20)
        self.seconds_each = self.run_s(40) / 40

    def queue(self, count: int) -> tuple[Any, Any]:
        """Queue products and return events at both ends."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(count):
                self._torch.mm(self._left, self._right, out=self._product)
            end.record()
        return begin, end

    def run_s(self, count: int) -> float:
        """Return how many seconds so many products take alone."""
        begin, end = self.queue(count)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @property
    def tflops(self) -> float:
        """Return the speed alone."""
        return 2 * SIZE**3 / self.seconds_each / 1e12


class Feeder:
    """Keep jobs in flight on one way of copying, and count those that ended."""

    def __init__(self, submit: Callable[[int], object], completed: Callable[[], int], nbytes: int) -> None:
        self._submit = submit
        self._completed = completed
        self._nbytes = nbytes
        self._submitted = 0
        self._ends: list[tuple[float, int]] = []

    def feed(self) -> None:
        """Queue jobs until enough are in flight; note those that ended."""
        ended = self._completed()
        if ended > (self._ends[-1][1] if self._ends else 0):
            self._ends.append((time.perf_counter(), ended))
        while self._submitted - ended < IN_FLIGHT:
            self._submitted += 1
            self._submit(self._submitted)

    def drain(self) -> None:
        """Wait for what is in flight."""
        deadline = time.perf_counter() + WAIT_S
        while self._completed() < self._submitted:
            if time.perf_counter() > deadline:
                raise SystemExit("copies beside the matrix products never ended")

    @property
    def gb_per_s(self) -> float:
        """Return the speed between the first end that was seen and the last."""
        if len(self._ends) < 2:
            return 0.0
        (begin, first), (end, last) = self._ends[0], self._ends[-1]
        return (last - first) * self._nbytes / (end - begin) / 1e9


@dataclass(frozen=True)
class Way:
    """One line of the table."""

    name: str
    page_nbytes: int
    directions: tuple[Direction, ...]
    make_feeder: Callable[[PagedCopies, Direction], Feeder]


def queue_feeder(device: Any, name: str) -> Callable[[PagedCopies, Direction], Feeder]:
    """Copy with a queue of kvmoor's."""

    def make(paged: PagedCopies, direction: Direction) -> Feeder:
        queue = device.open_copy_queue(f"{name} {paged.page_nbytes} {direction.value}", direction)
        copies = paged.copies[direction]
        return Feeder(lambda sequence: queue.enqueue(copies, sequence, None), queue.completed, paged.nbytes)

    return make


def stream_feeder(gpu: BenchGpu, queue_one: Callable[[int], object], nbytes: int) -> Feeder:
    """Copy with a function that queues one job of `nbytes` on the stream with the handle it is given."""
    stream = gpu.torch.cuda.Stream()
    events: deque[Any] = deque()
    ended = 0

    def start(_sequence: int) -> None:
        queue_one(stream.cuda_stream)
        events.append(gpu.torch.cuda.Event())
        events[-1].record(stream)

    def completed() -> int:
        nonlocal ended
        while events and events[0].query():
            events.popleft()
            ended += 1
        return ended

    return Feeder(start, completed, nbytes)


def batch_feeder(gpu: BenchGpu, paged: PagedCopies, direction: Direction) -> Feeder:
    """Copy with the driver's batch call."""
    call, pages = BatchCall(), paged.page_addresses(direction)
    return stream_feeder(gpu, lambda stream: call.copy(pages, direction, stream), paged.nbytes)


def measure(matmuls: Matmuls, feeders: Sequence[Feeder]) -> tuple[list[float], float]:
    """Return GB/s of each feeder beside the loop, and the speed of the loop as a fraction of its speed alone."""
    count, number = (max(4, int(seconds / matmuls.seconds_each)) for seconds in (ALONE_S, BESIDE_S))
    before = matmuls.run_s(count) / count
    begin, end = matmuls.queue(number)
    while not begin.query():
        pass
    while not end.query():
        for feeder in feeders:
            feeder.feed()
    for feeder in feeders:
        feeder.drain()
    beside = float(begin.elapsed_time(end)) / 1e3 / number
    after = matmuls.run_s(count) / count
    return [feeder.gb_per_s for feeder in feeders], (before + after) / 2 / beside


def measure_idle(feeders: Sequence[Feeder], seconds: float) -> list[float]:
    """Return GB/s of each feeder with nothing beside them."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for feeder in feeders:
            feeder.feed()
    for feeder in feeders:
        feeder.drain()
    return [feeder.gb_per_s for feeder in feeders]


def two_large_copies(gpu: BenchGpu, nbytes: int, seconds: float) -> list[float]:
    """Return GB/s of one large pinned copy each way at once."""
    feeders = []
    for direction in (STORE, LOAD):
        host, tensor = gpu.driver.host_alloc(nbytes), gpu.torch.empty(nbytes, dtype=gpu.torch.uint8, device="cuda")
        ends = (host, tensor.data_ptr()) if direction is STORE else (tensor.data_ptr(), host)
        copy = partial(_copy_large, gpu, ends, nbytes, tensor)
        feeders.append(stream_feeder(gpu, copy, nbytes))
    return measure_idle(feeders, seconds)


def _copy_large(gpu: BenchGpu, ends: tuple[int, int], nbytes: int, _tensor: Any, stream: int) -> None:
    gpu.driver.copy_async(*ends, nbytes, stream)


def list_ways(gpu: BenchGpu, device: Any, opened: list[Any], *, quick: bool) -> list[Way]:
    """Return what is measured beside the matrix products; devices that it needs are added to `opened`."""
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy  # noqa: PLC0415

    both = (STORE, LOAD)
    ways = [
        Way("kvmoor", page, directions, queue_feeder(device, f"kvmoor {len(directions)}"))
        for page in ((64 * KIB,) if quick else (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB))
        for directions in ((STORE,), (LOAD,), both)
    ]
    for count in () if quick else (2, 4, 8, 16):
        opened.append(gpu.open_device(strategy=CopyStrategy(count, count, gather_from_nbytes=None)))
        feeder = queue_feeder(opened[-1], "thread blocks")
        ways += [Way(f"kvmoor, {count} thread blocks", 64 * KIB, (each,), feeder) for each in both]
    batch = partial(batch_feeder, gpu)
    ways += [Way("batch call", page, (each,), batch) for page in (64 * KIB, 256 * KIB) for each in both]
    return sorted(ways, key=lambda way: way.page_nbytes)


def list_kernels(gpu: BenchGpu, opened: list[Any], *, quick: bool) -> list[Way]:
    """Return every kind of page kernel with some numbers of thread blocks."""
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy  # noqa: PLC0415

    ways = []
    for kernel in gpu.page_kernels():
        for count in (4,) if quick else (2, 4, 8):
            opened.append(gpu.open_device(strategy=CopyStrategy(count, count, None, kernel, kernel, None)))
            feeder = queue_feeder(opened[-1], "kernels")
            ways += [Way(f"{kernel}, {count}", 16 * KIB, (each,), feeder) for each in (STORE, LOAD)]
    return ways


Found = dict[tuple[str, int, tuple[Direction, ...]], tuple[list[float], float]]


def report_targets(report: Report, found: Found) -> None:
    """Compare what kvmoor does by itself with what was wanted."""
    ours = [(directions, *value) for (name, _, directions), value in found.items() if name == "kvmoor"]
    for direction in (STORE, LOAD):
        alone = [(speeds[0], left) for directions, speeds, left in ours if directions == (direction,)]
        name = direction.value
        slowest, least = (min(column) for column in zip(*alone, strict=True))
        report.target(f"beside matmul, {name}, slowest page size", slowest, "GB/s", at_least=45.0)
        report.target(f"matmul left beside {name}, worst page size", 100 * least, "%", at_least=96.0)
    sums = [sum(speeds) for directions, speeds, _ in ours if len(directions) == 2]
    report.target("both directions at once beside matmul, worst page size", min(sums), "GB/s", at_least=85.0)


def report_idle(gpu: BenchGpu, device: Any, report: Report, by_page: dict[int, PagedCopies], seconds: float) -> None:
    """Measure both directions at once with nothing beside them."""
    idle = []
    for page_nbytes, paged in by_page.items():
        make = queue_feeder(device, "idle")
        speeds = measure_idle([make(paged, direction) for direction in (STORE, LOAD)], seconds)
        idle.append((f"kvmoor, {nbytes_name(page_nbytes)}", speeds))
    least = min(sum(speeds) for _, speeds in idle)
    idle.append((f"pinned copies of {nbytes_name(JOB_NBYTES)}", two_large_copies(gpu, JOB_NBYTES, seconds)))
    report.table(
        "Both directions at once, no other work, GB/s",
        ("way", "store", "load", "sum"),
        [(name, *speeds, sum(speeds)) for name, speeds in idle],
    )
    report.target("both directions at once, no other work", least, "GB/s", at_least=85.0)


def main() -> int:
    """Print the question, the set-up and the figures."""
    question = __doc__ or ""
    options = parse_options(question, sweep="measure kinds of kernel and numbers of thread blocks instead")
    gpu = open_gpu()
    name = "cuda_beside_work_sweep" if options.sweep else "cuda_beside_work"
    report = Report(name, question, describe_machine(gpu), options.out)
    matmuls = Matmuls(gpu)
    device = gpu.open_device()
    opened = [device]
    if options.sweep:
        ways = list_kernels(gpu, opened, quick=options.quick)
    else:
        ways = list_ways(gpu, device, opened, quick=options.quick)
    found: Found = {}
    rows = []
    with ExitStack() as pages:
        by_page: dict[int, PagedCopies] = {}
        for way in ways:
            if way.page_nbytes not in by_page:
                paged = PagedCopies(gpu, device, way.page_nbytes, nbytes=JOB_NBYTES)
                by_page[way.page_nbytes] = pages.enter_context(paged)
            paged = by_page[way.page_nbytes]
            speeds, left = measure(matmuls, [way.make_feeder(paged, direction) for direction in way.directions])
            found[way.name, way.page_nbytes, way.directions] = speeds, left
            names = " + ".join(each.value for each in way.directions)
            rows.append((way.name, nbytes_name(way.page_nbytes), names, sum(speeds), f"{100 * left:.1f}"))
        report.table(
            f"Beside bf16 matrix products of {SIZE} x {SIZE} ({matmuls.tflops:.0f} TFLOP/s alone)",
            ("way", "page", "direction", "GB/s", "matmul, % of alone"),
            rows,
            note=f"kvmoor's strategy, where nothing else is said: {device.strategy}. {HOW_SLOTS_LIE}",
        )
        if not options.sweep:
            report_targets(report, found)
            report_idle(gpu, device, report, by_page, 0.1 if options.quick else 0.4)
        assert all(each.close(WAIT_S) for each in reversed(opened))
    return 0


if __name__ == "__main__":
    sys.exit(main())
