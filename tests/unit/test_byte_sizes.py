"""Sizes are read exactly or refused, and written as people read them."""

import pytest

from kvmoor.byte_sizes import format_nbytes, parse_nbytes, round_up
from kvmoor.errors import SettingsError


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (2**40, 2**40),
        ("4096", 4096),
        ("7B", 7),
        ("64GB", 64 * 10**9),
        ("64GiB", 64 * 2**30),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("5MB", 5 * 10**6),
        ("5MiB", 5 * 2**20),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        (" 64 gb ", 64 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1.001GB", 1_001_000_000),
        ("0.5KiB", 512),
        ("999999999999999999", 999_999_999_999_999_999),
    ],
)
def test_sizes_are_read_exactly(value: int | str, nbytes: int) -> None:
    """Numbers and text give exactly the bytes they say, decimal or binary, without the rounding of floats."""
    assert nbytes == parse_nbytes(value, option="host_memory")


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        True,
        1.5,
        None,
        b"64GB",
        "",
        "0",
        "-1GB",
        "GB",
        "64 G",
        "64GBit",
        "1e9",
        "1,5GB",
        ".5GB",
        "0.4B",
        "9" * 5000,
        "9" * 400 + ".0GB",
    ],
    ids=lambda value: repr(value)[-12:],
)
def test_other_sizes_are_refused(value: object) -> None:
    """What is no positive size is refused by name, with what was found and what to give."""
    with pytest.raises(
        SettingsError, match=r'^host_memory is .*: give a positive number of bytes, or text such as "64'
    ):
        parse_nbytes(value, option="host_memory")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (64 * 2**20, "67.1 MB"),
        (68_700_000_000, "68.7 GB"),
        (1_500_000_000_000, "1.5 TB"),
        (12_345_000_000_000_000, "12345 TB"),
        (-68_700_000_000, "-68.7 GB"),
    ],
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    """A size is written with three significant digits in the unit that keeps it short."""
    assert text == format_nbytes(nbytes)


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (2**40 + 1, 2**40 + 4096)]
)
def test_sizes_are_rounded_up(nbytes: int, rounded: int) -> None:
    """Rounding gives the next multiple, and leaves multiples alone."""
    assert rounded == round_up(nbytes, 4096)
