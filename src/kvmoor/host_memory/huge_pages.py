"""Huge pages of an arena: those reserved with the kernel first, else transparent ones, else pages of 4 KiB.

    reserved (hugetlb)   where a slab is whole huge pages and the reserve has them: never split, never swapped
    transparent          where the kernel allows them and finds 2 MiB in one piece; smaps tells what came of it
    none                 huge_pages="off": a host whose memory is in pieces would compact it at GB a minute

A reserve is shared by all programs, and a page that it cannot give at the first touch is a SIGBUS, not an errno. So the
pages of a slab are taken in three steps, each of which can fail with an errno and then leaves nothing behind: a file of
huge pages, a mapping of it that reserves them, and one byte of each page that the *kernel* writes. Where a cgroup or a
node has none left although the reserve has, that last step is an EFAULT.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvmoor.byte_sizes import format_nbytes
from kvmoor.errors import SettingsError
from kvmoor.host_memory.page_mapping import SystemCalls

HUGE_PAGE_NBYTES: Final = 2 * 2**20
"""The only size that is used: it divides a slab on every machine, and 1 GiB would not."""
HUGETLB_FLAGS: Final = os.MFD_HUGETLB | os.MFD_HUGE_2MB

HugePagesChoice = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class HugePages:
    """Say which pages an arena asks for; `transparent` and `shared` are the kernel's words, empty where unknown.

    `transparent` is for private memory, `shared` for memfds. `reserved_nbytes`: what the reserve had when it was read.
    """

    choice: HugePagesChoice = "auto"
    transparent: str = ""
    shared: str = ""
    reserved_nbytes: int = 0

    def may_reserve(self, resident_nbytes: int) -> bool:
        """Say whether a slab may lie in reserved huge pages: they are wanted, there are some, and it fills its own."""
        return self.choice == "auto" and self.reserved_nbytes > 0 and resident_nbytes % HUGE_PAGE_NBYTES == 0

    def describe(self) -> str:
        """Return what is asked for as a few words."""
        if self.choice == "off":
            return 'none (huge_pages="off")'
        reserved = f"{format_nbytes(self.reserved_nbytes)} reserved" if self.reserved_nbytes else "none reserved"
        return (
            f"{reserved}, transparent ones {self.transparent or 'unknown'} "
            f"(in shared memory {self.shared or 'unknown'})"
        )


def plan_huge_pages(choice: HugePagesChoice, *, root: Path = Path("/")) -> HugePages:
    """Read what the kernel offers; raises `SettingsError` for an unknown word. `root` is where ``sys`` is."""
    if choice not in ("auto", "off"):
        raise SettingsError(f'huge_pages is {choice!r}: give "auto" or "off"')
    folder = root / "sys/kernel/mm/transparent_hugepage"
    return HugePages(
        choice,
        _read_chosen(folder / "enabled"),
        _read_chosen(folder / "shmem_enabled"),
        read_reserved_nbytes(root) or 0,
    )


def read_reserved_nbytes(root: Path = Path("/")) -> int | None:
    """Return how much the kernel's reserve of 2 MiB pages can still give; None if it does not tell."""
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    try:
        free, promised = (
            int((folder / name).read_text(encoding="ascii")) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return None
    return max(0, free - promised) * HUGE_PAGE_NBYTES


def _read_chosen(path: Path) -> str:
    """Return the word in brackets, as in ``always [madvise] never``; empty if there is none."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return text.partition("[")[2].partition("]")[0]


def open_hugetlb(name: str, nbytes: int, seals: int, calls: SystemCalls) -> int:
    """Create a file of reserved huge pages and return its descriptor; raises `OSError` where the reserve is too small.

    The pages are promised to the file for as long as it lives, so no other program can take them.
    """
    assert nbytes % HUGE_PAGE_NBYTES == 0, "only whole huge pages can be reserved"
    fd = calls.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | HUGETLB_FLAGS)
    try:
        calls.ftruncate(fd, nbytes)
        calls.add_seals(fd, seals)
        # Without MAP_NORESERVE, which would let the mapping succeed and the first touch fail. The promise belongs to
        # the file and outlives the mapping.
        calls.munmap(_map_shared(fd, 0, nbytes, calls), nbytes)
    except BaseException:
        with contextlib.suppress(OSError):
            calls.close(fd)
        raise
    return fd


def fill_hugetlb(
    fd: int,
    offset: int,
    nbytes: int,
    calls: SystemCalls,
    *,
    place: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> bool:
    """Take the pages of a range of such a file; return False if `should_stop` ended it early. Raises `OSError`.

    `place` gets the address and length of a mapping before anything in it is touched, to say on which node it lies:
    for reserved pages that belongs to the mapping and not to the file.
    """
    address = _map_shared(fd, offset, nbytes, calls)
    try:
        with contextlib.suppress(OSError):
            calls.madvise(address, nbytes, mmap.MADV_DONTFORK)
        place(address, nbytes)
        for start in range(0, nbytes, HUGE_PAGE_NBYTES):
            if should_stop():
                return False
            calls.read_byte(fd, offset + start, address + start)
    finally:
        calls.munmap(address, nbytes)
    return True


def describe_hugetlb_refusal(error: OSError) -> str:
    """Return a sentence on reserved huge pages that could not be had."""
    # EFAULT is what a refusal while pages are taken looks like; "bad address" would mislead.
    why = "none is left for this process" if error.errno == errno.EFAULT else error.strerror or str(error)
    return (
        f"reserved huge pages were refused ({why}): raise vm.nr_hugepages, or the hugetlb limit of the container's "
        "cgroup, to have more"
    )


def _map_shared(fd: int, offset: int, nbytes: int, calls: SystemCalls) -> int:
    return calls.mmap(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
