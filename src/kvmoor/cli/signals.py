"""How a command ends that is asked to: SIGTERM and SIGINT unwind the main thread, so that its one close runs.

Only programs handle signals; the library never does. A second signal ends the process on the spot, by its default
action, for whoever does not want to wait for the close. Nothing is left behind then either: the kernel frees it all.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Signalled(BaseException):
    """Unwind the main thread because of a signal. Not an `Exception`, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """Return what shells report for a process that the signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """End the process when SIGTERM or SIGINT arrives: unwind the block, say so in one line, exit with 128 + number.

    A signal that was ignored before, as SIGINT is for background jobs of scripts, stays ignored. Does nothing outside
    the main thread, where no handler can be set. After a block that no signal ended, the handlers are as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]

    def unwind(number: int, _frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
        raise Signalled(number)

    try:
        for number in handled:
            signal.signal(number, unwind)
        yield
    except Signalled as signalled:
        print(f"kvmoor: {_SIGNALS[signal.Signals(signalled.number)]}", file=sys.stderr, flush=True)
        raise SystemExit(signalled.exit_code) from signalled
    finally:
        for number in handled:
            if signal.getsignal(number) is unwind:  # else a signal has come, and the next one ends the process
                signal.signal(number, before[number])
