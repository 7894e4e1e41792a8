"""How soon can a large pool of host memory be used, and what does mapping it cost the rest of the process?

Each way of getting the memory is timed several times, in turn, after memory of that size was touched and freed (the
first touch of memory that a virtual machine never used is many times slower). While the memory is mapped another thread
times an mmap and munmap of its own, some 2,000 a second, as an engine's allocator would.

    arena, background   usable: the first slot was handed out; mapped: all of it was, by one thread
    arena, eager        the same with as many threads as there are cores, at most 8; the constructor returns at the end
    plain               one mmap and one memset; usable when it is mapped
    plain, huge pages   the same with advice to use huge pages, which the arena gives too

    python benchmarks/startup.py [--gib 8] [--rounds 3] [--quick] [--json]
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from print_parts.machine import machine

import kvmoor
from kvmoor import BlockLayout
from kvmoor.byte_sizes import format_nbytes
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan, plan_arena
from kvmoor.observation import Event, SlotsPublished

QUESTION = "How soon can a large pool of host memory be used, and what does mapping it cost the rest of the process?"
WAIT_S = 600.0
TARGET_USABLE_S = 0.3
TARGET_P99_MS = 1.0
PAUSE_S = 0.0005
PAGE_NBYTES = 64 * 1024
NUM_LAYERS = 32


@dataclass(frozen=True)
class Sample:
    """One way, once: seconds until usable and until mapped, and what each mmap + munmap beside it took."""

    usable_s: float
    mapped_s: float
    mmap_s: list[float]


class MmapLoop:
    """Time mmap + munmap in a thread, between entering and leaving the with block."""

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

    def _run(self) -> None:
        libc = ctypes.CDLL(None)
        size, integer, pointer, long = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_long
        libc.mmap.argtypes, libc.mmap.restype = (pointer, size, integer, integer, integer, long), pointer
        libc.munmap.argtypes, libc.munmap.restype = (pointer, size), integer
        while not self._stop.wait(PAUSE_S):
            begin = time.perf_counter()
            address = libc.mmap(
                None, PAGE_NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
            )
            libc.munmap(address, PAGE_NBYTES)
            self.seconds.append(time.perf_counter() - begin)


@dataclass
class FirstSlots:
    """An observer that notes when the first slots were published."""

    at: list[float] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        """Take note of the time."""
        if isinstance(event, SlotsPublished) and not self.at:
            self.at.append(time.perf_counter())


def map_in_background(plan: ArenaPlan) -> Sample:
    """Open an arena, take its first slot, and wait until it is mapped."""
    with MmapLoop() as loop:
        begin = time.perf_counter()
        with Arena(plan, name="startup") as arena:
            assert arena.wait_published(WAIT_S)
            arena.slot_addresses(0, np.array([arena.take_published()[0].first]))
            usable_s = time.perf_counter() - begin
            assert arena.wait_mapped(WAIT_S)
            mapped_s = time.perf_counter() - begin
            seconds = list(loop.seconds)
    return Sample(usable_s, mapped_s, seconds)


def map_eagerly(plan: ArenaPlan) -> Sample:
    """Open an arena that maps everything before its constructor returns."""
    first = FirstSlots()
    with MmapLoop() as loop:
        begin = time.perf_counter()
        with Arena(plan, mapping="eager", observer=first, name="startup"):
            mapped_s = time.perf_counter() - begin
            seconds = list(loop.seconds)
    return Sample(first.at[0] - begin, mapped_s, seconds)


def map_plainly(nbytes: int, *, huge_pages: bool) -> Sample:
    """Map anonymous memory and write zeros to it in one call."""
    with MmapLoop() as loop:
        begin = time.perf_counter()
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            if huge_pages:
                with suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            view = ctypes.c_char.from_buffer(memory)
            ctypes.memset(ctypes.addressof(view), 0, nbytes)
            mapped_s = time.perf_counter() - begin
            seconds = list(loop.seconds)
            del view
    return Sample(mapped_s, mapped_s, seconds)


def idle(seconds: float) -> list[float]:
    """Time the loop beside nothing."""
    with MmapLoop() as loop:
        threading.Event().wait(seconds)
    return loop.seconds


def summarise(way: str, threads: int, samples: list[Sample], nbytes: int) -> dict[str, Any]:
    """Return medians over the rounds, and the loop's times over all rounds together."""
    mapped_s = statistics.median(sample.mapped_s for sample in samples)
    return {
        "way": way,
        "threads": threads,
        "usable_s": round(statistics.median(sample.usable_s for sample in samples), 4),
        "usable_max_s": round(max(sample.usable_s for sample in samples), 4),
        "mapped_s": round(mapped_s, 4),
        "mapped_range_s": [round(pick(sample.mapped_s for sample in samples), 4) for pick in (min, max)],
        "gb_per_s": round(nbytes / mapped_s / 1e9, 2),
        **latencies([each for sample in samples for each in sample.mmap_s]),
    }


