"""Host memory from the C library, which nobody but its owner frees.

A buffer of Python's would be freed with its last reference, copies or not.
"""

import ctypes
import mmap
import os
from typing import Final

from kvmoor.byte_sizes import round_up
from kvmoor.errors import NoRoomError

_LIBC: Final = ctypes.CDLL(None)
_MADV_DODUMP: Final = 17  # not in the mmap module


class PlainMemory:
    """Allocate pieces of memory by whole pages. Any thread may call: each change is one step of a dictionary."""

    def __init__(self) -> None:
        self._nbytes_by_address: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Return how much was not freed yet."""
        return sum(self._nbytes_by_address.copy().values())

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory. Raises `NoRoomError` if there is none."""
        nbytes = round_up(nbytes, mmap.PAGESIZE)
        pointer = ctypes.c_void_p()
        code = _LIBC.posix_memalign(ctypes.byref(pointer), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_size_t(nbytes))
        if code or pointer.value is None:
            raise NoRoomError(f"{nbytes} bytes of staging memory cannot be had: {os.strerror(code)}; free memory")
        self._nbytes_by_address[pointer.value] = nbytes
        # As for the arena: forked children must not keep it, and core dumps must not hold what users wrote.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            _LIBC.madvise(pointer, ctypes.c_size_t(nbytes), advice)
        return pointer.value

    def free(self, address: int) -> None:
        """Give memory of `allocate` back; no copy may touch it any more."""
        nbytes = self._nbytes_by_address.pop(address)
        for advice in (mmap.MADV_DOFORK, _MADV_DODUMP):  # the next user of these pages expects them in its children
            _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
        _LIBC.free(ctypes.c_void_p(address))
