"""vLLM's figures as they are in ``/metrics``, whole seconds and fractions, read in the frontend's process."""

from dataclasses import dataclass, field
from typing import Any

_PREFIXES = ("vllm:kv_offload_", "vllm:kvmoor_", "vllm:num_preemptions", "vllm:external_prefix_cache_hits")


def gpu_used_gb() -> float | None:
    """Return how much memory of the first GPU all processes use, in units of 1e9 bytes; None where that is not told."""
    try:
        import pynvml  # noqa: PLC0415 - on machines with a GPU

        nvml: Any = pynvml
        nvml.nvmlInit()
        used: int = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used
    except Exception:  # whatever it is, a figure is missing and no more
        return None
    return used / 1e9


@dataclass(frozen=True)
class Figures:
    """Counters and gauges by name, summed over their labels."""

    values: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def read() -> "Figures":
        """Return the figures as of the last step that the frontend has seen."""
        from prometheus_client import REGISTRY  # noqa: PLC0415 - comes with vLLM

        values: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith(_PREFIXES) and not sample.name.endswith(("_created", "_bucket")):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return Figures(values)

    def get(self, name: str) -> float:
        """Return a figure by its name without ``vllm:`` and ``_total``; 0 if there is none."""
        return self.values.get(f"vllm:{name}_total", self.values.get(f"vllm:{name}", 0.0))

    def since(self, earlier: "Figures") -> dict[str, float]:
        """Return what was copied in between: bytes, and the seconds that the engine was told."""
        names = {
            "loaded_nbytes": "kv_offload_load_bytes",
            "load_s": "kv_offload_load_time",
            "stored_nbytes": "kv_offload_store_bytes",
            "store_s": "kv_offload_store_time",
            "preemptions": "num_preemptions",
            "failed_loads": "kvmoor_failed_loads",
            "failed_stores": "kvmoor_failed_stores",
            "declined_stores": "kvmoor_declined_stores",
        }
        return {key: self.get(name) - earlier.get(name) for key, name in names.items()}