def latencies(seconds: list[float]) -> dict[str, Any]:
    """Return p50, p99 and the largest of the loop's times, in milliseconds."""
    p50, p99, largest = np.quantile(seconds, [0.5, 0.99, 1.0]) * 1e3 if seconds else (0.0, 0.0, 0.0)
    return {
        "mmap_count": len(seconds),
        "mmap_p50_ms": round(float(p50), 4),
        "mmap_p99_ms": round(float(p99), 4),
        "mmap_max_ms": round(float(largest), 4),
    }


def describe_machine() -> str:
    """Describe what the figures hold for."""
    huge_pages = "unknown"
    with suppress(OSError):
        huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().partition("[")[2].partition("]")[0]
    return f"{machine(kvmoor, np)}, huge pages {huge_pages}"


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the pool (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is timed (default 3)")
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    nbytes = 64 * 2**20 if options.quick else int(options.gib * 2**30)

    tensors = [np.zeros((1, PAGE_NBYTES), np.uint8) for _ in range(NUM_LAYERS)]
    plan = plan_arena(BlockLayout.from_tensors(tensors, block_axis=0, tokens_per_block=16), nbytes)
    eager_threads = min(8, len(os.sched_getaffinity(0)))
    ways: dict[str, tuple[int, Callable[[], Sample]]] = {
        "arena, background": (1, lambda: map_in_background(plan)),
        "arena, eager": (eager_threads, lambda: map_eagerly(plan)),
        "plain": (1, lambda: map_plainly(plan.nbytes, huge_pages=False)),
        "plain, huge pages": (1, lambda: map_plainly(plan.nbytes, huge_pages=True)),
    }
    map_plainly(plan.nbytes, huge_pages=True)  # memory that the machine has had before
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (_, measure) in ways.items():  # in turn, so that a slow moment of the machine hits all of them
            samples[way].append(measure())
    results = [summarise(way, threads, samples[way], plan.nbytes) for way, (threads, _) in ways.items()]
    beside_nothing = latencies(idle(0.05 if options.quick else 2.0))
    report = {
        "question": QUESTION,
        "machine": describe_machine(),
        "nbytes": plan.nbytes,
        "rounds": rounds,
        "mmap_idle": beside_nothing,
        "results": results,
    }
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    print(report["question"])
    print(f"{report['machine']}; {format_nbytes(report['nbytes'])}, medians of {report['rounds']}")
    print(f"{'':19}{'threads':>8}{'usable s':>10}{'mapped s':>10}{'GB/s':>7}{'mmap p50':>10}{'p99':>8}{'max ms':>9}")
    for each in report["results"]:
        print(
            f"{each['way']:19}{each['threads']:>8}{each['usable_s']:>10.3f}{each['mapped_s']:>10.3f}"
            f"{each['gb_per_s']:>7.1f}{each['mmap_p50_ms']:>10.3f}{each['mmap_p99_ms']:>8.3f}{each['mmap_max_ms']:>9.2f}"
        )
    beside = report["mmap_idle"]
    print(
        f"{'beside nothing':54}{beside['mmap_p50_ms']:>10.3f}{beside['mmap_p99_ms']:>8.3f}{beside['mmap_max_ms']:>9.2f}"
    )
    arena = report["results"][0]
    for name, found, target, unit in (
        ("usable, slowest round", arena["usable_max_s"], TARGET_USABLE_S, "s"),
        ("mmap in another thread, p99", arena["mmap_p99_ms"], TARGET_P99_MS, "ms"),
    ):
        print(f"{name}: {found} {unit}, target under {target}: {'met' if found < target else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
