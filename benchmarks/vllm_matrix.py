"""Does vLLM answer alike with offloading and without it, case by case, in every version that the plugin serves?

Runs the cases of ``tests/vllm/scripts/one_process.py`` on real engines on the CPU, once for each version: the one that
is installed, and others that lie in folders beside it, as ``make test-vllm VERSIONS=...`` puts them there.

    equal       the answers are those of the case it is compared with, or the case found itself in order
    differs     they are not; for a control, whose loads bring changed bytes, that is what has to be
    -           this version does not have what is tried
    error       an engine did not live to the end of the case

    .venv-vllm/bin/python benchmarks/vllm_matrix.py [--versions 0.30.0 0.31.0 0.32.0] [--overlays FOLDER] [--out FILE]
"""

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from print_parts.machine import machine
from print_parts.tables import print_and_keep

import kvmoor

QUESTION = "Does vLLM answer alike with offloading and without it, case by case, in every version?"
ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "vllm" / "scripts"
TIMEOUT_S = 3600.0
FROM_GPU_WHEEL = "0.33"
"""There is no build of this version for CPUs: its folder holds the Python files of the one for GPUs."""

LEGEND = (
    "- equal: greedy answers in float32, token by token, are those of the case named beside it; one that is compared",
    "  with itself asks again at its end, and nothing may be left in flight: jobs, leases, stores, copies.",
    "- `changed_bytes` changes the sign of all numbers in host memory before each load; the other rows rest on loads.",
    "- -: that version does not have what is tried: loads within a step, sleep that connectors are told of, chunks of",
    "  several blocks with sliding windows (refused below 0.33), guessed tokens on the CPU with 0.30.",
    "- `sleep`: the worker's part, which does nothing on a CPU, is stood in for by a function that calls the connector",
    "  where the worker of a GPU does, and overwrites the KV caches.",
)


@dataclass(frozen=True)
class Column:
    """What one version found, by case, and how long it took."""

    version: str
    found: dict[str, Any]
    seconds: float


def run_version(version: str, overlay: Path | None, models: Path, cases: list[str]) -> Column:
    """Run all cases, or some, in a process of their own; one that fails does not end the others."""
    environment = dict(os.environ)
    folders = [str(overlay)] if overlay else []
    environment["PYTHONPATH"] = os.pathsep.join([*folders, str(Path(kvmoor.__file__).parents[1]), str(SCRIPTS)])
    if overlay and version.startswith(FROM_GPU_WHEEL):
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    started = time.perf_counter()
    command = [sys.executable, str(SCRIPTS / "one_process.py"), str(models), "--all", *cases]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    seconds = time.perf_counter() - started
    if ended.returncode != 0:
        raise SystemExit(f"vLLM {version} did not run: {ended.stderr[-3000:]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    for name, case in found.items():
        if isinstance(case, dict) and "error" in case:
            print(f"vLLM {found['version']}, {name}:\n{case['error']}", file=sys.stderr)
    return Column(found["version"], found, seconds)


def judge(found: dict[str, Any], case: str) -> str:
    """Return one cell of the table."""
    if case not in found:
        return "-"
    if "error" in found[case]:
        return "error"
    reference = found["references"][case]
    if not reference:
        is_equal = bool(found[case].get("same", True))
    else:
        is_equal = found[case]["answers"] == found[reference].get("answers")
    return "equal" if is_equal and _is_idle(found[case]) else "differs"


def _is_idle(case: dict[str, Any]) -> bool:
    """Say whether nothing was left in flight, where a case looked."""
    return not any(case.get("left", {}).values())


def as_table(columns: list[Column]) -> list[str]:
    """Return the table in Markdown; cases that only others are compared with are left out."""
    names = list(dict.fromkeys(name for column in columns for name in column.found["references"]))
    references = {each for column in columns for each in column.found["references"].values()}
    width = max(map(len, names)) + len(" (control)")
    marks = {column.version: "*" if column.version.startswith(FROM_GPU_WHEEL) else "" for column in columns}
    lines = [
        f"| {'case':{width}} | {'compared with':13} | "
        + " | ".join(f"{column.version + marks[column.version]:8}" for column in columns)
        + " |",
        f"| {'-' * width} | {'-' * 13} | " + " | ".join("-" * 8 for _ in columns) + " |",
    ]
    for name in names:
        if name in references:
            continue
        known = next(column.found for column in columns if name in column.found)
        label = f"{name} (control)" if name in known["controls"] else name
        cells = [f"{judge(column.found, name):8}" for column in columns]
        lines.append(f"| {label:{width}} | {known['references'][name] or 'itself':13} | {' | '.join(cells)} |")
    return lines


def verdict(columns: list[Column]) -> tuple[bool, str]:
    """Say whether every case is as it has to be."""
    wrong, num_cells = [], 0
    for column in columns:
        for name in column.found["references"].keys() - set(column.found["references"].values()):
            wanted = "differs" if name in column.found["controls"] else "equal"
            num_cells += 1
            if (cell := judge(column.found, name)) != wanted:
                wrong.append(f"{name} ({column.version}: {cell})")
    if wrong:
        return False, f"NOT as it has to be: {', '.join(sorted(wrong))}"
    return True, f"all {num_cells} runs of cases as they have to be: equal, and the controls differ"


def described() -> str:
    """Describe what the table holds for."""
    import torch  # noqa: PLC0415 - only where vLLM is

    return f"{machine(kvmoor, torch)}; {dt.datetime.now(tz=dt.UTC):%Y-%m-%d}"


def main() -> int:
    """Run every version and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=[], help="default: the installed one and all folders")
    parser.add_argument("--overlays", type=Path, default=Path(sys.prefix) / "overlays", help="a folder a version")
    parser.add_argument("--cases", nargs="+", default=[], help="default: all; name references too")
    parser.add_argument("--out", type=Path, help="also write the table there")
    parser.add_argument("--json", type=Path, help="write there what every case found, after each version")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print(f"{QUESTION}\nvLLM is not installed in this environment: nothing was measured")
        return 0
    installed = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    beside = sorted(folder.name for folder in options.overlays.glob("*") if folder.is_dir())
    columns = []
    with tempfile.TemporaryDirectory() as models:
        for version in options.versions or sorted([*beside, installed]):
            overlay = None if version == installed else options.overlays / version
            if overlay is not None and not overlay.is_dir():
                raise SystemExit(f"vLLM {version} is not in {options.overlays}: install it there with pip --target")
            print(f"vLLM {version} ...", file=sys.stderr, flush=True)
            columns.append(run_version(version, overlay, Path(models), options.cases))
            if options.json:
                found = {column.version: column.found for column in columns}
                options.json.write_text(json.dumps(found), encoding="utf-8")
    is_right, conclusion = verdict(columns)
    seconds = ", ".join(f"{column.version} {column.seconds:.0f} s" for column in columns)
    text = [QUESTION, described(), "", *as_table(columns), ""]
    if any(column.version.startswith(FROM_GPU_WHEEL) for column in columns):
        text.append(
            f"\\* There is no build of {FROM_GPU_WHEEL} for CPUs: these are the Python files of the one for GPUs, on "
            f"the compiled parts of {installed}."
        )
    text += [f"Seconds with start: {seconds}.", "", conclusion, "", *LEGEND]
    print_and_keep(text, options.out)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
