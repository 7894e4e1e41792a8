"""Blocks in GPU memory and slots in page-locked memory, beside a model of both that copies with NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpu_rig import WAIT_S, Gpu, host_bytes
from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.device import BlockCopies, Direction

POISON: Final = 0xEE
MIB: Final = 2**20


@dataclass(frozen=True)
class PageShape:
    """One tensor of a group: pages of `nbytes`, `padding` bytes between them, `gap` bytes before the first."""

    nbytes: int
    padding: int = 0
    gap: int = 0


class GpuBlocks:
    """One group: its tensors lie in one piece of GPU memory, its slots in one piece of page-locked memory."""

    def __init__(
        self,
        gpu: Gpu,
        pages: Sequence[PageShape],
        *,
        num_blocks: int,
        blocks_per_chunk: int = 1,
        num_slots: int | None = None,
        seed: int = 0,
        slots_address: int | None = None,
    ) -> None:
        self._gpu = gpu
        self._random = np.random.default_rng(seed)
        self.num_blocks = num_blocks
        self.num_slots = num_slots or num_blocks // blocks_per_chunk
        places, end = [], 0
        for page in pages:
            places.append(end + page.gap)
            end = places[-1] + num_blocks * (page.nbytes + page.padding)
        self.tensor = gpu.tensor(end + 4096)
        self._base = self.tensor.data_ptr()
        self.group = GroupLayout(
            tuple(
                TensorPages(self._base + place, num_blocks, page.nbytes + page.padding, page.nbytes)
                for place, page in zip(places, pages, strict=True)
            ),
            tokens_per_block=blocks_per_chunk,
            blocks_per_chunk=blocks_per_chunk,
            tensor_owners=(self.tensor,),
        )
        slots_nbytes = self.num_slots * self.group.slot_nbytes
        self.slots_address = gpu.host_memory(slots_nbytes) if slots_address is None else slots_address
        self.slots = host_bytes(self.slots_address, slots_nbytes).reshape(self.num_slots, -1)
        self.device_image = self._random.integers(0, 256, self.tensor.numel(), dtype=np.uint8)
        self.slot_image = self._random.integers(0, 256, self.slots.shape, dtype=np.uint8)
        self.upload()
        self.slots[:] = self.slot_image

    @classmethod
    def regular(
        cls, gpu: Gpu, *, page_nbytes: int, num_tensors: int, num_blocks: int, seed: int = 0, **options: Any
    ) -> "GpuBlocks":
        """Lay out tensors of one page size without gaps."""
        return cls(gpu, [PageShape(page_nbytes)] * num_tensors, num_blocks=num_blocks, seed=seed, **options)

    @classmethod
    def random(cls, gpu: Gpu, seed: int, **options: Any) -> "GpuBlocks":
        """Lay out a group as the seed says: odd sizes and alignments, padding, chunks of 1 to 8 device blocks."""
        random = np.random.default_rng(seed)
        pages = [_random_page(random) for _ in range(int(random.integers(1, 6)))]
        while len(pages) > 1 and sum(page.nbytes for page in pages) > 6 * MIB:
            pages.pop()
        device_block_nbytes = sum(page.nbytes for page in pages)
        chunk = int(random.integers(1, 9)) if device_block_nbytes < 4 * MIB else int(random.integers(1, 3))
        budget = min(24 * MIB, 3000 * device_block_nbytes)
        num_chunks = max(2, min(400, budget // (chunk * device_block_nbytes)))
        return cls(
            gpu,
            pages,
            num_blocks=num_chunks * chunk + int(random.integers(0, 4)),
            blocks_per_chunk=chunk,
            num_slots=num_chunks + int(random.integers(0, 3)),
            seed=seed,
            **options,
        )

    @property
    def num_chunks(self) -> int:
        """Return how many whole blocks there are, and slots for them."""
        return min(self.num_slots, self.num_blocks // self.group.blocks_per_chunk)

    def open_queues(self, device: Any) -> tuple[Any, Any]:
        """Open a store queue and a load queue."""
        return tuple(device.open_copy_queue(each.value, each) for each in Direction)  # type: ignore[return-value]

    def copies(self, block_ids: Sequence[int], slots: Sequence[int]) -> BlockCopies:
        """Pair device blocks (negative: skipped) with slots, both by number."""
        addresses = self.slots_address + self.group.slot_nbytes * np.asarray(slots, np.int64)
        return BlockCopies(self.group, np.asarray(block_ids, np.int64), addresses)

    def random_pairs(self, *, skipped: float = 0.0) -> tuple[Any, Any]:
        """Choose device blocks for slots: most in random order, some in runs on both sides, some of them skipped."""
        random, chunk = self._random, self.group.blocks_per_chunk
        block_ids = random.permutation(self.num_blocks)[: self.num_chunks * chunk]
        slots = random.permutation(self.num_slots)[: self.num_chunks]
        if random.random() < 0.3:
            block_ids, slots = np.sort(block_ids), np.sort(slots)
        block_ids = np.where(random.random(len(block_ids)) < skipped, -1, block_ids)
        count = int(random.integers(1, self.num_chunks + 1))
        return block_ids[: count * chunk], slots[:count]

    def poison(self, destination: Direction) -> None:
        """Overwrite all that a copy in this direction may write, and more."""
        if destination is Direction.DEVICE_TO_HOST:
            self.slot_image[:] = self.slots[:] = POISON
        else:
            self.device_image[:] = POISON
            self.tensor.fill_(POISON)  # on the engine's stream: the copy has to wait for it

    def upload(self) -> None:
        """Write the model's device memory to the GPU."""
        self._gpu.write(self._base, self.device_image)

    def expect(self, direction: Direction, block_ids: Any, slots: Any) -> None:
        """Copy in the model what the device should copy."""
        group, chunk = self.group, self.group.blocks_per_chunk
        ids = np.asarray(block_ids).reshape(-1, chunk)
        rows = np.asarray(slots)
        for tensor, offset in zip(group.tensors, group.page_offsets, strict=True):
            first, stride, nbytes = tensor.base - self._base, tensor.block_stride, tensor.page_nbytes
            pages: Any = np.ndarray((self.num_blocks, nbytes), np.uint8, self.device_image, first, (stride, 1))
            for place in range(chunk):
                wanted = ids[:, place] >= 0
                begin = offset + place * nbytes
                in_slots = self.slot_image[:, begin : begin + nbytes]
                if direction is Direction.DEVICE_TO_HOST:
                    in_slots[rows[wanted]] = pages[ids[wanted, place]]
                else:
                    pages[ids[wanted, place]] = in_slots[rows[wanted]]

    def assert_as_expected(self, what: str) -> None:
        """Compare every byte of the slots and of the GPU memory around the tensors."""
        _assert_equal(self.slot_image.reshape(-1), self.slots.reshape(-1), f"{what}, slots of {self}")
        found = self._gpu.read(self._base, len(self.device_image))
        _assert_equal(self.device_image, found, f"{what}, device memory of {self}")

    def __repr__(self) -> str:
        pages = ", ".join(
            f"{tensor.page_nbytes} B every {tensor.block_stride} at +{tensor.base % 16} mod 16"
            for tensor in self.group.tensors
        )
        return f"{self.num_blocks} device blocks, {self.group.blocks_per_chunk} a block, pages: {pages}"


