"""How much of a load overlaps the forward of its own step?

A load of 512 MiB (about 10 ms) waits for an event from immediately before a forward of about 20 ms, on the engine's
stream, and is submitted right after the forward. Kinds of forward: many matrix products; one large product, whose
thread blocks may keep every multiprocessor for as long as it runs; a kernel that spins on every multiprocessor. The
overlap is (load alone + forward alone - both together) / the shorter of the two: 100 % if the shorter one is hidden
whole. For comparison a load without such an event, which waits for the forward.

    python benchmarks/cuda_overlap.py [--out FOLDER] [--quick]
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda_parts.bench_gpu import WAIT_S, BenchGpu, describe_machine, open_gpu
from cuda_parts.paged_copies import KIB, MIB, PagedCopies
from cuda_parts.report import Report, nbytes_name, parse_options

from kvmoor.devices.device import Direction

FORWARD_S = 0.02
LOAD_NBYTES = 512 * MIB
RUNS = 7


@dataclass(frozen=True)
class Step:
    """Seconds from the beginning of a step until its load and its forward were seen to be over."""

    load_s: float
    forward_s: float


def make_forwards(gpu: BenchGpu, stream: Any) -> dict[str, Callable[[], object]]:
    """Return kinds of forward, each a function that queues about 20 ms of work on the engine's stream."""
    torch = gpu.torch

    def products(size: int) -> Callable[[int], None]:
        left, right = (torch.randn((size, size), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)

        def run(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    torch.mm(left, right, out=out)

        return run

    def timed(run: Callable[[], object]) -> float:
        stream.synchronize()
        begin = time.perf_counter()
        run()
        stream.synchronize()
        return time.perf_counter() - begin

    many, one = products(4096), products(18432)
    torch.cuda.synchronize()
    for run in (many, one):
        run(2)
    count = max(1, round(FORWARD_S / (timed(lambda: many(20)) / 20)))
    spinning = gpu.num_multiprocessors
    return {
        f"{count} matrix products of 4096": lambda: many(count),
        "one matrix product of 18432": lambda: one(1),
        "a kernel that spins, 1024 threads on every multiprocessor": lambda: gpu.spin(
            stream, FORWARD_S, thread_blocks=spinning, threads=1024
        ),
        "a kernel that spins, 2048 threads on every multiprocessor": lambda: gpu.spin(
            stream, FORWARD_S, thread_blocks=2 * spinning, threads=1024
        ),
    }


class Stepper:
    """Run a step with a load, a forward, or both."""

    def __init__(self, gpu: BenchGpu, device: Any, paged: PagedCopies, stream: Any) -> None:
        self._torch = gpu.torch
        self._device = device
        self._stream = stream
        self._copies = paged.copies[Direction.HOST_TO_DEVICE]
        self._queue = device.open_copy_queue("load", Direction.HOST_TO_DEVICE)
        self._sequence = 0
        self._torch.cuda.synchronize()

    def step(self, forward: Callable[[], object] | None, *, loads: bool, early_event: bool = True) -> Step:
        """Queue a forward and a load as an engine does, and watch for both ends."""
        begin = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            event = self._device.record_event() if loads and early_event else None
            if forward is not None:
                forward()
            end = self._torch.cuda.Event()
            end.record()
            if loads:
                self._sequence += 1
                event = event if early_event else self._device.record_event()
                self._queue.enqueue(self._copies, self._sequence, event)
        load_s = forward_s = 0.0
        while not (load_s or not loads) or not forward_s:
            if loads and not load_s and self._queue.completed() >= self._sequence:
                load_s = time.perf_counter() - begin
            if not forward_s and end.query():
                forward_s = time.perf_counter() - begin
            if time.perf_counter() - begin > WAIT_S:
                raise SystemExit("a step never ended")
        return Step(load_s, forward_s)


def main() -> int:
    """Print the question, the set-up and the figures."""
    question = __doc__ or ""
    options = parse_options(question)
    gpu = open_gpu()
    report = Report("cuda_overlap", question, describe_machine(gpu), options.out)
    runs = 2 if options.quick else RUNS
    stream = gpu.torch.cuda.Stream()
    device = gpu.open_device()
    forwards = make_forwards(gpu, stream)
    rows, overlaps = [], {}
    for page_nbytes in (64 * KIB,) if options.quick else (4 * KIB, 64 * KIB, 2 * MIB):
        page_device = gpu.open_device()
        with PagedCopies(gpu, page_device, page_nbytes, nbytes=LOAD_NBYTES) as paged:
            stepper = Stepper(gpu, page_device, paged, stream)
            stepper.step(None, loads=True)
            load = statistics.median(stepper.step(None, loads=True).load_s for _ in range(runs))
            for name, run in forwards.items():
                stepper.step(run, loads=True)
                alone = statistics.median(stepper.step(run, loads=False).forward_s for _ in range(runs))
                for early in (True, False):
                    steps = [stepper.step(run, loads=True, early_event=early) for _ in range(runs)]
                    together = statistics.median(max(step.load_s, step.forward_s) for step in steps)
                    overlap = 100 * (load + alone - together) / min(load, alone)
                    rows.append(
                        (
                            name,
                            nbytes_name(page_nbytes),
                            "before the forward" if early else "behind the forward",
                            alone * 1e3,
                            load * 1e3,
                            statistics.median(step.forward_s for step in steps) * 1e3,
                            statistics.median(step.load_s for step in steps) * 1e3,
                            f"{overlap:.0f}",
                        )
                    )
                    if early:
                        overlaps[name, page_nbytes] = overlap
        assert page_device.close(WAIT_S)
    report.table(
        f"A load of {nbytes_name(LOAD_NBYTES)} beside a forward, ms",
        ("forward", "page", "event", "forward alone", "load alone", "forward", "load over after", "overlap %"),
        rows,
    )
    for name in list(forwards)[:3]:  # the last one leaves room for nobody's kernel
        worst = min(overlap for (each, _), overlap in overlaps.items() if each == name)
        report.target(f"load that overlaps its forward ({name}), worst page size", worst, "%", at_least=95.0)
    assert device.close(WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
