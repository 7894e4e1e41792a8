"""The CPU device: what it adds to the device contract, its threads above all."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from device_blocks import DeviceBlocks
from kvmoor.block_layout import SLOT_ALIGNMENT, BlockLayout
from kvmoor.devices.completion_word import CompletionWord
from kvmoor.devices.cpu import CpuCopyQueue, CpuDevice, HostCopy
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import ClosedError, DeviceError, LayoutError, SettingsError
from kvmoor.testing import ScriptedCopies

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
WAIT_S = 30.0


class Blocks(DeviceBlocks):
    """Device blocks, and 16 slots that begin on 4 KiB boundaries."""

    def __init__(self, page_nbytes: int = 512, num_tensors: int = 3) -> None:
        super().__init__(16, page_nbytes, num_tensors)
        for block_id in range(16):
            self.fill(block_id, block_id)
        self.group = self.layout().groups[0]
        self._memory = np.zeros(16 * self.group.slot_nbytes + SLOT_ALIGNMENT, np.uint8)
        start = -self._memory.ctypes.data % SLOT_ALIGNMENT
        self.slots = self._memory[start : start + 16 * self.group.slot_nbytes].reshape(16, -1)

    def copies(self, *block_ids: int) -> list[BlockCopies]:
        """Pair each block with the slot of the same number."""
        ids = np.array(block_ids, np.int64)
        return [BlockCopies(self.group, ids, self.slots.ctypes.data + self.group.slot_nbytes * ids)]

    def slot(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a block in a slot."""
        return self.slots[number, : self.group.block_nbytes].reshape(len(self.tensors), -1)

    def assert_stored(self, *numbers: int) -> None:
        """Compare these slots with the blocks of the same number, and all others with zero."""
        for number in range(16):
            expected = self.pattern(number) if number in numbers else np.zeros_like(self.pattern(number))
            np.testing.assert_array_equal(expected, self.slot(number), err_msg=f"slot {number}")


class Event:
    """An event that is not the CPU device's own, so it can only be asked."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.asked = threading.Event()

    def is_done(self) -> bool:
        self.asked.set()
        return self.done.is_set()


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def six_blocks_are_shared(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs of six blocks be large enough for a second thread, and no smaller ones."""
    monkeypatch.setattr("kvmoor.devices.cpu._SHARED_NBYTES", 6 * blocks.group.block_nbytes)


def kvmoor_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvmoor")}


def finish(queue: CpuCopyQueue, sequence: int) -> DeviceError | None:
    """Wait for a job and return why it failed, or None."""
    assert queue.wait_completed(sequence, WAIT_S)
    return queue.failure(sequence)


def test_threads_come_with_work_and_go_with_close(blocks: Blocks) -> None:
    """A device has no thread before its first job, daemon threads then, and none after it is closed."""
    device = CpuDevice(copy_threads=3)
    store = device.open_copy_queue("store", STORE)
    device.open_copy_queue("load", LOAD)
    assert set() == kvmoor_threads()

    store.enqueue(blocks.copies(1), 1, None)
    assert finish(store, 1) is None

    assert {"kvmoor-store"} == kvmoor_threads()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("kvmoor"))
    assert device.close(WAIT_S)
    assert set() == kvmoor_threads()


def test_a_hundred_devices_leave_nothing(blocks: Blocks) -> None:
    """Opening, storing and closing again and again leaves the number of threads where it was."""
    before = threading.active_count()
    for _ in range(100):
        with CpuDevice() as device:
            queue = device.open_copy_queue("store", STORE)
            queue.enqueue(blocks.copies(1, 2), 1, None)
            assert finish(queue, 1) is None

    assert before == threading.active_count()


def test_the_device_says_what_it_is_and_what_it_cannot_reach(blocks: Blocks) -> None:
    """It is called cpu, takes tensors in host memory and refuses those on a GPU."""
    with CpuDevice() as device:
        assert "cpu" == device.name
        device.check_layout(blocks.layout())
        with pytest.raises(LayoutError, match="GPU memory"):
            device.check_layout(replace(blocks.layout(), on_host=False))


@pytest.mark.parametrize("copy_threads", [0, -1])
def test_fewer_than_one_copy_thread_is_refused(copy_threads: int) -> None:
    """A queue needs a thread to copy with."""
    with pytest.raises(SettingsError, match=f"copy_threads is {copy_threads}: give 1 or more"):
        CpuDevice(copy_threads=copy_threads)


