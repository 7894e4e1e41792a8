"""What kvmoor asks of the cache objects of transformers: a few plain kinds, read and filled through their own methods.

A cache holds keys and values of one layer as ``[batch, kv_heads, tokens, head_dim]``. *States* here are these tensors
for batch size 1, without the batch axis, in the order keys of layer 0, values of layer 0, keys of layer 1, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

from kvmoor.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """What the states of a model look like: ``(kv_heads, head_dim)`` of each, their type, and where they lie."""

    heads_and_dims: tuple[tuple[int, int], ...]
    dtype: "torch.dtype"
    device: "torch.device"

    @property
    def num_layers(self) -> int:
        """Return how many layers have keys and values."""
        return len(self.heads_and_dims) // 2


def cache_argument(model: Any) -> str:
    """Return the name under which a model and its `generate` take a cache object; older releases have another."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def refuse_unsupported(cache: Any) -> None:
    """Raise `UnsupportedError` unless every token of every layer is kept as it was computed.

    Types are compared exactly: a subclass that keeps less, or keeps it elsewhere, looks the same from outside.
    """
    kind = type(cache)
    if kind is not DynamicCache and kind is not StaticCache:
        raise UnsupportedError(
            f"the cache is a {kind.__name__}: pass DynamicCache(config=model.config) or a StaticCache"
        )
    if cache.offloading:
        raise UnsupportedError(
            "the cache moves its layers to host memory itself (offloading=True): create it without offloading"
        )
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer and type(layer) is not StaticLayer:
            raise UnsupportedError(
                f"layer {number} of the cache is a {type(layer).__name__}: only full attention can be restored "
                "(DynamicLayer, StaticLayer), so run this model without a prefix cache"
            )


def refuse_mismatch(cache: Any, geometry: StateGeometry) -> None:
    """Raise `RequestError` for a cache that holds states of another model, or of more than one sequence."""
    if cache.layers and len(cache.layers) != geometry.num_layers:
        raise RequestError(
            f"the cache has {len(cache.layers)} layers, the model has {geometry.num_layers}: pass a cache of this model"
        )
    for state, (kv_heads, head_dim) in zip(_whole_states(cache), geometry.heads_and_dims, strict=False):
        if state.shape[0] != 1:
            raise UnsupportedError(f"the cache holds {state.shape[0]} sequences: kvmoor handles one at a time")
        found = (state.shape[1], state.shape[3], state.dtype, state.device)
        if found != (kv_heads, head_dim, geometry.dtype, geometry.device):
            raise RequestError(
                f"the cache holds {state.shape[1]} heads of {state.shape[3]} {state.dtype} on {state.device}, but the "
                f"model makes {kv_heads} of {head_dim} {geometry.dtype} on {geometry.device}: pass one of its own"
            )


def cached_tokens(cache: Any) -> int:
    """Return for how many tokens the cache holds keys and values."""
    lengths = {int(layer.get_seq_length()) for layer in cache.layers}
    if len(lengths) > 1:
        raise RequestError(f"the layers of the cache hold {sorted(lengths)} tokens: pass a cache that is filled evenly")
    return lengths.pop() if lengths else 0


def capacity(cache: Any) -> int | None:
    """Return how many tokens the cache can hold, or None if it grows."""
    lengths = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    return min(lengths) if lengths else None


def read_states(cache: Any, num_tokens: int) -> list["torch.Tensor"]:
    """Return views of the states of the first `num_tokens` tokens: ``[kv_heads, num_tokens, head_dim]`` each."""
    return [state[0, :, :num_tokens] for state in _whole_states(cache)]


def fill(cache: Any, states: Iterator["torch.Tensor"]) -> None:
    """Put states into an empty cache, as if the model had computed them; leaves it empty if that fails."""
    try:
        for number, (keys, values) in enumerate(zip(states, states, strict=True)):
            cache.update(keys.unsqueeze(0), values.unsqueeze(0), number)
    except BaseException:
        cache.reset()
        raise


def _whole_states(cache: Any) -> list["torch.Tensor"]:
    """Return the tensors of all layers that have any: those of a static cache are as long as its capacity."""
    return [state for layer in cache.layers if layer.is_initialized for state in (layer.keys, layer.values)]
