"""A worker on a CUDA device, over a driver without a GPU: it comes and goes whatever the driver refuses or holds up."""

import time

import numpy as np
import pytest

from cuda_rig import ENGINE, ENGINE_ONLY, KERNEL_ONLY, WAIT_S, CudaRig
from kvmoor.devices.cuda.cuda_error import NOT_SUPPORTED, OUT_OF_MEMORY
from kvmoor.errors import DeviceError, RequestError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.worker import TransferWorker

HOST_NBYTES = 64 * 4096


@pytest.fixture
def rig():
    with CudaRig() as rig:
        yield rig


def open_worker(rig, blocks, *, strategy=KERNEL_ONLY, **options):
    layout = blocks.layout()
    device = rig.open(strategy=strategy)
    worker = TransferWorker(layout, plan_arena(layout, HOST_NBYTES), device, mapping="eager", **options)
    worker.take_published()
    return worker


def order(number, kind, *slots):
    return Order(OrderId(number), kind, (OrderPart(0, slots),))


def rows(*block_ids):
    return {0: np.array(block_ids).reshape(-1, 1)}


def finish(worker, number):
    """Return how an order ended."""
    worker.wait([OrderId(number)], WAIT_S)
    return {report.order_id: report.outcome for report in worker.poll_reports()}[number]


def store_and_load(rig, worker, blocks):
    """Store two blocks, overwrite them, load them elsewhere and compare."""
    before = [blocks.content(3), blocks.content(4)]
    worker.submit(order(1, OrderKind.DEVICE_TO_SLOT, 5, 6), rows(3, 4))
    assert finish(worker, 1) is Outcome.DONE
    for tensor in blocks.tensors:
        tensor[:] = 0xEE
    worker.submit(order(2, OrderKind.SLOT_TO_DEVICE, 5, 6), rows(8, 9), wait_for=worker._device.record_event())
    assert finish(worker, 2) is Outcome.DONE
    for number, content in zip((8, 9), before, strict=True):
        np.testing.assert_array_equal(content, blocks.content(number))


@pytest.mark.parametrize("strategy", [KERNEL_ONLY, ENGINE_ONLY])
def test_a_worker_stores_loads_and_leaves_nothing(rig, strategy):
    """Blocks come back as they were; closing unregisters every slab after the device, and nothing stays open."""
    blocks = rig.blocks()
    rig.run()
    worker = open_worker(rig, blocks, strategy=strategy, pin="eager")

    store_and_load(rig, worker, blocks)
    assert worker.statistics().staged_jobs == 0
    report = worker.close(WAIT_S)

    assert report.graceful, report
    assert rig.devices[0]._holdings._freeing.wait_idle(WAIT_S)
    rig.assert_clean()


@pytest.mark.parametrize("code", [NOT_SUPPORTED, OUT_OF_MEMORY])
def test_memory_that_cannot_be_registered_is_staged(rig, code):
    """Where page-locking is refused, blocks go by way of the driver's own memory; that is given back as well (B04)."""
    blocks = rig.blocks()
    for at in range(10):
        rig.fake.fail("host_register", at=at, code=code)
    rig.run()
    worker = open_worker(rig, blocks, pin="eager")

    store_and_load(rig, worker, blocks)
    assert worker.statistics().staged_jobs == 2
    report = worker.close(WAIT_S)

    assert report.graceful, report
    assert rig.devices[0]._holdings._freeing.wait_idle(WAIT_S)
    rig.assert_clean()


def test_a_stream_of_the_engine_waits_for_a_load(rig):
    """Work that the engine queues after `order_after` runs once the blocks are there; what is over holds up nothing."""
    blocks = rig.blocks()
    worker = open_worker(rig, blocks, pin="eager")
    worker.submit(order(1, OrderKind.DEVICE_TO_SLOT, 5), rows(3))
    rig.fake.run_all()
    worker.poll_reports()
    before, found = blocks.content(3), []
    worker.submit(order(2, OrderKind.SLOT_TO_DEVICE, 5), rows(8))
    stream = rig.fake.stream_create()

    worker.order_after(OrderId(2), stream)
    worker.order_after(OrderId(1), stream)
    rig.fake.enqueue(stream, lambda: found.append(blocks.content(8)))
    rig.fake.run(stream)
    assert [] == found
    rig.fake.run_all()

    np.testing.assert_array_equal(before, found[0])
    assert finish(worker, 2) is Outcome.DONE
    rig.fake.stream_destroy(stream)
    rig.run()
    assert worker.close(WAIT_S).graceful


