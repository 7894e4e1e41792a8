"""The vLLM plugin: two entries from one code.

``KvmoorConnector`` is the one to use: ``kv_connector="KvmoorConnector"`` with ``kv_connector_module_path`` naming this
package. ``KvmoorSpec`` is for who has to keep vLLM's own ``OffloadingConnector``; it says at start what it lacks.

Names are loaded on first use: the parts that need no vLLM can be imported without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmoor.integrations.vllm.connector import KvmoorConnector as KvmoorConnector
    from kvmoor.integrations.vllm.spec import KvmoorConnectorSpec as KvmoorConnectorSpec
    from kvmoor.integrations.vllm.spec import KvmoorSpec as KvmoorSpec

_HOMES = {
    "KvmoorConnector": "kvmoor.integrations.vllm.connector",
    "KvmoorConnectorSpec": "kvmoor.integrations.vllm.spec",
    "KvmoorSpec": "kvmoor.integrations.vllm.spec",
}
__all__ = ["KvmoorConnector", "KvmoorSpec"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
