"""How close do copies of pages between a GPU and host memory come to the speed of the link, and what do others reach?

1 GiB of random blocks, each a page in each of 32 tensors (8 for pages of 2 MiB), to random slots of a page-locked arena
and back. Beside kvmoor's queue, in turn and in the same process: one large copy of 1 GiB between pinned and device
memory (the yardstick, 100 %), the driver's batch copy call with an entry a page, and, for loads of pages below 28 KiB,
a Triton kernel of 12 programs. Every way is timed from the call until its end is seen; figures are medians. Every byte
that went there and back is compared.

    python benchmarks/cuda_copies.py [--out FOLDER] [--quick] [--calibrate] [--sweep]

--sweep measures what kinds of page kernel and numbers of thread blocks do to each page size, and nothing else.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cuda_parts.bench_gpu import WAIT_S, BenchGpu, JobTimes, StreamTimer, describe_machine, open_gpu, time_job
from cuda_parts.paged_copies import GIB, HOW_SLOTS_LIE, KIB, MIB, PagedCopies
from cuda_parts.report import Report, nbytes_name, parse_options

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart
from kvmoor.worker import TransferWorker

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
PAGES = (4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB, 32 * KIB, 40 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
RUNS = 9
YARDSTICK_S = 1.0
"""A way that is slow is timed for about so long, at least twice."""
SWEEP_PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
SWEEP_THREAD_BLOCKS = (2, 4, 6, 8, 12, 16, 32)
SMALL_BLOCKS = 2000


class LargeCopy:
    """One copy between pinned and device memory: what the link can do."""

    def __init__(self, gpu: BenchGpu, nbytes: int) -> None:
        self._driver = gpu.driver
        self._nbytes = nbytes
        self._device = gpu.torch.empty(nbytes, dtype=gpu.torch.uint8, device="cuda").random_()
        self._host = gpu.driver.host_alloc(nbytes)
        self._timer = StreamTimer(gpu)
        gpu.torch.cuda.synchronize()

    def time(self, direction: Direction) -> float:
        """Return GB/s of one copy."""
        ends = [self._device.data_ptr(), self._host]
        source, destination = ends if direction is STORE else reversed(ends)
        times = self._timer.time(lambda: self._driver.copy_async(destination, source, self._nbytes, self._timer.handle))
        return self._nbytes / times.seen_s / 1e9


class Samples:
    """What repeated measurements of one way gave."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._times: list[JobTimes] = []

    def add(self, times: JobTimes) -> None:
        """Take one more measurement."""
        self._times.append(times)

    @property
    def gb_per_s(self) -> float:
        """Return the median speed."""
        return self._nbytes / statistics.median(each.seen_s for each in self._times) / 1e9

    @property
    def submit_ms_per_gib(self) -> float:
        """Return the median time of the call, for 1 GiB."""
        return statistics.median(each.submit_s for each in self._times) * 1e3 * GIB / self._nbytes


def repeat(samples: Samples, measure: Callable[[], JobTimes], runs: int) -> None:
    """Measure after one warm-up, fewer times if it is slow."""
    measure()
    begin = time.perf_counter()
    for number in range(runs):
        samples.add(measure())
        if number and time.perf_counter() - begin > YARDSTICK_S:
            return


def measure_page_size(
    gpu: BenchGpu, device: Any, page_nbytes: int, large: LargeCopy, *, nbytes: int, runs: int
) -> dict[str, Any]:
    """Measure all ways of moving pages of one size."""
    found: dict[str, Any] = {"page": page_nbytes}
    with PagedCopies(gpu, device, page_nbytes, nbytes=nbytes) as paged:
        found["block"] = page_nbytes * paged.num_tensors
        for direction in (STORE, LOAD):
            queue = device.open_copy_queue(f"{direction.value} {page_nbytes}", direction)
            copies = paged.copies[direction]
            ours, link = Samples(paged.nbytes), []
            for number in range(runs + 1):
                times = time_job(queue, copies, number + 1)
                speed = large.time(direction)
                if number:  # the first job prepares what the others find
                    ours.add(times)
                    link.append(speed)
            found[f"ours {direction.value}"] = ours
            found[f"link {direction.value}"] = statistics.median(link)
            assert queue.close(WAIT_S)
        paged.assert_right()
        for direction in (STORE, LOAD):
            found[f"batch {direction.value}"] = measure_batch_call(gpu, paged, direction, runs)
        found["triton"] = measure_triton(gpu, paged, runs)
    return found


