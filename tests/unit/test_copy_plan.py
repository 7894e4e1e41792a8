"""A plan holds only numbers that were checked, or it does not exist."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import RequestError
from kvmoor.transfer_messages import OrderPart
from kvmoor.transfers.copy_plan import device_blocks_by_group, plan_copies

LAYOUT = BlockLayout(
    (
        GroupLayout((TensorPages(0x10000, 8, 256, 256), TensorPages(0x20000, 8, 128, 128)), tokens_per_block=16),
        GroupLayout((TensorPages(0x30000, 6, 64, 64),), tokens_per_block=32, blocks_per_chunk=2),
        GroupLayout((), tokens_per_block=16),
    )
)


def slot_addresses(group: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    return 0x100000 * (group + 1) + 4096 * slots


def test_ids_are_sorted_by_group() -> None:
    """The ids of each block go to its group, in the order of the call, whatever the order of the groups."""
    blocks = device_blocks_by_group(LAYOUT, [1, 0, 1, 0], [4, 5, 7, 0, 1, 2])

    assert {0: [[7], [2]], 1: [[4, 5], [0, 1]]} == {group: rows.tolist() for group, rows in blocks.items()}


@pytest.mark.parametrize(
    ("groups", "ids", "message"),
    [
        ([0], [8], "device block 8 of group 0 does not exist: ids go from 0 to 7"),
        ([0], [-1], "device block -1 of group 0 does not exist"),
        ([0, 0], [3, 3], "device block of group 0 3 is named twice"),
        ([1], [0], "1 blocks need 2 device block ids, found 1"),
        ([0], [1, 2], "1 blocks need 1 device block ids, found 2"),
        ([3], [0], "group 3 does not exist: the layout has groups 0 to 2"),
        ([-1], [0], "group -1 does not exist"),
        ([0], [0.5], "type float64"),
        ([0, 0], [[1], [2]], r"shape \(2, 1\)"),
        ([0], ["a"], "give one flat sequence of whole numbers"),
    ],
)
def test_bad_ids_are_refused(groups: list[int], ids: list[object], message: str) -> None:
    """Every kind of unusable device block id is refused with what was asked and what was found."""
    with pytest.raises(RequestError, match=message):
        device_blocks_by_group(LAYOUT, groups, ids)  # type: ignore[arg-type]


def test_ids_of_a_group_without_tensors_are_not_looked_at() -> None:
    """A group that has no bytes on this rank accepts any ids, since nothing is copied for it."""
    blocks = device_blocks_by_group(LAYOUT, [2, 2], [99, 99])

    plan = plan_copies(LAYOUT, [OrderPart(2, (0, 1))], blocks, slot_addresses)

    assert (0, 2, 0) == (len(plan.copies), plan.num_blocks, plan.nbytes)


def test_a_plan_pairs_slots_with_blocks() -> None:
    """Slot addresses and device blocks stand in the same order, and the bytes are those of whole blocks."""
    blocks = device_blocks_by_group(LAYOUT, [0, 1, 0], [5, 2, 3, 1])

    plan = plan_copies(LAYOUT, [OrderPart(0, (7, 4)), OrderPart(1, (9,))], blocks, slot_addresses)

    assert [[5, 1], [2, 3]] == [copies.block_ids.tolist() for copies in plan.copies]
    assert [[0x100000 + 7 * 4096, 0x100000 + 4 * 4096], [0x200000 + 9 * 4096]] == [
        copies.slot_addresses.tolist() for copies in plan.copies
    ]
    assert (3, 2 * 384 + 128) == (plan.num_blocks, plan.nbytes)


def test_a_slot_named_twice_is_refused() -> None:
    """Two blocks never share a slot in one job, because one would overwrite the other."""
    blocks = device_blocks_by_group(LAYOUT, [0, 0], [0, 1])

    with pytest.raises(RequestError, match="slot of group 0 4 is named twice"):
        plan_copies(LAYOUT, [OrderPart(0, (4, 4))], blocks, slot_addresses)
    blocks = device_blocks_by_group(LAYOUT, [0, 0, 0], [0, 1, 2])
    with pytest.raises(RequestError, match="slot of group 0 4 is named twice"):
        plan_copies(LAYOUT, [OrderPart(0, (6, 4, 4))], blocks, slot_addresses)  # three slots, three from first to last


@pytest.mark.parametrize("distance", [1, 63, 64, 65, 10**6, 2**62])
@pytest.mark.parametrize("num_slots", [2, 3, 200])
def test_a_slot_named_twice_is_found_wherever_it_is(num_slots: int, distance: int) -> None:
    """Slots that differ are taken and one that is named twice is found, close together or far apart, below zero too."""
    blocks = {0: np.arange(num_slots).reshape(-1, 1)}
    layout = BlockLayout((GroupLayout((TensorPages(0x10000, 1000, 256, 256),), tokens_per_block=16),))
    slots = [distance, *range(-1, num_slots - 2)]
    if distance < num_slots - 2:
        slots.remove(distance)
        slots[-1:] = [slots[-1], num_slots]
    plan = plan_copies(layout, [OrderPart(0, tuple(slots))], blocks, slot_addresses)
    assert [(0, slots)] == [(group, numbers.tolist()) for group, numbers in plan.slots]
    for twice in (0, num_slots - 1):
        named = [*slots]
        named[num_slots // 2 if twice != num_slots // 2 else 0] = slots[twice]
        with pytest.raises(RequestError, match=f"slot of group 0 {slots[twice]} is named twice"):
            plan_copies(layout, [OrderPart(0, tuple(named))], blocks, slot_addresses)


@pytest.mark.parametrize("slot", [0.5, "a", 2**63, None])
def test_a_slot_that_is_no_number_is_refused(slot: object) -> None:
    """What is no whole number of 64 bits is refused by its group, and nothing is rounded."""
    with pytest.raises(RequestError, match="a slot of group 0 is no whole number"):
        plan_copies(LAYOUT, [OrderPart(0, (slot,))], {0: np.zeros((1, 1), np.int64)}, slot_addresses)  # type: ignore[arg-type]


def test_a_plan_names_the_slots_of_all_groups() -> None:
    """A group without tensors has slots as well, which a store fills with nothing."""
    blocks = device_blocks_by_group(LAYOUT, [2, 0], [99, 1])

    plan = plan_copies(LAYOUT, [OrderPart(2, (5,)), OrderPart(0, (7,))], blocks, slot_addresses)

    assert [(2, [5]), (0, [7])] == [(group, slots.tolist()) for group, slots in plan.slots]
    assert 1 == len(plan.copies)


def test_a_refused_slot_stops_the_plan() -> None:
    """What the arena refuses to resolve never becomes a descriptor."""

    def refuse(group: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        raise RequestError(f"slot {int(slots[0])} of group {group} is not published")

    with pytest.raises(RequestError, match="slot 4 of group 0 is not published"):
        plan_copies(LAYOUT, [OrderPart(0, (4,))], device_blocks_by_group(LAYOUT, [0], [0]), refuse)


def test_rows_have_to_fit_slots() -> None:
    """An order with more slots than device blocks is refused instead of copying some of it."""
    with pytest.raises(RequestError, match=r"2 slots of 1 device blocks, found device blocks of shape \(1, 1\)"):
        plan_copies(LAYOUT, [OrderPart(0, (4, 5))], device_blocks_by_group(LAYOUT, [0], [0]), slot_addresses)
