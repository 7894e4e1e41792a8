"""How much is queued on a stream, kept below what a driver takes without waiting.

A driver's queue has room for about 1,000 launches a stream (NVIDIA driver 580; not documented). A call that finds it
full waits for the device inside the driver, and so for ever if the stream hangs. So what is queued is counted, and who
would overfill the queue waits here: with a deadline, and with an eye on whether the device gets on at all.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvmoor.devices.cuda.driver import Driver
from kvmoor.errors import DeviceError

MAX_QUEUED: Final = 512
"""How many launches and single copies may be queued: half of what fits, since waits and writes take room as well."""
COPIES_A_PLACE: Final = 4
"""How many copies of one batch call take the place of a launch, so that 2,048 may be queued. A call with 4,096 copies
of 256 KiB returns after 2 ms of the 22 ms that they take: nearly all of them were queued then (H200, driver 580)."""
_MARK_EVERY: Final = 128
"""After how many launches and copies of one job an event is recorded to see how far it has come."""
STALL_TIMEOUT_S: Final = 2.0
"""How long a full queue may stand still before a job is refused: longer than the steps of an engine. Guessed."""
_POLL_S: Final = 0.0002


class _Mark(NamedTuple):
    """What is over once the job `sequence` is, or the event is reached: `num_queued` launches and copies."""

    num_queued: int
    sequence: int = 0
    event: int = 0


class StreamBacklog:
    """Count what is queued on one stream. One thread at a time, with the context current and capture-relaxed.

    `completed` tells which of the jobs is over last.
    """

    def __init__(self, driver: Driver, stream: int, completed: Callable[[], int]) -> None:
        self._driver = driver
        self._stream = stream
        self._completed = completed
        self._marks: deque[_Mark] = deque()
        self._num_marked = 0
        self._num_unmarked = 0  # queued since the last mark

    @property
    def num_queued(self) -> int:
        """Return how much may be queued by now."""
        return self._num_marked + self._num_unmarked

    def make_room(self, num: int, is_given_up: Callable[[], bool]) -> None:
        """Return once `num` more can be queued without waiting.

        Raises `DeviceError` if the device does not get on for `STALL_TIMEOUT_S`, or as soon as `is_given_up`.
        """
        if self._num_marked + self._num_unmarked + num <= MAX_QUEUED:
            return
        stalled_at = time.monotonic() + STALL_TIMEOUT_S
        while self.num_queued + num > MAX_QUEUED and self._marks:
            if self._retire():
                stalled_at = time.monotonic() + STALL_TIMEOUT_S
                continue
            if is_given_up():
                raise DeviceError("the queue was closed while a job waited for room on its stream")
            if time.monotonic() > stalled_at:
                raise DeviceError(
                    f"{self.num_queued} launches and copies are queued on a stream that did not get on for "
                    f"{STALL_TIMEOUT_S:g} s: the device hangs, or waits for an event that does not come"
                )
            time.sleep(_POLL_S)

    def count(self, num: int) -> None:
        """Take note of launches or copies that were queued: how many places they take, see `COPIES_A_PLACE`."""
        self._num_unmarked += num
        if self._num_unmarked >= _MARK_EVERY:
            event = self._driver.event_create()
            try:
                self._driver.event_record(event, self._stream)
            except BaseException:
                self._driver.event_destroy(event)
                raise
            self._mark(event=event)

    def end_job(self, sequence: int) -> None:
        """Take note that a job is queued whole: once its number is in the completion word, all so far is over."""
        self._mark(sequence=sequence)

    def close(self) -> None:
        """Give the events back."""
        while self._marks:
            self._forget(self._marks.popleft())

    def _mark(self, *, sequence: int = 0, event: int = 0) -> None:
        self._marks.append(_Mark(self._num_unmarked, sequence, event))
        self._num_marked += self._num_unmarked
        self._num_unmarked = 0

    def _retire(self) -> bool:
        """Forget what is over; return whether anything was."""
        completed = self._completed()
        num_over = 0
        for number, mark in enumerate(self._marks, start=1):
            if mark.sequence > completed:
                break
            if mark.sequence:
                num_over = number  # and with it all before it, whatever their events would say
        while num_over < len(self._marks):
            event = self._marks[num_over].event
            if not (event and self._driver.event_query(event)):
                break
            num_over += 1
        for _ in range(num_over):
            mark = self._marks.popleft()
            self._num_marked -= mark.num_queued
            self._forget(mark)
        return num_over > 0

    def _forget(self, mark: _Mark) -> None:
        if mark.event:
            self._driver.event_destroy(mark.event)
