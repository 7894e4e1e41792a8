"""Closing ends by its deadline on a real GPU whatever hangs or breaks; each case in a process with a watchdog."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

DEADLINE_S = 2.0
SLACK_S = 0.5
"""What `close` may take beyond its deadline: seeing stop flags, on a machine that does other things too."""
EXIT_S = 2.0
WATCHDOG_S = 75.0

RunChild = Callable[..., dict[str, Any]]


def test_an_idle_offloader_gives_everything_back(run_child: RunChild) -> None:
    """With nothing wrong, close gives all back well before its deadline."""
    result = run_child("bounded_end.py", "idle", watchdog_s=WATCHDOG_S)

    assert result["graceful"], result
    assert result["seconds"] < DEADLINE_S
    assert result["quarantined_nbytes"] == 0


@pytest.mark.parametrize("case", ["hang-engine", "hang-store", "hang-load", "hang-many"])
def test_a_stream_that_never_finishes(run_child: RunChild, case: str) -> None:
    """Close returns by its deadline and quarantines what jobs behind a hung stream may touch; the process can end."""
    result = run_child("bounded_end.py", case, watchdog_s=WATCHDOG_S)

    assert result["seconds"] < DEADLINE_S + SLACK_S, result
    assert result["seconds_again"] < SLACK_S
    assert result["same_report"]
    assert result["seconds_to_exit"] < EXIT_S
    assert set(result["unproven_jobs"]) <= set(result["submitted"])
    if case == "hang-engine":  # nothing of ours is queued, and all of it is proven over
        assert result["unproven_jobs"] == []
    else:
        assert result["submitted"] == sorted(result["unproven_jobs"])
        assert result["quarantined_nbytes"] > 500e6
        assert "done" not in result["outcomes"][1:]


@pytest.mark.parametrize("case", ["trap", "trap-queued"])
def test_a_broken_context(run_child: RunChild, case: str) -> None:
    """After a kernel that broke the context nothing blocks: close returns, says why, and no job counts as done."""
    result = run_child("bounded_end.py", case, watchdog_s=WATCHDOG_S)

    assert result["seconds"] < DEADLINE_S + SLACK_S, result
    assert result["seconds_to_exit"] < EXIT_S
    assert result["broken"] != ""
    assert "done" not in result["outcomes"][1:], result


def test_no_gpu_memory_left(run_child: RunChild) -> None:
    """With the GPU's memory full, kvmoor copies all the same or names what it lacks, and works once there is room."""
    result = run_child("out_of_memory.py", "device", watchdog_s=WATCHDOG_S)

    assert result["small"] == "right" or "memory" in result["small"].lower(), result
    assert result["after"] == "right"


def test_no_gpu_memory_left_for_mappings(run_child: RunChild) -> None:
    """With no GPU memory for the mappings of a large arena, what is refused is staged, and no byte is wrong."""
    result = run_child("out_of_memory.py", "host", watchdog_s=WATCHDOG_S)

    assert result["large"] == "right" or "memory" in result["large"].lower(), result
    assert result["after"] == "right"


def test_more_staging_memory_than_there_is(run_child: RunChild) -> None:
    """Staging memory that cannot be had is refused, and nothing is broken by it."""
    result = run_child("out_of_memory.py", "staging", watchdog_s=WATCHDOG_S)

    assert result["error"] in ("NoRoomError", "CudaError"), result
    assert result["closed"]
    assert result["broken"] == ""
