"""The plugin's own series in vLLM's ``/metrics``.

Their names begin with ``vllm:`` because vLLM forgets only those when an engine starts, so that any other name would
collide with that of an earlier engine of the process.
"""

from typing import Any, Final

from kvmoor.integrations.vllm.compatibility import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
)
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide

_COUNTERS: Final = {
    "failed_loads": "Loads that failed; their requests were computed instead.",
    "failed_stores": "Stores that failed; their blocks are not found.",
    "declined_stores": "Chunks that found no room for now.",
    "evicted_blocks": "Blocks that left host memory to make room for others.",
}
_GAUGES: Final = {
    "ready_slots": "Slots of host memory that every rank has made usable.",
    "stored_blocks": "Blocks in host memory that can be found.",
}


def metric_definitions() -> dict[str, Any]:
    """Declare all series; what is not declared here vLLM refuses, in its frontend."""
    counters = {_name(key): OffloadingCounterMetadata(documentation=text) for key, text in _COUNTERS.items()}
    gauges = {_name(key): OffloadingGaugeMetadata(documentation=text) for key, text in _GAUGES.items()}
    return counters | gauges


def collect(side: SchedulerSide) -> Any:
    """Return the figures since the last call, as vLLM wants them."""
    stats = OffloadingConnectorStats()
    counts = side.take_counts()
    for key in _COUNTERS:
        if value := getattr(counts, key):
            stats.increase_counter(_name(key), value)
    statistics = side.coordinator.statistics()
    stats.set_gauge(_name("ready_slots"), statistics.published)
    stats.set_gauge(_name("stored_blocks"), statistics.ready)
    return stats


def _name(key: str) -> str:
    return f"vllm:kvmoor_{key}"
