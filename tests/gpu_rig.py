"""A real GPU for tests: an engine's stream that can be held, kernels that hang or break it, memory with known bytes.

Torch and CUDA are imported when a `Gpu` is opened, so that the tests can be listed on a machine without a GPU.
"""

import ctypes
import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmoor.errors import DeviceError

WAIT_S: Final = 30.0
"""What may take so long in a test is over in milliseconds unless something is broken."""
HOLD_LIMIT_S: Final = 60.0
"""A kernel that is held ends by itself after this, so that a test that fails cannot wedge the GPU."""
HOST_REGION_NBYTES: Final = 768 * 2**20
STAGING_NBYTES: Final = 16 * 2**20
CACHE: Final = Path(tempfile.gettempdir()) / f"kvmoor-gpu-tests-{os.getuid()}"
"""Where compiled code is kept, so that not every test waits a second for it."""

_KERNELS: Final = r"""
__device__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

extern "C" __global__ void hold(const volatile unsigned int* released, unsigned long long limit_ns) {
    const unsigned long long begin = now_ns();
    while (*released == 0 && now_ns() - begin < limit_ns) __nanosleep(500);
}

extern "C" __global__ void trap() { asm volatile("trap;"); }
"""


def why_no_gpu() -> str:
    """Return why tests on a GPU cannot run here; empty if they can."""
    for module in ("torch", "cuda.bindings"):
        try:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        except ModuleNotFoundError:  # not even its parent
            return f"{module} is not installed"
    return "" if _import_torch().cuda.is_available() else "there is no CUDA device"


def _import_torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own business
        import torch
    return torch


class Gpu:
    """One GPU with torch's context current on this thread. Opened once a process and never closed."""

    def __init__(self, host_nbytes: int = HOST_REGION_NBYTES) -> None:
        self.torch = _import_torch()
        self.torch.cuda.init()
        self.torch.zeros(1, device="cuda")  # makes the primary context current

        from kvmoor.devices.cuda.compiler import choose_architecture, compile_source
        from kvmoor.devices.cuda.driver import Driver

        self.driver = Driver()
        self.context = self.driver.context_current()
        architecture = choose_architecture(*self.torch.cuda.get_device_capability())
        module = self.driver.module_load(compile_source(_KERNELS, architecture, name="engine.cu"))
        self._hold, self._trap = (self.driver.module_function(module, name) for name in ("hold", "trap"))
        self._region = self.driver.host_alloc(host_nbytes)
        self._region_nbytes = host_nbytes
        self._staging = host_bytes(self.driver.host_alloc(STAGING_NBYTES), STAGING_NBYTES)
        self._region_used = 0
        self._warm_up()

    def open_device(self, **options: Any) -> Any:
        """Open a `CudaDevice` whose engine works on torch's current stream."""
        from kvmoor.devices.cuda.device import CudaDevice

        return CudaDevice(**{"current_stream": self.torch.cuda.current_stream, "cache_dir": CACHE, **options})

    @cached_property
    def page_kernels(self) -> list[str]:
        """Return the names of the page kernels that this GPU can run."""
        from kvmoor.devices.cuda.copy_strategy import CopyStrategy
        from kvmoor.devices.cuda.launches import VARIANTS

        usable = []
        for kernel in VARIANTS:
            with suppress(DeviceError):
                self.open_device(strategy=CopyStrategy(store_kernel=kernel.name, load_kernel=kernel.name)).close(WAIT_S)
                usable.append(kernel.name)
        return usable

    def tensor(self, nbytes: int) -> Any:
        """Return new device memory as a tensor of bytes. Its address is a multiple of 512."""
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def host_memory(self, nbytes: int) -> int:
        """Return the address of page-locked memory on a 4 KiB boundary, which lasts until `forget_host_memory`."""
        address = self._region + self._region_used
        self._region_used += -(-nbytes // 4096) * 4096
        assert self._region_used <= self._region_nbytes, "a test asks for more page-locked memory than there is"
        return address

    def forget_host_memory(self) -> None:
        """Give out the same memory again. Nothing may use what was given out before."""
        self._region_used = 0

    def hold(self, stream: Any) -> "Latch":
        """Queue a kernel on a stream of torch's that ends when the latch is released."""
        latch = Latch(self.host_memory(4096))
        self.launch_hold(stream.cuda_stream, latch.address)
        return latch

    def launch_hold(self, stream: int, flag_address: int, limit_s: float = HOLD_LIMIT_S) -> None:
        """Launch the kernel that runs until the word at `flag_address` is not zero."""
        self._launch(self._hold, stream, ctypes.c_uint64(flag_address), ctypes.c_uint64(int(limit_s * 1e9)))

    def launch_trap(self, stream: Any) -> None:
        """Launch the kernel that breaks the context."""
        self._launch(self._trap, stream.cuda_stream)

    def write(self, address: int, data: Any) -> None:
        """Write device memory now, on a stream that nothing else uses."""
        for begin in range(0, data.nbytes, STAGING_NBYTES):
            piece = data.reshape(-1)[begin : begin + STAGING_NBYTES]
            self._staging[: len(piece)] = piece
            self._copy_now(address + begin, self._staging.ctypes.data, len(piece))

    def read(self, address: int, nbytes: int) -> Any:
        """Read device memory now, on a stream that nothing else uses."""
        data = np.empty(nbytes, np.uint8)
        for begin in range(0, nbytes, STAGING_NBYTES):
            piece = data[begin : begin + STAGING_NBYTES]
            self._copy_now(self._staging.ctypes.data, address + begin, len(piece))
            piece[:] = self._staging[: len(piece)]
        return data

    def wait_until(self, is_true: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Ask again and again; fail the test at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, f"{what}: not after {timeout_s:g} s"

    def _copy_now(self, destination: int, source: int, nbytes: int) -> None:
        self.driver.copy_async(destination, source, nbytes, self._own_stream.cuda_stream)
        self.wait_until(self._own_stream.query, f"a copy of {nbytes} bytes")

    def _launch(self, function: int, stream: int, *parameters: Any) -> None:
        pointers = (ctypes.c_void_p * max(1, len(parameters)))(*(ctypes.addressof(each) for each in parameters))
        self.driver.launch(function, 1, 1, 0, stream, ctypes.addressof(pointers))

    def _warm_up(self) -> None:
        """Use everything once: what is loaded late would wait for a kernel that is held."""
        torch = self.torch
        self._own_stream = torch.cuda.Stream()
        stream = torch.cuda.Stream()
        latch = self.hold(stream)
        latch.release()
        with torch.cuda.stream(stream):
            tensor = torch.empty(2**16, dtype=torch.uint8, device="cuda")
            tensor.fill_(3)
            other = tensor.clone()
            other.copy_(tensor)
            torch.equal(tensor, other)
            torch.cuda.Event().record()
        stream.synchronize()
        self.write(tensor.data_ptr(), np.zeros(2**16, np.uint8))
        self.read(tensor.data_ptr(), 2**16)
        self.forget_host_memory()


class Latch:
    """A word in page-locked memory that a kernel waits for."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._word = ctypes.c_uint32.from_address(address)
        self._word.value = 0

    def release(self) -> None:
        """Let the kernel end."""
        self._word.value = 1


def host_bytes(address: int, nbytes: int) -> Any:
    """View host memory as an array of bytes."""
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)
