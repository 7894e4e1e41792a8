"""One slab of an arena and what became of it."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmoor.host_memory.arena_plan import SlabPlan


class SlabState(Enum):
    """Say what became of a slab: ``RESERVED -> READY | LOST``."""

    RESERVED = "reserved"
    """It has addresses, and perhaps some memory; its slots do not exist yet."""
    READY = "ready"
    """All of it is memory, and its slots are published; it is registered, or copies to and from it are staged."""
    LOST = "lost"
    """It could not be mapped; its slots are never handed out."""


_LEGAL_MOVES: Final = {
    SlabState.RESERVED: frozenset({SlabState.READY, SlabState.LOST}),
    SlabState.READY: frozenset[SlabState](),
    SlabState.LOST: frozenset[SlabState](),
}


@dataclass(slots=True)
class Slab:
    """A slab and its state; guarded by the lock of its mapper.

    `reason` says why it is lost; of a slab that is still reserved, why there was no room for it. Such a slab is tried
    again later.
    """

    plan: SlabPlan
    state: SlabState = SlabState.RESERVED
    reason: str = ""

    @property
    def lacks_room(self) -> bool:
        """Say whether the memory limits did not leave room for it when it was last tried."""
        return self.state is SlabState.RESERVED and bool(self.reason)

    def move(self, state: SlabState, reason: str = "") -> None:
        """Change the state; the only place that does."""
        assert state in _LEGAL_MOVES[self.state], f"a slab cannot go from {self.state.value} to {state.value}"
        self.state = state
        self.reason = reason
