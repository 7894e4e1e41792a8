"""Layouts and overlaps against the obvious answer, byte by byte."""

import ctypes
from itertools import combinations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.page_overlap import PageRange, find_overlap


@st.composite
def page_ranges(draw: st.DrawFn) -> PageRange:
    nbytes = draw(st.integers(1, 6))
    stride = nbytes + draw(st.integers(0, 12))
    return draw(st.integers(1, 60)), draw(st.integers(1, 6)), stride, nbytes


def bytes_of(pages: PageRange) -> set[int]:
    base, count, stride, nbytes = pages
    return {base + block * stride + offset for block in range(count) for offset in range(nbytes)}


def assert_finds_an_overlap_if_there_is_one(ranges: list[PageRange]) -> None:
    pairs = {
        (first, second)
        for first, second in combinations(range(len(ranges)), 2)
        if bytes_of(ranges[first]) & bytes_of(ranges[second])
    }

    found = find_overlap(ranges)

    assert found in pairs if pairs else found is None


@settings(max_examples=500, deadline=None, print_blob=True)
@given(st.lists(page_ranges(), max_size=4))
def test_overlaps_are_those_of_the_sets_of_bytes(ranges: list[PageRange]) -> None:
    """Two ranges are named if and only if some two share a byte, and those two do."""
    assert_finds_an_overlap_if_there_is_one(ranges)


@settings(max_examples=500, deadline=None, print_blob=True)
@given(st.integers(0, 20), st.lists(page_ranges(), min_size=2, max_size=3))
def test_overlaps_with_one_stride_are_those_of_the_sets_of_bytes(gap: int, drawn: list[PageRange]) -> None:
    """The same holds where all tensors have one stride, which is calculated and not looked up."""
    stride = gap + max(nbytes for _, _, _, nbytes in drawn)

    assert_finds_an_overlap_if_there_is_one([(base, count, stride, nbytes) for base, count, _, nbytes in drawn])


@settings(max_examples=200, deadline=None, print_blob=True)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_pages_fill_a_block_without_gap_or_overlap(sizes: list[int], blocks_per_chunk: int) -> None:
    """The pages of a slot are disjoint, cover the block exactly and fit the slot, whose size is the next 4 KiB."""
    tensors = tuple(TensorPages(2**30 * (number + 1), 8, size, size) for number, size in enumerate(sizes))
    group = GroupLayout(tensors, tokens_per_block=blocks_per_chunk, blocks_per_chunk=blocks_per_chunk)
    ends = [*group.page_offsets[1:], group.block_nbytes]

    assert [size * blocks_per_chunk for size in sizes] == [
        end - offset for offset, end in zip(group.page_offsets, ends, strict=True)
    ]
    assert 0 == group.page_offsets[0]
    assert 0 == group.slot_nbytes % 4096
    assert 0 <= group.slot_nbytes - group.block_nbytes < 4096


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.data())
def test_a_description_finds_the_bytes_that_numpy_finds(data: st.DataObject) -> None:
    """For any shape, axis, type and cut of a tensor, the bytes found by address are those of each of its blocks."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), label="shape"))
    axis = data.draw(st.integers(0, len(shape) - 1), label="block axis")
    dtype = data.draw(st.sampled_from(["uint8", "float16", "int32", "complex128"]), label="dtype")
    padding = data.draw(st.integers(0, 2), label="blocks cut off")
    # The last axis that is cut may be any up to the block axis: behind it pages have to be contiguous.
    cut = data.draw(st.integers(0, axis), label="axis that is cut")
    whole = tuple(size + padding * (number == cut) for number, size in enumerate(shape))
    noise = np.random.default_rng(1).integers(0, 256, int(np.prod(whole)) * np.dtype(dtype).itemsize, np.uint8)
    tensor = noise.view(dtype).reshape(whole)[tuple(slice(size) for size in shape)]

    layout = BlockLayout.from_tensors([tensor], block_axis=axis, tokens_per_block=16)

    group = layout.groups[0]
    assert shape[axis] == group.num_device_blocks
    for block in range(shape[axis]):
        pages = [ctypes.string_at(page.base + block * page.block_stride, page.page_nbytes) for page in group.tensors]
        assert tensor.take(block, axis).tobytes() == b"".join(pages)
