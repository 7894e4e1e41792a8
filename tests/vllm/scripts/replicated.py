"""Serve prompts by two ranks that hold the same KV caches: ``replicated.py FOLDER MODE``. Prints a JSON object.

vLLM's engine core, its scheduler and both halves of our connector are real, and so are the two processes of the ranks;
the model is not, because no CPU serves MLA with a cached prefix. What a token leaves in the KV caches follows from all
tokens up to it, and each rank checks it before it computes the next one.

MODE: ``shared``; ``off`` (``one_copy``); ``spec`` (vLLM's own connector); ``refused`` (the second rank cannot attach);
``load`` or ``store`` (one copy of that kind fails, on the second rank and on the first); ``late`` (no handshake: the
scheduler hears of the first rank's memory in the first step, as beside other connectors).
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import kvmoor.integrations.vllm.spec as plugin
import kvmoor.reading_worker
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import BrokenError
from kvmoor.reading_worker import ReadingWorker
from kvmoor.testing import ScriptedCopies
from vllm import SamplingParams

NUM_RANKS, NUM_LAYERS, TOKENS_PER_BLOCK, HEAD_SIZE = 2, 2, 16, 64
TOKEN_NBYTES = 2 * HEAD_SIZE
NUM_DEVICE_BLOCKS = 14
PROMPT_TOKENS, ANSWER_TOKENS = 120, 8
SEEDS = (1, 2, 3, 1, 2, 1)
HOST_NBYTES = 4 << 20
WAIT_S = 60.0
_MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": HEAD_SIZE - 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": NUM_LAYERS,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
    "bos_token_id": 1000,
    "eos_token_id": 1001,
}


class Rank:
    """What a worker of vLLM does, with a model that checks instead of computing. It lives in a process of its own."""

    def __init__(self, vllm_config, rank, mode):
        self.config = vllm_config
        self.config.parallel_config.rank = rank
        self.rank = rank
        self.scripted = ScriptedCopies()
        self.num_wrong = 0
        self.requests = {}  # tokens, blocks, number of tokens computed
        plugin.open_device = lambda _layout: CpuDevice(copy_hook=self.scripted)
        if mode == "load" and rank == 1:
            self.scripted.fail_at(3, queue="load")
        if mode == "store" and rank == 0:
            self.scripted.fail_at(3, queue="store")
        if mode == "refused" and rank == 1:
            kvmoor.reading_worker.AttachedArena = _refuse

    def set_layout(self, name):
        self.config.cache_config.kv_cache_layout = name

    def initialize(self, kv_cache_config):
        (nbytes,) = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
        cache = np.full(nbytes, 0xAB, np.uint8)
        self.pages, tensors = [], {}
        for tensor in kv_cache_config.kv_cache_tensors:
            for number, name in enumerate(tensor.layers):
                pages = np.lib.stride_tricks.as_strided(
                    cache[tensor.offset + number * tensor.layer_stride :],
                    (kv_cache_config.num_blocks, TOKENS_PER_BLOCK, TOKEN_NBYTES),
                    (tensor.block_stride, TOKEN_NBYTES, 1),
                )
                self.pages.append(pages)
                tensors[name] = torch.from_numpy(pages).view(torch.float16)
        self.connector = KVConnectorFactory.create_connector(
            config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.connector.register_kv_caches(tensors)
        worker = self.worker
        if not isinstance(worker, ReadingWorker):
            assert worker.arena.wait_published(WAIT_S)

    @property
    def worker(self):
        return self.connector.connector_worker.worker.side.worker

    def handshake(self):
        return {(0, self.rank): self.connector.get_handshake_metadata()}

    def execute(self, output):
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update(output)
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connector_output,
        ):
            sampled = [self._compute(*scheduled) for scheduled in output.num_scheduled_tokens.items()]
        requests = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: number for number, request in enumerate(requests)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def _update(self, output):
        for request in output.finished_req_ids:
            self.requests.pop(request, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = [list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens]
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request, blocks, num_computed in rows:
            known = self.requests[request]
            if request in cached.resumed_req_ids:
                known[0], known[1] = list(cached.all_token_ids[request]), list(blocks[0])
            elif blocks:
                known[1] += blocks[0]
            known[2] = num_computed

    def _compute(self, request, num_tokens):
        """Check what is there of a request, add its next tokens, and return what comes after the last one."""
        tokens, blocks, start = self.requests[request]
        words = prefix_words(tokens)
        for position, word in enumerate(words[: start + num_tokens]):
            for layer, pages in enumerate(self.pages):
                found = pages[blocks[position // TOKENS_PER_BLOCK], position % TOKENS_PER_BLOCK]
                expected = content(word, layer)
                if position >= start:
                    found[:] = expected
                elif not (found == expected).all():
                    self.num_wrong += 1
        self.requests[request][2] += num_tokens
        if start + num_tokens < len(tokens):
            return []
        tokens.append(words[-1] % 997)
        return [tokens[-1]]

    def figures(self):
        statistics, worker = self.worker.statistics(), self.worker
        return {
            "worker": type(worker).__name__,
            "num_wrong": self.num_wrong,
            "num_failed": self.scripted.num_failed,
            "loaded_nbytes": statistics.loaded_nbytes,
            "stored_nbytes": getattr(statistics, "stored_nbytes", 0),
            "own_nbytes": 0 if isinstance(worker, ReadingWorker) else worker.arena.nbytes,
        }

    def shutdown(self):
        self.connector.shutdown()
        return self.connector.connector_worker.worker.side.close(WAIT_S).graceful


def _refuse(*_arguments, **_options):
    raise BrokenError("processes may not look at each other here")


def prefix_words(tokens):
    """Return a number for each token that tells all tokens up to it."""
    words, word = [], 0x1234
    for token in tokens:
        word = (word * 6364136223846793005 + token + 1442695040888963407) % 2**64
        words.append(word)
    return words


def content(word, layer):
    """Return what a layer keeps of a token."""
    return np.frombuffer((word ^ layer).to_bytes(8, "little") * (TOKEN_NBYTES // 8), np.uint8)


def serve_rank(pipe, vllm_config, rank, mode):
    """Answer calls until the other side has gone: the life of a rank's process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with set_current_vllm_config(vllm_config):
        served = Rank(vllm_config, rank, mode)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(served, method)(*arguments))
            if method == "shutdown":
                return


