"""Staged queues over a CPU device, with all memory around them, and a watch over what the device is given."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import SLOT_ALIGNMENT, GroupLayout, TensorPages
from kvmoor.devices.cpu import CopyHook, CpuDevice
from kvmoor.devices.device import BlockCopies, CopyQueue, DeviceEvent, Direction
from kvmoor.transfers.staged_queue import StagedQueue
from kvmoor.transfers.staging_ring import StagingRing

WAIT_S = 20.0
GUARD = 0xA5
"""What slots hold before anything is stored, padding included."""


@dataclass(frozen=True)
class Geometry:
    """One group: the page sizes of its tensors."""

    page_nbytes: tuple[int, ...]
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class Blocks:
    """What a job does with one group: `device_blocks[i]` are the device blocks of the block in `slots[i]`."""

    group: int
    slots: Sequence[int]
    device_blocks: Sequence[Sequence[int]]


class WatchedQueue:
    """Pass everything on to a device queue; take note of the jobs and of what they reach. `refuse_at`: see enqueue."""

    def __init__(self, queue: CopyQueue) -> None:
        self.queue = queue
        self.given: list[tuple[BlockCopies, ...]] = []
        self.refuse_at: dict[int, BaseException] = {}
        self.probes = 0
        self._changed = threading.Condition()  # announces additions to `given`

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        """Raise instead, if this is the number of a job (counted from 0) to refuse."""
        if (error := self.refuse_at.get(len(self.given))) is not None:
            raise error
        self.queue.enqueue(copies, sequence, wait_for)
        with self._changed:
            self.given.append(tuple(copies))
            self._changed.notify_all()

    def wait_given(self, num_jobs: int, timeout_s: float) -> bool:
        """Block until the device queue has taken so many jobs or the time has passed; say whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.given) >= num_jobs, timeout_s)

    def completed(self) -> int:
        return self.queue.completed()

    def failure(self, sequence: int) -> Exception | None:
        return self.queue.failure(sequence)

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        return self.queue.wait_completed(sequence, timeout_s)

    def probe(self) -> None:
        self.probes += 1
        self.queue.probe()

    def order_after(self, stream: object, sequence: int) -> None:
        self.queue.order_after(stream, sequence)

    def close(self, timeout_s: float) -> bool:
        return self.queue.close(timeout_s)


class StagingRig:
    """Tensors, slots, a CPU device and a staged queue each way; leaving it closes all and frees the rings."""

    def __init__(
        self,
        geometries: Sequence[Geometry],
        *,
        num_slots: int = 8,
        num_device_blocks: int = 16,
        ring_slots: int = 2,
        copy_hook: CopyHook | None = None,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        self.num_slots = num_slots
        self.tensors = [
            [random.integers(0, 256, (num_device_blocks, nbytes), np.uint8) for nbytes in geometry.page_nbytes]
            for geometry in geometries
        ]
        self.groups = [
            GroupLayout(
                tuple(TensorPages(t.ctypes.data, num_device_blocks, t.shape[1], t.shape[1]) for t in tensors),
                geometry.blocks_per_chunk,
                geometry.blocks_per_chunk,
            )
            for geometry, tensors in zip(geometries, self.tensors, strict=True)
        ]
        self.slots = [_aligned_rows(num_slots, group.slot_nbytes) for group in self.groups]
        self.reachable = [np.zeros(num_slots, np.bool_) for _ in self.groups]
        self.device = CpuDevice(copy_hook=copy_hook)
        ring_nbytes = ring_slots * max(group.slot_nbytes for group in self.groups)
        self.rings = {direction: StagingRing(self.device, ring_nbytes) for direction in Direction}
        self.watched: dict[Direction, WatchedQueue] = {}
        self.queues: dict[Direction, StagedQueue] = {}
        self.prepared: list[str] = []
        for direction, name in ((Direction.DEVICE_TO_HOST, "store"), (Direction.HOST_TO_DEVICE, "load")):
            self.watched[direction] = WatchedQueue(self.device.open_copy_queue(name, direction))
            self.queues[direction] = StagedQueue(
                name,
                direction,
                self.watched[direction],
                self.rings[direction],
                prepare_thread=lambda name=name: self.prepared.append(name),
            )

    @property
    def store(self) -> StagedQueue:
        return self.queues[Direction.DEVICE_TO_HOST]

    @property
    def load(self) -> StagedQueue:
        return self.queues[Direction.HOST_TO_DEVICE]

    def copies(self, *parts: Blocks) -> list[BlockCopies]:
        """Describe a job, with the reachable slots as they are marked now."""
        return [
            BlockCopies(
                self.groups[part.group],
                np.array(part.device_blocks, np.int64).reshape(-1),
                self.slots[part.group].ctypes.data
                + np.array(part.slots, np.int64) * self.groups[part.group].slot_nbytes,
                self.reachable[part.group][list(part.slots)],
            )
            for part in parts
        ]

    def page_bytes(self, part: Blocks, position: int) -> NDArray[np.uint8]:
        """Return what a slot has to hold once block `position` of a part is stored: its pages in slot order."""
        ids = list(part.device_blocks[position])
        return np.concatenate([tensor[ids].reshape(-1) for tensor in self.tensors[part.group]])

    def fill_slots(self, seed: int = 1) -> None:
        """Write random bytes into all slots, padding included."""
        random = np.random.default_rng(seed)
        for rows in self.slots:
            rows[:] = random.integers(0, 256, rows.shape, np.uint8)

    def assert_device_got_only_what_it_reaches(self) -> None:
        """Check every address that a device queue was given: in the ring, or a slot that is reachable."""
        for direction, watched in self.watched.items():
            base = self.rings[direction]._base
            for part in (part for job in watched.given for part in job):
                (group,) = (number for number, group in enumerate(self.groups) if group is part.group)
                for address in part.slot_addresses.tolist():
                    in_ring = base and base <= address <= base + self.rings[direction].nbytes - part.group.slot_nbytes
                    slot, rest = divmod(address - self.slots[group].ctypes.data, part.group.slot_nbytes)
                    is_slot = 0 <= slot < self.num_slots and rest == 0
                    assert in_ring or (is_slot and self.reachable[group][slot]), f"{direction}: {address:#x}"

    def close(self) -> None:
        """Close the queues, then the device, each proven over, and free the rings."""
        with ExitStack() as closing:
            for ring in self.rings.values():
                closing.callback(ring.close)
            for queue in self.queues.values():
                assert queue.close(WAIT_S)
            assert self.device.close(WAIT_S)
        assert 0 == self.device.staging_nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def finish(queue: CopyQueue, sequence: int) -> None:
    """Wait until a job is over; it may not have failed."""
    assert queue.wait_completed(sequence, WAIT_S)
    failure = queue.failure(sequence)
    assert failure is None, failure


def _aligned_rows(num_rows: int, row_nbytes: int) -> NDArray[np.uint8]:
    memory = np.full(num_rows * row_nbytes + SLOT_ALIGNMENT, GUARD, np.uint8)
    skip = -memory.ctypes.data % SLOT_ALIGNMENT
    return memory[skip : skip + num_rows * row_nbytes].reshape(num_rows, row_nbytes)
