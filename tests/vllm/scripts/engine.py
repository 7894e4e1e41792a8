"""One real vLLM engine on the CPU, with offloading off, by the connector or by the pure spec, and faults on demand."""

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np

import kvmoor.integrations.vllm.spec as plugin
from kvmoor.devices.cpu import CopyHook, CpuDevice
from vllm import LLM, SamplingParams, TokensPrompt

Mode = Literal["off", "connector", "spec"]
ANSWER_TIMEOUT_S = 300.0
PACKAGE = "kvmoor.integrations.vllm"


def transfer_config(mode: Mode, **extra: object) -> dict[str, Any]:
    """Return what a user writes into ``kv_transfer_config``."""
    extra = {"host_memory": "64MiB"} | extra
    if mode == "spec":
        extra |= {"spec_name": "KvmoorSpec", "spec_module_path": PACKAGE}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "KvmoorConnector",
        "kv_connector_module_path": PACKAGE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def beside_another(folder: Path, **extra: object) -> dict[str, Any]:
    """Return the configuration of our connector with one of vLLM's behind it, which keeps its blocks in a folder."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [transfer_config("connector", **extra), other]},
    }


def prompt(seed: int, num_tokens: int = 300) -> list[int]:
    """Return a prompt that shares no block with that of another seed."""
    return [(seed * 7919 + place * place * 31 + place) % 1000 + 10 for place in range(num_tokens)]


def start_llm(model: Path, **options: Any) -> LLM:
    """Start vLLM with a device cache of 24 blocks of 32 tokens, one of which it keeps for itself."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 24,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 4,
        "seed": 0,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    return LLM(model=str(model), **(defaults | options))


class Engine:
    """A vLLM engine; in one process (VLLM_ENABLE_V1_MULTIPROCESSING=0) its parts can be looked at."""

    def __init__(
        self,
        model: Path,
        mode: Mode,
        *,
        device_blocks: int = 24,
        copy_hook: CopyHook | None = None,
        flip_loaded_bytes: bool = False,
        llm_options: dict[str, Any] | None = None,
        **extra: object,
    ) -> None:
        options: dict[str, Any] = {"num_gpu_blocks_override": device_blocks} | (llm_options or {})
        if mode != "off":
            options.setdefault("kv_transfer_config", transfer_config(mode, **extra))
        gc.freeze()  # else vLLM has the garbage collector look at all of torch seven times an engine: half its life
        plugin.open_device = lambda _layout: CpuDevice(copy_hook=copy_hook)
        plugin.KvmoorWorker.submit_load = _submit_flipped if flip_loaded_bytes else _submit_load
        self.llm = start_llm(model, **options)
        self.sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        self._num_added = 0
        self._cached: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return _ours(self.core.scheduler.connector)

    @property
    def worker_connector(self) -> Any:
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

        return _ours(get_kv_transfer_group())

    @property
    def worker_side(self) -> Any:
        return self.worker_connector.connector_worker.worker.side

    def wait_ready(self) -> None:
        """Wait until host memory is mapped, so that every store finds room."""
        assert self.worker_side.worker.arena.wait_published(10.0)

    def ask(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return the answer to one prompt, and how many of its tokens were cached."""
        name = self.add(tokens)
        answer = self.drain()[name]
        return answer, self._cached[name]

    def add(self, tokens: Sequence[int], name: str = "") -> str:
        """Add a request without a step; it is answered by `drain`."""
        self._num_added += 1
        name = name or f"request-{self._num_added}"
        self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(tokens)), self.sampling)
        return name

    def step(self) -> dict[str, list[int]]:
        """Do one step, and return the answers that are complete with it."""
        finished = [output for output in self.llm.llm_engine.step() if output.finished]
        self._cached |= {output.request_id: output.num_cached_tokens for output in finished}
        return {output.request_id: list(output.outputs[0].token_ids) for output in finished}

    def drain(self) -> dict[str, list[int]]:
        """Step until every request is answered and what they left in flight is over."""
        answers: dict[str, list[int]] = {}
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self.llm.llm_engine.has_unfinished_requests():
            answers |= self.step()
            if time.monotonic() > deadline:
                raise AssertionError(f"requests are not answered within {ANSWER_TIMEOUT_S:g} s")
        for _ in range(3):
            answers |= self.step()
        return answers

    def settle(self) -> dict[str, int]:
        """Answer every request, wait for the copies they left, let the scheduler hear of it, and return `in_flight`."""
        self.drain()
        self.worker_side.wait([job.job_id for job in self.worker_side._running.values()])
        self.drain()
        return self.in_flight()

    def running_copies(self) -> list[str]:
        """Return what the rank is copying at this moment: kinds of orders, one for each job."""
        return sorted(job.kind.value for job in self.worker_side._running.values())

    def note_waits(self, on_wait: Callable[[], None] = lambda: None) -> list[str]:
        """Call `on_wait` whenever the worker begins to wait for jobs; return a list that grows by what is copied then.

        Only jobs that are waited for count, by their kinds.
        """
        side, waited_for = self.worker_side, []
        wait = side.wait

        def noting(job_ids: Iterable[int]) -> None:
            wanted = set(job_ids)
            waited_for.extend(job.kind.value for job in side._running.values() if job.job_id in wanted)
            on_wait()
            wait(wanted)
            early = [job.job_id for job in side._running.values() if job.job_id in wanted]
            assert not early, f"the worker goes on while jobs {early} still touch device blocks"

        side.wait = noting
        return waited_for

    def in_flight(self) -> dict[str, int]:
        """Return what is not over: jobs and requests that vLLM's connector remembers, and what the plugin holds."""
        side, scheduler = self.connector.scheduler_side, self.connector.connector_scheduler
        side.coordinator.check_invariants()
        statistics = side.coordinator.statistics()
        return {
            "jobs": len(scheduler._jobs),
            "requests": len(scheduler._req_status),
            "orders": len(side._open) + len(side._by_id) + len(side._from_before_reset),
            "leased": statistics.leased,
            "writing": statistics.writing,
            "copies": len(self.worker_side._running),
        }

    def empty_device(self) -> None:
        """Let the device forget its prefixes, and only the device."""
        assert self.core.reset_prefix_cache(reset_running_requests=False, reset_connector=False)

    def metrics(self) -> dict[str, float]:
        """Return vLLM's figures that have one value."""
        return {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _ours(connector: Any) -> Any:
    """Return our connector, which may be the first of several."""
    return getattr(connector, "_connectors", [connector])[0]


_submit_load = plugin.KvmoorWorker.submit_load


def _submit_flipped(worker: Any, job_id: int, host: Any, device: Any, expedited: bool = False) -> bool:
    """Change the sign of every number in the slots of a load, and load them: the control of all comparisons."""
    arena = worker.side.worker.arena
    for group, slots in enumerate(host.slots):
        for address in arena.slot_addresses(group, slots.astype(np.int64)):
            nbytes = arena.plan.groups[group].slot_nbytes
            numbers = np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_uint8)), (nbytes,))
            numbers[3::4] ^= 0x80
    return _submit_load(worker, job_id, host, device, expedited)
