"""What a run does, in which order, and how long each engine is expected to take on an H200 host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_gpu_parts.engines import Device, EngineSetup, Offloading
from vllm_gpu_parts.shapes import SHAPES, Shape, tiny

LINK_S = 20
_IMPORT_S = 15
_START_S = 45
"""An engine with CUDA graphs, once its code was compiled (30-35 s without, 78 s with compilation: H200)."""
_COMPILE_S = {"big": 35, "small-pages": 70, "answers": 25}
"""More for the first engine with a layout of KV caches: the name of the layout is part of the key of compiled code."""
_END_S = 8


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine of a plan. `kind`: whether it is timed, or its answers are looked at."""

    shape: Shape
    setup: EngineSetup
    kind: Literal["times", "answers"]
    expected_s: int
    num_passes: int = 4

    @property
    def limit_s(self) -> float:
        """Return when it is killed."""
        return 1.5 * self.expected_s + 40

    @property
    def name(self) -> str:
        """Name it in tables and logs."""
        return f"{self.shape.name}: {self.setup.name}"


def plan_runs(
    shape_names: Sequence[str], *, only: Sequence[str], layouts: Sequence[str], device: Device, beside_s: float
) -> list[EngineRun]:
    """Return the engines of the shapes, the most important first.

    `only` names some of ``none,native,kvmoor``, and `layouts` those of the engines that are timed; empty: all.
    """
    runs = []
    for name in shape_names:
        shape = tiny(SHAPES[name]) if device == "cpu" else SHAPES[name]
        runs += _answers(shape) if name == "answers" else _times(shape, beside_s)
    return [
        run
        for run in runs
        if (not only or run.setup.offloading in only)
        and (not layouts or run.kind == "answers" or run.setup.layout in layouts)
    ]


def _times(shape: Shape, beside_s: float) -> list[EngineRun]:
    recompute_s = shape.num_prompts * shape.prompt_tokens / 25_000  # an 8B model, as measured; answers included
    order: tuple[tuple[Offloading, str], ...] = (
        ("none", "LBHNC"),
        ("native", "LBHNC"),
        ("kvmoor", "LBHNC"),
        ("kvmoor", "BLHNC"),
        ("native", "BLHNC"),
    )
    runs = []
    compiled: set[str] = set()
    for offloading, layout in order:
        compile_s = 0 if layout in compiled else _COMPILE_S[shape.name]
        compiled.add(layout)
        passes_s = 4 * recompute_s if offloading == "none" else recompute_s + 5
        pool_s = {"none": 0, "native": 20, "kvmoor": 8}[offloading]
        seconds = _IMPORT_S + _START_S + compile_s + pool_s + passes_s + 4 * beside_s + _END_S
        runs.append(EngineRun(shape, EngineSetup(offloading, layout), "times", round(seconds)))
    return runs


def _answers(shape: Shape) -> list[EngineRun]:
    start_s = _IMPORT_S + 35 + _END_S
    setups = (
        (EngineSetup("none"), start_s + _COMPILE_S["answers"] + 12),
        (EngineSetup("kvmoor"), start_s + 15),
        (EngineSetup("kvmoor", eager=True), start_s + 5),
        (EngineSetup("none", eager=True), start_s + 5),
        (EngineSetup("kvmoor", can_sleep=True), start_s + 15),
    )
    return [EngineRun(shape, setup, "answers", seconds) for setup, seconds in setups]


def batches(runs: Sequence[tuple[int, EngineRun]], device: Device) -> list[list[tuple[int, EngineRun]]]:
    """Return which engines run at the same time: on a GPU those whose answers are looked at, unless they sleep.

    The sleep of vLLM asserts that nobody else takes memory of the GPU meanwhile.
    """
    found: list[list[tuple[int, EngineRun]]] = []
    for number, run in runs:
        together = device == "cuda" and run.kind == "answers" and not run.setup.can_sleep
        if together and found and (last := found[-1][-1][1]).kind == "answers" and not last.setup.can_sleep:
            found[-1].append((number, run))
        else:
            found.append([(number, run)])
    return found


def describe_plan(runs: Sequence[EngineRun], device: Device, budget_s: float) -> str:
    """Return the plan as text: engines, expected seconds, and why some are left out."""
    lines = [f"{'engine':36} expected  killed after", f"{'link':36} {LINK_S:6} s"]
    running = [(number, run) for number, run in enumerate(runs) if not run.setup.why_not(device)]
    total = LINK_S + sum(max(run.expected_s for _, run in batch) for batch in batches(running, device))
    total -= _IMPORT_S * max(0, len(batches(running, device)) - 1)  # all but the first import beside another
    for run in runs:
        reason = run.setup.why_not(device)
        ends = f"left out: {reason}" if reason else f"{run.expected_s:6} s  {run.limit_s:10.0f} s"
        lines.append(f"{run.name:36} {ends}")
    shapes = {run.shape.name: run.shape.describe() for run in runs}
    return "\n".join([*shapes.values(), "", *lines, f"{total} s in all, {budget_s:g} s allowed"])
