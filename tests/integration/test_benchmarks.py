"""The benchmarks run, so that they cannot rot; their figures are not looked at here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from child_processes import child_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def start(script: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in an interpreter of its own to its end."""
    return subprocess.run(
        [sys.executable, *options, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env=child_environment(),
    )


def run(script: str, *arguments: str) -> str:
    """Return what a benchmark prints that ends well, without a word on stderr and without a warning."""
    ended = start(script, *arguments, options=("-W", "error"))
    assert (0, "") == (ended.returncode, ended.stderr)
    return ended.stdout


def test_the_host_copies_benchmark_runs() -> None:
    """It prints its question, hardware and versions with one line for every case."""
    lines = run("host_copies.py", "--quick", "--runs", "1").splitlines()

    assert "How fast does a CpuDevice copy" in lines[0]
    assert "numpy" in lines[1]
    assert ["one", "scattered"] == [line.split()[3] for line in lines[4:]]


def test_the_host_copies_benchmark_speaks_json() -> None:
    """With --json it prints one object with a record for every case, speeds above zero."""
    report = json.loads(run("host_copies.py", "--quick", "--runs", "1", "--json"))

    assert {"question", "machine", "unit", "results"} == report.keys()
    assert 2 == len(report["results"])
    assert all(result[name] > 0 for result in report["results"] for name in ("store", "load", "memcpy"))


def test_the_bounded_close_benchmark_runs() -> None:
    """It closes beside everything it names by the deadline, finds nothing left behind, and prints one object."""
    ended = start("bounded_close.py", "--quick", "--json")  # it tells on stderr what is quarantined
    report = json.loads(ended.stdout)

    assert 0 == ended.returncode, ended.stderr
    assert 6 == len(report["closes"])
    assert 4 == sum(close["quarantined_nbytes"] > 0 for close in report["closes"])


def test_the_startup_benchmark_runs() -> None:
    """It prints its question, hardware and versions with one line for every way of getting memory."""
    lines = run("startup.py", "--quick").splitlines()

    assert "How soon can a large pool" in lines[0]
    assert "numpy" in lines[1]
    starts = ("arena, background", "arena, eager", "plain ", "plain, huge pages", "beside nothing")
    assert all(line.startswith(start) for start, line in zip(starts, lines[3:], strict=False))


def test_the_startup_benchmark_speaks_json() -> None:
    """With --json it prints one object: usable before mapped, and times of the loop beside each way."""
    report = json.loads(run("startup.py", "--quick", "--json"))

    assert 4 == len(report["results"])
    assert 0.9 * 64 * 2**20 < report["nbytes"] <= 64 * 2**20
    assert all(0 < each["usable_s"] <= each["mapped_s"] for each in report["results"])


@pytest.mark.parametrize(
    ("script", "figures"),
    [("index_at_scale.py", "references"), ("policies.py", "results"), ("device_and_host.py", "results")],
)
def test_the_benchmarks_of_the_index_speak_json(script: str, figures: str) -> None:
    """With --json they print one object with their question, the machine and figures."""
    report = json.loads(run(script, "--quick", "--json"))

    assert report["question"].endswith("?")
    assert "numpy" in report["machine"]
    assert report[figures]


@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("*.py")))
def test_every_benchmark_explains_itself(script: str) -> None:
    """Every benchmark opens with its question and prints it with --help."""
    assert "?" in run(script, "--help")
