"""In-order work on a thread of its own: what a stream is on a CPU."""

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvmoor.errors import ClosedError, DeviceError
from kvmoor.process_end import register

_log = logging.getLogger("kvmoor")

_EXIT_TIMEOUT_S: Final = 5.0
"""How long leaving a ``with`` block waits for work that is still queued. Guessed: as long as `Offloader.close`."""


class CpuStream:
    """Run callables one after the other, in the order of `submit`, on one daemon thread.

    The thread starts with the first work and ends with `close`. Work that raises is logged and counts as over; the work
    behind it runs all the same. Any thread may submit, record and close.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        # The thread holds the progress, not the stream: a stream that its owner forgot can be collected, and warns.
        self._progress = _Progress()

    @property
    def name(self) -> str:
        """Return the name, which the thread carries too."""
        return self._name

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work` and return at once. Raises `ClosedError` after `close`, `DeviceError` if no thread can start."""
        progress = self._progress
        with progress.changed:
            if progress.closed:
                raise ClosedError(f"the stream {self._name} is closed and takes no more work: open another one")
            if self._thread is None:
                self._thread = self._start_thread()
            progress.queued.append(work)
            progress.num_submitted += 1
            progress.changed.notify_all()

    def record_event(self) -> "CpuEvent":
        """Mark the present end of the work: the event is done once all work submitted so far is over."""
        with self._progress.changed:
            return CpuEvent(self._progress, self._progress.num_submitted)

    def close(self, timeout_s: float) -> bool:
        """Refuse more work and let the thread end after what is queued. Return whether it has ended.

        Ends by the deadline either way; the thread then still works off the rest, and may be asked for again.
        """
        with self._progress.changed:
            self._progress.closed = True
            self._progress.changed.notify_all()
            thread = self._thread
        if thread is None:
            return True
        if thread is threading.current_thread():
            return False  # asked by the stream's own work, which therefore still runs
        thread.join(max(0.0, timeout_s))
        return not thread.is_alive()

    def latch(self) -> "StreamLatch":
        """Queue work that ends only when the latch is released: what follows waits. To prove an order, not to hope."""
        latch = StreamLatch()
        self.submit(latch.hold)
        return latch

    @property
    def closed(self) -> bool:
        """Say whether `close` was called; work queued before that may still run."""
        return self._progress.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.close(_EXIT_TIMEOUT_S):
            _log.warning("the stream %s still works %g s after close(); its thread stays", self._name, _EXIT_TIMEOUT_S)

    def __del__(self) -> None:
        if self._thread is not None and not self._progress.closed:
            message = f"the stream {self._name} was never closed; its thread stays"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._progress.work_off, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise DeviceError(
                f"the stream {self._name} needs a thread and none could be started ({error}): "
                "raise the limit on threads of this process"
            ) from error
        return thread


class CpuEvent:
    """A point in the work of a `CpuStream`; any thread may ask."""

    def __init__(self, progress: "_Progress", num_before: int) -> None:
        self._progress = progress
        self._num_before = num_before

    def is_done(self) -> bool:
        """Say whether all work before the point is over. Reads one number; never blocks."""
        return self._progress.num_finished >= self._num_before

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the event is done or the time has passed; say whether it is done. None: as long as it takes."""
        with self._progress.changed:
            return self._progress.changed.wait_for(self.is_done, timeout_s)

    def when_done(self, wake: Callable[[], None]) -> None:
        """Call `wake` once the event is done: on the stream's thread, or here and now if it is done already."""
        with self._progress.changed:
            if not self.is_done():
                self._progress.wakes.append((self._num_before, wake))
                return
        wake()


class StreamLatch:
    """Hold a stream until it is released, at the latest by leaving the ``with`` block."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def hold(self) -> None:
        """Block the calling thread until the latch is released: the work that `CpuStream.latch` queues."""
        self._released.wait()

    def release(self) -> None:
        """Let the stream go on. May be called again."""
        self._released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class _Progress:
    """What a stream, its thread and its events share.

    `changed` guards all fields. `num_finished` and `closed` may be read without it: they change only once, in one step.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queued: deque[Callable[[], None]] = deque()
        self.wakes: list[tuple[int, Callable[[], None]]] = []
        self.num_submitted = 0
        self.num_finished = 0
        self.closed = False
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be closed in a forked child, where the thread does not exist and what was queued is never done."""
        self.changed = threading.Condition()
        self.queued.clear()
        self.wakes = []
        self.closed = True

    def work_off(self) -> None:
        """Run what is queued until the stream is closed and nothing is left: the whole life of the thread."""
        while (work := self._next_work()) is not None:
            try:
                work()
            except BaseException:
                _log.exception("work of the stream %s failed; the stream goes on", threading.current_thread().name)
            del work  # an idle stream must not keep alive what its last work held
            self._finish_one()

    def _next_work(self) -> Callable[[], None] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.queued or self.closed)
            return self.queued.popleft() if self.queued else None

    def _finish_one(self) -> None:
        with self.changed:
            self.num_finished += 1
            due = [wake for num_before, wake in self.wakes if num_before <= self.num_finished]
            self.wakes = [entry for entry in self.wakes if entry[0] > self.num_finished]
            self.changed.notify_all()
        for wake in due:
            wake()