@pytest.mark.usefixtures("expects_quarantine")
def test_a_job_of_a_dead_gpu_fails_at_its_deadline(rig):
    """Who only polls learns at the deadline that the GPU is dead: the job has failed and its blocks are free (B24)."""
    blocks, now = rig.blocks(), [0.0]
    worker = open_worker(rig, blocks, pin="eager", job_timeout_s=5.0, clock=lambda: now[0])
    worker.submit(order(1, OrderKind.SLOT_TO_DEVICE, 5), rows(3))
    rig.fake.trap()
    assert [] == worker.poll_reports()

    now[0] = 5.0
    (report,) = worker.poll_reports()

    assert report.outcome is Outcome.FAILED
    assert "LAUNCH_FAILED" in report.reason
    assert not worker.may_touch(OrderId(1))
    worker.close(WAIT_S)


def test_an_event_of_another_device_is_refused(rig):
    """A foreign event is the caller's mistake: nothing is queued, the slot stays free, and the lane takes more."""

    class Foreign:
        def is_done(self):
            return False

    blocks = rig.blocks()
    rig.run()
    worker = open_worker(rig, blocks, pin="eager")
    with pytest.raises(RequestError, match="Foreign"):
        worker.submit(order(1, OrderKind.DEVICE_TO_SLOT, 5, 6), rows(3, 4), wait_for=Foreign())
    assert not worker.may_touch(OrderId(1))

    store_and_load(rig, worker, blocks)
    assert worker.close(WAIT_S).graceful


@pytest.mark.usefixtures("expects_quarantine")
@pytest.mark.parametrize("pin", ["eager", "off"])
def test_a_stream_that_hangs_keeps_its_memory(rig, pin):
    """With a copy that never ends closing ends by its deadline, calls nothing that blocks, and keeps all memory."""
    blocks = rig.blocks()
    worker = open_worker(rig, blocks, pin=pin)
    rig.fake.enqueue(ENGINE)
    rig.fake.hang(ENGINE)
    worker.submit(order(1, OrderKind.DEVICE_TO_SLOT, 5, 6), rows(3, 4))
    rig.fake.run_all()

    started = time.monotonic()
    report = worker.close(0.3)

    assert time.monotonic() - started < WAIT_S / 2
    assert not report.graceful
    assert report.quarantined_nbytes > 0
    assert (OrderId(1),) == report.unproven_jobs
    rig.fake.check()
    rig.fake.release(ENGINE)
    rig.fake.run_all()


@pytest.mark.usefixtures("expects_quarantine")
def test_a_fault_of_the_gpu_ends_the_jobs(rig):
    """After a fault the jobs are over and failed, new ones are refused, and closing ends at once without a call."""
    blocks = rig.blocks()
    worker = open_worker(rig, blocks, pin="eager")
    worker.submit(order(1, OrderKind.DEVICE_TO_SLOT, 5, 6), rows(3, 4))
    rig.fake.trap()

    worker.wait([OrderId(1)], WAIT_S)
    (report,) = worker.poll_reports()
    assert report.outcome is Outcome.FAILED
    assert "LAUNCH_FAILED" in report.reason
    with pytest.raises(DeviceError):
        worker.submit(order(2, OrderKind.DEVICE_TO_SLOT, 7), rows(1))
    closed = worker.close(WAIT_S)

    assert "may still be page-locked" in closed.reason  # which nobody can undo, so the arena stays
    assert () == closed.unproven_jobs
    rig.fake.check()


def test_a_worker_that_cannot_be_opened_gives_the_device_back(rig):
    """If a queue cannot be had, all that was opened before is given back, the device included."""
    blocks = rig.blocks()
    rig.run()
    rig.fake.fail("stream_create", at=2, code=OUT_OF_MEMORY)
    with pytest.raises(DeviceError):
        open_worker(rig, blocks, pin="eager")

    assert rig.devices[0].close(WAIT_S)
    assert rig.devices[0]._holdings._freeing.wait_idle(WAIT_S)
    rig.assert_clean()
