"""When the jobs of before a reset have ended on every rank, for vLLM versions that do not tell."""

import time
from collections.abc import Callable, Mapping
from typing import Final

KEEPS_STEPPING_S: Final = 60.0
"""How long an idle engine is kept stepping for the sake of these jobs: twice what a copy gets by default. Beyond that
their slots just stay out of use. Guessed."""


class ResetFence:
    """Count the reports that are due for jobs that were in flight at a reset. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[int, int] = {}
        self._raised_s = 0.0

    def add(self, due: Mapping[int, int]) -> None:
        """Wait for jobs: by their ids, how many ranks have yet to report each."""
        if due:
            self._due.update(due)
            self._raised_s = self._clock()

    def note_reports(self, completed: Mapping[int, int]) -> None:
        """Take note of reports: by job id, how many ranks have just reported it."""
        for job_id, num_reports in completed.items():
            if job_id in self._due:
                self._due[job_id] -= num_reports
                if self._due[job_id] <= 0:
                    del self._due[job_id]

    @property
    def is_open(self) -> bool:
        """Say whether nothing is waited for."""
        return not self._due

    @property
    def keeps_stepping(self) -> bool:
        """Say whether an engine that is otherwise idle should step on, since reports come with steps only."""
        return bool(self._due) and self._clock() - self._raised_s < KEEPS_STEPPING_S
