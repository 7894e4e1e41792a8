"""A layout says where every byte of a block is, or is refused."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import LayoutError

KEYS = TensorPages(0x10000, 8, 256, 256, "bfloat16 NHD")
VALUES = TensorPages(0x20000, 8, 256, 256, "bfloat16 NHD")
SCALES = TensorPages(0x30000, 8, 64, 12, "float32 scales")
GROUP = GroupLayout((KEYS, VALUES, SCALES), tokens_per_block=16)


def read_block(group: GroupLayout, block: int) -> bytes:
    """Return the bytes of a device block of host tensors, found through the description alone."""
    return b"".join(ctypes.string_at(t.base + block * t.block_stride, t.page_nbytes) for t in group.tensors)


def write_block(group: GroupLayout, block: int, data: bytes) -> None:
    for tensor, offset in zip(group.tensors, group.page_offsets, strict=True):
        page = data[offset : offset + tensor.page_nbytes]
        ctypes.memmove(tensor.base + block * tensor.block_stride, page, len(page))


def random_bytes(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, shape, np.uint8)


def test_a_slot_holds_all_pages_back_to_back() -> None:
    """The pages of each tensor follow those of the one before, and a slot ends on a 4 KiB boundary."""
    group = GroupLayout((KEYS, VALUES, SCALES), tokens_per_block=32, blocks_per_chunk=2)

    assert (0, 512, 1024) == group.page_offsets
    assert (1048, 4096) == (group.block_nbytes, group.slot_nbytes)
    assert 8 == group.num_device_blocks


@pytest.mark.parametrize(("page_nbytes", "slot_nbytes"), [(1, 4096), (4096, 4096), (4097, 8192), (65536, 65536)])
def test_slots_are_multiples_of_4_kib(page_nbytes: int, slot_nbytes: int) -> None:
    """A slot is the block rounded up to 4 KiB."""
    group = GroupLayout((TensorPages(4096, 2, page_nbytes, page_nbytes),), tokens_per_block=1)

    assert slot_nbytes == group.slot_nbytes


def test_a_group_may_have_no_tensors() -> None:
    """A group that has nothing on this rank has blocks without bytes, beside a group that has some."""
    empty = GroupLayout((), tokens_per_block=16)

    layout = BlockLayout((empty, GROUP))

    assert (0, 0, 0, ()) == (empty.block_nbytes, empty.slot_nbytes, empty.num_device_blocks, empty.page_offsets)
    assert (empty, GROUP) == layout.groups


def test_a_layout_without_tensors_is_refused() -> None:
    """Without any tensor there is nothing to keep."""
    with pytest.raises(LayoutError, match="no groups"):
        BlockLayout(())
    with pytest.raises(LayoutError, match="no group of the layout has a tensor"):
        BlockLayout((GroupLayout((), tokens_per_block=16),))
    with pytest.raises(LayoutError, match="no tensors were given"):
        BlockLayout.from_tensors([], block_axis=0, tokens_per_block=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": 0}, "base address of a tensor is 0"),
        ({"base": -4096}, "base address of a tensor is -4096"),
        ({"num_blocks": 0}, "0 blocks of 256 bytes"),
        ({"page_nbytes": 0}, "8 blocks of 0 bytes"),
        ({"block_stride": 255}, "pages of 256 bytes lie 255 bytes apart"),
        ({"block_stride": 0}, "lie 0 bytes apart"),
        ({"block_stride": -256}, "the block stride of a tensor is -256"),
    ],
)
def test_unusable_tensors_are_refused(change: dict[str, int], message: str) -> None:
    """A tensor without an address, a block or a byte, or with pages that overlap, is refused."""
    with pytest.raises(LayoutError, match=message):
        replace(KEYS, **change)  # type: ignore[arg-type]


def test_the_stride_of_a_single_block_does_not_matter() -> None:
    """Where there is no second block, nothing is a stride away."""
    assert 256 == TensorPages(4096, 1, 0, 256).page_nbytes


@pytest.mark.parametrize(
    ("tokens_per_block", "blocks_per_chunk", "message"),
    [
        (0, 1, "tokens_per_block is 0"),
        (-16, 1, "tokens_per_block is -16"),
        (16, 0, "blocks_per_chunk is 0"),
        (16, 3, "tokens_per_block is 16 with 3 device blocks"),
    ],
)
def test_unusable_groups_are_refused(tokens_per_block: int, blocks_per_chunk: int, message: str) -> None:
    """The tokens of a block are a multiple of its device blocks."""
    with pytest.raises(LayoutError, match=message):
        GroupLayout((KEYS,), tokens_per_block=tokens_per_block, blocks_per_chunk=blocks_per_chunk)


def test_tensors_of_a_group_have_one_number_of_blocks() -> None:
    """One block id names the same block in each tensor."""
    with pytest.raises(LayoutError, match=r"have \[7, 8\] blocks"):
        GroupLayout((KEYS, replace(VALUES, num_blocks=7)), tokens_per_block=16)


@pytest.mark.parametrize("base", [KEYS.base, KEYS.base + 255, KEYS.base + 7 * 256, KEYS.base - 8 * 256 + 1])
def test_overlapping_pages_of_one_group_are_refused(base: int) -> None:
    """Two tensors of one group that share a byte would store it twice and load it in either order."""
    with pytest.raises(LayoutError, match="pages of tensor 0 and tensor 2 of one group overlap"):
        GroupLayout((KEYS, VALUES, replace(KEYS, base=base)), tokens_per_block=16)


def test_pages_of_different_groups_may_alias() -> None:
    """Engines lay the pools of several groups over each other: a block is of one group at a time."""
    other = GroupLayout((replace(KEYS, num_blocks=4, block_stride=512, page_nbytes=512),), tokens_per_block=16)

    assert 2 == len(BlockLayout((GROUP, other)).groups)


def test_interleaved_pages_are_no_overlap() -> None:
    """Keys and values of one block may lie side by side."""
    keys = replace(KEYS, block_stride=512)

    assert 2 == len(GroupLayout((keys, replace(keys, base=keys.base + 256)), tokens_per_block=16).tensors)


def test_the_fingerprint_changes_with_each_field_that_shapes_the_bytes() -> None:
    """No two layouts whose blocks differ in a byte have one fingerprint (B32)."""
    chunk = replace(GROUP, tokens_per_block=32, blocks_per_chunk=2)
    layouts = [
        BlockLayout((GROUP,)),
        BlockLayout((replace(GROUP, tokens_per_block=32),)),
        BlockLayout((chunk,)),
        BlockLayout((replace(GROUP, tensors=(KEYS, VALUES)),)),
        BlockLayout((replace(GROUP, tensors=(KEYS, SCALES, VALUES)),)),
        BlockLayout((replace(GROUP, tensors=(KEYS, VALUES, replace(SCALES, page_nbytes=16))),)),
        BlockLayout((replace(GROUP, tensors=(KEYS, VALUES, replace(SCALES, content="float32 zero points"))),)),
        BlockLayout((GROUP, GroupLayout((), tokens_per_block=16))),
        BlockLayout((GroupLayout((), tokens_per_block=16), GROUP)),
        BlockLayout((GROUP, GROUP)),
        BlockLayout((replace(GROUP, tensors=(KEYS, VALUES)), replace(GROUP, tensors=(SCALES,)))),
    ]

    assert len(layouts) == len({layout.fingerprint for layout in layouts})
    assert {32} == {len(layout.fingerprint) for layout in layouts}


def test_the_fingerprint_does_not_depend_on_where_the_blocks_are() -> None:
    """Addresses, strides and the number of device blocks may change between two runs."""
    moved = tuple(replace(t, base=t.base + 4096, block_stride=t.block_stride * 2, num_blocks=4) for t in GROUP.tensors)

    assert BlockLayout((GROUP,)).fingerprint == BlockLayout((replace(GROUP, tensors=moved),)).fingerprint


def test_one_shape_with_two_meanings_gives_two_layouts() -> None:
    """A shape that fits two descriptions needs one of them: the axis, and what dtype and shape cannot tell (B31)."""
    tensor = random_bytes(2, 2, 16, 64)

    with pytest.raises(TypeError, match="block_axis"):
        BlockLayout.from_tensors([tensor], tokens_per_block=16)  # type: ignore[call-arg]
    layouts = [
        BlockLayout.from_tensors([tensor], block_axis=axis, tokens_per_block=16, content=content)
        for axis, content in ((0, ""), (1, ""), (0, "NHD"), (0, "HND"))
    ]

    assert 4 == len({layout.fingerprint for layout in layouts})
    assert tensor[1].tobytes() == read_block(layouts[0].groups[0], 1)
    assert tensor[:, 1].tobytes() == read_block(layouts[1].groups[0], 1)


@pytest.mark.parametrize("dtype", ["float16", "int16", "uint16"])
def test_the_dtype_is_in_the_fingerprint(dtype: str) -> None:
    """Two element types of one size are not the same bytes."""
    layout = BlockLayout.from_tensors([np.zeros((4, 8), dtype)], block_axis=0, tokens_per_block=16)

    assert f"{dtype}[8]" == layout.groups[0].tensors[0].content


def test_padding_and_scales_travel_with_the_block() -> None:
    """Data, padding inside the page and a row of an external scale table come back byte for byte (B30)."""
    pages = random_bytes(4, 300)  # 256 bytes of data and 44 of padding
    scales = random_bytes(4, 8).view(np.float32)
    layout = BlockLayout.from_tensors([pages, scales], block_axis=0, tokens_per_block=16)
    group = layout.groups[0]
    expected = pages[2].tobytes() + scales[2].tobytes()

    slot = read_block(group, 2)
    pages[2], scales[2] = 0, 0  # the block is given to somebody else
    write_block(group, 2, slot)

    assert 308 == group.block_nbytes
    assert expected == slot == pages[2].tobytes() + scales[2].tobytes()


def test_blocks_with_gaps_between_them_are_found() -> None:
    """A stride above the page size, as in a pool of padded pages, is taken from the tensor."""
    pool = random_bytes(6, 512)
    group = BlockLayout.from_tensors([pool[:, :100]], block_axis=0, tokens_per_block=16).groups[0]

    assert (6, 512, 100) == (group.num_device_blocks, group.tensors[0].block_stride, group.tensors[0].page_nbytes)
    assert pool[3, :100].tobytes() == read_block(group, 3)


def test_axes_before_the_block_axis_are_pages_of_their_own() -> None:
    """A tensor of keys and values for each layer gives one page for each, in the order of the axes."""
    tensor = random_bytes(2, 3, 5, 32)
    group = BlockLayout.from_tensors([tensor], block_axis=2, tokens_per_block=16).groups[0]

    assert 6 == len(group.tensors)
    assert tensor[:, :, 4].tobytes() == read_block(group, 4)


@pytest.mark.parametrize(
    ("tensor", "block_axis", "message"),
    [
        (np.zeros((4, 8), np.uint8), 2, r"block_axis is 2 for a tensor of shape \(4, 8\): give an axis from 0 to 1"),
        (np.zeros((4, 8), np.uint8), -1, "block_axis is -1"),
        (np.zeros((4, 8, 2), np.uint8).transpose(0, 2, 1), 0, "not contiguous behind axis 0"),
        (np.zeros((4, 8, 4), np.uint8)[:, :, :2], 0, "not contiguous behind axis 0"),
        (np.zeros((4, 8), np.uint8)[:, ::-1], 0, "not contiguous behind axis 0"),
        (np.zeros((4, 8), np.uint8)[::-1], 0, "the block stride of a tensor is -8"),
        (np.zeros((4, 0), np.uint8), 0, r"a tensor has shape \(4, 0\) and no bytes"),
        (np.zeros((0, 4), np.uint8), 0, r"a tensor has shape \(0, 4\) and no bytes"),
        (np.array(1, np.uint8), 0, "block_axis is 0 for a tensor of shape"),
        ([1, 2, 3], 0, "found list: pass torch or numpy tensors"),
    ],
)
def test_tensors_that_cannot_be_described_are_refused(tensor: object, block_axis: int, message: str) -> None:
    """A tensor whose pages are not contiguous, not there or not countable is refused; nothing is guessed."""
    with pytest.raises(LayoutError, match=message):
        BlockLayout.from_tensors([tensor], block_axis=block_axis, tokens_per_block=16)


def test_a_block_axis_that_repeats_memory_is_refused() -> None:
    """Broadcast tensors have pages that overlap."""
    repeated = np.lib.stride_tricks.as_strided(np.zeros(8, np.uint8), (4, 8), (0, 1))

    with pytest.raises(LayoutError, match="lie 0 bytes apart"):
        BlockLayout.from_tensors([repeated], block_axis=0, tokens_per_block=16)


def test_a_tensor_named_twice_is_refused() -> None:
    """The same tensor twice in a group is an overlap."""
    tensor = np.zeros((4, 8), np.uint8)

    with pytest.raises(LayoutError, match="tensor 0 and tensor 1 of one group overlap"):
        BlockLayout.from_tensors([tensor, tensor], block_axis=0, tokens_per_block=16)


def test_a_layout_keeps_its_tensors_alive() -> None:
    """Tensors given to from_tensors live as long as their group, and do not take part in comparisons."""
    tensor = np.zeros((4, 8), np.uint8)
    layout = BlockLayout.from_tensors((each for each in [tensor]), block_axis=0, tokens_per_block=16)

    assert layout.groups[0].tensor_owners[0] is tensor
    assert layout.on_host
    assert layout == BlockLayout(layout.groups)
    assert hash(layout) == hash(BlockLayout(layout.groups))
