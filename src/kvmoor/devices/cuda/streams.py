"""Streams and events that are shared with the engine: how to get at its streams, and points in their work.

A stream comes as whatever the engine has: the driver's handle (an int), an object with `__cuda_stream__` (CuPy, numba,
cuda.core) or with `cuda_stream` (torch). On the legacy default stream, handle 0, which is what torch computes on unless
told otherwise, events are recorded and waited for; nothing of kvmoor's is ever queued there.
"""

import operator
from contextlib import suppress
from typing import Any, Final

from kvmoor.devices.cuda.context import CudaContext
from kvmoor.errors import ClosedError, DeviceError, RequestError

_PROTOCOL_VERSION: Final = 0
"""Of `__cuda_stream__`, which returns (version, handle). There is no other version yet (cuda.core documentation)."""
_DEFAULT_STREAMS: Final = (0, 1, 2)
"""Handles that stand for a default stream: legacy (0 and 1) and that of the calling thread (2), from cuda.h."""


def engine_stream_handle(stream: object) -> int:
    """Return the driver's handle of a stream of the engine's, a default stream included; events can be recorded there.

    Raises `RequestError` for what is no stream. The stream has to stay alive as long as its handle is used.
    """
    if isinstance(stream, bool) or stream is None:
        raise _no_stream(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return _ask_protocol(stream, protocol)
    handle: Any = getattr(stream, "cuda_stream", stream)
    try:
        return _checked_handle(operator.index(handle), stream)
    except TypeError:
        raise _no_stream(stream) from None


def stream_handle(stream: object) -> int:
    """Return the driver's handle of a stream on which kvmoor may queue work of its own.

    As `engine_stream_handle`, but raises `RequestError` for the default streams too: work there would be ordered with
    that of everybody, and breaks captures.
    """
    handle = engine_stream_handle(stream)
    if handle in _DEFAULT_STREAMS:
        raise RequestError(
            f"{stream!r} is a default stream, on which kvmoor queues nothing: pass one that was created for copies, "
            "in torch torch.cuda.Stream()"
        )
    return handle


class CudaEvent:
    """A point in the work of a stream. A `DeviceEvent`. Any thread may use it.

    The driver's event goes back to the pool with the last reference: what was made to wait for it still waits.
    """

    __slots__ = ("_handle", "_is_done", "_pool")

    def __init__(self, pool: "EventPool", handle: int) -> None:
        self._pool = pool
        self._handle = handle
        self._is_done = False

    @property
    def handle(self) -> int:
        """Return the driver's handle of the event, for whoever keeps this object as long."""
        return self._handle

    def is_done(self) -> bool:
        """Say whether all work before the point is over. Never blocks, and harms no capture.

        Raises `DeviceError` if the device failed: then it cannot be told any more.
        """
        if not self._is_done:
            context = self._pool.context
            with context.relaxed():
                self._is_done = context.driver.event_query(self._handle)
        return self._is_done

    def order_before(self, stream: int) -> None:
        """Let what is queued on a stream (its handle) from now on begin after the point.

        The context has to be current. On a stream of the engine's that captures, it would become part of the graph.
        """
        self._pool.context.driver.stream_wait_event(stream, self._handle)

    def __del__(self) -> None:
        # No call of the driver here: this runs on any thread, at any time, also while somebody captures a graph.
        self._pool.take_back(self._handle)


class EventPool:
    """Record events, and use those again that nobody holds any more. Any thread may call.

    An event that is used again marks its new point only for who asks or waits from then on; waits that were queued
    before keep the old one (CUDA documents this for `cuStreamWaitEvent`).
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        # A list, whose append and pop are one step each: a lock could be held by the very thread that drops an event.
        self._free: list[int] = []
        self._num_created = 0
        self._closed = False

    @property
    def context(self) -> CudaContext:
        """Return the context that the events belong to."""
        return self._context

    def record(self, stream: int) -> CudaEvent:
        """Mark the present end of a stream, given as its handle; 0 is the legacy default stream. Never blocks.

        Raises `DeviceError`, with nothing recorded, if the stream is capturing a graph: the event would be part of the
        graph and never be reached. Raises `ClosedError` after `close`.
        """
        if self._closed:
            raise ClosedError("an event was to be recorded on a CUDA device that is closed: make another device")
        driver = self._context.driver
        with self._context.current():
            if driver.stream_is_capturing(stream):
                raise DeviceError(
                    f"the engine's stream {stream:#x} is capturing a graph, and an event recorded now would be part of "
                    "it: submit orders outside of captures, or make a stream current that does not capture"
                )
            event = CudaEvent(self, self._take())
            driver.event_record(event.handle, stream)
        return event

    def close(self) -> None:
        """Give the events back that nobody holds; call again for the others. Never blocks, and raises nothing.

        In a context that failed they cannot be given back; they go with it.
        """
        self._closed = True
        with suppress(DeviceError), self._context.relaxed():
            while self._free:
                self._context.driver.event_destroy(self._free.pop())
                self._num_created -= 1

    @property
    def num_held(self) -> int:
        """Return how many events somebody holds."""
        return self._num_created - len(self._free)

    def take_back(self, handle: int) -> None:
        """Take an event that nobody uses any more. Calls no driver."""
        self._free.append(handle)

    def _take(self) -> int:
        while True:
            try:
                return self._free.pop()
            except IndexError:
                with self._context.relaxed():
                    handle = self._context.driver.event_create()
                    self._num_created += 1
                    self._free.append(handle)  # before anything else can fail; another thread may take it first


def _ask_protocol(stream: object, protocol: Any) -> int:
    version, handle = protocol() if callable(protocol) else protocol
    if version != _PROTOCOL_VERSION:
        raise RequestError(
            f"{stream!r} speaks version {version} of __cuda_stream__, and kvmoor version {_PROTOCOL_VERSION}: pass the "
            "driver's handle of the stream"
        )
    return _checked_handle(int(handle), stream)


def _checked_handle(handle: int, stream: object) -> int:
    if not 0 <= handle < 2**64:
        raise RequestError(f"{stream!r} gives {handle} as its handle, which no stream has: pass a stream that is open")
    return handle


def _no_stream(stream: object) -> RequestError:
    return RequestError(
        f"{stream!r} is no CUDA stream: pass the driver's handle of one as an int, or an object with __cuda_stream__ "
        "or cuda_stream, as the streams of cuda.core and torch have"
    )
