"""Cutting a job into what the device does itself and pieces that pass through a staging ring."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmoor.devices.device import BlockCopies


@dataclass(frozen=True, slots=True)
class HostRun:
    """Bytes that lie in one run both in a slot (or several) and in the ring, `ring_offset` into the piece."""

    slot_address: int
    ring_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class JobPiece:
    """A part of a job that the device queue gets at once.

    Either blocks whose slots the device reaches, or, if `ring_nbytes` is not 0, blocks of one group that need so much
    of the ring, where their slots lie back to back.
    """

    copies: tuple[BlockCopies, ...]
    ring_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Return how many bytes the blocks have."""
        return sum(part.group.block_nbytes * len(part.slot_addresses) for part in self.copies)

    def placed_at(self, ring_address: int) -> tuple[BlockCopies, ...]:
        """Describe the same copies with places in the ring instead of the slots."""
        (part,) = self.copies
        places = ring_address + part.group.slot_nbytes * np.arange(len(part.slot_addresses), dtype=np.int64)
        return (BlockCopies(part.group, part.block_ids, places),)

    def host_runs(self) -> Iterator[HostRun]:
        """Yield what to copy between the slots and the ring: whole blocks, adjacent ones together, no padding."""
        (part,) = self.copies
        slot_nbytes, block_nbytes = part.group.slot_nbytes, part.group.block_nbytes
        addresses = part.slot_addresses
        if block_nbytes == slot_nbytes:
            ends = [*(np.flatnonzero(np.diff(addresses) != slot_nbytes) + 1).tolist(), len(addresses)]
        else:
            ends = list(range(1, len(addresses) + 1))  # padding lies between adjacent blocks
        first = 0
        for end in ends:
            yield HostRun(int(addresses[first]), first * slot_nbytes, (end - first - 1) * slot_nbytes + block_nbytes)
            first = end


def cut_job(copies: Sequence[BlockCopies], largest_nbytes: int) -> deque[JobPiece]:
    """Cut a job into at least one piece: first all that is reachable, then staged pieces of one block at least."""
    reachable: list[BlockCopies] = []
    staged: deque[JobPiece] = deque()
    for part in copies:
        if part.reachable is None or part.reachable.all() or not part.group.block_nbytes:
            reachable.append(_unmarked(part))
            continue
        if part.reachable.any():
            reachable.append(_select(part, part.reachable))
        rest = _select(part, ~part.reachable)
        num_blocks = max(1, largest_nbytes // part.group.slot_nbytes)
        for first in range(0, len(rest.slot_addresses), num_blocks):
            piece = _select(rest, slice(first, first + num_blocks))
            staged.append(JobPiece((piece,), part.group.slot_nbytes * len(piece.slot_addresses)))
    if reachable or not staged:
        staged.appendleft(JobPiece(tuple(reachable)))
    return staged


def _unmarked(part: BlockCopies) -> BlockCopies:
    return part if part.reachable is None else BlockCopies(part.group, part.block_ids, part.slot_addresses)


def _select(part: BlockCopies, chosen: NDArray[np.bool_] | slice) -> BlockCopies:
    block_ids = part.block_ids.reshape(-1, part.group.blocks_per_chunk)[chosen]
    return BlockCopies(part.group, block_ids.reshape(-1), part.slot_addresses[chosen])
