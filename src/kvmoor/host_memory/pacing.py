"""When background work may disturb the engine: a clock that tests replace, and the pace of registrations.

A registration stalls the launches of other threads by about 2 ms. While the engine idles nobody notices; beside steps
of 0.48 ms, one 64 MiB registration every 52 ms left their p99 at 0.57 ms, and one after the other stopped them (H200).
"""

import statistics
import threading
import time
from collections import deque
from typing import Final

STEPPING_INTERVAL_S: Final = 0.05
"""The least time between two registrations while the engine steps. Measured, see above."""
STEPPING_INTERVAL_STEPS: Final = 250
"""The least number of steps between two registrations where steps are short. A registration stalls one step or two:
with one in 95 steps (52 ms) the 99th per cent of the steps was 2.3 ms on an H200, alone 0.63; with one in 250 it was
5 % more than alone (benchmarks/results)."""
SHORT_STEP_S: Final = 0.002
"""Steps below this are short: a stall is longer than they are."""
BREATH_S: Final = 0.001
"""The least time between two registrations at full speed: others wait for the driver's locks too. Guessed."""
_IDLE_AFTER_STEPS: Final = 3
"""The engine idles once this many of its own steps have not come. Guessed."""
_IDLE_AFTER_S: Final = 0.1
"""The engine steps for at least so long after a step, however short its steps are. Guessed."""
_LONGEST_STEP_S: Final = 10.0
"""What takes longer is no step but a rest between requests. Guessed."""
_NUM_RECENT_STEPS: Final = 9
"""Steps whose median counts: one rest among them does not change it. Guessed."""
_SHORTEST_WAIT_S: Final = 0.001
"""Steps that are waited for are counted again no sooner than this."""


class Clock:
    """Tell the time and wait; replaced in tests, which then need not sleep."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        """Wait for a notification or until the time has passed; the caller holds `changed` and looks again after."""
        changed.wait(timeout_s)


class StepPacer:
    """Say how long a registration has to wait for the engine's sake. Any thread may call anything.

    An arena has its own. Full speed until the engine notes its first step, and again whenever no step came for three of
    its recent step lengths, at least 100 ms. An engine that notes the ends of its steps too counts as stepping until
    the end of each, so that a prefill of seconds behind steps of milliseconds is not taken for a rest.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Final = clock or Clock()
        self._lock = threading.Lock()  # guards all below; held for a few assignments
        self._last_step: float | None = None
        self._recent_steps: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._last_registration: float | None = None
        self._steps_since_registration = 0
        self._in_step = False
        self._ends_are_noted = False

    def forked(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def note_step(self) -> None:
        """Take note that the engine begins a step. Takes a microsecond."""
        now = self.clock.now()
        with self._lock:
            if self._last_step is not None and now - self._last_step <= _LONGEST_STEP_S:
                self._recent_steps.append(now - self._last_step)
            self._last_step = now
            self._in_step = True
            self._steps_since_registration += 1

    def note_step_end(self) -> None:
        """Take note that the step has ended: noted or not, but if once then always."""
        with self._lock:
            self._in_step = False
            self._ends_are_noted = True

    def note_registration(self) -> None:
        """Take note that a registration has ended just now."""
        now = self.clock.now()
        with self._lock:
            self._last_registration = now
            self._steps_since_registration = 0

    def delay_s(self) -> float:
        """Return how long the next registration has to wait; 0 at once. Ask again when that time has passed."""
        now = self.clock.now()
        with self._lock:
            if self._last_registration is None:
                return 0.0
            last, num_steps = self._last_registration, self._steps_since_registration
            step_s = statistics.median(self._recent_steps) if self._recent_steps else 0.0
            window_s = max(_IDLE_AFTER_S, _IDLE_AFTER_STEPS * step_s)
            if self._in_step and self._ends_are_noted:
                window_s = _LONGEST_STEP_S
            idle_from = now if self._last_step is None else self._last_step + window_s
            steps_are_short = bool(self._recent_steps) and step_s < SHORT_STEP_S
        if now >= idle_from:
            return max(0.0, last + BREATH_S - now)
        delay_s = max(0.0, last + STEPPING_INTERVAL_S - now)
        if steps_are_short and num_steps < STEPPING_INTERVAL_STEPS:
            delay_s = max(delay_s, _SHORTEST_WAIT_S, (STEPPING_INTERVAL_STEPS - num_steps) * step_s)
        return min(delay_s, max(idle_from, last + BREATH_S) - now)
