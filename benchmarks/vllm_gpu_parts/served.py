"""One engine that is asked: passes over prompts, and steps of steady requests beside visitors."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Self

from vllm_gpu_parts.metrics import Figures
from vllm_gpu_parts.shapes import Shape

_READY_TIMEOUT_S = 25.0
_DRAIN_TIMEOUT_S = 60.0
_STACKS_AFTER_S = 4.8
"""When an engine that does not end is aborted, to print its stacks: vLLM kills it after 5 s, and then nobody knows."""


class ServedEngine:
    """vLLM with a shape's model, in this process or beside it."""

    def __init__(self, options: dict[str, Any], shape: Shape) -> None:
        """Start it; returns once it can answer."""
        from vllm import LLM  # noqa: PLC0415 - takes 15 s, which is measured

        self._shape = shape
        self.llm = LLM(**options)
        self.config: Any = self.llm.llm_engine.vllm_config

    @property
    def layout(self) -> str:
        """Return the layout of the KV caches, if vLLM tells it here."""
        return str(getattr(self.config.cache_config, "kv_cache_layout", None) or "")

    def wait_ready(self, num_slots: int) -> dict[str, float]:
        """Ask next to nothing until so much host memory is ready; return how long that took and how much was ready."""
        begin = time.perf_counter()
        first: float | None = None
        prompts = self._shape.prompts(64, seed=5, num_tokens=2 * self._shape.tokens_per_block - 2)
        for prompt in prompts:
            self._ask([prompt], 1)
            ready = Figures.read().get("kvmoor_ready_slots")
            first = ready if first is None else first
            if ready >= num_slots or time.perf_counter() - begin > _READY_TIMEOUT_S:
                break
            time.sleep(0.4)  # memory is locked faster while the engine rests
        return {"pool_ready_s": time.perf_counter() - begin, "slots_at_ready": first or 0.0, "slots": ready}

    def run_pass(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> dict[str, Any]:
        """Ask all prompts at once; return seconds, answers, tokens that were not computed, and what was copied."""
        before = Figures.read()
        begin = time.perf_counter()
        outputs = self._ask(prompts, answer_tokens)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
            "asked_tokens": sum(map(len, prompts)),
            **Figures.read().since(before),
        }

    def close(self) -> float:
        """Shut the engine down; return how long that took. One that vLLM is about to kill prints its stacks first."""
        late = threading.Timer(_STACKS_AFTER_S, _abort_children)
        late.daemon = True
        late.start()
        begin = time.perf_counter()
        try:
            self.llm.llm_engine.engine_core.shutdown()
            return time.perf_counter() - begin
        finally:
            late.cancel()

    def _ask(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> list[Any]:
        from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415 - imported by now

        sampling = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        given = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs: list[Any] = self.llm.generate(given, sampling, use_tqdm=False)
        return outputs


def _abort_children() -> None:
    """End the engine's process, which prints where its threads are: PYTHONFAULTHANDLER is set."""
    print(f"the engine has not ended after {_STACKS_AFTER_S:g} s and is aborted", flush=True)
    for child in multiprocessing.active_children():
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGABRT)


class SteadyRequests:
    """Requests that decode for as long as this is open, beside visitors that come and go.

    A step is timed when the engine hands out its tokens. A request that reaches the longest answer is replaced.
    """

    def __init__(self, served: ServedEngine, shape: Shape) -> None:
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - as below

        from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415 - imported by now

        self._engine: Any = served.llm.llm_engine
        self._shape = shape
        self._token_prompt: Callable[..., Any] = TokensPrompt
        common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        longest = shape.max_model_len - shape.decoder_tokens - 1
        self._steady = SamplingParams(max_tokens=longest, output_kind=RequestOutputKind.DELTA, **common)
        self._visit = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, **common)
        self._num_added = 0
        self._decoders: dict[str, list[int]] = {}
        self._visitors: set[str] = set()
        self._stamp = 0.0  # of the latest step, by the engine's clock: the frontend sees some of them late
        self._get_output = self._engine.engine_core.get_output

    def _get_stamped_output(self) -> Any:
        output = self._get_output()
        self._stamp = output.timestamp
        return output

    def __enter__(self) -> Self:
        self._engine.engine_core.get_output = self._get_stamped_output
        for prompt in self._shape.prompts(self._shape.num_decoders, seed=99, num_tokens=self._shape.decoder_tokens):
            self._decoders[self._add(prompt, self._steady)] = prompt
        waiting = set(self._decoders)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.abort_request([*self._decoders, *self._visitors])
        deadline = time.perf_counter() + _DRAIN_TIMEOUT_S
        while self._engine.has_unfinished_requests() and time.perf_counter() < deadline:
            self._engine.step()
        self._engine.engine_core.get_output = self._get_output

    def run(self, phase: str, seconds: float, visitors: Iterator[list[int]] | None) -> dict[str, Any]:
        """Step for a time beside so many visitors at once; return how the steady requests got on."""
        before = Figures.read()
        stamps: list[float] = []
        num_tokens = num_answered = 0
        begin = now = time.perf_counter()
        while now - begin < seconds:
            while visitors is not None and len(self._visitors) < self._shape.num_visitors:
                self._visitors.add(self._add(next(visitors), self._visit))
            outputs = self._engine.step()
            now = time.perf_counter()
            arrived = sum(len(output.outputs[0].token_ids) for output in outputs if output.request_id in self._decoders)
            if arrived:
                stamps.append(self._stamp)
                num_tokens += arrived
            for output in outputs:
                if output.finished:
                    num_answered += output.request_id in self._visitors
                    self._visitors.discard(output.request_id)
                    if (prompt := self._decoders.pop(output.request_id, None)) is not None:
                        self._decoders[self._add(prompt, self._steady)] = prompt
        figures = step_figures(stamps, now - begin)
        copied = Figures.read().since(before)
        return {"phase": phase, **figures, "tokens_per_s": num_tokens / (now - begin), "visits": num_answered, **copied}

    def _add(self, prompt: Sequence[int], sampling: Any) -> str:
        self._num_added += 1
        name = f"beside-{self._num_added}"
        self._engine.add_request(name, self._token_prompt(prompt_token_ids=list(prompt)), sampling)
        return name


def step_figures(stamps: Sequence[float], seconds: float) -> dict[str, float]:
    """Return steps a second, and percentiles of the time from one step to the next in milliseconds."""
    gaps = sorted(1e3 * (after - before) for before, after in pairwise(stamps))
    if not gaps:
        return {"seconds": seconds, "steps": float(len(stamps)), "steps_per_s": len(stamps) / seconds}
    return {
        "seconds": seconds,
        "steps": float(len(stamps)),
        "steps_per_s": len(stamps) / seconds,
        "step_p50_ms": gaps[len(gaps) // 2],
        "step_p99_ms": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "step_max_ms": gaps[-1],
    }