def measure_batch_call(gpu: BenchGpu, paged: PagedCopies, direction: Direction, runs: int) -> Samples:
    """Time the driver's batch call with an entry a page."""
    from cuda_parts.batch_call import BatchCall  # noqa: PLC0415 - needs the driver's library

    samples, call, timer = Samples(paged.nbytes), BatchCall(), StreamTimer(gpu)
    pages = paged.page_addresses(direction)
    if direction is LOAD:
        paged.poison_target()
    repeat(samples, lambda: timer.time(lambda: call.copy(pages, direction, timer.handle)), runs)
    if direction is LOAD:
        paged.assert_right()
    return samples


def measure_triton(gpu: BenchGpu, paged: PagedCopies, runs: int) -> tuple[Samples, str] | None:
    """Time the Triton kernel with several chunk sizes and return the fastest, and what it was."""
    from cuda_parts.triton_copy import BELOW_NBYTES, TritonCopy  # noqa: PLC0415 - needs Triton

    if paged.page_nbytes >= BELOW_NBYTES:
        return None
    timer = StreamTimer(gpu)
    pages = paged.page_addresses(LOAD)
    found: list[tuple[Samples, str]] = []
    widest = 1 << (paged.page_nbytes - 1).bit_length()
    for chunk_nbytes, num_warps in sorted({(min(widest, most), warps) for most, warps in CHUNKS}):
        way = TritonCopy(pages, chunk_nbytes=chunk_nbytes, num_warps=num_warps)
        paged.poison_target()
        samples = Samples(paged.nbytes)
        repeat(samples, partial(timer.time, partial(way.copy, timer.stream)), runs)
        paged.assert_right()
        found.append((samples, way.describe))
    return max(found, key=lambda each: each[0].gb_per_s)


CHUNKS = ((4 * KIB, 4), (8 * KIB, 4), (16 * KIB, 4), (16 * KIB, 8))


def report_page_sizes(report: Report, found: list[dict[str, Any]], strategy: object) -> None:
    """Show speeds and the time of the calls."""
    rows, submits = [], []
    for each in found:
        store, load = each["ours device_to_host"], each["ours host_to_device"]
        triton = each["triton"]
        row = [nbytes_name(each["page"])]
        for ours, direction in ((store, STORE), (load, LOAD)):
            link = each[f"link {direction.value}"]
            row += [ours.gb_per_s, link, f"{100 * ours.gb_per_s / link:.1f}", each[f"batch {direction.value}"].gb_per_s]
        rows.append([*row, f"{triton[0].gb_per_s:.1f} ({triton[1]})" if triton else "-"])
        submits.append(
            [
                nbytes_name(each["page"]),
                *(
                    way.submit_ms_per_gib
                    for way in (store, load, each[f"batch {STORE.value}"], each[f"batch {LOAD.value}"])
                ),
                triton[0].submit_ms_per_gib if triton else "-",
            ]
        )
    report.table(
        "1 GiB of random blocks, GB/s",
        ("page", "store", "link", "%", "batch call", "load", "link", "%", "batch call", "Triton, 12 programs"),
        rows,
        note=f"kvmoor's strategy: {strategy}. {HOW_SLOTS_LIE}",
    )
    report.table(
        "Time of the call, ms a GiB",
        ("page", "store", "load", "batch call, store", "batch call, load", "Triton, 12 programs"),
        submits,
        note="The batch call prepares nothing here: making its three arrays of addresses is not in its time.",
    )
    for direction, limit in ((STORE, 94.0), (LOAD, 92.0)):
        worst = min(100 * each[f"ours {direction.value}"].gb_per_s / each[f"link {direction.value}"] for each in found)
        report.target(f"slowest page size, {direction.value}, of one large copy", worst, "%", at_least=limit)
    slowest = max(each[f"ours {d.value}"].submit_ms_per_gib for each in found for d in (STORE, LOAD))
    report.target("slowest call, a GiB", slowest, "ms", at_most=0.5)


