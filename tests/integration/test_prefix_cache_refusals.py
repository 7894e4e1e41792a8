"""What the transformers integration refuses, and what it calls a block so that it never takes one for another."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, QuantizedCache, QuantoQuantizedLayer

from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import RequestError, SettingsError, UnsupportedError
from kvmoor.integrations.transformers import PrefixCache
from kvmoor.integrations.transformers.model_identity import model_namespace
from moored_model import BLOCK, SHAPE, VOCABULARY, make_model, prompt_of


class ForgetfulLayer(DynamicLayer):
    """A layer of somebody's own."""


def forgetful_cache(model):
    cache = DynamicCache(config=model.config)
    cache.layers[1] = ForgetfulLayer()
    return cache


def sliding_cache(model):
    return DynamicCache(config=transformers.MistralConfig(**SHAPE, sliding_window=8))


def quantized_cache(model):
    cache = QuantizedCache.__new__(QuantizedCache)  # its constructor needs a package that does the quantising
    cache.layers = [QuantoQuantizedLayer.__new__(QuantoQuantizedLayer)]
    return cache


def offloaded_cache(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # the constructor asks for a stream, which not every machine has
    return cache


@pytest.mark.parametrize(
    ("make_cache", "complaint"),
    [
        (sliding_cache, "layer 0 of the cache is a DynamicSlidingWindowLayer: only full attention"),
        (quantized_cache, "the cache is a QuantizedCache: pass DynamicCache"),
        (forgetful_cache, "layer 1 of the cache is a ForgetfulLayer"),
        (offloaded_cache, "offloading=True"),
        (lambda model: type("MyCache", (DynamicCache,), {})(config=model.config), "the cache is a MyCache"),
        (lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()), "the cache is a EncoderDecoderCache"),
        (lambda model: ((torch.zeros(1), torch.zeros(1)),), "the cache is a tuple"),
    ],
)
def test_refuses_other_kinds_of_caches(moor, make_cache, complaint) -> None:
    """A cache that keeps less than every token, or keeps it otherwise, is refused by naming what was found."""
    moored = moor()
    cache = make_cache(moored.model)
    for call in (moored.prefix_cache.restore, moored.prefix_cache.store):
        with pytest.raises(UnsupportedError, match=complaint):
            call(prompt_of(9), cache)


def test_refuses_caches_that_do_not_fit_the_call(moor) -> None:
    """A cache that holds something, is too short, belongs to another model or holds other tokens is refused."""
    moored = moor()
    prompt = prompt_of(9)
    full, _ = moored.store(prompt)
    with pytest.raises(RequestError, match="holds 9 tokens already"):
        moored.prefix_cache.restore(prompt, full)
    with pytest.raises(RequestError, match="has 9 tokens and the cache holds 8: raise its max_cache_len"):
        moored.prefix_cache.restore(prompt, StaticCache(config=moored.model.config, max_cache_len=8))
    with pytest.raises(RequestError, match="holds 9 tokens and 8 token ids were given"):
        moored.prefix_cache.store(prompt[:8], full)
    deeper = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 4})
    with pytest.raises(RequestError, match="has 4 layers, the model has 3"):
        moored.prefix_cache.restore(prompt, DynamicCache(config=deeper))
    full.layers[1].keys = full.layers[1].keys.double()
    with pytest.raises(RequestError, match=r"2 heads of 16 torch\.float64"):
        moored.prefix_cache.store(prompt, full)


def test_refuses_batches(moor) -> None:
    """Several sequences are refused, whether as token ids or in the cache; a batch axis of 1 is taken."""
    moored = moor()
    prompt = prompt_of(9)
    with pytest.raises(UnsupportedError, match="2 sequences were given"):
        moored.prefix_cache.restore([prompt, prompt], moored.new_cache())
    full, _ = moored.store(prompt)
    full.batch_repeat_interleave(2)
    with pytest.raises(UnsupportedError, match="the cache holds 2 sequences"):
        moored.prefix_cache.store(prompt, full)
    assert 2 * BLOCK == moored.prefix_cache.restore(torch.tensor([prompt]), moored.new_cache()).num_tokens


