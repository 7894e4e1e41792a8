"""Faults at every copy and every step: nothing half-written is seen, nothing is lost, nothing stays open."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from device_blocks import DeviceBlocks, content_keys
from kvmoor.devices.cpu import CpuCopyQueue, CpuDevice
from kvmoor.errors import BrokenError, ClosedError, DeviceError, KvmoorError, NoRoomError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.slab_mapper import SlabMapper
from kvmoor.host_memory.slab_memory import SlabMemory
from kvmoor.observation import Event, LaneBroke, TransferEnded
from kvmoor.offloader import Offloader
from kvmoor.offloader_results import TransferResult
from kvmoor.testing import ScriptedCopies
from kvmoor.transfer_messages import OrderId, OrderKind, Outcome
from kvmoor.transfers.lane import TransferLane

WAIT_S = 20.0
NUM_BLOCKS = 4


@pytest.fixture
def device_blocks() -> DeviceBlocks:
    blocks = DeviceBlocks()
    for number in range(NUM_BLOCKS):
        blocks.fill(number, number)
    return blocks


@pytest.fixture
def scripted() -> Iterator[ScriptedCopies]:
    with ScriptedCopies() as scripted:
        yield scripted


@pytest.fixture
def offloader(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> Iterator[Offloader]:
    device = CpuDevice(copy_hook=scripted)
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=device) as offloader:
        yield offloader
        scripted.release_all()
        offloader._coordinator.check_invariants()


def store_all(offloader: Offloader) -> TransferResult:
    submission = offloader.submit_store(content_keys(*range(NUM_BLOCKS)), range(NUM_BLOCKS))
    assert submission.job_id is not None
    return result_of(offloader, submission.job_id)


def result_of(offloader: Offloader, job_id: OrderId) -> TransferResult:
    offloader.wait([job_id], WAIT_S)
    (result,) = (result for result in offloader.poll_results() if result.job_id == job_id)
    return result


@pytest.mark.parametrize("k", range(NUM_BLOCKS))
def test_a_store_that_fails_at_any_copy_leaves_no_key(offloader: Offloader, scripted: ScriptedCopies, k: int) -> None:
    """A store whose k-th copy fails shows none of its keys, frees its slots, and can be repeated (B28)."""
    scripted.fail_at(k)
    failed = store_all(offloader)

    assert (Outcome.FAILED, 0) == (failed.outcome, failed.nbytes)
    assert "scripted failure" in failed.reason
    with offloader.match(content_keys(*range(NUM_BLOCKS))) as match:
        assert 0 == match.num_blocks
    assert (0, 0, 0) == (
        offloader.statistics().blocks.ready,
        offloader.statistics().blocks.writing,
        offloader.statistics().blocks.held,
    )
    assert Outcome.DONE == store_all(offloader).outcome


@pytest.mark.parametrize("k", range(NUM_BLOCKS))
def test_a_load_that_fails_at_any_copy_keeps_the_block(
    offloader: Offloader, scripted: ScriptedCopies, device_blocks: DeviceBlocks, k: int
) -> None:
    """A load whose k-th copy fails says so, gives its leases back, and the blocks can be loaded again, whole (B36)."""
    store_all(offloader)
    scripted.fail_at(k, queue="load")
    targets = [8, 9, 10, 11]

    failed = result_of(offloader, offloader.submit_load(offloader.match(content_keys(*range(NUM_BLOCKS))), targets))
    again = result_of(offloader, offloader.submit_load(offloader.match(content_keys(*range(NUM_BLOCKS))), targets))

    assert (Outcome.FAILED, Outcome.DONE) == (failed.outcome, again.outcome)
    assert 0 == offloader.statistics().blocks.leased
    for number, block_id in enumerate(targets):
        np.testing.assert_array_equal(device_blocks.pattern(number), device_blocks.content(block_id))


def test_a_store_past_its_deadline_is_never_seen(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """A store that is given up stays invisible, keeps its slots until its copy ends, then gives them back (B24)."""
    gate = scripted.hang_at(1)
    device = CpuDevice(copy_hook=scripted)
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=device, job_timeout_s=0.05) as offloader:
        submission = offloader.submit_store(content_keys(*range(NUM_BLOCKS)), range(NUM_BLOCKS))
        assert submission.job_id is not None
        assert gate.wait_reached(WAIT_S)
        abandoned = poll_for(offloader, submission.job_id)
        held = offloader.statistics().blocks.held
        with offloader.match(content_keys(0)) as match:
            assert 0 == match.num_blocks
        offloader._coordinator.check_invariants()

        gate.release()
        settled = result_of(offloader, submission.job_id)

        assert (Outcome.ABANDONED, NUM_BLOCKS) == (abandoned.outcome, held)
        assert Outcome.SETTLED == settled.outcome
        assert 0 == offloader.statistics().blocks.held
        with offloader.match(content_keys(0)) as match:
            assert 0 == match.num_blocks
        offloader._coordinator.check_invariants()


def test_a_load_past_its_deadline_keeps_its_lease(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """While a load that was given up may still read its slots they are not evicted; afterwards they can be."""
    gate = scripted.hang_at(0, queue="load")
    device = CpuDevice(copy_hook=scripted)
    with Offloader(device_blocks.layout(), host_memory=4 * 4096, device=device, job_timeout_s=0.2) as offloader:
        store_all(offloader)
        job_id = offloader.submit_load(offloader.match(content_keys(*range(NUM_BLOCKS))), [8, 9, 10, 11])
        assert gate.wait_reached(WAIT_S)
        abandoned = poll_for(offloader, job_id)
        declined = offloader.submit_store(content_keys(77), [0])
        with pytest.raises(TimeoutError, match="must not be reused"):
            offloader.wait([job_id], 0.01)

        gate.release()
        settled = result_of(offloader, job_id)
        accepted = offloader.submit_store(content_keys(77), [0])

        assert (Outcome.ABANDONED, Outcome.SETTLED) == (abandoned.outcome, settled.outcome)
        assert declined.job_id is None
        assert accepted.job_id is not None


def poll_for(offloader: Offloader, job_id: OrderId) -> TransferResult:
    """Poll until a job has a result; the job's own deadline, or the run's, ends the loop."""
    while True:
        for result in offloader.poll_results():
            if result.job_id == job_id:
                return result
        threading.Event().wait(0.005)


def test_lanes_do_not_wait_for_each_other(
    offloader: Offloader, scripted: ScriptedCopies, device_blocks: DeviceBlocks
) -> None:
    """A load, and an expedited load, overtake whatever is held up on the other lanes."""
    store_all(offloader)
    held_store = scripted.hold("store")
    held_load = scripted.hold("load")
    stuck_store = offloader.submit_store(content_keys(50), [0])
    stuck_load = offloader.submit_load(offloader.match(content_keys(0)), [8])

    expedited = offloader.submit_load(offloader.match(content_keys(1)), [9], expedited=True)
    assert Outcome.DONE == result_of(offloader, expedited).outcome
    held_load.release()
    assert Outcome.DONE == result_of(offloader, stuck_load).outcome
    held_store.release()
    assert stuck_store.job_id is not None
    assert Outcome.DONE == result_of(offloader, stuck_store.job_id).outcome


class RecordingObserver:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def test_half_a_submission_breaks_only_its_lane(device_blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device takes part of a store, the store lane refuses more, its slots are held, and loads go on."""
    observer = RecordingObserver()
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=CpuDevice(), observer=observer) as offloader:
        store_all(offloader)
        with monkeypatch.context() as patch:
            patch.setattr(CpuCopyQueue, "enqueue", refuse_half_way)
            submission = offloader.submit_store(content_keys(50), [0])
        assert submission.job_id is not None
        (result,) = offloader.poll_results()

        with pytest.raises(BrokenError, match="3 of 5 launches"):
            offloader.submit_store(content_keys(51), [1])
        loaded = result_of(offloader, offloader.submit_load(offloader.match(content_keys(0)), [8]))

        assert (Outcome.ABANDONED, 1) == (result.outcome, offloader.statistics().blocks.held)
        assert Outcome.DONE == loaded.outcome
        assert 1 == sum(isinstance(event, LaneBroke) for event in observer.events)
        offloader._coordinator.check_invariants()
    assert offloader.close().worker.graceful
    assert [Outcome.SETTLED] == [result.outcome for result in offloader.poll_results()]


