"""The CUDA driver as plain functions: the one module that calls it.

Handles, addresses and sizes are ints, times are ms where the name says so. Every method may be called by any thread and
raises `CudaError` if the driver refuses. Methods marked *current* need a context that is current on the calling thread
(`CudaContext` sees to that). Methods marked *may block* are not called any more once the device is `broken`: they
raise at once. None waits for the device on purpose; what the driver does inside is not ours to promise.

The bindings let go of the interpreter lock during a call: a call that blocks stops its own thread only.
"""

import ctypes
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvmoor.devices.cuda.cuda_error import CAPTURE_IMPLICIT, INVALID_VALUE, NOT_SUPPORTED, CudaError
from kvmoor.devices.cuda.driver_calls import DriverCalls
from kvmoor.devices.cuda.entry_points import find_batch_copy, find_pointer_attribute
from kvmoor.errors import DeviceError, MissingDependencyError

__all__ = ["CaptureMode", "CudaError", "Driver"]

CaptureMode = Literal["global", "thread_local", "relaxed"]

# Flags of the driver API (cuda.h).
_STREAM_NON_BLOCKING: Final = 0x1
_EVENT_DISABLE_TIMING: Final = 0x2
_HOST_ALLOC_PORTABLE_DEVICEMAP: Final = 0x1 | 0x2
_HOST_REGISTER_PORTABLE_DEVICEMAP: Final = 0x1 | 0x2
_HOST_REGISTER_READ_ONLY: Final = 0x8
_MEMORY_TYPE_DEVICE: Final = 2
_POINTER_MEMORY_TYPE: Final = 2
_POINTER_DEVICE_ORDINAL: Final = 9
_SOURCE_READ_IN_STREAM_ORDER: Final = 1


