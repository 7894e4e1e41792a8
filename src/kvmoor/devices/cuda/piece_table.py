"""Where the pages of one block are, cut into pieces: what the page kernel looks up instead of being told each page.

    device block i of a tensor:   | piece | piece | piece |      (a page)         start + i * stride
    slot of a block:              | piece | piece | piece | piece | piece | ...   slot_offset from its beginning

The table is made once a layout and stays on the device. A piece is what one warp copies in one go.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import SLOT_ALIGNMENT, GroupLayout
from kvmoor.errors import LayoutError

PIECE_DTYPE: Final = np.dtype(
    [
        ("start", "<u8"),
        ("stride", "<u8"),
        ("slot_offset", "<u4"),
        ("nbytes", "<u4"),
        ("chunk_index", "<u4"),
        ("width_log2", "<u4"),
    ]
)
"""One piece, 32 bytes, as page_copy.cu reads it. That of device block i begins at ``start + stride * i``; in a slot it
begins at `slot_offset`. It belongs to device block `chunk_index` of its block. Both sides may be accessed
``2**width_log2`` bytes at a time; what is left over at the end of a page is copied byte by byte."""

LINE_NBYTES: Final = 128
"""What a GPU moves at once (CUDA C++ Programming Guide, Device Memory Accesses). A page is cut where a line of its slot
ends, so that no line is written by two warps, half by half."""

_MAX_WIDTH_LOG2: Final = 4
_MAX_BLOCK_NBYTES: Final = 2**32 - SLOT_ALIGNMENT  # offsets in slots have 32 bits
_MAX_NUM_DEVICE_BLOCKS: Final = 2**31  # ids are int32


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The pieces of one block of a group.

    `pieces`: of `PIECE_DTYPE` ``[num_pieces]``, in the order in which a slot has them, contiguous: its bytes go to the
    device as they are. Empty for a group without tensors. `piece_nbytes`: what a piece has at most.
    """

    pieces: NDArray[np.void]
    piece_nbytes: int
    blocks_per_chunk: int

    @property
    def nbytes(self) -> int:
        """Return how much memory the table takes."""
        return self.pieces.nbytes

    @property
    def has_odd_pieces(self) -> bool:
        """Say whether some piece is not a whole number of aligned 16-byte words."""
        widest = self.pieces["width_log2"] == _MAX_WIDTH_LOG2
        return not bool(np.all(widest & (self.pieces["nbytes"] % 2**_MAX_WIDTH_LOG2 == 0)))


def build_piece_table(group: GroupLayout, piece_nbytes: int) -> PieceTable:
    """Cut the pages of a group into pieces of up to `piece_nbytes`, a multiple of 128. Any thread may call.

    Raises `LayoutError` for blocks, or numbers of them, too large for the page kernel.
    """
    assert piece_nbytes > 0
    assert piece_nbytes % LINE_NBYTES == 0, piece_nbytes
    if group.block_nbytes > _MAX_BLOCK_NBYTES:
        raise LayoutError(
            f"a block has {group.block_nbytes} bytes, more than the {_MAX_BLOCK_NBYTES} that are copied to or from a "
            "GPU: describe fewer device blocks as one block (blocks_per_chunk)"
        )
    if group.num_device_blocks > _MAX_NUM_DEVICE_BLOCKS:
        raise LayoutError(
            f"there are {group.num_device_blocks} device blocks, more than the {_MAX_NUM_DEVICE_BLOCKS} whose ids fit "
            "into 32 bits: describe several groups"
        )
    # One row a page: tensor by tensor, in each the device blocks of a chunk, as a slot has them.
    chunk = group.blocks_per_chunk
    base, stride, page_nbytes = (
        np.repeat(np.array([getattr(tensor, name) for tensor in group.tensors], np.int64), chunk)
        for name in ("base", "block_stride", "page_nbytes")
    )
    chunk_index = np.tile(np.arange(chunk), len(group.tensors))
    slot_offset = np.cumsum(page_nbytes) - page_nbytes
    # All cuts are where a line of the slot ends, so the first one may come early.
    first_cut = piece_nbytes - slot_offset % LINE_NBYTES
    num_pieces = 1 + np.maximum(0, -(-(page_nbytes - first_cut) // piece_nbytes))
    page = np.repeat(np.arange(len(base)), num_pieces)
    index = np.arange(len(page)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = np.where(index == 0, 0, first_cut[page] + (index - 1) * piece_nbytes)
    stop = np.minimum(first_cut[page] + index * piece_nbytes, page_nbytes[page])

    pieces = np.zeros(len(page), PIECE_DTYPE)
    pieces["start"] = base[page] + start
    pieces["stride"] = stride[page]
    pieces["slot_offset"] = slot_offset[page] + start
    pieces["nbytes"] = stop - start
    pieces["chunk_index"] = chunk_index[page]
    # A number is a multiple of 2**k if its lowest k bits are zero, and several are if those of all of them are. Slots
    # begin on 4 KiB boundaries.
    bits = pieces["start"] | pieces["stride"] | pieces["slot_offset"]
    for width_log2 in range(1, _MAX_WIDTH_LOG2 + 1):
        pieces["width_log2"][bits % 2**width_log2 == 0] = width_log2
    return PieceTable(pieces, piece_nbytes, chunk)
