"""Calibration on a real GPU: it is short, it is done once, and what it chooses copies right."""

import time
from pathlib import Path

import pytest

from gpu_layouts import GpuBlocks, finish
from gpu_rig import WAIT_S, Gpu
from kvmoor.devices.device import Direction

pytestmark = pytest.mark.gpu


def test_a_gpu_is_measured_once(gpu: Gpu, tmp_path: Path) -> None:
    """Measuring takes less than a second and a half, and the next device finds the answer and does not measure."""
    with gpu.open_device(cache_dir=tmp_path) as device:
        device.open_copy_queue("compiles the kernel", Direction.DEVICE_TO_HOST)
    seconds, strategies = [], []
    for _ in range(2):
        begin = time.monotonic()
        with gpu.open_device(cache_dir=tmp_path, strategy="calibrate") as device:
            device.open_copy_queue("store", Direction.DEVICE_TO_HOST)
            seconds.append(time.monotonic() - begin)
            strategies.append(device.strategy)

    assert strategies[0] == strategies[1]
    assert seconds[0] < 1.5
    assert seconds[1] < seconds[0]
    assert list((tmp_path / "calibration").iterdir())


def test_what_was_chosen_copies_right(gpu: Gpu, tmp_path: Path) -> None:
    """With the strategy that was measured, blocks arrive whole both ways."""
    blocks = GpuBlocks.regular(gpu, page_nbytes=48 * 1024, num_tensors=6, num_blocks=64)
    with gpu.open_device(cache_dir=tmp_path, strategy="calibrate") as device:
        for direction, queue in zip(Direction, blocks.open_queues(device), strict=True):
            block_ids, slots = blocks.random_pairs()
            blocks.poison(direction)
            queue.enqueue([blocks.copies(block_ids, slots)], 1, device.record_event())
            finish(queue, 1)
            blocks.expect(direction, block_ids, slots)
            blocks.assert_as_expected(direction.value)
        assert device.close(WAIT_S)
