"""What blocks cost: the bytes of a token's keys and values, from the numbers of a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvmoor.errors import RequestError, SettingsError, UnsupportedError

SECONDS_PER_DAY: Final = 86_400
_DTYPE_NBYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_FULL_ATTENTION: Final = frozenset({"full_attention", "attention"})
_WINDOWED: Final = frozenset({"sliding_attention", "chunked_attention"})
_MIXED_LAYERS: Final = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "num_kv_shared_layers",
    "state_size",
)
"""Fields of models in which not every layer keeps keys and values of its own."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """Say how many bytes the cache of one token takes, over all layers and ranks, and how that was found."""

    bytes_per_token: int
    explanation: str


def kv_size_of_config(path: Path) -> KvSize:
    """Compute the size from a ``config.json`` as Hugging Face models have it.

    Latent attention (MLA) is known. Layers with a sliding window count in full, because their blocks are stored so.
    Raises `UnsupportedError` for models with layers that keep a state instead of keys and values, or none of their own,
    and `RequestError` for a file that does not say enough.
    """
    try:
        config: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} is a JSON {type(config).__name__}: give the config.json of a model")
    text = config.get("text_config")
    if isinstance(text, dict):  # a multimodal model; the dtype may stand outside
        config = {**config, **text}
    layers = _number(config, path, "num_hidden_layers", "n_layer")
    _check_layer_types(config, path)
    dtype_nbytes, dtype = _dtype(config, path)
    if config.get("kv_lora_rank"):
        numbers = _number(config, path, "kv_lora_rank") + _number(config, path, "qk_rope_head_dim")
        what = f"a latent of {numbers} numbers"
    else:
        heads = _number(config, path, "num_attention_heads", "n_head")
        kv_heads = _number(config, path, "num_key_value_heads") if config.get("num_key_value_heads") else heads
        if config.get("head_dim"):
            head_dim = _number(config, path, "head_dim")
        else:
            head_dim = _number(config, path, "hidden_size", "n_embd") // heads
        numbers = 2 * kv_heads * head_dim
        what = f"2 x {kv_heads} heads x {head_dim} numbers"
    return KvSize(layers * numbers * dtype_nbytes, f"{layers} layers x {what} of {dtype}")


def nbytes_a_day(nbytes: int, duration_s: float) -> float | None:
    """Scale what was written during a trace to a day; None for a trace in which no time passes."""
    return nbytes / duration_s * SECONDS_PER_DAY if duration_s > 0 else None


def check_bytes_per_token(nbytes: int) -> int:
    """Return the size if it can be one. Raises `SettingsError`."""
    if nbytes < 1:
        raise SettingsError(f"the KV cache of a token takes {nbytes} bytes: give 1 or more")
    return nbytes


def _number(config: Mapping[str, Any], path: Path, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            return value
        raise RequestError(f"{path}: {name} is {value!r}: it has to be a positive whole number")
    raise RequestError(f"{path} does not say {' or '.join(names)}: give --kv-bytes-per-token instead")


def _check_layer_types(config: Mapping[str, Any], path: Path) -> None:
    types = config.get("layer_types") or []
    others = sorted({str(each) for each in types} - _FULL_ATTENTION - _WINDOWED) if isinstance(types, list) else ["?"]
    others += [name for name in _MIXED_LAYERS if config.get(name)]
    if others:
        raise UnsupportedError(
            f"{path}: what its layers keep is not known ({', '.join(others)}): give --kv-bytes-per-token instead"
        )


def _dtype(config: Mapping[str, Any], path: Path) -> tuple[int, str]:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"  # as transformers takes a missing one
    nbytes = _DTYPE_NBYTES.get(str(name))
    if nbytes is None:
        raise UnsupportedError(f"{path}: the size of dtype {name!r} is not known: give --kv-bytes-per-token instead")
    return nbytes, str(name)
