"""Two functions of the CUDA driver that are called past the bindings, where those are slow or wrong.

They return the driver's error code and let go of the interpreter lock, as the bindings do.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

from kvmoor.errors import DeviceError

_BATCH_COPY_SINCE: Final = 13000
"""CUDA 13.0. Before that the call took one more argument, under the same name; older drivers say that there is none."""
_POINTER_ATTRIBUTE_SINCE: Final = 4000

_POINTER: Final = ctypes.c_void_p
_SIZE: Final = ctypes.c_size_t


def find_batch_copy(bindings: Any) -> Callable[..., int] | None:
    """Return `cuMemcpyBatchAsync`, None if the driver has none.

    The bindings want a Python object for every address: 40 ms for 256 Ki copies, before the call begins (measured).
    """
    return _find(
        bindings,
        "cuMemcpyBatchAsync",
        _BATCH_COPY_SINCE,
        *(_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER),
    )


def find_pointer_attribute(bindings: Any) -> Callable[..., int]:
    """Return `cuPointerGetAttribute`: bindings of CUDA 13.3 say of every pointer that it is on GPU 0.

    cuda-python issue 2928; those of 13.5 are right.
    """
    name = "cuPointerGetAttribute"
    function = _find(bindings, name, _POINTER_ATTRIBUTE_SINCE, _POINTER, ctypes.c_int, ctypes.c_uint64)
    if function is None:
        raise DeviceError(f"the CUDA driver does not offer {name}: update the NVIDIA driver")
    return function


def _find(bindings: Any, name: str, since: int, *argument_types: Any) -> Callable[..., int] | None:
    """Return a function in the form that it has since a version of CUDA."""
    result, address, *_ = bindings.cuGetProcAddress(name.encode(), since, 0)
    if result or not address:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(address))
