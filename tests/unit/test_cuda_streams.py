"""Streams as engines have them, and events as points in the engine's work."""

import gc
import threading

import numpy as np
import pytest

from fake_cuda import FakeDriver
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.driver import CudaError
from kvmoor.devices.cuda.streams import EventPool, engine_stream_handle, stream_handle
from kvmoor.devices.device import DeviceEvent
from kvmoor.errors import ClosedError, DeviceError, RequestError


class ProtocolStream:
    """As in cuda.core."""

    def __init__(self, handle, version=0):
        self.answer = version, handle

    def __cuda_stream__(self):
        return self.answer


class ProtocolAttribute:
    """As in early versions of the protocol."""

    __cuda_stream__ = (0, 77)


class TorchStream:
    """As in torch."""

    def __init__(self, handle):
        self.cuda_stream = handle


class Both(ProtocolStream):
    """A stream that has both: the protocol decides."""

    cuda_stream = 99


STREAMS = [77, np.int64(77), ProtocolStream(77), ProtocolAttribute(), TorchStream(77), Both(77)]


@pytest.fixture
def fake():
    return FakeDriver()


@pytest.fixture
def pool(fake):
    pool = EventPool(CudaContext(fake))
    fake.calls.clear()
    return pool


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: type(stream).__name__)
def test_a_stream_comes_in_many_forms(stream):
    """A handle, the protocol and torch's attribute all lead to the driver's handle, as a plain int."""
    for function in (stream_handle, engine_stream_handle):
        assert 77 == function(stream)
        assert int is type(function(stream))


@pytest.mark.parametrize("handle", [0, 1, 2])
@pytest.mark.parametrize("form", [int, ProtocolStream, TorchStream])
def test_the_default_streams_are_the_engines_only(handle, form):
    """Events can be recorded on a default stream, and copies of kvmoor's never be queued there."""
    assert handle == engine_stream_handle(form(handle))
    with pytest.raises(RequestError, match=r"is a default stream.*pass one that was created.*torch\.cuda\.Stream\(\)"):
        stream_handle(form(handle))


@pytest.mark.parametrize(
    "stream",
    [None, True, "0", 1.5, object(), TorchStream(None), TorchStream("0")],
    ids=["nothing", "boolean", "text", "fraction", "object", "torch's, of nothing", "torch's, of text"],
)
def test_what_is_no_stream_is_refused(stream):
    """The error shows what came and says what can be passed."""
    with pytest.raises(RequestError, match="is no CUDA stream: pass the driver's handle"):
        engine_stream_handle(stream)


@pytest.mark.parametrize("stream", [-1, 2**64, ProtocolStream(-1)], ids=["negative", "too large", "protocol"])
def test_what_no_stream_has_as_a_handle_is_refused(stream):
    """A handle that cannot be one does not reach the driver, which would follow it."""
    with pytest.raises(RequestError, match="which no stream has"):
        stream_handle(stream)


def test_a_later_version_of_the_protocol_is_refused():
    """What a later version returns is not known, so it is not guessed at."""
    with pytest.raises(RequestError, match="speaks version 1 of __cuda_stream__, and kvmoor version 0"):
        stream_handle(ProtocolStream(77, version=1))


def test_an_event_is_done_when_the_work_before_it_is(fake, pool):
    """The point is passed once all work queued before it has run, however much comes after."""
    stream = fake.stream_create()
    fake.enqueue(stream)
    event = pool.record(stream)
    fake.enqueue(stream)
    assert isinstance(event, DeviceEvent)
    assert [False, False] == [event.is_done(), event.is_done()]
    fake.step(stream)
    assert not event.is_done()
    fake.step(stream)
    assert event.is_done()
    assert ["engine"] == fake.pending(stream)


def test_an_event_that_is_done_asks_no_more(fake, pool):
    """Once known, the answer costs no call."""
    event = pool.record(fake.stream_create())
    fake.run_all()
    assert event.is_done()
    fake.calls.clear()
    assert event.is_done()
    assert [] == fake.calls


def test_a_stream_ordered_after_an_event_waits_for_it(fake, pool):
    """Work queued before the order runs, work queued after it only once the point is passed."""
    engine, copies = fake.stream_create(), fake.stream_create()
    ran = []
    fake.enqueue(engine, lambda: ran.append("engine"))
    event = pool.record(engine)
    fake.enqueue(copies, lambda: ran.append("before"))
    event.order_before(copies)
    fake.enqueue(copies, lambda: ran.append("after"))
    fake.run(copies)
    assert ["before"] == ran
    fake.run(engine)
    fake.run(copies)
    assert ["before", "engine", "after"] == ran


@pytest.mark.parametrize("handle", [0, 2])
def test_events_are_recorded_on_default_streams(fake, pool, handle):
    """Engines compute on the default stream unless told otherwise; a point there is as good as any."""
    fake.enqueue(handle)
    event = pool.record(handle)
    assert not event.is_done()
    fake.run_all()
    assert event.is_done()
    fake.check()


def test_events_nobody_holds_are_used_again(fake, pool):
    """However many points are marked one after the other, the driver makes as few events as are held at a time."""
    stream = fake.stream_create()
    for _ in range(100):
        event = pool.record(stream)
    assert (2, 1) == (fake.num_calls("event_create"), pool.num_held)
    held = [pool.record(stream) for _ in range(5)]
    assert 6 == len({event.handle, *(other.handle for other in held)})
    assert 6 == pool.num_held
    del event, held
    assert 0 == pool.num_held


