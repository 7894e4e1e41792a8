"""The records that cross from the deciding half (`Coordinator`) to the moving half (`TransferWorker`) and back.

An order says what to move; a report says how it went. Both are frozen and picklable, because in a larger engine
they travel between processes.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

OrderId = NewType("OrderId", int)


class OrderKind(Enum):
    """Name the two ends of a copy."""

    DEVICE_TO_SLOT = "store"
    SLOT_TO_DEVICE = "load"


class Outcome(Enum):
    """Say how a job ended.

    ``RUNNING -> DONE | FAILED | ABANDONED``, and later ``ABANDONED -> SETTLED``.
    """

    DONE = "done"
    """Every byte is where it should be."""
    FAILED = "failed"
    """The copy is over and its destination is not to be trusted; neither side is touched any more."""
    ABANDONED = "abandoned"
    """The deadline passed and the copy is not proven over: its slots and device blocks stay withheld."""
    SETTLED = "settled"
    """An abandoned job has ended at last: its slots and device blocks may be reused; its bytes are not used."""


@dataclass(frozen=True, slots=True)
class OrderPart:
    """The slots of one group that an order reads or fills, in the order of the blocks."""

    group: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Move whole blocks between the device and slots; device block ids are added by the engine's side."""

    order_id: OrderId
    kind: OrderKind
    parts: tuple[OrderPart, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Tell how an order went. `nbytes` were moved, `seconds` from submission to the moment the end was seen."""

    order_id: OrderId
    kind: OrderKind
    outcome: Outcome
    nbytes: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``first .. first + num_slots - 1`` of one group."""

    group: int
    first: int
    num_slots: int
