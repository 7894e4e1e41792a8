"""What the device writes into host memory to say how far a queue has come, and when it began and ended a job.

    page-locked page of a queue:   | completion word | - | begin 0 | end 0 | begin 1 | end 1 | ... | end 63 |
                                   0                128 1024                                            2048

The page comes from the driver's own allocator and belongs to the queue until it is proven that nothing runs on it: a
kernel that ends late writes here.
"""

import ctypes
import threading
from typing import Final

COMPLETION_NBYTES: Final = 4096
"""How much page-locked memory a queue needs: what the driver hands out at least."""
_TIMES_OFFSET: Final = 1024
_NUM_TIMED_JOBS: Final = 64


class CompletionMemory:
    """Read the completion word of one queue and the times of its latest jobs.

    `address`: `COMPLETION_NBYTES` of page-locked memory, all zero, which has to stay until `detach`. Any thread may
    read: nothing here calls the driver. `next_times` belongs to who queues jobs.
    """

    def __init__(self, address: int) -> None:
        assert address % COMPLETION_NBYTES == 0, address
        self._address: Final = address
        # Guards all below: who reads while the memory is given back must not be half-way into it. It orders as well:
        # where memory is weakly ordered, what is read after a new number is not older than the number.
        self._lock = threading.Lock()
        self._words = (ctypes.c_uint64 * (COMPLETION_NBYTES // 8)).from_address(address)
        self._last_read = 0
        self._timed_sequences = [0] * _NUM_TIMED_JOBS
        self._num_timed = 0

    @property
    def word_address(self) -> int:
        """Return where the completion word lies, on a cache line of its own."""
        return self._address

    def read(self) -> int:
        """Return the number of the last job that is over."""
        with self._lock:
            self._last_read = max(self._last_read, self._words[0])
            return self._last_read

    def next_times(self, sequence: int) -> tuple[int, int]:
        """Return where the device is to write when it begins and ends a job: the place of the 64th job before it."""
        with self._lock:
            place = self._num_timed % _NUM_TIMED_JOBS
            self._num_timed += 1
            self._timed_sequences[place] = sequence
        begin = self._address + _TIMES_OFFSET + 16 * place
        return begin, begin + 8

    def seconds(self, sequence: int) -> float | None:
        """Return how long the device worked on a job that is over; None if that was not noted or is forgotten."""
        with self._lock:
            if not 0 < sequence <= self._words[0] or sequence not in self._timed_sequences:
                return None
            first = _TIMES_OFFSET // 8 + 2 * self._timed_sequences.index(sequence)
            return (self._words[first + 1] - self._words[first]) / 1e9

    def detach(self) -> None:
        """Use the memory no more: from now on the answers are those of this moment."""
        with self._lock:
            self._words = (ctypes.c_uint64 * (COMPLETION_NBYTES // 8)).from_buffer_copy(self._words)

    def forked(self) -> None:
        """Answer in a forked child, which has no part of the memory, what was known before."""
        self._lock = threading.Lock()
        self._words = (ctypes.c_uint64 * (COMPLETION_NBYTES // 8))(self._last_read)
        self._timed_sequences = [0] * _NUM_TIMED_JOBS
