"""What happened, as records, and the one hook through which every part reports it.

Nothing is reported unless the user passes an `Observer`. Events are reported after the locks are released and
from whichever thread the thing happened on, so an observer has to be thread-safe and quick.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

from kvmoor.process_end import is_leaving
from kvmoor.transfer_messages import OrderKind, Outcome

_log = logging.getLogger("kvmoor")


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A job ended: `seconds` from its submission, `reason` empty unless it went wrong."""

    kind: OrderKind
    outcome: Outcome
    nbytes: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class StoreDeclined:
    """A store found no room: `num_blocks` blocks were not stored."""

    num_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """`num_blocks` blocks left host memory to make room for others."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class SlotsPublished:
    """`num_slots` more slots of `group` can be used; `mapped_nbytes` of the arena are mapped by now.

    `registered`: the device copies to and from them directly, because they are page-locked or because it need not be
    so. Copies of the others are staged.
    """

    group: int
    num_slots: int
    mapped_nbytes: int
    arena_nbytes: int
    registered: bool = True


@dataclass(frozen=True, slots=True)
class MappingFailed:
    """A part of the arena could not be mapped: its slots are not handed out.

    Where memory limits are the reason it is tried again; should that succeed, `SlotsPublished` says so.
    """

    group: int
    num_slots: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegistrationDegraded:
    """An arena stopped page-locking its memory, for good: what is not registered by now is staged. Reported once."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LaneBroke:
    """A lane takes no more jobs; what it still had running is not proven over."""

    lane: str
    reason: str


@dataclass(frozen=True, slots=True)
class ArenaQuarantined:
    """An arena stays mapped until the process ends, because a copy may still touch it."""

    nbytes: int
    reason: str


Event = (
    TransferEnded
    | StoreDeclined
    | BlocksEvicted
    | SlotsPublished
    | MappingFailed
    | RegistrationDegraded
    | LaneBroke
    | ArenaQuarantined
)


class Observer(Protocol):
    """Receive events. May be called from any thread; must not block and must not call back into kvmoor."""

    def on_event(self, event: Event) -> None:
        """Take note of one event."""


class SilentObserver:
    """Take note of nothing: the default."""

    def on_event(self, event: Event) -> None:
        """Ignore the event."""


def notify(observer: Observer, event: Event) -> None:
    """Report an event; an observer that raises is logged and otherwise ignored, so that it cannot stop a copy."""
    if is_leaving():
        return  # an observer that hangs would keep the process; what matters then is logged as well
    try:
        observer.on_event(event)
    except Exception:
        _log.exception("an observer raised on %r; the event is lost, kvmoor goes on", event)
