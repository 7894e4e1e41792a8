"""vLLM's own engine core, with its scheduler, its batch queue and our connector, over ranks that run late.

    engine = FakeEngine(Setup(seed=1, is_second=True, is_async=True))
    engine.add("a", prompt, num_tokens=8)
    engine.step(); engine.abort("a"); engine.core.reset_prefix_cache(True, True)
    engine.drain(); engine.answers["a"]; engine.settle(); engine.close()

Only the executor and what is behind it is ours (`fake_runner`).
"""

import copy
import json
import pickle
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fake_model import TOKEN_NBYTES, Layer
from fake_runner import Answer, FakeRank
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from vllm import SamplingParams

FULL = (Layer("first", 0), Layer("second", 0))
WINDOWED = (Layer("first", 0), Layer("windowed", 0, window=10))
DRAFTED = (Layer("first", 0), Layer("draft", 0, is_draft=True))
MAX_TOKENS = 96
_EXTRA = {"host_memory": "384KiB", "pin": "eager", "mapping": "eager"}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
    "bos_token_id": 1000,
    "eos_token_id": 1001,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to serve. `paces`: how fast the GPU of each rank is; `fails`: by lane, which part of its jobs fails."""

    seed: int = 0
    layers: tuple[Layer, ...] = FULL
    is_second: bool = False
    is_async: bool = False
    num_drafts: int = 0
    zeroes_blocks: bool = False
    paces: tuple[float, ...] = (1.0,)
    fails: dict[str, float] = field(default_factory=dict)
    has_connector: bool = True
    num_blocks: int = 32
    extra: dict = field(default_factory=dict)
    tokens_per_block: int = 4
    layout: str = "LBHNC"

    @property
    def page_nbytes(self):
        """Return how large a page of one layer is."""
        return self.tokens_per_block * TOKEN_NBYTES


class LateExecutor(Executor):
    """Call ranks as an executor of several processes does: each works off its calls when it gets to them."""

    setup: Setup

    def _init_executor(self):
        self.draw = random.Random(self.setup.seed)
        self.ranks = [FakeRank(self.vllm_config, rank, self.setup) for rank in range(len(self.setup.paces))]
        self._num_calls = 0

    @classmethod
    def supports_async_scheduling(cls):
        return True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **_options):
        raise NotImplementedError(method)

    def check_health(self):
        pass

    def get_kv_cache_specs(self):
        specs = {}
        for layer in self.setup.layers:
            shape = {"block_size": self.setup.tokens_per_block, "num_kv_heads": 1, "head_size": 4}
            if layer.window is None:
                specs[layer.name] = FullAttentionSpec(**shape, dtype=torch.float16)
            else:
                specs[layer.name] = SlidingWindowSpec(**shape, dtype=torch.float16, sliding_window=layer.window)
        return [dict(specs) for _ in self.ranks]

    def get_supported_kv_cache_layouts(self):
        return [[self.setup.layout] for _ in self.ranks]

    def set_kv_cache_layout(self, layout_name, *_more):
        for rank in self.ranks:
            rank.config.cache_config.kv_cache_layout = layout_name

    def determine_available_memory(self):
        return [64 << 20 for _ in self.ranks]

    def initialize_from_config(self, kv_cache_configs):
        for rank, config in zip(self.ranks, kv_cache_configs, strict=True):
            rank.initialize(config)

    def compile_or_warm_up_model(self):
        pass

    def get_kv_connector_handshake_metadata(self):
        if not self.setup.has_connector:
            return []
        return [{(0, rank.rank): rank.connector.get_handshake_metadata()} for rank in self.ranks]

    def execute_model(self, scheduler_output, non_block=False):
        return self._call("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output, non_block=False):
        return self._call("sample_tokens", grammar_output, non_block)

    def take_draft_token_ids(self):
        return self.ranks[0].take_draft_token_ids()

    def shutdown(self):
        for rank in self.ranks:
            if rank.connector is not None:
                with rank.gpu.running():  # closing waits for what it queues itself
                    rank.connector.shutdown()

    def _call(self, method, argument, non_block):
        self._num_calls += 1
        answers = [None] * len(self.ranks)
        for rank in self.ranks:
            rank.calls.append((self._num_calls, method, pickle.dumps(argument), answers))
        for rank in self.draw.sample(self.ranks, len(self.ranks)):
            if self.draw.random() < 0.5:
                rank.catch_up()
        answer = LateAnswer(self, self._num_calls, answers)
        return answer if non_block else answer.result()

    def gather(self, number, answers):
        """Return what all ranks answer to a call, once they have come to it."""
        for rank in self.draw.sample(self.ranks, len(self.ranks)):
            rank.catch_up(number)
        outputs = [answer.get() if isinstance(answer, Answer) else answer for answer in answers]
        if len(outputs) == 1 or self.kv_output_aggregator is None:
            return outputs[0]
        # Copied, as on their way from another process: the aggregator writes into what may be vLLM's empty answer.
        return self.kv_output_aggregator.aggregate([copy.copy(output) for output in outputs])


class LateAnswer(Future):
    """The answer to a call, which is worked for when somebody asks."""

    def __init__(self, executor, number, answers):
        super().__init__()
        self._ask = lambda: executor.gather(number, answers)

    def result(self, timeout=None):
        if not self.done():
            self.set_result(self._ask())
        return super().result()


class FakeEngine:
    """An engine in one process and, but for kvmoor's own, one thread."""

    def __init__(self, folder, setup):
        self.setup = setup
        self.answers = {}
        self.open = set()
        self.num_steps = 0
        self.num_preempted = 0
        executor = type("Executor", (LateExecutor,), {"setup": setup})
        config = self._config(folder, executor)
        # Not by its switch: the second runner is refused where there is no Triton, which ours does without.
        VllmConfig.use_v2_model_runner = property(lambda _config: setup.is_second)
        KVCacheConfig.needs_kv_cache_zeroing = property(lambda _config: setup.zeroes_blocks)
        self.core = EngineCore(config, executor, log_stats=True)
        self.ranks = self.core.model_executor.ranks
        self.connector = self.core.scheduler.connector
        self.core.scheduler._preempt_request = self._count(self.core.scheduler._preempt_request)
        self.within_step = lambda: None  # called between a step's work on the ranks and what comes of its output
        process_aborts = self.core._process_aborts_queue
        self.core._process_aborts_queue = lambda: (self.within_step(), process_aborts())

    def _config(self, folder, executor):
        VllmConfig.use_v2_model_runner = property(lambda _config: False)
        setup = self.setup
        options = {}
        if setup.has_connector:
            options["kv_transfer_config"] = {
                "kv_connector": "KvmoorConnector",
                "kv_connector_module_path": "kvmoor.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**_EXTRA, "kv_layout": setup.layout, **setup.extra},
            }
        if setup.num_drafts:
            options["speculative_config"] = {
                "method": "draft_model",
                "model": str(folder),
                "num_speculative_tokens": setup.num_drafts,
            }
        config = EngineArgs(
            model=str(write_config(folder)),
            skip_tokenizer_init=True,
            dtype="float16",
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            num_gpu_blocks_override=setup.num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            enable_prefix_caching=True,
            tensor_parallel_size=len(setup.paces),
            distributed_executor_backend=executor,
            **options,
        ).create_engine_config()
        config.cache_config.block_size = setup.tokens_per_block
        config.scheduler_config.async_scheduling = setup.is_async  # the CPU's platform turns it off
        return config

    def add(self, request, prompt, num_tokens):
        """Add a request; its answer will be in `answers`."""
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        fields = {
            "request_id": request,
            "prompt_token_ids": list(prompt),
            "mm_features": None,
            "sampling_params": sampling,
            "pooling_params": None,
            "arrival_time": time.time(),
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        self.answers[request] = []
        self.open.add(request)
        self.core.add_request(*self.core.preprocess_add_request(EngineCoreRequest(**fields)))

    def abort(self, request):
        self.open.discard(request)
        self.answers.pop(request)
        self.core.abort_requests([request])

    def _count(self, preempt):
        def count(*arguments, **options):
            self.num_preempted += 1
            return preempt(*arguments, **options)

        return count

    @property
    def has_work(self):
        return self.core.scheduler.has_requests() or bool(self.core.batch_queue)

    def step(self):
        """Do one step as the engine's loop does."""
        self.num_steps += 1
        outputs, is_executed = self.core.step_fn()
        self.core.post_step(is_executed)
        for output in (output for each in (outputs or {}).values() for output in each.outputs):
            if output.request_id in self.open:
                self.answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.open.discard(output.request_id)
        for rank in self.ranks:
            rank.gpu.lag()

    def drain(self, timeout_s=60.0):
        """Step until every request is answered."""
        deadline = time.monotonic() + timeout_s
        while self.has_work:
            self.step()
            assert time.monotonic() < deadline, f"requests are not answered: {sorted(self.open)}"

    def settle(self, timeout_s=60.0):
        """Step on, with requests that mean nothing, until every job of the connector is over."""
        deadline = time.monotonic() + timeout_s
        number = 0
        self.drain()
        while self.connector.connector_scheduler._jobs or self.connector._reset_fence.keeps_stepping:
            number += 1
            self.add(f"filler-{self.num_steps}-{number}", [1], 2)
            self.drain()
            assert time.monotonic() < deadline, f"jobs do not end: {self.connector.connector_scheduler._jobs}"

    def change_weights(self):
        """Do what an engine does whose weights are replaced after a reset: the ranks hear of it in turn."""
        for rank in self.ranks:
            rank.catch_up()
            rank.change_weights()

    @property
    def wrong(self):
        return [wrong for rank in self.ranks for wrong in rank.memory.wrong]

    def close(self):
        self.core.shutdown()


def write_config(folder):
    """Write the configuration of a model that has no weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return folder
