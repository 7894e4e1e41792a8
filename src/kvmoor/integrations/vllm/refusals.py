"""Configurations of vLLM that the connector does not serve, each with its reason and what to do."""

from collections.abc import Mapping
from typing import Any

from kvmoor.errors import SettingsError, UnsupportedError


def refuse_configuration(vllm_config: Any, kv_cache_config: Any, *, is_before_033: bool) -> None:
    """Raise `SettingsError` for settings of vLLM that have to be others, `UnsupportedError` for what is not served."""
    transfer, model, cache = vllm_config.kv_transfer_config, vllm_config.model_config, vllm_config.cache_config
    extra = transfer.kv_connector_extra_config
    num_groups = len(kv_cache_config.kv_cache_groups)
    if transfer.kv_load_failure_policy != "recompute":
        raise SettingsError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, with which a load that fails ends its "
            'request: set it to "recompute" in kv_transfer_config'
        )
    if transfer.kv_role != "kv_both":
        raise SettingsError(f'kv_role is {transfer.kv_role!r}: set it to "kv_both", since blocks go both ways')
    if extra.get("sync_load_budget_bytes") and num_groups > 1:
        raise SettingsError(
            f"sync_load_budget_bytes is set and the model has {num_groups} groups of KV caches, for which vLLM cannot "
            "compute again what such a load failed to bring: remove it"
        )
    if extra.get("sync_load_budget_bytes") and vllm_config.max_concurrent_batches > 1:
        raise SettingsError(
            "sync_load_budget_bytes is set and several steps run at a time (async scheduling or pipeline parallel), "
            "where vLLM hands out what a step computed from a load that failed in the step before: remove it, or set "
            "async_scheduling to False"
        )
    if extra.get("canonical_layout"):
        raise UnsupportedError("canonical_layout is not supported: remove it from kv_connector_extra_config")
    if model.enable_sleep_mode and is_before_033:
        raise UnsupportedError(
            "enable_sleep_mode: vLLM below 0.33 does not tell connectors that the device's memory goes away: "
            "turn it off, or use vLLM 0.33"
        )
    if model.use_mla and vllm_config.device_config.device_type == "cpu" and not cache.enable_prefix_caching:
        raise UnsupportedError(
            "this CPU computes MLA models without regard to a cached prefix, so that blocks that come back would give "
            "wrong answers: serve this model without a connector here"
        )
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        raise UnsupportedError("hisparse keeps its own part of the KV cache on the host: serve without one of the two")
    blocks_per_chunk, tokens_per_chunk = _whole_number(extra, "blocks_per_chunk"), _whole_number(extra, "block_size")
    for group in kv_cache_config.kv_cache_groups if is_before_033 else ():
        spec = group.kv_cache_spec
        if not getattr(spec, "sliding_window", None):
            continue
        if (blocks_per_chunk or 1) > 1 or (tokens_per_chunk or 0) > _tokens_per_device_block(spec, vllm_config):
            option = "blocks_per_chunk above 1" if blocks_per_chunk else "block_size above that of the device"
            raise UnsupportedError(
                f"{option} in kv_connector_extra_config with sliding windows: vLLM below 0.33 leaves out blocks of a "
                "chunk without telling which; set blocks_per_chunk to 1 and no block_size there, or use vLLM 0.33"
            )


def _whole_number(extra: Mapping[str, Any], option: str) -> int | None:
    """Return a size of chunks; None where none is set, which vLLM also writes as null."""
    value = extra.get(option)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise SettingsError(f"{option} in kv_connector_extra_config is {value!r}: give a whole number from 1, or remove it")


def _tokens_per_device_block(spec: Any, vllm_config: Any) -> int:
    # Ranks of decode context parallelism share the tokens of a block; vLLM 0.30 has no such flag, windows always do.
    num_sharing = vllm_config.parallel_config.decode_context_parallel_size if getattr(spec, "dcp_sharded", True) else 1
    return int(spec.block_size * num_sharing)
