"""A worker on a GPU that loads from the arena of another worker: page-locked read-only, and by way of staging."""

from typing import Literal

import numpy as np
import pytest

from gpu_layouts import MIB, POISON
from gpu_rig import WAIT_S, Gpu
from kvmoor.block_layout import BlockLayout
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.reading_worker import ReadingWorker
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.worker import TransferWorker

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 96
PAGE_NBYTES = 48 * 1024
NUM_LAYERS = 6


@pytest.mark.parametrize("pin", ["background", "off"])
def test_a_reader_loads_what_an_owner_stored(gpu: Gpu, pin: Literal["background", "off"]) -> None:
    """Every byte arrives in the reader's device blocks, whether it may page-lock the owner's memory or not."""
    torch = gpu.torch
    theirs = torch.randint(0, 256, (NUM_LAYERS, NUM_BLOCKS, PAGE_NBYTES), dtype=torch.uint8, device="cuda")
    ours = torch.full_like(theirs, POISON)
    layouts = [BlockLayout.from_tensors([each], block_axis=1, tokens_per_block=16) for each in (theirs, ours)]
    plan = plan_arena(layouts[0], 64 * MIB)
    random = np.random.default_rng(5)
    stored, loaded, slots = (random.permutation(NUM_BLOCKS)[: NUM_BLOCKS // 2] for _ in range(3))
    reading_device = gpu.open_device()
    owner = TransferWorker(
        layouts[0],
        plan,
        gpu.open_device(),
        mapping="eager",
        pin="eager",
        backing=Backing.MEMFD,
        engine_id="gpu-reading",
    )
    workers: list[TransferWorker | ReadingWorker] = [owner]
    try:
        reader = ReadingWorker(layouts[1], reading_device, pin=pin)
        workers.insert(0, reader)
        owner.take_published()
        reader.attach(owner.ticket())
        assert reader.wait_registered(WAIT_S) == (pin == "background")
        assert _run(owner, OrderKind.DEVICE_TO_SLOT, slots, stored) == [Outcome.DONE]
        assert _run(reader, OrderKind.SLOT_TO_DEVICE, slots, loaded) == [Outcome.DONE]

        expected = torch.full_like(theirs, POISON)
        expected[:, torch.from_numpy(loaded).cuda()] = theirs[:, torch.from_numpy(stored).cuda()]
        assert torch.equal(expected, ours)
        assert reader.statistics().staged_jobs == int(pin == "off")
    finally:
        ends = [worker.close(WAIT_S) for worker in workers]
    assert all(end.graceful for end in ends), ends


def _run(
    worker: TransferWorker | ReadingWorker, kind: OrderKind, slots: np.ndarray, blocks: np.ndarray
) -> list[Outcome]:
    order = Order(OrderId(1), kind, (OrderPart(0, tuple(slots.tolist())),))
    worker.submit(order, {0: blocks.reshape(-1, 1)})
    worker.wait([OrderId(1)], WAIT_S)
    return [report.outcome for report in worker.poll_reports()]
