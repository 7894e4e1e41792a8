"""Numbers kept by slot: arrays instead of objects, so that a million blocks are nothing for the collector to walk."""

from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Slots: TypeAlias = NDArray[np.int32]
"""Slot numbers of one group, each at most once."""

NO_SLOT: Final = -1
"""Stands for a block that is in no slot. As an index it leads to the spare element of every array of `grown`."""

NO_SLOTS: Final[Slots] = np.empty(0, np.int32)
NO_SLOTS.flags.writeable = False

_Array = TypeVar("_Array", bound=NDArray[np.generic])


def grown(array: _Array, num_slots: int) -> _Array:
    """Return an array by slot with room for slots ``0 .. num_slots - 1`` and at least one spare element at its end.

    New elements are zero, or None, and the spare one stays so: ``array[NO_SLOT]`` can be read without a check. Grows by
    doubling, since slots are published in thousands of small ranges. Zeros cost nothing before they are written over:
    the kernel has pages of them.
    """
    if num_slots < len(array):
        return array
    larger = np.zeros(max(num_slots + 1, 2 * len(array)), array.dtype)
    if array.dtype == object:
        larger[:] = None
    larger[: len(array)] = array
    return larger  # type: ignore[return-value]  # same dtype, one dimension
