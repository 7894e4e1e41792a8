"""A model whose keys and values are known: the bytes of a token follow from all tokens up to it, and are checked.

    memory = KvMemory(layers, pages)           # one rank's KV caches
    sequence = Sequence(tokens, blocks, num_computed)
    sampled = forward(memory, [(sequence, num_tokens, drafts), ...])
    propose(memory, sequences, num_drafts)     # the drafter, which has layers of its own

Whatever a copy brings late, early or to the wrong place is a `Wrong` in `memory.wrong`, and changes what is sampled.
Nothing here knows of vLLM: `answer` says what a prompt is answered with if nothing goes wrong.
"""

from dataclasses import dataclass, field

import numpy as np

WORDS_PER_TOKEN = 2
TOKEN_NBYTES = 8 * WORDS_PER_TOKEN
NUM_TOKENS = 97
"""How many different tokens are sampled."""
_MASK = 2**64 - 1


def _mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


@dataclass(frozen=True)
class Layer:
    """One layer. `window`: how many tokens a query sees, itself among them (None: all). Drafters have layers too."""

    name: str
    group: int
    window: int | None = None
    is_draft: bool = False


@dataclass(frozen=True)
class Wrong:
    """Bytes that are not those of the token which should be there."""

    when: str
    request: str
    layer: str
    positions: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass
class Sequence:
    """What a runner keeps of a request. `blocks` are block ids by group; `words` tell the prefix up to each token."""

    request: str
    tokens: list[int]
    blocks: list[list[int]]
    num_computed: int
    num_prompt: int = 0
    drafts: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)

    def words_of(self, length):
        """Return the words of the first tokens as uint64 ``[length]``."""
        del self.words[len(self.tokens) :]
        for token in self.tokens[len(self.words) : length]:
            before = self.words[-1] if self.words else 0x1234_5678
            self.words.append(_mix(before ^ (token * 0x9E3779B97F4A7C15 + 1 & _MASK)))
        return np.array(self.words[:length], np.uint64)

    def replace_tokens(self, tokens):
        self.tokens, self.words = list(tokens), []


