"""Scripted copies fail, wait, hang and are counted exactly where a test says."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvmoor.block_layout import GroupLayout, TensorPages
from kvmoor.devices.cpu import CpuCopyQueue, CpuDevice, HostCopy
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.errors import DeviceError
from kvmoor.testing import ScriptedCopies

WAIT_S = 30.0
NUM_BLOCKS = 8


class Bench:
    """A device with two queues, whose slots are marked with what was copied there."""

    def __init__(self, device: CpuDevice) -> None:
        self._device_memory = np.full((NUM_BLOCKS, 64), 1, np.uint8)
        self._slots = np.zeros((NUM_BLOCKS, 4096), np.uint8)
        pages = TensorPages(self._device_memory.ctypes.data, NUM_BLOCKS, 64, 64)
        self._group = GroupLayout((pages,), tokens_per_block=1)
        self.store = device.open_copy_queue("store", Direction.DEVICE_TO_HOST)
        self.load = device.open_copy_queue("load", Direction.HOST_TO_DEVICE)

    def run(self, queue: CpuCopyQueue, sequence: int, *block_ids: int) -> DeviceError | None:
        """Run one job to its end and return why it failed, or None."""
        self.enqueue(queue, sequence, *block_ids)
        assert queue.wait_completed(sequence, WAIT_S)
        return queue.failure(sequence)

    def enqueue(self, queue: CpuCopyQueue, sequence: int, *block_ids: int) -> None:
        ids = np.array(block_ids, np.int64)
        queue.enqueue([BlockCopies(self._group, ids, self._slots.ctypes.data + 4096 * ids)], sequence, None)

    def stored(self) -> list[int]:
        """Return the slots that were written."""
        return np.flatnonzero(self._slots[:, 0]).tolist()


@pytest.fixture
def scripted() -> ScriptedCopies:
    return ScriptedCopies()


@pytest.fixture
def bench(scripted: ScriptedCopies) -> Iterator[Bench]:
    with CpuDevice(copy_hook=scripted) as device, scripted:
        yield Bench(device)


def test_a_hook_is_told_what_is_copied() -> None:
    """A hook sees every block as a copy of its own, also of a run, with queue, direction, job, number and bytes."""
    copies: list[HostCopy] = []
    with CpuDevice(copy_hook=copies.append) as device:
        bench = Bench(device)
        bench.run(bench.store, 5, 0, 1, 2)
        bench.run(bench.load, 2, 4)

    assert [
        HostCopy("store", Direction.DEVICE_TO_HOST, 5, 0, 64),
        HostCopy("store", Direction.DEVICE_TO_HOST, 5, 1, 64),
        HostCopy("store", Direction.DEVICE_TO_HOST, 5, 2, 64),
        HostCopy("load", Direction.HOST_TO_DEVICE, 2, 3, 64),
    ] == copies


@pytest.mark.parametrize("index", range(4))
def test_the_copy_named_fails_and_no_other(scripted: ScriptedCopies, bench: Bench, index: int) -> None:
    """The k-th block fails before a byte of it is moved, the blocks of its job behind it are not begun."""
    scripted.fail_at(index)

    failures = [bench.run(bench.store, 1, 0, 1), bench.run(bench.store, 2, 2, 3), bench.run(bench.store, 3, 4)]

    assert [index // 2 == job for job in range(3)] == [failure is not None for failure in failures]
    assert f"scripted failure of copy {index}" in str(failures[index // 2])
    assert {0: [2, 3, 4], 1: [0, 2, 3, 4], 2: [0, 1, 4], 3: [0, 1, 2, 4]}[index] == bench.stored()
    assert 1 == scripted.num_failed


def test_copies_are_counted_by_queue_too(scripted: ScriptedCopies, bench: Bench) -> None:
    """An index may count the copies of one queue; copies that fail are counted like the others."""
    error = OSError("unplugged")
    scripted.fail_at(1, queue="load", error=error)

    assert bench.run(bench.store, 1, 0, 1, 2) is None
    assert bench.run(bench.load, 1, 0) is None
    failure = bench.run(bench.load, 2, 1)

    assert failure is not None
    assert error is failure.__cause__
    assert (5, 3, 2, 0) == tuple(scripted.num_copies(queue) for queue in (None, "store", "load", "other"))


def test_a_copy_hangs_until_it_is_released(scripted: ScriptedCopies, bench: Bench) -> None:
    """A hanging copy keeps its job and those behind it from ending, not the other queue; released, it is whole."""
    endless = scripted.hang_at(1)
    bench.enqueue(bench.store, 1, 0, 1)
    bench.enqueue(bench.store, 2, 2)
    assert endless.wait_reached(WAIT_S)
    assert not endless.wait_reached(0.0, num_copies=2)

    assert bench.run(bench.load, 1, 7) is None
    assert 0 == bench.store.completed()
    assert [0] == bench.stored()

    endless.release()
    assert bench.store.wait_completed(2, WAIT_S)
    assert [0, 1, 2] == bench.stored()


def test_a_held_queue_is_overtaken(scripted: ScriptedCopies, bench: Bench) -> None:
    """Copies of a held queue begin only after the release, all of them; a queue held anew waits anew."""
    held = scripted.hold("store")
    bench.enqueue(bench.store, 1, 0, 1)
    assert bench.run(bench.load, 1, 7) is None
    assert [] == bench.stored()
    held.release()
    assert bench.store.wait_completed(1, WAIT_S)
    assert [0, 1] == bench.stored()

    again = scripted.hold("store")
    bench.enqueue(bench.store, 2, 2)
    assert again.wait_reached(WAIT_S)
    assert 1 == bench.store.completed()


def test_delays_add_up_and_can_be_cut_short(
    scripted: ScriptedCopies, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every copy of the queue is delayed, by the sum of its delays, and not at all after `release_all`."""
    waited: list[float] = []
    monkeypatch.setattr(scripted._released, "wait", waited.append)
    scripted.delay(0.5)
    scripted.delay(2.0, queue="store")

    assert bench.run(bench.store, 1, 0, 1) is None
    assert bench.run(bench.load, 1, 0) is None
    assert [0.5, 2.0, 0.5, 2.0, 0.5] == waited

    monkeypatch.undo()
    scripted.delay(3600.0)
    bench.enqueue(bench.store, 2, 2)
    scripted.release_all()
    assert bench.store.wait_completed(2, WAIT_S)


