"""The tests that every device has to pass, one's own included.

    class TestMyDevice(DeviceContract):
        def open_device(self) -> Device:
            return MyDevice()

        def open_engine(self, device: Device) -> EngineStream:
            return MyEngine(device)

A device with memory of its own overrides the four methods about memory, too. Run the tests with pytest. Orders are
proved by holding the engine's stream, never by sleeping.
"""

import ctypes
import unittest
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_layout import SLOT_ALIGNMENT, BlockLayout, GroupLayout, TensorPages
from kvmoor.devices.device import BlockCopies, CopyQueue, Device, Direction
from kvmoor.errors import DeviceError

WAIT_S: Final = 30.0
"""How long the tests wait for what has to happen; only a broken device takes so long."""
_SHORT_S: Final = 0.05  # for what must not happen, where a method with a deadline is asked
_STORE: Final = Direction.DEVICE_TO_HOST
_LOAD: Final = Direction.HOST_TO_DEVICE

Bytes = NDArray[np.uint8]


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
        _host_array(address, data.nbytes)[:] = data

    def read_device(self, address: int, nbytes: int) -> Bytes:
        """Read device memory now, on no stream."""
        return _host_array(address, nbytes).copy()

    def test_copies_every_geometry_both_ways(self) -> None:
        """Exactly the bytes of the blocks asked for arrive, in both directions, and no other byte changes."""
        with self._opened() as (device, store, load):
            for sequence, geometry in enumerate(_GEOMETRIES, start=1):
                blocks = _Blocks(self, geometry, seed=sequence)
                device.check_layout(BlockLayout((blocks.group,)))
                num_whole = min(geometry.num_blocks // geometry.blocks_per_chunk, geometry.num_slots)
                for queue, order in ((store, _scattered), (load, _adjacent)):
                    block_ids, slots = order(blocks, num_whole)
                    queue.enqueue([blocks.copies(block_ids, slots)], sequence, None)
                    _finish(queue, sequence)
                    blocks.expect(_STORE if queue is store else _LOAD, block_ids, slots)
                    blocks.assert_as_expected(str(geometry))

    def test_a_job_may_name_several_groups(self) -> None:
        """One job copies blocks of several groups; a group without tensors has no bytes to copy."""
        with self._opened() as (_, store, _load):
            parts = [_Blocks(self, geometry, seed=seed) for seed, geometry in enumerate(_GEOMETRIES[:2])]
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
            blocks = _Blocks(self, _GEOMETRIES[0])
            for sequence in range(1, 51):
                store.enqueue([blocks.copies([sequence % 8], [0])], sequence, None)
            _finish(store, 50)

            assert all(store.failure(sequence) is None for sequence in range(1, 50))
            blocks.expect(_STORE, [50 % 8], [0])
            blocks.assert_as_expected("the last job")

    def test_the_completion_word_only_grows(self) -> None:
        """Whoever reads the completion word sees numbers of jobs, never a smaller one than before."""
        with self._opened() as (_, store, _load):
            blocks = _Blocks(self, _GEOMETRIES[0])
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
            blocks = _Blocks(self, _GEOMETRIES[0])
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
            blocks = _Blocks(self, _GEOMETRIES[0])
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
            blocks = _Blocks(self, _GEOMETRIES[0])
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

    def test_an_idle_engine_has_no_event_to_wait_for(self) -> None:
        """Once the work of the engine's stream is over, there is no event, or one that is done."""
        with self._opened() as (device, _store, _load), self._engine(device) as engine:
            engine.read(self.allocate_device(16), 16)()

            event = device.record_event()

            assert event is None or event.is_done()

    def test_a_failed_copy_is_reported_once_and_stops_nothing(self) -> None:
        """A job whose copy fails is over and says why, once; the jobs before and behind it are whole."""
        with self._opened(self.open_failing_device(2)) as (_, store, _load):
            blocks = _Blocks(self, _GEOMETRIES[0])
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
            blocks = _Blocks(self, _GEOMETRIES[0])
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


@dataclass(frozen=True)
class _Geometry:
    """A group: page sizes of its tensors; `gaps` lie between tensors, or the tensors of a block lie side by side."""

    page_nbytes: tuple[int, ...]
    num_blocks: int = 12
    num_slots: int = 12
    blocks_per_chunk: int = 1
    interleaved: bool = False
    gaps: tuple[int, ...] = (0,)


_GEOMETRIES: Final = (
    _Geometry((512, 512, 512)),
    _Geometry((4096,)),
    _Geometry((512, 64, 512, 64)),  # data and scales
    _Geometry((3, 100, 1, 7000), gaps=(1, 77)),
    _Geometry((256,) * 6, gaps=(0, 4096, 64, 128)),
    _Geometry((1024, 1024), interleaved=True),
    _Geometry((512, 256, 512), interleaved=True, blocks_per_chunk=2),
    _Geometry((384, 384), blocks_per_chunk=3),
    _Geometry((4096,), num_blocks=200, num_slots=200),
    _Geometry((32 * 1024,) * 4, num_blocks=32, num_slots=20),
    _Geometry((16 * 1024,) * 5, num_blocks=64, num_slots=16, blocks_per_chunk=4, gaps=(0, 8192, 512)),
)


class _Blocks:
    """One group in device memory, slots in host memory, and what both should hold."""

    def __init__(self, contract: DeviceContract, geometry: _Geometry, seed: int = 0) -> None:
        self.geometry = geometry
        self._contract = contract
        random = np.random.default_rng(seed)
        row_nbytes = sum(geometry.page_nbytes)
        device_nbytes = (row_nbytes + max(geometry.gaps)) * geometry.num_blocks + 4096 * len(geometry.page_nbytes)
        self._device = contract.allocate_device(device_nbytes)
        self.group = self._describe(row_nbytes)
        self._slots = contract.allocate_host(self.group.slot_nbytes * geometry.num_slots)
        self._device_image = random.integers(0, 256, device_nbytes, dtype=np.uint8)
        self._slot_image = random.integers(0, 256, self.group.slot_nbytes * geometry.num_slots, dtype=np.uint8)
        contract.write_device(self._device, self._device_image)
        _host_array(self._slots, self._slot_image.nbytes)[:] = self._slot_image

    def page(self, tensor: int, block_id: int) -> int:
        """Return the device address of a page."""
        pages = self.group.tensors[tensor]
        return pages.base + block_id * pages.block_stride

    def copies(self, block_ids: Sequence[int], slots: Sequence[int]) -> BlockCopies:
        """Pair device blocks with slots, both by number."""
        addresses = self._slots + self.group.slot_nbytes * np.asarray(slots, np.int64)
        return BlockCopies(self.group, np.asarray(block_ids, np.int64), addresses)

    def expect(self, direction: Direction, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy between the images, page by page: what the device should have done."""
        group = self.group
        for position, block_id in enumerate(block_ids):
            slot, in_chunk = slots[position // group.blocks_per_chunk], position % group.blocks_per_chunk
            for number, (tensor, offset) in enumerate(zip(group.tensors, group.page_offsets, strict=True)):
                nbytes = tensor.page_nbytes
                at = self.page(number, block_id) - self._device
                page = self._device_image[at : at + nbytes]
                at = slot * group.slot_nbytes + offset + in_chunk * nbytes
                place = self._slot_image[at : at + nbytes]
                if direction is _STORE:
                    place[:] = page
                else:
                    page[:] = place

    def expect_written(self, address: int, data: Bytes) -> None:
        """Note what the engine wrote."""
        self._device_image[address - self._device :][: data.nbytes] = data

    def slot_bytes(self) -> Bytes:
        """Return what all slots hold."""
        return _host_array(self._slots, self._slot_image.nbytes).copy()

    def assert_as_expected(self, what: str, slots: Sequence[int] | None = None) -> None:
        """Compare every byte of device memory and of all slots, or of some."""
        found = self._contract.read_device(self._device, self._device_image.nbytes)
        np.testing.assert_array_equal(self._device_image, found, err_msg=f"device memory, {what}")
        rows = slice(None) if slots is None else list(slots)
        expected, found = (each.reshape(self.geometry.num_slots, -1) for each in (self._slot_image, self.slot_bytes()))
        np.testing.assert_array_equal(expected[rows], found[rows], err_msg=f"slots, {what}")

    def _describe(self, row_nbytes: int) -> GroupLayout:
        geometry = self.geometry
        tensors, base = [], self._device
        for number, nbytes in enumerate(geometry.page_nbytes):
            stride = row_nbytes if geometry.interleaved else nbytes
            tensors.append(TensorPages(base, geometry.num_blocks, stride, nbytes))
            gap = geometry.gaps[number % len(geometry.gaps)]
            base += nbytes if geometry.interleaved else nbytes * geometry.num_blocks + gap
        return GroupLayout(tuple(tensors), geometry.blocks_per_chunk, geometry.blocks_per_chunk)


def _scattered(blocks: _Blocks, num_whole: int) -> tuple[list[int], list[int]]:
    """Choose all blocks in random order, and random slots for them."""
    random, geometry = np.random.default_rng(7), blocks.geometry
    block_ids = random.permutation(geometry.num_blocks)[: num_whole * geometry.blocks_per_chunk]
    return block_ids.tolist(), random.permutation(geometry.num_slots)[:num_whole].tolist()


def _adjacent(blocks: _Blocks, num_whole: int) -> tuple[list[int], list[int]]:
    """Choose blocks and slots in runs: one in the middle that counts down, the others up."""
    block_ids = list(range(num_whole * blocks.geometry.blocks_per_chunk))
    third = len(block_ids) // 3
    block_ids[third : 2 * third] = reversed(block_ids[third : 2 * third])
    return block_ids, list(range(num_whole))


def _finish(queue: CopyQueue, sequence: int) -> None:
    assert queue.wait_completed(sequence, WAIT_S)
    assert sequence == queue.completed()
    assert queue.failure(sequence) is None


def _host_array(address: int, nbytes: int) -> Bytes:
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
