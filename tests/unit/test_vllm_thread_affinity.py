"""Threads of the vLLM plugin run where the engine's own thread may not."""

import os
import threading

import pytest

from kvmoor.integrations.vllm.thread_affinity import threads_on_all_cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is all cores")
def test_a_thread_started_inside_may_run_on_every_core() -> None:
    """A thread that is bound to one core starts threads that are not, and stays bound itself."""
    everywhere = os.sched_getaffinity(0)
    found = {}

    def bound_to_one_core() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        with threads_on_all_cores():
            inner = threading.Thread(target=lambda: found.update(inside=os.sched_getaffinity(0)))
            inner.start()
            inner.join()
        found["after"] = os.sched_getaffinity(0)

    outer = threading.Thread(target=bound_to_one_core)
    outer.start()
    outer.join()

    assert everywhere <= found["inside"]
    assert {min(everywhere)} == found["after"]
