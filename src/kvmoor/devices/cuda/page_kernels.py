"""The compiled page kernel on the device: loaded once, whatever number of queues launch it."""

import threading
from functools import cache
from pathlib import Path
from typing import Final

from kvmoor.devices.cuda.compiler import choose_architecture, page_copy_source
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.cubin_cache import load_or_compile
from kvmoor.devices.cuda.holdings import Holdings
from kvmoor.devices.cuda.launches import KernelFunctions, PageKernelVariant
from kvmoor.errors import DeviceError
from kvmoor.process_end import register

_ANY_SHARED_NBYTES: Final = 48 * 1024
"""What a thread block may have without further ado; more has to be allowed (CUDA C++ Programming Guide)."""


class PageKernels:
    """Compile and load the page kernel at first use. Any thread may call."""

    def __init__(self, context: CudaContext, holdings: Holdings, cubin_folder: Path | None) -> None:
        """`cubin_folder`: where compiled code is kept; None: in this process only."""
        self._context = context
        self._driver = context.driver
        self._holdings = holdings
        self._cubin_folder = cubin_folder
        self._capability = tuple(
            self._driver.device_attribute(context.device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")
        )
        self._most_shared_nbytes = self._driver.device_attribute(context.device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._lock = threading.Lock()  # guards the two below, and is held while compiling
        self._module = 0
        self._functions: dict[str, KernelFunctions] = {}
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be free in a forked child, where it is of no use."""
        self._lock = threading.Lock()

    def find(self, variant: PageKernelVariant) -> KernelFunctions:
        """Return the functions of a variant. The first call takes some seconds if the kernel has to be compiled.

        Raises `DeviceError` if this GPU cannot run it, `MissingDependencyError` if there is no compiler.
        """
        with self._lock:
            if variant.name not in self._functions:
                self._functions[variant.name] = self._load(variant)
            return self._functions[variant.name]

    def _load(self, variant: PageKernelVariant) -> KernelFunctions:
        major, minor = self._capability
        if self._capability < variant.min_capability or variant.shared_nbytes > self._most_shared_nbytes:
            needed = ".".join(map(str, variant.min_capability))
            raise DeviceError(
                f"the page kernel {variant.name} cannot run on this GPU: it needs compute capability {needed} and "
                f"{variant.shared_nbytes} bytes of shared memory, found {major}.{minor} and {self._most_shared_nbytes} "
                "bytes: leave the kernel of the copy strategy at its default"
            )
        if not self._module:
            version = self._driver.driver_version()
            self._module = self._holdings.load_module(_compile(major, minor, version, self._cubin_folder))
        with self._context.relaxed():
            small = self._driver.module_function(self._module, variant.small_function)
            large = self._driver.module_function(self._module, variant.large_function)
            if variant.shared_nbytes > _ANY_SHARED_NBYTES:
                for function in (small, large):
                    self._driver.function_allow_shared(function, variant.shared_nbytes)
        return KernelFunctions(variant, small, large)


@cache
def _compile(major: int, minor: int, driver_version: int, folder: Path | None) -> bytes:
    """Return the code for a compute capability; once a process, since a folder may not keep anything."""
    architecture = choose_architecture(major, minor)
    return load_or_compile(page_copy_source(), architecture, folder=folder, driver_version=driver_version)
