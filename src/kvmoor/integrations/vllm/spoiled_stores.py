"""Stores of what a step computed from blocks that a load within that step did not fill."""

from collections.abc import Iterable
from typing import Final

_REASON: Final = "it takes what was computed from blocks that a load of the same step failed to fill"


class SpoiledStores:
    """Say which stores of a worker must not be found. One thread.

    vLLM computes such a step again, but its stores were decided before it ran. Steps that were in flight by then read
    the same blocks, so with `num_batches` steps in flight at a time as many are spoiled. All requests of a step count,
    since they may share the blocks.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._num_spoiled = 0

    def note_failed_load(self) -> None:
        """Take note that a load within the step that runs now failed."""
        self._num_spoiled = self._num_batches

    def end_step(self, orders: Iterable[int]) -> dict[int, str]:
        """Return which of the stores that this step has decided on have failed, and why."""
        if not self._num_spoiled:
            return {}
        self._num_spoiled -= 1
        return dict.fromkeys(orders, _REASON)
