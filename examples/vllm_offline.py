"""Bring returning prompts back from host memory with vLLM, in one process: ``python vllm_offline.py MODEL``.

MODEL is a name or a folder that vLLM loads, with room for 2048 tokens. Prompts are token ids, so that any model will
do, also one without a tokenizer. The device's cache is made small on purpose: it holds two of the four prompts.
"""

import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a CPU in one process; threads of OpenMP would wait for each other

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    """Ask each prompt twice, and say how much of it was computed."""
    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=128,
        num_gpu_blocks_override=24,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KvmoorConnector",
            "kv_connector_module_path": "kvmoor.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_memory": "1GiB"},
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompts = [[10 + (number * 7919 + place * place * 31) % 990 for place in range(1300)] for number in range(4)]
    for visit in ("first", "second"):
        for number, prompt in enumerate(prompts):
            started = time.perf_counter()
            (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
            seconds = time.perf_counter() - started
            found = f"{output.num_cached_tokens} of {len(prompt)} tokens were cached"
            print(f"{visit} visit, prompt {number}: {found}, first token after {seconds:.3f} s")
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kvmoor_"):
            print(f"{metric.name} {metric.value:g}")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # vLLM may start processes by importing this file
    main()
