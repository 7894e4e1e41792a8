"""Which slots of another process's arena running loads read, and whether they held one whole block all the time.

Orders come from a coordinator that leases what is loaded, so nothing should change under a load. But the bytes are
another process's: its word for a slot is looked at before the copy begins and after it has ended. If it is 0, or not
the same, the load has failed, whatever the coordinator believes and whatever became of the owner in between.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import ClosedError, RequestError
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.transfer_messages import OrderId, Outcome, Report
from kvmoor.transfers.copy_plan import GroupSlots


class SlotReads:
    """Remember what the owner's words for slots were when loads began.

    Not thread-safe: the worker calls it under its lock.
    """

    def __init__(self, attached: AttachedArena) -> None:
        self._attached = attached
        self._running: dict[OrderId, tuple[tuple[GroupSlots, NDArray[np.uint64]], ...]] = {}

    def begin(self, order_id: OrderId, parts: tuple[GroupSlots, ...]) -> None:
        """Take note that a load is about to read. Raises `RequestError` for slots that hold no whole block."""
        words = [self._words(part) for part in parts]
        for (group, slots), found in zip(parts, words, strict=True):
            if not found.all():
                raise RequestError(
                    f"slot {slots[found == 0][0]} of group {group} cannot be read: it is not READY, since no store has "
                    "filled it whole; recompute the block"
                )
        self._running[order_id] = tuple(zip(parts, words, strict=True))

    def end(self, order_id: OrderId, *, whole: bool) -> None:  # noqa: ARG002 - a `SlotWatch`; reading changes no slot
        """Take note that a load reads no more."""
        self._running.pop(order_id, None)

    def note_report(self, report: Report) -> Report:
        """Return the report of a load, FAILED instead of DONE if its slots did not hold the same all the time."""
        if report.outcome is Outcome.ABANDONED:
            return report  # it may still read
        parts = self._running.pop(report.order_id, ())
        if report.outcome is not Outcome.DONE:
            return report
        try:
            changed = next((part for part, before in parts if (self._words(part) != before).any()), None)
        except ClosedError:
            return replace(
                report,
                outcome=Outcome.FAILED,
                nbytes=0,
                reason="the memory it was read from was let go before it was known whether it had changed meanwhile",
            )
        if changed is None:
            return report
        return replace(
            report,
            outcome=Outcome.FAILED,
            nbytes=0,
            reason=f"a slot of group {changed[0]} was written to while it was read: recompute the blocks",
        )

    def beat(self) -> None:
        """Do nothing: who only reads has nobody to tell that it lives."""

    def _words(self, part: GroupSlots) -> NDArray[np.uint64]:
        group, slots = part
        return self._attached.status.order_ids(group, slots)
