"""Whatever fails or hangs while copies are staged: jobs end as what they are, and the ring is freed only when idle."""

import ctypes
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from device_blocks import DeviceBlocks, content_keys
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.cpu_stream import CpuStream
from kvmoor.devices.device import Direction
from kvmoor.errors import ClosedError, DeviceError, NoRoomError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies
from kvmoor.testing.scripted_copies import CopyGate
from kvmoor.testing.scripted_registrar import ScriptedRegistrar
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.transfers import staged_queue
from kvmoor.transfers.staged_queue import StagedQueue
from kvmoor.transfers.staging_ring import StagingRing
from kvmoor.worker import TransferWorker
from staging_rig import GUARD, WAIT_S, Blocks, Geometry, StagingRig, finish

SMALL = Geometry((512, 512, 512))
NUM_BLOCKS = 6
ALL = Blocks(0, range(NUM_BLOCKS), [[number] for number in range(NUM_BLOCKS)])
GRACE_S = 0.2
"""What closing may take past its deadline."""

both_ways = pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)


def mark_some_reachable(rig: StagingRig) -> None:
    """Let slots 1 and 4 be reachable, so that jobs over all slots are mixed."""
    rig.reachable[0][[1, 4]] = True


@both_ways
@pytest.mark.parametrize("k", range(NUM_BLOCKS))
@pytest.mark.parametrize("mixed", [False, True])
def test_a_copy_that_fails_at_any_block_fails_its_job_only(direction: Direction, k: int, mixed: bool) -> None:
    """A job whose k-th block fails says so once; its neighbours are whole, and the ring is free again."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], copy_hook=scripted) as rig:
        rig.fill_slots()
        if mixed:
            mark_some_reachable(rig)
        scripted.fail_at(2 + k)
        queue, neighbour = rig.queues[direction], Blocks(0, (6, 7), [[10], [11]])
        queue.enqueue(rig.copies(neighbour), 1, None)
        queue.enqueue(rig.copies(ALL), 2, None)
        queue.enqueue(rig.copies(neighbour), 3, None)
        finish(queue, 3)

        assert queue.failure(1) is None
        failure = queue.failure(2)
        assert isinstance(failure, DeviceError)
        assert "scripted failure" in str(failure)
        assert queue.failure(2) is None
        for position in range(2):
            np.testing.assert_array_equal(rig.page_bytes(neighbour, position), rig.slots[0][6 + position, :1536])
        assert rig.rings[direction].nbytes == rig.rings[direction].free_nbytes
        queue.enqueue(rig.copies(ALL), 4, None)
        finish(queue, 4)
        for position in range(NUM_BLOCKS):
            np.testing.assert_array_equal(rig.page_bytes(ALL, position), rig.slots[0][position, :1536])


@pytest.mark.parametrize("k", range(NUM_BLOCKS))
def test_a_store_that_failed_writes_no_slot_from_then_on(k: int) -> None:
    """Bytes that the device did not deliver are not copied on into slots."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], ring_slots=1, copy_hook=scripted) as rig:
        scripted.fail_at(k)
        rig.store.enqueue(rig.copies(ALL), 1, None)
        assert rig.store.wait_completed(1, WAIT_S)

        assert isinstance(rig.store.failure(1), DeviceError)
        assert (rig.slots[0][k:] == GUARD).all()
        assert (1 + k, k * 1536) == (scripted.num_copies(), rig.store.staged_nbytes)


