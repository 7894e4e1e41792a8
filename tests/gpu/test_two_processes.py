"""Several processes on one GPU: each keeps its own bytes, and one can read another's host memory with its own GPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import children
from gpu_layouts import GpuBlocks, PageShape, finish
from gpu_rig import WAIT_S, Gpu
from kvmoor.devices.device import Direction
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.ticket import ArenaTicket
from shared_arena import LAYOUT, PLAN

pytestmark = pytest.mark.gpu

NUM_STEPS = 60


def test_two_processes_share_a_gpu(run_child: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Two processes that store and load at the same time each get back exactly what they stored."""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run_child, "one_of_two.py", str(seed), str(NUM_STEPS), str(tmp_path), watchdog_s=90.0)
            for seed in (1, 2)
        ]
        results = [each.result() for each in running]

    for result in results:
        assert result["wrong"] == []
        assert result["outcomes"] == ["done"]
        assert result["graceful"]
        assert result["registered"] > 0
    assert max(each["began"] for each in results) < min(each["ended"] for each in results), "they ran one by one"


def test_a_reader_registers_the_memory_of_another_process(gpu: Gpu) -> None:
    """Slots of an arena that another process owns are loaded straight from its memory, registered read-only."""
    with children() as start:
        owner = start("from shared_arena import serve_owner\nserve_owner('gpu')")
        ticket = ArenaTicket.from_json(owner.stdout.readline())
        for command in ("publish", "fill 0 3 1", "fill 0 5 2"):
            owner.stdin.write(command + "\n")
            owner.stdin.flush()
            assert owner.stdout.readline() == "done\n"
        device = gpu.open_device()
        with AttachedArena(ticket, LAYOUT) as attached:
            ranges = attached.published_ranges()
            for address, nbytes in ranges:
                device.registrar.register(address, nbytes, read_only=True)
            addresses = attached.slot_addresses(0, np.array([3, 5]))
            page_nbytes = PLAN.groups[0].slot_nbytes
            blocks = GpuBlocks(gpu, [PageShape(page_nbytes)], num_blocks=8)
            load = device.open_copy_queue("load", Direction.HOST_TO_DEVICE)
            copies = blocks.copies([6, 2], [0, 1])
            copies.slot_addresses[:] = addresses
            load.enqueue([copies], 1, None)
            finish(load, 1)
            found = gpu.read(blocks.group.tensors[0].base, 8 * page_nbytes).reshape(8, -1)
            assert (found[6] == 1 + 3).all()
            assert (found[2] == 1 + 5).all()
            for address, nbytes in ranges:
                device.registrar.unregister(address, nbytes)
        assert device.close(WAIT_S)
        owner.stdin.write("close\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "done\n"