def refuse_half_way(*_: object) -> None:
    raise DeviceError("the driver took 3 of 5 launches")


def test_an_observer_that_raises_stops_nothing(device_blocks: DeviceBlocks) -> None:
    """An observer with a bug loses its events, and every block is stored and loaded all the same."""

    class Broken:
        def on_event(self, event: Event) -> None:
            raise ZeroDivisionError

    with Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice(), observer=Broken()) as offloader:
        assert Outcome.DONE == store_all(offloader).outcome


def test_an_observer_sees_every_transfer(device_blocks: DeviceBlocks) -> None:
    """Each job is observed once, with its kind, outcome and bytes."""
    observer = RecordingObserver()
    with Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice(), observer=observer) as offloader:
        store_all(offloader)

    (ended,) = (event for event in observer.events if isinstance(event, TransferEnded))
    assert (OrderKind.DEVICE_TO_SLOT, Outcome.DONE, NUM_BLOCKS * 1536) == (ended.kind, ended.outcome, ended.nbytes)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("owner", "method", "error", "expected"),
    [
        (CpuDevice, "check_layout", DeviceError("step 1"), DeviceError),
        (SlabMemory, "__init__", NoRoomError("step 2"), NoRoomError),
        (SlabMapper, "start", NoRoomError("step 3"), NoRoomError),
        (CpuDevice, "open_copy_queue", DeviceError("step 4"), DeviceError),
        (TransferLane, "__init__", MemoryError("step 5"), MemoryError),
        (Arena, "wait_published", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_constructor_that_fails_at_any_step_leaves_nothing(
    device_blocks: DeviceBlocks,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    error: BaseException,
    expected: type[BaseException],
) -> None:
    """Whatever step of opening fails, its error comes out and device, memory and threads are given back."""
    device = CpuDevice()
    monkeypatch.setattr(owner, method, raising(error))

    with pytest.raises(expected):
        Offloader(device_blocks.layout(), host_memory="64KiB", device=device)

    monkeypatch.undo()
    assert device.closed


def test_the_second_and_third_queue_may_fail(device_blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that opens one or two queues and then fails leaves none of them open."""
    open_copy_queue = CpuDevice.open_copy_queue
    for num_good in (1, 2):
        device = CpuDevice()
        opened: list[CpuCopyQueue] = []

        def open_some(self: CpuDevice, *args: object, limit: int = num_good, queues: list = opened) -> CpuCopyQueue:
            if len(queues) == limit:
                raise DeviceError("no more streams")
            queues.append(open_copy_queue(self, *args))  # type: ignore[arg-type]
            return queues[-1]

        monkeypatch.setattr(CpuDevice, "open_copy_queue", open_some)
        with pytest.raises(DeviceError, match="no more streams"):
            Offloader(device_blocks.layout(), host_memory="64KiB", device=device)
        monkeypatch.undo()

        assert num_good == len(opened)
        with pytest.raises(ClosedError):
            opened[0].enqueue((), 1, None)


def test_errors_belong_to_one_tree() -> None:
    """A user can catch everything that kvmoor raises on purpose with one class."""
    assert all(issubclass(kind, KvmoorError) for kind in (BrokenError, ClosedError, DeviceError, NoRoomError))
