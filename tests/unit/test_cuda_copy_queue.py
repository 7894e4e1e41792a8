"""A copy queue on a GPU that does only what the test lets it do."""

import os
import threading
import time

import numpy as np
import pytest

from cuda_rig import ENGINE, ENGINE_ONLY, KERNEL_ONLY, LOAD, SHORT_S, STORE, WAIT_S, CudaRig
from kvmoor.devices.cuda import backlog
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.cuda_error import LAUNCH_FAILED, OUT_OF_MEMORY
from kvmoor.errors import ClosedError, DeviceError, RequestError


@pytest.fixture
def rig():
    with CudaRig() as rig:
        yield rig


@pytest.fixture
def blocks(rig):
    blocks = rig.blocks()
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    yield blocks
    rig.fake.memory.remove("registered", blocks.address)


def open_store(rig, **options):
    return rig.open(**options).open_copy_queue("store", STORE)


def labels(rig, queue):
    return [label for label in rig.fake.pending(queue.stream) if label != "memset"]


def close_all(rig):
    """Close what is open and assert that nothing is left."""
    rig.fake.run_all()
    assert all(device.close(WAIT_S) for device in rig.devices)


class Event:
    """An event that is not of the device."""

    def __init__(self, *, is_over):
        self.is_over = is_over

    def is_done(self):
        return self.is_over


def test_a_job_is_over_when_the_device_says_so(rig, blocks):
    """Queueing a job copies nothing by itself; its number appears with its bytes."""
    queue = open_store(rig)

    queue.enqueue(blocks.copies(1, 5), 1, None)
    assert 0 == queue.completed()
    blocks.assert_stored()
    rig.fake.run_all()

    assert 1 == queue.completed()
    assert queue.failure(1) is None
    blocks.assert_stored(1, 5)


def test_a_load_writes_the_device(rig, blocks):
    """In the other direction the bytes of slots arrive in the blocks."""
    queue = rig.open().open_copy_queue("load", LOAD)
    blocks.slots[:] = np.arange(blocks.slots.size, dtype=np.uint64).reshape(blocks.slots.shape) % 251

    queue.enqueue(blocks.copies(3, 4), 1, None)
    rig.fake.run_all()

    for number in (3, 4):
        np.testing.assert_array_equal(blocks.slot(number), blocks.content(number))


def test_a_job_waits_for_its_event_on_the_device(rig, blocks):
    """A job copies what the engine wrote before the event, however late that is; nobody waits on the host."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    rig.fake.hang(ENGINE)
    rig.fake.enqueue(ENGINE, lambda: blocks.tensors[0].fill(77))

    queue.enqueue(blocks.copies(2), 1, device.record_event())
    rig.fake.run_all()
    assert 0 == queue.completed()
    rig.fake.release(ENGINE)
    rig.fake.run_all()

    assert 1 == queue.completed()
    assert 77 == blocks.tensors[0][2, 0]
    blocks.assert_stored(2)


def test_a_job_does_not_wait_for_work_behind_its_event(rig, blocks):
    """What the engine queues after the event, as the forward of the same step, may run as long as it likes."""
    device = rig.open()
    queue = device.open_copy_queue("load", LOAD)
    event = device.record_event()
    rig.fake.run(ENGINE)
    rig.fake.enqueue(ENGINE)
    rig.fake.hang(ENGINE)

    queue.enqueue(blocks.copies(2), 1, event)
    rig.fake.run_all()

    assert 1 == queue.completed()
    rig.fake.release(ENGINE)


def test_an_event_may_be_reused_once_a_job_waits_for_it(rig, blocks):
    """A job keeps waiting for the point that its event marked, although the event is dropped and marks another one."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    rig.fake.enqueue(ENGINE)
    queue.enqueue(blocks.copies(1), 1, device.record_event())
    device._engine.forget()
    rig.fake.run(ENGINE)
    rig.fake.hang(ENGINE)
    rig.fake.enqueue(ENGINE)
    again = device.record_event()  # the same event of the driver
    assert 1 == rig.fake.num_calls("event_create") - 1  # one of them for the upload of the table

    rig.fake.run_all()

    assert 1 == queue.completed()
    assert not again.is_done()
    rig.fake.release(ENGINE)


