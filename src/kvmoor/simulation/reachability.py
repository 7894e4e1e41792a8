"""Which cached blocks nobody can use, because the one in front of them is not there."""

import numpy as np

from kvmoor.simulation.trace import Blocks, Trace


class Reachability:
    """Count the cached blocks whose predecessor is not cached."""

    def __init__(self, trace: Trace) -> None:
        self._predecessors = trace.predecessors
        # By block; the spare last element is what `FIRST` leads to, and counts as cached.
        self._is_missing = np.ones(trace.num_unique_blocks + 1, np.bool_)
        self._is_missing[-1] = False
        self._num_cached_behind = np.zeros(trace.num_unique_blocks + 1, np.int32)
        self._num_unreachable = 0
        self.most_unreachable = 0

    def note(self, *, evicted: Blocks, stored: Blocks) -> None:
        """Note what one store changed."""
        if len(evicted):
            before = self._predecessors[evicted]
            self._num_unreachable -= int(np.count_nonzero(self._is_missing[before]))
            np.subtract.at(self._num_cached_behind, before, 1)
            self._is_missing[evicted] = True
            self._num_unreachable += int(self._num_cached_behind[evicted].sum())
        if len(stored):
            before = self._predecessors[stored]
            self._num_unreachable -= int(self._num_cached_behind[stored].sum())
            self._is_missing[stored] = False
            np.add.at(self._num_cached_behind, before, 1)
            self._num_unreachable += int(np.count_nonzero(self._is_missing[before]))
        self.most_unreachable = max(self.most_unreachable, self._num_unreachable)
