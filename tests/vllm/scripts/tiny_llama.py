"""Write a tiny random Llama that vLLM loads offline, without a tokenizer: its answers change with its cached keys."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_HIDDEN, _HEADS, _KV_HEADS, _LAYERS, _VOCABULARY = 256, 4, 2, 4, 1024


def write_model(folder: Path, *, sliding_window: int = 0) -> Path:
    """Write model and configuration, 11 MB; with a sliding window every other layer has it, hence two KV groups."""
    head_dim, inner = _HIDDEN // _HEADS, 2 * _HIDDEN
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": head_dim,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    if sliding_window:
        config["sliding_window"] = sliding_window
        config["layer_types"] = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(_LAYERS)]
    generator = torch.Generator().manual_seed(1)

    def random(scale: float, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    sharp = 1.6 / _HIDDEN**0.5  # attention looks at few tokens, so that wrong bytes change the answer
    tensors = {
        "model.embed_tokens.weight": random(1.0, _VOCABULARY, _HIDDEN),
        "lm_head.weight": random(2 / _HIDDEN**0.5, _VOCABULARY, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}self_attn.q_proj.weight": random(sharp, _HEADS * head_dim, _HIDDEN),
            f"{prefix}self_attn.k_proj.weight": random(sharp, _KV_HEADS * head_dim, _HIDDEN),
            f"{prefix}self_attn.v_proj.weight": random(sharp, _KV_HEADS * head_dim, _HIDDEN),
            f"{prefix}self_attn.o_proj.weight": random(1 / _HIDDEN**0.5, _HIDDEN, _HEADS * head_dim),
            f"{prefix}mlp.gate_proj.weight": random(1 / _HIDDEN**0.5, inner, _HIDDEN),
            f"{prefix}mlp.up_proj.weight": random(1 / _HIDDEN**0.5, inner, _HIDDEN),
            f"{prefix}mlp.down_proj.weight": random(1 / inner**0.5, _HIDDEN, inner),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