def test_a_wait_outlives_its_event(fake, pool):
    """A stream that waits for a point still waits for it when the event marks another one, reached or not."""
    slow, other, copies = fake.stream_create(), fake.stream_create(), fake.stream_create()
    fake.enqueue(slow)
    event = pool.record(slow)
    event.order_before(copies)
    handle = event.handle
    del event
    again = pool.record(other)
    assert handle == again.handle
    fake.run(other)
    assert again.is_done()
    assert 0 == fake.run(copies)
    fake.run(slow)
    assert 1 == fake.run(copies)


def test_dropping_an_event_calls_no_driver(fake, pool):
    """An event can be collected at any time on any thread, so that must not touch the GPU."""
    event = pool.record(fake.stream_create())
    cycle = [event]
    cycle.append(cycle)
    fake.calls.clear()
    del event, cycle
    gc.collect()
    assert ([], 0) == (fake.calls, pool.num_held)


def test_events_are_not_recorded_into_a_graph(fake, pool):
    """On a stream that captures, the event would belong to the graph: it is refused, and the capture goes on."""
    stream = fake.stream_create()
    refusal = pytest.raises(DeviceError, match=r"is capturing a graph.*submit orders outside of captures")
    with fake.capturing(stream) as capture, refusal:
        pool.record(stream)
    assert not capture.lost
    assert 0 == fake.num_calls("event_record")
    assert pool.record(stream)
    fake.check()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_events_harm_no_capture(fake, pool, mode):
    """While the engine captures on another stream, of this thread even, events are made, recorded and asked."""
    graph, engine, copies = (fake.stream_create() for _ in range(3))
    with fake.capturing(graph, mode) as capture:
        event = pool.record(engine)
        assert not event.is_done()
        event.order_before(copies)
        fake.run_all()
        assert event.is_done()
    assert not capture.lost
    fake.check()


def test_an_event_cannot_be_told_after_a_fault(fake, pool):
    """After a fault nobody knows how far the engine came: asking raises rather than answers."""
    event = pool.record(fake.stream_create())
    fake.trap(700)
    for _ in range(2):
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            event.is_done()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in fake.broken
    assert "global" == fake.capture_mode


def test_a_failure_at_any_call_loses_no_event(fake, pool):
    """Whichever call fails, nothing counts as held, and the next attempt works."""
    stream = fake.stream_create()
    before = fake.num_calls()
    event = pool.record(stream)
    for at in range(fake.num_calls() - before):
        fresh = EventPool(pool.context)
        fake.calls.clear()
        fake.fail(None, fake.num_calls() + at, 2)
        try:
            fresh.record(stream)
        except CudaError:
            pass
        else:
            # The one that is tried again: to restore how the thread gets along with captures.
            assert ["exchange_capture_mode"] * 2 == [call.name for call in fake.calls[at : at + 2]]
        assert (0, "global") == (fresh.num_held, fake.capture_mode)
        assert fresh.record(stream)
        fresh.close()
    assert [f"stream {stream:#x}", f"event {event.handle:#x}"] == fake.leaks()


def test_the_callers_context_comes_back(fake):
    """Events of a GPU whose context is not current are recorded and asked all the same."""
    fake = FakeDriver(num_devices=2)
    pool = EventPool(CudaContext(fake, ordinal=1))
    with pool.context.current():
        stream = fake.stream_create()
    event = pool.record(stream)
    assert not event.is_done()
    assert (fake.context_current(),) == fake.context_stack() == (0xC0_0000,)


def test_closing_gives_back_what_nobody_holds(fake, pool):
    """Events that are held stay until a later call; after closing no more are recorded."""
    stream = fake.stream_create()
    events = [pool.record(stream) for _ in range(3)]
    del events[0]
    pool.close()
    assert (1, 2) == (fake.num_calls("event_destroy"), pool.num_held)
    with pytest.raises(ClosedError, match="make another device"):
        pool.record(stream)
    events.clear()
    pool.close()
    assert (3, 0) == (fake.num_calls("event_destroy"), pool.num_held)
    assert [f"stream {stream:#x}"] == fake.leaks()


def test_closing_while_a_stream_hangs_or_failed_ends(fake, pool):
    """Giving events back is no call that could block, and what a broken context answers is passed over."""
    stream = fake.stream_create()
    fake.hang(stream)
    events = [pool.record(stream) for _ in range(3)]
    del events
    pool.close()
    fake.check()
    faulted = EventPool(pool.context)
    faulted.record(stream)
    fake.trap()
    faulted.close()


def test_many_threads_never_share_an_event(fake, pool):
    """Threads that record and drop events at the same time get a different one each."""
    stream = fake.stream_create()
    shared = []
    barrier = threading.Barrier(4)

    def record():
        barrier.wait()
        for _ in range(50):
            events = [pool.record(stream) for _ in range(3)]
            shared.append({event.handle for event in events})
            del events

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {3} == {len(handles) for handles in shared}
    assert 200 == len(shared)
    assert 0 == pool.num_held
    assert fake.num_calls("event_create") <= 12
