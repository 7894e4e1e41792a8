"""Keep the KV-cache blocks of an LLM engine in host memory and bring them back when a prompt returns.

Names are loaded on first use, so that ``import kvmoor`` costs nothing that is not used and loads no GPU code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmoor.block_key import BlockKey as BlockKey
    from kvmoor.block_key import BlockKeys as BlockKeys
    from kvmoor.block_layout import BlockLayout as BlockLayout
    from kvmoor.block_layout import GroupLayout as GroupLayout
    from kvmoor.block_layout import TensorPages as TensorPages
    from kvmoor.devices.cpu import CpuDevice as CpuDevice
    from kvmoor.errors import KvmoorError as KvmoorError
    from kvmoor.key_builder import KeyBuilder as KeyBuilder
    from kvmoor.key_builder import MultimodalItem as MultimodalItem
    from kvmoor.key_builder import Namespace as Namespace
    from kvmoor.offloader import Offloader as Offloader
    from kvmoor.transfer_messages import Outcome as Outcome

__version__ = "0.1.0.dev0"

_HOMES = {
    "BlockKey": "kvmoor.block_key",
    "BlockKeys": "kvmoor.block_key",
    "BlockLayout": "kvmoor.block_layout",
    "CpuDevice": "kvmoor.devices.cpu",
    "GroupLayout": "kvmoor.block_layout",
    "KeyBuilder": "kvmoor.key_builder",
    "KvmoorError": "kvmoor.errors",
    "MultimodalItem": "kvmoor.key_builder",
    "Namespace": "kvmoor.key_builder",
    "Offloader": "kvmoor.offloader",
    "Outcome": "kvmoor.transfer_messages",
    "TensorPages": "kvmoor.block_layout",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvmoor' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
