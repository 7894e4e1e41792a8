"""The start-up benchmark runs, so that it cannot rot; its figures are not looked at here."""

import json
import subprocess
import sys
from pathlib import Path

from child_processes import child_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "startup.py"


def run(*arguments: str) -> str:
    """Run the benchmark in an interpreter of its own and return what it prints."""
    command = [sys.executable, "-W", "error", str(SCRIPT), *arguments]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env=child_environment(),
    )
    assert (0, "") == (ended.returncode, ended.stderr)
    return ended.stdout


def test_the_startup_benchmark_runs() -> None:
    """It prints its question, hardware and versions with one line for every way of getting memory."""
    lines = run("--quick").splitlines()

    assert "How soon can a large pool" in lines[0]
    assert "NumPy" in lines[1]
    starts = ("arena, background", "arena, eager", "plain ", "plain, huge pages", "beside nothing")
    assert all(line.startswith(start) for start, line in zip(starts, lines[3:], strict=False))


def test_the_startup_benchmark_speaks_json() -> None:
    """With --json it prints one object: usable before mapped, and times of the loop beside each way."""
    report = json.loads(run("--quick", "--json"))

    assert 4 == len(report["results"])
    assert 0.9 * 64 * 2**20 < report["nbytes"] <= 64 * 2**20
    assert all(0 < each["usable_s"] <= each["mapped_s"] for each in report["results"])
