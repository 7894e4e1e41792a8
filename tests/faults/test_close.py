"""Closing always ends, and memory that a copy may still touch is never unmapped."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from device_blocks import DeviceBlocks, content_keys
from kvmoor.devices.cpu import CpuCopyQueue, CpuDevice
from kvmoor.devices.cpu_stream import CpuStream
from kvmoor.errors import BusyError, ClosedError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.quarantine import quarantined_nbytes
from kvmoor.observation import ArenaQuarantined, Event
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies
from kvmoor.transfer_messages import Outcome

WAIT_S = 20.0
GRACE_S = 0.2
"""What closing may take past its deadline."""
NUM_BLOCKS = 4
HOST_NBYTES = 8 * 4096


@pytest.fixture
def scripted() -> Iterator[ScriptedCopies]:
    with ScriptedCopies() as scripted:
        yield scripted


@pytest.fixture
def device_blocks() -> DeviceBlocks:
    blocks = DeviceBlocks()
    for number in range(NUM_BLOCKS):
        blocks.fill(number, number)
    return blocks


def open_offloader(device_blocks: DeviceBlocks, scripted: ScriptedCopies, **options: object) -> Offloader:
    return Offloader(device_blocks.layout(), host_memory=HOST_NBYTES, device=CpuDevice(copy_hook=scripted), **options)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "rw" in line.split()[1]
    return False


def first_slot(offloader: Offloader) -> int:
    return int(offloader._worker.arena.slot_addresses(0, np.array([0]))[0])


@pytest.mark.parametrize("queue", ["store", "load"])
@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
def test_an_endless_copy_cannot_hold_up_close(
    device_blocks: DeviceBlocks, scripted: ScriptedCopies, expects_quarantine: None, queue: str, timeout_s: float
) -> None:
    """With a copy that never ends close returns by its deadline, keeps the memory mapped, and reports the bytes."""
    before_nbytes = quarantined_nbytes()
    offloader = open_offloader(device_blocks, scripted)
    if queue == "load":
        stored = offloader.submit_store(content_keys(0), [0])
        assert stored.job_id is not None
        offloader.wait([stored.job_id], WAIT_S)
    gate = scripted.hang_at(0, queue=queue)
    if queue == "load":
        job_id = offloader.submit_load(offloader.match(content_keys(0)), [8])
    else:
        job_id = offloader.submit_store(content_keys(0), [0]).job_id
    address = first_slot(offloader)
    assert gate.wait_reached(WAIT_S)

    started = time.monotonic()
    report = offloader.close(timeout_s).worker
    seconds = time.monotonic() - started

    assert seconds < timeout_s + GRACE_S
    assert (HOST_NBYTES, (job_id,), False) == (report.quarantined_nbytes, report.unproven_jobs, report.graceful)
    assert f"{queue} lane: not proven idle" in report.reason
    assert before_nbytes + HOST_NBYTES == quarantined_nbytes()
    assert is_mapped(address)
    gate.release()  # the late copy writes into memory that is still there
    assert offloader._worker._device.close(WAIT_S)
    assert report == offloader.close().worker
    assert is_mapped(address)


def test_a_quarantined_arena_keeps_the_device_tensors(
    device_blocks: DeviceBlocks, scripted: ScriptedCopies, expects_quarantine: None
) -> None:
    """The tensors that a late copy touches live as long as its slots do, even if the engine forgets them."""
    offloader = open_offloader(device_blocks, scripted)
    gate = scripted.hang_at(0)
    offloader.submit_store(content_keys(3), [3])
    assert gate.wait_reached(WAIT_S)
    device = offloader._worker._device
    offloader.close(0.0)
    tensors = [weakref.ref(tensor) for tensor in device_blocks.tensors]

    del offloader
    device_blocks.tensors = []
    gc.collect()

    assert all(tensor() is not None for tensor in tensors)
    gate.release()
    assert device.close(WAIT_S)


def test_a_slow_copy_is_waited_for(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """Copies in flight in both directions end before the memory goes, and nothing is quarantined (B17)."""
    offloader = open_offloader(device_blocks, scripted)
    stored = offloader.submit_store(content_keys(0, 1), [0, 1])
    assert stored.job_id is not None
    offloader.wait([stored.job_id], WAIT_S)
    store_gate, load_gate = scripted.hold("store"), scripted.hold("load")
    jobs = {
        offloader.submit_store(content_keys(2), [2]).job_id,
        offloader.submit_load(offloader.match(content_keys(0)), [8]),
    }
    assert store_gate.wait_reached(WAIT_S)
    assert load_gate.wait_reached(WAIT_S)
    order = []
    arena_close = offloader._worker.arena.close
    offloader._worker._arena.close = lambda timeout_s: order.append("unmapped") or arena_close(timeout_s)  # type: ignore[method-assign]

    def let_go() -> None:
        order.append("released")
        store_gate.release()
        load_gate.release()

    timer = threading.Timer(0.1, let_go)
    timer.start()
    report = offloader.close(WAIT_S).worker
    timer.join()

    assert report.graceful, report
    assert ["released", "unmapped"] == order
    results = {result.job_id: result.outcome for result in offloader.poll_results()}
    assert dict.fromkeys(jobs, Outcome.DONE) == {job: results[job] for job in jobs}


def test_a_copy_waiting_for_its_event_is_dropped(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """A job whose event never comes has touched nothing, so close drops it and gives the memory back."""
    stream = CpuStream("kvmoor-engine")
    latch = threading.Event()
    stream.submit(latch.wait)
    offloader = open_offloader(device_blocks, scripted)
    submission = offloader.submit_store(content_keys(0), [0], wait_for=stream.record_event())

    report = offloader.close(0.1).worker

    assert report.graceful, report
    assert 0 == scripted.num_copies()
    assert [(submission.job_id, Outcome.FAILED)] == [(r.job_id, r.outcome) for r in offloader.poll_results()]
    latch.set()
    assert stream.close(WAIT_S)


@pytest.mark.parametrize("failing", ["store lane", "device"])
def test_a_step_that_raises_does_not_skip_the_next(
    device_blocks: DeviceBlocks,
    scripted: ScriptedCopies,
    monkeypatch: pytest.MonkeyPatch,
    expects_quarantine: None,
    failing: str,
) -> None:
    """If one step of closing raises, the others are taken, the report has the error, and the memory is kept (B17)."""
    offloader = open_offloader(device_blocks, scripted)

    def fail(*_: object) -> bool:
        raise OSError("the driver is gone")

    owner = CpuCopyQueue if failing == "store lane" else CpuDevice
    device = offloader._worker._device
    with monkeypatch.context() as patch:
        patch.setattr(owner, "close", fail)
        report = offloader.close(1.0).worker

    steps = {step.name: step for step in report.steps}
    assert {"store lane", "load lane", "expedited load lane", "device", "status segment"} == set(steps)
    assert "OSError: the driver is gone" == steps[failing].error
    assert HOST_NBYTES == report.quarantined_nbytes
    assert device.close(WAIT_S)


def test_an_arena_that_cannot_be_unmapped_is_kept(
    device_blocks: DeviceBlocks, scripted: ScriptedCopies, monkeypatch: pytest.MonkeyPatch, expects_quarantine: None
) -> None:
    """If the last step raises, close still ends, and the report says that the memory is still there."""
    offloader = open_offloader(device_blocks, scripted)

    def fail(*_: object) -> bool:
        raise OSError("munmap: too many mappings")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "close", fail)
        report = offloader.close(1.0).worker

    assert HOST_NBYTES == report.quarantined_nbytes
    assert "munmap: too many mappings" in report.reason


def test_quarantine_is_observed(
    device_blocks: DeviceBlocks, scripted: ScriptedCopies, expects_quarantine: None
) -> None:
    """An operator's observer learns how many bytes stay and why."""
    events: list[Event] = []

    class Recorder:
        def on_event(self, event: Event) -> None:
            events.append(event)

    offloader = open_offloader(device_blocks, scripted, observer=Recorder())
    gate = scripted.hang_at(0)
    offloader.submit_store(content_keys(0), [0])
    assert gate.wait_reached(WAIT_S)
    device = offloader._worker._device
    offloader.close(0.0)
    gate.release()
    assert device.close(WAIT_S)

    (event,) = (event for event in events if isinstance(event, ArenaQuarantined))
    assert HOST_NBYTES == event.nbytes
    assert "store lane" in event.reason


