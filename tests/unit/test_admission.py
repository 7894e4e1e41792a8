"""A block is written to a lower tier when it returns, and what that saves is counted."""

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvmoor.errors import SettingsError
from kvmoor.index.admission import Admission, AdmitAll, SecondReference

A, B, C, D, E, F = (bytes([letter]) * 32 for letter in b"ABCDEF")


def admitted(admission: Admission, *digests: bytes) -> list[bytes]:
    mask = admission.admit(digests)
    assert (np.dtype(np.bool_), (len(digests),)) == (mask.dtype, mask.shape)
    return [digest for digest, is_admitted in zip(digests, mask.tolist(), strict=True) if is_admitted]


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.num_admitted, admission.num_declined, admission.num_postponed


def test_the_second_reference_is_admitted() -> None:
    """A block is declined when it is seen first, and admitted from then on."""
    admission = SecondReference(10)

    assert [] == admitted(admission, A, B, C)
    assert [A, B] == admitted(admission, A, B, D)
    assert [A, B, D] == admitted(admission, A, B, D)


def test_what_it_did_is_counted() -> None:
    """A write that was only put off is not counted as saved."""
    admission = SecondReference(10)
    admission.admit([A, B, C])
    assert (0, 3, 0) == counts(admission)

    admission.admit([A, B, D])
    assert (2, 4, 2) == counts(admission)

    admission.admit([A])  # the tier has lost it
    assert (3, 4, 2) == counts(admission)


def test_the_oldest_reference_is_forgotten() -> None:
    """Beyond the number to remember a block is as good as never seen."""
    admission = SecondReference(3)
    for digest in (A, B, C):
        admission.admit([digest])
    admission.admit([A])

    admission.admit([D])

    assert 3 == len(admission)
    assert [A, C, D] == admitted(admission, A, C, D)
    assert [] == admitted(admission, B)
    assert (4, 5, 3) == counts(admission)


def test_a_forgotten_block_was_not_only_put_off() -> None:
    """A block that is declined twice because it was forgotten counts as declined twice, and as postponed once."""
    admission = SecondReference(1)
    admission.admit([A])
    admission.admit([B])
    admission.admit([A])

    admission.admit([A])

    assert (1, 3, 1) == counts(admission)


def test_a_prompt_that_is_too_long_is_remembered_from_its_beginning() -> None:
    """What does not fit is forgotten from the end, and a prompt does not push itself out while it is looked up."""
    admission = SecondReference(3)
    admission.admit([A, B, C, D, E])

    assert [A, B, C] == admitted(admission, A, B, C, D, E)
    assert [A, B, C] == admitted(admission, A, B, C, D, E)


def test_older_blocks_go_before_the_end_of_a_prompt() -> None:
    """The end of the last prompt is more recent than all of the prompt before."""
    admission = SecondReference(4)
    admission.admit([A, B])

    admission.admit([C, D, E])

    assert [A, C, D, E] == admitted(admission, A, B, C, D, E)


def test_no_blocks_are_no_reference() -> None:
    """An empty list is answered with an empty mask."""
    for admission in (SecondReference(2), AdmitAll()):
        assert [] == admitted(admission)
        assert (0, 0, 0) == counts(admission)


def test_it_agrees_with_a_plain_model() -> None:
    """Over a long walk exactly the blocks among the last different ones referenced before are admitted."""
    rng = random.Random(7)
    digests = [bytes([number]) * 32 for number in range(40)]
    for num_remembered in (1, 5, 20, 100):
        admission = SecondReference(num_remembered)
        last_use: OrderedDict[bytes, None] = OrderedDict()
        num_admitted = num_asked = 0
        for _ in range(300):
            start = rng.randrange(40)
            prompt = digests[start : start + rng.randint(1, 8)]
            remembered = list(last_use)[-num_remembered:]
            expected = [digest for digest in prompt if digest in remembered]
            assert expected == admitted(admission, *prompt)
            for digest in reversed(prompt):
                last_use[digest] = None
                last_use.move_to_end(digest)
            num_admitted += len(expected)
            num_asked += len(prompt)
            assert len(admission) <= num_remembered
        assert (num_admitted, num_asked - num_admitted) == counts(admission)[:2]
        assert counts(admission)[2] <= min(num_admitted, num_asked - num_admitted)


def test_without_a_filter_everything_is_admitted() -> None:
    """Whoever does not ask for it gets each block written at once, and nothing is counted as saved."""
    admission = AdmitAll()

    assert [A, B] == admitted(admission, A, B)
    assert [A, C] == admitted(admission, A, C)
    assert (4, 0, 0) == counts(admission)


@pytest.mark.parametrize("num_remembered", [0, -1])
def test_remembering_nothing_is_refused(num_remembered: int) -> None:
    """A filter without memory would never admit a block."""
    with pytest.raises(SettingsError, match=rf"num_remembered is {num_remembered}: give 1 or more"):
        SecondReference(num_remembered)


def test_their_reprs_tell_how_they_stand() -> None:
    """The texts show what was admitted and declined, and how full the memory is."""
    admission, no_filter = SecondReference(5), AdmitAll()
    for each in (admission, no_filter):
        each.admit([A, B])
        each.admit([A])

    assert "<SecondReference: 1 admitted, 2 declined, 2 of 5 remembered>" == repr(admission)
    assert "<AdmitAll: 3 admitted>" == repr(no_filter)
