"""The transformers integration on small random models: what is restored is what was computed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from transformers import DynamicCache, StaticCache

from kvmoor.integrations.transformers import RestoredPrefix, StoredPrefix
from moored_model import BLOCK, SHAPE, VOCABULARY, assert_same_bits, make_model, open_moored, prompt_of, states


@pytest.mark.parametrize("num_tokens", range(1, 3 * BLOCK + 2))
def test_restores_all_full_blocks_but_never_the_last_token(moor, num_tokens) -> None:
    """Around every block boundary the restored states are the stored ones, to the bit, and one token is left."""
    moored = moor()
    prompt = prompt_of(num_tokens)
    computed, _ = moored.store(prompt)
    cache, restored = moored.restore(prompt)

    expected = (num_tokens - 1) // BLOCK * BLOCK
    assert RestoredPrefix(expected, expected, 0) == restored
    assert expected == cache.get_seq_length()
    if expected:
        assert_same_bits(states(computed, expected), states(cache, expected))


@pytest.mark.parametrize("num_tokens", [2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK - 1, 40])
def test_computes_the_same_logits_after_a_restored_prefix(moor, num_tokens) -> None:
    """The rest of a prompt has the same logits, to the bit, behind a restored prefix and behind a computed one."""
    moored = moor()
    prompt = prompt_of(num_tokens)
    computed, _ = moored.store(prompt)
    cache, restored = moored.restore(prompt)

    computed.crop(restored.num_tokens - num_tokens)
    assert torch.equal(moored.compute(prompt, computed), moored.compute(prompt, cache))


def test_restores_from_host_memory_what_the_device_pool_has_lost(moor) -> None:
    """A prompt that another one has pushed out of the pool comes back from host memory, to the bit."""
    moored = moor(device_blocks=5)
    prompt = prompt_of(5 * BLOCK)
    computed, _ = moored.store(prompt)
    moored.store(prompt_of(5 * BLOCK, seed=2))
    cache, restored = moored.restore(prompt)

    assert RestoredPrefix(4 * BLOCK, 0, 4 * BLOCK) == restored
    assert_same_bits(states(computed, 4 * BLOCK), states(cache, 4 * BLOCK))


def test_restores_runs_from_the_pool_and_from_host_memory_in_turn(moor) -> None:
    """Blocks that the pool lacks between blocks that it has are loaded, and only those."""
    moored = moor()
    prompt = prompt_of(7 * BLOCK + 1)
    computed, _ = moored.store(prompt)
    keys = moored.prefix_cache._key_builder.prompt_keys(prompt)
    moored.prefix_cache._pool.index.forget([keys[1], keys[4], keys[5]])
    cache, restored = moored.restore(prompt)

    assert RestoredPrefix(7 * BLOCK, 4 * BLOCK, 3 * BLOCK) == restored
    assert_same_bits(states(computed, 7 * BLOCK), states(cache, 7 * BLOCK))


def test_restores_what_two_prompts_share(moor) -> None:
    """Of another prompt with the same beginning, the blocks before the first different token are restored."""
    moored = moor()
    prompt = prompt_of(6 * BLOCK)
    moored.store(prompt)
    other = [*prompt[: 3 * BLOCK + 2], *prompt_of(2 * BLOCK, seed=2)]
    _, restored = moored.restore(other)
    assert RestoredPrefix(3 * BLOCK, 3 * BLOCK, 0) == restored


@pytest.mark.parametrize("first_kind", ["dynamic", "static"])
@pytest.mark.parametrize("second_kind", ["dynamic", "lazy dynamic", "static"])
def test_gives_the_same_text_with_every_kind_of_cache(moor, first_kind, second_kind) -> None:
    """What one kind of cache was stored from, another is filled with, and `generate` gives the text it gives alone."""
    moored = moor()
    make = {
        "dynamic": moored.new_cache,
        "lazy dynamic": DynamicCache,
        "static": lambda: StaticCache(config=moored.model.config, max_cache_len=40),
    }
    prompt = prompt_of(30)
    expected = moored.generate(prompt)
    first, nothing = moored.answer(prompt, make[first_kind]())
    second, restored = moored.answer(prompt, make[second_kind]())
    assert (0, 28) == (nothing.num_tokens, restored.num_tokens)
    assert expected == first == second


def test_keeps_generated_tokens_for_the_next_turn(moor) -> None:
    """A conversation that goes on finds prompt and answer, without the last token, which was never computed."""
    moored = moor()
    output, _ = moored.answer(prompt_of(2 * BLOCK + 3))  # and 6 tokens are generated, of which 5 have states
    assert 4 * BLOCK + 1 == len(output)
    _, restored = moored.restore([*output, 1, 2, 3])
    assert 4 * BLOCK == restored.num_tokens


def other_models():
    """Yield configurations whose states have other shapes than those of a Llama."""
    yield (
        "multi-head, learned positions",
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
        ),
    )
    yield "one head of keys and values", transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 1})
    yield "bfloat16", transformers.LlamaConfig(**SHAPE, dtype=torch.bfloat16)
    yield (
        "keys longer than values",
        transformers.DeepseekV3Config(
            **{**SHAPE, "num_key_value_heads": 4},
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    )


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in other_models()])
def test_serves_models_of_other_shapes(moor, config) -> None:
    """States of any number, size and type are restored to the bit, from host memory as well."""
    moored = moor(make_model(config), device_blocks=6)
    prompt = prompt_of(6 * BLOCK)
    computed, _ = moored.store(prompt)
    moored.store(prompt_of(6 * BLOCK, seed=2))
    cache, restored = moored.restore(prompt)
    assert RestoredPrefix(5 * BLOCK, 0, 5 * BLOCK) == restored
    assert_same_bits(states(computed, 5 * BLOCK), states(cache, 5 * BLOCK))


@settings(max_examples=20)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 24), st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=8
    ),
    device_blocks=st.integers(1, 12),
    host_blocks=st.integers(1, 12),
)
def test_never_restores_other_bytes(llama, prompts, device_blocks, host_blocks) -> None:
    """Whatever was asked before and however little fits, a restored prefix is what the model computes for it."""
    with open_moored(llama, device_blocks=device_blocks, host_blocks=host_blocks) as moored:
        for beginning, length, ending, rest in prompts:
            prompt = prompt_of(24, seed=beginning)[:length] + prompt_of(12, seed=10 + ending)[:rest]
            computed, _ = moored.store(prompt) if rest % 2 else (moored.new_cache(), None)
            if not rest % 2:
                moored.compute(prompt, computed)
            cache, restored = moored.restore(prompt)
            assert restored.num_tokens <= (len(prompt) - 1) // BLOCK * BLOCK
            if restored.num_tokens:
                for expected, actual in zip(
                    states(computed, restored.num_tokens), states(cache, restored.num_tokens), strict=True
                ):
                    torch.testing.assert_close(expected, actual, rtol=1e-4, atol=1e-5)
            moored.prefix_cache._pool.index.check_invariants()


# What does not fit.


def test_keeps_as_much_of_a_long_prompt_as_the_pool_holds(moor) -> None:
    """Of a prompt longer than the pool, its beginning is stored and restored; the answer is the same."""
    moored = moor(device_blocks=3)
    prompt = prompt_of(10 * BLOCK)
    expected = moored.generate(prompt)
    _, stored = moored.store(prompt)
    answer, restored = moored.answer(prompt)
    assert StoredPrefix(3 * BLOCK, 3 * BLOCK, 3 * BLOCK) == stored
    assert 3 * BLOCK == restored.num_tokens
    assert expected == answer


def test_keeps_as_much_of_a_long_prompt_as_host_memory_holds(moor) -> None:
    """Of a prompt longer than host memory, its beginning goes there."""
    moored = moor(host_blocks=2, device_blocks=5)
    prompt = prompt_of(5 * BLOCK)
    _, stored = moored.store(prompt)
    moored.prefix_cache._pool.index.reset()
    _, restored = moored.restore(prompt)
    assert StoredPrefix(5 * BLOCK, 5 * BLOCK, 2 * BLOCK) == stored
    assert RestoredPrefix(2 * BLOCK, 0, 2 * BLOCK) == restored


def test_computes_again_what_neither_pool_nor_host_memory_holds(moor) -> None:
    """A prompt that has been pushed out of both is a miss, and its answer is the same."""
    moored = moor(host_blocks=4, device_blocks=4)
    prompt = prompt_of(4 * BLOCK)
    expected = moored.generate(prompt)
    moored.store(prompt)
    moored.store(prompt_of(4 * BLOCK, seed=2))
    answer, restored = moored.answer(prompt)
    assert RestoredPrefix(0, 0, 0) == restored
    assert expected == answer


def test_stores_nothing_twice(moor) -> None:
    """Storing a known sequence copies nothing; storing a longer one copies only the new blocks."""
    moored = moor()
    prompt = prompt_of(6 * BLOCK)
    moored.store(prompt[: 4 * BLOCK])
    _, again = moored.store(prompt[: 4 * BLOCK + 3])
    _, longer = moored.store(prompt)
    assert StoredPrefix(4 * BLOCK, 0, 0) == again
    assert StoredPrefix(6 * BLOCK, 2 * BLOCK, 2 * BLOCK) == longer


def test_forgets_everything_on_reset(moor) -> None:
    """After `reset`, as after a change of the weights, nothing is restored."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache.reset()
    _, restored = moored.restore(prompt)
    assert RestoredPrefix(0, 0, 0) == restored
