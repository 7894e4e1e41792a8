"""Turning the copies of a job into launches of the page kernel, whose parameters are one prebuilt buffer.

    header (72 bytes)  |  slot, id, ..., id  |  slot, id, ..., id  |  ...       one row of 32-bit numbers a block

A row holds where the slot is, in units of 4 KiB above `slots_base`, and the ids of the block's device blocks. So a job
costs time for blocks, never for pages, and nothing of it outlives the launch: cuLaunchKernel copies the parameters.
A job with more blocks than a launch has room for is cut into several, of which the last stores the completion word.
"""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import SLOT_ALIGNMENT
from kvmoor.devices.cuda.piece_table import PieceTable
from kvmoor.devices.device import Direction
from kvmoor.errors import LayoutError

SMALL_PARAMETERS_NBYTES: Final = 4096
"""For short jobs: the driver copies all of it at each launch, used or not."""
LARGE_PARAMETERS_NBYTES: Final = 32760
"""From CUDA 12.1 and compute capability 7.0 on the limit is 32,764 (CUDA C++ Programming Guide, Function Parameters);
a structure with 64-bit numbers in it is a multiple of 8."""

HEADER: Final = struct.Struct("<7Q4I")
"""`Header` of page_copy.cu: the table, slots_base, word, sequence, ticket, begin_time, end_time; num_pieces,
num_blocks, blocks_per_chunk, flags."""
FLAG_DEVICE_TO_HOST: Final = 1
FLAG_HAS_ODD_PIECES: Final = 2

_WARP_SIZE: Final = 32
_SLOT_ALIGNMENT_LOG2: Final = SLOT_ALIGNMENT.bit_length() - 1
_FEW_NUMBERS: Final = 32
"""Up to here numbers are written one by one: 0.1 us each, where a call of NumPy takes 1 us, and five are needed."""
_UINT32: Final = 2**32 - 1
_MAX_SLOT_UNITS: Final = 2**32
"""Slots of one launch lie within 16 TiB; those of one arena always do."""


@dataclass(frozen=True, slots=True)
class PageKernelVariant:
    """Describe one way in which page_copy.cu copies pieces.

    `piece_nbytes`: how large pieces may be, see `build_piece_table`. `threads_per_block`: what it is launched with.
    `shared_nbytes`: dynamic shared memory of a thread block; more than 48 KiB has to be allowed for each function first
    (`Driver.function_allow_shared`). `min_capability`: the compute capability below which its functions do not exist.
    """

    name: str
    piece_nbytes: int
    threads_per_block: int = 512
    shared_nbytes: int = 0
    min_capability: tuple[int, int] = (7, 5)

    @property
    def small_function(self) -> str:
        """Return the name of the function that takes `SMALL_PARAMETERS_NBYTES`."""
        return f"page_copy_{self.name}_small"

    @property
    def large_function(self) -> str:
        """Return the name of the function that takes `LARGE_PARAMETERS_NBYTES`."""
        return f"page_copy_{self.name}_large"


ROWS4: Final = PageKernelVariant("rows4", piece_nbytes=4096)
"""Through registers, 2 KiB on their way for each warp, so 32 KiB a thread block."""
ROWS8: Final = PageKernelVariant("rows8", piece_nbytes=4096)
"""Through registers, 64 KiB on their way a thread block."""
ROWS16: Final = PageKernelVariant("rows16", piece_nbytes=8192)
"""Through registers, 128 KiB on their way a thread block."""
BULK: Final = PageKernelVariant(
    "bulk", piece_nbytes=2048, threads_per_block=128, shared_nbytes=41_472, min_capability=(9, 0)
)
"""Through shared memory, moved by the multiprocessor's copy unit, 32 KiB on their way a thread block."""
BULK_DEEP: Final = PageKernelVariant(
    "bulk_deep", piece_nbytes=4096, threads_per_block=128, shared_nbytes=132_096, min_capability=(9, 0)
)
"""As `BULK`, with 96 KiB on their way a thread block."""

VARIANTS: Final = (ROWS4, ROWS8, ROWS16, BULK, BULK_DEEP)
DEFAULT_VARIANT: Final = ROWS8
"""On an H200 all kinds reach 93-94 % of the link device to host and 91-92 % host to device (benchmarks/results); this
one leaves half of the registers of a multiprocessor to others."""


@dataclass(frozen=True, slots=True)
class KernelFunctions:
    """Hold the driver's handles of the two functions of a variant."""

    variant: PageKernelVariant
    small: int
    large: int


class Launch(NamedTuple):
    """One kernel launch: the arguments of `Driver.launch` but for the stream.

    `grid` and `block` count thread blocks and threads, along one axis. `parameters_address` is where an array lies that
    holds one pointer, to the parameters (cuLaunchKernel's `kernelParams`).
    """

    function: int
    grid: int
    block: int
    shared_nbytes: int
    parameters_address: int


