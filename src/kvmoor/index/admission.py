"""Which blocks are worth a write to a lower tier, where writes wear a disk out or cost money.

Host memory needs none of this: a store there is a copy over a link that has time, and turning the first one down loses
every prompt that returns just once.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import SettingsError


class Admission(Protocol):
    """Say of blocks that a tier lacks whether they should be written to it. One instance a tier and group.

    It is asked about the blocks of each prompt that is stored or found above the tier, not only when they come to
    exist: each call is one reference to each of its blocks. The caller guarantees one call at a time, and names a block
    once in a call. The implementer never raises, waits or does I/O.
    """

    @property
    def num_admitted(self) -> int:
        """Return how many blocks were admitted since the start, each as often as it was."""

    @property
    def num_declined(self) -> int:
        """Return how many blocks were declined since the start, each as often as it was: writes not made then."""

    @property
    def num_postponed(self) -> int:
        """Return how many of the admitted had been declined before: their writes were made later, not saved."""

    def admit(self, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return which of these blocks should be written, in the order of the call, which is that of the prompt."""


class AdmitAll:
    """Have every block written at its first reference. An `Admission`."""

    def __init__(self) -> None:
        self._num_admitted = 0

    def __repr__(self) -> str:
        return f"<AdmitAll: {self._num_admitted} admitted>"

    @property
    def num_admitted(self) -> int:
        """Return how many blocks it was asked about."""
        return self._num_admitted

    @property
    def num_declined(self) -> int:
        """Return 0."""
        return 0

    @property
    def num_postponed(self) -> int:
        """Return 0."""
        return 0

    def admit(self, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return true for each block."""
        self._num_admitted += len(digests)
        return np.ones(len(digests), np.bool_)


class SecondReference:
    """Have a block written when it is referenced for the second time: many never are. An `Admission`.

    Remembers the last `num_remembered` blocks that were referenced, by their digests, at some 160 bytes each. What was
    referenced longest ago is forgotten first, and of one prompt the end, so that of a prompt that is too long to be
    remembered the beginning is, which is of use alone. Raises `SettingsError` if it may not remember even one.

    The writes saved so far are ``num_declined - num_postponed``.
    """

    def __init__(self, num_remembered: int) -> None:
        if num_remembered < 1:
            raise SettingsError(
                f"num_remembered is {num_remembered}: give 1 or more, better a multiple of the blocks of the tier, or "
                "use AdmitAll"
            )
        self._num_remembered = num_remembered
        self._was_admitted: OrderedDict[bytes, bool] = OrderedDict()  # oldest reference first
        self._num_admitted = self._num_declined = self._num_postponed = 0

    def __len__(self) -> int:
        return len(self._was_admitted)

    def __repr__(self) -> str:
        return (
            f"<SecondReference: {self._num_admitted} admitted, {self._num_declined} declined, "
            f"{len(self._was_admitted)} of {self._num_remembered} remembered>"
        )

    @property
    def num_admitted(self) -> int:
        """Return how many blocks had been referenced before when they were asked about."""
        return self._num_admitted

    @property
    def num_declined(self) -> int:
        """Return how many blocks had not, or had been forgotten."""
        return self._num_declined

    @property
    def num_postponed(self) -> int:
        """Return how many blocks were declined, remembered and admitted later."""
        return self._num_postponed

    def admit(self, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return which of these blocks were referenced before, and remember all. O(blocks of the call)."""
        before = [self._was_admitted.get(digest) for digest in digests]
        # The answers are settled before the first is forgotten: a long prompt would push out its own beginning.
        for digest, known in zip(reversed(digests), reversed(before), strict=True):
            self._was_admitted[digest] = known is not None
            self._was_admitted.move_to_end(digest)
        while len(self._was_admitted) > self._num_remembered:
            self._was_admitted.popitem(last=False)
        admitted = np.array([known is not None for known in before], np.bool_)
        num_admitted = int(np.count_nonzero(admitted))
        self._num_admitted += num_admitted
        self._num_declined += len(digests) - num_admitted
        self._num_postponed += before.count(False)
        return admitted
