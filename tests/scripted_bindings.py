"""Stands in for `cuda.bindings.driver`: notes every call and returns what a test says, in the form of the bindings."""

import ctypes
from enum import IntEnum


class CUresult(IntEnum):
    """A few results, with the driver's names."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


class CUstreamCaptureMode(IntEnum):
    """As in cuda.h."""

    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUdevice_attribute(IntEnum):  # noqa: N801 - the driver's name
    """One of them, as in cuda.h."""

    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134


class CUfunction_attribute(IntEnum):  # noqa: N801 - the driver's name
    """One of them, as in cuda.h."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class _Uuid:
    bytes = bytes(range(0xE0, 0xF0))


VALUES = {
    "cuDriverGetVersion": (13000,),
    "cuDeviceGetCount": (2,),
    "cuDeviceGet": (1,),
    "cuDeviceGetName": (b"Scripted GPU" + bytes(20),),
    "cuDeviceGetAttribute": (7,),
    "cuDeviceGetUuid": (_Uuid(),),
    "cuDeviceGetPCIBusId": (b"0000:1B:00.0" + bytes(20),),
    "cuCtxGetCurrent": (0xABC,),
    "cuCtxPopCurrent": (0xABC,),
    "cuCtxGetDevice": (1,),
    "cuDevicePrimaryCtxGetState": (4, 1),
    "cuDevicePrimaryCtxRetain": (0xDEF,),
    "cuThreadExchangeStreamCaptureMode": (CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,),
    "cuStreamCreateWithPriority": (0x111,),
    "cuStreamIsCapturing": (0,),
    "cuEventCreate": (0x222,),
    "cuEventElapsedTime": (1.5,),
    "cuModuleLoadData": (0x333,),
    "cuModuleGetFunction": (0x444,),
    "cuMemAlloc": (0x5000,),
    "cuMemHostAlloc": (0x6000,),
    "cuMemHostGetDevicePointer": (0x7000,),
}
"""What each function returns beside its result; a function that is not here returns nothing else."""

_BATCH_TYPES = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]


class ScriptedBindings:
    """Have every function of the driver that is asked for.

    `codes` maps the name of a function to the result it returns, or to an exception that it raises. `calls` lists
    name and arguments of each call; arrays of a batch copy are noted as lists.
    """

    CUstreamCaptureMode = CUstreamCaptureMode
    CUdevice_attribute = CUdevice_attribute
    CUfunction_attribute = CUfunction_attribute

    def __init__(self, version=13000):
        self.calls = []
        self.codes = {}
        self.values = dict(VALUES)
        self.pointer_attribute = 2
        self._version = version
        self._batch = ctypes.CFUNCTYPE(ctypes.c_int, *_BATCH_TYPES)(self._copy_batch)
        pointer_types = ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_uint64
        self._pointer = ctypes.CFUNCTYPE(ctypes.c_int, *pointer_types)(self._pointer_get_attribute)

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def cuGetProcAddress(self, symbol, version, flags):  # noqa: N802 - the driver's name
        entry_points = {b"cuMemcpyBatchAsync": (13000, self._batch), b"cuPointerGetAttribute": (4000, self._pointer)}
        since, function = entry_points[symbol]
        if version > self._version or since > version:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return CUresult.CUDA_SUCCESS, ctypes.cast(function, ctypes.c_void_p).value, 0

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        code = self.codes.get(name, CUresult.CUDA_SUCCESS)
        if isinstance(code, Exception):
            raise code
        return code, *self.values.get(name, ())

    def _copy_batch(self, destinations, sources, sizes, count, attributes, indices, num_attributes, stream):
        arrays = [(ctypes.c_int64 * count).from_address(address)[:] for address in (destinations, sources, sizes)]
        words = (ctypes.c_uint32 * 6).from_address(attributes)[:]
        index = ctypes.c_size_t.from_address(indices).value
        self.calls.append(("cuMemcpyBatchAsync", *arrays, words, index, num_attributes, stream))
        return self.codes.get("cuMemcpyBatchAsync", 0)

    def _pointer_get_attribute(self, value, attribute, address):
        self.calls.append(("cuPointerGetAttribute", attribute, address))
        value[0] = self.pointer_attribute
        return self.codes.get("cuPointerGetAttribute", 0)