@pytest.mark.parametrize("token_ids", [[], [[[1]]], [0.5, 1.0], ["a"], 7, [1, -1, 2, 3, 4]])
def test_refuses_what_are_no_token_ids(moor, token_ids) -> None:
    """Token ids that are none are a RequestError, whatever they are."""
    moored = moor()
    with pytest.raises(RequestError, match="token_ids has shape"):
        moored.prefix_cache.restore(token_ids, moored.new_cache())


def unsupported_models():
    """Yield models whose prefixes cannot be kept, and what is said about each."""
    llama = transformers.LlamaConfig
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    yield "sliding window", transformers.MistralConfig(**SHAPE, sliding_window=8), "DynamicSlidingWindowLayer"
    yield "length-dependent positions", llama(**SHAPE, rope_parameters=rope), "rotary embedding .* 'dynamic'"
    yield (
        "no attention",
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
        "is a LinearAttentionLayer",
    )


@pytest.mark.parametrize(
    ("config", "complaint"), [pytest.param(config, words, id=name) for name, config, words in unsupported_models()]
)
def test_refuses_models_whose_prefixes_cannot_be_kept(config, complaint) -> None:
    """A model that keeps less than all tokens, or computes a prefix by what follows it, is refused at the start."""
    with pytest.raises(UnsupportedError, match=complaint):
        PrefixCache(make_model(config), host_memory="1MiB")


def test_refuses_what_is_no_decoder_of_text() -> None:
    """Encoder-decoder models, models that see, and things that are no model are refused by name."""
    text = transformers.LlamaConfig(**SHAPE)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    seeing = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, vision_feature_layer=-1)
    )
    translating = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    )
    for model, complaint in [
        (seeing, "takes more than text"),
        (translating, "is an encoder-decoder model"),
        (torch.nn.Linear(2, 2), "the model is a Linear"),
    ]:
        with pytest.raises(UnsupportedError, match=complaint):
            PrefixCache(model, host_memory="1MiB")


@pytest.mark.parametrize(
    "options",
    [
        {"device_blocks": 0},
        {"tokens_per_block": 0},
        {"host_memory": "much"},
        {"host_memory": 100},
        {"transfer_timeout_s": 0},
    ],
)
def test_refuses_bad_settings_and_closes_the_device(llama, options) -> None:
    """Settings that cannot be used are a SettingsError, and the device that was handed over is closed."""
    device = CpuDevice()
    with pytest.raises(SettingsError):
        PrefixCache(llama, **{"host_memory": "1MiB", "device": device, **options})
    assert device.closed


# What a block is called.


def test_namespace_tells_models_apart(llama) -> None:
    """Other weights, type, name, revision, configuration or layout give other keys; the same model gives the same."""
    layout = b"l" * 32
    namespace = model_namespace(llama, layout_fingerprint=layout)
    changed = {
        "weights": make_model(transformers.LlamaConfig(**SHAPE), seed=1),
        "type": make_model(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16),
        "name": make_model(transformers.LlamaConfig(**SHAPE, name_or_path="other")),
        "configuration": make_model(transformers.LlamaConfig(**SHAPE, rms_norm_eps=1e-4)),
        "revision": make_model(transformers.LlamaConfig(**SHAPE)),
    }
    changed["revision"].config._commit_hash = "abc"
    found = {name: model_namespace(model, layout_fingerprint=layout) for name, model in changed.items()}
    found["layout"] = model_namespace(llama, layout_fingerprint=b"m" * 32)

    assert namespace == model_namespace(make_model(transformers.LlamaConfig(**SHAPE)), layout_fingerprint=layout)
    assert len(found) + 1 == len({each.digest() for each in (namespace, *found.values())})
