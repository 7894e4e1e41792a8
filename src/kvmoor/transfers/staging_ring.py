"""Staging memory in the order in which copies pass through it."""

import warnings
from collections import deque
from types import TracebackType
from typing import Self

from kvmoor.devices.device import Device
from kvmoor.errors import ClosedError


class StagingRing:
    """Hand out parts of one piece of staging memory; what was taken first is released first.

        | free | oldest | ... | newest | free |        a part never wraps: if it does not fit behind the newest,
                                                       it begins at the front, and the rest counts as its own

    The memory is allocated when it is first needed, so that who never stages never pays. One thread takes and releases;
    any thread may ask for the numbers. Not freed by being forgotten: a copy may still touch it.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._base = 0
        self._closed = False
        self._end = 0  # where the newest part ends
        self._taken: deque[int] = deque()  # bytes of each part, with what was skipped before it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._base:
            message = f"a staging ring of {self._nbytes} bytes was never closed: its memory stays allocated"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    @property
    def nbytes(self) -> int:
        """Return how much fits, whether allocated yet or not."""
        return self._nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Return how much memory the ring holds now: nothing before its first use and after `close`."""
        return self._nbytes if self._base else 0

    @property
    def free_nbytes(self) -> int:
        """Return how much is not taken."""
        return self._nbytes - sum(self._taken.copy())

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    def take(self, nbytes: int) -> int | None:
        """Return the address of a free part, or None if there is none until another one is released.

        At most `nbytes` of the ring may be asked for, which fit once all is released. Raises `ClosedError` after
        `close`, and `NoRoomError` if the memory cannot be allocated; then nothing is taken.
        """
        assert 0 < nbytes <= self._nbytes, f"{nbytes} bytes do not fit into a ring of {self._nbytes}"
        if self._closed:
            raise ClosedError("the staging ring is closed: its device is no longer used")
        if not self._base:
            self._base = self._device.allocate_staging(self._nbytes)
        if not self._taken:
            self._end = 0
        skipped = self._nbytes - self._end if self._end + nbytes > self._nbytes else 0
        if skipped + nbytes > self.free_nbytes:
            return None
        start = 0 if skipped else self._end % self._nbytes
        self._taken.append(skipped + nbytes)
        self._end = start + nbytes
        return self._base + start

    def release_oldest(self) -> None:
        """Give back the part that was taken first."""
        self._taken.popleft()

    def close(self) -> None:
        """Free the memory, with whatever is still taken. Caller: no copy runs on the device any more."""
        self._closed = True
        if self._base:
            self._device.free_staging(self._base)
            self._base = 0
