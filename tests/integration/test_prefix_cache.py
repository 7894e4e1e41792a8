"""The transformers integration on small random models: what is restored is what was computed, or it is refused.

Blocks have 4 tokens here. `Moored` joins a model and a prefix cache, and answers prompts through both.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, QuantizedCache, QuantoQuantizedLayer

from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import BusyError, ClosedError, RequestError, SettingsError, UnsupportedError
from kvmoor.integrations.transformers import PrefixCache, RestoredPrefix, StoredPrefix
from kvmoor.integrations.transformers.cache_objects import cache_argument
from kvmoor.integrations.transformers.model_identity import model_namespace
from kvmoor.testing import ScriptedCopies

BLOCK = 4
WAIT_S = 20.0
VOCABULARY = 97
SLOT_NBYTES = (
    4096  # a block of the Llama below: 2 states x 3 layers x 2 heads x 4 tokens x 16 numbers x 4 bytes = 3,072
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass
class Moored:
    """A model, a prefix cache over it, and the script of its copies."""

    model: object
    prefix_cache: PrefixCache
    copies: ScriptedCopies

    def new_cache(self):
        return DynamicCache(config=self.model.config)

    def compute(self, prompt, cache):
        """Compute what the cache lacks of a prompt; return the logits of the last token."""
        rest = torch.tensor([prompt[int(cache.get_seq_length()) :]])
        with torch.no_grad():
            return self.model(rest, **{cache_argument(self.model): cache}).logits[0, -1]

    def generate(self, prompt, cache=None):
        """Answer a prompt greedily; return all token ids."""
        ids = torch.tensor([prompt])
        options = {cache_argument(self.model): cache, "attention_mask": torch.ones_like(ids)}
        return self.model.generate(ids, max_new_tokens=6, do_sample=False, **options)[0].tolist()

    def store(self, prompt):
        """Compute a prompt from nothing and store it; return its cache, and what storing said."""
        cache = self.new_cache()
        self.compute(prompt, cache)
        return cache, self.prefix_cache.store(prompt, cache)

    def restore(self, prompt):
        """Restore into a new cache; return it, and what restoring said."""
        cache = self.new_cache()
        return cache, self.prefix_cache.restore(prompt, cache)

    def answer(self, prompt, cache=None):
        """Restore, generate and store; return all token ids, and what restoring said."""
        cache = self.new_cache() if cache is None else cache
        restored = self.prefix_cache.restore(prompt, cache)
        output = self.generate(prompt, cache)
        self.prefix_cache.store(output, cache)
        return output, restored


@contextmanager
def open_moored(model, *, host_blocks=64, device_blocks=32, **options) -> Iterator[Moored]:
    """Open a prefix cache; leaving it checks that its books balance and that it gives everything back."""
    with ScriptedCopies() as copies:
        prefix_cache = PrefixCache(
            model,
            host_memory=host_blocks * SLOT_NBYTES,
            device_blocks=device_blocks,
            tokens_per_block=BLOCK,
            device=CpuDevice(copy_hook=copies),
            **options,
        )
        try:
            yield Moored(model, prefix_cache, copies)
        finally:
            copies.release_all()
            assert prefix_cache.close().worker.graceful
        prefix_cache._pool.index.check_invariants()
        withheld = list(prefix_cache._withheld.values())
        assert [] == [lease for lease in prefix_cache._pool.index.unresolved_leases() if lease not in withheld]


@pytest.fixture
def moor(llama) -> Iterator[Callable[..., Moored]]:
    with ExitStack() as opened:
        yield lambda model=llama, **options: opened.enter_context(open_moored(model, **options))


def make_model(config, *, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama():
    """A Llama with grouped-query attention: 4 query heads share 2 heads of keys and values."""
    return make_model(transformers.LlamaConfig(**SHAPE))


def prompt_of(num_tokens, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (num_tokens,), generator=generator).tolist()


def states(cache, num_tokens):
    """Return keys and values of the first tokens, layer by layer."""
    return [state[:, :, :num_tokens] for layer in cache.layers for state in (layer.keys, layer.values)]


def assert_same_bits(expected, actual):
    assert [state.shape for state in expected] == [state.shape for state in actual]
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


# What is restored is what was computed.


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
    keys = moored.prefix_cache._keys(prompt)
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
    moored.prefix_cache._pool.index.clear()
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


# What goes wrong.


def test_load_that_fails_is_a_miss(moor) -> None:
    """If a block cannot be loaded, its prompt is computed, its rows are free again, and the next load succeeds."""
    moored = moor(device_blocks=5)
    prompt = prompt_of(5 * BLOCK)
    expected = moored.generate(prompt)
    moored.store(prompt)
    moored.prefix_cache._pool.index.clear()
    moored.copies.fail_at(2, queue="load")

    cache, restored = moored.restore(prompt)
    assert RestoredPrefix(0, 0, 0) == restored
    assert 5 == moored.prefix_cache.statistics().device_pool.free
    assert expected == moored.generate(prompt, cache)
    _, restored = moored.restore(prompt)
    assert RestoredPrefix(4 * BLOCK, 0, 4 * BLOCK) == restored


def test_load_that_fails_keeps_the_prefix_before_it(moor) -> None:
    """Blocks in front of those that cannot be loaded are restored all the same."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache._pool.index.forget(moored.prefix_cache._keys(prompt)[2:])
    moored.copies.fail_at(0, queue="load")
    _, restored = moored.restore(prompt)
    assert RestoredPrefix(2 * BLOCK, 2 * BLOCK, 0) == restored


