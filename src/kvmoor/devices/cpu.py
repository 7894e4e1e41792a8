"""The CPU as a device: engines that compute on the host, and the reference for what every device has to do.

A copy queue is a `CpuStream`: its jobs run in order on a thread of its own, the queues beside each other. A job waits
for its event, copies, and stores its number in the queue's completion word as the very last act. Large jobs are
shared with helper threads. Nothing here is a mock; faults are injected through one hook (`kvmoor.testing`).
"""

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.completion_word import CompletionWord
from kvmoor.devices.cpu_stream import CpuEvent, CpuStream
from kvmoor.devices.device import BlockCopies, DeviceEvent, Direction
from kvmoor.devices.host_copies import GroupCopier
from kvmoor.devices.plain_memory import PlainMemory
from kvmoor.errors import BusyError, ClosedError, DeviceError, LayoutError, RequestError, SettingsError
from kvmoor.process_end import register
from kvmoor.registration import Registrar

_log = logging.getLogger("kvmoor")

_PIECE_NBYTES: Final = 8 * 2**20
"""A job is copied in pieces of about this size and may end between two, 1.2 ms apart at 7 GB/s. Measured: 4 MiB cost
up to a tenth of the speed where boxes are small (host_copies.py)."""
_SHARED_NBYTES: Final = 4 * 2**20
"""Jobs from this size on are shared with the helper threads. Waking one costs about 100 us on an idle core. Measured
with one / two threads, cached: 343 / 418 us for 4 MiB, 645 / 584 for 8 MiB; uncached, copies take about twice that."""
_FOREIGN_EVENT_POLL_S: Final = 0.001
"""How often an event that is not ours is asked: the protocol has no way to wait for it."""
_EXIT_TIMEOUT_S: Final = 5.0
"""How long leaving a ``with`` block waits for copies. Guessed: as long as `Offloader.close`."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """What a `CopyHook` is told: copy `index` (from 0, over all queues of the device) belongs to job `sequence`."""

    queue: str
    direction: Direction
    sequence: int
    index: int
    nbytes: int


class CopyHook(Protocol):
    """Called before each copy, on the thread that copies. What it raises fails the job; while it blocks, the copy does.

    With a hook every block is a copy of its own, whatever could be copied at once: copy k is block k on every layout.
    """

    def __call__(self, copy: HostCopy) -> None:
        """Let the copy go ahead by returning."""


class CpuDevice:
    """Copy between tensors and slots that are both in host memory. A `Device`; owns the queues and streams it opens.

    `copy_threads` is how many threads one queue copies with (None: as many as this process has cores, at most 2).
    `registrar` is None, since a CPU reaches all memory; give one to have it behave like a device that does not.
    There is no thread before a queue or stream has work, and none is left once they are closed.
    """

    def __init__(
        self,
        *,
        copy_threads: int | None = None,
        copy_hook: CopyHook | None = None,
        registrar: Registrar | None = None,
    ) -> None:
        if copy_threads is None:
            copy_threads = min(2, len(os.sched_getaffinity(0)))
        if copy_threads < 1:
            raise SettingsError(f"copy_threads is {copy_threads}: give 1 or more, or None for the default")
        self._copy_threads = copy_threads
        self._copy_hook = copy_hook
        self._registrar = registrar
        self._copy_numbers = itertools.count()
        self._staging = PlainMemory()
        self._queues: list[CpuCopyQueue] = []
        self._streams: list[CpuStream] = []
        self._current_stream: CpuStream | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Return ``"cpu"``."""
        return "cpu"

    @property
    def registrar(self) -> Registrar | None:
        """Return the registrar given, None by default."""
        return self._registrar

    @property
    def numa_node(self) -> None:
        """Return None: the process may run on every node."""

    def check_layout(self, layout: BlockLayout) -> None:
        """Raise `LayoutError` unless the tensors lie in host memory."""
        if not layout.on_host:
            raise LayoutError(
                "the tensors of the layout lie in GPU memory, which CpuDevice cannot reach: "
                "use the device they are on, or pass tensors in host memory"
            )

    def open_copy_queue(self, name: str, direction: Direction) -> "CpuCopyQueue":
        """Open a queue, whose threads are named after it."""
        self._check_open("copy queue")
        if any(queue.name == name for queue in self._queues):
            raise BusyError(f"the CPU device has a queue {name!r} already: give each owner a device of its own")
        queue = CpuCopyQueue(
            name, direction, copy_threads=self._copy_threads, copy_hook=self._copy_hook, copy_numbers=self._copy_numbers
        )
        self._queues.append(queue)
        return queue

    def prepare_thread(self) -> None:
        """Do nothing: there is no graph that a thread could disturb."""

    def allocate_staging(self, nbytes: int) -> int:
        """Return the address of new memory, plain like all other. Raises `NoRoomError` if there is none."""
        self._check_open("piece of staging memory")
        return self._staging.allocate(nbytes)

    def free_staging(self, address: int) -> None:
        """Give memory of `allocate_staging` back; no copy may touch it any more."""
        self._staging.free(address)

    @property
    def staging_nbytes(self) -> int:
        """Return how much staging memory was not given back yet."""
        return self._staging.nbytes

    def open_stream(self, name: str) -> CpuStream:
        """Open a stream for the engine's own work: for engines that compute on a thread beside the one that steps."""
        self._check_open("stream")
        stream = CpuStream(f"kvmoor-{name}")
        self._streams.append(stream)
        return stream

    def use_stream(self, stream: CpuStream | None) -> None:
        """Make `stream` the engine's current one, for `record_event`; None: the engine computes synchronously."""
        self._current_stream = stream

    def record_event(self) -> CpuEvent | None:
        """Mark the present end of the current stream; None without one, or if its work is over by now."""
        if self._current_stream is None:
            return None
        event = self._current_stream.record_event()
        return None if event.is_done() else event

    def close(self, timeout_s: float) -> bool:
        """Close all queues and streams. Return whether every thread has ended; ask again to learn of a late one."""
        self._closed = True
        return _close_together([*self._queues, *self._streams], timeout_s)

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.close(_EXIT_TIMEOUT_S):
            _log.warning("a copy still runs %g s after its CPU device was closed; its thread stays", _EXIT_TIMEOUT_S)

    def _check_open(self, asked: str) -> None:
        if self._closed:
            raise ClosedError(f"a {asked} was asked of a CPU device that is closed: make another device")


