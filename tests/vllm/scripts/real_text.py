"""Ask a small language model about documents, again after they left the device: ``real_text.py FOLDER MODEL``.

Prints a JSON object with the answers of an engine without offloading and of one with it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

from engine import Engine
from transformers import AutoTokenizer

from kvmoor.demo.documents import built_in_documents

DEVICE_BLOCKS = 54
"""One block is vLLM's own; of the others a document takes 48 to 51."""


def main() -> None:
    model = Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": document.prompt}], add_generation_prompt=True, tokenize=False
        )
        for document in built_in_documents()
    ]
    prompts = [tokenizer.encode(question, add_special_tokens=False) for question in questions]
    found: dict[str, Any] = {"num_tokens": [len(tokens) for tokens in prompts]}
    for mode in ("off", "connector"):
        options = {"max_model_len": 1664, "max_num_batched_tokens": 512}
        with Engine(model, mode, device_blocks=DEVICE_BLOCKS, host_memory="512MiB", llm_options=options) as engine:
            if mode != "off":
                engine.wait_ready()
            engine.sampling.max_tokens = 24
            asked = [engine.ask(tokens) for tokens in [*prompts, *prompts]]
            found[mode] = {
                "answers": [answer for answer, _ in asked],
                "texts": [tokenizer.decode(answer, skip_special_tokens=True) for answer, _ in asked],
                "cached": [cached for _, cached in asked],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
