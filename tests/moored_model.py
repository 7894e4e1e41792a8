"""A model of transformers joined with a prefix cache, for the tests of that integration. Importing it needs torch.

Blocks have 4 tokens. The fixtures that go with it, `llama` and `moor`, are in integration/conftest.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from transformers import DynamicCache

from kvmoor.devices.cpu import CpuDevice
from kvmoor.integrations.transformers import PrefixCache
from kvmoor.integrations.transformers.cache_objects import cache_argument
from kvmoor.testing import ScriptedCopies

BLOCK = 4
VOCABULARY = 97
SLOT_NBYTES = 4096  # a block of SHAPE has 3,072: 2 states x 3 layers x 2 heads x 4 tokens x 16 numbers x 4 bytes
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


def make_llama():
    """Make a Llama with grouped-query attention: 4 query heads share 2 heads of keys and values."""
    return make_model(transformers.LlamaConfig(**SHAPE))


def make_model(config, *, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt_of(num_tokens, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (num_tokens,), generator=generator).tolist()


def states(cache, num_tokens):
    """Return keys and values of the first tokens, layer by layer."""
    return [state[:, :, :num_tokens] for layer in cache.layers for state in (layer.keys, layer.values)]


def assert_same_bits(expected, actual):
    assert [state.shape for state in expected] == [state.shape for state in actual]
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
