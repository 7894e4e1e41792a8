"""Which bytes of a job lie in long runs on both sides, so that the copy engine moves them faster than a kernel.

    device   | page | page | page |      | page |          adjacent blocks of one tensor, or tensors of one block side
    slots    | page | page | page |  | page |              by side: joined, until one of the two sides has a gap
               `----- one run ----'    `-- another

Costs time for blocks, never for pages: a group whose pages cannot form long runs is recognised once.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import GroupLayout
from kvmoor.devices.device import BlockCopies

_NOTHING: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class CopyRuns:
    """Runs of bytes, int64 ``[num_runs]`` each; no two of one job overlap."""

    device_addresses: NDArray[np.int64]
    host_addresses: NDArray[np.int64]
    nbytes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Row:
    """Bytes that lie in one piece for every device block: those of block i at ``base + i * stride``.

    In a slot they begin `offset` bytes in, one row behind the other for each device block of the chunk.
    """

    base: int
    stride: int
    nbytes: int
    offset: int


class RunFinder:
    """Split the copies of one group into runs of at least `from_nbytes` and the rest. Any thread may call."""

    def __init__(self, group: GroupLayout, from_nbytes: int | None) -> None:
        self._chunk = group.blocks_per_chunk
        self._block_nbytes = group.block_nbytes
        self._from_nbytes = from_nbytes or 0
        self._rows = _find_rows(group)
        self._row_table = np.array(
            [(row.base, row.stride, row.nbytes, row.offset) for row in self._rows], np.int64
        ).reshape(-1, 4)
        # A row that is too short by itself has to be adjacent to the next one, and the chunk has to be long enough.
        self._has_short_rows = any(row.nbytes < self._from_nbytes for row in self._rows)
        can_join = [row.stride == row.nbytes or group.num_device_blocks == 1 for row in self._rows]
        self._can_join = np.array(can_join, np.bool_)
        is_alone = len(self._rows) == 1
        self._is_hopeless = from_nbytes is None or not all(
            row.nbytes >= from_nbytes or (joins and (is_alone or row.nbytes * self._chunk >= from_nbytes))
            for row, joins in zip(self._rows, can_join, strict=True)
        )

    def split(
        self, copies: BlockCopies, range_starts: NDArray[np.int64] = _NOTHING
    ) -> tuple[CopyRuns | None, BlockCopies | None]:
        """Return the long runs and what is left, None for nothing.

        The page of a negative block id is left out. No run reaches across an address of `range_starts`, int64 and
        ascending: where ranges begin that were registered one by one. In what is left, -1 stands for pages in runs too.
        """
        num_blocks = len(copies.slot_addresses)
        if not num_blocks or not self._block_nbytes:
            return None, None
        if self._is_hopeless or num_blocks * self._block_nbytes < self._from_nbytes:
            return None, copies
        block_ids = copies.block_ids.reshape(num_blocks, self._chunk)
        if len(self._rows) == 1:
            return self._split_rows(copies, block_ids, range_starts)
        if not self._has_short_rows:
            return _none_if_empty(self._take_whole(block_ids, copies.slot_addresses)), None
        # Blocks go one way as a whole: the kernel takes all tensors of a device block, or none.
        chosen = (np.diff(block_ids, axis=1) == 1).all(axis=1) & (block_ids[:, 0] >= 0)
        if not chosen.any():
            return None, copies
        runs = self._take_whole(block_ids[chosen], copies.slot_addresses[chosen])
        if chosen.all():
            return runs, None
        return runs, BlockCopies(copies.group, block_ids[~chosen].ravel(), copies.slot_addresses[~chosen])

    def _split_rows(
        self, copies: BlockCopies, block_ids: NDArray[np.int64], range_starts: NDArray[np.int64]
    ) -> tuple[CopyRuns | None, BlockCopies | None]:
        """Join rows across blocks too: there is one row a device block, so that runs may begin and end at each."""
        (row,) = self._rows
        order, runs = _join(row, block_ids, copies.slot_addresses, range_starts)
        is_long = runs.nbytes >= self._from_nbytes
        if not is_long.any():
            return None, copies
        long_runs = CopyRuns(runs.device_addresses[is_long], runs.host_addresses[is_long], runs.nbytes[is_long])
        if is_long.all():
            return long_runs, None
        wanted = block_ids[block_ids >= 0]
        wanted[order[np.repeat(is_long, runs.nbytes // row.nbytes)]] = -1
        rest = block_ids.copy()
        rest[block_ids >= 0] = wanted
        left = (rest >= 0).any(axis=1)
        return long_runs, BlockCopies(copies.group, rest[left].ravel(), copies.slot_addresses[left])

    def _take_whole(self, block_ids: NDArray[np.int64], slot_addresses: NDArray[np.int64]) -> CopyRuns:
        """Return runs of all bytes of some blocks, of several rows each.

        Within a slot there is no range to reach across, and a row of one slot is nowhere adjacent to that of the next.
        """
        blocks, places = np.nonzero(block_ids >= 0)
        ids = block_ids[blocks, places]
        begins = np.ones(ids.size, np.bool_)
        if self._chunk > 1:
            begins[1:] = (np.diff(ids) != 1) | (np.diff(places) != 1) | (np.diff(blocks) != 0)
        parts = []
        for joins in (True, False):
            base, stride, nbytes, offset = self._row_table[self._can_join == joins].T
            first = np.flatnonzero(begins) if joins else np.arange(ids.size)
            if not (base.size and first.size):
                continue
            num_rows = np.diff(first, append=ids.size)[:, None]
            device = base + ids[first, None] * stride
            host = (slot_addresses[blocks[first]])[:, None] + offset + places[first, None] * nbytes
            parts.append((device.ravel(), host.ravel(), (num_rows * nbytes).ravel()))
        if len(parts) == 1:
            return CopyRuns(*parts[0])
        empty = (_NOTHING, _NOTHING, _NOTHING)
        device, host, nbytes = (np.concatenate(arrays) for arrays in zip(empty, *parts, strict=True))
        return CopyRuns(device, host, nbytes)


def _find_rows(group: GroupLayout) -> tuple[_Row, ...]:
    """Return the tensors of a group, those joined that lie side by side in every block, on the device and in slots."""
    rows: list[_Row] = []
    for tensor, offset in zip(group.tensors, group.page_offsets, strict=True):
        last = rows[-1] if rows else None
        # With several device blocks in a chunk a slot has all of the one tensor first.
        if (
            last is not None
            and group.blocks_per_chunk == 1
            and last.base + last.nbytes == tensor.base
            and (last.stride == tensor.block_stride or group.num_device_blocks == 1)
        ):
            rows[-1] = _Row(last.base, last.stride, last.nbytes + tensor.page_nbytes, last.offset)
        else:
            rows.append(_Row(tensor.base, tensor.block_stride, tensor.page_nbytes, offset))
    return tuple(rows)


def _join(
    row: _Row, block_ids: NDArray[np.int64], slot_addresses: NDArray[np.int64], range_starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], CopyRuns]:
    """Return the runs that one row of each block forms, all of them, ascending in host memory.

    Before them comes the order in which they have the rows that are not left out: int64, one number for each.
    """
    chunk = block_ids.shape[1]
    in_slot = row.offset + row.nbytes * np.arange(chunk, dtype=np.int64)
    is_wanted = block_ids >= 0
    host = (slot_addresses[:, None] + in_slot)[is_wanted]
    device = row.base + block_ids[is_wanted] * row.stride
    order = np.argsort(host)
    host, device = host[order], device[order]
    begins = np.ones(host.size, np.bool_)
    begins[1:] = (np.diff(device) != row.nbytes) | (np.diff(host) != row.nbytes)
    if range_starts.size:
        begins[1:] |= np.diff(np.searchsorted(range_starts, host, side="right")) != 0
    first_rows = np.flatnonzero(begins)
    num_rows = np.diff(np.append(first_rows, begins.size))
    return order, CopyRuns(device[first_rows], host[first_rows], num_rows * row.nbytes)


def _none_if_empty(runs: CopyRuns) -> CopyRuns | None:
    return runs if runs.nbytes.size else None
