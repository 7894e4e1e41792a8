"""What a test left behind: file descriptors, threads of kvmoor, and mappings of kvmoor.

A mapping counts as kvmoor's if its name says so (a memfd), if it is anonymous and advised to use huge pages, as every
arena is, or if it is a reservation of addresses as an arena makes one. NumPy gives the same advice for large arrays, so
conftest.py tells it not to. The C library reserves addresses too, for its heaps, but in multiples of 64 MiB.

What a mapping is, is read when there is one that was not there before. Another one in exactly the place of one that is
known is taken for it until then; what this has hidden from the check after a test, `find_mistaken` tells in the end.
"""

import gc
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_MEMFD: Final = "/memfd:kvmoor"
_MIN_RESERVED_NBYTES: Final = 2 << 20  # what an arena reserves for alignment alone; guard pages are smaller
_HEAP_ALIGNMENT: Final = 64 << 20

# The mappings of the last look that may be kvmoor's, as the kernel writes them, each with what it is. Reading what they
# are takes 40 ms in a process that has imported torch, which is more than most tests take, and few tests map anything.
_seen: Final[dict[str, str]] = {}
_mistaken: Final[list[str]] = []


@dataclass(frozen=True)
class Resources:
    """What this process holds at one moment; `mappings` are kvmoor's own, address ranges with what each is."""

    descriptors: dict[int, str] = field(default_factory=dict)
    threads: frozenset[threading.Thread] = frozenset()
    mappings: dict[range, str] = field(default_factory=dict)


def snapshot() -> Resources:
    """Read what this process holds now, before a test."""
    return _read_resources(is_before=True)


def find_leaks(before: Resources, *, expects_quarantine: bool = False, timeout_s: float = 2.0) -> list[str]:
    """Describe what is held now and was not held `before`.

    Threads of kvmoor get `timeout_s` in all to end. With `expects_quarantine` the threads, mappings and memfds of
    kvmoor are exempt, because a quarantined arena keeps them on purpose.
    """
    deadline = time.monotonic() + timeout_s
    # All anew where memory stays on purpose: it must not be found later, and held against others.
    after = _read_resources(anew=expects_quarantine)
    if _differences(before, after, expects_quarantine=expects_quarantine):
        gc.collect()  # what only a reference cycle keeps open is about to be closed, loudly
        if not expects_quarantine:
            for thread in after.threads - before.threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        after = _read_resources()
    return _differences(before, after, expects_quarantine=expects_quarantine)


def find_mistaken() -> list[str]:
    """Describe the mappings of kvmoor that the check after a test took for what was in their place before."""
    return [*_mistaken, *_changed(_read_kinds())]


def _read_resources(*, is_before: bool = False, anew: bool = False) -> Resources:
    mappings = dict(_kvmoor_mappings(is_before=is_before, anew=anew))
    return Resources(dict(_descriptors()), frozenset(_kvmoor_threads()), mappings)


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


def _kvmoor_mappings(*, is_before: bool, anew: bool) -> Iterator[tuple[range, str]]:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if _may_be_ours(line)]
    seen = {line: _seen[line] for line in lines if line in _seen}
    if anew or len(seen) < len(lines):
        seen = _read_kinds()
        if is_before:  # after a test they are among its leaks
            _mistaken.extend(_changed(seen))
    _seen.clear()
    _seen.update(seen)
    return ((_addresses(line), kind) for line, kind in seen.items() if kind)


def _read_kinds() -> dict[str, str]:
    """Read what each mapping is that may be kvmoor's: the kernel walks through all page tables for it."""
    first, *others = Path("/proc/self/smaps").read_text().split("\nVmFlags:")
    kinds, line = {}, first.partition("\n")[0]
    for other in others:
        flags, _, following = other.partition("\n")
        if _may_be_ours(line):
            kinds[line] = _kind(line, flags.split())
        line = following.partition("\n")[0]
    return kinds


def _changed(kinds: dict[str, str]) -> list[str]:
    """Describe the mappings of kvmoor that are not what was seen in their place."""
    return [
        f"{len(_addresses(line))} bytes of {kind} at {_addresses(line).start:#x}"
        for line, kind in kinds.items()
        if kind and _seen.get(line, kind) != kind
    ]


def _may_be_ours(line: str) -> bool:
    return ("/" not in line and "[" not in line) or _MEMFD in line  # else another file, or a name as [heap]


def _kind(line: str, flags: list[str]) -> str:
    """Name what a mapping of kvmoor is; "" if it is somebody else's."""
    permissions, mapping = line.split()[1], _addresses(line)
    name = "".join(line.split(maxsplit=5)[5:])  # after addresses, permissions, offset, device and inode
    if name:
        return name if name.startswith(_MEMFD) else ""
    if "hg" in flags:
        return "anonymous memory"
    is_reservation = permissions == "---p" and "nr" in flags and len(mapping) >= _MIN_RESERVED_NBYTES
    return "reserved addresses" if is_reservation and mapping.stop % _HEAP_ALIGNMENT else ""


def _addresses(line: str) -> range:
    start, end = line.split(maxsplit=1)[0].split("-")
    return range(int(start, 16), int(end, 16))


def _nbytes_outside(mapping: range, others: Iterable[range]) -> int:
    return len(mapping) - sum(
        max(0, min(mapping.stop, other.stop) - max(mapping.start, other.start)) for other in others
    )
