"""How long does the first token of a returning prompt take in vLLM, with offloading and without it?

Three documents of about 1,550 tokens are asked twice, of an engine on the CPU whose cache holds one of them. So when a
document returns, the others have pushed it out: it is computed again, or loaded from host memory.

    off     vLLM alone: the yardstick
    on      with KvmoorConnector

Engines run one after the other, off and on in turn, each in a process of its own. Without `--model` it is SmolLM2-135M,
which ``kvmoor demo`` converts and keeps; with it, any model that vLLM loads, and prompts of numbers from 10 to 999.

    .venv-vllm/bin/python benchmarks/vllm_engine.py [--rounds 3] [--model FOLDER] [--quick] [--out FILE]
"""

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from print_parts.machine import machine
from print_parts.tables import print_and_keep

import kvmoor
from kvmoor.byte_sizes import format_nbytes
from kvmoor.demo.documents import built_in_documents
from kvmoor.demo.model import MODEL_NAME, PACKAGE, ModelPackage, is_whole

QUESTION = "How long does the first token of a returning prompt take in vLLM, with offloading and without it?"
MODES = ("off", "on")
TOKENS_PER_BLOCK = 32
DEVICE_BLOCKS = 54
"""One is vLLM's own; the others hold 1,696 tokens."""
MAX_TOKENS = 16
TIMEOUT_S = 1800.0


def prompts_of(model: Path) -> list[list[int]]:
    """Return the documents as the model's chat template wants them, or numbers if it has no tokenizer."""
    if not (model / "tokenizer.json").exists():
        return [[10 + (number * 7919 + place * place * 31) % 990 for place in range(1300)] for number in range(3)]
    from transformers import AutoTokenizer  # noqa: PLC0415 - only where vLLM is

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": document.prompt}] for document in built_in_documents()]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def run_engine(mode: str, model: Path) -> dict[str, Any]:
    """Ask every document twice in this process, and return times, answers and what was not computed."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch  # noqa: PLC0415 - read after the environment

    import vllm  # noqa: PLC0415 - as above

    options: dict[str, Any] = {}
    if mode == "on":
        options["kv_transfer_config"] = {
            "kv_connector": "KvmoorConnector",
            "kv_connector_module_path": "kvmoor.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_memory": "1GiB"},
        }
    llm = vllm.LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1664,
        block_size=TOKENS_PER_BLOCK,
        num_gpu_blocks_override=DEVICE_BLOCKS,
        kv_cache_memory_bytes=256 << 20,
        max_num_seqs=1,
        seed=0,
        disable_log_stats=False,
        **options,
    )
    prompts = prompts_of(model)
    visits = [[_ask(llm, tokens, f"{visit}-{number}") for number, tokens in enumerate(prompts)] for visit in range(2)]
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    llm.llm_engine.engine_core.shutdown()
    return {
        "versions": f"vLLM {vllm.__version__}, torch {torch.__version__}",
        "num_tokens": [len(tokens) for tokens in prompts],
        "visits": visits,
        "loaded_nbytes": int(metrics.get("vllm:kv_offload_load_bytes", 0)),
        "failed_loads": int(metrics.get("vllm:kvmoor_failed_loads", 0)),
    }


def _ask(llm: Any, tokens: list[int], name: str) -> dict[str, Any]:
    """Return the seconds from the request to its first token, the whole answer, and how many tokens were cached."""
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415 - see run_engine

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), sampling)
    first_s, answer, cached = None, [], 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if first_s is None and output.outputs[0].token_ids:
                first_s = time.perf_counter() - started
            answer, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
    return {"first_s": first_s, "answer": answer, "cached": cached}


def run_all(model: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run one engine after the other, in turn, so that a slow moment of the machine hits both."""
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES:
            print(f"round {number + 1} of {rounds}: {mode} ...", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--model", str(model), "--engine", mode]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if ended.returncode != 0:
                raise SystemExit(f"the engine did not run: {ended.stderr[-3000:]}")
            runs[mode].append(json.loads(ended.stdout.splitlines()[-1]))
    return runs


def as_table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the times to the first token, and what became of the returning prompts, in Markdown."""
    lines = [
        "| offloading | visit | first token, median s | all values, s |    tokens restored | bytes loaded an engine |",
        "| ---------- | ----- | --------------------: | ------------- | -----------------: | ---------------------: |",
    ]
    for mode in MODES:
        for visit, name in enumerate(("first", "again")):
            asked = [each for run in runs[mode] for each in run["visits"][visit]]
            seconds = [each["first_s"] for each in asked]
            restored = " / ".join(str(each["cached"]) for each in runs[mode][0]["visits"][visit])
            loaded = format_nbytes(runs[mode][0]["loaded_nbytes"]) if visit else "-"
            lines.append(
                f"| {mode:10} | {name} | {statistics.median(seconds):21.3f} | "
                f"{' '.join(f'{each:.3f}' for each in seconds)} | {restored:>18} | {loaded:>22} |"
            )
    return lines


def conclude(runs: dict[str, list[dict[str, Any]]]) -> tuple[bool, list[str]]:
    """Compare the answers of all engines and the times of returning prompts."""
    answers = [[each["answer"] for visit in run["visits"] for each in visit] for mode in MODES for run in runs[mode]]
    is_equal = all(each == answers[0] for each in answers)
    off, on = (statistics.median(each["first_s"] for run in runs[mode] for each in run["visits"][1]) for mode in MODES)
    failed = sum(run["failed_loads"] for run in runs["on"])
    return is_equal and not failed, [
        f"returning prompts: {off:.3f} s without, {on:.3f} s with offloading: {off / on:.1f} times sooner",
        f"answers of all engines and visits: {'equal' if is_equal else 'NOT EQUAL'}; loads that failed: {failed}",
        "The model is small and one core computes, so computing again is slow: the ratio says nothing about a GPU.",
    ]


def described(versions: str) -> str:
    """Describe what the figures hold for."""
    return f"{machine(kvmoor)}, {versions}; one core computes; {dt.datetime.now(tz=dt.UTC):%Y-%m-%d}"


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind (default 3)")
    parser.add_argument("--model", type=Path, help="a folder that vLLM loads, with room for 1,664 tokens")
    parser.add_argument("--quick", action="store_true", help="one round: to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the report there")
    parser.add_argument("--engine", choices=MODES, help=argparse.SUPPRESS)  # run this engine here, print JSON
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print(f"{QUESTION}\nvLLM is not installed in this environment: nothing was measured")
        return 0
    if options.engine:
        print(json.dumps(run_engine(options.engine, options.model)))
        return 0
    model = options.model or ModelPackage(Path(), PACKAGE.rpartition("==")[2]).converted
    if not options.model and not is_whole(model):
        print(f"{QUESTION}\n{MODEL_NAME} is not in {model}: run `kvmoor demo` once; nothing was measured")
        return 0
    runs = run_all(model, 1 if options.quick else options.rounds)
    first = runs["off"][0]
    is_right, conclusion = conclude(runs)
    set_up = (
        f"{model.name}, float32; prompts of {', '.join(map(str, first['num_tokens']))} tokens; device cache of "
        f"{(DEVICE_BLOCKS - 1) * TOKENS_PER_BLOCK} tokens; {len(runs['off'])} engines of each kind, three prompts "
        f"each; load average at the end {os.getloadavg()[0]:.1f}"
    )
    text = [
        QUESTION,
        described(first["versions"]),
        set_up,
        "",
        *as_table(runs),
        "",
        *conclusion,
    ]
    print_and_keep(text, options.out)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
