"""Threads that may run on every core, started from one that may not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def threads_on_all_cores() -> Iterator[None]:
    """Let threads that are started inside run on every core this process may use at all.

    vLLM's CPU workers bind themselves to the cores they compute on, and a thread inherits that from the one that starts
    it: a copy would then wait for the very core that waits for the copy. Takes two system calls. Where affinity cannot
    be changed, it stays.
    """
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
