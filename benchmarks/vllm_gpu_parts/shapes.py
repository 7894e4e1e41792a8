"""The shapes of models that are served: sizes, prompts, and how large the caches are. Imports nothing heavy."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

_TAIL = (11, 12, 13, 14, 15, 16, 17, 18)
"""The end of every prompt: different answers then show that the keys and values before it are used."""
_FIRST_TOKEN = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama and what it is asked. The device cache holds some of the prompts, host memory all of them.

    `decoder_tokens`: the prompts of requests that decode steadily while `num_visitors` others come and go.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    device_blocks: int
    num_prompts: int
    prompt_tokens: int
    head_dim: int = 128
    vocabulary: int = 32000
    tokens_per_block: int = 16
    batched_tokens: int = 8192
    max_num_seqs: int = 8
    host_nbytes: int = 64 * 10**9
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["dummy", "random"] = "dummy"
    num_decoders: int = 4
    decoder_tokens: int = 256
    num_visitors: int = 4
    answer_tokens: int = 8

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of keys and values of one block in one layer: a page under layout LBHNC."""
        size = 2 if self.dtype == "bfloat16" else 4
        return 2 * self.kv_heads * self.head_dim * size * self.tokens_per_block

    @property
    def block_nbytes(self) -> int:
        """Return the bytes of one block in all layers: one run under layout BLHNC."""
        return self.page_nbytes * self.layers

    @property
    def blocks_per_prompt(self) -> int:
        """Return how many whole blocks a prompt has."""
        return self.prompt_tokens // self.tokens_per_block

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a request."""
        return self.prompt_tokens + 4 * self.tokens_per_block

    def describe(self) -> str:
        """Say in one line what is served."""
        asked = self.num_prompts * self.blocks_per_prompt
        return (
            f"{self.name}: Llama of {self.layers} layers, {self.kv_heads} KV heads of {self.head_dim}, hidden "
            f"{self.hidden}, {self.dtype}, {self.weights} weights; a block of {self.tokens_per_block} tokens is "
            f"{self.page_nbytes / 1024:g} KiB a layer (a page under LBHNC), {self.block_nbytes / 1024:g} KiB in all (a "
            f"run under BLHNC); {self.num_prompts} prompts of {self.prompt_tokens} tokens are {asked} blocks or "
            f"{asked * self.block_nbytes / 1e9:.2f} GB, device cache {self.device_blocks} blocks, host memory "
            f"{self.host_nbytes / 1e9:g} GB, {self.max_num_seqs} requests at once, steps of {self.batched_tokens}"
        )

    def prompts(self, num: int, *, seed: int, num_tokens: int = 0) -> list[list[int]]:
        """Return random prompts with the same end; another seed gives others."""
        numbers = random.Random(seed)  # noqa: S311 - the same in every engine
        length = (num_tokens or self.prompt_tokens) - len(_TAIL)
        return [
            [numbers.randrange(_FIRST_TOKEN, self.vocabulary) for _ in range(length)] + [*_TAIL] for _ in range(num)
        ]

    def write_model(self, folder: Path) -> None:
        """Write the configuration, and random weights if they are wanted."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        weights = folder / "model.safetensors"
        if self.weights == "random" and not weights.exists():
            from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

            save_file(dict(self._random_weights()), weights, metadata={"format": "pt"})

    def _random_weights(self) -> Iterator[tuple[str, Any]]:
        import torch  # noqa: PLC0415 - only where weights are written

        generator = torch.Generator().manual_seed(1)
        dtype = getattr(torch, self.dtype)

        def normal(scale: float, *size: int) -> Any:
            return (torch.randn(*size, generator=generator) * scale).to(dtype)

        hidden, queries, values = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        sharp = 1.6 / hidden**0.5  # attention looks at few tokens, so that wrong bytes change the answer
        yield "model.embed_tokens.weight", normal(1.0, self.vocabulary, hidden)
        yield "lm_head.weight", normal(2 / hidden**0.5, self.vocabulary, hidden)
        yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{norm}.weight", torch.ones(hidden, dtype=dtype)
            yield f"{prefix}self_attn.q_proj.weight", normal(sharp, queries, hidden)
            yield f"{prefix}self_attn.k_proj.weight", normal(sharp, values, hidden)
            yield f"{prefix}self_attn.v_proj.weight", normal(sharp, values, hidden)
            yield f"{prefix}self_attn.o_proj.weight", normal(queries**-0.5, hidden, queries)
            yield f"{prefix}mlp.gate_proj.weight", normal(hidden**-0.5, self.inner, hidden)
            yield f"{prefix}mlp.up_proj.weight", normal(hidden**-0.5, self.inner, hidden)
            yield f"{prefix}mlp.down_proj.weight", normal(self.inner**-0.5, hidden, self.inner)


BIG = Shape(
    "big",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    inner=11264,
    device_blocks=4096,
    num_prompts=24,
    prompt_tokens=4000,
)
"""An 8B model: 64 KiB a page, 2 MiB a block."""
SMALL_PAGES = Shape(
    "small-pages",
    layers=80,
    hidden=8192,
    heads=8,
    kv_heads=1,
    inner=3584,
    device_blocks=8400,
    num_prompts=12,
    prompt_tokens=16000,
)
"""One rank of a 70B model at tensor parallel 8, without its peers: 8 KiB a page, 640 KiB a block."""
ANSWERS = Shape(
    "answers",
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=8,
    inner=2816,
    device_blocks=600,
    num_prompts=64,
    prompt_tokens=1000,
    batched_tokens=4096,
    max_num_seqs=16,
    host_nbytes=4 * 10**9,
    weights="random",
)
"""Small, with weights that make wrong bytes visible; the device cache is too small for 16 requests of 800 tokens."""
SHAPES = {shape.name: shape for shape in (BIG, SMALL_PAGES, ANSWERS)}


def tiny(shape: Shape) -> Shape:
    """Return a shape that stands for another one on a CPU: all of its steps, none of its sizes."""
    return replace(
        shape,
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=1 if shape is SMALL_PAGES else 2,
        head_dim=64,
        inner=512,
        vocabulary=1024,
        device_blocks=24 if shape is ANSWERS else 40,  # few, so that requests preempt each other
        num_prompts=6,
        prompt_tokens=300,
        tokens_per_block=32,
        batched_tokens=512,
        max_num_seqs=4,
        host_nbytes=96 * 2**20,
        dtype="float32",
        weights="random",
        num_decoders=2,
        decoder_tokens=40,
        num_visitors=1,
    )
