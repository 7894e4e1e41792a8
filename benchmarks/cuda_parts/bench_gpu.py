"""The GPU of a benchmark: torch as the engine, the driver for yardsticks, kernels that spin, hang or break things."""

import ctypes
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from print_parts.machine import machine

import kvmoor
from kvmoor.errors import DeviceError

WAIT_S = 30.0
CACHE = Path(tempfile.gettempdir()) / f"kvmoor-bench-{os.getuid()}"
"""Where compiled code is kept, so that a benchmark does not wait a second for each device it opens."""

_KERNELS = r"""
__device__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

extern "C" __global__ void hold(const volatile unsigned int* released, unsigned long long limit_ns) {
    const unsigned long long begin = now_ns();
    while (*released == 0 && now_ns() - begin < limit_ns) __nanosleep(500);
}

extern "C" __global__ void spin(unsigned long long ns) {
    const unsigned long long begin = now_ns();
    while (now_ns() - begin < ns) {}
}

extern "C" __global__ void trap() { asm volatile("trap;"); }
"""


def why_no_gpu() -> str:
    """Return why nothing can be measured here; empty if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own business
            import cuda.bindings.driver  # noqa: F401, PLC0415
            import torch  # noqa: PLC0415 - nobody needs it for --help
    except ImportError as error:
        return f"this benchmark needs torch and the CUDA bindings ({error})"
    return "" if torch.cuda.is_available() else "this benchmark needs a CUDA device"


def open_gpu() -> "BenchGpu":
    """Open the GPU, or end the process with a sentence where there is none; that is no error for `make bench`."""
    if reason := why_no_gpu():
        print(f"{reason}: nothing was measured")
        sys.exit(0)
    return BenchGpu()


class BenchGpu:
    """One GPU, with torch's context current on this thread."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415

        from kvmoor.devices.cuda.compiler import choose_architecture, compile_source  # noqa: PLC0415
        from kvmoor.devices.cuda.driver import Driver  # noqa: PLC0415

        self.torch: Any = torch
        torch.zeros(1, device="cuda")  # makes the primary context current
        self.driver = Driver()
        self.name: str = torch.cuda.get_device_name()
        architecture = choose_architecture(*torch.cuda.get_device_capability())
        self.num_multiprocessors: int = torch.cuda.get_device_properties(0).multi_processor_count
        module = self.driver.module_load(compile_source(_KERNELS, architecture, name="engine.cu"))
        self._functions = {name: self.driver.module_function(module, name) for name in ("hold", "spin", "trap")}

    def open_device(self, **options: Any) -> Any:
        """Open a `CudaDevice` whose engine works on torch's current stream."""
        from kvmoor.devices.cuda.device import CudaDevice  # noqa: PLC0415

        return CudaDevice(**{"current_stream": self.torch.cuda.current_stream, "cache_dir": CACHE, **options})

    def page_kernels(self) -> list[str]:
        """Return the names of the page kernels that this GPU can run; prints why it cannot run the others."""
        from kvmoor.devices.cuda.copy_strategy import CopyStrategy  # noqa: PLC0415
        from kvmoor.devices.cuda.launches import VARIANTS  # noqa: PLC0415

        usable = []
        for kernel in VARIANTS:
            try:
                device = self.open_device(strategy=CopyStrategy(store_kernel=kernel.name, load_kernel=kernel.name))
            except DeviceError as error:
                print(f"left out: {error}")
                continue
            device.close(WAIT_S)
            usable.append(kernel.name)
        return usable

    def hold(self, stream: Any, flag_address: int, limit_s: float) -> None:
        """Queue a kernel that runs until the word at `flag_address` is not zero."""
        self._launch("hold", 1, 1, stream, ctypes.c_uint64(flag_address), ctypes.c_uint64(int(limit_s * 1e9)))

    def spin(self, stream: Any, seconds: float, *, thread_blocks: int, threads: int) -> None:
        """Queue a kernel that keeps multiprocessors busy for a time."""
        self._launch("spin", thread_blocks, threads, stream, ctypes.c_uint64(int(seconds * 1e9)))

    def trap(self, stream: Any) -> None:
        """Queue a kernel that breaks the context."""
        self._launch("trap", 1, 1, stream)

    def _launch(self, name: str, grid: int, block: int, stream: Any, *parameters: Any) -> None:
        pointers = (ctypes.c_void_p * max(1, len(parameters)))(*(ctypes.addressof(each) for each in parameters))
        function, handle = self._functions[name], stream.cuda_stream
        self.driver.launch(function, grid, block, 0, handle, ctypes.addressof(pointers))


@dataclass(frozen=True)
class JobTimes:
    """Seconds from the call until it returned, and until the end of its work was seen."""

    submit_s: float
    seen_s: float


def time_job(queue: Any, copies: Any, sequence: int) -> JobTimes:
    """Queue a job and watch its completion number."""
    begin = time.perf_counter()
    queue.enqueue(copies, sequence, None)
    submitted = time.perf_counter()
    deadline = begin + WAIT_S
    while queue.completed() < sequence:
        if time.perf_counter() > deadline:
            raise SystemExit(f"job {sequence} is not over after {WAIT_S:g} s")
    seen = time.perf_counter()
    if (failure := queue.failure(sequence)) is not None:
        raise SystemExit(f"job {sequence} failed: {failure}")
    return JobTimes(submitted - begin, seen - begin)


class StreamTimer:
    """Time work on a stream of its own in the same way: the call, and until an event behind it is seen."""

    def __init__(self, gpu: BenchGpu) -> None:
        self._driver = gpu.driver
        self.stream = gpu.torch.cuda.Stream()
        self.handle: int = self.stream.cuda_stream
        self._event = self._driver.event_create()

    def time(self, submit: Callable[[], object]) -> JobTimes:
        """Run `submit`, which queues work on the stream, and watch for its end."""
        begin = time.perf_counter()
        submit()
        self._driver.event_record(self._event, self.handle)
        submitted = time.perf_counter()
        deadline = begin + WAIT_S
        while not self._driver.event_query(self._event):
            if time.perf_counter() > deadline:
                raise SystemExit(f"work on a stream is not over after {WAIT_S:g} s")
        return JobTimes(submitted - begin, time.perf_counter() - begin)


def describe_machine(gpu: BenchGpu) -> str:
    """Name hardware and versions in one line."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("cuda-bindings", "nvidia-cuda-nvrtc", "triton"))
    cuda = gpu.driver.driver_version() / 1000
    return f"{gpu.name} ({_link(0)}), CUDA {cuda:.1f}; {machine(kvmoor, np, gpu.torch)}, {versions}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _link(ordinal: int) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "link unknown"
    fields = "driver_version,pcie.link.gen.current,pcie.link.width.current"
    command = [tool, f"--id={ordinal}", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        driver, generation, width = (each.strip() for each in answer.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return "link unknown"
    return f"driver {driver}, PCIe {generation} x{width}"
