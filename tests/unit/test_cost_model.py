"""What a token costs by the config of a model, and which capacities are worth trying and buying."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.errors import KvmoorError, RequestError, SettingsError, UnsupportedError
from kvmoor.simulation.capacities import capacity_ladder, find_knee
from kvmoor.simulation.cost_model import check_bytes_per_token, kv_size_of_config, nbytes_a_day

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
GEMMA = {
    "dtype": "bfloat16",
    "text_config": {**LLAMA, "torch_dtype": None, "head_dim": 256, "layer_types": ["sliding_attention"] * 32},
}


@pytest.fixture
def config(tmp_path):
    """Write a config.json and return it."""

    def write(value):
        path = tmp_path / "config.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


@pytest.mark.parametrize(
    ("fields", "nbytes", "explanation"),
    [
        (LLAMA, 32 * 2 * 8 * 128 * 2, "32 layers x 2 x 8 heads x 128 numbers of bfloat16"),
        (DEEPSEEK, 61 * 576 * 2, "61 layers x a latent of 576 numbers of bfloat16"),
        (GPT2, 12 * 2 * 12 * 64 * 4, "12 layers x 2 x 12 heads x 64 numbers of float32"),
        (GEMMA, 32 * 2 * 8 * 256 * 2, "32 layers x 2 x 8 heads x 256 numbers of bfloat16"),
    ],
    ids=["grouped heads", "latent attention", "old names", "a model with images"],
)
def test_the_size_of_a_token_is_computed_from_the_config(config, fields, nbytes, explanation):
    """Layers, heads, their size and the type give the bytes, whatever the model calls them, and say how."""
    size = kv_size_of_config(config(fields))
    assert (nbytes, explanation) == (size.bytes_per_token, size.explanation)


@pytest.mark.parametrize(
    ("fields", "error", "complaint"),
    [
        ("{", RequestError, "is not JSON"),
        ("[]", RequestError, "is a JSON list: give the config.json"),
        ({}, RequestError, "does not say num_hidden_layers or n_layer: give --kv-bytes-per-token"),
        ({**LLAMA, "num_hidden_layers": "32"}, RequestError, "num_hidden_layers is '32'"),
        ({**LLAMA, "hidden_size": -1}, RequestError, "hidden_size is -1"),
        ({**LLAMA, "torch_dtype": "int3"}, UnsupportedError, "the size of dtype 'int3' is not known"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, UnsupportedError, "linear_attention"),
        ({**LLAMA, "layer_types": 5}, UnsupportedError, "what its layers keep is not known"),
        ({**LLAMA, "attn_layer_period": 8}, UnsupportedError, "attn_layer_period"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(config, fields, error, complaint):
    """No size is guessed: the error names the file and what is wrong in it."""
    path = config(fields)
    with pytest.raises(error) as refused:
        kv_size_of_config(path)
    assert isinstance(refused.value, KvmoorError)
    assert str(path) in str(refused.value)
    assert complaint in str(refused.value)


def test_a_config_that_is_missing_is_named(tmp_path):
    """A path that leads nowhere is an error that names it."""
    with pytest.raises(RequestError, match=r"config.json cannot be read"):
        kv_size_of_config(tmp_path / "config.json")


def test_a_token_takes_at_least_a_byte():
    """Sizes below 1 are refused; others are returned."""
    assert 7 == check_bytes_per_token(7)
    with pytest.raises(SettingsError, match="takes 0 bytes"):
        check_bytes_per_token(0)


def test_what_is_written_is_scaled_to_a_day():
    """Half a day of writing is doubled; where no time passes, no day can be said."""
    assert 200 == nbytes_a_day(100, 43_200)
    assert nbytes_a_day(100, 0) is None


@given(st.integers(0, 10**7), st.integers(1, 30))
def test_a_ladder_ends_with_the_whole_trace(num_unique, num_capacities):
    """Capacities ascend, are at least 1 and never named twice; the largest one holds every block of the trace."""
    ladder = capacity_ladder(num_unique, num_capacities)
    assert ladder == sorted(set(ladder))
    assert (max(1, num_unique), 1) == (ladder[-1], min(1, ladder[0]))
    assert all(2 * smaller <= larger <= 2 * smaller + 1 for smaller, larger in pairwise(ladder))


def test_the_knee_is_the_smallest_capacity_that_saves_nearly_all():
    """It is found among the capacities that were tried, exactly at the share too, and nowhere if nothing is saved."""
    hits = [(100, 1000), (10, 950), (1, 949)]
    assert 10 == find_knee(hits)
    assert 1 == find_knee(hits, share=0.5)
    assert 100 == find_knee(hits, share=1)
    assert find_knee([(1, 0), (2, 0)]) is None
