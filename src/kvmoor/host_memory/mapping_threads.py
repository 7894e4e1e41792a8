"""The threads that write to an arena while it is mapped, and the proof that none does any more."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvmoor.byte_sizes import round_up
from kvmoor.errors import NoRoomError
from kvmoor.host_memory.arena_plan import SlabPlan
from kvmoor.host_memory.page_mapping import TOUCH_NBYTES
from kvmoor.host_memory.slab_memory import SlabMemory

_MIN_PART_NBYTES: Final = 8 * 2**20
"""What is worth a thread when several touch one slab. Guessed."""


class MappingThreads:
    """Start the threads of one mapper, touch slabs with them, and wait for their end. `stop` ends what they do."""

    def __init__(self, memory: SlabMemory, stop: threading.Event, *, name: str, num_threads: int) -> None:
        self._memory = memory
        self._stop = stop
        self._name = name
        self._num_threads = num_threads
        # Threads that may be writing to the arena. Appended to by whoever starts one, read by `join`.
        self._threads: list[threading.Thread] = []

    def start(self, target: Callable[..., None], args: tuple[int, ...] = ()) -> threading.Thread:
        """Start a daemon thread. Raises `NoRoomError` if the system gives none."""
        thread = threading.Thread(target=target, args=args, name=self._name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.remove(thread)
            raise NoRoomError(
                f"a thread that maps host memory cannot start ({error}): raise the limit of threads (ulimit -u, or the "
                "pids limit of the container)"
            ) from error
        return thread

    def forked(self) -> None:
        """Forget the threads in a forked child, where they do not exist."""
        self._threads.clear()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after `stop`; return whether it is proven that none touches the arena any more."""
        deadline = time.monotonic() + timeout_s
        for thread in tuple(self._threads):
            if thread is threading.current_thread():
                return False  # an observer that closes from within an event
            if thread.ident is not None:  # else it never ran, and if it still does, it sees the stop flag first
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    return False
        return True

    def touch(self, slab: SlabPlan) -> bool:
        """Touch a slab, in parts on several threads if it is large enough; return False if stopped.

        Returns or raises only after every thread has ended, so that nothing is zeroed once it is published.
        """
        num_parts = max(1, min(self._num_threads, slab.nbytes // _MIN_PART_NBYTES))
        part_nbytes = round_up(-(-slab.nbytes // num_parts), TOUCH_NBYTES)
        parts = [
            (slab.offset + start, min(part_nbytes, slab.nbytes - start)) for start in range(0, slab.nbytes, part_nbytes)
        ]
        if len(parts) == 1:
            return self._memory.touch(slab.offset, slab.nbytes, self._stop.is_set)
        return self._touch_parts(parts)

    def _touch_parts(self, parts: Sequence[tuple[int, int]]) -> bool:
        outcomes: list[bool | Exception] = []

        def touch(offset: int, nbytes: int) -> None:
            try:
                outcomes.append(self._memory.touch(offset, nbytes, self._stop.is_set))
            except Exception as error:
                outcomes.append(error)

        own = [parts[0]]
        threads = []
        for part in parts[1:]:
            try:
                threads.append(self.start(touch, part))
            except NoRoomError:
                own.append(part)
        for part in own:
            touch(*part)
        for thread in threads:
            while thread.is_alive():  # it ends: it does nothing but write zeros
                thread.join(1.0)
            self._threads.remove(thread)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return len(outcomes) == len(parts) and all(outcomes)
