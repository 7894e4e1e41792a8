"""Seconds that a caller may wait: every wait has an end."""

from typing import Final

from kvmoor.errors import KvmoorError, RequestError

MAX_TIMEOUT_S: Final = 86_400.0
"""A day: longer is a mistake, and far above it the clocks of the standard library overflow."""


def checked_timeout(
    timeout_s: object, *, option: str, at_least: float = 0.0, error: type[KvmoorError] = RequestError
) -> float:
    """Return `timeout_s` as seconds; raise `error` unless it is a number from `at_least` to a day."""
    if (
        isinstance(timeout_s, int | float)
        and not isinstance(timeout_s, bool)
        and at_least <= timeout_s <= MAX_TIMEOUT_S
    ):
        return float(timeout_s)
    raise error(
        f"{option} is {timeout_s!r}: give seconds from {at_least:g} to {MAX_TIMEOUT_S:g}, since every wait has an end"
    )
