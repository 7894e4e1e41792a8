"""Which device the vLLM plugin opens, and how much of a GPU's memory it lets it take."""

import pytest

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.devices.cpu import CpuDevice
from kvmoor.integrations.vllm import devices
from kvmoor.integrations.vllm.devices import open_device, ring_nbytes

GIB = 2**30


def test_tensors_in_host_memory_get_the_device_for_them():
    """Where KV caches lie decides on the device, and no GPU is asked for."""
    group = GroupLayout((TensorPages(4096, 2, 512, 512),), 16)
    device = open_device(BlockLayout((group,), on_host=True))

    assert isinstance(device, CpuDevice)
    device.close(1.0)


@pytest.mark.parametrize(("memory", "expected"), [(12 * GIB, 32 * 2**20), (80 * GIB, 160 * 2**20), (0, 32 * 2**20)])
def test_a_ring_takes_a_small_share_of_the_memory(memory, expected):
    """A ring is 1/512 of the GPU's memory, and never so small that it is of no use."""
    assert expected == ring_nbytes(memory)


def test_a_user_without_a_home_compiles_at_each_start(monkeypatch):
    """Where there is no place for a cache the plugin starts all the same."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", _no_home)

    assert devices._cache_directory() is None


def _no_home():
    raise RuntimeError("no home")
