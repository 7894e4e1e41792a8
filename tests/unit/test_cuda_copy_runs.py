"""Long runs of a job, against a model that looks at every byte range; and what a strategy takes."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.cuda.copy_runs import CopyRuns, RunFinder
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import SettingsError

SLOTS = 1 << 40


@dataclass(frozen=True)
class Job:
    """Copies of one group, with a threshold and the starts of registered ranges."""

    copies: BlockCopies
    from_nbytes: int
    range_starts: np.ndarray

    def pages(self, copies: BlockCopies | None) -> list[tuple[int, int, int]]:
        """Return what copies mean, a page at a time: device address, host address, bytes."""
        if copies is None:
            return []
        group = copies.group
        found = []
        for block, slot in enumerate(copies.slot_addresses.tolist()):
            for in_chunk in range(group.blocks_per_chunk):
                block_id = int(copies.block_ids[block * group.blocks_per_chunk + in_chunk])
                if block_id < 0:
                    continue
                for tensor, offset in zip(group.tensors, group.page_offsets, strict=True):
                    host = slot + offset + in_chunk * tensor.page_nbytes
                    found.append((tensor.base + block_id * tensor.block_stride, host, tensor.page_nbytes))
        return found

    def split(self) -> tuple[list[tuple[int, int, int]], BlockCopies | None]:
        """Split the job; the runs come as device address, host address, bytes."""
        runs, rest = RunFinder(self.copies.group, self.from_nbytes).split(self.copies, self.range_starts)
        return as_tuples(runs), rest


def as_tuples(runs: CopyRuns | None) -> list[tuple[int, int, int]]:
    if runs is None:
        return []
    assert {runs.device_addresses.dtype, runs.host_addresses.dtype, runs.nbytes.dtype} == {np.dtype(np.int64)}
    return list(zip(runs.device_addresses.tolist(), runs.host_addresses.tolist(), runs.nbytes.tolist(), strict=True))


def byte_map(ranges: list[tuple[int, int, int]]) -> dict[int, int]:
    """Return host byte by device byte, in units of 4 bytes, which every size here is a multiple of."""
    mapped: dict[int, int] = {}
    for device, host, nbytes in ranges:
        for at in range(0, nbytes, 4):
            assert device + at not in mapped, "copied twice"
            mapped[device + at] = host + at
    return mapped


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    chunk = draw(st.sampled_from([1, 1, 2, 3]))
    num_blocks = draw(st.integers(1, 12))
    num_device_blocks = num_blocks * chunk + draw(st.integers(0, 3))
    pages = draw(st.lists(st.sampled_from([64, 128, 1024, 4096]), min_size=1, max_size=3))
    is_interleaved = draw(st.booleans())
    gap = draw(st.sampled_from([0, 0, 64]))
    base, tensors = 1 << 30, []
    for nbytes in pages:
        stride = sum(pages) + gap if is_interleaved else nbytes + gap
        tensors.append(TensorPages(base, num_device_blocks, stride, nbytes))
        base += nbytes if is_interleaved else stride * num_device_blocks
    group = GroupLayout(tuple(tensors), chunk, chunk)
    block_ids = np.arange(num_device_blocks)
    slots = np.arange(num_blocks + 2)
    for numbers in (block_ids, slots):
        for _ in range(draw(st.integers(0, 2))):
            first, second = draw(st.integers(0, len(numbers) - 1)), draw(st.integers(0, len(numbers) - 1))
            numbers[[first, second]] = numbers[[second, first]]
    skipped = draw(st.sets(st.integers(0, num_blocks * chunk - 1), max_size=2))
    block_ids[sorted(skipped)] = -1
    copies = BlockCopies(
        group,
        block_ids[: num_blocks * chunk].astype(np.int64),
        SLOTS + group.slot_nbytes * slots[:num_blocks].astype(np.int64),
    )
    starts = draw(st.sets(st.integers(0, num_blocks), max_size=3))
    range_starts = np.array(sorted({SLOTS} | {SLOTS + group.slot_nbytes * start for start in starts}), np.int64)
    return Job(copies, draw(st.sampled_from([64, 256, 1024, 4096, 8192, 20_000])), range_starts)


@given(jobs())
def test_runs_and_rest_are_the_job(job):
    """Every byte of the job is in exactly one run or in what is left, with its place in the slot."""
    runs, rest = job.split()

    assert byte_map(job.pages(job.copies)) == byte_map(runs + job.pages(rest))


@given(jobs())
def test_runs_are_long_and_reach_across_no_range(job):
    """No run is shorter than asked, and none has bytes of two registered ranges."""
    for _, host, nbytes in job.split()[0]:
        assert nbytes >= job.from_nbytes
        first, last = np.searchsorted(job.range_starts, [host, host + nbytes - 1], side="right")
        assert first == last


@given(jobs())
def test_neighbouring_runs_are_joined(job):
    """Two runs of one job are never adjacent on both sides, unless a range begins between them or a slot ends."""
    runs = sorted(job.split()[0])
    for (device, host, nbytes), (next_device, next_host, _) in pairwise(runs):
        if device + nbytes == next_device and host + nbytes == next_host and next_host not in job.range_starts:
            # Where slots lie tensor by tensor each tensor is looked at by itself, within one block.
            assert len(job.copies.group.tensors) > 1
            assert (next_host - SLOTS) % job.copies.group.slot_nbytes == 0 or job.copies.group.blocks_per_chunk > 1


@given(jobs())
def test_all_goes_to_the_copy_engine_that_can(job):
    """A block none of whose pages is short is left to the kernel only if the whole job is."""
    runs, rest = job.split()
    if all(tensor.page_nbytes >= job.from_nbytes for tensor in job.copies.group.tensors):
        assert [] == job.pages(rest)
        assert runs or (job.copies.block_ids < 0).any()


def group_of(*tensors: TensorPages, chunk: int = 1) -> GroupLayout:
    return GroupLayout(tensors, chunk, chunk)


def test_a_row_of_adjacent_blocks_is_one_run():
    """Blocks that follow each other in a tensor and in the slots are one run; what does not follow begins another."""
    group = group_of(TensorPages(1 << 30, 10, 4096, 4096))
    copies = BlockCopies(group, np.array([2, 3, 4, 7, 8]), SLOTS + 4096 * np.array([0, 1, 2, 3, 4]))

    runs, rest = RunFinder(group, 8192).split(copies)

    assert [((1 << 30) + 2 * 4096, SLOTS, 3 * 4096), ((1 << 30) + 7 * 4096, SLOTS + 3 * 4096, 2 * 4096)] == as_tuples(
        runs
    )
    assert rest is None


def test_the_order_of_a_job_does_not_matter():
    """Blocks that are named from the last to the first are the same run as those from the first to the last."""
    group = group_of(TensorPages(1 << 30, 10, 4096, 4096))
    numbers = np.array([3, 2, 1, 5, 4])

    runs, rest = RunFinder(group, 5 * 4096).split(BlockCopies(group, numbers, SLOTS + 4096 * numbers))

    assert [((1 << 30) + 4096, SLOTS + 4096, 5 * 4096)] == as_tuples(runs)
    assert rest is None


def test_a_part_of_a_chunk_is_left_to_the_kernel():
    """Of a chunk whose device blocks are partly in a run, the others stay, and the run's are marked with -1."""
    group = group_of(TensorPages(1 << 30, 10, 4096, 4096), chunk=2)
    copies = BlockCopies(group, np.array([0, 1, 2, 9]), SLOTS + 8192 * np.array([0, 1]))

    runs, rest = RunFinder(group, 3 * 4096).split(copies)

    assert [(1 << 30, SLOTS, 3 * 4096)] == as_tuples(runs)
    assert rest is not None
    assert [-1, 9] == rest.block_ids.tolist()
    assert [SLOTS + 8192] == rest.slot_addresses.tolist()


