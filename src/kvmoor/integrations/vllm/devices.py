"""The device that vLLM's KV caches lie on.

What `CudaDevice` takes of the GPU here, all of it before vLLM captures graphs: a ring for stores and one for loads,
each 1/512 of the GPU's memory and 256 MiB at most, where pages are short enough to go that way; 1 MiB for tables and
counters; code and streams. What the driver keeps to map page-locked memory comes on top, 2 MiB a GiB with pages of
4 KiB (H200), while that memory is locked in the background. vLLM has sized its KV cache by then, so all of this comes
out of the share that ``gpu_memory_utilization`` leaves free.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Final

from kvmoor.block_layout import BlockLayout
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.device import Device
from kvmoor.errors import SettingsError
from kvmoor.settings import cache_directory

_log = logging.getLogger("kvmoor")

_RING_SHARE: Final = 512
"""The ring of each direction is this part of the memory of the GPU: 256 MiB, as much as pays off, from 128 GiB on."""
_SMALLEST_RING_NBYTES: Final = 32 * 2**20
"""Below that a ring is not faster than the direct way (`gathering`)."""


def open_device(layout: BlockLayout) -> Device:
    """Open the device of a layout's tensors: the CPU for those in host memory, or else the current GPU.

    Their place decides, and not which classes torch has: vLLM replaces those for streams and events on the CPU. A GPU
    copies as ``kvmoor bench copies`` has found best there, or by the defaults: nothing is measured while vLLM starts.
    """
    if layout.on_host:
        return CpuDevice()
    import torch

    from kvmoor.devices.cuda.device import CudaDevice

    index = torch.cuda.current_device()
    return CudaDevice(
        # Of this GPU, also where another thread asks, whose current one may be another.
        current_stream=partial(torch.cuda.current_stream, index),
        most_ring_nbytes=ring_nbytes(torch.cuda.get_device_properties(index).total_memory),
        cache_dir=_cache_directory(),
    )


def ring_nbytes(memory_nbytes: int) -> int:
    """Return how large each ring may be on a GPU with so much memory."""
    return max(_SMALLEST_RING_NBYTES, memory_nbytes // _RING_SHARE)


def _cache_directory() -> Path | None:
    """Return where compiled code is kept; None if this user has no place for it, as in some containers."""
    try:
        return cache_directory()
    except SettingsError as error:
        _log.info("the copy kernel is compiled at each start: %s", error)
        return None
