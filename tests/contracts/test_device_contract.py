"""The CPU device keeps the promises of `Device`: with one copy thread, with two, and with a hook."""

import unittest
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kvmoor.devices.cpu import CpuCopyQueue, CpuDevice
from kvmoor.devices.cpu_stream import CpuEvent, CpuStream, StreamLatch
from kvmoor.devices.device import BlockCopies, Device, DeviceEvent, Direction
from kvmoor.errors import DeviceError
from kvmoor.testing import DeviceContract, ScriptedCopies
from kvmoor.testing.device_contract import WAIT_S, Bytes, EngineStream


class CpuEngine:
    """An engine that computes on a CPU stream."""

    def __init__(self, device: CpuDevice, memory: DeviceContract) -> None:
        self._memory = memory
        self._latches: list[StreamLatch] = []
        self._stream = device.open_stream("engine")
        device.use_stream(self._stream)

    def hold(self) -> Callable[[], None]:
        self._latches.append(self._stream.latch())
        return self._latches[-1].release

    def write(self, address: int, data: Bytes) -> None:
        self._stream.submit(partial(self._memory.write_device, address, data))

    def read(self, address: int, nbytes: int) -> Callable[[], Bytes]:
        found: list[Bytes] = []
        self._stream.submit(lambda: found.append(self._memory.read_device(address, nbytes)))
        event = self._stream.record_event()

        def result() -> Bytes:
            assert event.wait(WAIT_S)
            return found[0]

        return result

    def close(self) -> None:
        for latch in self._latches:
            latch.release()
        assert self._stream.close(WAIT_S)


class CpuContract(DeviceContract):
    def open_device(self) -> Device:
        return CpuDevice()

    def open_engine(self, device: Device) -> EngineStream:
        return CpuEngine(device, self)

    def stream_of(self, engine: EngineStream) -> object:
        assert isinstance(engine, CpuEngine)
        return engine._stream

    def open_failing_device(self, index: int) -> Device:
        scripted = ScriptedCopies()
        scripted.fail_at(index)
        return CpuDevice(copy_hook=scripted)


class TestOneCopyThread(CpuContract):
    def open_device(self) -> Device:
        return CpuDevice(copy_threads=1)


class TestTwoCopyThreads(CpuContract):
    def open_device(self) -> Device:
        return CpuDevice(copy_threads=2)


class TestHookedCopies(CpuContract):
    def open_device(self) -> Device:
        return CpuDevice(copy_threads=3, copy_hook=ScriptedCopies())


class _IgnoresEvents(CpuCopyQueue):
    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        super().enqueue(copies, sequence, None)
        self.wait_completed(sequence, WAIT_S)


class _LeavesOutTheLastBlock(CpuCopyQueue):
    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        shortened = [
            BlockCopies(part.group, part.block_ids[: -part.group.blocks_per_chunk], part.slot_addresses[:-1])
            for part in copies
        ]
        super().enqueue(shortened, sequence, wait_for)


class _CopiesTheWrongWay(CpuCopyQueue):
    def __init__(self, name: str, direction: Direction, **options: object) -> None:
        (other,) = set(Direction) - {direction}
        super().__init__(name, other, **options)


class _RepeatsTheFirstJob(CpuCopyQueue):
    def _copy(self, copies: Sequence[BlockCopies], sequence: int) -> None:
        super()._copy(copies, sequence)
        self._done = getattr(self, "_done", [])
        self._done.append(copies)
        super()._copy(self._done[0], sequence)


class _SaysDoneAtOnce(CpuCopyQueue):
    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        self._last = sequence
        super().enqueue(copies, sequence, wait_for)

    def completed(self) -> int:
        return getattr(self, "_last", 0)

    def wait_completed(self, sequence: int, timeout_s: float) -> bool:
        return True


class _CountsBackwards(CpuCopyQueue):
    def completed(self) -> int:
        self._asked = not getattr(self, "_asked", False)
        return super().completed() if self._asked else 0


class _HidesFailures(CpuCopyQueue):
    def failure(self, sequence: int) -> DeviceError | None:
        return None


class _RepeatsFailures(CpuCopyQueue):
    def failure(self, sequence: int) -> DeviceError | None:
        return self._failures.get(sequence)


class _ClosesTooSoon(CpuCopyQueue):
    def close(self, timeout_s: float) -> bool:
        return timeout_s < 1 or super().close(timeout_s)


class _OrdersNothing(CpuCopyQueue):
    _unordered: CpuStream | None = None

    def order_after(self, stream: object, sequence: int) -> None:
        super().order_after(stream, min(sequence, 0) if sequence == self._last_sequence else sequence)
        assert isinstance(stream, CpuStream)
        self._unordered = stream

    def _copy(self, copies: Sequence[BlockCopies], sequence: int) -> None:
        if self._unordered is not None:  # or now and then the copy would win the race that it should lose
            assert self._unordered.record_event().wait(WAIT_S)
        super()._copy(copies, sequence)


