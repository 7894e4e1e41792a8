"""Exactly the bytes asked for arrive, over random layouts, both ways, and nothing around them changes."""

import ctypes
import mmap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from device_blocks import content_key
from gpu_layouts import MIB, POISON, GpuBlocks, PageShape, finish
from gpu_rig import WAIT_S, Gpu
from kvmoor.block_layout import BlockLayout
from kvmoor.devices.device import Direction
from kvmoor.offloader import Offloader
from kvmoor.transfer_messages import Outcome

pytestmark = pytest.mark.gpu

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
REGISTERED_NBYTES = 192 * MIB


@pytest.fixture(scope="module")
def registered_memory(opened_gpu: Gpu) -> Iterator[int]:
    """Give the address of memory as an arena has it: anonymous, touched, registered in one range."""
    device = opened_gpu.open_device()
    memory = mmap.mmap(-1, REGISTERED_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, REGISTERED_NBYTES)
    device.registrar.register(address, REGISTERED_NBYTES)
    yield address
    device.registrar.unregister(address, REGISTERED_NBYTES)
    assert device.close(WAIT_S)


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_both_ways(gpu: Gpu, registered_memory: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of one to three groups with random geometry move their bytes and no others, skipped pages included."""
    from kvmoor.devices.cuda import gathering

    monkeypatch.setattr(gathering, "SHORTEST_JOB_NBYTES", 1)  # a ring is for short jobs too, where there is one
    random = np.random.default_rng(seed)
    # Half of the cases have their slots in registered memory, half in the driver's own.
    slots_address, groups = registered_memory if seed % 2 else None, []
    for number in range(int(random.integers(1, 4))):
        groups.append(GpuBlocks.random(gpu, 1000 * seed + number, slots_address=slots_address))
        if slots_address is not None:
            slots_address += groups[-1].slots.nbytes
            assert slots_address <= registered_memory + REGISTERED_NBYTES
    skipped = float(random.choice([0.0, 0.0, 0.4]))
    device = gpu.open_device(strategy=random_strategy(gpu, random, seed))
    try:
        for direction in (STORE, LOAD):
            queue = device.open_copy_queue(direction.value, direction)
            parts = [(blocks, *blocks.random_pairs(skipped=skipped)) for blocks in groups]
            for blocks in groups:
                blocks.poison(direction)
            num_jobs = _queue_in_jobs(queue, parts, random, device.record_event())
            finish(queue, num_jobs)
            for blocks, block_ids, slots in parts:
                blocks.expect(direction, block_ids, slots)
            for blocks in groups:
                blocks.assert_as_expected(f"seed {seed}, {direction.value}")
    finally:
        assert device.close(WAIT_S)


def random_strategy(gpu: Gpu, random: np.random.Generator, seed: int) -> Any:
    """Take every kind of page kernel in turn, few or many thread blocks, the copy engine from some size, or a ring."""
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy

    kernel = gpu.page_kernels[seed % len(gpu.page_kernels)]
    counts = random.choice([1, 2, 4, 8, 16, 100], 2).tolist()
    copy_engine_from_nbytes = (None, 2**20, 64 * 1024)[int(random.integers(3))]
    gather_from_nbytes = (None, 1)[seed // 2 % 2]
    return CopyStrategy(counts[0], counts[1], copy_engine_from_nbytes, kernel, kernel, gather_from_nbytes, 2**25)


def _queue_in_jobs(queue: Any, parts: list[Any], random: np.random.Generator, event: Any) -> int:
    """Cut the pairs of all groups at random places; every job holds a piece of each group."""
    num_jobs = int(random.integers(1, 5))
    cuts = [np.sort(random.integers(0, len(slots) + 1, num_jobs - 1)) for _, _, slots in parts]
    bounds = [list(pairwise([0, *cut.tolist(), len(part[2])])) for cut, part in zip(cuts, parts, strict=True)]
    for job in range(num_jobs):
        copies = []
        for (blocks, block_ids, slots), bound in zip(parts, bounds, strict=True):
            begin, end = bound[job]
            chunk = blocks.group.blocks_per_chunk
            if begin < end:
                copies.append(blocks.copies(block_ids[begin * chunk : end * chunk], slots[begin:end]))
        queue.enqueue(copies, job + 1, event)
    return num_jobs


@pytest.mark.parametrize("copy_engine_from_nbytes", [1, 2**40])
def test_runs_adjacent_on_both_sides(gpu: Gpu, copy_engine_from_nbytes: int) -> None:
    """Blocks that are neighbours on the device and in their slots arrive whole, by kernel and by copy engine."""
    from kvmoor.devices.cuda.copy_strategy import CopyStrategy

    device = gpu.open_device(strategy=CopyStrategy(copy_engine_from_nbytes=copy_engine_from_nbytes))
    blocks = GpuBlocks(gpu, [PageShape(64 * 1024)], num_blocks=96)
    try:
        for direction in (STORE, LOAD):
            queue = device.open_copy_queue(direction.value, direction)
            block_ids = [*range(10, 50), 3, *range(60, 90)]
            slots = [*range(40), 80, *range(45, 75)]
            blocks.poison(direction)
            queue.enqueue([blocks.copies(block_ids, slots)], 1, device.record_event())
            finish(queue, 1)
            blocks.expect(direction, block_ids, slots)
            blocks.assert_as_expected(direction.value)
    finally:
        assert device.close(WAIT_S)


def test_a_job_larger_than_one_launch(gpu: Gpu) -> None:
    """A job with more blocks than one launch can name arrives whole, and is over only then."""
    device = gpu.open_device()
    blocks = GpuBlocks.regular(gpu, page_nbytes=512, num_tensors=1, num_blocks=20_000)
    order = np.random.default_rng(3).permutation(20_000)
    try:
        queue = device.open_copy_queue("store", STORE)
        blocks.poison(STORE)
        queue.enqueue([blocks.copies(order, np.arange(20_000))], 1, device.record_event())
        finish(queue, 1)
        blocks.expect(STORE, order, np.arange(20_000))
        blocks.assert_as_expected("20,000 blocks")
    finally:
        assert device.close(WAIT_S)


@pytest.mark.parametrize("pin", ["eager", "background", "off"])
def test_blocks_come_back_through_an_offloader(gpu: Gpu, pin: str) -> None:
    """Blocks stored and loaded into other device blocks are the same to the byte, page-locked or staged."""
    torch = gpu.torch
    num_blocks, page_nbytes, chunk = 128, 24 * 1024, 2
    cache = torch.randint(0, 256, (6, num_blocks, page_nbytes), dtype=torch.uint8, device="cuda")
    original = cache.clone()
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=32, blocks_per_chunk=chunk)
    keys = [content_key(number) for number in range(num_blocks // chunk // 2)]
    stored = np.random.default_rng(1).permutation(num_blocks)[: len(keys) * chunk]
    loaded = np.random.default_rng(2).permutation(num_blocks)[: len(keys) * chunk]
    with Offloader(layout, host_memory=256 * MIB, device=gpu.open_device(), pin=pin) as offloader:
        if pin == "background":
            assert offloader.wait_registered(WAIT_S)
        offloader.wait([offloader.submit_store(keys, stored).job_id], WAIT_S)
        cache.fill_(POISON)
        match = offloader.match(keys)
        assert len(keys) == match.num_blocks
        offloader.wait([offloader.submit_load(match, loaded)], WAIT_S)

        assert [Outcome.DONE] * 2 == [result.outcome for result in offloader.poll_results()]
        arena = offloader.statistics().transfers.arena
        assert arena.registration_mode == ("staging" if pin == "off" else "registered"), arena.registration_reason
        expected = torch.full_like(cache, POISON)
        expected[:, torch.from_numpy(loaded).cuda()] = original[:, torch.from_numpy(stored).cuda()]
        assert torch.equal(expected, cache)
        report = offloader.close(WAIT_S)
    assert report.worker.graceful, report.worker.reason


def test_the_ring_is_there_before_the_first_job(gpu: Gpu) -> None:
    """A ring no larger than asked for is taken when the queue is opened; jobs take no more device memory."""
    blocks = GpuBlocks.regular(gpu, page_nbytes=256 * 1024, num_tensors=8, num_blocks=64)
    with gpu.open_device(most_ring_nbytes=32 * MIB, cache_dir=None) as device:
        device.check_layout(BlockLayout((blocks.group,), on_host=False))
        free = [_free_nbytes(gpu)]
        for direction in (STORE, LOAD):
            queue = device.open_copy_queue(direction.value, direction)
            free.append(_free_nbytes(gpu))
            block_ids, slots = blocks.random_pairs()
            blocks.poison(direction)
            free_before = _free_nbytes(gpu)
            queue.enqueue([blocks.copies(block_ids, slots)], 1, device.record_event())
            finish(queue, 1)
            assert free_before == _free_nbytes(gpu)
            blocks.expect(direction, block_ids, slots)
            blocks.assert_as_expected(direction.value)
    for before, after in pairwise(free):
        assert 32 * MIB <= before - after < 48 * MIB


def _free_nbytes(gpu: Gpu) -> int:
    return int(gpu.torch.cuda.mem_get_info()[0])


def test_slots_that_are_neighbours_across_slabs(gpu: Gpu) -> None:
    """A run that goes on from the last slot of one slab to the first of the next is never copied as one."""
    torch = gpu.torch
    num_blocks, page_nbytes = 160, 2 * MIB
    cache = torch.randint(0, 256, (num_blocks, page_nbytes), dtype=torch.uint8, device="cuda")
    original = cache.clone()
    layout = BlockLayout.from_tensors([cache], block_axis=0, tokens_per_block=16)
    keys = [content_key(number) for number in range(num_blocks)]
    with Offloader(layout, host_memory=num_blocks * page_nbytes, device=gpu.open_device(), pin="eager") as offloader:
        offloader.wait([offloader.submit_store(keys, range(num_blocks)).job_id], WAIT_S)
        cache.fill_(POISON)
        offloader.wait([offloader.submit_load(offloader.match(keys), range(num_blocks))], WAIT_S)
        assert [Outcome.DONE] * 2 == [result.outcome for result in offloader.poll_results()]
    assert torch.equal(original, cache)
