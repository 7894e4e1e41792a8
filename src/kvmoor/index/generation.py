"""What belongs to the time between two resets, so that a reset is only a new one of these."""

from dataclasses import dataclass, field

from kvmoor.index.eviction.policy import EvictionPolicy


@dataclass(slots=True, eq=False)
class Generation:
    """The blocks of one group between two resets, and who chooses among them."""

    policy: EvictionPolicy
    slot_of: dict[bytes, int] = field(default_factory=dict)
    """The blocks that a lookup finds, or found before the reset: WRITING or READY."""
    num_ready: int = 0
    """READY slots that were filled in this time."""
