"""Arrays by slot grow without losing a number, and lead the number of no slot to a spare element."""

import numpy as np
import pytest

from kvmoor.index.slot_arrays import NO_SLOT, NO_SLOTS, grown


@pytest.mark.parametrize(("dtype", "nothing"), [(np.int32, 0), (np.uint32, 0), (np.bool_, False), (object, None)])
def test_no_slot_reads_nothing(dtype: type, nothing: object) -> None:
    """However an array has grown, all its slots can be set, and no slot still reads zero, or None."""
    array = np.full(1, nothing, dtype)
    for num_slots in (0, 1, 2, 3, 10, 10, 1000):
        array = grown(array, num_slots)
        array[:num_slots] = 7
        assert num_slots < len(array)
        assert nothing == array[NO_SLOT]
        assert nothing == array.take([NO_SLOT])[0]
        assert array.dtype == dtype


def test_growing_keeps_what_is_there() -> None:
    """The numbers of the old slots are the same in the larger array, and the new ones are zero."""
    array = grown(np.zeros(1, np.int32), 3)
    array[:3] = [5, 6, 7]

    array = grown(array, 20)

    assert [5, 6, 7, 0] == array[:4].tolist()
    assert {0} == set(array[4:].tolist())


def test_an_array_with_room_is_the_same_array() -> None:
    """Nothing is copied where there is room, so that a thousand small ranges cost few copies."""
    array = np.zeros(1, np.int32)
    copies = 0
    for num_slots in range(1, 5001):
        larger = grown(array, num_slots)
        copies += larger is not array
        array = larger

    assert copies <= 13


def test_no_slots_cannot_be_changed() -> None:
    """The array that everybody shares cannot be made to say something else."""
    assert 0 == len(NO_SLOTS)
    assert NO_SLOTS.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        NO_SLOTS[:] = 1
