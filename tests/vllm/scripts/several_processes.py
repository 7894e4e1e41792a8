"""Ask returning prompts of an engine in processes of its own: ``several_processes.py FOLDER MODE TENSOR PIPELINE``.

MODE is off, connector, spec or faulty (see ``faulty_connector``), TENSOR and PIPELINE the sizes of these two kinds of
parallelism. Prints a JSON object.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

from engine import prompt, start_llm, transfer_config
from tiny_llama import write_model

from vllm import SamplingParams, TokensPrompt

SEEDS = (1, 2, 3, 1, 2, 1)


def main() -> None:
    folder, mode, tensor, pipeline = sys.argv[1:]
    options: dict[str, Any] = {"tensor_parallel_size": int(tensor), "pipeline_parallel_size": int(pipeline)}
    if int(pipeline) > 1:
        # Without a warm-up, which eager mode leaves out, vLLM's CPU worker has no room for what the first ranks send.
        options |= {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    if mode != "off":
        options["kv_transfer_config"] = transfer_config("spec" if mode == "spec" else "connector")
    if mode == "faulty":
        options["kv_transfer_config"] |= {
            "kv_connector": "FaultyConnector",
            "kv_connector_module_path": "faulty_connector",
        }
    llm = start_llm(write_model(Path(folder) / "full"), **options)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    answers, cached = [], []
    for seed in SEEDS:
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt(seed))], sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    started = time.monotonic()
    llm.llm_engine.engine_core.shutdown()
    seconds = time.monotonic() - started
    print(json.dumps({"answers": answers, "cached": cached, "metrics": metrics, "shutdown_s": seconds}))


if __name__ == "__main__":  # vLLM starts its processes by importing this file
    main()