def test_copy_threads_are_the_cores_but_at_most_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a queue copies with the cores that this process may use, two at most."""
    for cores, expected in (({3}, 1), ({0, 1}, 2), (set(range(64)), 2)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: cores)
        assert expected == CpuDevice()._copy_threads


def test_queues_finish_in_any_order(blocks: Blocks) -> None:
    """Queues of one device do not wait for each other, whichever is held."""
    scripted = ScriptedCopies()
    with CpuDevice(copy_hook=scripted) as device, scripted:
        first, second = device.open_copy_queue("first", STORE), device.open_copy_queue("second", STORE)
        held = {name: scripted.hold(name) for name in ("first", "second")}
        first.enqueue(blocks.copies(1), 1, None)
        second.enqueue(blocks.copies(2), 1, None)
        assert held["first"].wait_reached(WAIT_S)

        held["second"].release()
        assert finish(second, 1) is None
        assert 0 == first.completed()
        blocks.assert_stored(2)

        held["first"].release()
        assert finish(first, 1) is None
        blocks.assert_stored(1, 2)


def test_events_mark_the_stream_in_use(blocks: Blocks) -> None:
    """There is an event only if a stream is in use and busy; it is done when the stream has come so far."""
    with CpuDevice() as device:
        assert device.record_event() is None
        stream = device.open_stream("engine")
        device.use_stream(stream)
        assert device.record_event() is None
        with stream.latch():
            event = device.record_event()
            assert event is not None
            assert not event.is_done()
            device.use_stream(None)
            assert device.record_event() is None
        assert event.wait(WAIT_S)


def test_an_event_of_another_kind_is_asked_until_it_is_done(blocks: Blocks) -> None:
    """A job waits for whatever has `is_done`, and begins soon after it is."""
    with CpuDevice() as device:
        queue = device.open_copy_queue("store", STORE)
        event = Event()
        queue.enqueue(blocks.copies(1), 1, event)
        assert event.asked.wait(WAIT_S)
        assert 0 == queue.completed()

        event.done.set()

        assert finish(queue, 1) is None
        blocks.assert_stored(1)


def test_an_event_that_fails_fails_its_job_only(blocks: Blocks) -> None:
    """If the event cannot be asked nothing of the job is copied; the next job runs."""

    class BrokenEvent:
        def is_done(self) -> bool:
            raise OSError("the device fell off the bus")

    with CpuDevice() as device:
        queue = device.open_copy_queue("store", STORE)
        queue.enqueue(blocks.copies(1), 1, BrokenEvent())
        queue.enqueue(blocks.copies(2), 2, None)

        assert finish(queue, 2) is None
        assert "fell off the bus" in str(queue.failure(1))
        blocks.assert_stored(2)


@pytest.mark.parametrize("error", [OSError(5, "input/output error"), DeviceError("bad page"), KeyboardInterrupt()])
def test_whatever_a_copy_raises_is_its_failure(blocks: Blocks, error: BaseException) -> None:
    """A copy that raises fails its job with a `DeviceError` that tells the reason, and nothing else."""
    scripted = ScriptedCopies()
    scripted.fail_at(1, error=error)
    with CpuDevice(copy_hook=scripted) as device:
        queue = device.open_copy_queue("store", STORE)
        for sequence in (1, 2, 3):
            queue.enqueue(blocks.copies(sequence), sequence, None)

        assert finish(queue, 3) is None
        failure = queue.failure(2)
        assert isinstance(failure, DeviceError)
        assert error in (failure, failure.__cause__)
        assert failure is error or repr(error) in str(failure)
        assert queue.failure(1) is None
        blocks.assert_stored(1, 3)


def test_a_failure_is_known_before_the_job_is_over(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees that a job is over can ask at once why it failed."""
    scripted = ScriptedCopies()
    scripted.fail_at(0)
    failures: list[dict[int, DeviceError]] = []
    with CpuDevice(copy_hook=scripted) as device:
        queue = device.open_copy_queue("store", STORE)
        advance = queue._word.advance
        monkeypatch.setattr(
            queue._word, "advance", lambda sequence: (failures.append(dict(queue._failures)), advance(sequence))
        )
        queue.enqueue(blocks.copies(1), 7, None)

        assert isinstance(finish(queue, 7), DeviceError)

    assert [7] == [sequence for seen in failures for sequence in seen]


