"""What a worker tells about itself: how it closed, and its numbers."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvmoor.host_memory.arena_state import ArenaStatistics
from kvmoor.host_memory.slab_registration import RegistrationMode
from kvmoor.transfer_messages import OrderId

_log = logging.getLogger("kvmoor")


@dataclass(frozen=True, slots=True)
class CloseStep:
    """One step of closing: `proven` if nothing it stands for can touch memory any more, `error` if it raised."""

    name: str
    proven: bool
    error: str = ""


def take_step(name: str, close: Callable[[float], bool], *, deadline: float, at_least_s: float) -> CloseStep:
    """Take one step of closing, with the time that is left; a step that raises proves nothing, and raises nothing."""
    try:
        return CloseStep(name, proven=close(max(at_least_s, deadline - time.monotonic())))
    except Exception as error:
        _log.exception("closing the %s raised; closing goes on", name)
        return CloseStep(name, proven=False, error=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Tell how closing went.

    `quarantined_nbytes` of host memory stay mapped until the process ends, because the jobs in `unproven_jobs` may
    still touch them; `reason` says why. Both are empty after a close that gave everything back.
    """

    seconds: float
    steps: tuple[CloseStep, ...]
    quarantined_nbytes: int = 0
    unproven_jobs: tuple[OrderId, ...] = ()
    reason: str = ""

    @property
    def graceful(self) -> bool:
        """Say whether everything was given back."""
        return self.quarantined_nbytes == 0 and all(step.proven and not step.error for step in self.steps)


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Counts since the worker opened. `running` and `abandoned` are jobs now; the rest are totals.

    `staged_jobs` had slots that the device does not reach itself, `staged_nbytes` went by way of the rings, which take
    `staging_ring_nbytes` of host memory now, beside the arena.
    """

    running: int
    abandoned: int
    done: int
    failed: int
    given_up: int
    stored_nbytes: int
    loaded_nbytes: int
    staged_jobs: int
    staged_nbytes: int
    staging_ring_nbytes: int
    arena: ArenaStatistics


@dataclass(frozen=True, slots=True)
class ReadingStatistics:
    """Count what a worker did that loads from the arena of another process; see `WorkerStatistics` for the jobs.

    `attached_nbytes` can be read, and `registered_nbytes` of them are page-locked. `registration_mode` says how the
    device gets at the slabs that are tried from now on (None before there is an arena), `registration_reason` why some
    are staged.
    """

    running: int
    abandoned: int
    done: int
    failed: int
    given_up: int
    loaded_nbytes: int
    staged_jobs: int
    staged_nbytes: int
    staging_ring_nbytes: int
    attached_nbytes: int
    registered_nbytes: int
    failed_registrations: int
    registration_mode: RegistrationMode | None
    registration_reason: str