class Driver(DriverCalls):
    """Call the driver of this process: `DeviceError` if there is none, `MissingDependencyError` without the bindings.

    `bindings` stands in for ``cuda.bindings.driver`` in tests.
    """

    def __init__(self, bindings: Any = None) -> None:
        super().__init__(_import_bindings() if bindings is None else bindings)
        self._capture_modes: Final[dict[CaptureMode, Any]] = {
            "global": self._bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
            "thread_local": self._bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            "relaxed": self._bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
        }
        self._capture_mode_names: Final[dict[int, CaptureMode]] = {
            int(value): name for name, value in self._capture_modes.items()
        }
        # Looked up once: these are called for every job.
        self._exchange_capture_mode: Final = self._with_result("cuThreadExchangeStreamCaptureMode")
        self._is_capturing: Final = self._with_result("cuStreamIsCapturing")
        self._launch_kernel: Final = self._without_result("cuLaunchKernel")
        self._event_record: Final = self._without_result("cuEventRecord")
        self._stream_wait_event: Final = self._without_result("cuStreamWaitEvent")
        self._stream_write_value: Final = self._without_result("cuStreamWriteValue64")
        self._memcpy_async: Final = self._without_result("cuMemcpyAsync")
        self._event_query: Final = self._bindings.cuEventQuery
        self._context_get_current: Final = self._with_result("cuCtxGetCurrent")
        _initialize(self._bindings)
        self._copy_batch: Final = find_batch_copy(self._bindings)
        self._pointer_get_attribute: Final = find_pointer_attribute(self._bindings)
        self.copy_batch_available = self._copy_batch is not None
        """Whether `copy_batch_async` can be called: since CUDA 13.0."""
        # A struct CUmemcpyAttributes, which begins with the access order; all else is 0, with room for later fields.
        self._batch_attributes: Final = (ctypes.c_uint32 * 32)(_SOURCE_READ_IN_STREAM_ORDER)
        self._batch_attribute_indices: Final = (ctypes.c_size_t * 1)(0)

    # Devices and the driver itself

    def driver_version(self) -> int:
        """Return the CUDA version of the driver: 13000 is 13.0."""
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        """Return how many GPUs this process sees."""
        return int(self._call("cuDeviceGetCount"))

    def device_get(self, ordinal: int) -> int:
        """Return the handle of the GPU with this number."""
        return int(self._call("cuDeviceGet", ordinal))

    def device_name(self, device: int) -> str:
        """Return its name: ``"NVIDIA H200"``."""
        return _text(self._call("cuDeviceGetName", 256, device))

    def device_attribute(self, device: int, name: str) -> int:
        """Return an attribute, named as in the driver API without ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(self._bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, device))

    def device_uuid(self, device: int) -> str:
        """Return what identifies the GPU, as `nvidia-smi -L` prints it: ``"GPU-8b3c..."``."""
        digits = bytes(self._call("cuDeviceGetUuid", device).bytes).hex()
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def pci_bus_id(self, device: int) -> str:
        """Return where it is plugged in, as in /sys/bus/pci/devices: ``"0000:1b:00.0"``."""
        return _text(self._call("cuDeviceGetPCIBusId", 32, device)).lower()

    # Contexts

    def context_current(self) -> int:
        """Return the context that is current on the calling thread; 0: none."""
        return int(self._context_get_current())

    def context_push(self, context: int) -> None:
        """Make a context current until `context_pop`."""
        self._call("cuCtxPushCurrent", context)

    def context_pop(self) -> None:
        """Make current what was so before `context_push`. *Current*."""
        self._call("cuCtxPopCurrent")

    def context_set(self, context: int) -> None:
        """Make a context current in place of the present one; 0: none."""
        self._call("cuCtxSetCurrent", context)

    def context_device(self) -> int:
        """Return the handle of the current context's GPU. *Current*."""
        return int(self._call("cuCtxGetDevice"))

    def primary_context_active(self, device: int) -> bool:
        """Say whether somebody in this process uses the primary context of a GPU."""
        _flags, active = self._call("cuDevicePrimaryCtxGetState", device)
        return bool(active)

    def primary_context_retain(self, device: int) -> int:
        """Return the primary context and keep it until `primary_context_release`; creates it if there is none yet."""
        return int(self._call_unless_broken("cuDevicePrimaryCtxRetain", device))

    def primary_context_release(self, device: int) -> None:
        """Undo one `primary_context_retain`; the last one destroys the context. *May block*."""
        self._call_unless_broken("cuDevicePrimaryCtxRelease", device)

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Set how the calling thread gets along with graph captures of all threads; return how it was before."""
        previous = self._exchange_capture_mode(self._capture_modes[mode])
        return self._capture_mode_names[int(previous)]

    # Streams

    def stream_create(self, priority: int = 0) -> int:
        """Return a new stream that does not synchronise with the legacy default stream. *Current*."""
        return int(self._call("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, priority))

    def stream_destroy(self, stream: int) -> None:
        """Give a stream back; what is queued on it still runs. Returns at once, also if it never ends (measured)."""
        self._call("cuStreamDestroy", stream)

    def stream_query(self, stream: int) -> bool:
        """Say whether everything on a stream is over. Not beside a capture, except from a relaxed thread."""
        return self._is_ready("cuStreamQuery", self._bindings.cuStreamQuery, stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Let what is queued on a stream from now on begin after the point that the event marks by now."""
        self._stream_wait_event(stream, event, 0)

    def stream_write_value64(self, stream: int, address: int, value: int) -> None:
        """Queue storing 8 bytes, after all before it is visible to host and device. For GPUs with the attribute."""
        self._stream_write_value(stream, address, value, 0)

    def stream_is_capturing(self, stream: int) -> bool:
        """Say whether what is queued now would become part of a graph, or break one (the legacy stream can)."""
        try:
            return int(self._is_capturing(stream)) != 0
        except CudaError as error:
            if error.code == CAPTURE_IMPLICIT:
                return True
            raise

    # Events

    def event_create(self, timing: bool = False) -> int:
        """Return a new event, by default one that keeps no time, which is cheaper to record. *Current*."""
        return int(self._call("cuEventCreate", 0 if timing else _EVENT_DISABLE_TIMING))

    def event_destroy(self, event: int) -> None:
        """Give an event back; who waits for it still does. Returns at once, also if it is never reached (measured)."""
        self._call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        """Mark the present end of a stream, in place of what the event marked before."""
        self._event_record(event, stream)

    def event_query(self, event: int) -> bool:
        """Say whether the point is reached. Not beside a capture, except from a relaxed thread."""
        return self._is_ready("cuEventQuery", self._event_query, event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Return the time between two events that were created with timing and are both reached."""
        return float(self._call("cuEventElapsedTime", start, end))

    # Kernels

    def module_load(self, cubin: bytes) -> int:
        """Load compiled code; the bytes are not needed afterwards. *Current*. *May block*."""
        return int(self._call_unless_broken("cuModuleLoadData", cubin))

    def module_unload(self, module: int) -> None:
        """Unload code; nothing of it may run any more. *Current*. *May block*."""
        self._call_unless_broken("cuModuleUnload", module)

    def module_function(self, module: int, name: str) -> int:
        """Return a kernel, ready to run: nothing is left to load at its first launch. *Current*. *May block*."""
        function = self._call_unless_broken("cuModuleGetFunction", module, name.encode())
        # Loading is lazy by default, and a first launch that loads may wait for whatever runs on the device.
        try:
            self._call("cuFuncLoad", function)
        except CudaError:
            raise
        except (AttributeError, DeviceError):
            pass  # a driver before CUDA 12.4: the first launch loads
        return int(function)

    def function_allow_shared(self, function: int, nbytes: int) -> None:
        """Let a kernel be launched with more shared memory than 48 KiB; the device's attribute says how much."""
        attribute = self._bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, nbytes)

    def launch(
        self, function: int, grid: int, block: int, shared_nbytes: int, stream: int, parameters_address: int
    ) -> None:
        """Queue a kernel of `grid` thread blocks of `block` threads.

        `parameters_address` is where the array of pointers to the parameters lies (``void**``), prepared by the caller;
        the parameters are copied before this returns. Blocks while a stream has too much queued (about 1,000 launches).
        """
        self._launch_kernel(function, grid, 1, 1, block, 1, 1, shared_nbytes, stream, parameters_address, 0)

    # Memory

    def memory_alloc(self, nbytes: int) -> int:
        """Return the address of new memory on the device. *Current*. *May block*."""
        return int(self._call_unless_broken("cuMemAlloc", nbytes))

    def memory_free(self, address: int) -> None:
        """Give it back. *Current*. *May block*: until all that runs on the device has ended (measured)."""
        self._call_unless_broken("cuMemFree", address)

    def host_alloc(self, nbytes: int) -> int:
        """Return the address of new page-locked host memory, which all devices reach. *Current*. *May block*."""
        return int(self._call_unless_broken("cuMemHostAlloc", nbytes, _HOST_ALLOC_PORTABLE_DEVICEMAP))

    def host_free(self, address: int) -> None:
        """Give it back. *Current*. *May block*: until all that runs on the device has ended (measured)."""
        self._call_unless_broken("cuMemFreeHost", address)

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        """Page-lock mapped memory for all devices; `read_only` if that is how it is mapped. *Current*. *May block*."""
        flags = _HOST_REGISTER_PORTABLE_DEVICEMAP | (_HOST_REGISTER_READ_ONLY if read_only else 0)
        self._call_unless_broken("cuMemHostRegister", address, nbytes, flags)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`. *Current*. *May block*: until all that runs on the device has ended (measured)."""
        self._call_unless_broken("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        """Return where the device sees page-locked host memory. *Current*."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def pointer_device(self, address: int) -> int | None:
        """Return the number of the GPU that an address belongs to; None if CUDA does not know the address."""
        ordinal = self._pointer_attribute(_POINTER_DEVICE_ORDINAL, address)
        return None if ordinal is None or ordinal < 0 else ordinal

    def pointer_is_device(self, address: int) -> bool:
        """Say whether an address lies in memory of a GPU."""
        return self._pointer_attribute(_POINTER_MEMORY_TYPE, address) == _MEMORY_TYPE_DEVICE

    # Copies

    def copy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Queue one copy between page-locked or device memory on both sides. *Current*."""
        self._memcpy_async(destination, source, nbytes, stream)

    def copy_batch_async(
        self, destinations: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64], stream: int
    ) -> None:
        """Queue many copies in one call, in any order among themselves: arrays int64 ``[n]``, contiguous, n >= 1.

        Not on a default stream. After an error some of the copies may run. *Current*. Takes ms for 1,000s of copies.
        """
        if self._copy_batch is None:
            raise CudaError("cuMemcpyBatchAsync", NOT_SUPPORTED, remedy="needs a driver of CUDA 13.0 or later")
        code = self._copy_batch(
            destinations.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._batch_attributes),
            ctypes.addressof(self._batch_attribute_indices),
            1,
            stream,
        )
        if code:
            raise self._error("cuMemcpyBatchAsync", code)

    def memset_async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Queue filling memory with one byte value. *Current*."""
        self._call("cuMemsetD8Async", address, value, nbytes, stream)

    def _pointer_attribute(self, attribute: int, address: int) -> int | None:
        value = ctypes.c_int(-1)
        code = self._pointer_get_attribute(ctypes.byref(value), attribute, address)
        if not code:
            return value.value
        if code == INVALID_VALUE:
            return None
        raise self._error("cuPointerGetAttribute", code)


def _import_bindings() -> Any:
    try:
        import cuda.bindings.driver as bindings  # noqa: PLC0415 - nobody without a GPU has to have them
    except ImportError as error:
        raise MissingDependencyError(
            'a CUDA device needs the CUDA bindings for Python: pip install "kvmoor[cuda]"'
        ) from error
    return bindings


def _initialize(bindings: Any) -> None:
    try:
        (result,) = bindings.cuInit(0)
    except Exception as error:  # what is raised here differs from version to version
        raise DeviceError(
            f"the library of the NVIDIA driver, libcuda.so.1, cannot be used ({error}): install the driver, and in a "
            "container start it with access to the GPU"
        ) from error
    if result:
        raise CudaError("cuInit", int(result), getattr(result, "name", ""))


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace")
