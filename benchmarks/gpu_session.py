"""Does everything that needs a GPU work and how fast is it? One session: versions, bytes, tests, all benchmarks.

Each part runs in a process of its own, with a time limit and a watchdog that prints the stacks of what it kills; a part
that fails stops nothing. Tables go to a folder as soon as they are found: one Markdown file a benchmark, `results.json`
with all figures, `session.log` with all output. A summary of under 10,000 characters is printed last.

    python benchmarks/gpu_session.py --out FOLDER [--budget-s 540] [--only copies,overlap] [--quick]

Without --out it lists its parts and ends. `src` and `tests` of this checkout need not be installed; numpy, blake3,
xxhash, pytest 9, torch, Triton and the CUDA bindings have to be.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
FASTEST_PART_S = 8.0
"""What any part needs at least; one with less time is left out."""
DUMP_S = 4.0
SUMMARY_CHARACTERS = 9800
PYTEST = (
    *("-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--tb=short", "--durations=5", "-p", "no:cacheprovider"),
    *("-o", "faulthandler_timeout=150"),
)


@dataclass(frozen=True)
class Part:
    """One part of a session: `expected_s` on an H200 host, `limit_s` when it is killed."""

    name: str
    command: tuple[str, ...]
    expected_s: int
    limit_s: int
    by_default: bool = True


def _benchmark(name: str, expected_s: int, limit_s: int, *options: str) -> Part:
    command = (str(BENCHMARKS / f"cuda_{name.replace('-', '_')}.py"), *options)
    return Part(name, command, expected_s, limit_s)


THIS = str(Path(__file__).resolve())
GPU_TESTS = "tests/gpu"
PARTS = (
    Part("versions", (THIS, "--child", "versions"), 12, 40),
    Part("bytes", (THIS, "--child", "bytes"), 12, 60),
    Part(
        "tests",
        (
            *PYTEST,
            *(
                f"{GPU_TESTS}/test_{name}.py"
                for name in ("device_contract", "byte_equality", "reading_worker", "ordering", "calibration", "capture")
            ),
        ),
        100,
        200,
    ),
    Part(
        "tests-faults",
        (*PYTEST, *(f"{GPU_TESTS}/test_{name}.py" for name in ("bounded_end", "two_processes", "sanitizer"))),
        165,
        280,
    ),
    Part("bench-copies", ("-m", "kvmoor", "bench", "copies"), 8, 40),
    _benchmark("copies", 45, 120),
    _benchmark("beside-work", 45, 100),
    _benchmark("overlap", 20, 60),
    _benchmark("bounded-end", 60, 140),
    _benchmark("page-locking", 125, 220),
    Part("copies-sweep", (str(BENCHMARKS / "cuda_copies.py"), "--sweep"), 50, 120, by_default=False),
    Part("beside-work-sweep", (str(BENCHMARKS / "cuda_beside_work.py"), "--sweep"), 45, 100, by_default=False),
)


@dataclass
class Outcome:
    """How a part went."""

    part: Part
    verdict: str
    seconds: float = 0.0
    output: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Session:
    """Run parts one after the other within a time budget, and keep what they find."""

    def __init__(self, out: Path, budget_s: float, *, quick: bool) -> None:
        self._out = out
        self._deadline = time.monotonic() + budget_s
        self._quick = quick
        self.outcomes: list[Outcome] = []
        out.mkdir(parents=True, exist_ok=True)
        self._log = out / "session.log"
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            # Plugins of the environment are not the project's: some warn, and warnings are errors in its tests.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }

    def run(self, part: Part) -> None:
        """Run a part to its end, its limit or the end of the budget."""
        left_s = self._deadline - time.monotonic()
        if left_s < FASTEST_PART_S:
            self._note(Outcome(part, f"left out: {left_s:.0f} s of the budget left"))
            return
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder)
            command = [sys.executable, "-X", "faulthandler", *part.command]
            if part.command[0].startswith(str(BENCHMARKS / "cuda_")):
                command += ["--out", str(found), *(["--quick"] if self._quick else [])]
            begin = time.monotonic()
            verdict, output = self._run_process(command, min(part.limit_s, left_s - 2))
            outcome = Outcome(part, verdict, time.monotonic() - begin, output)
            for table in found.glob("*.md"):
                shutil.copy(table, self._out)
            for figures in found.glob("*.json"):
                outcome.figures = json.loads(figures.read_text())
            if part.command[0].startswith(str(BENCHMARKS / "cuda_")) and not outcome.figures and verdict == "ok":
                outcome.verdict = "found nothing"
        self._note(outcome)

    def _run_process(self, command: Sequence[str], limit_s: float) -> tuple[str, str]:
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=ROOT,
                process_group=0,  # so that what it started ends with it
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                process.send_signal(signal.SIGABRT)  # faulthandler prints where every thread is
                with suppress(subprocess.TimeoutExpired):
                    process.wait(DUMP_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            output = printed.read()
        return (f"killed after {limit_s:.0f} s" if code is None else "ok" if code == 0 else f"exit code {code}"), output

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        line = f"[{outcome.part.name}] {outcome.verdict}, {outcome.seconds:.0f} s"
        print(line, flush=True)
        with self._log.open("a") as log:
            log.write(f"\n{'=' * 100}\n{line}\n{' '.join(outcome.part.command)}\n{'=' * 100}\n{outcome.output}")
        figures = {each.part.name: each.figures for each in self.outcomes if each.figures}
        (self._out / "results.json").write_text(json.dumps(figures, indent=1) + "\n")

    def summary(self) -> str:
        """Return what happened, shortest first: parts, targets, failed tests, ends of what went wrong."""
        lines = ["", "part            seconds  expected  verdict"]
        lines += [
            f"{each.part.name:15} {each.seconds:7.0f}  {each.part.expected_s:8}  {each.verdict}"
            for each in self.outcomes
        ]
        lines += ["", "targets"]
        for each in self.outcomes:
            for target in each.figures.get("targets", ()):
                sign = ">=" if target["at_least"] else "<="
                verdict = "met   " if target["met"] else "MISSED"
                what = f"{each.part.name}: {target['what']}"
                lines.append(f"{verdict} {what}: {target['found']:.4g} {target['unit']} ({sign} {target['limit']:g})")
        lines += ["", "tests"]
        for each in self.outcomes:
            if each.part.name.startswith("tests"):
                short = [line for line in each.output.splitlines() if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
                lines += [line[:300] for line in short[:25]]
                lines += [line for line in each.output.splitlines()[-1:] if " in " in line]
            if each.part.name in ("versions", "bytes"):
                lines[1:1] = [line[:500] for line in each.output.splitlines()[-6:]]
        text = "\n".join(lines)
        for each in self.outcomes:
            if each.verdict != "ok" and each.output:
                room = SUMMARY_CHARACTERS - len(text) - 100
                if room < 300:
                    break
                text += f"\n\nthe end of [{each.part.name}]\n{each.output[-min(room, 1500) :]}"
        return text[:SUMMARY_CHARACTERS]


def print_versions() -> None:
    """Print hardware and versions."""
    from cuda_parts.bench_gpu import describe_machine, open_gpu  # noqa: PLC0415 - imports numpy and kvmoor

    gpu = open_gpu()
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(describe_machine(gpu))
    print(f"{memory}; huge pages: {huge_pages.read_text().strip() if huge_pages.exists() else 'unknown'}")
    free, total = gpu.torch.cuda.mem_get_info()
    print(f"GPU memory: {free / 1e9:.1f} of {total / 1e9:.1f} GB free; {gpu.num_multiprocessors} multiprocessors")


def check_bytes() -> None:
    """Store and load random blocks of a few layouts and compare every byte."""
    from cuda_parts.bench_gpu import WAIT_S, open_gpu, time_job  # noqa: PLC0415 - as above
    from cuda_parts.paged_copies import KIB, MIB, PagedCopies  # noqa: PLC0415

    from kvmoor.devices.device import Direction  # noqa: PLC0415

    gpu = open_gpu()
    device = gpu.open_device()
    print(f"{device.name}, registrar: {device.registrar.name}, NUMA node {device.numa_node}")
    for page_nbytes in (512, 4 * KIB, 20 * KIB, 64 * KIB, 2 * MIB):
        with PagedCopies(gpu, device, page_nbytes, nbytes=128 * MIB) as paged:
            for direction in Direction:
                queue = device.open_copy_queue(f"{direction.value} {page_nbytes}", direction)
                time_job(queue, paged.copies[direction], 1)
                times = time_job(queue, paged.copies[direction], 2)
                speed = paged.nbytes / times.seen_s / 1e9
                print(f"pages of {page_nbytes} bytes, {direction.value}: {speed:.1f} GB/s", end="; ")
                assert queue.close(WAIT_S)
            paged.assert_right()
            print("all bytes right")
    assert device.close(WAIT_S)


def list_parts() -> None:
    """Print what a session would do."""
    print(f"{(__doc__ or '').splitlines()[0]}\n\npart            expected  at most  by default")
    for part in PARTS:
        print(f"{part.name:15} {part.expected_s:6} s {part.limit_s:6} s  {'yes' if part.by_default else 'no'}")
    print(f"{sum(part.expected_s for part in PARTS if part.by_default)} s in all; run it with --out FOLDER")


def main() -> int:
    """Run the parts and print the summary; exit 1 if one of them went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for tables, figures and the log")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all parts together (default 540)")
    parser.add_argument("--only", default="", help="names of parts, separated by commas, in the order to run them")
    parser.add_argument("--quick", action="store_true", help="benchmarks measure next to nothing")
    parser.add_argument("--child", choices=["versions", "bytes"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        {"versions": print_versions, "bytes": check_bytes}[options.child]()
        return 0
    if options.out is None:
        list_parts()
        return 0
    by_name = {part.name: part for part in PARTS}
    names = [name for name in options.only.split(",") if name] or [part.name for part in PARTS if part.by_default]
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"no part is called {', '.join(unknown)}: there are {', '.join(by_name)}")
    session = Session(options.out, options.budget_s, quick=options.quick)
    for name in names:
        session.run(by_name[name])
    print(session.summary(), flush=True)
    return int(any(outcome.verdict != "ok" for outcome in session.outcomes))


if __name__ == "__main__":
    sys.exit(main())
