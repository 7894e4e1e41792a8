"""Host copies move exactly the bytes of the pages asked for, in few calls, and leave the interpreter lock free."""

import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices import host_copies
from kvmoor.devices.device import Direction
from kvmoor.devices.host_copies import GroupCopier

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
WAIT_S = 30.0

groups = st.builds(
    dict,
    page_sizes=st.lists(st.sampled_from([1, 3, 64, 100, 256]), min_size=1, max_size=7),
    paddings=st.lists(st.sampled_from([0, 0, 8, 300]), min_size=1, max_size=4),
    gaps=st.lists(st.sampled_from([0, 0, 0, 16, 5000]), min_size=1, max_size=4),
    blocks_per_chunk=st.sampled_from([1, 1, 2, 3]),
    backwards=st.booleans(),
)


class HostBlocks:
    """A group whose tensors lie in one array, and slots in another, filled with different noise."""

    def __init__(
        self,
        page_sizes: Sequence[int],
        *,
        paddings: Sequence[int] = (0,),
        gaps: Sequence[int] = (0,),
        blocks_per_chunk: int = 1,
        backwards: bool = False,
        num_blocks: int = 24,
        num_slots: int = 24,
    ) -> None:
        strides = [size + paddings[number % len(paddings)] for number, size in enumerate(page_sizes)]
        places, end = [], 0
        for number, stride in enumerate(strides):
            places.append(end)
            end += stride * num_blocks + gaps[number % len(gaps)]
        random = np.random.default_rng(0)
        self.device = random.integers(0, 256, end, dtype=np.uint8)
        if backwards:  # as the kernel places one mapping after the other
            places = [end - place - stride * num_blocks for place, stride in zip(places, strides, strict=True)]
        self.tensors = [
            TensorPages(self.device.ctypes.data + place, num_blocks, stride, size)
            for place, stride, size in zip(places, strides, page_sizes, strict=True)
        ]
        self.group = GroupLayout(tuple(self.tensors), blocks_per_chunk, blocks_per_chunk)
        self.slots = random.integers(0, 256, (num_slots, self.group.slot_nbytes), dtype=np.uint8)

    def slot_addresses(self, slots: Sequence[int]) -> NDArray[np.int64]:
        return self.slots.ctypes.data + self.group.slot_nbytes * np.array(slots, np.int64)

    def copy(self, direction: Direction, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        GroupCopier(self.group).copy(direction, np.array(block_ids, np.int64), self.slot_addresses(slots))

    def copied(
        self, direction: Direction, block_ids: Sequence[int], slots: Sequence[int]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return device and slots as they have to be after the copy, made one page at a time."""
        device, host = self.device.copy(), self.slots.copy()
        per_chunk = self.group.blocks_per_chunk
        for position, block_id in enumerate(block_ids):
            for tensor, offset in zip(self.tensors, self.group.page_offsets, strict=True):
                start = tensor.base + block_id * tensor.block_stride - self.device.ctypes.data
                page = device[start : start + tensor.page_nbytes]
                start = offset + position % per_chunk * tensor.page_nbytes
                place = host[slots[position // per_chunk], start : start + tensor.page_nbytes]
                if direction is STORE:
                    place[:] = page
                else:
                    page[:] = place
        return device, host


@pytest.fixture(params=["boxes", "temporary"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(host_copies, "_SMALL_BOX_NBYTES", 0 if request.param == "boxes" else 2**62)
    monkeypatch.setattr(host_copies, "_TEMPORARY_NBYTES", 1000)  # several rounds for a few blocks
    return request.param


def lattice_shapes(group: GroupLayout) -> list[tuple[int, ...]]:
    return [lattice.shape for part in GroupCopier(group)._parts for lattice in part._lattices]


def tensors_at(bases: Sequence[int], page_nbytes: int = 64, num_blocks: int = 100) -> GroupLayout:
    return GroupLayout(tuple(TensorPages(base, num_blocks, page_nbytes, page_nbytes) for base in bases), 1)


@given(options=groups, data=st.data(), direction=st.sampled_from(Direction), boxes=st.booleans())
def test_exactly_the_right_bytes_are_copied(
    options: dict[str, object], data: st.DataObject, direction: Direction, *, boxes: bool
) -> None:
    """Whatever the geometry and the order of blocks and slots, the copy equals one made page by page."""
    blocks = HostBlocks(**options)
    num_whole = data.draw(st.integers(1, 24 // blocks.group.blocks_per_chunk), "blocks")
    steps = st.sampled_from([sorted, lambda ids: sorted(ids, reverse=True), list])
    order, slot_order = data.draw(steps, "order"), data.draw(steps, "slot order")
    ids = data.draw(st.permutations(range(24)), "block ids")[: num_whole * blocks.group.blocks_per_chunk]
    slots = data.draw(st.permutations(range(24)), "slots")[:num_whole]
    ids, slots = order(ids), slot_order(slots)
    device, host = blocks.copied(direction, ids, slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "_SMALL_BOX_NBYTES", 0 if boxes else 2**62)
        patch.setattr(host_copies, "_TEMPORARY_NBYTES", 1000)
        blocks.copy(direction, ids, slots)

    np.testing.assert_array_equal(device, blocks.device)
    np.testing.assert_array_equal(host, blocks.slots)


@pytest.mark.parametrize("direction", Direction)
def test_both_ways_copy_the_same(direction: Direction, way: str) -> None:
    """Boxes and the temporary give the same bytes for data, scales and padding of a chunk (B30)."""
    blocks = HostBlocks([256, 4, 256, 4], paddings=[0, 12], gaps=[0, 700], blocks_per_chunk=2)
    ids, slots = [5, 4, 3, 9, 20, 21], [7, 1, 2]
    device, host = blocks.copied(direction, ids, slots)

    blocks.copy(direction, ids, slots)

    np.testing.assert_array_equal(device, blocks.device)
    np.testing.assert_array_equal(host, blocks.slots)


def test_slices_of_one_allocation_fold_into_one_lattice() -> None:
    """Tensors at equal distances, rising, falling or interleaved, are one lattice."""
    assert [(8, 64)] == lattice_shapes(tensors_at(range(10**6, 10**6 + 8 * 6400, 6400)))
    assert [(8, 64)] == lattice_shapes(tensors_at(range(10**6, 10**6 - 8 * 7000, -7000)))
    interleaved = tuple(TensorPages(10**6 + 64 * number, 100, 8 * 64, 64) for number in range(8))
    assert [(8, 64)] == lattice_shapes(GroupLayout(interleaved, 1))


def test_keys_and_values_fold_over_the_layers() -> None:
    """Keys and values of one layer beside each other, layers at another distance: one lattice with two axes."""
    assert [(6, 2, 64)] == lattice_shapes(
        tensors_at([10**6 + layer * 20_000 + half * 6400 for layer in range(6) for half in range(2)])
    )


def test_data_and_scales_fold_each_with_their_own_kind() -> None:
    """Tensors of two page sizes in turn become two lattices."""
    tensors = [
        TensorPages(10**6 + layer * 10_000 + scale * 6400, 100, 4 if scale else 64, 4 if scale else 64)
        for layer in range(5)
        for scale in range(2)
    ]

    assert [(5, 4), (5, 64)] == lattice_shapes(GroupLayout(tuple(tensors), 1))


def test_no_lattice_spans_a_wide_gap() -> None:
    """Tensors far from each other stay apart, since an arena may lie between them; those beside them fold in pairs."""
    assert [(64,), (64,)] == lattice_shapes(tensors_at([10**6, 10**9]))
    assert [(2, 64), (2, 64)] == lattice_shapes(tensors_at([10**6, 10**6 + 6400, 10**9, 10**9 + 8000]))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30))
def test_progressions_cover_all_in_constant_steps(pairs: list[tuple[int, int]]) -> None:
    """The pieces follow each other without a gap, advance in constant steps and could not be longer."""
    first, second = np.array(pairs, np.int64).T

    pieces = list(host_copies._progressions(first, second))

    ends = [start + length for start, length in pieces]
    assert [0, *ends[:-1]] == [start for start, _ in pieces]
    assert len(pairs) == ends[-1]
    for start, length in pieces:
        steps = {tuple(step) for step in np.diff(pairs[start : start + length], axis=0).tolist()}
        assert len(steps) <= 1
        if start + length < len(pairs):
            longer = {tuple(step) for step in np.diff(pairs[start : start + length + 1], axis=0).tolist()}
            assert 2 == len(longer)


def test_random_blocks_are_copied_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in an order without any pattern need half as many boxes as there are blocks, runs only one."""
    shapes: list[tuple[int, ...]] = []
    array_at = host_copies._array_at

    def watched(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.uint8]:
        shapes.append(shape)
        return array_at(address, shape, strides)

    monkeypatch.setattr(host_copies, "_array_at", watched)
    monkeypatch.setattr(host_copies, "_SMALL_BOX_NBYTES", 0)
    blocks = HostBlocks([64] * 3)

    blocks.copy(STORE, [3, 17, 4, 20, 9, 11], [5, 1, 22, 13, 2, 19])
    assert [(2, 3, 64)] * 6 == shapes  # two arrays a box
    shapes.clear()
    blocks.copy(STORE, [9, 8, 7, 6, 5, 4], [2, 3, 4, 5, 6, 7])
    assert [(6, 3, 64)] * 2 == shapes


@pytest.mark.parametrize("num_tensors", [8, 1])
def test_the_interpreter_lock_is_free_while_bytes_move(way: str, num_tensors: int) -> None:
    """Another thread runs while a copy does, even where the interpreter never takes the lock away by itself."""
    blocks = HostBlocks([4096] * num_tensors, num_blocks=64, num_slots=64)
    copier, addresses = GroupCopier(blocks.group), blocks.slot_addresses(range(64))
    ids = np.random.default_rng(1).permutation(64).astype(np.int64)
    go, ran = threading.Lock(), threading.Event()
    go.acquire()

    def wait_for_go() -> None:
        with go:
            ran.set()

    thread = threading.Thread(target=wait_for_go)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        go.release()
        copied_while_waiting = copies_until(ran.is_set, lambda: copier.copy(STORE, ids, addresses))
    finally:
        sys.setswitchinterval(interval)
        thread.join(WAIT_S)

    assert copied_while_waiting


def copies_until(done: Callable[[], bool], copy: Callable[[], None]) -> bool:
    """Copy until `done`, at most so often that the thread had every chance; say whether it is done."""
    for _ in range(20_000):
        copy()
        if done():
            return True
    return False
