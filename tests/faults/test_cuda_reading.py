"""A worker on a CUDA device that loads from the arena of another, over a driver without a GPU."""

import numpy as np
import pytest

from cuda_rig import WAIT_S, CudaRig
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.reading_worker import ReadingWorker
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.worker import TransferWorker

HOST_NBYTES = 64 * 4096


@pytest.fixture
def rig():
    with CudaRig() as rig:
        rig.run()
        yield rig


def move(worker, number, kind, slots, blocks):
    """Run an order and return how it ended."""
    rows = {0: np.array(blocks).reshape(-1, 1)}
    worker.submit(Order(OrderId(number), kind, (OrderPart(0, slots),)), rows)
    worker.wait([OrderId(number)], WAIT_S)
    return [report.outcome for report in worker.poll_reports()]


@pytest.mark.parametrize("can_register", [True, False])
def test_a_gpu_loads_what_another_stored(rig, can_register):
    """It registers the other's memory read-only and copies from it directly; one that cannot stages, as right."""
    theirs, ours = rig.blocks(), rig.blocks(seed=1)
    plan = plan_arena(theirs.layout(), HOST_NBYTES)
    owner = TransferWorker(theirs.layout(), plan, rig.open(), mapping="eager", pin="eager", backing=Backing.MEMFD)
    owner.take_published()
    if not can_register:
        rig.fake.attributes["READ_ONLY_HOST_REGISTER_SUPPORTED"] = 0
    reader = ReadingWorker(ours.layout(), rig.open())
    reader.attach(owner.ticket())

    assert can_register == reader.wait_registered(WAIT_S)
    assert [Outcome.DONE] == move(owner, 1, OrderKind.DEVICE_TO_SLOT, (5, 6), (3, 4))
    assert [Outcome.DONE] == move(reader, 1, OrderKind.SLOT_TO_DEVICE, (5, 6), (8, 9))

    for number, original in ((8, 3), (9, 4)):
        np.testing.assert_array_equal(theirs.content(original), ours.content(number))
    statistics = reader.statistics()
    expected = ("registered", 0) if can_register else ("staging", 1)
    assert expected == (statistics.registration_mode, statistics.staged_jobs)
    assert reader.close(WAIT_S).graceful
    assert owner.close(WAIT_S).graceful
    assert all(device._holdings._freeing.wait_idle(WAIT_S) for device in rig.devices)
    rig.assert_clean()