def test_large_jobs_are_shared_and_small_ones_are_not(blocks: Blocks, six_blocks_are_shared: None) -> None:
    """A small job keeps to the queue's own thread and wakes no other; two threads copy a large one at the same time."""
    meet = threading.Barrier(2)
    seen: set[str] = set()

    def hook(copy: HostCopy) -> None:
        name = threading.current_thread().name
        if copy.sequence == 2 and name not in seen:
            seen.add(name)
            meet.wait(WAIT_S)

    with CpuDevice(copy_threads=2, copy_hook=hook) as device:
        queue = device.open_copy_queue("store", STORE)
        queue.enqueue(blocks.copies(1, 2, 3, 4, 5), 1, None)
        assert finish(queue, 1) is None
        assert {"kvmoor-store"} == kvmoor_threads()
        queue.enqueue(blocks.copies(6, 7, 8, 9, 10, 11), 2, None)
        assert finish(queue, 2) is None

    assert {"kvmoor-store", "kvmoor-store-helper-1"} == seen
    blocks.assert_stored(*range(1, 12))


def on_helper(act: Callable[[], None]) -> Callable[[HostCopy], None]:
    """Return a hook for two copy threads that acts on the helper only, and lets neither copy before both are there."""
    meet = threading.Barrier(2)

    def hook(copy: HostCopy) -> None:
        if copy.index < 2:
            meet.wait(WAIT_S)
        if "helper" in threading.current_thread().name:
            act()

    return hook


def test_a_failure_of_a_helper_fails_the_job(blocks: Blocks, six_blocks_are_shared: None) -> None:
    """A job is failed if any part of it is, and over once all parts are; the next job is whole."""

    def fail() -> None:
        raise OSError("helper")

    with CpuDevice(copy_threads=2, copy_hook=on_helper(fail)) as device:
        queue = device.open_copy_queue("store", STORE)
        queue.enqueue(blocks.copies(1, 2, 3, 4, 5, 6), 1, None)
        queue.enqueue(blocks.copies(7), 2, None)

        assert finish(queue, 2) is None
        assert "helper" in str(queue.failure(1))
        np.testing.assert_array_equal(blocks.pattern(7), blocks.slot(7))


def test_a_stuck_helper_keeps_its_job_unproven(blocks: Blocks, six_blocks_are_shared: None) -> None:
    """While a helper may still copy, its job is not over and the queue not closed; both are once it ends."""
    stuck, release = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        release.wait()

    device = CpuDevice(copy_threads=2, copy_hook=on_helper(hang))
    queue = device.open_copy_queue("store", STORE)
    queue.enqueue(blocks.copies(1, 2, 3, 4, 5, 6), 1, None)
    assert stuck.wait(WAIT_S)
    assert not queue.wait_completed(1, 0.02)

    assert not queue.close(0.02)
    assert 0 == queue.completed()
    release.set()

    assert queue.close(WAIT_S)
    assert "closed while the job ran" in str(finish(queue, 1))
    assert device.close(WAIT_S)


def test_close_with_an_endless_copy_ends_by_its_deadline(blocks: Blocks) -> None:
    """A queue whose copy never ends says so in time; when it ends after all, nothing is copied any more."""
    scripted = ScriptedCopies()
    endless = scripted.hang_at(1)
    device = CpuDevice(copy_hook=scripted)
    queue = device.open_copy_queue("store", STORE)
    queue.enqueue(blocks.copies(1, 2, 3), 1, None)
    queue.enqueue(blocks.copies(4), 2, None)
    assert endless.wait_reached(WAIT_S)

    begin = time.monotonic()
    assert not queue.close(0.1)
    assert not device.close(0.1)
    assert time.monotonic() - begin < 0.4
    assert 0 == queue.completed()

    endless.release()
    assert device.close(WAIT_S)
    assert 2 == queue.completed()
    assert "closed while the job ran" in str(queue.failure(1))
    assert "dropped: the queue was closed" in str(queue.failure(2))
    blocks.assert_stored(1)