def test_two_threads_may_close(device_blocks: DeviceBlocks, scripted: ScriptedCopies, expects_quarantine: None) -> None:
    """The second closer waits for the first and gets the same report, or says that it ran out of time."""
    offloader = open_offloader(device_blocks, scripted)
    gate = scripted.hang_at(0)
    offloader.submit_store(content_keys(0), [0])
    assert gate.wait_reached(WAIT_S)
    reports = []
    first = threading.Thread(target=lambda: reports.append(offloader.close(1.0)))
    first.start()
    while not offloader.closed:
        threading.Event().wait(0.001)

    with pytest.raises(BusyError, match="another thread is closing"):
        offloader.close(0.01)
    reports.append(offloader.close(WAIT_S))
    first.join()

    assert reports[0].worker is reports[1].worker
    gate.release()
    assert offloader._worker._device.close(WAIT_S)


def test_work_submitted_while_closing_is_refused(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """As soon as close has begun no new copy starts, from any thread, and no key is left behind half-stored."""
    offloader = open_offloader(device_blocks, scripted)
    gate = scripted.hold("store")
    offloader.submit_store(content_keys(0), [0])
    assert gate.wait_reached(WAIT_S)
    closer = threading.Thread(target=offloader.close, args=(WAIT_S,))
    closer.start()
    while not offloader.closed:
        threading.Event().wait(0.001)

    with pytest.raises(ClosedError):
        offloader.submit_store(content_keys(1), [1])
    gate.release()
    closer.join()

    offloader.poll_results()
    assert 1 == offloader.statistics().blocks.ready
    offloader._coordinator.check_invariants()


def test_leaving_a_with_block_closes(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """An exception inside the `with` block closes the offloader and comes out unchanged."""
    with pytest.raises(ZeroDivisionError), open_offloader(device_blocks, scripted) as offloader:
        raise ZeroDivisionError

    assert offloader.closed
    assert offloader.close().worker.graceful
