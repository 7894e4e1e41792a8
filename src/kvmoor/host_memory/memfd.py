"""Memory that other processes can map: files that exist in memory only and vanish with their last user."""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.errors import NoRoomError
from kvmoor.host_memory.arena_plan import SLAB_ALIGNMENT, Placement, SlabPlan
from kvmoor.host_memory.huge_pages import describe_hugetlb_refusal, fill_hugetlb, open_hugetlb
from kvmoor.host_memory.numa import NumaMode
from kvmoor.host_memory.page_mapping import TOUCH_NBYTES, SystemCalls, translate_os_error
from kvmoor.process_end import close_in_forked_child

MAX_SEGMENTS: Final = 64
"""Inserts into the page cache of one file are serialised: 32 files filled 3 times as fast as one (H200 host)."""
_NAME_PREFIX: Final = "kvmoor:"
MAX_NAME_NBYTES: Final = 249 - len(_NAME_PREFIX) - len(":63")
"""The kernel takes 249 bytes in all."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No size changes any more, and no seal."""


def _ignore(*_: object) -> None:
    pass


class MemfdSegments:
    """Own the memfds of one arena: slab k lies in segment k mod n, its memory is allocated slab by slab.

    Each file has its final size and is sealed against shrinking, which would kill readers with SIGBUS, and growing. A
    segment is made of reserved huge pages if all its slabs may be and the reserve promises them, else of ordinary
    memory. `place` is called with the address and length of a mapping whose pages are not there yet, to say on which
    NUMA node they lie; `note` with what was asked for and refused.
    """

    def __init__(
        self,
        name: str,
        slabs: Sequence[SlabPlan],
        calls: SystemCalls,
        *,
        placement: Placement | None = None,
        place: Callable[[int, int], None] = _ignore,
        note: Callable[[str], None] = _ignore,
    ) -> None:
        self._calls = calls
        self._placement = placement or Placement()
        self._place = place
        self._note = note
        num_segments = min(MAX_SEGMENTS, len(slabs))
        sizes = [0] * num_segments
        may_reserve = [True] * num_segments
        self._offsets = []
        for slab in slabs:
            segment = slab.number % num_segments
            self._offsets.append(sizes[segment])
            sizes[segment] += round_up(slab.nbytes, SLAB_ALIGNMENT)  # huge pages need offsets aligned like addresses
            may_reserve[segment] &= self._placement.huge_pages.may_reserve(slab.resident_nbytes)
        self._descriptors: list[int] = []
        self._hugetlb: set[int] = set()
        with ExitStack() as opened:
            for number, size in enumerate(sizes):
                segment_name = f"{_NAME_PREFIX}{name}:{number}"
                fd = None
                if may_reserve[number]:
                    fd = self._try_hugetlb(opened, segment_name, size)
                    if fd is None:
                        may_reserve = [False] * num_segments  # the rest of the reserve is not worth 64 refusals
                self._descriptors.append(self._open(opened, segment_name, size) if fd is None else fd)
            self._closing = opened.pop_all()

    def _try_hugetlb(self, opened: ExitStack, name: str, nbytes: int) -> int | None:
        try:
            fd = open_hugetlb(name, nbytes, SEALS, self._calls)
        except OSError as error:
            self._note(describe_hugetlb_refusal(error))
            return None
        opened.callback(close_in_forked_child(fd).release)
        opened.callback(self._close_descriptor, fd)
        self._hugetlb.add(fd)
        return fd

    def _open(self, opened: ExitStack, name: str, nbytes: int) -> int:
        try:
            fd = self._calls.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.callback(close_in_forked_child(fd).release)
            opened.callback(self._close_descriptor, fd)
            self._calls.ftruncate(fd, nbytes)
            self._calls.add_seals(fd, SEALS)
        except OSError as error:
            raise translate_os_error(
                error,
                f"creating the shared memory file {name} of {format_nbytes(nbytes)}",
                "raise the limit of open files (ulimit -n), let the container's seccomp profile allow memfd_create and "
                "F_ADD_SEALS, or lower host_memory",
            ) from error
        return fd

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors, one a segment; empty once closed."""
        return tuple(self._descriptors)

    def location(self, slab: SlabPlan) -> tuple[int, int]:
        """Return the descriptor and the offset at which a slab lies."""
        return self._descriptors[slab.number % len(self._descriptors)], self._offsets[slab.number]

    def is_hugetlb(self, slab: SlabPlan) -> bool:
        """Say whether a slab lies in reserved huge pages."""
        return self.location(slab)[0] in self._hugetlb

    def allocate(self, slab: SlabPlan, should_stop: Callable[[], bool]) -> bool:
        """Allocate the memory of a slab, before it is mapped; return False if `should_stop` ended it early.

        A touch that finds no memory is a SIGBUS; this fails with an error instead, and takes no lock on the address
        space meanwhile. After an error nothing of the slab is allocated.
        """
        fd, start = self.location(slab)
        try:
            if fd in self._hugetlb:
                return fill_hugetlb(
                    fd, start, slab.resident_nbytes, self._calls, place=self._place, should_stop=should_stop
                )
            self._place_file(fd, start, slab.nbytes)
            for offset in range(0, slab.nbytes, TOUCH_NBYTES):
                if should_stop():
                    return False
                self._calls.posix_fallocate(fd, start + offset, min(TOUCH_NBYTES, slab.nbytes - offset))
        except OSError as error:
            self.deallocate(slab)
            if fd in self._hugetlb:
                raise NoRoomError(f'{describe_hugetlb_refusal(error)}; pass huge_pages="off" to do without') from error
            raise translate_os_error(
                error,
                f"allocating {format_nbytes(slab.nbytes)} of shared host memory",
                "free memory, raise the memory limit of the container, or lower host_memory",
            ) from error
        return True

    def _place_file(self, fd: int, start: int, nbytes: int) -> None:
        """Say where pages of a file lie, which holds for the file; a mapping is only the way to say it."""
        if self._placement.numa.mode is NumaMode.DEFAULT:
            return
        address = self._calls.mmap(0, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
        self._place(address, nbytes)
        self._calls.munmap(address, nbytes)

    def deallocate(self, slab: SlabPlan) -> None:
        """Give the memory of a slab that will not be used back. Raises nothing: closing the file does the same."""
        fd, start = self.location(slab)
        with contextlib.suppress(OSError):
            self._calls.punch_hole(fd, start, slab.nbytes)

    def forked(self) -> None:
        """Forget the descriptors in a forked child, where they are closed."""
        self._descriptors = []
        self._closing.pop_all()

    def close(self) -> None:
        """Close the descriptors; the memory goes with its last mapping. Closes twice without harm."""
        self._descriptors = []
        self._closing.close()

    def _close_descriptor(self, fd: int) -> None:
        # Linux has released the descriptor even when close reports an error, and a second try could hit another file.
        with contextlib.suppress(OSError):
            self._calls.close(fd)
