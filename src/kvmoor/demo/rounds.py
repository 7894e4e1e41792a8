"""Ask every question twice: the first round computes each prompt, the second finds it in host memory.

The device pool has room for one document. By the time a question returns, the two others have pushed its blocks out, so
what the second round does not compute has come from host memory.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvmoor.demo.documents import Document
from kvmoor.demo.model import LoadedModel
from kvmoor.errors import RequestError
from kvmoor.offloader_results import OffloaderStatistics

if TYPE_CHECKING:
    from kvmoor.host_memory.arena_plan import ArenaPlan
    from kvmoor.integrations.transformers import PrefixCache, RestoredPrefix

DEVICE_BLOCKS: Final = 128
TOKENS_PER_BLOCK: Final = 16


class ProgressListener(Protocol):
    """Follow what the demo is doing."""

    def begin(self, step: str, num_tokens: int | None = None) -> None:
        """Note that a step begins, and how many tokens it makes at most, if any."""

    def advance(self) -> None:
        """Note that the present step has made one token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, how long its first token took, and what did not have to be computed for it."""

    text: str
    seconds_to_first_token: float
    restored: "RestoredPrefix"


@dataclass(frozen=True, slots=True)
class AskedTwice:
    """One question and its answers in the two rounds."""

    document: Document
    prompt_tokens: int
    cold: Answer
    warm: Answer

    @property
    def speed_up(self) -> float:
        """Return how many times sooner the first token came in the second round."""
        return self.cold.seconds_to_first_token / self.warm.seconds_to_first_token

    @property
    def identical(self) -> bool:
        """Say whether both rounds gave the same text."""
        return self.cold.text == self.warm.text


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo shows."""

    questions: tuple[AskedTwice, ...]
    host: OffloaderStatistics
    plan: "ArenaPlan"

    @property
    def all_identical(self) -> bool:
        """Say whether no answer changed."""
        return all(question.identical for question in self.questions)


def run_rounds(
    loaded: LoadedModel,
    documents: Sequence[Document],
    *,
    max_new_tokens: int,
    host_memory: int | str,
    progress: ProgressListener,
) -> DemoResult:
    """Ask about each document in turn, twice, and compare.

    Raises `RequestError` for a prompt that is too long for the model or for the device pool.
    """
    from kvmoor.integrations.transformers import PrefixCache

    prompts = [_tokenize(loaded, document) for document in documents]
    for document, prompt in zip(documents, prompts, strict=True):
        _check_length(document, prompt.shape[1], max_new_tokens, loaded.model.config.max_position_embeddings)
    with PrefixCache(
        loaded.model, host_memory=host_memory, device_blocks=DEVICE_BLOCKS, tokens_per_block=TOKENS_PER_BLOCK
    ) as prefix_cache:
        # The first call into a model pays for threads and memory, not for the prompt, and host memory is being mapped.
        progress.begin("warming up", 2)
        _generate(loaded, prompts[0], None, max_new_tokens=2, progress=progress)
        rounds = []
        for name in ("round 1, computed", "round 2, restored"):
            answers = []
            for document, prompt in zip(documents, prompts, strict=True):
                progress.begin(f"{name}: {document.title}", max_new_tokens)
                answers.append(_ask(loaded, prefix_cache, prompt, max_new_tokens, progress))
            rounds.append(answers)
        host = prefix_cache.statistics().host
        plan = prefix_cache.plan
    asked = zip(documents, prompts, *rounds, strict=True)
    return DemoResult(
        tuple(AskedTwice(d, int(prompt.shape[1]), cold, warm) for d, prompt, cold, warm in asked), host, plan
    )


def _tokenize(loaded: LoadedModel, document: Document) -> Any:
    """Put the prompt into the model's chat template; returns token ids ``[1, tokens]``."""
    messages = [{"role": "user", "content": document.prompt}]
    return loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def _check_length(document: Document, num_tokens: int, max_new_tokens: int, max_positions: int) -> None:
    if num_tokens + max_new_tokens > max_positions:
        raise RequestError(
            f"{document.title} has {num_tokens} tokens as a prompt, and {max_new_tokens} are to be generated: "
            f"the model has {max_positions} positions, so shorten the text"
        )
    if num_tokens > DEVICE_BLOCKS * TOKENS_PER_BLOCK:
        raise RequestError(
            f"{document.title} has {num_tokens} tokens as a prompt, and the device pool of the demo holds "
            f"{DEVICE_BLOCKS * TOKENS_PER_BLOCK}: shorten the text"
        )


def _ask(
    loaded: LoadedModel, prefix_cache: "PrefixCache", prompt: Any, max_new_tokens: int, progress: ProgressListener
) -> Answer:
    """Answer one prompt. The time to the first token begins before the search for its prefix."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    started = time.perf_counter()
    restored = prefix_cache.restore(prompt, cache)
    output, first_token_at = _generate(loaded, prompt, cache, max_new_tokens=max_new_tokens, progress=progress)
    prefix_cache.store(output, cache)
    text = loaded.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
    return Answer(text.strip(), first_token_at - started, restored)


def _generate(
    loaded: LoadedModel, prompt: Any, cache: Any, *, max_new_tokens: int, progress: ProgressListener
) -> tuple[Any, float]:
    """Generate greedily; return all token ids ``[1, tokens]``, and when the first new one was there."""
    import torch

    from kvmoor.integrations.transformers.cache_objects import cache_argument

    clock = _TokenClock(progress)
    output = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
        **{cache_argument(loaded.model): cache},
    )
    return output, clock.first_token_at


class _TokenClock:
    """Take note of tokens as `generate` makes them; it hands over the prompt first."""

    def __init__(self, progress: ProgressListener) -> None:
        self._progress = progress
        self._seen_prompt = False
        self.first_token_at = 0.0

    def put(self, _token_ids: Any) -> None:
        """Count what is not the prompt."""
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self.first_token_at = self.first_token_at or time.perf_counter()
        self._progress.advance()

    def end(self) -> None:
        """Do nothing: the last token has been counted."""
