"""What users and their threads can do wrong: no mistake brings wrong bytes back, hangs, or loses a result."""

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from device_blocks import DeviceBlocks, content_keys
from kvmoor.block_layout import BlockLayout
from kvmoor.coordinator import Coordinator
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.cpu_stream import CpuStream
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import BusyError, LayoutError, RequestError, SettingsError
from kvmoor.observation import Event, TransferEnded
from kvmoor.offloader import Offloader
from kvmoor.offloader_results import Match
from kvmoor.testing import ScriptedCopies
from kvmoor.transfer_messages import OrderId, Outcome

WAIT_S = 20.0
NUM_BLOCKS = 4


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


@pytest.fixture
def offloader(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> Iterator[Offloader]:
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=CpuDevice(copy_hook=scripted)) as offloader:
        job = offloader.submit_store(content_keys(*range(NUM_BLOCKS)), range(NUM_BLOCKS)).job_id
        offloader.wait([job], WAIT_S)
        offloader.poll_results()
        yield offloader
        scripted.release_all()
        offloader._coordinator.check_invariants()


def outcome_of(offloader: Offloader, job_id: OrderId) -> Outcome:
    offloader.wait([job_id], WAIT_S)
    return next(result.outcome for result in offloader.poll_results() if result.job_id == job_id)


