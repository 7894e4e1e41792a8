"""The piece table of the page kernel, against a model that looks at every byte."""

import ctypes
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_page_kernel import Piece
from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.cuda.piece_table import LINE_NBYTES, PIECE_DTYPE, build_piece_table
from kvmoor.errors import LayoutError

SOURCE = (files("kvmoor.devices.cuda") / "page_copy.cu").read_text()


@st.composite
def groups(draw):
    """Groups of up to four tensors of any geometry, far apart from each other."""
    chunk = draw(st.integers(1, 8))
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        unit = draw(st.sampled_from([1, 2, 8, 16, 128, 512]))
        page_nbytes = unit * draw(st.integers(1, 40))
        stride = page_nbytes + unit * draw(st.integers(0, 3))
        base = (number + 1) * 2**40 + unit * draw(st.integers(0, 9))
        tensors.append(TensorPages(base, 50, stride, page_nbytes))
    return GroupLayout(tuple(tensors), chunk, chunk)


def bytes_of_group(group, ids):
    """Return for each byte of a slot where in device memory it comes from: int64 ``[block_nbytes]``."""
    return np.concatenate(
        [
            tensor.base + block_id * tensor.block_stride + np.arange(tensor.page_nbytes)
            for tensor in group.tensors
            for block_id in ids
        ]
    )


@given(groups(), st.integers(1, 6), st.data())
def test_pieces_cover_each_byte_of_a_slot_once_and_from_the_right_place(group, lines, data):
    """Together the pieces are the slot, in its order, and each byte comes from the page that belongs there."""
    ids = data.draw(st.lists(st.integers(0, 49), min_size=group.blocks_per_chunk, max_size=group.blocks_per_chunk))
    table = build_piece_table(group, lines * LINE_NBYTES)

    sources = [
        int(piece["start"]) + ids[piece["chunk_index"]] * int(piece["stride"]) + np.arange(piece["nbytes"])
        for piece in table.pieces
    ]

    np.testing.assert_array_equal(bytes_of_group(group, ids), np.concatenate(sources))
    ends = np.cumsum(table.pieces["nbytes"])
    np.testing.assert_array_equal(ends - table.pieces["nbytes"], table.pieces["slot_offset"])


@given(groups(), st.integers(1, 6))
def test_pieces_end_where_pages_or_lines_of_the_slot_do(group, lines):
    """No piece is longer than allowed or empty, and inside a page it ends with a line: no two warps share a line."""
    table = build_piece_table(group, lines * LINE_NBYTES)
    pieces = table.pieces

    assert pieces["nbytes"].min() > 0
    assert pieces["nbytes"].max() <= table.piece_nbytes
    page_ends = {
        offset + (index + 1) * tensor.page_nbytes
        for tensor, offset in zip(group.tensors, group.page_offsets, strict=True)
        for index in range(group.blocks_per_chunk)
    }
    ends = (pieces["slot_offset"] + pieces["nbytes"]).tolist()
    assert all(end in page_ends or end % LINE_NBYTES == 0 for end in ends)
    # No more pieces than that needs: only a page's first one may be short, and its last.
    assert len(pieces) <= sum(2 + page.page_nbytes // table.piece_nbytes for page in group.tensors) * len(
        page_ends
    ) // len(group.tensors)


@given(groups(), st.integers(1, 6))
def test_widths_are_the_widest_that_both_sides_allow(group, lines):
    """Every device block's piece and its place in any slot are aligned to the width, and not to the next wider one."""
    for piece in build_piece_table(group, lines * LINE_NBYTES).pieces:
        addresses = [int(piece["start"]) + i * int(piece["stride"]) for i in range(50)] + [int(piece["slot_offset"])]
        width = 1 << int(piece["width_log2"])
        assert all(address % width == 0 for address in addresses)
        assert width == 16 or any(address % (2 * width) for address in addresses)


@given(groups())
def test_odd_pieces_are_those_that_are_not_whole_wide_words(group):
    """A table has odd pieces if its pages, or where they lie, are not multiples of 16 bytes."""
    offsets = [
        offset + index * tensor.page_nbytes
        for tensor, offset in zip(group.tensors, group.page_offsets, strict=True)
        for index in range(group.blocks_per_chunk)
    ]
    numbers = [n for tensor in group.tensors for n in (tensor.base, tensor.block_stride, tensor.page_nbytes)]
    assert any(number % 16 for number in numbers + offsets) == build_piece_table(group, 4096).has_odd_pieces


@pytest.mark.parametrize(
    ("base", "stride", "page_nbytes", "is_odd"),
    [(2**40, 512, 512, False), (2**40, 512, 496, False), (2**40, 512, 500, True), (2**40 + 8, 512, 512, True)],
)
def test_one_page_that_is_odd_is_enough(base, stride, page_nbytes, is_odd):
    """A page that ends within a word is odd even if it begins on one, as is one that begins within a word."""
    pages = TensorPages(2**50, 50, 4096, 4096), TensorPages(base, 50, stride, page_nbytes)
    assert is_odd == build_piece_table(GroupLayout(pages, 16), 4096).has_odd_pieces


def test_a_group_without_tensors_has_no_pieces():
    """There is nothing to copy, and nothing odd about it."""
    table = build_piece_table(GroupLayout((), 16), 4096)
    assert 0 == len(table.pieces) == table.nbytes
    assert not table.has_odd_pieces


def test_a_large_layout_is_cut_as_its_numbers_say():
    """80 layers of keys and values with 64 KiB pages, eight device blocks a block: 20,480 pieces of 4 KiB."""
    tensors = tuple(TensorPages((number + 1) * 2**36, 1000, 65536, 65536) for number in range(160))
    table = build_piece_table(GroupLayout(tensors, 128, 8), 4096)

    assert 160 * 8 * 16 == len(table.pieces)
    assert {4096} == set(table.pieces["nbytes"].tolist())
    assert {4} == set(table.pieces["width_log2"].tolist())
    assert 32 * len(table.pieces) == table.nbytes


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorPages(2**40, 2, 2**32, 2**32), r"4294967296 bytes.*describe fewer device blocks"),
        (TensorPages(2**40, 2**31 + 1, 16, 16), r"2147483649 device blocks.*describe several groups"),
    ],
)
def test_what_does_not_fit_into_32_bits_is_refused(tensor, message):
    """Blocks of 4 GiB and more than 2**31 device blocks are refused before anything wraps around."""
    with pytest.raises(LayoutError, match=message):
        build_piece_table(GroupLayout((tensor,), 1), 4096)


def test_the_largest_that_fit_are_not():
    """The last block id and the last offset in a slot keep their value in 32 bits."""
    group = GroupLayout((TensorPages(2**40, 2**31, 16, 16), TensorPages(2**50, 2**31, 2**22, 2**22)), 900, 900)
    pieces = build_piece_table(group, 2**20).pieces
    assert group.block_nbytes == int(pieces["slot_offset"][-1]) + int(pieces["nbytes"][-1])


def test_the_kernel_reads_a_piece_as_it_is_written():
    """The type of a piece is that of the structure of the same name in page_copy.cu, field by field."""
    (body,) = re.findall(r"struct Piece \{(.*?)\};", SOURCE, re.DOTALL)
    in_source = [(name, {"u64": "<u8", "u32": "<u4"}[kind]) for kind, name in re.findall(r"(u\d\d) (\w+);", body)]
    assert in_source == [(name, PIECE_DTYPE[name].str) for name in PIECE_DTYPE.names]
    assert [name for name, _ in in_source] == [name for name, _ in Piece._fields_]
    assert ctypes.sizeof(Piece) == PIECE_DTYPE.itemsize
