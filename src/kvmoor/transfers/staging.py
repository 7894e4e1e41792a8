"""What a worker needs to copy to and from slots that its device does not reach: a staged queue and a ring a lane."""

from contextlib import ExitStack
from typing import Final

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.device import CopyQueue, Device, Direction
from kvmoor.transfers.staged_queue import StagedQueue
from kvmoor.transfers.staging_ring import StagingRing

STAGING_NBYTES: Final = 32 * 2**20
"""How much staging memory each direction may take: eight of the largest pieces, so that the device and the thread that
fills or empties them do not wait for each other. Guessed."""


class Staging:
    """Own the rings of a worker's lanes.

    Without a `Device.registrar` the device reaches all slots, and there are none. Each lane has a ring of its own, so
    that no lane waits for the ring of another. Memory is taken when the first block is staged. Any thread may ask for
    the numbers; the rest belongs to the worker.
    """

    def __init__(self, device: Device, layout: BlockLayout) -> None:
        self._device = device
        self._layout = layout
        self._queues: list[StagedQueue] = []
        self._rings: list[StagingRing] = []

    def wrap(self, queue: CopyQueue, name: str, direction: Direction, nbytes: int) -> CopyQueue:
        """Return a queue that stages through up to `nbytes`, or through one slot of the largest group if that is more.

        It takes over `queue` and closes it.
        """
        if self._device.registrar is None:
            return queue
        ring = StagingRing(self._device, max(nbytes, *(group.slot_nbytes for group in self._layout.groups)))
        staged = StagedQueue(name, direction, queue, ring, prepare_thread=self._device.prepare_thread)
        self._rings.append(ring)
        self._queues.append(staged)
        return staged

    @property
    def staged_jobs(self) -> int:
        """Return how many jobs had blocks to stage, with those under way."""
        return sum(queue.staged_jobs for queue in self._queues)

    @property
    def staged_nbytes(self) -> int:
        """Return how many bytes went all the way through a ring."""
        return sum(queue.staged_nbytes for queue in self._queues)

    @property
    def ring_nbytes(self) -> int:
        """Return how much host memory the rings take now."""
        return sum(ring.allocated_nbytes for ring in self._rings)

    def close(self, _timeout_s: float = 0.0) -> bool:
        """Free the rings and return True. Caller: `Device.close` has proven that nothing runs any more."""
        with ExitStack() as rings:  # the others are freed even if one cannot be
            for ring in self._rings:
                rings.callback(ring.close)
        return True
