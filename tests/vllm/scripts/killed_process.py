"""Kill a process of an engine with two ranks while it answers: ``killed_process.py FOLDER WHO ENGINE_ID``.

WHO is rank-0, rank-1 or engine-core. Prints the processes, and how the request ended: one JSON object a line.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

import psutil
from engine import prompt, start_llm, transfer_config
from tiny_llama import write_model

from kvmoor.host_memory.status_reader import find_status_segments
from vllm import SamplingParams, TokensPrompt

END_TIMEOUT_S = 120.0
"""When this process dumps its stacks and ends, whatever it waits for."""


def main() -> None:
    folder, who, engine_id = sys.argv[1:]
    config = transfer_config("connector") | {"engine_id": engine_id}
    llm = start_llm(write_model(Path(folder) / "full"), tensor_parallel_size=2, kv_transfer_config=config)
    ranks = {f"rank-{segment.rank}": psutil.Process(segment.pid) for segment in find_status_segments(engine_id)}
    victims = ranks | {"engine-core": ranks["rank-0"].parent()}
    family = psutil.Process().children(recursive=True)
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("answered", TokensPrompt(prompt_token_ids=prompt(1)), sampling)
    for _ in range(40):
        assert not any(output.finished for output in llm.llm_engine.step())
    print(json.dumps({"ranks": sorted(ranks), "family": [each.pid for each in family]}))
    sys.stdout.flush()
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
    victims[who].kill()
    error = "none"
    # The frontend of `LLM` waits for ever for a core that was killed, with a connector or without.
    if who != "engine-core":
        try:
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
        except Exception as raised:
            error = type(raised).__name__
    psutil.wait_procs(ranks.values())
    print(json.dumps({"error": error}))


if __name__ == "__main__":  # vLLM starts its processes by importing this file
    main()
