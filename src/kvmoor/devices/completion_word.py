"""The number in host memory by which a queue says how far it has come."""

import ctypes
from typing import Final

_LINE_NBYTES: Final = 64
_WORD_NBYTES: Final = 8


class CompletionWord:
    """One unsigned 64-bit word on a cache line of its own; it only ever grows.

    One thread advances it, any thread reads it. Reading is a read of memory: no lock, no call that could block.
    """

    def __init__(self) -> None:
        # Two lines, so that one of them begins inside on a boundary and no neighbour shares it.
        self._lines = ctypes.create_string_buffer(2 * _LINE_NBYTES - 1)
        offset = -ctypes.addressof(self._lines) % _LINE_NBYTES
        self._word = ctypes.c_uint64.from_buffer(self._lines, offset)

    @property
    def address(self) -> int:
        """Return where the word lies; valid as long as this object lives."""
        return ctypes.addressof(self._word)

    def read(self) -> int:
        """Return the number of the last job that is over."""
        return self._word.value

    def advance(self, sequence: int) -> None:
        """Store `sequence`: this job and all before it are over. It has to be above what is stored."""
        assert self._word.value < sequence < 2 ** (8 * _WORD_NBYTES), (self._word.value, sequence)
        self._word.value = sequence