class CpuCopyQueue:
    """Copy jobs in order, in one direction. A `CopyQueue`.

    Jobs are queued by one owner; any thread may ask how far they are.
    """

    def __init__(
        self,
        name: str,
        direction: Direction,
        *,
        copy_threads: int,
        copy_hook: CopyHook | None,
        copy_numbers: Iterator[int],
    ) -> None:
        self._name = name
        self._direction = direction
        self._copy_hook = copy_hook
        self._copy_numbers = copy_numbers
        self._stream = CpuStream(f"kvmoor-{name}")
        self._helpers = [CpuStream(f"kvmoor-{name}-helper-{number}") for number in range(1, copy_threads)]
        self._copiers: dict[int, GroupCopier] = {}  # by id of the group, which the copier keeps alive
        self._word = CompletionWord()
        self._last_sequence = 0
        # Guards the two below and announces their changes; the word is written under it, too.
        self._changed = threading.Condition()
        self._failures: dict[int, DeviceError] = {}
        self._stopping = False
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be closed in a forked child, as its streams are."""
        self._changed = threading.Condition()
        self._stopping = True

    @property
    def name(self) -> str:
        """Return the name, which its threads carry too."""
        return self._name

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        """Queue one job and return at once. Raises `ClosedError` after `close`; then nothing of the job will run."""
        self._stream.submit(partial(self._run_job, tuple(copies), sequence, wait_for))
        self._last_sequence = sequence

    def completed(self) -> int:
        """Return the number of the last job that is over."""
        return self._word.read()

    def failure(self, sequence: int) -> DeviceError | None:
        """Return why a job that is over failed, or None. Forgets the answer, so ask once."""
        with self._changed:
            return self._failures.pop(sequence, None)

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        """Block until the job is over or the time has passed; say whether it is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._word.read() >= sequence, timeout_s)

    def probe(self) -> None:
        """Do nothing: while the process lives its threads do, and they end every job themselves."""

    def order_after(self, stream: object, sequence: int) -> None:
        """Let what is queued on a `CpuStream` from now on begin after job `sequence` is over; does not wait itself."""
        if not isinstance(stream, CpuStream):
            raise RequestError(f"{stream!r} is no stream of a CPU device: give one that CpuDevice.open_stream returned")
        if sequence > self._last_sequence:
            raise RequestError(
                f"job {sequence} was not queued on {self._name}, the last one was {self._last_sequence}: "
                "order a stream after it was submitted"
            )
        if self._word.read() < sequence:
            stream.submit(partial(self._await_job, sequence))

    def close(self, timeout_s: float) -> bool:
        """Fail the jobs not begun, end the running one after its present piece. Return whether the threads have ended.

        Jobs behind a copy that never ends are not over either: one number tells of all.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return _close_together([self._stream, *self._helpers], timeout_s)

    def _run_job(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        failure: DeviceError | None = None
        try:
            if wait_for is not None:
                self._await_event(wait_for)
            if self._stopping:
                raise DeviceError("dropped: the queue was closed before the job began")
            self._copy(copies, sequence)
        except DeviceError as error:
            failure = error
        except BaseException as error:  # whatever it was, the thread goes on and the job is over
            failure = DeviceError(f"job {sequence} of the queue {self._name} failed: {error!r}")
            failure.__cause__ = error
        with self._changed:
            if failure is not None:
                self._failures[sequence] = failure
            self._word.advance(sequence)
            self._changed.notify_all()

    def _await_event(self, event: DeviceEvent) -> None:
        """Block until the event is done or the queue stops."""
        poll_s: float | None = _FOREIGN_EVENT_POLL_S
        if isinstance(event, CpuEvent):
            event.when_done(self._wake)
            poll_s = None
        with self._changed:
            while not (self._stopping or event.is_done()):
                self._changed.wait(poll_s)

    def _await_job(self, sequence: int) -> None:
        """Block until a job is over: every job is in the end, also those that a closed queue drops."""
        with self._changed:
            self._changed.wait_for(lambda: self._word.read() >= sequence)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _copy(self, copies: Sequence[BlockCopies], sequence: int) -> None:
        """Copy a whole job, with the helpers if it is large; raises what any thread met, once none copies any more."""
        nbytes = sum(part.group.block_nbytes * len(part.slot_addresses) for part in copies)
        helpers = self._helpers if nbytes >= _SHARED_NBYTES else []
        pieces = deque(self._cut(copies, nbytes // (1 + len(helpers))))
        errors: list[BaseException] = []
        work = partial(self._copy_pieces, pieces, sequence, errors)
        shared = []
        try:
            for helper in helpers[: len(pieces) - 1]:
                try:
                    helper.submit(work)
                except DeviceError as error:  # no thread could start: fewer copy the same pieces
                    _log.warning("a copy goes on with fewer threads: %s", error)
                    break
                shared.append(helper.record_event())
            work()
        finally:
            for event in shared:
                event.wait(None)  # no deadline: while a helper copies the job is not over, however long that takes
        if errors:
            raise errors[0]

    def _cut(self, copies: Sequence[BlockCopies], largest_nbytes: int) -> Iterator["_Piece"]:
        """Cut a job into pieces of whole blocks."""
        for part in copies:
            group = part.group
            if not group.tensors:
                continue
            copier = self._copiers.get(id(group))
            if copier is None:
                copier = self._copiers[id(group)] = GroupCopier(group)
            num_blocks = max(1, min(largest_nbytes, _PIECE_NBYTES) // group.block_nbytes)
            if self._copy_hook is not None:
                num_blocks = 1
            block_ids = part.block_ids.reshape(-1, group.blocks_per_chunk)
            for first in range(0, len(block_ids), num_blocks):
                piece = slice(first, first + num_blocks)
                yield _Piece(copier, block_ids[piece].reshape(-1), part.slot_addresses[piece])

    def _copy_pieces(self, pieces: "deque[_Piece]", sequence: int, errors: list[BaseException]) -> None:
        """Copy pieces until none is left, one failed or the queue stops. Several threads do this to one job."""
        try:
            while pieces and not errors:
                try:
                    piece = pieces.popleft()
                except IndexError:
                    return  # another thread took the last one
                if self._copy_hook is not None and not self._stopping:
                    index = next(self._copy_numbers)
                    self._copy_hook(HostCopy(self._name, self._direction, sequence, index, piece.nbytes))
                if self._stopping:
                    raise DeviceError("ended early: the queue was closed while the job ran")
                piece.copier.copy(self._direction, piece.block_ids, piece.slot_addresses)
        except BaseException as error:
            errors.append(error)


class _Closable(Protocol):
    def close(self, timeout_s: float) -> bool: ...


def _close_together(owned: Sequence[_Closable], timeout_s: float) -> bool:
    """Ask all to end, then give them the time together. Return whether all have ended."""
    deadline = time.monotonic() + timeout_s
    for each in owned:
        each.close(0.0)
    ended = [each.close(deadline - time.monotonic()) for each in owned]
    return all(ended)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Blocks of one job that are copied in one go."""

    copier: GroupCopier
    block_ids: NDArray[np.int64]
    slot_addresses: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Return how many bytes are copied."""
        return self.copier.group.block_nbytes * len(self.slot_addresses)