def test_close_ends_a_running_job_at_its_next_piece(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of many pieces does not have to end before its queue can; it is failed then."""
    monkeypatch.setattr("kvmoor.devices.cpu._PIECE_NBYTES", blocks.group.block_nbytes)
    with CpuDevice(copy_threads=1) as device:
        queue = device.open_copy_queue("store", STORE)
        copied: list[int] = []
        second_begun, go_on = threading.Event(), threading.Event()

        class SlowCopier:
            group = blocks.group

            def copy(self, direction: Direction, block_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
                copied.extend(block_ids.tolist())
                if len(copied) == 2:
                    second_begun.set()
                    assert go_on.wait(WAIT_S)

        queue._copiers[id(blocks.group)] = SlowCopier()
        queue.enqueue(blocks.copies(3, 1, 4, 2, 5), 1, None)
        assert second_begun.wait(WAIT_S)
        assert not queue.close(0.0)
        go_on.set()
        failure = finish(queue, 1)

    assert "ended early" in str(failure)
    assert [3, 1] == copied


@pytest.mark.parametrize("is_ours", [True, False])
def test_close_drops_jobs_that_wait(blocks: Blocks, *, is_ours: bool) -> None:
    """Jobs that wait for their event, or behind one that does, are dropped and say so; nothing of them is copied."""
    with CpuDevice() as device, device.open_stream("engine") as stream, stream.latch():
        queue = device.open_copy_queue("store", STORE)
        queue.enqueue(blocks.copies(1), 1, stream.record_event() if is_ours else Event())
        queue.enqueue(blocks.copies(2), 2, None)

        assert queue.close(WAIT_S)

        assert 2 == queue.completed()
        assert all("dropped: the queue was closed" in str(queue.failure(sequence)) for sequence in (1, 2))
        blocks.assert_stored()


def test_what_is_closed_takes_no_work(blocks: Blocks) -> None:
    """A closed queue takes no job, a closed device opens nothing."""
    device = CpuDevice()
    queue = device.open_copy_queue("store", STORE)
    assert not device.closed
    assert device.close(WAIT_S)
    assert device.closed

    with pytest.raises(ClosedError, match="kvmoor-store is closed"):
        queue.enqueue(blocks.copies(1), 1, None)
    with pytest.raises(ClosedError, match="copy queue"):
        device.open_copy_queue("load", LOAD)
    with pytest.raises(ClosedError, match="stream"):
        device.open_stream("engine")
    assert 0 == queue.completed()


def test_leaving_a_with_block_of_a_stuck_device_is_loud(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device whose copy does not end in time is left with a warning, not waited for."""
    monkeypatch.setattr("kvmoor.devices.cpu._EXIT_TIMEOUT_S", 0.01)
    scripted = ScriptedCopies()
    endless = scripted.hang_at(0)
    with CpuDevice(copy_hook=scripted) as device:
        queue = device.open_copy_queue("store", STORE)
        queue.enqueue(blocks.copies(1), 1, None)
        assert endless.wait_reached(WAIT_S)

    assert "still runs" in caplog.text
    scripted.release_all()
    assert device.close(WAIT_S)


def test_layouts_that_come_and_go_are_told_apart(blocks: Blocks) -> None:
    """A queue that serves one layout after the other never takes one for another."""
    with CpuDevice() as device:
        queue = device.open_copy_queue("store", STORE)
        for sequence in range(1, 30):
            other = Blocks(64 * sequence, num_tensors=1 + sequence % 3)
            queue.enqueue(other.copies(3, 5), sequence, None)
            assert finish(queue, sequence) is None
            other.assert_stored(3, 5)


def test_the_completion_word_has_a_cache_line_of_its_own() -> None:
    """The word begins a 64-byte line that no other word shares, and takes only growing numbers."""
    words = [CompletionWord() for _ in range(50)]

    assert {0} == {word.address % 64 for word in words}
    assert 50 == len({word.address for word in words})
    words[0].advance(3)
    words[0].advance(2**64 - 1)
    assert (2**64 - 1, 0) == (words[0].read(), words[1].read())
    for sequence in (0, 2**64):
        with pytest.raises(AssertionError):
            words[1].advance(sequence)


def test_the_layout_may_have_no_bytes_for_a_block() -> None:
    """A job of a group without tensors is over without a copy."""
    layout = BlockLayout((Blocks().group, replace(Blocks().group, tensors=())))
    scripted = ScriptedCopies()
    with CpuDevice(copy_hook=scripted) as device:
        queue = device.open_copy_queue("store", STORE)
        empty = np.array([], np.int64)
        queue.enqueue([BlockCopies(layout.groups[1], empty, np.array([4096], np.int64))], 1, None)
        assert finish(queue, 1) is None
    assert 0 == scripted.num_copies()
