"""Where a tensor lies in memory, read from its DLPack capsule without copying and without importing its library.

The structures are those of DLPack 0.8 (dlpack.h: DLTensor, DLDevice, DLDataType), which every producer still offers
when no version is asked for. NumPy's own reader is not used because it refuses bfloat16 and float8.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from kvmoor.errors import LayoutError

_CPU_DEVICES: Final = frozenset({1, 3})  # kDLCPU, kDLCUDAHost
_TYPE_NAMES: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where one tensor lies: `address` of its first element, `strides` in bytes, `dtype` such as ``"bfloat16"``."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_nbytes: int
    dtype: str
    on_cpu: bool


def read_tensor(tensor: Any) -> TensorView:
    """Read where `tensor` lies; raises `LayoutError` for what has no usable ``__dlpack__``.

    The caller keeps the tensor alive for as long as the address is used.
    """
    export = getattr(tensor, "__dlpack__", None)
    device = getattr(tensor, "__dlpack_device__", None)
    if export is None or device is None:
        raise LayoutError(
            f"expected a tensor with __dlpack__, found {type(tensor).__name__}: pass torch or numpy tensors"
        )
    on_cpu = int(device()[0]) in _CPU_DEVICES
    try:
        # stream=-1 asks a GPU producer not to wait for anything: only the address is wanted.
        capsule = export() if on_cpu else export(stream=-1)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise LayoutError(
            f"the tensor cannot be exported through DLPack ({error}): detach it, or view it as uint8"
        ) from error
    view = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    bits = view.type_bits * view.type_lanes
    if bits % 8:
        raise LayoutError(f"the tensor's elements have {bits} bits: view it as uint8")
    item_nbytes = bits // 8
    shape = tuple(view.shape[i] for i in range(view.ndim))
    if view.strides:
        strides = tuple(view.strides[i] * item_nbytes for i in range(view.ndim))
    else:
        strides = _packed_strides(shape, item_nbytes)
    name = _TYPE_NAMES.get(view.type_code, f"dlpack{view.type_code}_")
    return TensorView(
        address=(view.data or 0) + view.byte_offset,
        shape=shape,
        strides=strides,
        item_nbytes=item_nbytes,
        dtype=f"{name}{view.type_bits}" + (f"x{view.type_lanes}" if view.type_lanes != 1 else ""),
        on_cpu=on_cpu,
    )


def _packed_strides(shape: tuple[int, ...], item_nbytes: int) -> tuple[int, ...]:
    strides = []
    step = item_nbytes
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
