"""Sizes in bytes, as people write and read them."""

import re
from fractions import Fraction
from typing import Final

from kvmoor.errors import SettingsError

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*")


def parse_nbytes(value: int | str, *, option: str) -> int:
    """Read a size: a whole number of bytes, or text such as ``"64GB"`` (10**9) or ``"64GiB"`` (2**30).

    `option` names the setting in the error. Raises `SettingsError` for anything that is not a positive size.
    """
    nbytes = 0
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        # A float would make "1.001GB" one byte too small.
        nbytes = int(Fraction(number) * _UNITS.get(unit.upper(), 0))
    if nbytes <= 0:
        raise SettingsError(
            f'{option} is {value!r}: give a positive number of bytes, or text such as "64GB" or "64GiB"'
        )
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """Write a size in decimal units with three significant digits: ``format_nbytes(68_700_000_000) == "68.7 GB"``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB" if size < 999.5 else f"{size:.0f} TB"


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `nbytes`."""
    return -(-nbytes // multiple) * multiple
