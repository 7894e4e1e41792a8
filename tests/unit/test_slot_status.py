"""Which slots stores may write to: each one order at a time, whatever becomes of it."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import BusyError, RequestError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.transfer_messages import OrderId, OrderKind, Outcome, Report
from kvmoor.transfers.copy_plan import GroupSlots
from kvmoor.transfers.slot_status import SlotStatus

LAYOUT = BlockLayout(
    (
        GroupLayout((TensorPages(0x10000, 8, 4096, 4096),), tokens_per_block=16),
        GroupLayout((), tokens_per_block=16),
        GroupLayout((TensorPages(0x90000, 8, 4096, 4096),), tokens_per_block=16),
    )
)


@pytest.fixture
def status() -> Iterator[SlotStatus]:
    status = SlotStatus(plan_arena(LAYOUT, 16 * 4096), LAYOUT, engine_id="", rank=0, required=True)
    yield status
    assert status.close()


def slots(group: int, *numbers: int) -> GroupSlots:
    return group, np.array(numbers, np.int64)


def report(number: int, outcome: Outcome) -> Report:
    return Report(OrderId(number), OrderKind.DEVICE_TO_SLOT, outcome, 0, 0.0)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_slot_is_written_by_one_order_at_a_time(status: SlotStatus, group: int) -> None:
    """A second order for a slot is refused by the lowest number, and leaves the others free."""
    status.begin(OrderId(1), (slots(group, 5, 3),))

    with pytest.raises(BusyError, match=f"slot 3 of group {group} may still be written by another order than 2"):
        status.begin(OrderId(2), (slots((group + 1) % 3, 5, 3), slots(group, 5, 2, 3)))
    status.begin(OrderId(3), (slots((group + 1) % 3, 5, 3), slots(group, 2)))


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.FAILED, Outcome.SETTLED])
def test_a_slot_is_free_once_its_order_is_over(status: SlotStatus, outcome: Outcome) -> None:
    """After a report that proves the end, and after none that does not, the next order may write; the rest stays."""
    status.begin(OrderId(1), (slots(0, 1, 2),))
    status.begin(OrderId(2), (slots(0, 4),))
    status.note_report(report(1, Outcome.ABANDONED))
    with pytest.raises(BusyError):
        status.begin(OrderId(3), (slots(0, 2),))

    status.note_report(report(1, outcome))
    status.note_report(report(1, outcome))

    status.begin(OrderId(3), (slots(0, 2, 1),))
    with pytest.raises(BusyError):
        status.begin(OrderId(4), (slots(0, 4),))


@pytest.mark.parametrize("has_segment", [True, False])
@pytest.mark.parametrize("number", [-1, -8, 10**6])
def test_slots_that_do_not_exist_are_refused_with_nothing_changed(
    monkeypatch: pytest.MonkeyPatch, status: SlotStatus, number: int, has_segment: bool
) -> None:
    """A number outside of its group is refused, in whichever part it is; the other slots of the order stay free."""
    with monkeypatch.context() as patch:
        if not has_segment:
            patch.setattr(status, "_segment", None)  # as where the system lets us have none
        with pytest.raises(RequestError, match=f"slot {number} of group 2 does not exist"):
            status.begin(OrderId(1), (slots(0, 1), slots(2, 0, number)))

    status.begin(OrderId(2), (slots(0, 1), slots(2, 0)))
