"""A recorded trace: which blocks each request's prompt is made of, and when it came.

A block is identified by its whole prefix, as in an engine: equal blocks have equal blocks in front of them.
`TraceBuilder` checks that, and numbers the blocks 0, 1, 2, ... whatever their hashes were.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import RequestError

Blocks = NDArray[np.int32]

FIRST: Final = -1
"""The predecessor of a block that begins a prompt."""
_UNSEEN: Final = -2


@dataclass(frozen=True, slots=True)
class Request:
    """Say what one prompt is made of."""

    time_s: float
    """When it came, on whichever clock the trace has."""
    num_tokens: int
    """The length of the prompt, with the last block that is not full."""
    blocks: Blocks
    """[num_full_blocks], the numbers of its full blocks in prefix order."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Hold the requests of a trace in the order of their times."""

    name: str
    block_size: int
    """Tokens in a block."""
    requests: Sequence[Request]
    predecessors: Blocks
    """[num_unique_blocks], the block in front of each block, or `FIRST`."""
    num_skipped_lines: int = 0
    """Lines that could not be used, if the reader was told to skip them."""
    num_out_of_order: int = 0
    """Requests that stood behind a later one in the file; they were sorted, those of one time stay as they stood."""

    @property
    def num_unique_blocks(self) -> int:
        """Return how many different blocks there are; a cache of this many never evicts."""
        return len(self.predecessors)

    @property
    def num_references(self) -> int:
        """Return how many blocks all prompts have together."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens all prompts have together."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        """Return the time from the first request to the last one."""
        return self.requests[-1].time_s - self.requests[0].time_s


class BadLine(ValueError):  # noqa: N818, it is news about a file, which the reader completes with file and line
    """Report that a line, or a request of it, cannot be used; nothing of the line is kept."""


class TraceBuilder:
    """Collect requests in any order of times, and number their blocks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._block_size = 0  # that of the first good line
        self._requests: list[Request] = []
        self._numbers: dict[Hashable, int] = {}
        self._num_numbers = 0
        self._predecessors = np.empty(0, np.int32)

    def number(self, hashes: Iterable[Hashable]) -> Blocks:
        """Return the number of each hash, the same one whenever the hash returns."""
        return np.array([self.number_of(each) for each in hashes], np.int32)

    def number_of(self, content: Hashable) -> int:
        """Return the number of one hash, or of whatever else stands for a block."""
        number = self._numbers.setdefault(content, self._num_numbers)
        self._num_numbers += number == self._num_numbers
        return number

    def new_numbers(self, num_blocks: int) -> Blocks:
        """Return numbers that no block has; for readers that keep tables of their own."""
        self._num_numbers += num_blocks
        return np.arange(self._num_numbers - num_blocks, self._num_numbers, dtype=np.int32)

    def add(self, requests: Sequence[Request], block_size: int) -> None:
        """Take in the requests of one line, all or none.

        Raises `BadLine` if a prompt names a block twice, if a block stands behind another one than before, or if the
        block size is not that of the lines before.
        """
        if self._block_size not in {0, block_size}:
            raise BadLine(f"has blocks of {block_size} tokens, the lines before have blocks of {self._block_size}")
        num_before = len(self._requests)
        seen_first: list[Blocks] = []
        try:
            for request in requests:
                seen_first.append(self._note_predecessors(request.blocks))
                self._requests.append(request)
        except BadLine:
            del self._requests[num_before:]
            for blocks in seen_first:
                self._predecessors[blocks] = _UNSEEN
            raise
        self._block_size = block_size

    def shift_times(self, seconds: Sequence[float]) -> None:
        """Add to the time of each request, in the order in which they were added."""
        self._requests = [
            Request(request.time_s + shift, request.num_tokens, request.blocks)
            for request, shift in zip(self._requests, seconds, strict=True)
        ]

    def finish(self, *, num_skipped_lines: int = 0) -> Trace:
        """Return the trace. Raises `RequestError` if it has no requests."""
        if not self._requests:
            skipped = f", and {num_skipped_lines} lines that were skipped" if num_skipped_lines else ""
            raise RequestError(f"{self.name} holds no requests{skipped}: give a trace with at least one")
        num_out_of_order = 0
        latest = self._requests[0].time_s
        for request in self._requests:
            num_out_of_order += request.time_s < latest
            latest = max(latest, request.time_s)
        requests = sorted(self._requests, key=lambda request: request.time_s)
        predecessors = self._predecessors[: self._num_numbers]
        used = predecessors != _UNSEEN
        if len(predecessors) < self._num_numbers or not used.all():  # numbers of lines that were refused
            requests, predecessors = _renumber(requests, predecessors, used)
        return Trace(self.name, self._block_size, requests, predecessors, num_skipped_lines, num_out_of_order)

    def _note_predecessors(self, blocks: Blocks) -> Blocks:
        """Check one prompt against all before it and return its blocks that were never seen."""
        if self._num_numbers > len(self._predecessors):
            grown = np.full(max(1024, 2 * self._num_numbers), _UNSEEN, np.int32)
            grown[: len(self._predecessors)] = self._predecessors
            self._predecessors = grown
        before = np.empty_like(blocks)
        before[:1] = FIRST
        before[1:] = blocks[:-1]
        known = self._predecessors[blocks]
        unseen = known == _UNSEEN
        wrong = np.flatnonzero(~unseen & (known != before))
        new: Blocks = blocks[unseen]
        # A known block behind its one predecessor cannot stand there twice, unless an earlier block is wrong.
        if len(new) != len(np.unique(new)) or (len(wrong) and len(blocks) != len(np.unique(blocks))):
            raise BadLine("names a block twice in one prompt: a hash has to cover all tokens before it")
        if len(wrong):
            raise BadLine(
                f"block {wrong[0]} stands behind another block than before: "
                "a hash has to cover all tokens before it, not only those of its block"
            )
        self._predecessors[new] = before[unseen]
        return new


def _renumber(requests: list[Request], predecessors: Blocks, used: NDArray[np.bool_]) -> tuple[list[Request], Blocks]:
    """Close the gaps that unused numbers leave."""
    new_number: Blocks = (np.cumsum(used) - 1).astype(np.int32)
    kept = predecessors[used]
    renumbered = [Request(request.time_s, request.num_tokens, new_number[request.blocks]) for request in requests]
    behind_another = kept != FIRST
    kept[behind_another] = new_number[kept[behind_another]]
    return renumbered, kept