@both_ways
@pytest.mark.parametrize("k", range(NUM_BLOCKS))
def test_an_endless_copy_cannot_hold_up_close(direction: Direction, k: int) -> None:
    """With a piece that never ends close returns by its deadline and proves nothing; the ring stays until it does."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], copy_hook=scripted) as rig:
        mark_some_reachable(rig)
        gate = scripted.hang_at(k)
        queue = rig.queues[direction]
        queue.enqueue(rig.copies(ALL), 1, None)
        assert gate.wait_reached(WAIT_S)
        assert not queue.wait_completed(1, 0.01)

        for timeout_s in (0.0, 0.1):
            started = time.monotonic()
            assert not queue.close(timeout_s)
            assert time.monotonic() - started < timeout_s + GRACE_S
        assert (0, None) == (queue.completed(), queue.failure(1))
        staging_nbytes = rig.device.staging_nbytes

        gate.release()
        assert queue.close(WAIT_S)
        assert 1 == queue.completed()
        assert isinstance(queue.failure(1), DeviceError)
        assert staging_nbytes == rig.device.staging_nbytes


def test_the_memory_of_an_endless_copy_outlives_its_queue() -> None:
    """If all who know of the ring are forgotten, the late copy still finds the ring's memory."""
    with ScriptedCopies() as scripted:
        device = CpuDevice(copy_hook=scripted)
        ring = StagingRing(device, 8192)
        with StagingRig([SMALL]) as rig:
            device_queue = device.open_copy_queue("store", Direction.DEVICE_TO_HOST)
            queue = StagedQueue("store", Direction.DEVICE_TO_HOST, device_queue, ring, prepare_thread=lambda: None)
            gate = scripted.hang_at(0)
            queue.enqueue(rig.copies(Blocks(0, (0,), [[0]])), 1, None)
            assert gate.wait_reached(WAIT_S)
            assert not queue.close(0.05)
            gone = weakref.ref(queue)
            address = ring._base
            with pytest.warns(ResourceWarning, match="never closed"):
                del queue, ring  # the last references
            assert gone() is None
            assert 8192 == device.staging_nbytes
            gate.release()
            assert device_queue.close(WAIT_S)
            assert device.close(WAIT_S)
            device.free_staging(address)


@both_ways
def test_close_drops_staged_jobs_that_run(direction: Direction) -> None:
    """Close in the middle of several jobs: all are over and failed, nothing is touched any more, the thread is gone."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], ring_slots=2, copy_hook=scripted) as rig:
        gate = scripted.hang_at(3)
        queue = rig.queues[direction]
        for sequence in (1, 2, 3):
            queue.enqueue(rig.copies(ALL), sequence, None)
        assert gate.wait_reached(WAIT_S)
        closed: list[bool] = []
        closer = threading.Thread(target=lambda: closed.append(queue.close(WAIT_S)))
        closer.start()
        while True:  # as soon as close has begun, nothing more is taken
            try:
                queue.enqueue(rig.copies(ALL), 4 + queue.staged_jobs, None)
            except ClosedError:
                break
        gate.release()
        closer.join(WAIT_S)
        before = [rows.copy() for rows in (*rig.slots, *rig.tensors[0])]

        assert [True] == closed
        assert queue.completed() >= 3
        assert all(isinstance(queue.failure(sequence), DeviceError) for sequence in (1, 2, 3))
        assert queue.wait_completed(3, 0.0)
        assert rig.device.close(WAIT_S)
        for rows, after in zip(before, (*rig.slots, *rig.tensors[0]), strict=True):
            np.testing.assert_array_equal(rows, after)


def test_close_does_not_wait_for_an_event_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged jobs behind an event are dropped at once, without a byte moved on the device's side."""
    monkeypatch.setattr(staged_queue, "_LOOK_UP_S", WAIT_S)  # so that it is the dropped piece that wakes the thread
    with ScriptedCopies() as scripted, StagingRig([SMALL], copy_hook=scripted) as rig:
        with CpuStream("kvmoor-engine") as engine, engine.latch():
            rig.load.enqueue(rig.copies(ALL), 1, engine.record_event())
            assert rig.watched[Direction.HOST_TO_DEVICE].wait_given(2, WAIT_S)  # the ring is full
            started = time.monotonic()
            assert rig.load.close(WAIT_S)
            assert time.monotonic() - started < WAIT_S / 2
        assert 0 == scripted.num_copies()
        assert isinstance(rig.load.failure(1), DeviceError)


@both_ways
def test_a_thread_that_hangs_cannot_hold_up_close(direction: Direction) -> None:
    """If the device does not answer the thread, close ends by its deadline and proves nothing until it does."""
    with StagingRig([SMALL]) as rig:
        queue, gate = rig.queues[direction], CopyGate()
        queue._prepare_thread = gate.pass_through
        queue.enqueue(rig.copies(ALL), 1, None)
        assert gate.wait_reached(WAIT_S)

        for timeout_s in (0.0, 0.1):
            started = time.monotonic()
            assert not queue.close(timeout_s)
            assert time.monotonic() - started < timeout_s + GRACE_S
        gate.release()
        assert queue.close(WAIT_S)
        assert 1 == queue.completed()


