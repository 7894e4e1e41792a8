"""Where in its life an arena is, and what its owner can read about it."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.slab_registration import RegistrationMode


class ArenaState(Enum):
    """Say where in its life an arena is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    QUARANTINED = "quarantined"


LEGAL_MOVES: Final = {
    ArenaState.OPENING: frozenset({ArenaState.OPEN, ArenaState.CLOSING}),
    ArenaState.OPEN: frozenset({ArenaState.CLOSING, ArenaState.QUARANTINED}),
    ArenaState.CLOSING: frozenset({ArenaState.CLOSED, ArenaState.QUARANTINED}),
    ArenaState.CLOSED: frozenset[ArenaState](),
    ArenaState.QUARANTINED: frozenset[ArenaState](),
}


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Tell how far an arena is mapped and page-locked."""

    state: ArenaState
    backing: Backing
    nbytes: int
    """What will be resident once everything is mapped."""
    mapped_nbytes: int
    """What is resident; 0 once closed."""
    lost_nbytes: int
    """What could not be mapped and never will be."""
    waiting_nbytes: int
    """What found no room within the memory limits and is tried again."""
    num_slabs: int
    num_lost_slabs: int
    num_slots: tuple[int, ...]
    """For each group: how many slots are planned."""
    num_published: tuple[int, ...]
    """For each group: how many of them became usable."""
    lost_reason: str
    """Why the first lost slab is lost, or the first waiting one waits; empty if there is none."""
    placement_notes: tuple[str, ...]
    """What the kernel refused of the placement that was asked for, each once; empty if nothing."""
    registered_nbytes: int
    """Of what is published, what is page-locked; 0 in mode "direct" and once closed."""
    staged_nbytes: int
    """Of what is published, what copies reach by staging only; 0 in mode "direct" and once closed."""
    failed_registrations: int
    """How many slabs the registrar refused."""
    registration_mode: RegistrationMode
    """How the device gets at slabs that are published from now on."""
    registration_reason: str
    """Why slabs are staged; empty if none is."""
