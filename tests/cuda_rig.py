"""A CUDA device over a driver without a GPU, with blocks in its memory and slots that it reaches."""

from contextlib import ExitStack

import numpy as np
import pytest

from fake_cuda import FakeDriver, bytes_at
from fake_page_kernel import add_page_kernels
from kvmoor.block_layout import SLOT_ALIGNMENT, BlockLayout, GroupLayout, TensorPages
from kvmoor.devices.cuda import page_kernels
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.device import CudaDevice
from kvmoor.devices.device import BlockCopies, Direction

STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
WAIT_S = 30.0
SHORT_S = 0.05
"""For what must not happen while a test looks."""
ENGINE = 0
"""The engine computes on the legacy default stream, as torch does unless told otherwise."""
KERNEL_ONLY = CopyStrategy(copy_engine_from_nbytes=None, gather_from_nbytes=None)
ENGINE_ONLY = CopyStrategy(copy_engine_from_nbytes=1, gather_from_nbytes=None)


class PromptDriver(FakeDriver):
    """A driver that hands out used memory, and whose idle streams reach an event at once: nothing is before it."""

    def memory_alloc(self, nbytes):
        return self._use(super().memory_alloc(nbytes), nbytes)

    def host_alloc(self, nbytes):
        return self._use(super().host_alloc(nbytes), nbytes)

    def _use(self, address, nbytes):
        bytes_at(address, nbytes)[:] = 0xAB
        return address

    def event_record(self, event, stream):
        super().event_record(event, stream)
        if ["record"] == self.pending(stream):
            self.step(stream)


class CudaRig:
    """A fake driver and what is open on it. Leaving it closes the devices and stops the fake GPU."""

    def __init__(self, **options):
        self.fake = PromptDriver(**options)
        add_page_kernels(self.fake)
        self._stack = ExitStack()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(page_kernels, "_compile", lambda *arguments: b"code")
        self.devices = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._stack:
            self.fake.blocks_for_real = False
            for device in self.devices:
                device.close(0.0)

    def run(self):
        """Let a thread run what is queued, as a GPU does, until the rig is left."""
        self._stack.enter_context(self.fake.running())

    def open(self, **options):
        """Return a device whose engine is on `ENGINE`."""
        options = {"current_stream": ENGINE, "strategy": KERNEL_ONLY, **options}
        self.devices.append(CudaDevice(driver=self.fake, **options))
        return self.devices[-1]

    def blocks(self, **options):
        return CudaBlocks(self.fake, **options)

    def assert_clean(self):
        """Assert that everything was given back, and that nothing was done that must not be."""
        self.fake.check()
        assert [] == self.fake.leaks()


class CudaBlocks:
    """One group: tensors on the fake GPU and registered slots, both with bytes that tell them apart."""

    def __init__(self, fake, *, page_nbytes=(512, 512), num_blocks=16, blocks_per_chunk=1, num_slots=16, seed=0):
        random = np.random.default_rng(seed)
        self._fake = fake
        self.tensors = [fake.device_bytes(nbytes * num_blocks).reshape(num_blocks, nbytes) for nbytes in page_nbytes]
        for tensor in self.tensors:
            tensor[:] = random.integers(0, 256, tensor.shape, np.uint8)
        pages = (TensorPages(each.ctypes.data, num_blocks, each.shape[1], each.shape[1]) for each in self.tensors)
        self.group = GroupLayout(tuple(pages), blocks_per_chunk, blocks_per_chunk)
        nbytes = num_slots * self.group.slot_nbytes
        memory = np.zeros(nbytes + SLOT_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % SLOT_ALIGNMENT
        self.slots = memory[start : start + nbytes].reshape(num_slots, -1)
        self.address = self.slots.ctypes.data

    def register(self, registrar):
        """Let the device reach all slots."""
        registrar.register(self.address, self.slots.nbytes)
        return lambda: registrar.unregister(self.address, self.slots.nbytes)

    def layout(self):
        return BlockLayout((self.group,), on_host=False)

    def copies(self, *block_ids, slots=None):
        """Pair whole blocks with slots, by default those of the same number."""
        chunk = self.group.blocks_per_chunk
        ids = np.concatenate([np.arange(chunk) + chunk * block_id for block_id in block_ids])
        places = np.array(block_ids if slots is None else slots, np.int64)
        return [BlockCopies(self.group, ids.astype(np.int64), self.address + self.group.slot_nbytes * places)]

    def content(self, block_id):
        """Return the bytes of a block as its slot has them."""
        chunk = self.group.blocks_per_chunk
        return np.concatenate([tensor[block_id * chunk : (block_id + 1) * chunk].ravel() for tensor in self.tensors])

    def slot(self, number):
        return self.slots[number, : self.group.block_nbytes]

    def assert_stored(self, *numbers):
        """Compare these slots with the blocks of the same number, and all others with zero."""
        for number in range(len(self.slots)):
            expected = self.content(number) if number in numbers else np.zeros_like(self.content(number))
            np.testing.assert_array_equal(expected, self.slot(number), err_msg=f"slot {number}")
