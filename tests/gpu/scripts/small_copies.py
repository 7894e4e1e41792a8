"""A few small jobs of every kind, without torch, for compute-sanitizer: it slows everything down by far."""

import ctypes
from typing import Any

import numpy as np

from gpu_child import end_with_parent, report
from gpu_rig import CACHE, WAIT_S
from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.device import CudaDevice
from kvmoor.devices.cuda.driver import Driver
from kvmoor.devices.device import BlockCopies, Direction

# Pages of each tensor, device blocks in a block, bytes between pages.
CASES = (
    ((512, 512), 1, 0),
    ((3, 100, 1, 7000), 1, 5),
    ((16 * 1024, 128), 2, 16),
    ((1000,), 3, 24),
    ((80 * 1024,), 1, 0),
)
NUM_BLOCKS = 24


def main() -> None:
    driver = Driver()
    context = driver.primary_context_retain(0)
    driver.context_set(context)
    wrong = []
    for copy_engine_from_nbytes in (1, 2**40):
        strategy = CopyStrategy(copy_engine_from_nbytes=copy_engine_from_nbytes)
        device = CudaDevice(ordinal=0, strategy=strategy, driver=driver, cache_dir=CACHE)
        queues = [(direction, device.open_copy_queue(direction.value, direction)) for direction in Direction]
        for number, case in enumerate(CASES):
            for direction, queue in queues:
                if not copy_is_right(driver, queue, direction, *case, sequence=number + 1):
                    wrong.append([copy_engine_from_nbytes, number, direction.value])
        closed = device.close(WAIT_S)
    report(wrong=wrong, closed=closed)


def copy_is_right(
    driver: Driver, queue: Any, direction: Direction, pages: Any, chunk: int, padding: int, *, sequence: int
) -> bool:
    """Copy whole blocks, the first one skipped in part, between exact allocations: one byte too far is an error."""
    num_whole = NUM_BLOCKS // chunk
    bases = [driver.memory_alloc((page + padding) * NUM_BLOCKS - padding) for page in pages]
    group = GroupLayout(
        tuple(TensorPages(base, NUM_BLOCKS, page + padding, page) for base, page in zip(bases, pages, strict=True)),
        tokens_per_block=chunk,
        blocks_per_chunk=chunk,
    )
    slots = driver.host_alloc(group.slot_nbytes * num_whole)
    view = np.frombuffer((ctypes.c_ubyte * (group.slot_nbytes * num_whole)).from_address(slots), np.uint8)
    stream = driver.stream_create()
    for base, page in zip(bases, pages, strict=True):
        driver.memset_async(base, 0x11, (page + padding) * NUM_BLOCKS - padding, stream)
    while not driver.stream_query(stream):
        pass
    view[:] = 0x22
    block_ids = np.random.default_rng(sequence).permutation(NUM_BLOCKS)[: num_whole * chunk].astype(np.int64)
    block_ids[0] = -1
    addresses = slots + group.slot_nbytes * np.arange(num_whole)
    queue.enqueue([BlockCopies(group, block_ids, addresses)], sequence, None)
    right = queue.wait_completed(sequence, 10 * WAIT_S) and queue.failure(sequence) is None
    if direction is Direction.DEVICE_TO_HOST:
        arrived = int((view == 0x11).sum())
    else:
        arrived = 0
        for base, page in zip(bases, pages, strict=True):
            found = np.empty((page + padding) * NUM_BLOCKS - padding, np.uint8)
            driver.copy_async(found.ctypes.data, base, found.nbytes, stream)
            while not driver.stream_query(stream):
                pass
            arrived += int((found == 0x22).sum())
    right = right and arrived == (num_whole * chunk - 1) * sum(pages)
    for base in bases:
        driver.memory_free(base)
    driver.host_free(slots)
    driver.stream_destroy(stream)
    return bool(right)


if __name__ == "__main__":
    end_with_parent()
    main()
