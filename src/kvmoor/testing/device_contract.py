"""The tests that every device has to pass, one's own included.

    class TestMyDevice(DeviceContract):
        def open_device(self) -> Device:
            return MyDevice()

        def open_engine(self, device: Device) -> EngineStream:
            return MyEngine(device)

A device with memory of its own overrides the four methods about memory, too. Run the tests with pytest. Orders are
proved by holding the engine's stream, never by sleeping.
"""

import time
import unittest
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, Protocol

import numpy as np

from kvmoor.block_layout import SLOT_ALIGNMENT, BlockLayout, GroupLayout
from kvmoor.devices.device import BlockCopies, CopyQueue, Device, Direction
from kvmoor.errors import DeviceError, RequestError
from kvmoor.testing.contract_blocks import GEOMETRIES, Blocks, Bytes, adjacent, host_array, scattered

WAIT_S: Final = 30.0
"""How long the tests wait for what has to happen; only a broken device takes so long."""
_SHORT_S: Final = 0.05  # for what must not happen, where a method with a deadline is asked
_STORE: Final = Direction.DEVICE_TO_HOST
_LOAD: Final = Direction.HOST_TO_DEVICE


class EngineStream(Protocol):
    """The stream of an engine that works on the device, which `Device.record_event` marks. Runs work in order."""

    def hold(self) -> Callable[[], None]:
        """Queue work that ends only when the function returned is called."""

    def write(self, address: int, data: Bytes) -> None:
        """Queue a write to device memory."""

    def read(self, address: int, nbytes: int) -> Callable[[], Bytes]:
        """Queue a read of device memory; the function returned waits for it and gives what was read."""

    def close(self) -> None:
        """Let go of what is held, wait for all work and end the stream."""


