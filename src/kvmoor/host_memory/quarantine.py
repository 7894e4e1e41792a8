"""Arenas that stay mapped until the process ends, because a copy may still touch them.

Nothing here is ever given back: a leak that is counted and reported is preferred to a dangling pointer.
"""

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, eq=False)
class QuarantinedArena:
    """An arena that is kept, why, how many of its bytes were mapped, and what a late copy needs besides it."""

    arena: object
    reason: str
    nbytes: int
    keep_alive: tuple[object, ...] = ()


# Guards _kept.
_lock = threading.Lock()
_kept: Final[list[QuarantinedArena]] = []


def _after_fork_in_child() -> None:
    """Count nothing in a forked child: the memory is not mapped there."""
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def keep_until_exit(record: QuarantinedArena) -> None:
    """Keep an arena, and what belongs to it, until the process ends."""
    with _lock:
        _kept.append(record)
    # The interpreter may empty the list on its way out, when a copy can still run. A reference that nobody owns stays,
    # so that device tensors in `keep_alive` are not freed then either.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(record))


def quarantined_arenas() -> tuple[QuarantinedArena, ...]:
    """Return every record so far; an arena that was quarantined again has one for each time."""
    with _lock:
        return tuple(_kept)


def quarantined_nbytes() -> int:
    """Return how many bytes are kept."""
    return sum(record.nbytes for record in quarantined_arenas())
