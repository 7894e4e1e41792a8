"""How fast does a CpuDevice copy the pages of blocks, compared with one plain memcpy of the same bytes?

Stores (device tensors to slots) and loads (back) go through a real copy queue, one job at a time, timed from `enqueue`
to the end of the job. Device blocks are in random order. The yardstick is one `ctypes.memmove` of as many bytes on one
thread, in the same run and in turn with the jobs. From some size on the C library copies around the caches, which no
page is large enough for, so there are jobs of two sizes, each with its own yardstick. Both sides are anonymous memory
with huge-page advice, as an arena is. Figures are medians.

    python benchmarks/host_copies.py [--json] [--quick] [--runs 7]

Where the tensors lie: "one allocation": slices of it; "scattered": separate allocations with random gaps, so that no
three tensors are equally far apart (separate allocations of one size usually are, and count as one allocation).
Where the slots lie: "runs": of 8 adjacent ones, as SlotPool hands them out; "random": each anywhere.
"""

import argparse
import ctypes
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from print_parts.machine import machine

import kvmoor
from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.device import BlockCopies, CopyQueue, Direction

KIB = 1 << 10
MIB = 1 << 20
HUGE_PAGE = 2 * MIB
SLOTS_IN_A_RUN = 8
WAIT_S = 60.0
TARGETS = {64 * KIB: 0.7, 256 * KIB: 0.85, MIB: 0.85}
"""The least fraction of a memcpy that we want, by page size; below 64 KiB it is only reported."""


@dataclass(frozen=True)
class Case:
    """One line of the result: what is copied, and how."""

    job_nbytes: int
    page_nbytes: int
    num_tensors: int
    tensors: str
    slots: str
    copy_threads: int


@dataclass(frozen=True)
class Figures:
    """Medians in GB/s (1e9 bytes a second)."""

    store: float
    load: float
    memcpy: float

    @property
    def worse_fraction(self) -> float:
        """Return the slower direction as a fraction of the memcpy."""
        return min(self.store, self.load) / self.memcpy


def cases(*, quick: bool) -> Iterator[Case]:
    """List what is measured."""
    if quick:
        yield from (Case(2 * MIB, 64 * KIB, 4, tensors, "runs", 2) for tensors in ("one allocation", "scattered"))
        return
    threads = sorted({1, min(2, len(os.sched_getaffinity(0)))})
    for job, page in product((64 * MIB, 512 * MIB), (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)):
        num_tensors = 32 if page < MIB else 8
        for tensors, slots in (("one allocation", "runs"), ("one allocation", "random"), ("scattered", "runs")):
            yield from (Case(job, page, num_tensors, tensors, slots, number) for number in threads)


class HostMemory:
    """Anonymous memory with huge-page advice, touched once."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes + HUGE_PAGE)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = start + -start % HUGE_PAGE
        ctypes.memset(self.address, 1, nbytes)


def describe_group(case: Case, device_address: int, random: np.random.Generator) -> GroupLayout:
    """Lay the tensors out in device memory."""
    num_blocks = case.job_nbytes // case.page_nbytes // case.num_tensors
    tensors, base = [], device_address
    for _ in range(case.num_tensors):
        tensors.append(TensorPages(base, num_blocks, case.page_nbytes, case.page_nbytes))
        base += num_blocks * case.page_nbytes
        base += 4 * KIB * int(random.integers(1, 100)) if case.tensors == "scattered" else 0
    return GroupLayout(tuple(tensors), tokens_per_block=16)


def choose_slots(case: Case, num_slots: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return slot numbers in the order of the blocks."""
    if case.slots == "random":
        return random.permutation(num_slots)
    runs = np.array_split(np.arange(num_slots), -(-num_slots // SLOTS_IN_A_RUN))
    return np.concatenate([runs[number] for number in random.permutation(len(runs))])


def measure(case: Case, device_memory: HostMemory, slot_memory: HostMemory, runs: int) -> Figures:
    """Time stores, loads and the plain copy in turn, so that a slow moment of the machine hits all of them."""
    random = np.random.default_rng(0)
    group = describe_group(case, device_memory.address, random)
    slots = slot_memory.address + group.slot_nbytes * choose_slots(case, group.num_device_blocks, random)
    copies = BlockCopies(group, random.permutation(group.num_device_blocks).astype(np.int64), slots)
    with CpuDevice(copy_threads=case.copy_threads) as device:
        store, load = (queue_job(device.open_copy_queue(d.value, d), copies) for d in Direction)
        seconds: dict[str, list[float]] = {"store": [], "load": [], "memcpy": []}
        for _ in range(runs + 1):
            seconds["store"].append(timed(store))
            seconds["load"].append(timed(load))
            seconds["memcpy"].append(
                timed(lambda: ctypes.memmove(slot_memory.address, device_memory.address, case.job_nbytes))
            )
    # The first round starts threads and fills caches.
    return Figures(**{name: case.job_nbytes / statistics.median(each[1:]) / 1e9 for name, each in seconds.items()})


def queue_job(queue: CopyQueue, copies: BlockCopies) -> Callable[[], None]:
    """Return a function that runs one job and waits for its end."""
    sequence = 0

    def run() -> None:
        nonlocal sequence
        sequence += 1
        queue.enqueue([copies], sequence, None)
        if not queue.wait_completed(sequence, WAIT_S) or (failure := queue.failure(sequence)) is not None:
            raise SystemExit(f"job {sequence} did not end well: {failure}")

    return run


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds the work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def describe_machine(runs: int) -> str:
    """Name hardware and versions."""
    return f"{machine(kvmoor, np)}, {' '.join(platform.libc_ver())}; median of {runs} jobs each"


def print_line(case: Case, figures: Figures) -> None:
    """Print one case as a row of the table."""
    target = TARGETS.get(case.page_nbytes) if case.job_nbytes >= 64 * MIB else None
    verdict = "" if target is None else f"{'reaches' if figures.worse_fraction >= target else 'MISSES'} {target}"
    print(
        f"{case.job_nbytes // MIB:>7} {case.page_nbytes // KIB:>8} {case.num_tensors:>7}  {case.tensors:14}  "
        f"{case.slots:6} {case.copy_threads:>7} {figures.store:>7.1f} {figures.load:>6.1f} {figures.memcpy:>7.1f} "
        f"{figures.worse_fraction:>9.2f}  {verdict}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the question, the set-up and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="measure next to nothing, to see that all runs")
    parser.add_argument("--runs", type=int, default=7, help="jobs a line and direction (default 7)")
    options = parser.parse_args(arguments)

    question = (__doc__ or "").splitlines()[0]
    setup = describe_machine(options.runs)
    if not options.json:
        print(f"{question}\n{setup}\n")
        print("job MiB page KiB tensors  where they lie  slots  threads   store   load  memcpy  fraction  target")
    chosen = list(cases(quick=options.quick))
    largest = max(case.job_nbytes for case in chosen)
    device_memory, slot_memory = HostMemory(largest + 16 * MIB), HostMemory(largest)
    results = []
    for case in chosen:
        figures = measure(case, device_memory, slot_memory, options.runs)
        results.append({**asdict(case), **asdict(figures), "worse_fraction": figures.worse_fraction})
        if not options.json:
            print_line(case, figures)
    if options.json:
        print(json.dumps({"question": question, "machine": setup, "unit": "GB/s", "results": results}, indent=1))


if __name__ == "__main__":
    main()