class TwoProcesses(Executor):
    """Call two ranks in processes of their own."""

    mode = ""

    def _init_executor(self):
        context = multiprocessing.get_context("fork")  # which has vLLM imported once instead of three times
        self.pipes, self.processes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(theirs, self.vllm_config, rank, self.mode), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, method, *arguments):
        for pipe in self.pipes:
            pipe.send((method, arguments))
        answers = []
        for pipe in self.pipes:
            assert pipe.poll(WAIT_S), f"{method} is not answered"
            answers.append(pipe.recv())
        return answers

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **_options):
        raise NotImplementedError(method)

    def check_health(self):
        pass

    def get_kv_cache_specs(self):
        shape = {"block_size": TOKENS_PER_BLOCK, "num_kv_heads": 1, "head_size": HEAD_SIZE, "dtype": torch.float16}
        if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__:  # from vLLM 0.31 on it says that ranks are alike
            shape["max_tp_shards"] = 1
        return [{f"layer{number}": MLAAttentionSpec(**shape) for number in range(NUM_LAYERS)}] * NUM_RANKS

    def get_supported_kv_cache_layouts(self):
        return [["LBHNC"]] * NUM_RANKS

    def set_kv_cache_layout(self, layout_name, *_of_context_parallel):  # vLLM 0.33 says more
        self.call("set_layout", layout_name)

    def determine_available_memory(self):
        return [64 << 20] * NUM_RANKS

    def initialize_from_config(self, kv_cache_configs):
        self.call("initialize", kv_cache_configs[0])

    def compile_or_warm_up_model(self):
        pass

    def get_kv_connector_handshake_metadata(self):
        return [] if self.mode in ("late", "spec") else self.call("handshake")

    def execute_model(self, scheduler_output, non_block=False):
        self._output = self.kv_output_aggregator.aggregate(self.call("execute", scheduler_output))
        return _Done(None if scheduler_output.total_num_scheduled_tokens else self._output, non_block)

    def sample_tokens(self, grammar_output, non_block=False):
        return _Done(self._output, non_block)

    def shutdown(self):
        pass


