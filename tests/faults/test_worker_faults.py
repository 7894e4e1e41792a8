"""A worker opens where it can, refuses what would bring wrong bytes, and says why it could not end."""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from device_blocks import DeviceBlocks, content_keys
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.device import Direction
from kvmoor.errors import BrokenError, BusyError, DeviceError, RequestError, SettingsError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.quarantine import quarantined_nbytes
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies, ScriptedRegistrar
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.worker import TransferWorker

WAIT_S = 20.0
HOST_NBYTES = 8 * 4096


@pytest.fixture
def device_blocks() -> DeviceBlocks:
    return DeviceBlocks()


@pytest.fixture
def scripted() -> Iterator[ScriptedCopies]:
    with ScriptedCopies() as scripted:
        yield scripted


@pytest.fixture
def worker(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> Iterator[TransferWorker]:
    layout = device_blocks.layout()
    device = CpuDevice(copy_hook=scripted)
    with TransferWorker(layout, plan_arena(layout, HOST_NBYTES), device, mapping="eager") as worker:
        worker.take_published()
        yield worker
        scripted.release_all()


def store(number: int, *slots: int) -> Order:
    return Order(OrderId(number), OrderKind.DEVICE_TO_SLOT, (OrderPart(0, slots),))


def rows(*block_ids: int) -> dict[int, np.ndarray]:
    return {0: np.array(block_ids).reshape(-1, 1)}


def refuse_status(*_: object, **__: object) -> None:
    raise BrokenError("/proc belongs to another pid namespace: mount it")


def test_a_worker_opens_without_a_status_segment(
    device_blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system has no place for a status segment a private pool works all the same, and says so once."""
    monkeypatch.setattr(StatusSegment, "__init__", refuse_status)
    with (
        caplog.at_level(logging.WARNING, "kvmoor"),
        Offloader(device_blocks.layout(), host_memory=HOST_NBYTES, device=CpuDevice()) as offloader,
    ):
        job = offloader.submit_store(content_keys(1), [0]).job_id
        offloader.wait([job], WAIT_S)
        assert [Outcome.DONE] == [result.outcome for result in offloader.poll_results()]
        with pytest.raises(SettingsError, match="no status segment"):
            offloader._worker.ticket()

    assert offloader.close().worker.graceful
    assert 1 == sum("cannot see this worker" in record.message for record in caplog.records)


def test_a_shared_arena_needs_its_status_segment(device_blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena that others read does not open without the segment that tells them what is whole."""
    monkeypatch.setattr(StatusSegment, "__init__", refuse_status)
    layout = device_blocks.layout()

    with pytest.raises(BrokenError, match="pid namespace"):
        TransferWorker(layout, plan_arena(layout, HOST_NBYTES), CpuDevice(), backing=Backing.MEMFD)


def test_a_constructor_that_fails_waits_for_the_registrar(
    device_blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a half-opened worker has page-locked is undone, though that takes its time, and nothing is quarantined."""
    registrar = ScriptedRegistrar()
    gate = registrar.hold_at(0, operation="unregister")
    open_copy_queue = CpuDevice.open_copy_queue

    def open_some(self: CpuDevice, name: str, direction: Direction) -> object:
        if name == "expedited load":
            threading.Timer(0.15, gate.release).start()
            raise DeviceError("no more streams")
        return open_copy_queue(self, name, direction)

    monkeypatch.setattr(CpuDevice, "open_copy_queue", open_some)
    before_nbytes = quarantined_nbytes()

    with pytest.raises(DeviceError, match="no more streams"):
        Offloader(device_blocks.layout(), host_memory=HOST_NBYTES, device=CpuDevice(registrar=registrar), pin="eager")

    assert before_nbytes == quarantined_nbytes()
    registrar.check()


def test_a_slot_has_one_writer(worker: TransferWorker, scripted: ScriptedCopies) -> None:
    """A slot that a running store fills is refused to another one until the report of the first was taken."""
    gate = scripted.hold("store")
    worker.submit(store(1, 0, 1), rows(0, 1))
    assert gate.wait_reached(WAIT_S)

    with pytest.raises(BusyError, match="slot 1 of group 0 may still be written"):
        worker.submit(store(2, 1, 2), rows(2, 3))
    gate.release()
    worker.wait([OrderId(1)], WAIT_S)
    assert [Outcome.DONE] == [report.outcome for report in worker.poll_reports()]
    worker.submit(store(2, 1, 2), rows(2, 3))
    worker.wait([OrderId(2)], WAIT_S)


def test_a_refused_store_leaves_its_slots_free(worker: TransferWorker) -> None:
    """Slots of a store that a broken lane refused can be stored to by the next one."""
    worker._store_lane._broken = "the device is gone"
    with pytest.raises(BrokenError, match="the device is gone"):
        worker.submit(store(1, 0), rows(0))
    worker._store_lane._broken = ""

    worker.submit(store(2, 0), rows(0))
    worker.wait([OrderId(2)], WAIT_S)
    assert [2] == [report.order_id for report in worker.poll_reports()]


@pytest.mark.parametrize("number", [0, -1])
def test_order_ids_begin_with_one(worker: TransferWorker, number: int) -> None:
    """An id that would say that nothing is there is refused before anything is queued."""
    with pytest.raises(RequestError, match="give 1 or more"):
        worker.submit(store(number, 0), rows(0))
    assert 0 == worker.statistics().running


def test_the_report_has_the_reason_of_the_arena(device_blocks: DeviceBlocks, expects_quarantine: None) -> None:
    """If a registrar does not return, the report of close says so, and not only that the arena is not idle."""
    registrar = ScriptedRegistrar()
    gate = registrar.hold_at(0, operation="unregister")
    offloader = Offloader(
        device_blocks.layout(), host_memory=HOST_NBYTES, device=CpuDevice(registrar=registrar), pin="eager"
    )

    report = offloader.close(0.1).worker

    assert "unregistering slab 0" in report.reason
    assert HOST_NBYTES == report.quarantined_nbytes
    gate.release()


def test_polling_beside_close_never_raises(device_blocks: DeviceBlocks) -> None:
    """Threads that poll while another one closes get results, or none, and no error."""
    errors: list[BaseException] = []
    for _ in range(20):
        offloader = Offloader(device_blocks.layout(), host_memory="256KiB", device=CpuDevice())
        stop = threading.Event()

        def poll(offloader: Offloader = offloader, stop: threading.Event = stop) -> None:
            try:
                while not stop.is_set():
                    offloader.poll_results()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=poll) for _ in range(2)]
        for thread in threads:
            thread.start()
        offloader.close(WAIT_S)
        stop.set()
        for thread in threads:
            thread.join()
    assert [] == errors