def test_padding_between_slots_ends_a_run():
    """Blocks smaller than their slots are never joined."""
    group = group_of(TensorPages(1 << 30, 10, 4000, 4000))
    copies = BlockCopies(group, np.arange(3), SLOTS + 4096 * np.arange(3))

    assert (None, copies) == RunFinder(group, 8000).split(copies)


def test_tensors_side_by_side_are_one_row():
    """An engine that keeps all layers of a block together has one run a block, whatever the layers are."""
    base = 1 << 30
    group = group_of(*(TensorPages(base + layer * 1000, 6, 4096, 1000) for layer in range(4)))
    copies = BlockCopies(group, np.array([5, 0]), SLOTS + 4096 * np.array([3, 4]))

    runs, rest = RunFinder(group, 4000).split(copies)

    assert [(base + 5 * 4096, SLOTS + 3 * 4096, 4000), (base, SLOTS + 4 * 4096, 4000)] == as_tuples(runs)
    assert rest is None


def test_without_a_threshold_everything_is_left():
    """A strategy without the copy engine leaves the job as it is, and a job without bytes leaves nothing."""
    group = group_of(TensorPages(1 << 30, 10, 4096, 4096))
    copies = BlockCopies(group, np.arange(10), SLOTS + 4096 * np.arange(10))

    assert (None, copies) == RunFinder(group, None).split(copies)
    nothing = BlockCopies(GroupLayout((), 1), np.arange(10), SLOTS + 4096 * np.arange(10))
    assert (None, None) == RunFinder(nothing.group, 1).split(nothing)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store_thread_blocks", 0),
        ("load_thread_blocks", 1025),
        ("load_thread_blocks", True),
        ("copy_engine_from_nbytes", 0),
        ("store_kernel", "rows"),
        ("load_kernel", ""),
    ],
)
def test_a_strategy_refuses_what_no_device_takes(field, value):
    """Numbers that cannot be launched are refused by name."""
    with pytest.raises(SettingsError, match=field):
        CopyStrategy(**{field: value})


def test_a_strategy_tells_thread_blocks_by_direction():
    """Stores and loads have numbers and kernels of their own, and the copy engine may be left out."""
    strategy = CopyStrategy(3, 5, None, load_kernel="bulk")

    assert ["rows8", "bulk"] == [strategy.variant(direction).name for direction in Direction]
    assert 3 == strategy.thread_blocks(Direction.DEVICE_TO_HOST)
    assert 5 == strategy.thread_blocks(Direction.HOST_TO_DEVICE)