def test_an_event_of_somebody_else_is_refused(rig, blocks):
    """A stream cannot wait for an event that is not the device's; one that is done needs no waiting."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, Event(is_over=True))

    with pytest.raises(RequestError, match="record_event"):
        queue.enqueue(blocks.copies(2), 2, Event(is_over=False))
    assert "" == queue.broken
    queue.enqueue(blocks.copies(3), 3, None)
    rig.fake.run_all()

    blocks.assert_stored(1, 3)


def test_long_runs_go_to_the_copy_engine(rig, blocks):
    """Runs that are long enough are batch copies, whose number a write of the stream stores."""
    queue = open_store(rig, strategy=ENGINE_ONLY)

    queue.enqueue(blocks.copies(1, 5), 1, None)
    assert ["wait", "batch of 4", "write value"] == labels(rig, queue)
    rig.fake.run_all()

    assert 1 == queue.completed()
    blocks.assert_stored(1, 5)


def test_a_driver_without_batch_copies_gets_one_after_the_other():
    """Where the batch call is missing each run is a copy of its own."""
    with CudaRig(copy_batch_available=False) as rig:
        blocks = rig.blocks()
        rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
        queue = open_store(rig, strategy=ENGINE_ONLY)

        queue.enqueue(blocks.copies(1, 5), 1, None)
        assert ["wait", *["copy"] * 4, "write value"] == labels(rig, queue)
        rig.fake.run_all()

        blocks.assert_stored(1, 5)


def test_a_stream_that_writes_no_numbers_gets_a_kernel_for_it(rig, blocks):
    """Where the stream cannot write a number in order, a launch that copies nothing stores it."""
    rig.fake.attributes["CAN_USE_64_BIT_STREAM_MEM_OPS"] = 0
    queue = open_store(rig, strategy=ENGINE_ONLY)

    queue.enqueue(blocks.copies(1, 5), 1, None)
    queue.enqueue([], 2, None)
    assert ["batch of 4", "launch page_copy_rows8_small"] == labels(rig, queue)[2:4]
    rig.fake.run_all()

    assert 2 == queue.completed()
    assert 0 == rig.fake.num_calls("stream_write_value64")
    blocks.assert_stored(1, 5)


def test_the_kernel_comes_last_and_stores_the_number(rig):
    """In a job of both kinds the number is stored by the kernel, behind the copy engine on the same stream."""
    small, large = rig.blocks(page_nbytes=(512,)), rig.blocks(page_nbytes=(8192,), seed=1)
    for blocks in (small, large):
        rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    queue = open_store(rig, strategy=CopyStrategy(copy_engine_from_nbytes=16384))

    queue.enqueue([*large.copies(1, 2, 9), *small.copies(4)], 1, None)
    assert ["copy", "launch page_copy_rows8_small", "launch page_copy_rows8_small"] == labels(rig, queue)[2:]
    rig.fake.step(queue.stream)
    while rig.fake.pending(queue.stream):
        assert 0 == queue.completed()
        rig.fake.run_all()

    assert 1 == queue.completed()
    large.assert_stored(1, 2, 9)
    small.assert_stored(4)


def test_copies_stay_within_registered_ranges(rig):
    """Neighbouring slots in two registered ranges are two copies, since the copy engine crosses no border."""
    device = rig.open(strategy=ENGINE_ONLY)
    queue = device.open_copy_queue("store", STORE)
    blocks = rig.blocks(page_nbytes=(8192,))
    half = blocks.slots.nbytes // 2
    for start in (0, half):
        device.registrar.register(blocks.address + start, half)

    queue.enqueue(blocks.copies(*range(16)), 1, None)
    assert ["wait", "batch of 2", "write value"] == labels(rig, queue)
    rig.fake.run_all()

    blocks.assert_stored(*range(16))
    close_all(rig)
    for start in (0, half):
        device.registrar.unregister(blocks.address + start, half)
    rig.assert_clean()


def test_a_job_without_bytes_is_over_in_its_turn(rig, blocks):
    """A job that copies nothing has its number stored behind the jobs before it."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)
    queue.enqueue([], 2, None)
    assert 0 == queue.completed()

    rig.fake.run_all()

    assert 2 == queue.completed()


def test_a_long_job_is_several_launches_and_one_number(rig):
    """A job with more blocks than a launch takes is over when its last block is copied, not before."""
    blocks = rig.blocks(page_nbytes=(64,), num_blocks=9000, num_slots=9000)
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    queue = open_store(rig)

    queue.enqueue(blocks.copies(*range(9000)), 1, None)
    assert ["wait", *["launch page_copy_rows8_large"] * 3] == labels(rig, queue)
    rig.fake.run_all()

    assert 1 == queue.completed()
    blocks.assert_stored(*range(9000))


