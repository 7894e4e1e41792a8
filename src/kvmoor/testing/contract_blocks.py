"""Blocks of all geometries on a device and in host memory, and what both should hold after copies."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.device import BlockCopies, Direction

Bytes = NDArray[np.uint8]


class BothMemories(Protocol):
    """Memory of a device and of its host: see `DeviceContract`."""

    def allocate_device(self, nbytes: int) -> int:
        """Return the address of new device memory."""

    def allocate_host(self, nbytes: int) -> int:
        """Return the address of new host memory."""

    def write_device(self, address: int, data: Bytes) -> None:
        """Write device memory now."""

    def read_device(self, address: int, nbytes: int) -> Bytes:
        """Read device memory now."""


@dataclass(frozen=True)
class Geometry:
    """A group: page sizes of its tensors; `gaps` lie between tensors, or the tensors of a block lie side by side."""

    page_nbytes: tuple[int, ...]
    num_blocks: int = 12
    num_slots: int = 12
    blocks_per_chunk: int = 1
    interleaved: bool = False
    gaps: tuple[int, ...] = (0,)


GEOMETRIES: Final = (
    Geometry((512, 512, 512)),
    Geometry((4096,)),
    Geometry((512, 64, 512, 64)),  # data and scales
    Geometry((3, 100, 1, 7000), gaps=(1, 77)),
    Geometry((256,) * 6, gaps=(0, 4096, 64, 128)),
    Geometry((1024, 1024), interleaved=True),
    Geometry((512, 256, 512), interleaved=True, blocks_per_chunk=2),
    Geometry((384, 384), blocks_per_chunk=3),
    Geometry((4096,), num_blocks=200, num_slots=200),
    Geometry((32 * 1024,) * 4, num_blocks=32, num_slots=20),
    Geometry((16 * 1024,) * 5, num_blocks=64, num_slots=16, blocks_per_chunk=4, gaps=(0, 8192, 512)),
)


class Blocks:
    """One group in device memory, slots in host memory, and what both should hold."""

    def __init__(self, contract: BothMemories, geometry: Geometry, seed: int = 0) -> None:
        self.geometry = geometry
        self._contract = contract
        random = np.random.default_rng(seed)
        row_nbytes = sum(geometry.page_nbytes)
        device_nbytes = (row_nbytes + max(geometry.gaps)) * geometry.num_blocks + 4096 * len(geometry.page_nbytes)
        self._device = contract.allocate_device(device_nbytes)
        self.group = self._describe(row_nbytes)
        self._slots = contract.allocate_host(self.group.slot_nbytes * geometry.num_slots)
        self._device_image = random.integers(0, 256, device_nbytes, dtype=np.uint8)
        self._slot_image = random.integers(0, 256, self.group.slot_nbytes * geometry.num_slots, dtype=np.uint8)
        contract.write_device(self._device, self._device_image)
        host_array(self._slots, self._slot_image.nbytes)[:] = self._slot_image

    def page(self, tensor: int, block_id: int) -> int:
        """Return the device address of a page."""
        pages = self.group.tensors[tensor]
        return pages.base + block_id * pages.block_stride

    def copies(self, block_ids: Sequence[int], slots: Sequence[int]) -> BlockCopies:
        """Pair device blocks with slots, both by number."""
        addresses = self._slots + self.group.slot_nbytes * np.asarray(slots, np.int64)
        return BlockCopies(self.group, np.asarray(block_ids, np.int64), addresses)

    def expect(self, direction: Direction, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy between the images, page by page: what the device should have done."""
        group = self.group
        for position, block_id in enumerate(block_ids):
            slot, in_chunk = slots[position // group.blocks_per_chunk], position % group.blocks_per_chunk
            for number, (tensor, offset) in enumerate(zip(group.tensors, group.page_offsets, strict=True)):
                nbytes = tensor.page_nbytes
                at = self.page(number, block_id) - self._device
                page = self._device_image[at : at + nbytes]
                at = slot * group.slot_nbytes + offset + in_chunk * nbytes
                place = self._slot_image[at : at + nbytes]
                if direction is Direction.DEVICE_TO_HOST:
                    place[:] = page
                else:
                    page[:] = place

    def expected_page(self, tensor: int, block_id: int) -> Bytes:
        """Return what a page in device memory should hold."""
        return self._device_image[self.page(tensor, block_id) - self._device :][: self.geometry.page_nbytes[tensor]]

    def expect_written(self, address: int, data: Bytes) -> None:
        """Note what the engine wrote."""
        self._device_image[address - self._device :][: data.nbytes] = data

    def slot_bytes(self) -> Bytes:
        """Return what all slots hold."""
        return host_array(self._slots, self._slot_image.nbytes).copy()

    def assert_as_expected(self, what: str, slots: Sequence[int] | None = None) -> None:
        """Compare every byte of device memory and of all slots, or of some."""
        found = self._contract.read_device(self._device, self._device_image.nbytes)
        np.testing.assert_array_equal(self._device_image, found, err_msg=f"device memory, {what}")
        rows = slice(None) if slots is None else list(slots)
        expected, found = (each.reshape(self.geometry.num_slots, -1) for each in (self._slot_image, self.slot_bytes()))
        np.testing.assert_array_equal(expected[rows], found[rows], err_msg=f"slots, {what}")

    def _describe(self, row_nbytes: int) -> GroupLayout:
        geometry = self.geometry
        tensors, base = [], self._device
        for number, nbytes in enumerate(geometry.page_nbytes):
            stride = row_nbytes if geometry.interleaved else nbytes
            tensors.append(TensorPages(base, geometry.num_blocks, stride, nbytes))
            gap = geometry.gaps[number % len(geometry.gaps)]
            base += nbytes if geometry.interleaved else nbytes * geometry.num_blocks + gap
        return GroupLayout(tuple(tensors), geometry.blocks_per_chunk, geometry.blocks_per_chunk)


def scattered(blocks: Blocks, num_whole: int) -> tuple[list[int], list[int]]:
    """Choose all blocks in random order, and random slots for them."""
    random, geometry = np.random.default_rng(7), blocks.geometry
    block_ids = random.permutation(geometry.num_blocks)[: num_whole * geometry.blocks_per_chunk]
    return block_ids.tolist(), random.permutation(geometry.num_slots)[:num_whole].tolist()


def adjacent(blocks: Blocks, num_whole: int) -> tuple[list[int], list[int]]:
    """Choose blocks and slots in runs: one in the middle that counts down, the others up."""
    block_ids = list(range(num_whole * blocks.geometry.blocks_per_chunk))
    third = len(block_ids) // 3
    block_ids[third : 2 * third] = reversed(block_ids[third : 2 * third])
    return block_ids, list(range(num_whole))


def host_array(address: int, nbytes: int) -> Bytes:
    """Return host memory as an array, which does not keep it alive."""
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
