from kvmoor.host_memory.arena import Arena, ArenaState, ArenaStatistics
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan, SlabPlan, plan_arena
from kvmoor.host_memory.limits import MemoryLimits, read_memory_limits
from kvmoor.host_memory.quarantine import quarantined_arenas, quarantined_nbytes
from kvmoor.host_memory.slab_memory import Backing

__all__ = [
    "Arena",
    "ArenaPlan",
    "ArenaState",
    "ArenaStatistics",
    "Backing",
    "GroupPlan",
    "MemoryLimits",
    "SlabPlan",
    "plan_arena",
    "quarantined_arenas",
    "quarantined_nbytes",
    "read_memory_limits",
]
