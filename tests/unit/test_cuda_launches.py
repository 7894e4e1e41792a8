"""Launches of the page kernel: what their parameters make a kernel do, run by a stand-in on real memory."""

import ctypes
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_page_kernel import Header, run_page_kernel
from kvmoor.block_layout import SLOT_ALIGNMENT, GroupLayout, TensorPages
from kvmoor.devices.cuda.launches import (
    BULK,
    BULK_DEEP,
    HEADER,
    LARGE_PARAMETERS_NBYTES,
    ROWS8,
    SMALL_PARAMETERS_NBYTES,
    VARIANTS,
    KernelFunctions,
    PageLaunches,
)
from kvmoor.devices.cuda.piece_table import build_piece_table
from kvmoor.devices.device import Direction
from kvmoor.errors import LayoutError

SOURCE = (files("kvmoor.devices.cuda") / "page_copy.cu").read_text()
SMALL, LARGE = 11, 12  # handles
STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE


class Rig:
    """One group over real memory, with the few words that a queue has."""

    def __init__(self, tensors, blocks_per_chunk=1, num_slots=8, direction=STORE, variant=ROWS8, seed=0):
        """`tensors`: (page_nbytes, gap behind each, first byte) of each; 12 device blocks."""
        self.random = np.random.default_rng(seed)
        self.memories = [
            self.random.integers(0, 256, first + 12 * (page + gap), np.uint8) for page, gap, first in tensors
        ]
        pages = [
            TensorPages(memory.ctypes.data + first, 12, page + gap, page)
            for memory, (page, gap, first) in zip(self.memories, tensors, strict=True)
        ]
        self.group = GroupLayout(tuple(pages), blocks_per_chunk, blocks_per_chunk)
        self.slots = self.random.integers(0, 256, (num_slots + 1) * self.group.slot_nbytes + SLOT_ALIGNMENT, np.uint8)
        first_slot = self.slots.ctypes.data + -self.slots.ctypes.data % SLOT_ALIGNMENT
        self.slot_addresses = first_slot + self.group.slot_nbytes * np.arange(num_slots, dtype=np.int64)
        self.table = build_piece_table(self.group, variant.piece_nbytes)
        self.words = np.zeros(4, np.uint64)  # completion word, ticket, begin, end
        self.word, self.ticket, self.begin, self.end = (self.words.ctypes.data + 8 * i for i in range(4))
        self.launches = PageLaunches(
            self.table,
            KernelFunctions(variant, SMALL, LARGE),
            direction,
            table_address=self.table.pieces.ctypes.data,
            word_address=self.word,
            ticket_address=self.ticket,
        )

    def run(self, launch):
        run_page_kernel(parameters_of(launch), launch.grid, lambda address, nbytes, write: None)


def parameters_of(launch):
    """Return what the driver would copy."""
    pointer = ctypes.c_void_p.from_address(launch.parameters_address).value
    nbytes = {SMALL: SMALL_PARAMETERS_NBYTES, LARGE: LARGE_PARAMETERS_NBYTES}[launch.function]
    return ctypes.string_at(pointer, nbytes)


def header_of(launch):
    return Header.from_buffer_copy(parameters_of(launch))


def launches_without_memory(*, blocks_per_chunk=1, num_pieces=1, direction=STORE, variant=ROWS8):
    """Return launches that are looked at and never run."""
    tensors = tuple(TensorPages(2**30 * (i + 1), 10**6, 512, 512) for i in range(num_pieces))
    table = build_piece_table(GroupLayout(tensors, blocks_per_chunk, blocks_per_chunk), variant.piece_nbytes)
    addresses = {"table_address": 2**40, "word_address": 2**41, "ticket_address": 2**42}
    return PageLaunches(table, KernelFunctions(variant, SMALL, LARGE), direction, **addresses)


tensor_shapes = st.tuples(
    st.one_of(st.integers(1, 400), st.integers(1, 40).map(lambda n: 128 * n)),
    st.sampled_from([0, 0, 1, 8, 16, 128]),
    st.integers(0, 33),
)


