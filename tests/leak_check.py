"""What a test left behind: file descriptors, threads of kvmoor, and mappings of kvmoor.

A mapping counts as kvmoor's if its name says so (a memfd), if it is anonymous and advised to use huge pages, as every
arena is, or if it is a reservation of addresses as an arena makes one. NumPy gives the same advice for large arrays, so
conftest.py tells it not to. The C library reserves addresses too, for its heaps, but in multiples of 64 MiB.
"""

import gc
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s*(.*)\n")
_MIN_RESERVED_NBYTES: Final = 2 << 20  # what an arena reserves for alignment alone; guard pages are smaller
_HEAP_ALIGNMENT: Final = 64 << 20


@dataclass(frozen=True)
class Resources:
    """What this process holds at one moment; `mappings` are kvmoor's own, address ranges with what each is."""

    descriptors: dict[int, str] = field(default_factory=dict)
    threads: frozenset[threading.Thread] = frozenset()
    mappings: dict[range, str] = field(default_factory=dict)


def snapshot() -> Resources:
    """Read what this process holds now."""
    return Resources(dict(_descriptors()), frozenset(_kvmoor_threads()), dict(_kvmoor_mappings()))


def find_leaks(before: Resources, *, expects_quarantine: bool = False, timeout_s: float = 2.0) -> list[str]:
    """Describe what is held now and was not held `before`.

    Threads of kvmoor get `timeout_s` in all to end. With `expects_quarantine` the threads, mappings and memfds of
    kvmoor are exempt, because a quarantined arena keeps them on purpose.
    """
    deadline = time.monotonic() + timeout_s
    after = snapshot()
    if _differences(before, after, expects_quarantine=expects_quarantine):
        gc.collect()  # what only a reference cycle keeps open is about to be closed, loudly
        if not expects_quarantine:
            for thread in after.threads - before.threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        after = snapshot()
    return _differences(before, after, expects_quarantine=expects_quarantine)


def _differences(before: Resources, after: Resources, *, expects_quarantine: bool) -> list[str]:
    leaks = [
        f"file descriptor {number}: {target}"
        for number, target in sorted(after.descriptors.items())
        if before.descriptors.get(number) != target and not (expects_quarantine and "memfd:kvmoor" in target)
    ]
    if not expects_quarantine:
        leaks += sorted(f"thread {thread.name}" for thread in after.threads - before.threads)
        for mapping, kind in after.mappings.items():
            # The kernel joins neighbouring mappings, so ranges are compared by address and not one by one.
            if nbytes := _nbytes_outside(mapping, before.mappings):
                leaks.append(f"{nbytes} bytes of {kind} at {mapping.start:#x}")
    return leaks


def _descriptors() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            yield int(entry.name), str(entry.readlink())
        except FileNotFoundError:  # the descriptor that listed the folder
            continue


def _kvmoor_threads() -> Iterator[threading.Thread]:
    return (thread for thread in threading.enumerate() if thread.name.startswith("kvmoor"))


def _kvmoor_mappings() -> Iterator[tuple[range, str]]:
    mapping, permissions, name = range(0), "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines(keepends=True):
        if match := _MAPPING.fullmatch(line):
            mapping, permissions, name = range(int(match[1], 16), int(match[2], 16)), match[3], match[4]
        elif line.startswith("VmFlags:"):
            flags = line.split()
            if name.startswith("/memfd:kvmoor"):
                yield mapping, name
            elif not name and "hg" in flags:
                yield mapping, "anonymous memory"
            elif (
                not name
                and permissions == "---p"
                and "nr" in flags
                and len(mapping) >= _MIN_RESERVED_NBYTES
                and mapping.stop % _HEAP_ALIGNMENT
            ):
                yield mapping, "reserved addresses"


def _nbytes_outside(mapping: range, others: Iterable[range]) -> int:
    return len(mapping) - sum(
        max(0, min(mapping.stop, other.stop) - max(mapping.start, other.start)) for other in others
    )
