"""Copying the pages of blocks between device tensors and slots that the CPU reaches both, off the interpreter lock.

NumPy copies a strided array in one call, without the interpreter lock. So the art is to describe many pages as one
array, which works whenever they form a *box*, with a constant step along each axis on either side:

- The tensors of a group fold into few *lattices*: slices of one allocation, or equal allocations side by side.
- Blocks fold into *runs*: a constant step from block to block and from slot to slot. Any two blocks form a run, which
  halves the number of boxes even where all is random.

A run times a lattice is a box, ``[blocks, *tensors, page_nbytes]``. Where boxes come out small all the same (few
tensors with small pages and random blocks), many pages are gathered into a temporary and scattered from there.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.device import Direction

_Int64s = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

_SMALL_BOX_NBYTES: Final = 32 * 1024
"""Below this mean size of a box, pages go through the temporary. A box takes 1.3 us beside its bytes, most of them with
the interpreter lock. Measured (2-core Xeon, GB/s with one / two threads, two pages a box): boxes 3.4 / 2.4, temporary
3.5 / 6.3 at 4 KiB pages; 4.4 / 3.5 and 3.6 / 6.6 at 8 KiB; 5.4 / 6.7 and 4.0 / 7.1 at 16 KiB."""
_TEMPORARY_NBYTES: Final = 512 * 1024
"""Fits the L2 cache, 2 MiB a core there; measured: 128 KiB and 2 MiB are slower with two threads."""

# All memory of the process as one buffer, to make arrays of addresses from: ``_MEMORY[address - 1]`` is the byte at
# `address` (NumPy takes a buffer at address 0 for none). It keeps nothing mapped: who makes an array from it knows that
# the bytes are there, and drops the array before they are not.
_MEMORY: Final[Any] = (ctypes.c_ubyte * 2**62).from_address(1)
_BYTE: Final = np.dtype(np.uint8)


class GroupCopier:
    """Copy whole blocks of one group. Any thread may copy, several at a time."""

    def __init__(self, group: GroupLayout) -> None:
        self.group = group
        placed = sorted(zip(group.tensors, group.page_offsets, strict=True), key=lambda pair: _geometry(pair[0]))
        self._parts = [
            _EqualPages(group, *zip(*members, strict=True))
            for _, members in groupby(placed, key=lambda pair: _geometry(pair[0]))
        ]

    def copy(self, direction: Direction, block_ids: _Int64s, slot_addresses: _Int64s) -> None:
        """Copy at least one block, and return when done. Arrays as in `BlockCopies`; both sides have to be mapped."""
        for part in self._parts:
            part.copy(direction, block_ids, slot_addresses)


def _geometry(tensor: TensorPages) -> tuple[int, int]:
    return tensor.page_nbytes, tensor.block_stride


@dataclass(frozen=True, slots=True)
class _Lattice:
    """Pages of one device block in several tensors, at constant steps along each axis of `shape`.

    The last axis counts the bytes of a page. `base`: where the pages of device block 0 begin; `offset`: where they
    begin in a slot.
    """

    base: int
    offset: int
    shape: tuple[int, ...]
    device_steps: tuple[int, ...] = (1,)
    slot_steps: tuple[int, ...] = (1,)


class _EqualPages:
    """The tensors of a group that have one page size and one block stride, and where their pages begin in a slot."""

    def __init__(self, group: GroupLayout, tensors: Sequence[TensorPages], offsets: Sequence[int]) -> None:
        self._page_nbytes, self._block_stride = _geometry(tensors[0])
        self._bases = np.array([tensor.base for tensor in tensors], np.int64)
        self._offsets = np.array(offsets, np.int64)
        self._offsets_in_chunk = self._page_nbytes * np.arange(group.blocks_per_chunk, dtype=np.int64)
        # Tensors may lie as far from each other as all of the group would fill, no farther: in a wider gap an arena
        # could lie, and NumPy copies through a temporary what looks as if it overlapped.
        widest = sum((each.num_blocks - 1) * each.block_stride + each.page_nbytes for each in group.tensors)
        lattices = [
            _Lattice(tensor.base, offset, (self._page_nbytes,)) for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        # Twice: the second time folds the keys and values of one layer, folded before, over the layers.
        self._lattices = _fold(_fold(lattices, widest), widest)

    def copy(self, direction: Direction, block_ids: _Int64s, slot_addresses: _Int64s) -> None:
        """Copy the pages of these tensors."""
        # One place in host memory for each device block: the pages of a chunk lie back to back in its slot.
        places = (slot_addresses[:, np.newaxis] + self._offsets_in_chunk).reshape(-1)
        runs = list(_progressions(block_ids, places))
        nbytes = self._page_nbytes * len(self._bases) * len(block_ids)
        if nbytes < _SMALL_BOX_NBYTES * len(runs) * len(self._lattices):
            self._copy_through_temporary(direction, block_ids, places)
        else:
            self._copy_boxes(direction, block_ids.tolist(), places.tolist(), runs)

    def _copy_boxes(
        self, direction: Direction, block_ids: list[int], places: list[int], runs: Sequence[tuple[int, int]]
    ) -> None:
        stride = self._block_stride
        boxes: list[tuple[_Bytes, _Bytes]] = []
        for start, length in runs:
            second = start + 1 if length > 1 else start
            block_step = stride * (block_ids[second] - block_ids[start])
            place_step = places[second] - places[start]
            for lattice in self._lattices:
                shape = (length, *lattice.shape)
                page = lattice.base + stride * block_ids[start]
                device_side = _array_at(page, shape, (block_step, *lattice.device_steps))
                slot_side = _array_at(places[start] + lattice.offset, shape, (place_step, *lattice.slot_steps))
                boxes.append((device_side, slot_side))
        # In a loop of its own, which holds the interpreter lock for 0.2 us a box: two threads hinder each other less
        # (measured at boxes of 64 KiB: 8.8 GB/s, against 5.7 where each box is made and copied in turn).
        if direction is Direction.DEVICE_TO_HOST:
            for device_side, slot_side in boxes:
                slot_side[...] = device_side
        else:
            for device_side, slot_side in boxes:
                device_side[...] = slot_side

    def _copy_through_temporary(self, direction: Direction, block_ids: _Int64s, places: _Int64s) -> None:
        device_pages = (self._bases + self._block_stride * block_ids[:, np.newaxis]).reshape(-1)
        slot_pages = (self._offsets + places[:, np.newaxis]).reshape(-1)
        if direction is Direction.DEVICE_TO_HOST:
            sources, targets = device_pages, slot_pages
        else:
            sources, targets = slot_pages, device_pages
        num_pages = max(1, _TEMPORARY_NBYTES // self._page_nbytes)
        for start in range(0, len(sources), num_pages):
            source, source_rows = _rows_at(sources[start : start + num_pages], self._page_nbytes)
            target, target_rows = _rows_at(targets[start : start + num_pages], self._page_nbytes)
            target[target_rows] = source[source_rows]


def _fold(lattices: Sequence[_Lattice], widest: int) -> list[_Lattice]:
    """Join neighbours that differ only in where they lie, by constant steps, into lattices with one more axis."""
    folded: list[_Lattice] = []
    for _, alike in groupby(lattices, key=lambda lattice: replace(lattice, base=0, offset=0)):
        members = list(alike)
        bases = np.array([member.base for member in members], np.int64)
        offsets = np.array([member.offset for member in members], np.int64)
        for start, length in _progressions(bases, offsets):
            first, second = members[start], members[start + (length > 1)]
            step = second.base - first.base
            if length == 1 or abs(step) > widest:
                folded.extend(members[start : start + length])
                continue
            folded.append(
                _Lattice(
                    first.base,
                    first.offset,
                    (length, *first.shape),
                    (step, *first.device_steps),
                    (second.offset - first.offset, *first.slot_steps),
                )
            )
    return folded


def _progressions(first: _Int64s, second: _Int64s) -> Iterator[tuple[int, int]]:
    """Cut two sequences of one length into (start, length) pieces along which both advance in constant steps.

    Greedy from the left: a piece takes in all it can.
    """
    steps = np.diff(np.stack((first, second)), axis=1)
    turns = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 2
    start = 0
    for turn in turns.tolist():
        if turn >= start + 2:  # a turn right behind `start` is about the step that led there
            yield start, turn - start
            start = turn
    yield start, len(first) - start


def _array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Bytes:
    return np.ndarray(shape, _BYTE, _MEMORY, address - 1, strides)


def _rows_at(addresses: _Int64s, nbytes: int) -> tuple[_Bytes, _Int64s]:
    """Return an array with a row of `nbytes` at every byte from the lowest address on, and which of its rows are meant.

    The rows overlap, and most of them are never touched.
    """
    lowest = int(addresses.min())
    rows = addresses - lowest
    return _array_at(lowest, (int(rows.max()) + 1, nbytes), (1, 1)), rows
