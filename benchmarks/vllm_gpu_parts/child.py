"""The life of one engine in a process of its own: import, start, what is asked of it, shutdown, exit.

begun -> imported -> (waits for a line on stdin) -> ready -> pass 1 ... -> beside ... -> shut down -> gone
"""

import importlib
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_gpu_parts.engines import EngineSetup
from vllm_gpu_parts.findings import Findings
from vllm_gpu_parts.metrics import gpu_used_gb
from vllm_gpu_parts.served import ServedEngine, SteadyRequests
from vllm_gpu_parts.shapes import Shape

_REST_S = 0.3
"""Between passes, so that copies of the last one end."""
_SHUTDOWN_S = 10.0
"""What is left for the end when optional parts are left out."""


@dataclass(frozen=True)
class Life:
    """What one engine is and has to do. `left_s`: how much time it has yet; `script`: what its loads are to do."""

    job: dict[str, Any]
    shape: Shape
    setup: EngineSetup
    findings: Findings
    left_s: Callable[[], float]
    script: Any = None


def run_child(job_file: Path) -> None:
    """Do what the file says; findings go to the file that it names."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an engine that is aborted may hold 64 GB
    job = json.loads(job_file.read_text())
    findings = Findings(Path(job["found"]))
    begin = time.perf_counter()
    vllm = importlib.import_module("vllm")
    vllm.LLM  # noqa: B018 - vLLM loads its names when they are asked for
    findings.add(phase="imported", import_s=time.perf_counter() - begin, vllm=vllm.__version__)
    line = sys.stdin.readline().split()
    if line[:1] != ["go"]:
        return  # whoever started this has given up
    end = time.monotonic() + float(line[1])
    life = Life(job, Shape(**job["shape"]), EngineSetup(**job["setup"]), findings, lambda: end - time.monotonic())
    if job["kind"] == "answers" and life.setup.offloading == "kvmoor":
        from vllm_gpu_parts.faults import scripted_loads  # noqa: PLC0415 - imports vLLM

        with scripted_loads() as script:
            _live(replace(life, script=script))
    else:
        _live(life)


def _live(life: Life) -> None:
    job, shape, setup, findings = life.job, life.shape, life.setup, life.findings
    begin = time.perf_counter()
    shares_gpu = job["kind"] == "answers"
    options = setup.llm_options(shape, Path(job["model"]), job["device"], shares_gpu=shares_gpu)
    served = ServedEngine(options, shape)
    findings.add(phase="ready", ready_s=time.perf_counter() - begin, kv_layout=served.layout)
    findings.add(gpu_gb_at_ready=gpu_used_gb())
    if setup.offloading == "kvmoor":
        findings.add(**served.wait_ready(int(0.98 * shape.host_nbytes / shape.block_nbytes)))
    else:
        served.run_pass(shape.prompts(1, seed=5, num_tokens=2 * shape.tokens_per_block - 2), 1)
    if job["kind"] == "times":
        _time(served, life)
    else:
        _answer(served, life)
    findings.add(phase="shutting down", gpu_gb_at_end=gpu_used_gb())
    seconds = served.close()
    findings.add(phase="shut down", shutdown_s=seconds, shut_down_at=time.time())


def _time(served: ServedEngine, life: Life) -> None:
    """Ask the same prompts four times, then see how steady requests get on beside others."""
    shape, findings, beside_s = life.shape, life.findings, life.job["beside_s"]
    prompts = shape.prompts(shape.num_prompts, seed=7)
    passes: list[dict[str, Any]] = []
    for number in range(life.job["num_passes"]):
        if number > 1 and life.left_s() < _SHUTDOWN_S + passes[-1]["seconds"] + 4 * beside_s:
            findings.add(left_out=f"pass {number + 1} and later ones: {life.left_s():.0f} s left")
            break
        passes.append(served.run_pass(prompts, shape.answer_tokens))
        findings.add(phase=f"pass {number + 1}", passes=passes)
        time.sleep(_REST_S)
    if life.left_s() < _SHUTDOWN_S + 4.5 * beside_s:
        findings.add(left_out=f"steady requests: {life.left_s():.0f} s left")
        return
    phases = {
        "alone": None,
        "beside returning prompts": itertools.cycle(prompts),
        "beside new prompts": itertools.cycle(shape.prompts(48, seed=8)),
        "alone again": None,
    }
    beside: list[dict[str, Any]] = []
    with SteadyRequests(served, shape) as steady:
        for phase, visitors in phases.items():
            beside.append(steady.run(phase, beside_s, visitors))
            findings.add(phase=phase, beside=beside)


def _answer(served: ServedEngine, life: Life) -> None:
    """Ask prompts that come back, and requests that preempt each other; then let loads fail, and lie."""
    shape, findings = life.shape, life.findings
    prompts = shape.prompts(shape.num_prompts, seed=7)
    cases: dict[str, dict[str, Any]] = {}

    def ask(case: str, asked: list[list[int]], answer_tokens: int) -> None:
        cases[case] = served.run_pass(asked, answer_tokens)
        findings.add(phase=case, cases=cases)
        time.sleep(_REST_S)

    ask("first pass", prompts, shape.answer_tokens)
    ask("second pass", prompts, shape.answer_tokens)
    short = shape.prompt_tokens * 2 // 5
    ask("preempting", shape.prompts(16, seed=17, num_tokens=short), short)
    if life.script is None or life.left_s() < _SHUTDOWN_S:
        return
    if life.setup.can_sleep:
        served.llm.sleep(level=1)
        findings.add(phase="asleep")
        served.llm.wake_up()
        ask("after sleep", prompts, shape.answer_tokens)
        ask("after sleep, second pass", prompts, shape.answer_tokens)
        return
    life.script.fail = life.job["num_failing_loads"]
    ask("failing loads", prompts, shape.answer_tokens)
    findings.add(faults=life.script.num_faults)
    life.script.fail, life.script.lie = 0, True
    ask("loads that bring nothing (control)", prompts, shape.answer_tokens)
    life.script.lie = False
