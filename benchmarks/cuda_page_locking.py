"""What does page-locking 64 GiB cost an engine that works meanwhile, and how soon can the memory be used?

The engine runs steps of 20 small matrix products, one after the other, and tells kvmoor of each. A second thread times
an mmap and munmap of its own, as an allocator would. Measured: the steps with nothing beside them; beside page-locking
in the background; page-locking in the background with an engine that idles; all at once before opening returns (eager).
Beside the background a graph is captured every 25 steps (not counted as a step): how many are lost.

    python benchmarks/cuda_page_locking.py [--out FOLDER] [--gib 64] [--stepping-s 90] [--quick]

The memory is touched and given back first: a virtual machine's first touch of its memory is many times slower.
"""

import argparse
import ctypes
import mmap
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from cuda_parts.bench_gpu import BenchGpu, describe_machine, open_gpu
from cuda_parts.report import Report

from kvmoor.block_layout import BlockLayout
from kvmoor.byte_sizes import format_nbytes
from kvmoor.host_memory.arena_plan import ArenaPlan, plan_arena
from kvmoor.observation import Event, SlotsPublished
from kvmoor.worker import TransferWorker

GIB = 2**30
WAIT_S = 120.0
CLOSE_S = 30.0
IDLE_S = 5.0
PRODUCTS_A_STEP = 20
SIZE = 2048
CAPTURE_EVERY = 25
WARM_THREADS = 16
PAUSE_S = 0.0005


