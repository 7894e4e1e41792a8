"""What does the vLLM plugin cost and bring on a GPU, against no offloading, vLLM's own, and the link?

Engines are started one after the other, each in a process of its own with a limit: without offloading, with vLLM's
own offloading, and with kvmoor, in two layouts of KV caches, with CUDA graphs. Each answers the same prompts four times
with a device cache that is too small for them, then serves steady requests beside returning and new prompts, and ends.

    python benchmarks/vllm_gpu.py --dry-run                                      what it would do, and for how long
    python benchmarks/vllm_gpu.py --shapes big --out FOLDER [--budget-s 570]
    python benchmarks/vllm_gpu.py --shapes small-pages,answers --out FOLDER
    python benchmarks/vllm_gpu.py --device cpu --shapes big,answers --out FOLDER    all steps, tiny, without a GPU

The folder gets `results.md` and `results.json` after each engine, and `engines.log`. vLLM 0.33, torch and kvmoor's
requirements have to be installed; models are written here, no network is used. Shapes: big (8B, pages of 64 KiB),
small-pages (a rank of 70B at tensor parallel 8, pages of 8 KiB), answers (small, random weights: answers are compared,
loads fail, requests preempt each other, the engine sleeps).
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from print_parts.machine import processor
from vllm_gpu_parts.engines import ENVIRONMENT
from vllm_gpu_parts.findings import Findings
from vllm_gpu_parts.plan import LINK_S, EngineRun, batches, describe_plan, plan_runs
from vllm_gpu_parts.processes import GroupProcess
from vllm_gpu_parts.shapes import SHAPES
from vllm_gpu_parts.tables import describe, faults_of

ROOT = Path(__file__).resolve().parents[1]
THIS = Path(__file__).resolve()
SUMMARY_CHARACTERS = 11_000
NUM_FAILING_LOADS = 3
_COMPILED = re.compile(r"compilation: ([0-9.]+) s")
_LAYOUT = re.compile(r"Using (\w+) KV cache layout")
_NOTED = ("kv cache layout", "host memory:", "a ring of", "init engine", "graph capturing", "kvmoor")


class Session:
    """Run the engines of a plan one after the other within a budget, and keep what they find."""

    def __init__(self, options: argparse.Namespace, runs: list[EngineRun], scratch: Path) -> None:
        self._options = options
        self._runs = runs
        self._scratch = scratch
        self._out: Path = options.out
        self._out.mkdir(parents=True, exist_ok=True)
        self._log = self._out / "engines.log"
        self._deadline = time.monotonic() + options.budget_s
        self._link: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **ENVIRONMENT,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONFAULTHANDLER": "1",
        }
        self._environment.setdefault("VLLM_CACHE_ROOT", str(scratch / "vllm_cache"))

    def run(self) -> None:
        """Measure the link, then run every engine for which there is time."""
        self._measure_link()
        begun: dict[int, GroupProcess] = {}
        all_batches = batches(list(enumerate(self._runs)), self._options.device)
        try:
            for at, batch in enumerate(all_batches):
                going: list[tuple[int, EngineRun, GroupProcess, float, float]] = []
                for number, run in batch:
                    left_s = self._deadline - time.monotonic()
                    if reason := self._why_not(run, left_s):
                        self.left_out.append(f"{run.name}: {reason}")
                        print(f"[{run.name}] left out: {reason}", flush=True)
                        continue
                    process = begun.pop(number, None) or self._start(number, run)
                    limit_s = min(run.limit_s, left_s - 2)
                    process.tell(f"go {limit_s - 5:.1f}")
                    going.append((number, run, process, time.monotonic(), limit_s))
                # The next ones import vLLM meanwhile, which takes less time than an engine does to load its model.
                if going:
                    for number, run in all_batches[at + 1] if at + 1 < len(all_batches) else ():
                        if not self._why_not(run, self._deadline - time.monotonic()):
                            begun[number] = self._start(number, run)
                for number, run, process, begin, limit_s in going:
                    verdict = process.wait(begin + limit_s - time.monotonic())
                    self._note(number, run, verdict, time.monotonic() - begin, process.ended_at)
        finally:
            for process in begun.values():
                process.close()

    def _why_not(self, run: EngineRun, left_s: float) -> str:
        """Say why an engine is left out, with so much time left; empty if it is not."""
        if reason := run.setup.why_not(self._options.device):
            return reason
        if left_s < 0.7 * run.expected_s:
            return f"{left_s:.0f} s of the budget left, {run.expected_s} s expected"
        return ""

    def _measure_link(self) -> None:
        found = self._scratch / "link.json"
        process = self._launch("--child-link", str(found), self._options.device, environment=self._environment)
        verdict = process.wait(3 * LINK_S)
        self._link = Findings.read(found)
        print(f"[link] {verdict}: {self._link}", flush=True)

    def _start(self, number: int, run: EngineRun) -> GroupProcess:
        model = self._scratch / run.shape.name
        run.shape.write_model(model)
        job = {
            "shape": asdict(run.shape),
            "setup": asdict(run.setup),
            "kind": run.kind,
            "device": self._options.device,
            "model": str(model),
            "found": str(self._found(number)),
            "num_passes": run.num_passes,
            "beside_s": self._options.beside_s,
            "num_failing_loads": NUM_FAILING_LOADS,
        }
        job_file = self._scratch / f"job-{number}.json"
        job_file.write_text(json.dumps(job))
        with self._log.open("a") as log:
            log.write(f"\n{'=' * 100}\n[{run.name}] begins to import at {time.strftime('%H:%M:%S')}\n{'=' * 100}\n")
        environment = run.setup.environment(self._options.device, one_process=run.kind == "answers")
        if run.kind == "answers" and self._options.batch_invariant:
            environment["VLLM_BATCH_INVARIANT"] = "1"
        log = self._scratch / f"engine-{number}.log"
        return self._launch("--child", str(job_file), environment={**self._environment, **environment}, log=log)

    def _launch(self, *arguments: str, environment: Mapping[str, str], log: Path | None = None) -> GroupProcess:
        command = [sys.executable, str(THIS), *arguments]
        return GroupProcess(command, environment=environment, log=log or self._log, folder=ROOT)

    def _found(self, number: int) -> Path:
        return self._scratch / f"found-{number}.json"

    def _note(self, number: int, run: EngineRun, verdict: str, seconds: float, ended_at: float) -> None:
        text = (self._scratch / f"engine-{number}.log").read_text(errors="replace")
        with self._log.open("a") as log:
            log.write(f"\n{'=' * 100}\n[{run.name}] {verdict}, {seconds:.0f} s\n{'=' * 100}\n{text}")
        found = Findings.read(self._found(number))
        if "shut_down_at" in found:
            found["exit_s"] = ended_at - found["shut_down_at"]
        if compiled := _COMPILED.findall(text):
            found["compile_s"] = float(compiled[-1])
        if layouts := _LAYOUT.findall(text):
            found["kv_layout"] = layouts[-1]  # the frontend does not always learn of it
        about = {
            "name": run.name,
            "shape": run.shape.name,
            "shape_text": run.shape.describe(),
            "kind": run.kind,
            "engine": run.setup.name,
            "offloading": run.setup.offloading,
            "eager": run.setup.eager,
            "verdict": verdict,
            "seconds": seconds,
        }
        self.results.append(about | found)
        print(f"[{run.name}] {verdict}, {seconds:.0f} s (expected {run.expected_s})", flush=True)
        if verdict != "ok":
            print(text[-1500:], flush=True)
        lines = [line[:220] for line in text.splitlines() if any(noted in line.lower() for noted in _NOTED)]
        about_log = "\n".join(dict.fromkeys(lines[:14]))
        with self._log.open("a") as log:
            log.write(f"\n[{run.name}] of note:\n{about_log}\n")
        self._save()

    def _save(self) -> None:
        (self._out / "results.md").write_text(self.text())
        (self._out / "results.json").write_text(json.dumps({"link": self._link, "engines": self.results}) + "\n")

    def text(self) -> str:
        """Return all tables."""
        versions = {each.get("vllm") for each in self.results} - {None}
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        setup = (
            f"{self._link.get('gpu')}, {processor()}, {len(os.sched_getaffinity(0))} cores, Linux "
            f"{platform.release()}, Python {platform.python_version()}, torch {self._link.get('torch')}, vLLM "
            f"{', '.join(map(str, versions))}; steady phases of {self._options.beside_s:g} s; {when} UTC"
        )
        question = (__doc__ or "").splitlines()[0]
        left_out = "".join(f"\n- left out: {each}" for each in self.left_out)
        return describe(self.results, self._link, f"# {question}\n\n{setup}\n{left_out}")


def main() -> int:
    """Print the plan, run it, print all tables; exit 1 if an engine failed or an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for tables, figures and the log")
    parser.add_argument("--shapes", default="big,small-pages,answers", help="names, separated by commas")
    parser.add_argument("--engines", default="", help="only these of none,native,kvmoor")
    parser.add_argument("--layouts", default="", help="of the timed engines only those with LBHNC or BLHNC")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny shapes, to see that it runs"
    )
    parser.add_argument("--budget-s", type=float, default=570.0, help="seconds for all (default 570)")
    parser.add_argument("--beside-s", type=float, default=2.5, help="seconds of each phase of steady requests")
    parser.add_argument("--batch-invariant", action="store_true", help="answers: VLLM_BATCH_INVARIANT=1")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child-link", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        from vllm_gpu_parts.child import run_child  # noqa: PLC0415 - for children only

        run_child(options.child)
        return 0
    if options.child_link:
        from vllm_gpu_parts.link import measure_link  # noqa: PLC0415 - as above

        measure_link(Path(options.child_link[0]), options.child_link[1])
        return 0
    names = options.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no shape is called {', '.join(unknown)}: there are {', '.join(SHAPES)}")
    only, layouts = ([name for name in given.split(",") if name] for given in (options.engines, options.layouts))
    runs = plan_runs(names, only=only, layouts=layouts, device=options.device, beside_s=options.beside_s)
    print(describe_plan(runs, options.device, options.budget_s), flush=True)
    if options.dry_run or options.out is None:
        print("nothing was run: " + ("--dry-run" if options.dry_run else "give --out FOLDER"))
        return 0
    with tempfile.TemporaryDirectory(prefix="vllm-gpu-") as scratch:
        session = Session(options, runs, Path(scratch))
        session.run()
        faults = faults_of(session.results, exact=options.device == "cpu")
        faults += [] if session.results else ["no engine ran"]
        verdict = "RESULT OK" if not faults else "RESULT FAILED: " + "; ".join(faults)
        text = f"{session.text()}\n{verdict}\n"
        (options.out / "results.md").write_text(text)
        print(text[-SUMMARY_CHARACTERS:], flush=True)
    return int(bool(faults))


if __name__ == "__main__":  # vLLM starts processes by importing this file
    sys.exit(main())
