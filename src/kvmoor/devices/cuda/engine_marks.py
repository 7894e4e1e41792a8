"""Points in the engine's own work: which stream it computes on, and how far it has come there."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvmoor.devices.cuda.streams import CudaEvent, EventPool, engine_stream_handle
from kvmoor.errors import SettingsError
from kvmoor.process_end import is_leaving

CurrentStream = Callable[[], object] | object | None
"""A stream in any form that `engine_stream_handle` takes, a function that returns one, or None: not known."""

_ALWAYS_THERE: Final = (0, 1, 2)
"""Handles of the default streams, which nobody can destroy (cuda.h)."""


class EngineMarks:
    """Record events on the engine's streams, and remember the last one. One thread at a time."""

    def __init__(self, events: EventPool, current_stream: CurrentStream) -> None:
        self._events = events
        self._current_stream = current_stream
        self._last: CudaEvent | None = None

    def use_stream(self, stream: CurrentStream) -> None:
        """Make a stream the engine's current one."""
        self._current_stream = stream

    def record(self, stream: object | None = None) -> CudaEvent:
        """Mark the present end of a stream, by default of the current one.

        Raises `SettingsError` if that is not known, `RequestError` for what is no stream, `DeviceError` while it
        captures a graph.
        """
        if stream is None:
            stream = self._current_stream() if callable(self._current_stream) else self._current_stream
        if stream is None:
            raise SettingsError(
                "the stream that the engine computes on is not known, so a copy could overtake it: pass "
                "current_stream=torch.cuda.current_stream to CudaDevice, or a stream to record_event"
            )
        event = self._last = self._events.record(engine_stream_handle(stream))
        return event

    def mark_end(self) -> None:
        """Mark the end of the engine's work once more, before it matters whether something of it hangs.

        Not on a stream that is known by its handle only, which may be gone by now; then the last mark has to do.
        """
        stream = self._current_stream
        if is_leaving() or (isinstance(stream, int) and stream not in _ALWAYS_THERE):
            return
        with suppress(Exception):  # also what the engine's own function raises
            self.record()

    def is_over(self) -> bool:
        """Say whether the engine has come to the last mark. Raises `DeviceError` if the device failed."""
        return self._last is None or self._last.is_done()

    def forget(self) -> None:
        """Let go of the last mark, so that its event can be given back."""
        self._last = None