def finish(queue: Any, sequence: int) -> None:
    """Wait for the end of a job that has to go well."""
    assert queue.wait_completed(sequence, WAIT_S), f"job {sequence} is not over after {WAIT_S:g} s"
    for number in range(1, sequence + 1):
        assert (failure := queue.failure(number)) is None, f"job {number} failed: {failure}"


def _random_page(random: np.random.Generator) -> PageShape:
    kind = random.random()
    if kind < 0.35:
        nbytes = 512 << int(random.integers(0, 10))  # up to 256 KiB
    elif kind < 0.45:
        nbytes = 512 << int(random.integers(10, 14))  # up to 4 MiB
    elif kind < 0.7:
        nbytes = 16 * int(random.integers(1, 4000))
    elif kind < 0.85:
        nbytes = 4 * int(random.integers(1, 4000))
    else:
        nbytes = int(random.integers(1, 70_000))
    padding = int(random.choice([0, 0, 0, 16, 256, 4096, int(random.integers(0, 100))]))
    return PageShape(nbytes, padding, int(random.choice([0, 0, 16, 256, 8, 4, 2, 1, 3, 77])))


def _assert_equal(expected: Any, found: Any, what: str) -> None:
    if not np.array_equal(expected, found):
        wrong = np.flatnonzero(expected != found)
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(expected)} bytes differ, first at {wrong[0]}: expected "
            f"{expected[wrong[0]]:#x}, found {found[wrong[0]]:#x}; last at {wrong[-1]}"
        )
