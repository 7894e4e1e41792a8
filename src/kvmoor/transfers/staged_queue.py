"""Copies to and from slots that the device cannot reach, by way of a small ring that it can.

    store    device --[device queue]--> ring --[thread]--> slot
    load     slot --[thread]--> ring --[device queue]--> device

What is staged is decided block by block, not job by job. Once a part of an arena could not be registered, most large
jobs have blocks of both kinds, and one block that has to be staged must not slow down all others. Staged blocks are cut
into pieces, of which several are on their way at once, also of different jobs, so that the device and the thread work
at the same time. A job without such blocks, and with no staged job in front, goes straight to the device queue: then
all this costs one lock.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvmoor.devices.device import BlockCopies, CopyQueue, DeviceEvent, Direction
from kvmoor.errors import ClosedError, DeviceError, NoRoomError, RequestError, UnsupportedError
from kvmoor.process_end import register
from kvmoor.transfers.staged_piece import JobPiece, cut_job
from kvmoor.transfers.staging_ring import StagingRing

_log = logging.getLogger("kvmoor")

_PIECE_NBYTES: Final = 4 * 2**20
"""How much is staged in one go, at most, and at most a quarter of the ring, or a block. Guessed: 80 us of a link of
50 GB/s and 0.4 ms of a thread that copies 10 GB/s, so that the launch for each piece (9 us) does not count."""
_STEP_NBYTES: Final = 4 * 2**20
"""How much the thread copies before it looks whether the queue was closed: 0.4 ms."""
_NOT_QUEUED: Final = 0
"""The number on the device queue of a piece that it did not take: over before all others."""
_LOOK_UP_S: Final = 0.01
"""How long the thread waits for the device before it looks for new jobs, or for the end, again."""


class StagedQueue:
    """Run jobs in order on a device queue, and stage the blocks that are not `BlockCopies.reachable`.

    A `CopyQueue`. Takes over `device_queue` and closes it. Borrows `ring`, which has to fit a slot of each group and
    which its owner frees: memory of a device can be given back only when nothing runs on any of its queues.
    `prepare_thread` is called first on the thread that stages. A load may read its slots before its event is done; the
    event orders what it does to the device.
    """

    def __init__(
        self,
        name: str,
        direction: Direction,
        device_queue: CopyQueue,
        ring: StagingRing,
        *,
        prepare_thread: Callable[[], None],
    ) -> None:
        self._name = name
        self._direction = direction
        self._device_queue = device_queue
        self._ring = ring
        self._prepare_thread = prepare_thread
        # The two belong to the thread; `enqueue` uses the number too, but only while the thread has nothing to do.
        self._last_sequence = 0  # on the device queue
        self._on_device: deque[_PieceOnDevice] = deque()  # oldest first
        # Guards all below and announces their changes. Held for bookkeeping only, never while copying or waiting.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._jobs: deque[_Job] = deque()  # those not over, in order
        self._waiting: deque[_Job] = deque()  # of these, those of which the device queue did not get all pieces yet
        self._completed = 0
        self._failures: dict[int, DeviceError] = {}
        self._broken = ""
        self._stopping = False
        self._staged_jobs = self._staged_nbytes = 0
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be closed in a forked child, where the thread does not exist."""
        self._changed = threading.Condition()
        self._thread = None
        self._stopping = True

    @property
    def staged_jobs(self) -> int:
        """Return how many jobs had blocks to stage, with those under way."""
        return self._staged_jobs

    @property
    def staged_nbytes(self) -> int:
        """Return how many bytes went all the way through the ring."""
        return self._staged_nbytes

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        """Queue one job and return at once.

        Raises `ClosedError` after `close` and `RequestError` for an event of another device, with nothing queued; a job
        that is staged fails with such an event. Raises `DeviceError` if the device queue did not take the job, or a
        piece of an earlier one.
        """
        job = _Job(sequence, wait_for, cut_job(copies, min(_PIECE_NBYTES, self._ring.nbytes // 4)))
        is_staged = job.pieces[-1].ring_nbytes > 0
        with self._changed:
            if self._stopping:
                raise ClosedError(f"the queue {self._name} is closed and takes no more jobs: open another one")
            if self._broken:
                raise DeviceError(f"the queue {self._name} is broken: {self._broken}")
            self._retire()
            # Whatever comes behind a job of the thread is a job of the thread, so the last one tells.
            if is_staged or (self._jobs and self._jobs[-1].sequence_on_device is None):
                self._start_thread()
                self._staged_jobs += is_staged
                self._jobs.append(job)
                self._waiting.append(job)
                self._changed.notify_all()
                return
        # Outside the lock, which is right because the thread gets nothing to do before the next call.
        self._last_sequence += 1
        try:
            self._device_queue.enqueue(job.pieces[0].copies, self._last_sequence, wait_for)
        except (ClosedError, RequestError):
            raise  # nothing was queued, so nothing is broken
        except BaseException as error:
            self._break(f"the device queue did not take a job: {error!r}")
            raise
        job.sequence_on_device = job.last_on_device = self._last_sequence
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def completed(self) -> int:
        """Return the number of the last job that is over."""
        with self._changed:
            self._retire()
            return self._completed

    def failure(self, sequence: int) -> DeviceError | None:
        """Return why a job that is over failed, or None. Forgets the answer, so ask once."""
        with self._changed:
            return self._failures.pop(sequence, None)

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        """Block until the job is over or the time has passed; say whether it is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._retire()
                remaining_s = deadline - time.monotonic()
                if self._completed >= sequence or remaining_s <= 0:
                    return self._completed >= sequence
                sequence_on_device = self._jobs[0].sequence_on_device if self._jobs else None
                if sequence_on_device is None:
                    self._changed.wait(remaining_s)
                    continue
            self._device_queue.wait_completed(sequence_on_device, remaining_s)

    def probe(self) -> None:
        """Have the device queue ask its device whether it lives; jobs that are staged are over soon afterwards."""
        self._device_queue.probe()

    def order_after(self, stream: object, sequence: int) -> None:
        """Let what is queued on a stream of the engine's from now on begin after job `sequence` is over on the device.

        See `CopyQueue.order_after`. Raises `UnsupportedError` while the device queue did not get all of a job that is
        staged: its end is no point yet that a stream could wait for.
        """
        with self._changed:
            self._retire()
            if sequence <= self._completed:
                return
            job = next((job for job in self._jobs if job.sequence == sequence), None)
            if job is None:
                raise RequestError(
                    f"job {sequence} was not queued on {self._name}: order a stream after it was submitted"
                )
            if job in self._waiting:
                raise UnsupportedError(
                    f"job {sequence} of {self._name} goes piece by piece through a ring, so no stream can be ordered "
                    "after it yet: wait for it instead"
                )
            last_on_device = job.last_on_device
        self._device_queue.order_after(stream, last_on_device)

    def close(self, timeout_s: float) -> bool:
        """Drop what is not over, the copies that run excepted. Return whether it is proven that none runs any more.

        Then all jobs are over. Ends by the deadline either way; the thread ends after the 4 MiB that it copies.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        self._device_queue.close(0.0)  # so that a thread that waits for a piece, which is dropped now, sees its end
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        device_idle = self._device_queue.close(max(0.0, deadline - time.monotonic()))
        if not device_idle or (thread is not None and thread.is_alive()):
            return False
        with self._changed:
            self._retire()
            while self._jobs:
                dropped = DeviceError("dropped: the queue was closed before the copy was whole")
                self._end(self._jobs.popleft(), dropped)
        return True

    def _retire(self) -> None:
        """Take note of the jobs that are over by now. Called under the lock."""
        while self._jobs:
            job = self._jobs[0]
            if job.sequence_on_device is not None:
                if self._device_queue.completed() < job.sequence_on_device:
                    return
                job.failure = self._device_queue.failure(job.sequence_on_device)
            elif not job.is_over:
                return
            self._end(self._jobs.popleft(), job.failure)

    def _end(self, job: "_Job", failure: DeviceError | None) -> None:
        if failure is not None:
            self._failures[job.sequence] = failure
        self._completed = job.sequence
        self._changed.notify_all()

    def _break(self, reason: str) -> None:
        """Take no more jobs. Those that the device queue did not get whole are not over before `close` proves it."""
        with self._changed:
            self._broken = self._broken or reason

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work_off, name=f"kvmoor-{self._name}-staging", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise DeviceError(
                f"the queue {self._name} needs a thread that stages and none could be started ({error}): "
                "raise the limit on threads of this process"
            ) from error
        self._thread = thread

    # From here on: what the thread does.

    def _work_off(self) -> None:
        """Move pieces until the queue is closed: the whole life of the thread."""
        try:
            self._prepare_thread()
            while self._await_work():
                self._begin_pieces()
                self._end_oldest_piece()
        except BaseException as error:
            _log.exception("staging for the queue %s failed; it takes no more jobs", self._name)
            self._break(f"staging failed: {error!r}")

    def _await_work(self) -> bool:
        """Block until there is something to do; False once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._on_device or (self._waiting and not self._broken))
            return not self._stopping

    def _begin_pieces(self) -> None:
        """Give the device queue as many pieces as there is room for in the ring."""
        while self._waiting and not self._broken:
            job = self._waiting[0]
            while job.pieces and job.failure is None:
                if not self._begin(job, job.pieces[0]):
                    return
            job.pieces.clear()  # a job that failed is not carried on
            with self._changed:
                self._waiting.popleft()
                self._note_if_over(job)

    def _begin(self, job: "_Job", piece: JobPiece) -> bool:
        """Give one piece to the device queue, or fail its job; False if it has to wait, or if nothing begins any more.

        A ring part that was taken in vain stays taken: after that no piece begins any more.
        """
        copies, ring_address = piece.copies, 0
        if piece.ring_nbytes:
            try:
                taken = self._ring.take(piece.ring_nbytes)
            except NoRoomError as error:
                job.failure = DeviceError(f"nothing can be staged: {error}")
                job.failure.__cause__ = error
                return True
            if taken is None:
                return False
            copies, ring_address = piece.placed_at(taken), taken
            if self._direction is Direction.HOST_TO_DEVICE and not self._copy_on_host(piece, ring_address):
                return False
        elif self._direction is Direction.DEVICE_TO_HOST and self._on_device:
            return False  # or the device would write slots before the thread has written those of earlier jobs
        self._last_sequence += 1
        sequence = self._last_sequence
        try:
            self._device_queue.enqueue(copies, sequence, job.wait_for)
        except RequestError as error:
            # Nothing was queued. The part of the ring goes back in its turn, as if of a piece that is over.
            job.failure = DeviceError(f"the device cannot wait for the event of the job: {error}")
            job.failure.__cause__ = error
            sequence = _NOT_QUEUED
        except BaseException as error:
            self._break(f"the device queue did not take a piece of a job: {error!r}")
            return False
        job.wait_for = None  # the pieces behind wait for the first one
        job.pieces.popleft()
        job.num_on_device += 1
        job.last_on_device = sequence
        self._on_device.append(_PieceOnDevice(job, piece, ring_address, sequence))
        return True

    def _end_oldest_piece(self) -> None:
        """Wait a moment for the oldest piece on the device; if it is done there, do what is left to do with it."""
        if not self._on_device:
            return
        oldest = self._on_device[0]
        if not self._device_queue.wait_completed(oldest.sequence, _LOOK_UP_S):
            return
        job = oldest.job
        job.failure = self._device_queue.failure(oldest.sequence) or job.failure
        if oldest.piece.ring_nbytes:
            is_store = self._direction is Direction.DEVICE_TO_HOST
            if is_store and job.failure is None and not self._copy_on_host(oldest.piece, oldest.ring_address):
                return
            self._ring.release_oldest()
        self._on_device.popleft()
        job.num_on_device -= 1
        with self._changed:
            if job.failure is None:
                self._staged_nbytes += oldest.piece.nbytes if oldest.piece.ring_nbytes else 0
            self._note_if_over(job)

    def _note_if_over(self, job: "_Job") -> None:
        if not job.pieces and not job.num_on_device:
            job.is_over = True
            self._changed.notify_all()

    def _copy_on_host(self, piece: JobPiece, ring_address: int) -> bool:
        """Copy between slots and ring; False if the queue was closed before the end."""
        for run in piece.host_runs():
            source, target = run.slot_address, ring_address + run.ring_offset
            if self._direction is Direction.DEVICE_TO_HOST:
                source, target = target, source
            for start in range(0, run.nbytes, _STEP_NBYTES):
                if self._stopping:
                    return False
                # Releases the interpreter lock.
                ctypes.memmove(target + start, source + start, min(_STEP_NBYTES, run.nbytes - start))
        return True


@dataclass(slots=True, eq=False)
class _Job:
    """A job that is not over.

    `sequence_on_device` is its number there if it went straight to the device queue; then it is over when that is.
    `last_on_device` is the number of the last of its pieces there. The other fields tell how far the thread is with it.
    """

    sequence: int
    wait_for: DeviceEvent | None
    pieces: deque[JobPiece]  # those the device queue did not get yet
    sequence_on_device: int | None = None
    last_on_device: int = 0
    num_on_device: int = 0
    failure: DeviceError | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _PieceOnDevice:
    """A piece that the device queue has got, under its own number there."""

    job: _Job
    piece: JobPiece
    ring_address: int
    sequence: int
