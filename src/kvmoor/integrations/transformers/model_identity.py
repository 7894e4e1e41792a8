"""Which models can be served, what their states look like, and what their blocks are called.

A block may be given back only to a model that would compute the very same bytes. So everything that shapes the bytes
of a prefix goes into the namespace of its keys, and a model whose prefix depends on more than its tokens is refused.
"""

from itertools import chain
from typing import Any, Final

import torch
from blake3 import blake3
from transformers import DynamicCache, PreTrainedModel

from kvmoor.errors import UnsupportedError
from kvmoor.integrations.transformers.cache_objects import StateGeometry, cache_argument, refuse_unsupported
from kvmoor.key_builder import Namespace

_FORMAT: Final = 1
_SAMPLES_PER_TENSOR: Final = 1024
"""Elements of each weight that are hashed. Guessed: enough for a fine-tune; 272 tensors take 8 ms on 2 cores."""
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def refuse_unsupported_model(model: Any) -> None:
    """Raise `UnsupportedError` for a model whose keys and values are not a function of the tokens before them alone."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UnsupportedError(f"the model is a {type(model).__name__}: pass a causal language model of transformers")
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder-decoder model, whose states depend on the encoder's input: "
            "pass a decoder-only model"
        )
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedError(
            f"{type(model).__name__} takes more than text, and keys of blocks cover token ids only: "
            "pass a model for text alone"
        )
    if model.training and any("drop" in name and value for name, value in config.to_dict().items()):
        raise UnsupportedError(
            f"{type(model).__name__} is in training mode with dropout, so the same tokens give other states each time: "
            "call model.eval()"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"the rotary embedding of {type(model).__name__} is {rope_type!r}, which makes the keys of a prefix "
                "depend on the length of the whole prompt, so they fit no other: run this model without a prefix cache"
            )
    refuse_unsupported(DynamicCache(config=config))


def measure_geometry(model: Any) -> StateGeometry:
    """Run one token through the model and look at the states it makes.

    The configuration is not asked: head counts and sizes go by many names there, and some models cache other shapes.
    Raises `UnsupportedError` for another kind of cache, and for states on several devices or of several types.
    """
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = model(token, use_cache=True).get(cache_argument(model))
    refuse_unsupported(cache)
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    kinds = {(state.dtype, state.device) for state in states}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise UnsupportedError(
            f"the model keeps states of several kinds ({found}): load it with one type, on one device"
        )
    dtype, device = kinds.pop()
    return StateGeometry(tuple((state.shape[1], state.shape[3]) for state in states), dtype, device)


def model_namespace(model: Any, *, layout_fingerprint: bytes) -> Namespace:
    """Name everything that shapes the bytes of a block, so that another model's blocks are never found.

    Weights count with some thousand evenly spaced elements of each parameter and buffer; a change that misses all of
    these goes unseen, so a model edited by hand needs another `name_or_path`.
    """
    config = model.config
    return Namespace(
        model=type(model).__name__,  # a model that was not loaded has no name of its own
        revision=getattr(config, "_commit_hash", None),
        layout_fingerprint=layout_fingerprint,
        extra={
            "identity_format": _FORMAT,
            "engine": "transformers",
            "name_or_path": str(config.name_or_path),
            "config": config.to_json_string(use_diff=False),
            "weights": _sample_weights(model),
            "dtype": str(model.dtype),
            "attention": str(getattr(config, "_attn_implementation", "")),
        },
    )


def _rope_types(rope_parameters: Any) -> list[str]:
    """Return the kinds of rotary embedding of a configuration, which has one set of parameters or one a layer type."""
    if not isinstance(rope_parameters, dict):
        return []
    nested = [_rope_types(value) for value in rope_parameters.values()]
    own = rope_parameters.get("rope_type")
    return list(chain([own] if isinstance(own, str) else [], *nested))


def _sample_weights(model: Any) -> bytes:
    hasher = blake3()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.device.type != "meta" and tensor.numel():
            elements = tensor.detach().flatten()
            sample = elements[:: max(1, elements.numel() // _SAMPLES_PER_TENSOR)]
            hasher.update(sample.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return bytes(hasher.digest())
