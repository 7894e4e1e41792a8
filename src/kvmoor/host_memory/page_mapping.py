"""Map and unmap pages with libc itself: the one place that makes system calls about memory.

Python's `mmap` objects unmap when they are collected, also while the interpreter exits. A copy that was given up may
still be writing then, so no finaliser may unmap: here a mapping is a number, and only an explicit `unmap` ends it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.errors import BrokenError, NoRoomError

TOUCH_NBYTES: Final = 2 * 2**20
"""What one touch or allocation call covers: how long `close` may have to wait, 0.2 ms warm and 4 ms cold (measured)."""
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10  # not in the mmap module; these numbers hold on x86-64 and 64-bit ARM
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_PUNCH_HOLE: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EDQUOT})
_WRITABLE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_MBIND_NUMBERS: Final = {"x86_64": 237, "aarch64": 235}
"""The C library has no mbind, and libnuma is not on every machine."""
_BITS_PER_LONG: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # a CDLL, not a PyDLL: its calls release the interpreter lock
    size, integer, pointer, long = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_long
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, integer, integer, integer, long), pointer
    libc.munmap.argtypes, libc.munmap.restype = (pointer, size), integer
    libc.madvise.argtypes, libc.madvise.restype = (pointer, size, integer), integer
    libc.fallocate.argtypes, libc.fallocate.restype = (integer, integer, long, long), integer
    # As mbind takes them: its number, address, length, mode, mask of nodes, bits in the mask, flags.
    libc.syscall.argtypes, libc.syscall.restype = (long, pointer, size, long, pointer, size, integer), long
    return libc


_libc: Final = _load_libc()


class SystemCalls:
    """Make the system calls under an arena; each raises `OSError`. A subclass can make one fail."""

    def mmap(self, address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
        """Map pages and return where."""
        mapped: int | None = _libc.mmap(address or None, nbytes, protection, flags, fd, offset)
        if mapped is None or mapped == _MAP_FAILED:
            raise _last_error()
        return mapped

    def munmap(self, address: int, nbytes: int) -> None:
        """Unmap pages."""
        if _libc.munmap(address, nbytes):
            raise _last_error()

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        """Advise the kernel about pages."""
        if _libc.madvise(address, nbytes, advice):
            raise _last_error()

    def mbind(self, address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> None:
        """Tell the kernel on which NUMA nodes pages are to lie that are not there yet."""
        number = _MBIND_NUMBERS.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        mask = (ctypes.c_ulong * (max(nodes, default=0) // _BITS_PER_LONG + 1))()
        for node in nodes:
            mask[node // _BITS_PER_LONG] |= 1 << node % _BITS_PER_LONG
        # The kernel takes the number of bits less one.
        if _libc.syscall(number, address, nbytes, mode, ctypes.addressof(mask), len(mask) * _BITS_PER_LONG + 1, 0):
            raise _last_error()

    def memset(self, address: int, nbytes: int) -> None:
        """Write zeros."""
        ctypes.memset(address, 0, nbytes)

    def memfd_create(self, name: str, flags: int) -> int:
        """Create a file that exists in memory only and return its descriptor."""
        return os.memfd_create(name, flags)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, nbytes)

    def add_seals(self, fd: int, seals: int) -> None:
        """Forbid kinds of change to a file for good."""
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Allocate a range of a file."""
        os.posix_fallocate(fd, offset, nbytes)

    def punch_hole(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the memory behind a range of a file back."""
        if _libc.fallocate(fd, _PUNCH_HOLE, offset, nbytes):
            raise _last_error()

    def read_byte(self, fd: int, offset: int, address: int) -> None:
        """Have the kernel copy one byte of a file to an address: EFAULT where a write of ours would be a SIGBUS."""
        os.preadv(fd, [(ctypes.c_char * 1).from_address(address)], offset)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def translate_os_error(error: OSError, doing: str, remedy: str) -> BrokenError | NoRoomError:
    """Return our error for one of the system's: what was tried, what was found, what to do."""
    kind = NoRoomError if error.errno in _NO_ROOM else BrokenError
    return kind(f"{doing} failed ({error.strerror or error}): {remedy}")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A range of addresses without memory. `base` is aligned; `start` and `nbytes` are what has to be unmapped."""

    base: int
    start: int
    nbytes: int


class PageMapping:
    """Reserve, map, advise, touch and unmap pages. Holds nothing; whoever maps unmaps. Any thread may call."""

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls

    def reserve(self, nbytes: int, alignment: int) -> Reservation:
        """Reserve addresses that nothing can be read from or written to yet."""
        # At least one page on either side stays reserved and unused: a guard, and the kernel cannot join our mappings
        # with a neighbour's, so smaps shows them apart.
        reserved_nbytes = round_up(nbytes, mmap.PAGESIZE) + alignment + mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            start = self._calls.mmap(0, reserved_nbytes, _PROT_NONE, flags, -1, 0)
        except OSError as error:
            raise translate_os_error(
                error,
                f"reserving {format_nbytes(nbytes)} of addresses for host memory",
                "lower host_memory, or raise the address-space limit (ulimit -v; RLIMIT_AS)",
            ) from error
        return Reservation(round_up(start + mmap.PAGESIZE, alignment), start, reserved_nbytes)

    def map_anonymous(self, address: int, nbytes: int) -> None:
        """Put writable private memory at reserved addresses; a page takes memory when it is first touched."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        try:
            self._calls.mmap(address, nbytes, _WRITABLE, flags, -1, 0)
        except OSError as error:
            raise translate_os_error(
                error,
                f"mapping {format_nbytes(nbytes)} of host memory",
                "lower host_memory, set vm.overcommit_memory to 0 or 1 (2 promises no more than there is), or raise "
                "vm.max_map_count or the data limit (ulimit -d)",
            ) from error

    def map_file(self, address: int, nbytes: int, fd: int, offset: int) -> None:
        """Put a range of a file, writable and shared, at reserved addresses."""
        try:
            self._calls.mmap(address, nbytes, _WRITABLE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        except OSError as error:
            raise translate_os_error(
                error,
                f"mapping {format_nbytes(nbytes)} of shared host memory",
                "lower host_memory, or raise vm.max_map_count",
            ) from error

    def unmap(self, reservation: Reservation) -> None:
        """Give the addresses and all memory mapped there back."""
        try:
            self._calls.munmap(reservation.start, reservation.nbytes)
        except OSError as error:
            raise translate_os_error(
                error,
                f"unmapping {format_nbytes(reservation.nbytes)} of host memory",
                "the memory stays mapped; raise vm.max_map_count",
            ) from error

    def advise_huge_pages(self, address: int, nbytes: int) -> str:
        """Ask for huge pages; return why the kernel refused, or nothing. smaps tells what came of it."""
        return self._try_advice(address, nbytes, mmap.MADV_HUGEPAGE)

    def refuse_huge_pages(self, address: int, nbytes: int) -> str:
        """Ask for small pages; return why the kernel refused, or nothing."""
        return self._try_advice(address, nbytes, mmap.MADV_NOHUGEPAGE)

    def place(self, address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> str:
        """Say on which NUMA nodes pages are to lie, before they are touched; return why the kernel refused, or nothing.

        A kernel without NUMA, a container that forbids the call, a node outside of the process's cpuset: the memory is
        as good, only slower.
        """
        try:
            self._calls.mbind(address, nbytes, mode, nodes)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def advise_no_dump(self, address: int, nbytes: int) -> None:
        """Keep pages out of core dumps, which would be as large as host memory and hold what users wrote."""
        self._advise(address, nbytes, mmap.MADV_DONTDUMP)

    def advise_no_fork(self, address: int, nbytes: int) -> None:
        """Keep pages out of forked processes, which would keep them alive, or copy them one by one as they change."""
        self._advise(address, nbytes, mmap.MADV_DONTFORK)

    def _try_advice(self, address: int, nbytes: int, advice: int) -> str:
        try:
            self._calls.madvise(address, nbytes, advice)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _advise(self, address: int, nbytes: int, advice: int) -> None:
        try:
            self._calls.madvise(address, nbytes, advice)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise translate_os_error(
                    error, f"advising the kernel about {format_nbytes(nbytes)} of host memory", "lower host_memory"
                ) from error

    def touch(self, address: int, nbytes: int, should_stop: Callable[[], bool]) -> bool:
        """Make pages resident by writing zeros, 2 MiB a call; return False if `should_stop` ended it early.

        The interpreter lock is released in each call. MADV_POPULATE_WRITE would be one call, but it keeps the lock on
        the address space: another thread's mmap waited 13-578 ms for it, against 0.05 ms beside `memset` (2 cores).
        """
        for offset in range(0, nbytes, TOUCH_NBYTES):
            if should_stop():
                return False
            self._calls.memset(address + offset, min(TOUCH_NBYTES, nbytes - offset))
        return True


@dataclass(frozen=True, slots=True)
class Residency:
    """What the kernel says is in memory: all of it, and the part of it in huge pages."""

    resident_nbytes: int
    huge_page_nbytes: int


_RANGE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE: Final = frozenset({"AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"})
_RESERVED: Final = frozenset({"Shared_Hugetlb", "Private_Hugetlb"})  # not part of Rss


def read_residency(address: int, nbytes: int, smaps: Path = Path("/proc/self/smaps")) -> Residency | None:
    """Add up the mappings within a range of addresses; None if the kernel does not tell.

    Takes milliseconds in a large process, so it is for reports, not for a loop.
    """
    resident = huge = 0
    inside = False
    try:
        with smaps.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                if (span := _RANGE.match(line)) is not None:
                    inside = address <= int(span[1], 16) and int(span[2], 16) <= address + nbytes
                elif inside:
                    key, _, value = line.partition(":")
                    if key == "Rss" or key in _RESERVED:
                        resident += int(value.split()[0]) * 1024
                    if key in _HUGE or key in _RESERVED:
                        huge += int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return Residency(resident, huge)
