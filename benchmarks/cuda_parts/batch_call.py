"""A yardstick: the driver's batch copy call with one entry a page, as engines use it for their blocks."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvmoor.devices.device import Direction

_SOURCE_IN_STREAM_ORDER = 1
_SOURCE_AT_ANY_TIME = 3
"""For loads: nothing writes the slot meanwhile, and the driver may begin at once. (CUmemcpySrcAccessOrder, cuda.h.)"""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCall:
    """`cuMemcpyBatchAsync` of CUDA 13, called without any cost for Python objects."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._call.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
        self._first = (size * 1)(0)

    def copy(
        self,
        pages: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        direction: Direction,
        stream: int,
    ) -> None:
        """Queue copies: destinations, sources and sizes."""
        destinations, sources, sizes = pages
        is_load = direction is Direction.HOST_TO_DEVICE
        attributes = _Attributes(_SOURCE_AT_ANY_TIME if is_load else _SOURCE_IN_STREAM_ORDER)
        code = self._call(
            destinations.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(self._first),
            1,
            stream,
        )
        if code:
            raise SystemExit(f"cuMemcpyBatchAsync_v2 returned {code}")
