"""Whether the pages of several device tensors overlap in memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PageRange = tuple[int, int, int, int]
"""base address, number of pages, distance between pages, bytes of a page."""


def find_overlap(ranges: Sequence[PageRange]) -> tuple[int, int] | None:
    """Return the numbers of two ranges whose pages share a byte, or None.

    Only pairs whose spans overlap are looked at page by page, so the usual case (tensors one after the other, or
    interleaved with one stride) costs little.
    """
    order = sorted(range(len(ranges)), key=lambda number: ranges[number][0])
    open_spans: list[tuple[int, int]] = []  # (end, number) of the ranges that may still reach the next one
    for number in order:
        base = ranges[number][0]
        open_spans = [(end, other) for end, other in open_spans if end > base]
        for _, other in open_spans:
            if _pages_overlap(ranges[other], ranges[number]):
                return min(other, number), max(other, number)
        _, count, stride, nbytes = ranges[number]
        open_spans.append((base + (count - 1) * stride + nbytes, number))
    return None


def _pages_overlap(first: PageRange, second: PageRange) -> bool:
    if first[2] == second[2] and first[1] > 1 and second[1] > 1:
        return _equal_strides_overlap(first, second)
    starts, nbytes = _starts(first), first[3]
    others, other_nbytes = _starts(second), second[3]
    # The page of `second` that begins last before the end of each page of `first`.
    position = np.searchsorted(others, starts + nbytes, side="left") - 1
    reachable = position >= 0
    return bool(np.any(others[position[reachable]] + other_nbytes > starts[reachable]))


def _equal_strides_overlap(first: PageRange, second: PageRange) -> bool:
    (base, count, stride, nbytes), (other_base, other_count, _, other_nbytes) = first, second
    distance = other_base - base
    # Page i of `first` and page j of `second` overlap when -other_nbytes < distance + (j - i) * stride < nbytes.
    low = -(-(-other_nbytes + 1 - distance) // stride)
    high = (nbytes - 1 - distance) // stride
    return max(low, 1 - count) <= min(high, other_count - 1)


def _starts(pages: PageRange) -> NDArray[np.int64]:
    base, count, stride, _ = pages
    return base + stride * np.arange(count, dtype=np.int64)
