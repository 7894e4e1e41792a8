"""Which slots running stores write to, and what other processes of the host are told of slots.

For readers of the status segment a slot's word is 0 from before the first byte of a store is written until the report
that says that every byte is there. Not thread-safe: the worker calls it under its lock.
"""

import itertools
import logging
import os
from collections.abc import Iterable
from typing import Final

from kvmoor.block_layout import BlockLayout
from kvmoor.errors import BusyError, KvmoorError, SettingsError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.host_memory.ticket import ArenaTicket, make_ticket
from kvmoor.transfer_messages import Order, OrderId, OrderPart, Outcome, Report, SlotRange

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
        self._filling: dict[OrderId, tuple[OrderPart, ...]] = {}
        self._filled_slots: set[tuple[int, int]] = set()  # the slots of all of them
        self._segment: StatusSegment | None = None
        try:
            self._segment = StatusSegment(plan, layout, engine_id=engine_id, rank=rank)
        except SettingsError:
            raise
        except KvmoorError as error:
            if required:
                raise
            _log.warning("other processes of this host cannot see this worker: %s", error)

    def begin(self, order: Order) -> None:
        """Take note that a store is about to write. Raises `BusyError` for slots that another one may still write."""
        slots = {(part.group, slot) for part in order.parts for slot in part.slots}
        if busy := slots & self._filled_slots:
            group, slot = min(busy)
            raise BusyError(
                f"slot {slot} of group {group} may still be written by another order than {order.order_id}: "
                "wait for its report"
            )
        if self._segment is not None:
            for part in order.parts:
                self._segment.begin_fill(part.group, part.slots)
        self._filling[order.order_id] = order.parts
        self._filled_slots |= slots

    def end(self, order_id: OrderId, *, whole: bool) -> None:
        """Take note that a store writes no more; only if its bytes are `whole` may others read them."""
        for part in self._filling.pop(order_id, ()):
            self._filled_slots.difference_update((part.group, slot) for slot in part.slots)
            if whole and self._segment is not None and not self._segment.closed:
                self._segment.complete_fill(part.group, part.slots, order_id)

    def note_report(self, report: Report) -> None:
        """Act on the end of an order; one that was given up may still write."""
        if report.outcome is not Outcome.ABANDONED:
            self.end(report.order_id, whole=report.outcome is Outcome.DONE)

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