class KvMemory:
    """The KV caches of one rank: `pages` by layer name, uint64 ``[num_blocks, tokens_per_block, WORDS_PER_TOKEN]``."""

    def __init__(self, layers, pages, *, rank=0):
        self.layers = layers
        self.pages = pages
        self.tokens_per_block = next(iter(pages.values())).shape[1]
        self.wrong: list[Wrong] = []
        self.spoiled: set[int] = set()
        self.num_checked = 0
        self._rank = rank
        self._weights = 0

    def change_weights(self):
        """Let the bytes of all tokens be others from now on: what was computed before is of no use any more."""
        self._weights += 1

    def zero(self, block_ids):
        for pages in self.pages.values():
            pages[block_ids] = 0

    def copy_blocks(self, pairs):
        for pages in self.pages.values():
            for source, target in pairs:
                pages[target] = pages[source]

    def write(self, layer, sequence, start, end):
        """Write the tokens ``[start, end)`` of a sequence, as far as it has blocks for them."""
        end = min(end, len(sequence.blocks[layer.group]) * self.tokens_per_block)
        blocks, offsets = self._places(layer, sequence, start, end)
        if not blocks.all():
            self._note("writes to the null block", layer, sequence, np.flatnonzero(blocks == 0) + start, blocks)
        self.pages[layer.name][blocks, offsets] = self._content(layer, sequence.words_of(end)[start:])

    def spoil(self, layer, sequence, start, end):
        """Let bytes be as wrong as what they were computed from."""
        blocks, offsets = self._places(layer, sequence, start, end)
        self.pages[layer.name][blocks, offsets] ^= np.uint64(1)
        self.spoiled.update(blocks.tolist())

    def check(self, layer, sequence, start, end, when):
        """Compare the tokens ``[start, end)`` with what they have to be, and return their words as they are."""
        blocks, offsets = self._places(layer, sequence, start, end)
        found = self.pages[layer.name][blocks, offsets]
        expected = self._content(layer, sequence.words_of(end)[start:])
        bad = (found != expected).any(axis=1) | (blocks == 0)
        self.num_checked += end - start
        if bad.any():
            self._note(when, layer, sequence, np.flatnonzero(bad) + start, blocks[bad])
        return found[:, 0] ^ self._salt(layer)[0]

    def _note(self, when, layer, sequence, positions, blocks):
        where = tuple(positions.tolist()), tuple(sorted(set(blocks.tolist())))
        self.wrong.append(Wrong(f"rank {self._rank}: {when}", sequence.request, layer.name, *where))

    def _places(self, layer, sequence, start, end):
        positions = np.arange(start, end)
        ids = np.array(sequence.blocks[layer.group], np.int64)
        return ids[positions // self.tokens_per_block], positions % self.tokens_per_block

    def _content(self, layer, words):
        return words[:, None] ^ self._salt(layer)

    def _salt(self, layer):
        number = (sum(layer.name.encode()) * 1000 + self._rank) * 1000 + self._weights
        return np.array([_mix(number * WORDS_PER_TOKEN + word) for word in range(WORDS_PER_TOKEN)], np.uint64)


def forward(memory, batch):
    """Compute ``(sequence, num_tokens, drafts)`` each, and return the tokens sampled for each.

    All write before any reads, as the layers of one forward do; what follows from wrong bytes is wrong itself. As many
    drafts are taken as are what would be sampled anyway; their sequences know it afterwards. A sequence whose prompt is
    not through samples nothing.
    """
    layers = [layer for layer in memory.layers if not layer.is_draft]
    known = {}
    for sequence, num_tokens, drafts in batch:
        end = sequence.num_computed + num_tokens
        known[sequence.request] = len(sequence.tokens)
        sequence.tokens += drafts[: max(0, end - len(sequence.tokens))]
        assert end <= len(sequence.tokens), f"{sequence.request} is to compute {end} of {len(sequence.tokens)} tokens"
        for layer in layers:
            memory.write(layer, sequence, sequence.num_computed, end)
    return [_sample(memory, layers, sequence, num, known[sequence.request]) for sequence, num, _ in batch]


def _sample(memory, layers, sequence, num_tokens, num_known):
    start, end = sequence.num_computed, sequence.num_computed + num_tokens
    read = {}
    for layer in layers:
        low = _lowest(layer, start)
        read[layer] = np.zeros(end, np.uint64)
        num_wrong = len(memory.wrong)
        read[layer][low:] = memory.check(layer, sequence, low, end, "the forward reads")
        if len(memory.wrong) > num_wrong:
            memory.spoil(layer, sequence, start, end)
    if end < num_known:
        sequence.num_computed = end
        return []
    sampled = []
    for position in range(num_known - 1, end):
        sampled.append(_next_token(layers, read, position))
        if position + 1 < end and sequence.tokens[position + 1] != sampled[-1]:
            break
    sequence.num_computed = num_known + len(sampled) - 1
    sequence.replace_tokens([*sequence.tokens[: sequence.num_computed], sampled[-1]])
    return sampled


def propose(memory, sequences, num_drafts):
    """Let the drafter follow: it reads and writes its own layers, and leaves `drafts` in each sequence.

    ``(sequence, start)``: from which token on its layers are behind. It writes the keys of its drafts as well, into
    blocks that the scheduler has set aside for that.
    """
    own = [layer for layer in memory.layers if layer.is_draft]
    target = [layer for layer in memory.layers if not layer.is_draft]
    lengths = {}
    for sequence, start in sequences:
        lengths[sequence.request] = len(sequence.tokens)
        is_behind = sequence.num_computed < len(sequence.tokens) - 1  # some of the prompt is to come
        end = sequence.num_computed if is_behind else len(sequence.tokens)
        room = len(sequence.blocks[own[0].group]) * memory.tokens_per_block
        end = min(end, room)
        for layer in own:
            memory.write(layer, sequence, start, end)
        for layer in own:
            memory.check(layer, sequence, 0, end, "the drafter reads")
        sequence.drafts = [] if is_behind else _guess(target, sequence, num_drafts)
        if sequence.drafts:
            guessed = Sequence(sequence.request, sequence.tokens + sequence.drafts[:-1], sequence.blocks, 0)
            for layer in own:
                memory.write(layer, guessed, end, max(end, min(len(guessed.tokens), room)))


def _guess(layers, sequence, num_drafts):
    """Say what comes next; every third guess is wrong."""
    tokens = list(sequence.tokens)
    for _ in range(num_drafts):
        guess = next_token(layers, tokens)
        tokens.append(guess if (len(tokens) + guess) % 3 else (guess + 1) % NUM_TOKENS)
    return tokens[len(sequence.tokens) :]


def next_token(layers, tokens):
    """Say what is sampled after these tokens if all bytes are right."""
    words = Sequence("", list(tokens), [], 0).words_of(len(tokens))
    return _next_token(layers, dict.fromkeys(layers, words), len(tokens) - 1)


def answer(layers, prompt, num_tokens):
    """Return the tokens that a prompt is answered with."""
    target = [layer for layer in layers if not layer.is_draft]
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(target, tokens))
    return tokens[len(prompt) :]


def _lowest(layer, position):
    return 0 if layer.window is None else max(0, position - layer.window + 1)


def _next_token(layers, words, position):
    total = 0
    for number, layer in enumerate(layers):
        seen = words[layer][_lowest(layer, position) : position + 1]
        total += (2 * number + 3) * int(seen.sum(dtype=np.uint64))
    return _mix(total & _MASK) % NUM_TOKENS
