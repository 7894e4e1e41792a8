"""Which slots running stores write to, and what other processes of the host are told of slots.

For readers of the status segment a slot's word is 0 from before the first byte of a store is written until the report
that says that every byte is there. Not thread-safe: the worker calls it under its lock.
"""

import itertools
import logging
import os
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvmoor.block_layout import BlockLayout
from kvmoor.errors import BusyError, KvmoorError, RequestError, SettingsError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.host_memory.ticket import ArenaTicket, make_ticket
from kvmoor.transfer_messages import OrderId, Outcome, Report, SlotRange
from kvmoor.transfers.copy_plan import GroupSlots

_log = logging.getLogger("kvmoor")

_numbers: Final = itertools.count(1)


class SlotStatus:
    """Own the status segment of a worker, if the system lets it have one, and keep its words true."""

    def __init__(self, plan: ArenaPlan, layout: BlockLayout, *, engine_id: str, rank: int, required: bool) -> None:
        """Open the segment. One that cannot be had is done without, and said, unless others have to read the arena.

        Without an `engine_id` it is named after the process and the number of the worker in it.
        """
        engine_id = engine_id or f"process-{os.getpid()}-{next(_numbers)}"
        self.name: Final = f"{engine_id}:{rank}"
        self._layout = layout
        self._filling: dict[OrderId, tuple[GroupSlots, ...]] = {}
        self._is_filled = [np.zeros(group.num_slots, np.bool_) for group in plan.groups]  # the slots of all of them
        self._segment: StatusSegment | None = None
        try:
            self._segment = StatusSegment(plan, layout, engine_id=engine_id, rank=rank)
        except SettingsError:
            raise
        except KvmoorError as error:
            if required:
                raise
            _log.warning("other processes of this host cannot see this worker: %s", error)

    def begin(self, order_id: OrderId, parts: tuple[GroupSlots, ...]) -> None:
        """Take note that a store is about to write.

        Raises `BusyError` for slots that another one may still write, and `RequestError` for slots that do not exist.
        """
        for group, slots in parts:
            is_filled = self._is_filled[group]
            outside = slots[(slots < 0) | (slots >= is_filled.size)]
            if outside.size:
                raise RequestError(
                    f"slot {outside[0]} of group {group} does not exist: it has slots 0 to {is_filled.size - 1}"
                )
            busy = slots[is_filled[slots]]
            if busy.size:
                raise BusyError(
                    f"slot {busy.min()} of group {group} may still be written by another order than {order_id}: "
                    "wait for its report"
                )
        if self._segment is not None:
            for group, slots in parts:
                self._segment.begin_fill(group, slots)
        self._filling[order_id] = parts
        for group, slots in parts:
            self._is_filled[group][slots] = True

    def end(self, order_id: OrderId, *, whole: bool) -> None:
        """Take note that a store writes no more; only if its bytes are `whole` may others read them."""
        for group, slots in self._filling.pop(order_id, ()):
            self._is_filled[group][slots] = False
            if whole and self._segment is not None and not self._segment.closed:
                self._segment.complete_fill(group, slots, order_id)

    def note_report(self, report: Report) -> Report:
        """Act on the end of an order, and return its report; one that was given up may still write."""
        if report.outcome is not Outcome.ABANDONED:
            self.end(report.order_id, whole=report.outcome is Outcome.DONE)
        return report

    def publish(self, ranges: Iterable[SlotRange]) -> None:
        """Tell that slots exist."""
        if self._segment is not None and not self._segment.closed:
            for slots in ranges:
                self._segment.publish_slots(slots)

    def beat(self) -> None:
        """Tell that the worker lives."""
        if self._segment is not None and not self._segment.closed:
            self._segment.beat()

    def ticket(self, arena: Arena) -> ArenaTicket:
        """Return what another process needs to read the arena. Raises `SettingsError` if it is private."""
        if self._segment is None:
            raise SettingsError("there is no status segment, so the arena cannot be shared: see the warning at opening")
        return make_ticket(arena, self._segment, self._layout)

    def close(self, _timeout_s: float = 0.0) -> bool:
        """Tell readers that no more comes, and return True. Closes twice without harm."""
        return self._segment is None or self._segment.close()
