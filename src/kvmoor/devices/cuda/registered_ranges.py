"""Which ranges of host memory are registered, beside the registrar that registers them.

A copy of the copy engine may not reach from one range into the next, although they are neighbours: to the driver they
are two pieces of memory. The page kernel may; it uses addresses only.
"""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvmoor.process_end import register
from kvmoor.registration import Registrar


class RangeRegistrar:
    """Pass calls on to a registrar and know what is registered. A `Registrar`.

    `on_empty` is called after the last range was unregistered, on the thread that did it.
    """

    def __init__(self, registrar: Registrar, on_empty: Callable[[], None]) -> None:
        self._registrar = registrar
        self._on_empty = on_empty
        self._lock = threading.Lock()  # guards changes of the array, which is replaced and never changed
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Have nothing registered in a forked child."""
        self._lock = threading.Lock()
        self._starts = np.empty(0, np.int64)

    @property
    def name(self) -> str:
        """Return what registers."""
        return self._registrar.name

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return where the registered ranges begin, int64, ascending."""
        return self._starts

    def prepare_thread(self) -> None:
        """Make the calling thread harmless to whoever captures a graph."""
        self._registrar.prepare_thread()

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Register one range. Raises `RegistrationError`."""
        self._registrar.register(address, nbytes, read_only=read_only)
        with self._lock:
            self._starts = np.sort(np.append(self._starts, np.int64(address)))

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`. Raises `RegistrationError` if the range may still be registered."""
        self._registrar.unregister(address, nbytes)
        with self._lock:
            self._starts = self._starts[self._starts != address]
            is_empty = not self._starts.size
        if is_empty:
            self._on_empty()
