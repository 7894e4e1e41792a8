"""An in-order queue of copies on a stream of its own, whose progress is a number in host memory.

    OPEN --> BROKEN      a job could not be queued whole, or the device failed: no more jobs
      `--------'-----> CLOSING --> CLOSED      proven: nothing of the queue runs or will run

A job is: wait for its event; long runs by the copy engine; the rest by the page kernel, whose last thread block stores
the job's number, or else a write of the stream does. Nothing of it refers to the caller's descriptors afterwards. Jobs
are over in order, and what is queued on a stream cannot be taken back: `close` waits for it, with a deadline.

What the number cannot tell, a query of the stream does (`probe`): whether a job takes long or the device is dead, and
whether a job that was queued in part is over. A context that failed runs nothing any more and accesses no memory, so
then every job is over, and failed.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvmoor.block_layout import GroupLayout
from kvmoor.devices.cuda.completion import CompletionMemory
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.gathering import GatheringSubmission
from kvmoor.devices.cuda.job_submission import JobSubmission
from kvmoor.devices.cuda.streams import CudaEvent, EventPool, engine_stream_handle
from kvmoor.devices.device import BlockCopies, DeviceEvent
from kvmoor.errors import ClosedError, DeviceError, RequestError
from kvmoor.process_end import register

_SPIN_S: Final = 50e-6
"""How long a waiting thread looks again at once: what a small job takes (25 us on an H200)."""
_SHORTEST_SLEEP_S: Final = 20e-6
_LONGEST_SLEEP_S: Final = 1e-3
_PROBE_EVERY_S: Final = 0.1
"""How often waiting threads ask the device whether it still lives, at most. A question takes 2 us. Guessed."""


class CudaCopyQueue:
    """Copy jobs in order, in one direction. A `CopyQueue`.

    Jobs are queued by one owner; any thread may ask how far they are, wait, and close.
    """

    def __init__(
        self,
        name: str,
        context: CudaContext,
        stream: int,
        completion: CompletionMemory,
        submission: JobSubmission | GatheringSubmission,
        events: EventPool,
    ) -> None:
        """Take over a new stream and what queues jobs on it. All of it lives until the device gives it back."""
        self._name = name
        self._context = context
        self._driver = context.driver
        self._stream = stream
        self._completion = completion
        self._submission = submission
        self._events = events
        # Held while anything is queued on the stream, which may take a while if it is full, and by who probes it.
        self._lock = threading.Lock()
        # Guards the fields below it. Held for bookkeeping only, never while calling the driver.
        self._state = threading.Lock()
        self._unfinished: deque[int] = deque()  # jobs that the completion word may not have reached yet, in order
        self._failures: dict[int, DeviceError] = {}
        self._last_sequence = 0
        self._over = 0  # all jobs up to this one are over, whatever the completion word says
        self._broken = ""
        self._closing = False  # written once; read without the lock
        self._proven = False
        self._inherited = False
        self._probe_at = 0.0  # when a waiting thread may ask the device next; several may set it, which does no harm
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be closed in a forked child, where nothing of CUDA works and the page-locked memory is not mapped."""
        self._lock = threading.Lock()
        self._state = threading.Lock()
        self._completion.forked()
        self._closing = self._inherited = True

    @property
    def name(self) -> str:
        """Return what the queue is for."""
        return self._name

    @property
    def stream(self) -> int:
        """Return the driver's handle of the stream."""
        return self._stream

    @property
    def broken(self) -> str:
        """Return why the queue takes no more jobs although it is open, or an empty string."""
        return self._broken or ("" if self._inherited else self._driver.broken)

    def prepare(self, group: GroupLayout) -> None:
        """Do beforehand what the first copy of a group would do. Raises `DeviceError`, and `LayoutError`."""
        with self._lock:
            self._check_open()
            with self._context.relaxed():
                self._submission.prepare(group)

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        """Queue one job and return; takes some 10 us, and more for each 1,000s of blocks.

        `wait_for` has to be an event of this device (`CudaDevice.record_event`), or done. Raises `ClosedError`, and
        `RequestError` for another event, with nothing queued; `DeviceError` if the queue is or becomes broken, among
        other reasons because 500 launches and copies are queued and the device does not get on.
        """
        with self._lock:
            self._check_open()
            if self.broken:
                raise DeviceError(f"the queue {self._name} is broken: {self.broken}")
            assert sequence > self._last_sequence, (sequence, self._last_sequence)
            event = _own_event(wait_for)
            with self._state:
                completed = self._completed()
                while self._unfinished and self._unfinished[0] <= completed:
                    self._unfinished.popleft()
                self._unfinished.append(sequence)
                self._last_sequence = sequence
            try:
                with self._context.relaxed():
                    self._submission.submit(copies, sequence, event, is_given_up=lambda: self._closing)
            except BaseException as error:
                reason = f"job {sequence} could not be queued whole: {error}"
                self._broken = self._broken or reason
                if not isinstance(error, Exception):
                    raise
                raise DeviceError(f"the queue {self._name} is broken: {reason}") from error

    def completed(self) -> int:
        """Return the number of the last job that is over. Reads memory; calls no driver."""
        with self._state:
            return self._completed()

    def failure(self, sequence: int) -> DeviceError | None:
        """Return why a job that is over failed, or None. Forgets the answer, so ask once."""
        with self._state:
            return self._failures.pop(sequence, None)

    def seconds(self, sequence: int) -> float | None:
        """Return how long the page kernel worked on a job that is over, by the clock of the GPU.

        None for a job that the copy engine did alone, and for all but the latest 64.
        """
        return self._completion.seconds(sequence)

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        """Block until the job is over or the time has passed; say whether it is over.

        Whoever waits for longer than 0.1 s learns of a dead device: then the job is over, and failed.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        sleep_s = _SHORTEST_SLEEP_S
        while self.completed() < sequence:
            now = time.monotonic()
            if timeout_s > 0 and now >= max(started + _SPIN_S, self._probe_at):
                self._probe_at = now + _PROBE_EVERY_S
                self.probe()
            elif self._inherited or now >= deadline:
                return False
            elif now >= started + _SPIN_S:
                time.sleep(min(sleep_s, deadline - now))
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return True

    def probe(self) -> None:
        """Ask the device whether the queue still gets on, which the completion word cannot tell once it is dead.

        Ends all jobs as failed if the device failed, and those queued in part once they are over. Never blocks, and
        harms no capture; costs a call of the driver. Any thread may call.
        """
        if self._inherited or not self._lock.acquire(blocking=False):
            return  # who holds the lock is queueing a job, or asks as well
        try:
            self._probe()
        finally:
            self._lock.release()

    def order_after(self, stream: object, sequence: int) -> None:
        """Let what is queued on a stream of the engine's from now on begin after job `sequence`.

        Does not wait for the device. For kernels that use the blocks of a load without having seen its completion.
        `stream` is a handle, or an object with `__cuda_stream__` or `cuda_stream`. Jobs queued behind that one are
        waited for as well. Raises `RequestError` for a job that was not queued, and `DeviceError` if the queue is
        broken, or while the stream captures a graph; then the stream waits for nothing.
        """
        handle = engine_stream_handle(stream)
        with self._lock:
            if sequence > self._last_sequence:
                raise RequestError(
                    f"job {sequence} was not queued on {self._name}, the last one was {self._last_sequence}: order a "
                    "stream after it was submitted"
                )
            if self.completed() >= sequence:
                return
            if self.broken:
                raise DeviceError(f"no stream can be ordered after job {sequence} of {self._name}: {self.broken}")
            with self._context.relaxed():
                if self._driver.stream_is_capturing(handle):
                    raise DeviceError(
                        f"the stream {handle:#x} is capturing a graph, which cannot wait for a copy outside of it: "
                        "order it before the capture begins, or replay the graph on a stream that is ordered"
                    )
                for stream_of_ours in self._submission.streams:
                    self._events.record(stream_of_ours).order_before(handle)

    def close(self, timeout_s: float) -> bool:
        """Refuse more jobs and wait for those queued; return whether it is proven that nothing runs any more.

        Ends by the deadline either way, and makes no call that could block. May be called again, to ask once more.
        """
        deadline = time.monotonic() + timeout_s
        self._closing = True
        if self._inherited or self._proven:
            return True
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            return False  # a job is being queued, in the driver
        try:
            sleep_s = _SHORTEST_SLEEP_S
            while not self._is_proven():
                now = time.monotonic()
                if now >= deadline:
                    return False
                time.sleep(min(sleep_s, deadline - now))
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            self._proven = True
            return True
        finally:
            self._lock.release()

    def detach(self) -> None:
        """Give up memory and events that the device is about to give back. Caller: `close` returned True."""
        assert self._proven or self._inherited
        self._completion.detach()
        with self._lock, suppress(DeviceError), self._context.relaxed():
            self._submission.close()

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError(f"the queue {self._name} is closed and takes no more jobs: open another one")

    def _completed(self) -> int:
        return max(self._completion.read(), self._over)

    def _is_proven(self) -> bool:
        """Say whether all jobs are over. Called under the lock."""
        if self._completed() < self._last_sequence:
            self._probe()
        return self._completed() >= self._last_sequence

    def _probe(self) -> None:
        """Do what `probe` says. Called under the lock, so that nothing is queued meanwhile."""
        try:
            with self._context.relaxed():
                is_idle = all(map(self._driver.stream_query, self._submission.streams))
        except DeviceError:
            is_idle = False  # if this is not the end of the device, nothing is known
        if self._driver.broken:
            self._end_all(f"the device failed: {self._driver.broken}")
        elif is_idle:
            self._end_all(self._broken or "the device came to its end without saying so")

    def _end_all(self, reason: str) -> None:
        """Take all jobs as over; those that the completion word has not reached failed.

        The word does not change any more, since nothing that could write it runs.
        """
        with self._state:
            completed = self._completed()
            self._broken = self._broken or (reason if completed < self._last_sequence else "")
            for sequence in self._unfinished:
                if sequence > completed:
                    self._failures[sequence] = DeviceError(f"job {sequence} of {self._name} is not whole: {reason}")
            self._unfinished.clear()
            self._over = self._last_sequence


def _own_event(event: DeviceEvent | None) -> CudaEvent | None:
    if event is None or isinstance(event, CudaEvent):
        return event
    if event.is_done():
        return None
    raise RequestError(
        f"wait_for is a {type(event).__name__}, which a stream of this device cannot wait for: pass what "
        "CudaDevice.record_event returns"
    )
