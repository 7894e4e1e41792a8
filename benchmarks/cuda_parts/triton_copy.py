"""A yardstick: a Triton kernel of 12 programs that loads small pages from page-locked host memory by itself.

So few programs leave the GPU to the engine; engines choose this way for pages below 28 KiB, where the batch call is
slow. Each program copies whole pages, in chunks, 8 bytes an element. Addresses and sizes go to the GPU with every call.
"""

from typing import Any

import torch
import triton
import triton.language as tl

NUM_PROGRAMS = 12
BELOW_NBYTES = 28 * 1024


@triton.jit
def _copy_pages(sources, destinations, sizes, num_pages, CHUNK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    lane = tl.arange(0, CHUNK_WORDS)
    for page in range(tl.program_id(0), num_pages, tl.num_programs(0)):
        source = tl.load(sources + page).to(tl.pointer_type(tl.int64))
        destination = tl.load(destinations + page).to(tl.pointer_type(tl.int64))
        num_words = tl.load(sizes + page) // 8
        for begin in range(0, num_words, CHUNK_WORDS):
            word = begin + lane
            is_inside = word < num_words
            tl.store(destination + word, tl.load(source + word, mask=is_inside, other=0), mask=is_inside)


class TritonCopy:
    """Load pages with a chunk of so many bytes a step and so many warps a program."""

    def __init__(self, pages: tuple[Any, Any, Any], *, chunk_nbytes: int, num_warps: int) -> None:
        self._on_host = [torch.from_numpy(numbers).pin_memory() for numbers in pages]
        self._chunk_words = chunk_nbytes // 8
        self._num_warps = num_warps
        self.describe = f"{chunk_nbytes // 1024} KiB, {num_warps} warps"

    def copy(self, stream: Any) -> None:
        """Queue the copies on a stream of torch's."""
        with torch.cuda.stream(stream):
            destinations, sources, sizes = (numbers.to("cuda", non_blocking=True) for numbers in self._on_host)
            _copy_pages[(NUM_PROGRAMS,)](
                sources, destinations, sizes, len(sizes), CHUNK_WORDS=self._chunk_words, num_warps=self._num_warps
            )