def test_descriptors_may_change_once_a_job_is_queued(rig, blocks):
    """A job copies what it was told when it was queued, whatever becomes of the arrays."""
    queue = open_store(rig)
    copies = blocks.copies(1, 2)

    queue.enqueue(copies, 1, None)
    copies[0].block_ids[:] = 9
    copies[0].slot_addresses[:] = 0
    rig.fake.run_all()

    blocks.assert_stored(1, 2)


def test_waiting_ends_with_the_job_or_the_deadline(rig, blocks):
    """Who waits is told when the job is over, and that it is not once the time is up."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)

    started = time.monotonic()
    assert not queue.wait_completed(1, SHORT_S)
    assert SHORT_S <= time.monotonic() - started < WAIT_S
    assert not queue.wait_completed(1, 0.0)
    rig.run()
    assert queue.wait_completed(1, WAIT_S)
    assert queue.wait_completed(1, 0.0)


def test_asking_and_waiting_for_a_job_that_is_over_calls_no_driver(rig, blocks):
    """How far a queue is, is read from memory: nothing that could disturb a capture, or block."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.run_all()
    before = rig.fake.num_calls()

    assert 1 == queue.completed()
    assert queue.wait_completed(1, WAIT_S)
    assert queue.failure(1) is None
    assert queue.seconds(1) is not None

    assert before == rig.fake.num_calls()


def test_seconds_are_those_of_the_device(rig, blocks):
    """A job that a kernel copied tells how long that took, by the GPU's clock; others do not."""
    queue = open_store(rig, strategy=CopyStrategy(copy_engine_from_nbytes=16 * 512))
    large = rig.blocks(page_nbytes=(8192,))
    rig.fake.host_register(large.address, large.slots.nbytes, False)
    for sequence in range(1, 100):
        queue.enqueue(blocks.copies(sequence % 16), sequence, None)
    queue.enqueue(large.copies(1), 100, None)
    assert queue.seconds(99) is None
    rig.fake.run_all()

    assert 1e-6 == queue.seconds(99)
    assert 1e-6 == queue.seconds(36)
    assert [None, None, None] == [queue.seconds(sequence) for sequence in (35, 100, 101)]


def test_queueing_disturbs_neither_capture_nor_context(rig, blocks):
    """A job is queued while the same thread captures a graph, in another context: both are as before, and whole."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    other = rig.fake.make_current(0, primary=False)

    with rig.fake.capturing() as capture:
        queue.enqueue(blocks.copies(1), 1, None)
        assert not queue.wait_completed(1, 0.2)  # long enough to ask the device
        queue.probe()

    assert not capture.lost
    assert other == rig.fake.context_stack()[-1]
    assert "global" == rig.fake.capture_mode
    rig.fake.check()


def test_any_thread_may_queue_and_ask(rig, blocks):
    """A thread that knows no context queues, waits, probes and closes, and knows none afterwards."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    rig.run()
    found = []

    def work():
        queue.prepare(blocks.group)
        queue.enqueue(blocks.copies(1), 1, device.record_event(ENGINE))
        found.append(queue.wait_completed(1, WAIT_S))
        queue.probe()
        found.append(queue.close(WAIT_S))
        found.append(rig.fake.context_stack())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)

    assert [True, True, ()] == found
    blocks.assert_stored(1)
    rig.fake.check()


def test_a_stream_of_the_engine_is_ordered_after_a_job(rig, blocks):
    """What the engine queues on another stream after `order_after` runs behind the job, and not before."""
    queue = rig.open().open_copy_queue("load", LOAD)
    stream = rig.fake.stream_create()
    seen = []
    queue.enqueue(blocks.copies(1), 1, None)

    queue.order_after(stream, 1)
    rig.fake.enqueue(stream, lambda: seen.append(queue.completed()))
    rig.fake.run(stream)
    assert [] == seen
    rig.fake.run_all()

    assert [1] == seen
    rig.fake.stream_destroy(stream)


def test_a_job_that_is_over_needs_no_order(rig, blocks):
    """Once the host has seen a job's number, every stream may go on."""
    queue = rig.open().open_copy_queue("load", LOAD)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.run_all()
    before = rig.fake.num_calls()

    queue.order_after(ENGINE, 1)

    assert before == rig.fake.num_calls()