class DeviceContract(ABC):
    """Check a device against `Device` and `CopyQueue`. Subclass it and supply a device and an engine."""

    @abstractmethod
    def open_device(self) -> Device:
        """Return a new device."""

    @abstractmethod
    def open_engine(self, device: Device) -> EngineStream:
        """Return a stream of an engine on the device, and make it the current one."""

    def stream_of(self, engine: EngineStream) -> object:
        """Return the stream of an engine, as `CopyQueue.order_after` takes it."""
        raise unittest.SkipTest(f"no stream of {engine!r} is known")

    def open_failing_device(self, index: int) -> Device:
        """Return a new device that fails at the copy of block `index`, counted from 0 over all jobs.

        A device that cannot be made to fail leaves this as it is; the tests that need it are skipped.
        """
        raise unittest.SkipTest(f"this device cannot be made to fail at copy {index}")

    def allocate_device(self, nbytes: int) -> int:
        """Return the address of new device memory that lives as long as this object; by default host memory."""
        return self.allocate_host(nbytes)

    def allocate_host(self, nbytes: int) -> int:
        """Return the 4 KiB-aligned address of new host memory as slots have it, which lives as long as this object."""
        memory = np.zeros(nbytes + SLOT_ALIGNMENT, np.uint8)
        self.__dict__.setdefault("_memories", []).append(memory)
        return memory.ctypes.data + -memory.ctypes.data % SLOT_ALIGNMENT

    def write_device(self, address: int, data: Bytes) -> None:
        """Write device memory now, on no stream."""
        host_array(address, data.nbytes)[:] = data

    def read_device(self, address: int, nbytes: int) -> Bytes:
        """Read device memory now, on no stream."""
        return host_array(address, nbytes).copy()

    def test_copies_every_geometry_both_ways(self) -> None:
        """Exactly the bytes of the blocks asked for arrive, in both directions, and no other byte changes."""
        with self._opened() as (device, store, load):
            for sequence, geometry in enumerate(GEOMETRIES, start=1):
                blocks = Blocks(self, geometry, seed=sequence)
                device.check_layout(BlockLayout((blocks.group,)))
                num_whole = min(geometry.num_blocks // geometry.blocks_per_chunk, geometry.num_slots)
                for queue, order in ((store, scattered), (load, adjacent)):
                    block_ids, slots = order(blocks, num_whole)
                    queue.enqueue([blocks.copies(block_ids, slots)], sequence, None)
                    _finish(queue, sequence)
                    blocks.expect(_STORE if queue is store else _LOAD, block_ids, slots)
                    blocks.assert_as_expected(str(geometry))

    def test_a_job_may_name_several_groups(self) -> None:
        """One job copies blocks of several groups; a group without tensors has no bytes to copy."""
        with self._opened() as (_, store, _load):
            parts = [Blocks(self, geometry, seed=seed) for seed, geometry in enumerate(GEOMETRIES[:2])]
            nothing = BlockCopies(GroupLayout((), 16), np.array([], np.int64), np.array([4096], np.int64))

            store.enqueue([parts[0].copies([3, 1], [0, 2]), nothing, parts[1].copies([2], [1])], 1, None)
            _finish(store, 1)

            parts[0].expect(_STORE, [3, 1], [0, 2])
            parts[1].expect(_STORE, [2], [1])
            for part in parts:
                part.assert_as_expected("several groups")

    def test_jobs_of_a_queue_run_in_order(self) -> None:
        """Of many jobs that write the same slot the last one wins, and a job that is over says so of all before it."""
        with self._opened() as (_, store, _load):
            blocks = Blocks(self, GEOMETRIES[0])
            for sequence in range(1, 51):
                store.enqueue([blocks.copies([sequence % 8], [0])], sequence, None)
            _finish(store, 50)

            assert all(store.failure(sequence) is None for sequence in range(1, 50))
            blocks.expect(_STORE, [50 % 8], [0])
            blocks.assert_as_expected("the last job")

    def test_the_completion_word_only_grows(self) -> None:
        """Whoever reads the completion word sees numbers of jobs, never a smaller one than before."""
        with self._opened() as (_, store, _load):
            blocks = Blocks(self, GEOMETRIES[0])
            seen = [store.completed()]
            for sequence in range(10, 510, 10):
                store.enqueue([blocks.copies([0, 1], [0, 1])], sequence, None)
                seen.append(store.completed())
            _finish(store, 500)
            seen.append(store.completed())

            assert sorted(seen) == seen
            assert set(seen) <= set(range(0, 510, 10))

    def test_a_job_waits_for_its_event(self) -> None:
        """A job does not begin before its event is done, nor do the jobs behind it; another queue goes on."""
        with self._opened() as (device, store, load), self._engine(device) as engine:
            blocks = Blocks(self, GEOMETRIES[0])
            release = engine.hold()
            event = device.record_event()
            assert event is not None
            assert not event.is_done()

            store.enqueue([blocks.copies([0], [0])], 1, event)
            store.enqueue([blocks.copies([1], [1])], 2, None)
            load.enqueue([blocks.copies([2], [2])], 1, None)
            _finish(load, 1)
            blocks.expect(_LOAD, [2], [2])
            assert not store.wait_completed(1, _SHORT_S)
            assert store.completed() == 0
            blocks.assert_as_expected("before the event")

            release()
            _finish(store, 2)
            assert event.is_done()
            blocks.expect(_STORE, [0, 1], [0, 1])
            blocks.assert_as_expected("after the event")

    def test_a_store_takes_what_the_engine_wrote_before_the_event(self) -> None:
        """A block that the engine writes after its store was queued is stored as written (B25)."""
        with self._opened() as (device, store, _load), self._engine(device) as engine:
            blocks = Blocks(self, GEOMETRIES[0])
            page = blocks.page(0, 5)
            late = 255 - self.read_device(page, blocks.geometry.page_nbytes[0])  # differs in every byte
            release = engine.hold()
            engine.write(page, late)

            store.enqueue([blocks.copies([5], [0])], 1, device.record_event())
            assert not store.wait_completed(1, _SHORT_S)
            release()
            _finish(store, 1)

            blocks.expect_written(page, late)
            blocks.expect(_STORE, [5], [0])
            blocks.assert_as_expected("the late write")

    def test_a_load_spares_what_the_engine_reads_before_the_event(self) -> None:
        """A reader that was queued before a load into its block sees the old bytes (B26)."""
        with self._opened() as (device, _store, load), self._engine(device) as engine:
            blocks = Blocks(self, GEOMETRIES[0])
            page = blocks.page(0, 5)
            old = self.read_device(page, blocks.geometry.page_nbytes[0])
            release = engine.hold()
            read = engine.read(page, old.nbytes)

            load.enqueue([blocks.copies([5], [3])], 1, device.record_event())
            assert not load.wait_completed(1, _SHORT_S)
            release()
            _finish(load, 1)

            np.testing.assert_array_equal(old, read())
            blocks.expect(_LOAD, [5], [3])
            blocks.assert_as_expected("after the reader")

    def test_a_stream_waits_for_a_job(self) -> None:
        """What the engine queues after `order_after` finds the job done, and what it queued before does not wait."""
        with self._opened() as (device, _store, load), self._engine(device) as engine:
            stream = self.stream_of(engine)
            blocks = Blocks(self, GEOMETRIES[0])
            page = blocks.page(0, 5)
            release = engine.hold()
            load.enqueue([blocks.copies([5], [3])], 1, device.record_event())
            load.order_after(stream, 1)
            read = engine.read(page, blocks.geometry.page_nbytes[0])
            release()
            _finish(load, 1)

            blocks.expect(_LOAD, [5], [3])
            np.testing.assert_array_equal(blocks.expected_page(0, 5), read())
            load.order_after(stream, 1)  # over by now
            for wrong in ((stream, 2), (object(), 1)):
                with _refused():
                    load.order_after(*wrong)

    def test_probing_ends_no_job_of_a_device_that_lives(self) -> None:
        """A job that waits is not over because the device was asked, nor has one that is over failed."""
        with self._opened() as (device, store, _load), self._engine(device) as engine:
            blocks = Blocks(self, GEOMETRIES[0])
            release = engine.hold()
            store.probe()
            store.enqueue([blocks.copies([1], [1])], 1, device.record_event())
            store.probe()
            assert store.completed() == 0
            release()
            _finish(store, 1)
            store.probe()
            store.enqueue([blocks.copies([2], [2])], 2, None)
            _finish(store, 2)

    def test_an_idle_engine_has_no_event_to_wait_for(self) -> None:
        """Once the work of the engine's stream is over, there is no event, or one that is done."""
        with self._opened() as (device, _store, _load), self._engine(device) as engine:
            engine.read(self.allocate_device(16), 16)()

            event = device.record_event()

            # A device may need a moment to see that nothing is left to do.
            deadline = time.monotonic() + WAIT_S
            while not (event is None or event.is_done()):
                assert time.monotonic() < deadline, "an event of an idle stream is not done"
                time.sleep(0.001)

    def test_a_failed_copy_is_reported_once_and_stops_nothing(self) -> None:
        """A job whose copy fails is over and says why, once; the jobs before and behind it are whole."""
        with self._opened(self.open_failing_device(2)) as (_, store, _load):
            blocks = Blocks(self, GEOMETRIES[0])
            for sequence, block_ids in ((1, [0]), (2, [1, 2]), (3, [3])):
                store.enqueue([blocks.copies(block_ids, block_ids)], sequence, None)
            assert store.wait_completed(3, WAIT_S)

            assert store.failure(1) is None
            assert isinstance(store.failure(2), DeviceError)
            assert store.failure(2) is None
            assert store.failure(3) is None
            blocks.expect(_STORE, [0, 3], [0, 3])
            blocks.assert_as_expected("jobs that did not fail", slots=[0, 3])

    def test_nothing_is_touched_once_a_queue_is_closed(self) -> None:
        """When `close` says that nothing runs any more, no byte changes any more, whatever was queued."""
        with self._opened() as (device, store, _load), self._engine(device) as engine:
            blocks = Blocks(self, GEOMETRIES[0])
            release = engine.hold()
            store.enqueue([blocks.copies([1], [1])], 1, device.record_event())
            try:
                proven = store.close(_SHORT_S)
                at_close = blocks.slot_bytes()
            finally:
                release()
            engine.read(blocks.page(0, 0), 1)()

            if proven:
                np.testing.assert_array_equal(at_close, blocks.slot_bytes())
                assert store.completed() == 1
                assert isinstance(store.failure(1), DeviceError)
            assert store.close(WAIT_S)
            assert store.close(0.0)

    def test_close_ends_what_is_idle(self) -> None:
        """A device and queues without work close at once, twice without harm."""
        device = self.open_device()
        queue = device.open_copy_queue("store", _STORE)

        assert queue.close(WAIT_S)
        assert queue.close(WAIT_S)
        assert device.close(WAIT_S)
        assert device.close(WAIT_S)

    @contextmanager
    def _opened(self, device: Device | None = None) -> Iterator[tuple[Device, CopyQueue, CopyQueue]]:
        device = device or self.open_device()
        with ExitStack() as stack:
            stack.callback(device.close, WAIT_S)
            store = device.open_copy_queue("store", _STORE)
            stack.callback(store.close, WAIT_S)
            load = device.open_copy_queue("load", _LOAD)
            stack.callback(load.close, WAIT_S)
            yield device, store, load

    @contextmanager
    def _engine(self, device: Device) -> Iterator[EngineStream]:
        engine = self.open_engine(device)
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except RequestError:
        return
    raise AssertionError("arguments that cannot be used were taken")


def _finish(queue: CopyQueue, sequence: int) -> None:
    assert queue.wait_completed(sequence, WAIT_S)
    assert sequence == queue.completed()
    assert queue.failure(sequence) is None