def test_release_all_opens_what_is_still_to_come(scripted: ScriptedCopies, bench: Bench) -> None:
    """After `release_all` no copy waits any more, not even where a gate is asked for later."""
    gates = [scripted.hang_at(0), scripted.hold("store")]
    bench.enqueue(bench.store, 1, 0)
    assert gates[0].wait_reached(WAIT_S)

    scripted.release_all()
    scripted.hang_at(1)

    assert bench.store.wait_completed(1, WAIT_S)
    assert bench.run(bench.store, 2, 1) is None


def test_many_threads_count_right() -> None:
    """Copies of several queues at once get a number each, and exactly one of them fails."""
    scripted = ScriptedCopies()
    scripted.fail_at(50)
    with CpuDevice(copy_hook=scripted) as device:
        queues = [device.open_copy_queue(f"queue-{number}", Direction.DEVICE_TO_HOST) for number in range(4)]
        bench = Bench(device)
        threads = [
            threading.Thread(target=lambda queue=queue: [bench.run(queue, job, 0, 1, 2) for job in range(1, 11)])
            for queue in queues
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)

    assert 1 == scripted.num_failed
    assert sum(scripted.num_copies(f"queue-{number}") for number in range(4)) == scripted.num_copies()
    assert scripted.num_copies() in {118, 119, 120}  # the failed one stops its job, up to two blocks early