def test_no_stream_is_ordered_after_what_was_not_queued(rig, blocks):
    """A job that was not submitted, one that was queued in part, and a stream that captures are refused."""
    queue = rig.open().open_copy_queue("load", LOAD)
    stream = rig.fake.stream_create()
    with pytest.raises(RequestError, match="job 1 was not queued"):
        queue.order_after(stream, 1)
    with pytest.raises(RequestError, match="no CUDA stream"):
        queue.order_after(None, 0)

    queue.enqueue(blocks.copies(1), 1, None)
    with rig.fake.capturing(stream), pytest.raises(DeviceError, match="capturing"):
        queue.order_after(stream, 1)
    rig.fake.fail("launch", at=1, code=OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match="could not be queued whole"):
        queue.enqueue(blocks.copies(2), 2, None)
    with pytest.raises(DeviceError, match="could not be queued whole"):
        queue.order_after(stream, 2)
    rig.fake.check()


def test_a_job_queued_in_part_breaks_the_queue(rig, blocks):
    """After a launch that fails no job is taken; what was queued runs, and then the job is over and failed, once."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    other = rig.blocks(page_nbytes=(64,))
    rig.fake.host_register(other.address, other.slots.nbytes, False)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.fail("launch", at=2, code=OUT_OF_MEMORY)

    with pytest.raises(DeviceError, match=r"job 2 could not be queued whole.*OUT_OF_MEMORY"):
        queue.enqueue([*blocks.copies(2), *other.copies(3)], 2, None)
    assert "could not be queued whole" in queue.broken
    with pytest.raises(DeviceError, match="broken"):
        queue.enqueue(blocks.copies(4), 3, None)
    assert not queue.close(0.0)
    rig.fake.run_all()
    assert 1 == queue.completed()

    assert queue.close(WAIT_S)
    assert 2 == queue.completed()
    assert queue.failure(1) is None
    assert isinstance(queue.failure(2), DeviceError)
    assert queue.failure(2) is None
    blocks.assert_stored(1, 2)


def test_a_waiting_thread_learns_of_a_job_queued_in_part(rig, blocks):
    """Who waits for a job that was queued in part is told that it is over, once all that was queued has run."""
    queue = open_store(rig)
    rig.fake.fail("launch", at=0, code=OUT_OF_MEMORY)
    with pytest.raises(DeviceError):
        queue.enqueue(blocks.copies(2), 1, None)

    rig.run()
    assert queue.wait_completed(1, WAIT_S)

    assert isinstance(queue.failure(1), DeviceError)


def test_a_faulted_device_ends_all_jobs(rig, blocks):
    """After a fault of the GPU who waits learns that the jobs are over, and failed, except those that were whole."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.run_all()
    queue.enqueue(blocks.copies(2), 2, None)
    queue.enqueue(blocks.copies(3), 3, None)
    rig.fake.trap()

    started = time.monotonic()
    assert queue.wait_completed(3, WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2

    assert 3 == queue.completed()
    assert queue.failure(1) is None
    for sequence in (2, 3):
        error = queue.failure(sequence)
        assert isinstance(error, DeviceError)
        assert "LAUNCH_FAILED" in str(error)
    with pytest.raises(DeviceError, match=r"broken.*LAUNCH_FAILED"):
        queue.enqueue(blocks.copies(4), 4, None)
    assert queue.close(0.0)
    rig.fake.check()


def test_a_fault_that_is_met_while_queueing_ends_all_jobs(rig, blocks):
    """A launch that finds the device dead breaks the queue; closing it proves that nothing runs."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.fail("launch", at=1, code=LAUNCH_FAILED)
    with pytest.raises(DeviceError, match="could not be queued whole"):
        queue.enqueue(blocks.copies(2), 2, None)

    assert queue.close(0.0)

    assert 2 == queue.completed()
    assert all(isinstance(queue.failure(sequence), DeviceError) for sequence in (1, 2))
    rig.fake.check()


def test_a_slow_device_is_not_a_dead_one(rig, blocks):
    """A device that answers and does not get on has not failed: the job is neither over nor the queue broken."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.hang(queue.stream)

    assert not queue.wait_completed(1, 0.2)
    queue.probe()
    assert 0 == queue.completed()
    assert "" == queue.broken

    rig.fake.release(queue.stream)
    rig.fake.run_all()
    assert 1 == queue.completed()


def test_close_waits_for_jobs_and_refuses_more(rig, blocks):
    """What is queued on a stream cannot be taken back, so it is waited for; new jobs are refused."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)

    started = time.monotonic()
    assert not queue.close(SHORT_S)
    assert SHORT_S <= time.monotonic() - started < WAIT_S
    with pytest.raises(ClosedError):
        queue.enqueue(blocks.copies(2), 2, None)
    rig.run()
    assert queue.close(WAIT_S)
    assert queue.close(0.0)

    assert 1 == queue.completed()
    blocks.assert_stored(1)


def test_a_hung_queue_does_not_hold_up_another(rig, blocks):
    """Each queue has a stream of its own."""
    device = rig.open()
    store, load = device.open_copy_queue("store", STORE), device.open_copy_queue("load", LOAD)
    rig.fake.hang(store.stream)
    store.enqueue(blocks.copies(1), 1, None)
    load.enqueue(blocks.copies(2), 1, None)
    rig.fake.run_all()

    assert (0, 1) == (store.completed(), load.completed())
    assert load.close(0.0)
    assert not store.close(0.0)
    rig.fake.release(store.stream)
    rig.fake.run_all()
    assert store.close(0.0)


@pytest.mark.parametrize("are_empty", [False, True])
def test_a_hung_stream_is_never_overfilled(rig, blocks, monkeypatch, are_empty):
    """However many jobs are submitted to a stream that hangs, none blocks in the driver: one is refused instead."""
    copies = [] if are_empty else blocks.copies(1)
    monkeypatch.setattr(backlog, "STALL_TIMEOUT_S", SHORT_S)
    queue = open_store(rig)
    rig.fake.hang(queue.stream)

    for sequence in range(1, backlog.MAX_QUEUED + 1):
        queue.enqueue(copies, sequence, None)
    with pytest.raises(DeviceError, match="did not get on"):
        queue.enqueue(copies, backlog.MAX_QUEUED + 1, None)
    assert backlog.MAX_QUEUED == queue._submission._backlog.num_queued
    assert not queue.close(0.0)

    rig.fake.release(queue.stream)
    rig.fake.run_all()
    assert queue.close(WAIT_S)
    assert isinstance(queue.failure(backlog.MAX_QUEUED + 1), DeviceError)
    rig.fake.check()


def test_a_job_of_many_long_runs_waits_for_nothing(rig):
    """1 GiB of pages of 2 MiB, 512 runs, is one batch call, also on a stream that does not get on; three jobs fit."""
    blocks = rig.blocks(page_nbytes=(64,) * 8, num_blocks=64, num_slots=64)
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    queue = open_store(rig, strategy=ENGINE_ONLY)
    rig.fake.hang(queue.stream)
    rig.fake.calls.clear()

    for sequence in range(1, 4):
        queue.enqueue(blocks.copies(*range(63, -1, -1)), sequence, None)

    assert 3 == rig.fake.num_calls("copy_batch_async")
    assert 0 == rig.fake.num_calls("event_query")
    rig.fake.release(queue.stream)
    rig.fake.run_all()
    assert 3 == queue.completed()
    blocks.assert_stored(*range(64))
    rig.fake.check()


def test_the_number_of_a_job_makes_room_for_all_before_it(rig, blocks, monkeypatch):
    """Once a job is over no event of it is asked for: what its number says is enough."""
    monkeypatch.setattr(backlog, "MAX_QUEUED", 20)
    monkeypatch.setattr(backlog, "_MARK_EVERY", 4)
    queue = open_store(rig)
    for sequence in range(1, 30):
        queue.enqueue(blocks.copies(1) * 6, sequence, None)
        rig.fake.run_all()

    assert rig.fake.num_calls("event_record") >= 29
    assert 0 == rig.fake.num_calls("event_query")
    assert queue._submission._backlog.num_queued <= 20


def test_a_short_job_makes_few_calls(rig, blocks):
    """Queueing a block by the page kernel is one launch, within a thread that was made harmless to captures."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.calls.clear()

    queue.enqueue(blocks.copies(2), 2, None)

    assert ["exchange_capture_mode", "context_current", "launch", "exchange_capture_mode"] == [
        call.name for call in rig.fake.calls
    ]
    rig.fake.run_all()


@pytest.mark.parametrize("strategy", [KERNEL_ONLY, ENGINE_ONLY])
def test_a_long_job_does_not_overfill_a_hung_stream(rig, blocks, monkeypatch, strategy):
    """A single job that is longer than a stream takes is given up half-way when the stream does not get on."""
    monkeypatch.setattr(backlog, "STALL_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(backlog, "MAX_QUEUED", 20)
    monkeypatch.setattr(backlog, "_MARK_EVERY", 4)
    monkeypatch.setattr("kvmoor.devices.cuda.copy_calls._COPIES_A_CALL", 4)
    device = rig.open(strategy=strategy)
    queue = device.open_copy_queue("store", STORE)
    rig.fake.hang(queue.stream)

    with pytest.raises(DeviceError, match="did not get on"):
        queue.enqueue(blocks.copies(*range(15, -1, -1)) * 30, 1, None)
    assert queue._submission._backlog.num_queued <= 20
    rig.fake.release(queue.stream)
    rig.fake.run_all()

    assert device.close(WAIT_S)
    assert isinstance(queue.failure(1), DeviceError)
    rig.fake.host_unregister(blocks.address)
    rig.assert_clean()


@pytest.mark.parametrize("strategy", [KERNEL_ONLY, ENGINE_ONLY])
def test_a_full_stream_takes_more_once_it_gets_on(rig, blocks, monkeypatch, strategy):
    """Jobs, and parts of one job, wait for room and no longer; events that mark the way are given back."""
    monkeypatch.setattr(backlog, "MAX_QUEUED", 20)
    monkeypatch.setattr(backlog, "_MARK_EVERY", 4)
    monkeypatch.setattr("kvmoor.devices.cuda.copy_calls._COPIES_A_CALL", 8)
    queue = open_store(rig, strategy=strategy)
    rig.run()

    for sequence in range(1, 40):
        queue.enqueue(blocks.copies(*range(15, -1, -1)) * 3, sequence, None)
    assert queue.wait_completed(39, WAIT_S)

    assert queue._submission._backlog.num_queued <= 20 + 3 * 32
    blocks.assert_stored(*range(16))
    close_all(rig)
    rig.fake.memory.remove("registered", blocks.address)
    rig.assert_clean()


def test_closing_ends_the_wait_for_room(rig, blocks, monkeypatch):
    """A thread that waits for room on a hung stream is let go by `close`, long before its own deadline."""
    monkeypatch.setattr(backlog, "STALL_TIMEOUT_S", 10 * WAIT_S)
    monkeypatch.setattr(backlog, "MAX_QUEUED", 4)
    queue = open_store(rig)
    rig.fake.hang(queue.stream)
    for sequence in range(1, 5):
        queue.enqueue(blocks.copies(1), sequence, None)
    errors = []

    def enqueue():
        try:
            queue.enqueue(blocks.copies(1), 5, None)
        except DeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=enqueue)
    thread.start()
    while not queue._lock.locked():
        time.sleep(0)
    assert not queue.close(0.5)
    thread.join(WAIT_S)

    assert not thread.is_alive()
    assert len(errors) == 1
    rig.fake.release(queue.stream)


def test_a_forked_child_has_a_closed_queue(rig, blocks):
    """In a forked child the queue is closed and tells what was known; it calls no driver and waits for nothing."""
    queue = open_store(rig)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.run_all()
    assert 1 == queue.completed()
    queue.enqueue(blocks.copies(2), 2, None)
    rig.fake.run_all()  # which the parent has not looked at
    before = rig.fake.num_calls()

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert 1 == queue.completed()
            assert not queue.wait_completed(2, WAIT_S)
            assert queue.close(WAIT_S)
            queue.probe()
            assert "" == queue.broken
            with pytest.raises(ClosedError):
                queue.enqueue(blocks.copies(3), 3, None)
            assert before == rig.fake.num_calls()
            code = 0
        finally:
            os._exit(code)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert 2 == queue.completed()


def test_an_interrupt_while_queueing_breaks_the_queue(rig, blocks):
    """Ctrl-C in the middle of a job is passed on; what of the job was queued is not known, so the queue is broken."""
    queue = open_store(rig)

    def interrupt(call):
        if call.name == "launch":
            raise KeyboardInterrupt

    rig.fake.before_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.before_call = None

    assert "could not be queued whole" in queue.broken
    rig.fake.run_all()
    assert queue.close(WAIT_S)
