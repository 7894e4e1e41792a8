"""compute-sanitizer finds nothing in small jobs of every kind."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

WATCHDOG_S = 100.0


def find_sanitizer() -> str:
    """Return the path of the tool, or skip."""
    for folder in ("", "/usr/local/cuda/bin/", "/usr/local/cuda/compute-sanitizer/"):
        if found := shutil.which(f"{folder}compute-sanitizer"):
            return found
    pytest.skip("compute-sanitizer is not installed")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_small_copies_are_clean(run_child: Callable[..., dict[str, Any]], tool: str) -> None:
    """Copies of odd pages between exact allocations read and write nothing else, and no two threads race."""
    result = run_child(
        "small_copies.py",
        watchdog_s=WATCHDOG_S,
        wrapper=(find_sanitizer(), "--tool", tool, "--error-exitcode", "99"),
        fails=True,
    )

    output = result["output"]
    if "Device not supported" in output or "not supported on this" in output:
        pytest.skip(f"compute-sanitizer does not work on this machine: {output[:300]}")
    assert result["exit_code"] == 0, output[-4000:]
    assert "ERROR SUMMARY: 0 errors" in output or "RACECHECK SUMMARY: 0 hazards" in output, output[-4000:]
    assert result["wrong"] == []
    assert result["closed"]