def measure_small_blocks(gpu: BenchGpu, device: Any, report: Report, *, repeats: int) -> None:
    """Time one block of 0.5 MiB from the call until its end is seen, beside one copy of as many bytes and an event."""
    block_nbytes = 512 * KIB
    rows = []
    with PagedCopies(gpu, device, 16 * KIB, nbytes=64 * MIB) as paged:
        for direction in (STORE, LOAD):
            queue = device.open_copy_queue(f"one block {direction.value}", direction)
            (part,) = paged.copies[direction]
            one = [
                [BlockCopies(part.group, part.block_ids[[number]], part.slot_addresses[[number]])]
                for number in range(paged.num_blocks)
            ]
            times = [time_job(queue, one[number % len(one)], number + 1) for number in range(repeats)][repeats // 10 :]
            rows.append((f"kvmoor, {direction.value}", *percentiles(times)))
            assert queue.close(WAIT_S)
        host, on_device = gpu.driver.host_alloc(block_nbytes), paged.source.data_ptr()
        for direction, ends in ((STORE, (host, on_device)), (LOAD, (on_device, host))):
            timer = StreamTimer(gpu)
            copy = partial(gpu.driver.copy_async, ends[0], ends[1], block_nbytes, timer.handle)
            times = [timer.time(copy) for _ in range(repeats)][repeats // 10 :]
            rows.append((f"one pinned copy and an event, {direction.value}", *percentiles(times)))
    report.table("One block of 0.5 MiB, microseconds", ("way", "call p50", "seen p50", "seen p99"), rows)
    report.target("one block of 0.5 MiB, call to seen, p50", max(row[2] for row in rows[:2]), "us", at_most=30.0)


def percentiles(times: list[JobTimes]) -> tuple[float, float, float]:
    """Return the median of the call, and median and p99 until the end was seen, in microseconds."""
    seen = np.array([each.seen_s for each in times]) * 1e6
    return (
        statistics.median(each.submit_s for each in times) * 1e6,
        float(np.quantile(seen, 0.5)),
        float(np.quantile(seen, 0.99)),
    )


def measure_worker(gpu: BenchGpu, report: Report, *, nbytes: int) -> None:
    """Time whole orders through a worker, which checks every number before it queues anything."""
    torch = gpu.torch
    rows = []
    for page_nbytes in (4 * KIB, 64 * KIB):
        num_blocks = nbytes // page_nbytes // 32
        cache = torch.zeros((32, num_blocks, page_nbytes), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
        plan = plan_arena(layout, nbytes + 128 * MIB, memory_check="warn")
        blocks = {0: np.random.default_rng(0).permutation(num_blocks).reshape(-1, 1)}
        with TransferWorker(layout, plan, gpu.open_device(), pin="eager") as worker:
            worker.take_published()
            for kind in OrderKind:
                samples = Samples(nbytes)
                for number in range(7):
                    order = Order(
                        OrderId(2 * number + 1 + (kind is OrderKind.SLOT_TO_DEVICE)),
                        kind,
                        (OrderPart(0, tuple(range(num_blocks))),),
                    )
                    begin = time.perf_counter()
                    worker.submit(order, blocks)
                    submitted = time.perf_counter()
                    while not (reports := worker.poll_reports()):
                        pass
                    if number > 1:
                        samples.add(JobTimes(submitted - begin, time.perf_counter() - begin))
                    assert reports[0].outcome.value == "done", reports
                rows.append(
                    (nbytes_name(page_nbytes), num_blocks, kind.value, samples.gb_per_s, samples.submit_ms_per_gib)
                )
    report.table(
        "Whole orders of 1 GiB through a TransferWorker, which checks every block and slot first",
        ("page", "blocks", "order", "GB/s", "submit, ms a GiB"),
        rows,
    )


def measure_opening(gpu: BenchGpu, report: Report) -> None:
    """Time opening a device and its first queue: with nothing cached, with the compiled kernel, and calibrating."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (
            ("compiles the kernel", {}),
            ("takes it from the cache", {}),
            ("calibrates", {"strategy": "calibrate"}),
            ("takes that from the cache, too", {"strategy": "calibrate"}),
        ):
            begin = time.perf_counter()
            device = gpu.open_device(cache_dir=Path(folder), **options)
            device.open_copy_queue("first", STORE)
            rows.append((name, time.perf_counter() - begin, device.strategy))
            assert device.close(WAIT_S)
    report.table("Opening a device and its first queue", ("", "seconds", "strategy"), rows)
    report.target("calibration at first use", rows[2][1] - rows[1][1], "s", at_most=1.0)


def sweep(gpu: BenchGpu, report: Report, *, nbytes: int, runs: int) -> None:
    """Measure every kind of page kernel with numbers of thread blocks, and the copy engine, for some page sizes."""
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy  # noqa: PLC0415

    large = LargeCopy(gpu, nbytes)
    link = {direction: statistics.median(large.time(direction) for _ in range(runs)) for direction in (STORE, LOAD)}
    ways = [
        (f"{kernel}, {count}", CopyStrategy(count, count, None, kernel, kernel, None))
        for kernel in gpu.page_kernels()
        for count in SWEEP_THREAD_BLOCKS
    ]
    ways.append(("copy engine", CopyStrategy(copy_engine_from_nbytes=1, gather_from_nbytes=None)))
    speeds: dict[tuple[str, Direction], list[str]] = {}
    registering = gpu.open_device()
    for page_nbytes in SWEEP_PAGES:
        with PagedCopies(gpu, registering, page_nbytes, nbytes=nbytes) as paged:
            for name, strategy in ways:
                device = gpu.open_device(strategy=strategy)
                for direction in (STORE, LOAD):
                    queue = device.open_copy_queue(direction.value, direction)
                    times = [time_job(queue, paged.copies[direction], number + 1).seen_s for number in range(runs + 1)]
                    speed = paged.nbytes / statistics.median(times[1:]) / 1e9
                    percent = 100 * speed / link[direction]
                    speeds.setdefault((name, direction), []).append(f"{speed:.1f} ({percent:.1f})")
                assert device.close(WAIT_S)
                paged.assert_right()
                paged.poison_target()
    assert registering.close(WAIT_S)
    header = ("kernel, thread blocks", *(nbytes_name(page) for page in SWEEP_PAGES))
    for direction in (STORE, LOAD):
        title = f"{direction.value}, GB/s (% of one large copy, {link[direction]:.1f} GB/s)"
        report.table(title, header, [(name, *speeds[name, direction]) for name, _ in ways])


def main() -> int:
    """Print the question, the set-up and the figures."""
    question = __doc__ or ""
    options = parse_options(
        question,
        sweep="measure kinds of kernel and numbers of thread blocks instead",
        calibrate="let kvmoor measure first how it copies best",
    )
    gpu = open_gpu()
    report = Report(
        "cuda_copies_sweep" if options.sweep else "cuda_copies", question, describe_machine(gpu), options.out
    )
    nbytes, runs = (64 * MIB, 2) if options.quick else (GIB, RUNS)
    if options.sweep:
        sweep(gpu, report, nbytes=nbytes // 2, runs=3)
        return 0
    measure_opening(gpu, report)
    device = gpu.open_device(**({"strategy": "calibrate", "cache_dir": None} if options.calibrate else {}))
    large = LargeCopy(gpu, nbytes)
    pages = (16 * KIB, 2 * MIB) if options.quick else PAGES
    found = [measure_page_size(gpu, device, page, large, nbytes=nbytes, runs=runs) for page in pages]
    report_page_sizes(report, found, device.strategy)
    measure_small_blocks(gpu, device, report, repeats=100 if options.quick else SMALL_BLOCKS)
    assert device.close(WAIT_S)
    measure_worker(gpu, report, nbytes=nbytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
