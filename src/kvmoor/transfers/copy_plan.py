"""Which bytes a job moves, checked as a whole before any of them moves.

A device trusts its descriptors: a wrong block id would write somewhere else in the engine's memory. So every number is
checked here, against the layout and the published slots, and bad input ends in a `RequestError` with nothing changed.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvmoor.block_layout import BlockLayout, GroupLayout
from kvmoor.devices.device import BlockCopies
from kvmoor.errors import RequestError
from kvmoor.transfer_messages import OrderPart

DeviceBlocks = dict[int, NDArray[np.int64]]
"""For each group, int64 ``[num_blocks, blocks_per_chunk]``: the device blocks that make up each block."""
GroupSlots = tuple[int, NDArray[np.int64]]
"""A group, and numbers of its slots, int64."""

_SPARSE: Final = 64
"""How far apart numbers may be, on average, that are marked in an array of flags instead of sorted. Guessed: sorting
takes 30 ns a number, marking 3 ns and less than 1 ns for each flag."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Hold the descriptors of one job. They belong to the job until it is over, so nobody may change them.

    `slots` has those of all groups, `copies` only what has bytes to move.
    """

    copies: tuple[BlockCopies, ...]
    num_blocks: int
    nbytes: int
    slots: tuple[GroupSlots, ...] = ()

    def shares_device_blocks(self, other: "CopyPlan") -> bool:
        """Say whether both name a device block of one group."""
        return any(
            mine.group is theirs.group and np.isin(mine.block_ids, theirs.block_ids).any()
            for mine in self.copies
            for theirs in other.copies
        )


def device_blocks_by_group(layout: BlockLayout, block_groups: Sequence[int], block_ids: ArrayLike) -> DeviceBlocks:
    """Sort the device block ids of a call by group.

    `block_groups` names the group of each block, `block_ids` lists for each block in turn the ids of its
    `blocks_per_chunk` device blocks. Raises `RequestError` for a wrong number of ids, an id out of range, or an id
    that is named twice in one group.
    """
    ids = _whole_numbers(block_ids)
    chunks = {group: _group(layout, group).blocks_per_chunk for group in dict.fromkeys(block_groups)}
    groups = np.asarray(block_groups, dtype=np.int64)
    chunk_sizes = np.zeros(groups.size, np.int64)
    for group, chunk in chunks.items():
        chunk_sizes[groups == group] = chunk
    if ids.size != chunk_sizes.sum():
        raise RequestError(
            f"{len(block_groups)} blocks need {chunk_sizes.sum()} device block ids, found {ids.size}: "
            "give blocks_per_chunk ids for each key, also for keys that are stored already"
        )
    starts = np.cumsum(chunk_sizes) - chunk_sizes
    blocks: DeviceBlocks = {}
    for group, chunk in chunks.items():
        rows = starts[groups == group]
        blocks[group] = ids[rows[:, None] + np.arange(chunk)]
        _check_block_ids(layout, group, blocks[group])
    return blocks


def plan_copies(
    layout: BlockLayout,
    parts: Sequence[OrderPart],
    device_blocks: DeviceBlocks,
    slot_addresses: Callable[[int, NDArray[np.int64]], NDArray[np.int64]],
    are_reachable: Callable[[int, NDArray[np.int64]], NDArray[np.bool_]] | None = None,
) -> CopyPlan:
    """Pair the slots of an order with device blocks, both checked.

    `slot_addresses(group, slots)` returns where slots begin and refuses those that may not be used.
    `are_reachable(group, slots)` says which of them the device reaches itself (None: all), and a slot that is reachable
    once has to stay so. Raises `RequestError` with nothing changed.
    """
    copies, all_slots = [], []
    num_blocks = nbytes = 0
    for part in parts:
        group = _group(layout, part.group)
        blocks = device_blocks.get(part.group, np.empty((0, group.blocks_per_chunk), dtype=np.int64))
        if blocks.shape != (len(part.slots), group.blocks_per_chunk):
            raise RequestError(
                f"group {part.group} of the order has {len(part.slots)} slots of {group.blocks_per_chunk} device "
                f"blocks, found device blocks of shape {blocks.shape}: give one row for each slot"
            )
        _check_block_ids(layout, part.group, blocks)
        slots = _slot_numbers(part)
        _refuse_duplicates(slots, f"slot of group {part.group}")
        all_slots.append((part.group, slots))
        num_blocks += len(part.slots)
        nbytes += len(part.slots) * group.block_nbytes
        if group.tensors and len(part.slots):
            addresses = slot_addresses(part.group, slots)
            reachable = None if are_reachable is None else are_reachable(part.group, slots)
            copies.append(BlockCopies(group, blocks.ravel(), addresses, reachable))
    return CopyPlan(tuple(copies), num_blocks, nbytes, tuple(all_slots))


def _slot_numbers(part: OrderPart) -> NDArray[np.int64]:
    try:
        packed = struct.pack(f"{len(part.slots)}q", *part.slots)  # a third of the time that np.asarray takes
    except struct.error as error:
        raise RequestError(f"a slot of group {part.group} is no whole number of 64 bits ({error})") from error
    return np.frombuffer(packed, np.int64)


def _whole_numbers(block_ids: ArrayLike) -> NDArray[np.int64]:
    try:
        ids = np.asarray(block_ids)
    except ValueError as error:
        raise RequestError("device block ids hold sequences of several lengths: give one flat sequence") from error
    if ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.max()) > np.iinfo(np.int64).max:
        raise RequestError(
            f"device block ids have shape {ids.shape} and type {ids.dtype}: give one flat sequence of whole numbers"
        )
    return ids.astype(np.int64)


def _group(layout: BlockLayout, group: int) -> GroupLayout:
    if not 0 <= group < len(layout.groups):
        raise RequestError(f"group {group} does not exist: the layout has groups 0 to {len(layout.groups) - 1}")
    return layout.groups[group]


def _check_block_ids(layout: BlockLayout, group: int, blocks: NDArray[np.int64]) -> None:
    if not layout.groups[group].tensors:
        return  # the blocks of a group without tensors have no bytes here, so their ids are not looked at
    count = layout.groups[group].num_device_blocks
    wrong = blocks[(blocks < 0) | (blocks >= count)]
    if wrong.size:
        raise RequestError(
            f"device block {int(wrong[0])} of group {group} does not exist: ids go from 0 to {count - 1}"
        )
    _refuse_duplicates(blocks.ravel(), f"device block of group {group}")


def _refuse_duplicates(numbers: NDArray[np.int64], what: str) -> None:
    if numbers.size < 2:
        return
    lowest, highest = int(np.minimum.reduce(numbers)), int(np.maximum.reduce(numbers))
    if highest - lowest < _SPARSE * numbers.size:
        is_named = np.zeros(highest - lowest + 1, np.bool_)
        is_named[numbers - lowest] = True
        if np.count_nonzero(is_named) == numbers.size:
            return
    ordered = np.sort(numbers)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise RequestError(f"{what} {int(twice[0])} is named twice in one call: name each once")