class _OrdersAnything(CpuCopyQueue):
    def order_after(self, stream: object, sequence: int) -> None:
        if isinstance(stream, CpuStream):
            super().order_after(stream, min(sequence, self._last_sequence))


class _GivesUpWhenAsked(CpuCopyQueue):
    def probe(self) -> None:
        self._word.advance(self._last_sequence)


class _NeverClosed(CpuCopyQueue):
    def close(self, timeout_s: float) -> bool:
        return super().close(timeout_s) and False


def broken_device(queue_type: type[CpuCopyQueue]) -> type[CpuDevice]:
    class BrokenDevice(CpuDevice):
        def open_copy_queue(self, name: str, direction: Direction) -> CpuCopyQueue:
            queue = queue_type(
                name,
                direction,
                copy_threads=1,
                copy_hook=self._copy_hook,
                copy_numbers=self._copy_numbers,
            )
            self._queues.append(queue)
            return queue

    BrokenDevice.__name__ = queue_type.__name__  # for the names of the tests
    return BrokenDevice


class _MarksNothing(CpuDevice):
    def record_event(self) -> CpuEvent | None:
        return None


class _MarksWhatNeverEnds(CpuDevice):
    def record_event(self) -> CpuEvent | None:
        if self._current_stream is None:
            return None
        event = self._current_stream.record_event()
        return CpuEvent(event._progress, event._num_before + 1)


@pytest.mark.parametrize(
    ("test", "device_type"),
    [
        ("copies_every_geometry_both_ways", broken_device(_LeavesOutTheLastBlock)),
        ("copies_every_geometry_both_ways", broken_device(_CopiesTheWrongWay)),
        ("a_job_may_name_several_groups", broken_device(_LeavesOutTheLastBlock)),
        ("jobs_of_a_queue_run_in_order", broken_device(_RepeatsTheFirstJob)),
        ("the_completion_word_only_grows", broken_device(_CountsBackwards)),
        ("a_job_waits_for_its_event", broken_device(_IgnoresEvents)),
        ("a_job_waits_for_its_event", broken_device(_SaysDoneAtOnce)),
        ("a_job_waits_for_its_event", _MarksNothing),
        ("a_store_takes_what_the_engine_wrote_before_the_event", broken_device(_IgnoresEvents)),
        ("a_load_spares_what_the_engine_reads_before_the_event", broken_device(_IgnoresEvents)),
        ("a_stream_waits_for_a_job", broken_device(_OrdersNothing)),
        ("a_stream_waits_for_a_job", broken_device(_OrdersAnything)),
        ("probing_ends_no_job_of_a_device_that_lives", broken_device(_GivesUpWhenAsked)),
        ("an_idle_engine_has_no_event_to_wait_for", _MarksWhatNeverEnds),
        ("a_failed_copy_is_reported_once_and_stops_nothing", broken_device(_HidesFailures)),
        ("a_failed_copy_is_reported_once_and_stops_nothing", broken_device(_RepeatsFailures)),
        ("nothing_is_touched_once_a_queue_is_closed", broken_device(_ClosesTooSoon)),
        ("close_ends_what_is_idle", broken_device(_NeverClosed)),
    ],
)
def test_the_suite_finds_broken_devices(
    monkeypatch: pytest.MonkeyPatch, test: str, device_type: type[CpuDevice]
) -> None:
    """A device that breaks a promise fails the test of the suite that asks for it."""
    monkeypatch.setattr("kvmoor.testing.device_contract.WAIT_S", 2.0)  # what never comes is waited for in vain

    class Suite(CpuContract):
        def open_device(self) -> Device:
            return device_type()

        def open_failing_device(self, index: int) -> Device:
            scripted = ScriptedCopies()
            scripted.fail_at(index)
            return device_type(copy_hook=scripted)

    with pytest.raises(AssertionError):
        getattr(Suite(), f"test_{test}")()


def test_a_device_that_cannot_be_made_to_fail_skips() -> None:
    """The suite skips what a device cannot show, and says so."""

    class Suite(CpuContract):
        open_failing_device = DeviceContract.open_failing_device

        stream_of = DeviceContract.stream_of

    with pytest.raises(unittest.SkipTest, match="cannot be made to fail at copy 2"):
        Suite().test_a_failed_copy_is_reported_once_and_stops_nothing()
    with pytest.raises(unittest.SkipTest, match=r"no stream of .*CpuEngine"):
        Suite().test_a_stream_waits_for_a_job()
