"""A CPU stream runs work in order on one thread, marks points in it, and ends."""

import logging
import threading
import weakref
from collections.abc import Iterator

import pytest

from kvmoor.devices.cpu_stream import CpuStream
from kvmoor.errors import ClosedError, DeviceError

WAIT_S = 30.0


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    with CpuStream("kvmoor-test") as stream:
        yield stream


def kvmoor_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvmoor")]


def test_work_runs_in_order_on_one_daemon_thread(stream: CpuStream) -> None:
    """Work runs in the order of its submission, on a daemon thread that carries the stream's name."""
    done: list[tuple[int, str, bool]] = []
    for number in range(100):
        stream.submit(
            lambda number=number: done.append(
                (number, threading.current_thread().name, threading.current_thread().daemon)
            )
        )

    assert stream.record_event().wait(WAIT_S)
    assert [(number, "kvmoor-test", True) for number in range(100)] == done


def test_there_is_no_thread_without_work() -> None:
    """A stream without work has no thread, and closing it leaves none."""
    stream = CpuStream("kvmoor-test")
    assert [] == kvmoor_threads()
    assert stream.record_event().is_done()

    stream.submit(lambda: None)
    assert ["kvmoor-test"] == kvmoor_threads()

    assert stream.close(WAIT_S)
    assert [] == kvmoor_threads()


def test_an_event_covers_the_work_before_it_only(stream: CpuStream) -> None:
    """An event is done once the work submitted before it is over, whatever came after it."""
    with stream.latch() as first:
        before = stream.record_event()
        with stream.latch():
            after = stream.record_event()
            assert not before.is_done()
            assert not before.wait(0.0)
            first.release()
            assert before.wait(WAIT_S)
            assert not after.is_done()
        assert after.wait(WAIT_S)


def test_an_event_calls_who_waits_for_it(stream: CpuStream) -> None:
    """`when_done` calls back on the stream's thread, or at once if the event is done by then."""
    called = threading.Event()
    threads: list[str] = []

    def wake() -> None:
        threads.append(threading.current_thread().name)
        called.set()

    first_is_over = threading.Event()
    with stream.latch() as first:
        stream.submit(first_is_over.set)
        with stream.latch():
            event = stream.record_event()
            event.when_done(wake)
            first.release()
            assert first_is_over.wait(WAIT_S)
            assert [] == threads
    assert called.wait(WAIT_S)
    event.when_done(wake)

    assert ["kvmoor-test", threading.current_thread().name] == threads


def test_failing_work_is_logged_and_counts_as_over(stream: CpuStream, caplog: pytest.LogCaptureFixture) -> None:
    """Work that raises is logged with its reason; the event behind it is done and later work runs."""
    done: list[str] = []

    def fail() -> None:
        raise ValueError("no such block")

    with caplog.at_level(logging.ERROR, "kvmoor"):
        stream.submit(fail)
        stream.submit(lambda: done.append("later"))
        assert stream.record_event().wait(WAIT_S)

    assert ["later"] == done
    assert "kvmoor-test" in caplog.text
    assert "no such block" in caplog.text


def test_close_lets_queued_work_finish() -> None:
    """Closing takes no more work but finishes what is queued; closing again is harmless."""
    stream = CpuStream("kvmoor-test")
    done: list[int] = []
    with stream.latch():
        for number in range(3):
            stream.submit(lambda number=number: done.append(number))
        assert not stream.closed
        assert not stream.close(0.0)
        assert stream.closed
        with pytest.raises(ClosedError, match="kvmoor-test is closed"):
            stream.submit(lambda: None)

    assert stream.close(WAIT_S)
    assert stream.close(0.0)
    assert [0, 1, 2] == done


def test_leaving_a_with_block_of_a_stuck_stream_is_loud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream whose work does not end in time is left with a warning, not waited for."""
    monkeypatch.setattr("kvmoor.devices.cpu_stream._EXIT_TIMEOUT_S", 0.01)
    with CpuStream("kvmoor-test") as stream:
        latch = stream.latch()

    latch.release()
    assert "kvmoor-test still works" in caplog.text
    assert stream.close(WAIT_S)


def test_an_idle_stream_keeps_nothing_alive(stream: CpuStream) -> None:
    """What the last work held is free once the work is over."""

    class Held:
        pass

    held, gone = Held(), threading.Event()
    watch = weakref.finalize(held, gone.set)
    stream.submit(lambda held=held: None)
    del held
    assert stream.record_event().wait(WAIT_S)

    assert gone.wait(WAIT_S)
    assert not watch.alive


def test_a_forgotten_stream_warns() -> None:
    """A stream that is dropped unclosed says so; one without a thread has nothing to say."""
    streams = [CpuStream("kvmoor-forgotten")]
    streams[0].submit(lambda: None)
    progress = streams[0]._progress

    with pytest.warns(ResourceWarning, match="kvmoor-forgotten was never closed"):
        streams.clear()

    with progress.changed:
        progress.closed = True
        progress.changed.notify_all()
    streams.append(CpuStream("kvmoor-without-work"))
    streams.clear()


def test_a_thread_that_cannot_start_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process may start no more threads, submitting says so and queues nothing."""
    ran: list[str] = []
    stream = CpuStream("kvmoor-test")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DeviceError, match="raise the limit on threads"):
            stream.submit(lambda: ran.append("refused"))
    stream.submit(lambda: ran.append("taken"))

    assert stream.close(WAIT_S)
    assert ["taken"] == ran
