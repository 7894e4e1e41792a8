"""Memory that other processes can map: files that exist in memory only and vanish with their last user."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.host_memory.arena_plan import SLAB_ALIGNMENT, SlabPlan
from kvmoor.host_memory.page_mapping import TOUCH_NBYTES, SystemCalls, translate_os_error

MAX_SEGMENTS: Final = 64
"""Inserts into the page cache of one file are serialised: 32 files filled 3 times as fast as one (H200 host)."""
_NAME_PREFIX: Final = "kvmoor:"
MAX_NAME_NBYTES: Final = 249 - len(_NAME_PREFIX) - len(":63")
"""The kernel takes 249 bytes in all."""


class MemfdSegments:
    """Own the memfds of one arena: slab k lies in segment k mod n, its memory is allocated slab by slab.

    Each file has its final size and is sealed against shrinking, which would kill readers with SIGBUS, and growing.
    """

    def __init__(self, name: str, slabs: Sequence[SlabPlan], calls: SystemCalls) -> None:
        self._calls = calls
        num_segments = min(MAX_SEGMENTS, len(slabs))
        sizes = [0] * num_segments
        self._offsets = []
        for slab in slabs:
            segment = slab.number % num_segments
            self._offsets.append(sizes[segment])
            sizes[segment] += round_up(slab.nbytes, SLAB_ALIGNMENT)  # huge pages need offsets aligned like addresses
        with ExitStack() as opened:
            self._descriptors = [
                self._open(opened, f"{_NAME_PREFIX}{name}:{number}", size) for number, size in enumerate(sizes)
            ]
            self._closing = opened.pop_all()

    def _open(self, opened: ExitStack, name: str, nbytes: int) -> int:
        try:
            fd = self._calls.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.callback(self._close_descriptor, fd)
            self._calls.ftruncate(fd, nbytes)
            self._calls.add_seals(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise translate_os_error(
                error,
                f"creating the shared memory file {name} of {format_nbytes(nbytes)}",
                "raise the limit of open files (ulimit -n), or lower host_memory",
            ) from error
        return fd

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors, one a segment; empty once closed."""
        return tuple(self._descriptors)

    def location(self, slab: SlabPlan) -> tuple[int, int]:
        """Return the descriptor and the offset at which a slab lies."""
        return self._descriptors[slab.number % len(self._descriptors)], self._offsets[slab.number]

    def allocate(self, slab: SlabPlan, should_stop: Callable[[], bool]) -> bool:
        """Allocate the memory of a slab, before it is mapped; return False if `should_stop` ended it early.

        A touch that finds no memory is a SIGBUS; this fails with an error instead, and takes no lock on the address
        space meanwhile. After an error nothing of the slab is allocated.
        """
        fd, start = self.location(slab)
        try:
            for offset in range(0, slab.nbytes, TOUCH_NBYTES):
                if should_stop():
                    return False
                self._calls.posix_fallocate(fd, start + offset, min(TOUCH_NBYTES, slab.nbytes - offset))
        except OSError as error:
            self.deallocate(slab)
            raise translate_os_error(
                error,
                f"allocating {format_nbytes(slab.nbytes)} of shared host memory",
                "free memory, raise the memory limit of the container, or lower host_memory",
            ) from error
        return True

    def deallocate(self, slab: SlabPlan) -> None:
        """Give the memory of a slab that will not be used back. Raises nothing: closing the file does the same."""
        fd, start = self.location(slab)
        with contextlib.suppress(OSError):
            self._calls.punch_hole(fd, start, slab.nbytes)

    def close(self) -> None:
        """Close the descriptors; the memory goes with its last mapping. Closes twice without harm."""
        self._descriptors = []
        self._closing.close()

    def _close_descriptor(self, fd: int) -> None:
        # Linux has released the descriptor even when close reports an error, and a second try could hit another file.
        with contextlib.suppress(OSError):
            self._calls.close(fd)
