"""Giving driver objects back without ever waiting for longer than was agreed.

To free memory of a device blocks behind whatever runs there, the work of others included, and nobody can know that
nothing hangs. So the calls that may block are made on a thread of their own, which is waited for with a deadline. It is
a daemon: one that is stuck in the driver keeps no process from ending.
"""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvmoor.process_end import is_leaving, register

_log = logging.getLogger("kvmoor")

_kept: Final[list[object]] = []


def keep_until_exit(owner: object) -> None:
    """Keep `owner` and what it refers to until the process ends, since the device may still touch it.

    The interpreter may empty the list on its way out; the further reference is nobody's and stays even then, so that
    the tensors that a late copy writes to are not freed by it.
    """
    _kept.append(owner)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def kept_until_exit() -> tuple[object, ...]:
    """Return what is kept: devices that were closed before it was proven that nothing runs on them."""
    return tuple(_kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Freeing:
    what: str
    free: Callable[[], None]


class FreeingThread:
    """Make calls that may block, one after the other in the order they come. Any thread may use it.

    There is a thread only while there is work. A call that raises is logged and the next one made.
    """

    def __init__(self, prepare_thread: Callable[[], None]) -> None:
        self._prepare_thread = prepare_thread
        # Guards the two below and announces their changes; not held while a call is made.
        self._changed = threading.Condition()
        self._waiting: deque[_Freeing] = deque()
        self._thread: threading.Thread | None = None
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Free nothing in a forked child: everything is the parent's."""
        self._changed = threading.Condition()
        self._waiting.clear()
        self._thread = None

    def submit(self, what: str, free: Callable[[], None]) -> None:
        """Let `free` be called; `what` names for the log what is given back. Returns at once.

        Once the process is ending nothing is called any more: all goes with it, and no thread can be started.
        """
        if is_leaving():
            return
        with self._changed:
            self._waiting.append(_Freeing(what, free))
            if self._thread is None:
                self._start_thread()

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every call has returned or the time has passed; say whether they have."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, max(0.0, timeout_s))

    def _is_idle(self) -> bool:
        return not self._waiting and self._thread is None

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work_off, name="kvmoor-cuda-free", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # tried again with the next call; until then nothing counts as given back
            _log.warning("no thread to give back memory of a CUDA device could be started: %s", error)
            return
        self._thread = thread

    def _work_off(self) -> None:
        is_prepared = self._make("what belongs to this thread", self._prepare_thread)
        while (freeing := self._next()) is not None:
            if is_prepared:
                self._make(freeing.what, freeing.free)

    def _next(self) -> _Freeing | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            self._changed.notify_all()
            return None

    @staticmethod
    def _make(what: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            _log.warning(
                "%s of a CUDA device could not be given back and stays until the process ends: %s", what, error
            )
            return False
        return True