class MmapLoop:
    """Time mmap + munmap of 64 KiB in a thread, between entering and leaving the with block."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def p99_ms(self) -> float:
        """Return the p99 so far."""
        return float(np.quantile(self.seconds, 0.99)) * 1e3 if self.seconds else 0.0

    def _run(self) -> None:
        libc = ctypes.CDLL(None)
        size, integer, pointer, long = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_long
        libc.mmap.argtypes, libc.mmap.restype = (pointer, size, integer, integer, integer, long), pointer
        libc.munmap.argtypes, libc.munmap.restype = (pointer, size), integer
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        while not self._stop.wait(PAUSE_S):
            begin = time.perf_counter()
            address = libc.mmap(None, 64 * 1024, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            libc.munmap(address, 64 * 1024)
            self.seconds.append(time.perf_counter() - begin)


class Engine:
    """Run small steps on a stream of its own, and capture graphs between them."""

    def __init__(self, gpu: BenchGpu) -> None:
        torch = gpu.torch
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._left, self._right = (torch.randn((SIZE, SIZE), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._product = torch.empty_like(self._left)
        torch.cuda.synchronize()
        self.num_captures = 0
        self.lost: list[str] = []
        for _ in range(200):
            self.step_s()

    def step_s(self) -> float:
        """Run one step and return how many seconds it took until its end was seen."""
        begin = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            for _ in range(PRODUCTS_A_STEP):
                self._torch.mm(self._left, self._right, out=self._product)
        self._stream.synchronize()
        return time.perf_counter() - begin

    def capture(self) -> None:
        """Capture a step as a graph in the strictest mode and replay it."""
        graph = self._torch.cuda.CUDAGraph()
        try:
            with self._torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="global")
                for _ in range(PRODUCTS_A_STEP):
                    self._torch.mm(self._left, self._right, out=self._product)
                graph.capture_end()
                graph.replay()
            self._stream.synchronize()
        except RuntimeError as error:
            self.lost.append(str(error))
            with suppress(RuntimeError), self._torch.cuda.stream(self._stream):
                graph.capture_end()  # or the stream would go on capturing
        self.num_captures += 1


@dataclass
class FirstSlots:
    """An observer that notes when the first slots were published."""

    at: list[float] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        """Take note of the time."""
        if isinstance(event, SlotsPublished) and not self.at:
            self.at.append(time.perf_counter())


@dataclass(frozen=True)
class Found:
    """What one way of page-locking gave; times in seconds, steps in the order they ran."""

    way: str
    usable_s: float
    total_s: float
    registered_nbytes: int
    steps_s: list[float]
    mmap_p99_ms: float
    note: str = ""

    @property
    def s_per_gb(self) -> float:
        """Return what a GB cost."""
        return self.total_s / (self.registered_nbytes / 1e9) if self.registered_nbytes else float("inf")

    def row(self) -> tuple[object, ...]:
        """Return a line of the table."""
        steps = np.quantile(self.steps_s, [0.5, 0.99, 1.0]) * 1e3 if self.steps_s else [float("nan")] * 3
        return (
            self.way,
            f"{self.usable_s:.3f}" if self.usable_s else "-",
            f"{self.total_s:.1f}",
            f"{self.registered_nbytes / 1e9:.1f}",
            f"{self.s_per_gb:.3f}" if self.registered_nbytes else "-",
            *(f"{float(each):.3f}" if self.steps_s else "-" for each in steps),
            f"{self.mmap_p99_ms:.3f}",
            self.note,
        )


def warm_memory(nbytes: int) -> float:
    """Touch so much memory with many threads and give it back; return how many seconds that took."""
    begin = time.perf_counter()
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(memory)
        address, piece = ctypes.addressof(first), 64 * 2**20
        with ThreadPoolExecutor(WARM_THREADS) as pool:
            list(pool.map(lambda at: ctypes.memset(address + at, 1, min(piece, nbytes - at)), range(0, nbytes, piece)))
        del first
    return time.perf_counter() - begin


def steps_alone(engine: Engine, seconds: float) -> Found:
    """Run steps, and captures between them, with nothing beside but the loop that maps."""
    steps: list[float] = []
    begin = time.perf_counter()
    with MmapLoop() as loop:
        while time.perf_counter() - begin < seconds:
            steps.append(engine.step_s())
            if not len(steps) % CAPTURE_EVERY:
                engine.capture()
    engine.num_captures = 0  # only those beside page-locking count
    return Found("steps, nothing beside", 0.0, time.perf_counter() - begin, 0, steps, loop.p99_ms())


def background(
    gpu: BenchGpu, engine: Engine | None, layout: BlockLayout, plan: ArenaPlan, limit_s: float
) -> tuple[Found, str]:
    """Page-lock in the background, beside an engine that steps or idles, until all is done or the time is up."""
    steps: list[float] = []
    first = FirstSlots()
    device = gpu.open_device()
    with MmapLoop() as loop:
        begin = time.perf_counter()
        worker = TransferWorker(layout, plan, device, observer=first)
        try:
            if engine is None:
                worker.wait_registered(limit_s)
            while engine is not None and time.perf_counter() - begin < limit_s:
                worker.note_step()
                steps.append(engine.step_s())
                if not len(steps) % CAPTURE_EVERY:
                    engine.capture()
                    if worker.wait_registered(0.0):
                        break
            total_s = time.perf_counter() - begin
            arena = worker.statistics().arena
            p99_ms = loop.p99_ms()
        finally:
            closed = time.perf_counter()
            report = worker.close(CLOSE_S)
            closed = time.perf_counter() - closed
    done = arena.registered_nbytes >= arena.nbytes * 0.999
    notes = [f"closed in {closed:.1f} s"]
    if not done:
        notes.append(
            "stopped by the time limit" if arena.registration_mode == "registered" else arena.registration_reason
        )
    if not report.graceful:
        notes.append(report.reason)
    found = Found(
        "background, engine steps" if engine else "background, engine idles",
        first.at[0] - begin if first.at else float("nan"),
        total_s,
        arena.registered_nbytes,
        steps,
        p99_ms,
        "; ".join(notes),
    )
    return found, arena.registration_mode


def eager(gpu: BenchGpu, layout: BlockLayout, plan: ArenaPlan) -> Found:
    """Page-lock all before the constructor returns."""
    first = FirstSlots()
    device = gpu.open_device()
    with MmapLoop() as loop:
        begin = time.perf_counter()
        worker = TransferWorker(layout, plan, device, pin="eager", observer=first)
        total_s = time.perf_counter() - begin
        p99_ms = loop.p99_ms()
        registered = worker.statistics().arena.registered_nbytes
        closed = time.perf_counter()
        worker.close(CLOSE_S)
        note = f"closed in {time.perf_counter() - closed:.1f} s"
    return Found("eager", first.at[0] - begin, total_s, registered, [], p99_ms, note)


def report_targets(report: Report, engine: Engine, alone: Found, stepping: Found, others: list[Found]) -> None:
    """Compare with what was wanted."""
    idle_p99, p99 = (float(np.quantile(each.steps_s, 0.99)) for each in (alone, stepping))
    report.target("first slot usable, background", stepping.usable_s, "s", at_most=0.5)
    report.target("step p99 beside the background / alone", p99 / idle_p99, "x", at_most=1.15)
    report.target("longest step beside the background", max(stepping.steps_s) * 1e3, "ms", at_most=5.0)
    report.target(f"captures lost of {engine.num_captures}", len(engine.lost), "captures", at_most=0)
    for found in others:
        report.target(f"page-locking a GB, {found.way}", found.s_per_gb, "s", at_most=0.06)


def main() -> int:
    """Print the question, the set-up and the figures."""
    question = __doc__ or ""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="folder for the tables (Markdown) and figures (JSON), written as found"
    )
    parser.add_argument("--gib", type=float, default=64.0, help="size of the arena (default 64)")
    parser.add_argument("--stepping-s", type=float, default=90.0, help="longest time beside steps (default 90)")
    parser.add_argument("--quick", action="store_true", help="1 GiB: to see that all runs")
    options = parser.parse_args()
    gpu = open_gpu()
    nbytes = GIB if options.quick else int(options.gib * GIB)
    cache = gpu.torch.zeros((32, 4, 64 * 1024), dtype=gpu.torch.uint8, device="cuda")
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    plan = plan_arena(layout, nbytes, memory_check="warn")
    warmed_s = warm_memory(plan.nbytes)
    setup = f"{describe_machine(gpu)}; {format_nbytes(plan.nbytes)}, touched once before in {warmed_s:.1f} s"
    report = Report("cuda_page_locking", question, setup, options.out)
    header = ("way", "usable s", "total s", "GB", "s/GB", "step p50 ms", "p99", "max", "mmap p99 ms", "note")
    engine = Engine(gpu)
    with gpu.open_device() as device:
        device.check_layout(layout)  # compiles the kernel, should it not be in the cache
    alone = steps_alone(engine, 0.5 if options.quick else IDLE_S)
    fast = eager(gpu, layout, plan)
    resting, _ = background(gpu, None, layout, plan, WAIT_S)
    rows = [alone.row(), fast.row(), resting.row()]
    report.table("Page-locking, engine at rest", header, rows)
    stepping, mode = background(gpu, engine, layout, plan, options.stepping_s)
    report.table("Page-locking, all ways", header, [*rows, stepping.row()], note=f"mode: {mode}")
    for reason in engine.lost[:3]:
        print("a capture was lost:", reason)
    report_targets(report, engine, alone, stepping, [fast, resting])
    return 0


if __name__ == "__main__":
    sys.exit(main())
