"""What kvmoor asks of a device: in-order queues of copies whose progress is a number in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import BlockLayout, GroupLayout
from kvmoor.errors import DeviceError
from kvmoor.registration import Registrar


class Direction(Enum):
    """Say which side of a copy is the device."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Pair blocks of one group with the slots they are copied to or from. Already checked; a device trusts it.

    `block_ids`: int64 ``[num_blocks * group.blocks_per_chunk]``, device blocks in the order of the blocks.
    `slot_addresses`: int64 ``[num_blocks]``, where each block's slot begins in host memory.
    `reachable`: bool ``[num_blocks]``, which of these slots the device reaches itself; None: all. For those who stage
    the others: a device's own queue gets reachable slots only.
    """

    group: GroupLayout
    block_ids: NDArray[np.int64]
    slot_addresses: NDArray[np.int64]
    reachable: NDArray[np.bool_] | None = None


@runtime_checkable
class DeviceEvent(Protocol):
    """A point in the work of the engine's stream."""

    def is_done(self) -> bool:
        """Say whether all work before the point is over. Never blocks."""


class CopyQueue(Protocol):
    """An in-order queue of copies in one direction.

    Caller: gives each job a sequence number above all earlier ones, and keeps the memory of both sides mapped until
    the job is over. Implementer: after the last byte of a job is where it should be, writes its number to the
    completion word (one 64-bit word on a cache line of its own, never reused); a job is over when
    ``completed() >= sequence``.
    """

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        """Queue one job and return at once; it touches device blocks after `wait_for` and every earlier job.

        Raises `ClosedError` after `close`, with nothing queued, and `DeviceError` if the job could not be queued whole:
        how much of it will run is then unknown.
        """

    def completed(self) -> int:
        """Return the completion word: every job up to this number is over. Reads memory only; any thread may call."""

    def failure(self, sequence: int) -> DeviceError | None:
        """Return why a job that is over failed, or None. Forgets the answer, so ask once."""

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        """Block until the job is over or the time has passed; say whether it is over."""

    def probe(self) -> None:
        """Ask the device whether it lives, which the completion word cannot tell: the jobs of a dead one are over.

        Never blocks and raises nothing, but may cost a call of the driver. Any thread may call.
        """

    def order_after(self, stream: object, sequence: int) -> None:
        """Let what is queued on a stream of the engine's from now on begin after job `sequence` is over.

        Does not wait itself. Raises `RequestError` for what is no stream and for a job that was not queued,
        `DeviceError` if the queue is broken, and `UnsupportedError` where the end of the job is no point that a stream
        could wait for; then the stream waits for nothing.
        """

    def close(self, timeout_s: float) -> bool:
        """End the queue: copies not begun are dropped. Return whether it is proven that none runs any more.

        Ends by the deadline either way. May be called again, to ask once more.
        """


class Device(Protocol):
    """What the engine computes on. It has one owner, which calls its methods from one thread at a time."""

    @property
    def name(self) -> str:
        """Return what the device is, for people: ``"cpu"``, ``"NVIDIA H200"``."""

    @property
    def registrar(self) -> Registrar | None:
        """Return what makes host memory reachable for copies; None if they reach plain memory as well.

        It works until the memory it registered is given back, which is after `close`.
        """

    @property
    def numa_node(self) -> int | None:
        """Return the NUMA node that the device is attached to; None if there is none, or it is not known."""

    def check_layout(self, layout: BlockLayout) -> None:
        """Raise `LayoutError` for a layout whose tensors this device cannot reach."""

    def open_copy_queue(self, name: str, direction: Direction) -> CopyQueue:
        """Open a queue. The caller closes it before the device."""

    def prepare_thread(self) -> None:
        """Make the calling thread harmless to whoever captures a graph.

        Called first on every thread of kvmoor's that uses `allocate_staging` or a queue, on several at a time.
        """

    def allocate_staging(self, nbytes: int) -> int:
        """Return the address, on a 4 KiB boundary, of new host memory that copies reach without being registered.

        Any thread may call. The memory belongs to the caller and is not freed by `close` nor by being forgotten.
        Raises `NoRoomError`, and `ClosedError` after `close`.
        """

    def free_staging(self, address: int) -> None:
        """Give staging memory back, also after `close`.

        Caller: nothing runs on the device any more, since this may block behind it; `close` can prove that.
        """

    def record_event(self) -> DeviceEvent | None:
        """Mark the present end of the engine's current stream; None if all its work is over by the time of the call."""

    def close(self, timeout_s: float) -> bool:
        """Give back what the device holds. Return whether everything is proven over; closes twice without harm."""