@both_ways
def test_close_ends_a_host_copy_between_two_steps(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close waits for the few MiB that the thread copies just now, and for no more of the block."""
    gate, num_steps = CopyGate(), 0

    def memmove(*args: int) -> None:
        nonlocal num_steps
        num_steps += 1
        gate.pass_through()
        ctypes.memmove(*args)

    monkeypatch.setattr(staged_queue, "ctypes", SimpleNamespace(memmove=memmove))
    monkeypatch.setattr(staged_queue, "_STEP_NBYTES", 512)
    with StagingRig([SMALL]) as rig:
        queue = rig.queues[direction]
        queue.enqueue(rig.copies(ALL), 1, None)
        assert gate.wait_reached(WAIT_S)
        assert not queue.close(0.02)

        gate.release()
        assert queue.close(WAIT_S)
        assert 1 == num_steps
        assert isinstance(queue.failure(1), DeviceError)


@both_ways
@pytest.mark.parametrize("k", range(4))
def test_a_device_queue_that_refuses_a_piece_breaks_the_queue(direction: Direction, k: int) -> None:
    """A job that the device took half is not over before close proves it; the job in front is, and none is taken."""
    with StagingRig([SMALL], ring_slots=1) as rig:
        mark_some_reachable(rig)
        queue, watched = rig.queues[direction], rig.watched[direction]
        watched.refuse_at[1 + k] = DeviceError("the driver took 3 of 5 launches")
        queue.enqueue(rig.copies(Blocks(0, (6,), [[6]])), 1, None)
        finish(queue, 1)
        queue.enqueue(rig.copies(ALL), 2, None)
        assert watched.wait_given(1 + k, WAIT_S)
        while not queue._broken:
            queue.wait_completed(2, 0.001)

        with pytest.raises(DeviceError, match="3 of 5 launches"):
            queue.enqueue(rig.copies(ALL), 3, None)
        assert (False, 1) == (queue.wait_completed(2, 0.02), queue.completed())
        assert queue.close(WAIT_S)
        assert 2 == queue.completed()
        assert isinstance(queue.failure(2), DeviceError)


def test_a_refused_direct_job_breaks_the_queue() -> None:
    """A job that goes straight to the device and is refused there raises, and no later job says it is over."""
    with StagingRig([SMALL]) as rig:
        rig.reachable[0][:] = True
        rig.watched[Direction.DEVICE_TO_HOST].refuse_at[0] = DeviceError("no more launches")
        for sequence in (1, 2):
            with pytest.raises(DeviceError, match="no more launches"):
                rig.store.enqueue(rig.copies(ALL), sequence, None)
            rig.watched[Direction.DEVICE_TO_HOST].refuse_at.clear()
        assert 0 == rig.store.completed()

        rig.watched[Direction.HOST_TO_DEVICE].refuse_at[0] = ClosedError("closed")
        with pytest.raises(ClosedError):
            rig.load.enqueue(rig.copies(ALL), 1, None)
        rig.watched[Direction.HOST_TO_DEVICE].refuse_at.clear()
        rig.load.enqueue(rig.copies(ALL), 1, None)
        finish(rig.load, 1)


@both_ways
def test_staging_memory_that_cannot_be_had_fails_the_job(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for the ring a job fails and says why; as soon as there is some, jobs go on."""
    with StagingRig([SMALL]) as rig:
        queue = rig.queues[direction]
        with monkeypatch.context() as patch:

            def refuse(nbytes: int) -> int:
                raise NoRoomError(f"{nbytes} bytes are not there")

            patch.setattr(rig.device, "allocate_staging", refuse)
            queue.enqueue(rig.copies(ALL), 1, None)
            assert queue.wait_completed(1, WAIT_S)
            failure = queue.failure(1)
            assert isinstance(failure, DeviceError)
            assert isinstance(failure.__cause__, NoRoomError)
            assert "8192 bytes are not there" in str(failure)
        queue.enqueue(rig.copies(ALL), 2, None)
        finish(queue, 2)


def test_a_thread_that_cannot_be_prepared_breaks_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    """If the thread cannot be made harmless to captures it calls nothing else, and the next job is refused."""
    with StagingRig([SMALL]) as rig:

        def fail() -> None:
            raise DeviceError("no context")

        rig.store._prepare_thread = fail
        rig.store.enqueue(rig.copies(ALL), 1, None)
        assert rig.store._thread is not None
        rig.store._thread.join(WAIT_S)

        with pytest.raises(DeviceError, match="no context"):
            rig.store.enqueue(rig.copies(ALL), 2, None)
        assert ([], 0) == (rig.watched[Direction.DEVICE_TO_HOST].given, rig.device.staging_nbytes)
        assert "takes no more jobs" in caplog.text


def test_no_thread_to_stage_with_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may start no more threads the job is refused with the remedy, and a later one is taken."""
    with StagingRig([SMALL]) as rig:
        with monkeypatch.context() as patch:

            def refuse(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(DeviceError, match="raise the limit on threads"):
                rig.store.enqueue(rig.copies(ALL), 1, None)
        assert (0, 0) == (rig.store.completed(), rig.store.staged_jobs)
        rig.store.enqueue(rig.copies(ALL), 1, None)
        finish(rig.store, 1)


def test_many_loads_through_few_buffers_all_end() -> None:
    """Of 8 loads through a ring of 4 slots, one failing, all end, and the 4 slots are free again (B41)."""
    with (
        ScriptedCopies() as scripted,
        StagingRig([SMALL], num_device_blocks=64, ring_slots=4, copy_hook=scripted) as rig,
    ):
        scripted.fail_at(20)
        for sequence in range(1, 9):
            ids = [[(sequence - 1) * 8 + number] for number in range(8)]
            rig.load.enqueue(rig.copies(Blocks(0, range(8), ids)), sequence, None)

        assert rig.load.wait_completed(8, WAIT_S)

        assert [3] == [number for number in range(1, 9) if rig.load.failure(number) is not None]
        ring = rig.rings[Direction.HOST_TO_DEVICE]
        assert 4 * 4096 == ring.nbytes == ring.free_nbytes


# ---- the same in a worker that owns all of it


@pytest.fixture
def registrar() -> ScriptedRegistrar:
    """Return a registrar of a platform that registers nothing."""
    registrar = ScriptedRegistrar()
    registrar.fail_permanently(801)
    return registrar


def test_many_threads_load_through_few_buffers(registrar: ScriptedRegistrar) -> None:
    """Eight threads that load at once through 4 slots all end, expedited loads beside them; all memory comes back."""
    blocks = DeviceBlocks(num_blocks=9 * 8)
    for number in range(8):
        blocks.fill(number, number)
    device = CpuDevice(registrar=registrar)
    layout = blocks.layout()
    parts = (OrderPart(0, tuple(range(8))),)
    with TransferWorker(layout, plan_arena(layout, 8 * 4096), device, staging_nbytes=8 * 4096) as worker:
        assert worker.arena.wait_mapped(WAIT_S)
        order = Order(OrderId(9), OrderKind.DEVICE_TO_SLOT, parts)
        worker.submit(order, {0: np.arange(8).reshape(8, 1)})
        worker.wait([OrderId(9)], WAIT_S)
        start = threading.Barrier(8)

        def load(number: int) -> None:
            ids = (8 * number + np.arange(8)).reshape(8, 1)
            start.wait(WAIT_S)
            order = Order(OrderId(number), OrderKind.SLOT_TO_DEVICE, parts)
            worker.submit(order, {0: ids}, expedited=number % 2 == 0)
            worker.wait([order.order_id], WAIT_S)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)

        reports = worker.poll_reports()
        assert (9, {Outcome.DONE}) == (len(reports), {report.outcome for report in reports})
        assert (9, 9 * 8 * 1536) == (worker.statistics().staged_jobs, worker.statistics().staged_nbytes)
        assert 16 * 4096 == worker.statistics().staging_ring_nbytes == device.staging_nbytes
        assert [8 * 4096, 4 * 4096, 4 * 4096] == [ring.free_nbytes for ring in worker._staging._rings]
    assert 0 == device.staging_nbytes
    for number in range(8):
        for copy in range(1, 9):
            np.testing.assert_array_equal(blocks.pattern(number), blocks.content(8 * copy + number))


def test_an_offloader_with_an_endless_staged_copy_closes(
    registrar: ScriptedRegistrar, expects_quarantine: None
) -> None:
    """Close ends by its deadline, and arena and rings stay for the late copy, counted in the report."""
    blocks = DeviceBlocks()
    with ScriptedCopies() as scripted:
        device = CpuDevice(copy_hook=scripted, registrar=registrar)
        offloader = Offloader(blocks.layout(), host_memory=8 * 4096, device=device)
        gate = scripted.hang_at(2)
        job_id = offloader.submit_store(content_keys(*range(8)), range(8)).job_id
        assert gate.wait_reached(WAIT_S)

        started = time.monotonic()
        report = offloader.close(0.2).worker
        assert time.monotonic() - started < 0.2 + GRACE_S

        assert (False, (job_id,)) == (report.graceful, report.unproven_jobs)
        assert 8 * 4096 + device.staging_nbytes == report.quarantined_nbytes
        assert device.staging_nbytes > 0
        assert "staging memory" not in [step.name for step in report.steps]
        gate.release()
        assert device.close(WAIT_S)
        assert device.staging_nbytes > 0


def test_an_offloader_waits_for_staged_jobs_that_run(registrar: ScriptedRegistrar) -> None:
    """Staged copies in flight both ways end before the rings and the arena go, and nothing is quarantined (B17)."""
    blocks = DeviceBlocks()
    for number in range(4):
        blocks.fill(number, number)
    with ScriptedCopies() as scripted:
        device = CpuDevice(copy_hook=scripted, registrar=registrar)
        offloader = Offloader(blocks.layout(), host_memory=8 * 4096, device=device)
        offloader.wait([offloader.submit_store(content_keys(0, 1), [0, 1]).job_id], WAIT_S)
        gates = scripted.hold("store"), scripted.hold("load")
        jobs = {
            offloader.submit_store(content_keys(2, 3), [2, 3]).job_id,
            offloader.submit_load(offloader.match(content_keys(0, 1)), [8, 9]),
        }
        for gate in gates:
            assert gate.wait_reached(WAIT_S)
        timer = threading.Timer(0.1, scripted.release_all)
        timer.start()

        report = offloader.close(WAIT_S).worker
        timer.join()

    assert report.graceful, report
    steps = [step.name for step in report.steps]
    assert ["staging memory", "arena"] == steps[-2:]
    assert "device" in steps
    assert 0 == device.staging_nbytes
    results = {result.job_id: result.outcome for result in offloader.poll_results()}
    assert dict.fromkeys(jobs, Outcome.DONE) == {job: results[job] for job in jobs}
    np.testing.assert_array_equal(blocks.pattern(1), blocks.content(9))


@pytest.mark.parametrize("k", range(4))
def test_a_staged_store_that_fails_leaves_no_key(registrar: ScriptedRegistrar, k: int) -> None:
    """A staged store whose k-th copy fails shows none of its keys, and can be repeated (B28)."""
    blocks = DeviceBlocks()
    with ScriptedCopies() as scripted:
        scripted.fail_at(k)
        device = CpuDevice(copy_hook=scripted, registrar=registrar)
        with Offloader(blocks.layout(), host_memory=8 * 4096, device=device) as offloader:
            outcomes = []
            for num_ready in (0, 4):
                offloader.wait([offloader.submit_store(content_keys(*range(4)), range(4)).job_id], WAIT_S)
                outcomes += [result.outcome for result in offloader.poll_results()]
                with offloader.match(content_keys(*range(4))) as match:
                    assert num_ready == match.num_blocks
            offloader._coordinator.check_invariants()
    assert [Outcome.FAILED, Outcome.DONE] == outcomes
