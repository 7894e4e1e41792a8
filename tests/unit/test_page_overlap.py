"""Pages that share a byte are found, pages that only lie among each other are not."""

import pytest

from kvmoor.page_overlap import PageRange, find_overlap


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(1000, 4, 16, 16)],
        [(1000, 4, 16, 16), (1064, 4, 16, 16)],  # one behind the other
        [(1000, 4, 32, 16), (1016, 4, 32, 16)],  # interleaved, one stride
        [(1000, 4, 48, 16), (1016, 4, 48, 16), (1032, 4, 48, 16)],
        [(1000, 4, 32, 16), (1016, 2, 64, 16)],  # interleaved, two strides
        [(1000, 4, 32, 16), (1016, 1, 1, 16)],  # one page between two others
        [(1000, 1, 1, 16), (1016, 1, 0, 16)],
        [(1016, 1, 16, 16), (1000, 1, 16, 16)],  # not sorted
    ],
)
def test_pages_beside_each_other_do_not_overlap(ranges: list[PageRange]) -> None:
    """Ranges that touch or interleave share nothing."""
    assert find_overlap(ranges) is None


@pytest.mark.parametrize(
    ("ranges", "pair"),
    [
        ([(1000, 4, 16, 16), (1000, 4, 16, 16)], (0, 1)),  # one tensor twice
        ([(1000, 4, 16, 16), (1063, 4, 16, 16)], (0, 1)),  # the last byte of the last page
        ([(1063, 4, 16, 16), (1000, 4, 16, 16)], (0, 1)),
        ([(1000, 4, 32, 16), (1015, 4, 32, 16)], (0, 1)),  # interleaved, one byte too close
        ([(1000, 4, 32, 16), (1017, 4, 32, 16)], (0, 1)),
        ([(1000, 4, 32, 16), (1016, 2, 80, 16)], (0, 1)),  # two strides that meet late
        ([(1000, 2, 1000, 10), (1100, 1, 10, 10), (2005, 1, 1, 1)], (0, 2)),  # a far page of an early range
        ([(5000, 1, 1, 9), (1000, 1, 1, 9), (1008, 1, 1, 1)], (1, 2)),
    ],
)
def test_pages_that_share_a_byte_are_named(ranges: list[PageRange], pair: tuple[int, int]) -> None:
    """One shared byte is enough, and the two tensors are told by their numbers."""
    assert pair == find_overlap(ranges)


def test_long_tensors_are_compared_without_looking_at_every_page() -> None:
    """Ten thousand million pages are no problem where two tensors have one stride."""
    count = 10**10

    assert find_overlap([(4096, count, 64, 32), (4128, count, 64, 32)]) is None
    assert (0, 1) == find_overlap([(4096, count, 64, 32), (4096 + 64 * count - 33, count, 64, 32)])