def test_rows_of_a_load_that_does_not_end_are_withheld_until_it_does(moor) -> None:
    """A load past its deadline is a miss; its rows are given to nobody until the copy is proven over."""
    moored = moor(device_blocks=6, transfer_timeout_s=0.05)
    prompt = prompt_of(4 * BLOCK + 1)
    moored.store(prompt)
    moored.prefix_cache._pool.index.clear()
    gate = moored.copies.hang_at(0, queue="load")

    _, restored = moored.restore(prompt)
    assert RestoredPrefix(0, 0, 0) == restored
    assert 4 == moored.prefix_cache.statistics().device_pool.held
    _, stored = moored.store(prompt_of(6 * BLOCK, seed=2))
    assert 2 * BLOCK == stored.num_tokens

    gate.release()
    moored.prefix_cache._offloader.wait(list(moored.prefix_cache._withheld), WAIT_S)
    _, stored = moored.store(prompt_of(6 * BLOCK, seed=2))
    assert 0 == moored.prefix_cache.statistics().device_pool.held
    assert 6 * BLOCK == stored.num_tokens


def test_store_that_fails_leaves_the_pool_as_it_is(moor) -> None:
    """If host memory cannot take a prompt, storing says so; the pool has it, and the next store brings it there."""
    moored = moor()
    prompt = prompt_of(3 * BLOCK)
    moored.copies.fail_at(1, queue="store")
    _, failed = moored.store(prompt)
    _, again = moored.store(prompt)
    assert StoredPrefix(3 * BLOCK, 3 * BLOCK, 0, "the copy failed") == failed
    assert StoredPrefix(3 * BLOCK, 0, 3 * BLOCK) == again


def test_rows_of_a_store_that_does_not_end_are_not_filled_anew(moor) -> None:
    """While a copy to host memory may still read its rows, no other prompt gets them."""
    moored = moor(device_blocks=4, transfer_timeout_s=0.05)
    gate = moored.copies.hang_at(0, queue="store")
    prompt = prompt_of(3 * BLOCK)
    _, given_up = moored.store(prompt)
    assert StoredPrefix(3 * BLOCK, 3 * BLOCK, 0, "the copy was given up") == given_up
    _, stored = moored.store(prompt_of(3 * BLOCK, seed=2))
    assert BLOCK == stored.num_tokens
    _, restored = moored.restore([*prompt, 1])
    assert RestoredPrefix(3 * BLOCK, 3 * BLOCK, 0) == restored

    gate.release()
    moored.prefix_cache._offloader.wait(list(moored.prefix_cache._withheld), WAIT_S)
    _, stored = moored.store(prompt_of(4 * BLOCK, seed=3))
    assert 4 * BLOCK == stored.num_tokens


def test_interruption_withholds_the_rows_of_a_load(moor, monkeypatch) -> None:
    """Ctrl-C while a load runs leaves the cache empty and the rows withheld; closing still gives everything back."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache._pool.index.clear()

    def interrupt(job_ids, timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(moored.prefix_cache._offloader, "wait", interrupt)
    cache = moored.new_cache()
    with pytest.raises(KeyboardInterrupt):
        moored.prefix_cache.restore(prompt, cache)
    assert 0 == cache.get_seq_length()
    assert 4 == moored.prefix_cache.statistics().device_pool.held


def test_cache_that_cannot_be_filled_is_left_empty(moor, monkeypatch) -> None:
    """If filling fails in the middle, no layer keeps anything, and the prompt can be computed into the same cache."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    expected = moored.generate(prompt)
    moored.store(prompt)
    cache = moored.new_cache()
    with monkeypatch.context() as broken:
        broken.setattr(cache.layers[2], "update", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            moored.prefix_cache.restore(prompt, cache)
    assert [0, 0, 0] == [layer.get_seq_length() for layer in cache.layers]
    assert expected == moored.generate(prompt, cache)


def test_second_thread_is_told_that_the_cache_is_in_use(moor) -> None:
    """Of two threads, the one that comes second gets a BusyError at once, and the first one is not disturbed."""
    moored = moor()
    prompt = prompt_of(5 * BLOCK)
    moored.store(prompt)
    moored.prefix_cache._pool.index.clear()
    gate = moored.copies.hang_at(0, queue="load")
    found = []
    first = threading.Thread(target=lambda: found.append(moored.restore(prompt)[1]))
    first.start()
    assert gate.wait_reached(WAIT_S)
    with pytest.raises(BusyError, match="another thread"):
        moored.restore(prompt)
    gate.release()
    first.join(WAIT_S)
    assert [RestoredPrefix(4 * BLOCK, 0, 4 * BLOCK)] == found


def test_closed_cache_refuses_everything(llama) -> None:
    """After the `with` block every call says that the cache is closed; closing again does no harm."""
    with open_moored(llama) as moored:
        cache, _ = moored.store(prompt_of(9))
    assert moored.prefix_cache.closed
    assert moored.prefix_cache.close() == moored.prefix_cache.close()
    for call in (
        lambda: moored.prefix_cache.restore(prompt_of(9), moored.new_cache()),
        lambda: moored.prefix_cache.store(prompt_of(9), cache),
        moored.prefix_cache.reset,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_forgotten_close_is_a_warning(llama) -> None:
    """A prefix cache that nobody closed says so when it goes away."""
    prefix_cache = PrefixCache(llama, host_memory="1MiB", device_blocks=4)
    with pytest.warns(ResourceWarning, match="PrefixCache.*never closed"):
        prefix_cache.__del__()
    prefix_cache.close()


# What is refused.


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
    assert len(found) + 1 == len({namespace, *found.values()})