@given(
    st.lists(tensor_shapes, min_size=1, max_size=4),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(Direction),
    st.sampled_from(VARIANTS),
    st.data(),
)
def test_launches_copy_what_the_pairs_say_and_nothing_else(tensors, chunk, direction, variant, data):
    """Every byte of every page is where it belongs afterwards, and no other byte of either side has changed."""
    rig = Rig(tensors, chunk, direction=direction, variant=variant)
    num_blocks = data.draw(st.integers(1, 12 // chunk))
    order = data.draw(st.permutations(range(12)))[: num_blocks * chunk]
    ids = np.array([block if data.draw(st.integers(0, 9)) else -1 for block in order], np.int64)
    if data.draw(st.booleans()):
        rig.launches._num_few = 0  # as for many blocks
    slots = rig.random.permutation(8)[:num_blocks] if num_blocks <= 8 else np.arange(8)
    ids = ids[: len(slots) * chunk]
    expected_slots, expected_memories = rig.slots.copy(), [memory.copy() for memory in rig.memories]
    for number, block_id in enumerate(ids.tolist()):
        if block_id < 0:
            continue
        block, index = divmod(number, chunk)
        for tensor, offset, memory, expected in zip(
            rig.group.tensors, rig.group.page_offsets, rig.memories, expected_memories, strict=True
        ):
            page = tensor.base + block_id * tensor.block_stride - memory.ctypes.data
            place = rig.slot_addresses[slots[block]] + offset + index * tensor.page_nbytes - rig.slots.ctypes.data
            if direction is STORE:
                expected_slots[place : place + tensor.page_nbytes] = memory[page : page + tensor.page_nbytes]
            else:
                expected[page : page + tensor.page_nbytes] = rig.slots[place : place + tensor.page_nbytes]

    for launch in rig.launches.launches(ids, rig.slot_addresses[slots], thread_blocks=4, sequence=5):
        rig.run(launch)

    np.testing.assert_array_equal(expected_slots, rig.slots)
    for expected, memory in zip(expected_memories, rig.memories, strict=True):
        np.testing.assert_array_equal(expected, memory)
    assert 5 == rig.words[0]


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_a_long_job_is_cut_and_only_its_last_launch_stores_the_number(chunk):
    """Launches take all blocks in order; the first notes when it begins, the last notes the end and the number."""
    launches = launches_without_memory(blocks_per_chunk=chunk)
    room = (LARGE_PARAMETERS_NBYTES - HEADER.size) // (4 * (1 + chunk))
    num_blocks = 2 * room + 3
    ids = np.arange(num_blocks * chunk, dtype=np.int64)
    addresses = 2**45 + SLOT_ALIGNMENT * np.arange(num_blocks, dtype=np.int64)[::-1].copy()

    headers, rows = [], []
    for launch in launches.launches(
        ids, addresses, thread_blocks=4, sequence=2**64 - 1, begin_address=96, end_address=104
    ):
        header = header_of(launch)
        headers.append(header)
        row = np.frombuffer(parameters_of(launch), np.int32, header.num_blocks * (1 + chunk), ctypes.sizeof(Header))
        row = row.reshape(header.num_blocks, 1 + chunk)
        rows.append((header.slots_base + row[:, 0].astype(np.int64) * SLOT_ALIGNMENT, row[:, 1:]))

    assert [room, room, 3] == [header.num_blocks for header in headers]
    assert [0, 0, 2**64 - 1] == [header.sequence for header in headers]
    assert [96, 0, 0] == [header.begin_time for header in headers]
    assert [0, 0, 104] == [header.end_time for header in headers]
    np.testing.assert_array_equal(addresses, np.concatenate([slots for slots, _ in rows]))
    np.testing.assert_array_equal(ids, np.concatenate([block_ids.ravel() for _, block_ids in rows]))


@pytest.mark.parametrize("chunk", [1, 3])
def test_short_jobs_go_to_the_function_with_few_parameters(chunk):
    """The small function is used as long as its parameters have room, the large one from one more block on."""
    launches = launches_without_memory(blocks_per_chunk=chunk)
    room = (SMALL_PARAMETERS_NBYTES - HEADER.size) // (4 * (1 + chunk))
    for num_blocks, function in ((1, SMALL), (room, SMALL), (room + 1, LARGE)):
        addresses = 2**45 + SLOT_ALIGNMENT * np.arange(num_blocks, dtype=np.int64)
        (launch,) = launches.launches(np.zeros(num_blocks * chunk, np.int64), addresses, thread_blocks=4)
        assert function == launch.function


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_little_work_gets_few_thread_blocks(variant):
    """A launch has a warp for each piece, up to the thread blocks allowed, and the threads its variant is made for."""
    launches = launches_without_memory(num_pieces=3, variant=variant)
    warps = variant.threads_per_block // 32
    for num_blocks in (1, 2, warps, 4 * warps, 400):
        addresses = 2**45 + SLOT_ALIGNMENT * np.arange(num_blocks, dtype=np.int64)
        (launch,) = launches.launches(np.zeros(num_blocks, np.int64), addresses, thread_blocks=4)
        assert min(4, -(-3 * num_blocks // warps)) == launch.grid
        assert (variant.threads_per_block, variant.shared_nbytes) == (launch.block, launch.shared_nbytes)


REACH = 2**32 * SLOT_ALIGNMENT
"""How far apart slots of one launch may not be: their distance in units of 4 KiB has 32 bits."""


@pytest.mark.parametrize(
    ("offsets", "num_launches"),
    [
        ([0, REACH - SLOT_ALIGNMENT], 1),
        ([REACH - SLOT_ALIGNMENT, 0], 1),
        ([0, REACH], 2),
        ([0, 3 * REACH, REACH, REACH + SLOT_ALIGNMENT, 5 * REACH], 5),
    ],
)
@pytest.mark.parametrize("num_few", [0, 16])
def test_slots_far_apart_are_reached(offsets, num_launches, num_few):
    """Slots too far apart for one launch are in several, and each is where it was."""
    far = 2**46 + np.array(offsets, np.int64)
    found, sequences = [], []
    launches = launches_without_memory()
    launches._num_few = num_few
    for launch in launches.launches(np.arange(len(far)), far, thread_blocks=4, sequence=9):
        header = header_of(launch)
        rows = np.frombuffer(parameters_of(launch), np.uint32, 2 * header.num_blocks, ctypes.sizeof(Header))
        found += [header.slots_base + SLOT_ALIGNMENT * int(offset) for offset in rows[::2]]
        sequences.append(header.sequence)

    assert far.tolist() == found
    assert [0] * (num_launches - 1) + [9] == sequences


@pytest.mark.parametrize("chunk", [1, 3, 31, 32])
def test_few_blocks_are_written_as_many_are(chunk):
    """The parameters of a job are the same to the byte whichever way they are written, at the border as well."""
    random = np.random.default_rng(chunk)
    few, many = launches_without_memory(blocks_per_chunk=chunk), launches_without_memory(blocks_per_chunk=chunk)
    many._num_few = 0
    for num_blocks in range(1, 18):
        ids = random.integers(-1, 2**31, num_blocks * chunk)
        addresses = 2**45 + SLOT_ALIGNMENT * random.integers(0, 2**32, num_blocks)
        parameters = []
        for launches in (few, many):
            (launch,) = launches.launches(ids, addresses, thread_blocks=4, sequence=7, begin_address=8, end_address=16)
            parameters.append(parameters_of(launch)[: HEADER.size + 4 * num_blocks * (1 + chunk)])
        assert parameters[0] == parameters[1]


def test_launches_are_numbers_in_one_buffer():
    """The parameters of all launches lie at one place, refilled in between, so a launch costs no allocation."""
    launches = launches_without_memory()
    addresses = 2**45 + SLOT_ALIGNMENT * np.arange(9000, dtype=np.int64)
    seen = {
        launch.parameters_address for launch in launches.launches(np.zeros(9000, np.int64), addresses, thread_blocks=4)
    }
    seen |= {
        launch.parameters_address for launch in launches.launches(np.zeros(1, np.int64), addresses[:1], thread_blocks=1)
    }
    assert 1 == len(seen)


@pytest.mark.parametrize("direction", Direction)
def test_the_number_is_the_last_thing_stored(direction):
    """Times and number of a job are all there after its last launch, and the ticket counter is back at zero."""
    rig = Rig([(512, 0, 0)], direction=direction)
    stored = []

    def touch(address, nbytes, write):
        if write:
            stored.append(address)

    (launch,) = rig.launches.launches(
        np.array([3, 1]),
        rig.slot_addresses[:2],
        thread_blocks=4,
        sequence=1,
        begin_address=rig.begin,
        end_address=rig.end,
    )
    run_page_kernel(parameters_of(launch), launch.grid, touch)

    assert rig.begin == stored[0]
    assert [rig.end, rig.word] == stored[-2:]
    assert 1 == rig.words[0]
    assert 0 == rig.words[1]
    assert rig.words[2] < rig.words[3]


def test_a_chunk_that_is_too_long_for_a_launch_is_refused():
    """A block's row has to fit into the parameters: up to 8,171 device blocks do."""
    longest = (LARGE_PARAMETERS_NBYTES - HEADER.size) // 4 - 1
    launches = launches_without_memory(blocks_per_chunk=longest)
    (launch,) = launches.launches(np.zeros(longest, np.int64), np.array([2**45]), thread_blocks=4)
    assert LARGE == launch.function
    with pytest.raises(LayoutError, match=rf"{longest + 1} device blocks, more than the {longest} that a launch takes"):
        launches_without_memory(blocks_per_chunk=longest + 1)


def test_the_kernel_reads_the_header_as_it_is_packed():
    """The fields of `Header` in page_copy.cu have the order and the sizes of the packing, pointers being 8 bytes."""
    (body,) = re.findall(r"struct Header \{(.*?)\};", SOURCE, re.DOTALL)
    fields = re.findall(r"^    (?:const )?(\w+\*?) (\w+);", body, re.MULTILINE)
    assert [name for name, _ in Header._fields_] == [name for _, name in fields]
    assert HEADER.format == "<" + "".join(
        f"{sum(1 for _ in run)}{code}" for code, run in _runs("I" if kind == "u32" else "Q" for kind, _ in fields)
    )
    assert ctypes.sizeof(Header) == HEADER.size


def _runs(codes):
    codes = "".join(codes)
    return [(match[0][0], match[0]) for match in re.finditer(r"(.)\1*", codes)]


def test_numbers_that_source_and_launches_share_are_equal():
    """Sizes of parameters and of shared memory, threads, flags and variants are the same on both sides."""
    entries = re.findall(r"ENTRY\(page_copy_##NAME##_(\w+), THREADS, (\d+),", SOURCE)
    assert {"small": str(SMALL_PARAMETERS_NBYTES), "large": str(LARGE_PARAMETERS_NBYTES)} == dict(entries)
    variants = re.findall(r"^VARIANT\((\w+), (\d+),", SOURCE, re.MULTILINE)
    assert [(variant.name, str(variant.threads_per_block)) for variant in VARIANTS] == variants
    rings = re.findall(r"typedef Ring<\d+, \d+, (\d+)> (\w+);", SOURCE)
    assert [(str(BULK.piece_nbytes), "ShallowRing"), (str(BULK_DEEP.piece_nbytes), "DeepRing")] == rings
    shared = re.findall(r"(\w+)::SHARED_NBYTES == (\d+)", SOURCE)
    assert [("ShallowRing", str(BULK.shared_nbytes)), ("DeepRing", str(BULK_DEEP.shared_nbytes))] == shared
    flags = dict(re.findall(r"constexpr u32 (\w+) = (\d+);", SOURCE))
    odd = Rig([(500, 0, 0)], direction=STORE).launches
    even = launches_without_memory(direction=LOAD)
    (odd_launch,) = odd.launches(np.zeros(1, np.int64), np.array([2**45]), thread_blocks=1)
    assert int(flags["DEVICE_TO_HOST"]) | int(flags["HAS_ODD_PIECES"]) == header_of(odd_launch).flags
    (even_launch,) = even.launches(np.zeros(1, np.int64), np.array([2**45]), thread_blocks=1)
    assert 0 == header_of(even_launch).flags
