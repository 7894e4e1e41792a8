"""How engines are started: without offloading, with vLLM's own, and with kvmoor. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_gpu_parts.shapes import Shape

Offloading = Literal["none", "native", "kvmoor"]
Device = Literal["cuda", "cpu"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # in vLLM's own processes too: what is killed says where it was
}
"""What is set unless it is set already: no network, and none of vLLM's optional kernels."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """One way to start vLLM. `layout` is that of its KV caches; `eager`: without CUDA graphs."""

    offloading: Offloading
    layout: str = "LBHNC"
    eager: bool = False
    can_sleep: bool = False

    @property
    def name(self) -> str:
        """Name it as in tables."""
        marks = [self.layout, *(["eager"] if self.eager else []), *(["sleep"] if self.can_sleep else [])]
        return f"{self.offloading} {' '.join(marks)}"

    def why_not(self, device: Device) -> str:
        """Say why it cannot run on a device; empty if it can."""
        if device == "cpu":
            if self.offloading == "native":
                return "vLLM's own offloading needs a GPU"
            if self.layout != "LBHNC":
                return "vLLM's attention for CPUs knows layout LBHNC only"
            if self.can_sleep:
                return "sleep mode needs a GPU"
        return ""

    def environment(self, device: Device, *, one_process: bool) -> dict[str, str]:
        """Return what has to be in the environment of the process that starts it."""
        given = {"VLLM_KV_CACHE_LAYOUT": self.layout, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not one_process))}
        if device == "cpu":
            # Engines with and without a connector would otherwise compute on different cores.
            given |= {"VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
        return given

    def llm_options(self, shape: Shape, model: Path, device: Device, *, shares_gpu: bool) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`; `shares_gpu`: other engines run at the same time."""
        options: dict[str, Any] = {
            "model": str(model),
            "load_format": "auto" if shape.weights == "random" else "dummy",
            "skip_tokenizer_init": True,
            "dtype": shape.dtype,
            "enforce_eager": self.eager or device == "cpu",
            "max_model_len": shape.max_model_len,
            "block_size": shape.tokens_per_block,
            "num_gpu_blocks_override": shape.device_blocks,
            "max_num_seqs": shape.max_num_seqs,
            "max_num_batched_tokens": shape.batched_tokens,
            "enable_prefix_caching": True,
            "seed": 0,
            "disable_log_stats": False,
        }
        if device == "cuda":
            options |= {"attention_backend": "FLASH_ATTN", "gpu_memory_utilization": 0.1 if shares_gpu else 0.5}
        if device == "cpu" or shares_gpu:  # nobody may free memory while another engine measures what is free
            options |= {"kv_cache_memory_bytes": shape.device_blocks * shape.block_nbytes}
        if self.can_sleep:
            options["enable_sleep_mode"] = True
        if self.offloading != "none":
            options["kv_transfer_config"] = self._transfer_config(shape)
        return options

    def _transfer_config(self, shape: Shape) -> dict[str, Any]:
        if self.offloading == "native":
            extra = {"cpu_bytes_to_use": shape.host_nbytes, "offload_prompt_only": False}
            return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return {
            "kv_connector": "KvmoorConnector",
            "kv_connector_module_path": "kvmoor.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_memory": shape.host_nbytes},
        }