def test_a_match_of_another_offloader_is_refused(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """A match can be loaded only by the offloader that gave it, whose slots it names."""
    with (
        Offloader(device_blocks.layout(), host_memory=8 * 4096, device=CpuDevice()) as other,
        offloader.match(content_keys(0)) as match,
    ):
        with pytest.raises(RequestError, match="of another offloader"):
            other.submit_load(match, [8])
        assert 0 == other.statistics().transfers.running
        job_id = offloader.submit_load(match, [8])
        assert Outcome.DONE == outcome_of(offloader, job_id)


def test_a_match_is_loaded_once_whoever_comes_first(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several threads with one match exactly one load goes through; a release beside it changes nothing."""
    match = offloader.match(content_keys(0))
    barrier = threading.Barrier(4)
    prepare_load = Coordinator.prepare_load

    def prepare_together(self: Coordinator, lease: object) -> object:
        barrier.wait(WAIT_S)  # all have passed whatever was checked before
        return prepare_load(self, lease)  # type: ignore[arg-type]

    monkeypatch.setattr(Coordinator, "prepare_load", prepare_together)
    outcomes: list[object] = []

    def try_to_load(block_id: int) -> None:
        try:
            outcomes.append(offloader.submit_load(match, [block_id]))
        except RequestError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=try_to_load, args=(8 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (job_id,) = [outcome for outcome in outcomes if not isinstance(outcome, RequestError)]
    match.release()
    assert Outcome.DONE == outcome_of(offloader, job_id)  # type: ignore[arg-type]
    assert 0 == offloader.statistics().blocks.leased


def test_a_match_under_load_cannot_be_let_go(offloader: Offloader, scripted: ScriptedCopies) -> None:
    """While a load runs, neither release nor keep ends its lease, so its slots are not filled anew."""
    gate = scripted.hold("load")
    match = offloader.match(content_keys(*range(NUM_BLOCKS)))
    job_id = offloader.submit_load(match, [8, 9, 10, 11])
    assert gate.wait_reached(WAIT_S)

    match.release()
    with pytest.raises(RequestError, match="match the keys anew"):
        match.keep(1)

    assert NUM_BLOCKS == offloader.statistics().blocks.leased
    assert offloader.submit_store(content_keys(*range(20, 28)), range(8)).job_id is None
    gate.release()
    assert Outcome.DONE == outcome_of(offloader, job_id)


def test_a_report_that_cannot_be_handled_loses_no_other(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """If dealing with one report is interrupted, it and those behind it are dealt with by the next call."""
    jobs = [offloader.submit_load(offloader.match(content_keys(number)), [8 + number]) for number in range(3)]
    offloader.wait(jobs, WAIT_S)
    handle_report = Coordinator.handle_report

    def interrupt(self: Coordinator, report: object) -> int:
        monkeypatch.setattr(Coordinator, "handle_report", handle_report)
        raise KeyboardInterrupt

    monkeypatch.setattr(Coordinator, "handle_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        offloader.poll_results()

    assert [(job, Outcome.DONE) for job in jobs] == [(r.job_id, r.outcome) for r in offloader.poll_results()]
    assert 0 == offloader.statistics().blocks.leased


def test_tensors_live_as_long_as_a_queued_copy(scripted: ScriptedCopies) -> None:
    """Device tensors stay alive under a queued copy, even if everybody else has forgotten them."""
    tensor = np.ones((4, 4096), np.uint8)
    slot = np.zeros(2 * 4096, np.uint8)
    group = BlockLayout.from_tensors([tensor], block_axis=0, tokens_per_block=16).groups[0]
    with CpuDevice(copy_hook=scripted) as device:
        queue = device.open_copy_queue("store", Direction.DEVICE_TO_HOST)
        gate = scripted.hang_at(0)
        queue.enqueue([BlockCopies(group, np.array([0]), np.array([slot.ctypes.data]))], 1, None)
        assert gate.wait_reached(WAIT_S)
        alive = weakref.ref(tensor)

        del tensor, group
        gc.collect()

        assert alive() is not None
        gate.release()
        assert queue.wait_completed(1, WAIT_S)
    assert slot[:4096].all()


def test_blocks_of_an_abandoned_load_are_withheld(device_blocks: DeviceBlocks, scripted: ScriptedCopies) -> None:
    """Device blocks that a load may still write are refused to every other job until that load has settled."""
    device = CpuDevice(copy_hook=scripted)
    with Offloader(device_blocks.layout(), host_memory=8 * 4096, device=device, job_timeout_s=0.2) as offloader:
        job = offloader.submit_store(content_keys(0, 1), [0, 1]).job_id
        offloader.wait([job], WAIT_S)
        gate = scripted.hold("load")
        late = offloader.submit_load(offloader.match(content_keys(0)), [8])
        assert gate.wait_reached(WAIT_S)
        while not any(result.outcome is Outcome.ABANDONED for result in offloader.poll_results()):
            threading.Event().wait(0.01)

        match = offloader.match(content_keys(1))
        with pytest.raises(BusyError, match="SETTLED"):
            offloader.submit_load(match, [8], expedited=True)
        with pytest.raises(BusyError, match="SETTLED"):
            offloader.submit_store(content_keys(30), [8])
        gate.release()
        assert Outcome.SETTLED == outcome_of(offloader, late)
        assert Outcome.DONE == outcome_of(offloader, offloader.submit_load(match, [8]))
        np.testing.assert_array_equal(device_blocks.pattern(1), device_blocks.content(8))


def test_an_observer_may_poll_and_close(device_blocks: DeviceBlocks) -> None:
    """Events come after every lock is released, so that an observer that calls back does not hang."""
    holder: list[Offloader] = []

    class CallsBack:
        def on_event(self, event: Event) -> None:
            if isinstance(event, TransferEnded):
                holder[0].poll_results()
                holder[0].close(WAIT_S)

    with Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice(), observer=CallsBack()) as offloader:
        holder.append(offloader)
        job = offloader.submit_store(content_keys(0), [0]).job_id
        offloader.wait([job], WAIT_S)
        offloader.poll_results()
        assert offloader.closed


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), 1e10, -1.0, "1", None, True])
def test_times_without_an_end_are_refused(device_blocks: DeviceBlocks, timeout_s: object) -> None:
    """A time that is none, or that is beyond every clock, is refused before anything is opened or closed."""
    with pytest.raises(SettingsError, match="close_timeout_s"):
        Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice(), close_timeout_s=timeout_s)
    with pytest.raises(SettingsError, match="job_timeout_s"):
        Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice(), job_timeout_s=timeout_s)
    with Offloader(device_blocks.layout(), host_memory="64KiB", device=CpuDevice()) as offloader:
        with pytest.raises(RequestError, match="every wait has an end"):
            offloader.wait([], timeout_s)
        if timeout_s is not None:  # None asks for the offloader's own
            with pytest.raises(RequestError, match="every wait has an end"):
                offloader.close(timeout_s)
        assert not offloader.closed


def test_misses_leave_nothing_behind(offloader: Offloader) -> None:
    """A match that found nothing need not be released: looking up again and again keeps no memory."""
    for number in range(1000, 1100):
        assert 0 == offloader.match(content_keys(number)).num_blocks

    assert () == offloader.close().unresolved_keys
    assert 0 == len(offloader._coordinator._index.unresolved_leases())


def test_a_device_has_one_owner(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """A device that one offloader owns is refused to another, which would close it under the first."""
    device = CpuDevice()
    with Offloader(device_blocks.layout(), host_memory="64KiB", device=device) as owner:
        with pytest.raises(BusyError, match="a device of its own"):
            Offloader(device_blocks.layout(), host_memory="64KiB", device=device)
        job = owner.submit_store(content_keys(0), [0]).job_id
        assert job is not None
        assert Outcome.DONE == outcome_of(owner, job)


def test_a_job_needs_no_helper_threads(device_blocks: DeviceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no helper thread can start, a large job is copied by the queue's own thread."""
    large = DeviceBlocks(num_blocks=8, page_nbytes=1 << 20, num_tensors=2)
    large.fill(0, 0)
    start_thread = CpuStream._start_thread

    def refuse_helpers(self: CpuStream) -> threading.Thread:
        if "helper" in self.name:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        try:
            return start_thread(self)
        finally:
            monkeypatch.setattr(threading.Thread, "start", start)

    start = threading.Thread.start

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(CpuStream, "_start_thread", refuse_helpers)
    with Offloader(large.layout(), host_memory="32MiB", device=CpuDevice(copy_threads=2)) as offloader:
        job = offloader.submit_store(content_keys(*range(8)), range(8)).job_id
        assert job is not None
        assert Outcome.DONE == outcome_of(offloader, job)


@pytest.mark.parametrize("keys", [None, 5, [b"x" * 32], ["a"], [None]])
def test_keys_that_are_none_are_refused(offloader: Offloader, keys: object) -> None:
    """What is no sequence of keys is refused by name, by store and match alike."""
    with pytest.raises(RequestError, match="BlockKey objects"):
        offloader.submit_store(keys, [0])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="BlockKey objects"):
        offloader.match(keys)  # type: ignore[arg-type]


def test_other_arguments_are_refused(offloader: Offloader, device_blocks: DeviceBlocks) -> None:
    """Ids, events, matches, layouts and tensors of the wrong kind get an error that names them."""
    with pytest.raises(RequestError, match="several lengths"):
        offloader.submit_store(content_keys(50, 51), [[0], [1, 2]])
    with pytest.raises(RequestError, match="give one flat sequence"):
        offloader.submit_store(content_keys(50), np.array([2**64 - 1], np.uint64))
    with pytest.raises(RequestError, match="wait_for is a object"):
        offloader.submit_store(content_keys(50), [0], wait_for=object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="give what `match` returned"):
        offloader.submit_load(content_keys(0), [0])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="the layout is a list"):
        Offloader([], host_memory="64KiB", device=CpuDevice())  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="pass a list of tensors"):
        BlockLayout.from_tensors(device_blocks.tensors[0], block_axis=0, tokens_per_block=16)
    with pytest.raises(LayoutError, match="block_axis is None"):
        BlockLayout.from_tensors(device_blocks.tensors, block_axis=None, tokens_per_block=16)  # type: ignore[arg-type]
    assert isinstance(offloader.match(iter(content_keys(0))), Match)  # type: ignore[arg-type]
    assert 0 == offloader.statistics().blocks.writing
