"""Which stores vLLM's worker gives up because a load within a step failed."""

from kvmoor.integrations.vllm.spoiled_stores import SpoiledStores


def test_stores_of_other_steps_are_left_alone() -> None:
    """A step without a failed load spoils nothing."""
    assert {} == SpoiledStores(1).end_step([7, 8])


def test_all_stores_of_the_step_are_spoiled() -> None:
    """What a step computes after a load failed in it is not found, whoever asked for it; the next step is whole."""
    spoiled = SpoiledStores(1)
    spoiled.note_failed_load()

    assert [7, 8] == list(spoiled.end_step([7, 8]))
    assert {} == spoiled.end_step([9])


def test_steps_in_flight_are_spoiled_too() -> None:
    """With two steps in flight the one behind has read the same blocks; an empty one counts as well."""
    spoiled = SpoiledStores(2)
    spoiled.note_failed_load()

    assert [7] == list(spoiled.end_step([7]))
    assert {} == spoiled.end_step([])
    assert {} == spoiled.end_step([9])
