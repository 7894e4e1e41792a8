"""The device that vLLM's KV caches lie on."""

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.device import Device
from kvmoor.settings import cache_directory


def open_device(layout: BlockLayout) -> Device:
    """Open the device of a layout's tensors: the CPU for those in host memory, or else the current GPU.

    Their place decides, and not which classes torch has: vLLM replaces those for streams and events on the CPU.
    """
    if layout.on_host:
        return CpuDevice()
    import torch

    from kvmoor.devices.cuda.device import CudaDevice

    return CudaDevice(current_stream=torch.cuda.current_stream, cache_dir=cache_directory())