class _Done:
    """An answer that is there already, as a future or as it is."""

    def __new__(cls, value, non_block):
        return super().__new__(cls) if non_block else value

    def __init__(self, value, _non_block):
        self._value = value

    def result(self, timeout=None):
        return self._value

    def done(self):
        return True


def transfer_config(mode):
    """Return what a user writes into ``kv_transfer_config``."""
    package = "kvmoor.integrations.vllm"
    extra = {"host_memory": HOST_NBYTES, "one_copy": "off" if mode == "off" else "auto"}
    if mode == "spec":
        extra |= {"spec_name": "KvmoorSpec", "spec_module_path": package, "model_revision": "1"}
        connector = {"kv_connector": "OffloadingConnector"}
    else:
        connector = {"kv_connector": "KvmoorConnector", "kv_connector_module_path": package}
    policy = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {**connector, **policy, "kv_connector_extra_config": extra}


def engine_config(folder, mode):
    """Return the configuration of vLLM for two ranks of a tiny MLA model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float16",
        enforce_eager=True,
        max_model_len=160,
        num_gpu_blocks_override=NUM_DEVICE_BLOCKS,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        tensor_parallel_size=NUM_RANKS,
        distributed_executor_backend="mp",
        kv_transfer_config=transfer_config(mode),
    ).create_engine_config()
    # The CPU's platform turns these off or chooses otherwise; there is no model here that would mind.
    config.cache_config.enable_prefix_caching = True
    config.cache_config.block_size = TOKENS_PER_BLOCK
    config.scheduler_config.async_scheduling = False
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = 64
    return config


def ask(core, number, tokens):
    """Return the answer to one prompt."""
    fields = {
        "request_id": f"request-{number}",
        "prompt_token_ids": list(tokens),
        "mm_features": None,
        "sampling_params": SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False),
        "pooling_params": None,
        "arrival_time": time.time(),
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    core.add_request(*core.preprocess_add_request(EngineCoreRequest(**fields)))
    answer = []
    deadline = time.monotonic() + WAIT_S
    while core.scheduler.has_requests():
        outputs, is_executed = core.step_fn()
        core.post_step(is_executed)
        for output in (output for each in (outputs or {}).values() for output in each.outputs):
            answer += output.new_token_ids
        assert time.monotonic() < deadline, "a prompt is not answered"
    return answer


def expected_answer(tokens):
    tokens = list(tokens)
    for _ in range(ANSWER_TOKENS):
        tokens.append(prefix_words(tokens)[-1] % 997)
    return tokens[-ANSWER_TOKENS:]


def main():
    folder, mode = sys.argv[1:]
    TwoProcesses.mode = mode
    config = engine_config(Path(folder) / "mla", mode)
    core = EngineCore(config, TwoProcesses, log_stats=False)
    assert isinstance(core.scheduler, Scheduler)
    side = core.scheduler.connector.connector_scheduler.manager.side
    right = []
    for number, seed in enumerate(SEEDS):
        prompt = [(seed * 7919 + place * place * 31 + place) % 990 for place in range(PROMPT_TOKENS)]
        right.append(ask(core, number, prompt) == expected_answer(prompt))
    executor = core.model_executor
    figures = executor.call("figures")
    statistics = side.coordinator.statistics()
    core.shutdown()
    graceful = executor.call("shutdown")
    for process in executor.processes:
        process.join(WAIT_S)
    result = {
        "right": right,
        "ranks": figures,
        "graceful": graceful,
        "exit_codes": [process.exitcode for process in executor.processes],
        "published": statistics.published,
        "stored": statistics.stored,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