class PageLaunches:
    """Make the launches that copy blocks of one group in one direction, for one copy queue.

    Holds one parameter buffer, which each launch refills: one thread at a time may use it, and each launch has to be
    made before the next one is asked for. The addresses given have to stay valid as long as any launch may run.
    """

    def __init__(
        self,
        table: PieceTable,
        functions: KernelFunctions,
        direction: Direction,
        *,
        table_address: int,
        word_address: int,
        ticket_address: int,
    ) -> None:
        """Prepare the parameters.

        `table`: of at least one piece, made for the `piece_nbytes` of the variant. `table_address`: where the device
        has its bytes, on a 16-byte boundary. `word_address`: the completion word of the queue. `ticket_address`: 4
        bytes of device memory for this queue alone, zero before its first launch.
        Raises `LayoutError` for a group whose chunks are too long for a launch.
        """
        variant = functions.variant
        assert len(table.pieces) > 0, "a group without tensors has nothing to copy"
        assert table.piece_nbytes <= variant.piece_nbytes, (table.piece_nbytes, variant)
        self._functions = functions
        self._table_address = table_address
        self._word_address = word_address
        self._ticket_address = ticket_address
        self._num_pieces = len(table.pieces)
        self._warps_per_block = variant.threads_per_block // _WARP_SIZE
        self._chunk = table.blocks_per_chunk
        self._flags = (FLAG_DEVICE_TO_HOST if direction is Direction.DEVICE_TO_HOST else 0) | (
            FLAG_HAS_ODD_PIECES if table.has_odd_pieces else 0
        )
        row_length = 1 + self._chunk
        self._small_capacity, self._large_capacity = (
            (nbytes - HEADER.size) // (4 * row_length) for nbytes in (SMALL_PARAMETERS_NBYTES, LARGE_PARAMETERS_NBYTES)
        )
        if not self._large_capacity:
            most = (LARGE_PARAMETERS_NBYTES - HEADER.size) // 4 - 1
            raise LayoutError(
                f"a block has {self._chunk} device blocks, more than the {most} that a launch takes: "
                "describe fewer device blocks as one block (blocks_per_chunk)"
            )
        self._buffer = np.zeros(LARGE_PARAMETERS_NBYTES, np.uint8)
        rows = self._buffer[HEADER.size :].view(np.uint32)[: self._large_capacity * row_length]
        self._rows = rows.reshape(self._large_capacity, row_length)
        self._row_numbers = rows.data
        self._header = self._buffer.data
        self._num_few = _FEW_NUMBERS // row_length
        self._pointers = (ctypes.c_void_p * 1)(self._buffer.ctypes.data)
        self._pointers_address = ctypes.addressof(self._pointers)

    def launches(
        self,
        block_ids: NDArray[np.int64],
        slot_addresses: NDArray[np.int64],
        *,
        thread_blocks: int,
        sequence: int = 0,
        begin_address: int = 0,
        end_address: int = 0,
    ) -> Iterator[Launch]:
        """Yield the launches that copy at least one block. Make each, on one stream, before asking for the next.

        `block_ids` and `slot_addresses` as in `BlockCopies`; the pages of a negative id are left out. `thread_blocks`:
        what a launch has at most; little work gets fewer. `sequence`: what the last launch stores in the completion
        word once all is copied; 0 if more of the job follows. `begin_address`, `end_address`: where the first launch
        writes that it began, and the last one, if it has a sequence, that all is copied: uint64, nanoseconds of the
        GPU's global timer, in memory that the device reaches; 0: nowhere.
        """
        num_blocks = len(slot_addresses)
        start = 0
        while start < num_blocks:
            if num_blocks <= self._num_few:
                slots_base, num_rows = self._write_few(slot_addresses.tolist()[start:], block_ids.tolist(), start)
            else:
                slots_base, num_rows = self._write_many(slot_addresses[start:], block_ids, start)
            stop = start + num_rows
            is_last = stop == num_blocks
            HEADER.pack_into(
                self._header,
                0,
                self._table_address,
                slots_base,
                self._word_address,
                sequence if is_last else 0,
                self._ticket_address,
                begin_address if start == 0 else 0,
                end_address if is_last else 0,
                self._num_pieces,
                num_rows,
                self._chunk,
                self._flags,
            )
            yield Launch(
                self._functions.small if num_rows <= self._small_capacity else self._functions.large,
                min(thread_blocks, -(-num_rows * self._num_pieces // self._warps_per_block)),
                self._functions.variant.threads_per_block,
                self._functions.variant.shared_nbytes,
                self._pointers_address,
            )
            start = stop

    def _write_many(
        self, slot_addresses: NDArray[np.int64], block_ids: NDArray[np.int64], first: int
    ) -> tuple[int, int]:
        """Write the rows of one launch, whose blocks begin with number `first`; return its `slots_base` and how many.

        `slot_addresses`: of the blocks from there on. `block_ids`: of all.
        """
        addresses = slot_addresses[: self._large_capacity]
        slots_base = int(np.minimum.reduce(addresses))
        units = (addresses - slots_base) >> _SLOT_ALIGNMENT_LOG2
        if np.maximum.reduce(units) >= _MAX_SLOT_UNITS:
            # No arena is like this, but nothing forbids slots at both ends of the address space: one at a time.
            slots_base, units = int(addresses[0]), units[:1] * 0
        num_rows, chunk = len(units), self._chunk
        ids = block_ids[first * chunk : (first + num_rows) * chunk].reshape(num_rows, chunk)
        self._rows[:num_rows, 0] = units
        self._rows[:num_rows, 1:] = ids  # -1 stays negative where the kernel reads it as int32
        return slots_base, num_rows

    def _write_few(self, slot_addresses: list[int], block_ids: list[int], first: int) -> tuple[int, int]:
        """Do as `_write_many`, faster for a few blocks."""
        slots_base = min(slot_addresses)
        if max(slot_addresses) - slots_base >= _MAX_SLOT_UNITS << _SLOT_ALIGNMENT_LOG2:
            slot_addresses, slots_base = slot_addresses[:1], slot_addresses[0]
        numbers, begin, chunk = [], first * self._chunk, self._chunk
        for address in slot_addresses:
            numbers.append((address - slots_base) >> _SLOT_ALIGNMENT_LOG2)
            numbers += block_ids[begin : begin + chunk]
            begin += chunk
        for place, number in enumerate(numbers):
            self._row_numbers[place] = number & _UINT32
        return slots_base, len(slot_addresses)
