"""What becomes of open things when their process ends or forks.

    exit   one atexit hook closes what is still open, newest first, within EXIT_TIMEOUT_S for all together
    fork   in the child every open thing is marked closed, and descriptors that belong to the parent are closed

Nothing here handles signals, which belong to whoever owns the process. A process that is killed runs none of this and
leaves nothing either: memory of kvmoor has no name in any file system. `abandon_process` is for a process whose own end
would hang.
"""

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

_log = logging.getLogger("kvmoor")

EXIT_TIMEOUT_S: Final = 5.0
"""What closing may take at exit, all owners together. Guessed: as long as one `close`, and well within the ten seconds
after which container runtimes kill what they asked to stop."""

_FLUSH_TIMEOUT_S: Final = 1.0
"""How long `abandon_process` waits for whoever reads our output. Guessed: nobody reads slower who still reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """The right of one owner to be closed at exit, or of one descriptor to be closed in a forked child."""

    number: int

    def release(self) -> None:
        """End it: the owner closed itself, or the descriptor is closed. Does no harm twice."""
        _owners.pop(self.number, None)
        _descriptors.pop(self.number, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Owner:
    pid: int
    owner: weakref.ref[object]
    close: Callable[[], Callable[[float], object] | None]
    forked: Callable[[], Callable[[], None] | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Descriptor:
    descriptor: int
    file: tuple[int, int]


# By number, in the order of opening. No lock guards them: it could be held by another thread when the process forks, or
# by the very thread that runs a weak reference's callback. Each use is one step of the interpreter instead.
_owners: Final[dict[int, _Owner]] = {}
_descriptors: Final[dict[int, _Descriptor]] = {}
_numbers: Final = itertools.count()
_leaving = False


def register(
    owner: object,
    *,
    close: Callable[[float], object] | None = None,
    forked: Callable[[], None] | None = None,
) -> Registration:
    """Close `owner` at exit, mark it closed in forked children, or both, until the registration is released.

    Methods of `owner` do not keep it alive; other callables must not refer to it. An owner that is gone is forgotten.
    Any thread may call; takes microseconds.

    `close` gets the seconds that are left and has to end by then; what it raises is logged. `forked` runs in the child,
    where no other thread lives: it must replace locks, never acquire them, since a thread of the parent may have held
    them, and it must not touch memory that the child did not inherit. What is closed can still be asked, so a
    registration for `forked` usually lasts as long as its owner, and one for `close` until it is closed.
    """
    number = next(_numbers)
    _owners[number] = _Owner(
        os.getpid(),
        weakref.ref(owner, lambda _: _owners.pop(number, None)),
        _without_keeping(owner, close),
        _without_keeping(owner, forked),
    )
    return Registration(number)


def close_in_forked_child(descriptor: int) -> Registration:
    """Close a descriptor in forked children, until the registration is released after closing it here.

    Unlike `register` it has no owner: memory behind a descriptor that was never closed must not live on in a child.
    """
    number = next(_numbers)
    _descriptors[number] = _Descriptor(descriptor, _file_behind(descriptor))
    return Registration(number)


def is_leaving() -> bool:
    """Say whether the interpreter is on its way out.

    Nothing may then wait for code of others: no thread can be started any more to wait in its place (Python 3.12).
    """
    return _leaving


def abandon_process(exit_code: int = 0) -> NoReturn:
    """Write out stdout and stderr and end the process at once, with no exit hook and no finaliser of anybody.

    For a host that has closed everything and whose end would hang all the same: with a stream of the GPU that never
    finishes, a process that loaded torch does not come out of its own exit (over 70 s, H200, torch 2.11), and this ends
    it. Memory and locks of the process go with it; what only exit hooks write is lost. Any thread may call.
    """
    # On a thread, because a full pipe that nobody reads would block it for ever.
    flushing = threading.Thread(target=_flush_output, name="kvmoor-flush", daemon=True)
    try:
        flushing.start()
        flushing.join(_FLUSH_TIMEOUT_S)
    except RuntimeError:
        # No thread starts any more once the interpreter is on its way out. Better lose output than never end.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                os.set_blocking(stream.fileno(), False)
        _flush_output()
    finally:
        code: object = exit_code  # not every caller checks types, and this has to end the process
        os._exit(code if isinstance(code, int) else 1)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, replaced or None: there is nothing to write then
            stream.flush()


def _without_keeping(owner: object, call: Any) -> Callable[[], Any]:
    """Return how to get at `call` later, without a reference to the owner if it is a method of it."""
    if getattr(call, "__self__", None) is owner:
        return weakref.WeakMethod(call)
    return lambda: call


def _file_behind(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _close_at_exit() -> None:
    """Close what is open, each with the time that is left, and each even if one before it raised."""
    global _leaving  # noqa: PLW0603 - a process ends once
    _leaving = True
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for number in sorted(_owners, reverse=True):
        registered = _owners.pop(number, None)
        # Another process id: forked by code that did not tell the interpreter, so these are the parent's.
        if registered is None or registered.pid != os.getpid():
            continue
        owner, close = registered.owner(), registered.close()
        if owner is None or close is None:
            continue
        try:
            _warn(f"{owner!r} was still open at the end of the process: close it, or open it in a with block", owner)
            close(max(0.0, deadline - time.monotonic()))
        except Exception:
            _log.exception("closing at exit raised; the process ends all the same")


def _warn(message: str, owner: object) -> None:
    try:
        warnings.warn(message, ResourceWarning, source=owner, stacklevel=2)
    except ResourceWarning as warning:  # turned into an error, which here would reach nobody
        _log.warning("%s", warning)


def _after_fork_in_child() -> None:
    descriptors = [_descriptors[number] for number in sorted(_descriptors)]
    owners = [_owners[number] for number in sorted(_owners) if number in _owners]
    _descriptors.clear()
    _owners.clear()
    for inherited in descriptors:
        with suppress(OSError):  # closed by somebody else, or never inherited
            # The number may stand for another file by now: closing here and releasing there are two steps.
            if _file_behind(inherited.descriptor) == inherited.file:
                os.close(inherited.descriptor)
    for registered in owners:
        forked = registered.forked()
        try:
            if forked is not None:
                forked()
        except Exception:
            _log.exception("marking something closed in a forked child raised; the child goes on")


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
