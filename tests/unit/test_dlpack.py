"""Where a tensor lies is read from what its library exports, or refused."""

import ctypes
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmoor.dlpack import read_tensor
from kvmoor.errors import LayoutError


def facts(array: NDArray[np.generic]) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return array.ctypes.data, array.shape, array.strides, array.itemsize


ARRAY = np.arange(2 * 3 * 5 * 7, dtype=np.int32).reshape(2, 3, 5, 7)


@pytest.mark.parametrize(
    "array",
    [
        ARRAY,
        ARRAY[1:, :2],
        ARRAY[:, ::2],
        ARRAY[:, ::-1],
        ARRAY.transpose(3, 1, 0, 2),
        ARRAY[0, 0, 0, 3:],
        ARRAY.astype(np.float16),
        ARRAY.astype(np.complex128),
        ARRAY.view(np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}{array.strides}",
)
def test_address_shape_and_strides_are_read(array: NDArray[np.generic]) -> None:
    """Views, steps and transpositions are reported as numpy sees them, in bytes."""
    view = read_tensor(array)

    assert facts(array) == (view.address, view.shape, view.strides, view.item_nbytes)
    assert view.on_cpu


@pytest.mark.parametrize("name", ["int8", "int64", "uint8", "uint32", "float16", "float32", "float64", "complex64"])
def test_the_dtype_is_named(name: str) -> None:
    """The name of the element type is numpy's, but for complex numbers, where it counts the bits as DLPack does."""
    assert name == read_tensor(np.zeros(2, name)).dtype


def test_a_bool_has_a_byte() -> None:
    """Booleans are bytes."""
    view = read_tensor(np.zeros(2, bool))

    assert ("bool8", 1) == (view.dtype, view.item_nbytes)


def test_a_number_has_no_axes() -> None:
    """A tensor without axes has an address and nothing to count."""
    view = read_tensor(np.array(5, np.int64))

    assert ((), (), 8) == (view.shape, view.strides, view.item_nbytes)


def test_reading_copies_nothing_and_lets_go() -> None:
    """The address is that of the tensor itself, and the tensor dies when its owner lets it go."""
    array = np.zeros(4, np.uint8)
    view = read_tensor(array)
    array[2] = 7
    assert b"\0\0\7\0" == ctypes.string_at(view.address, 4)

    died = weakref.ref(array)
    del array

    assert died() is None


@pytest.mark.parametrize("thing", [[1, 2], b"bytes", None, memoryview(b"x"), SimpleNamespace(__dlpack__=None)])
def test_what_is_no_tensor_is_refused(thing: object) -> None:
    """Without __dlpack__ and __dlpack_device__ there is nothing to read, and the type is named."""
    with pytest.raises(LayoutError, match=f"found {type(thing).__name__}: pass torch or numpy tensors"):
        read_tensor(thing)


def read_only() -> NDArray[np.int32]:
    array = np.zeros(4, np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [read_only(), np.zeros(4, "S4"), np.zeros(4, ">i4"), np.zeros(4, [("a", "i4"), ("b", "i4")]), np.zeros(2, object)],
    ids=["read-only", "text", "swapped", "record", "object"],
)
def test_what_cannot_be_exported_is_refused(array: NDArray[np.generic]) -> None:
    """A tensor that its library does not export is refused with the library's reason as the cause."""
    with pytest.raises(LayoutError, match="cannot be exported through DLPack") as refused:
        read_tensor(array)

    assert refused.value.__cause__ is not None


class _ManagedTensor(ctypes.Structure):
    """What a producer puts into its capsule (dlpack.h: DLManagedTensor)."""

    _fields_ = (
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
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_CAPSULE_NAME = ctypes.c_char_p(b"dltensor")  # a capsule does not copy its name


class Producer:
    """A tensor of another library: [2, 3] elements, whatever DLPack can say of them."""

    def __init__(
        self,
        *,
        code: int = 2,
        bits: int = 16,
        lanes: int = 1,
        device: int = 1,
        offset: int = 0,
        strides: tuple[int, ...] = (),
    ) -> None:
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.strides = (ctypes.c_int64 * 2)(*strides) if strides else None
        self.streams: list[object] = []
        self.managed = _ManagedTensor(0x10000, device, 0, 2, code, bits, lanes, self.shape, self.strides, offset)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.managed.device_type, 0

    def __dlpack__(self, **options: object) -> object:
        self.streams.append(options.get("stream"))
        return _new_capsule(ctypes.addressof(self.managed), _CAPSULE_NAME, None)


def test_an_offset_is_added_to_the_address() -> None:
    """Where a library says how far behind its buffer the first element is, that is where it is."""
    assert 0x10000 + 640 == read_tensor(Producer(offset=640)).address


def test_missing_strides_mean_that_the_tensor_is_packed() -> None:
    """A producer may leave the strides out; given ones count elements and are reported in bytes."""
    assert (6, 2) == read_tensor(Producer()).strides
    assert (20, 4) == read_tensor(Producer(strides=(10, 2))).strides


@pytest.mark.parametrize(
    ("code", "bits", "lanes", "dtype", "nbytes"),
    [
        (4, 16, 1, "bfloat16", 2),
        (2, 16, 1, "float16", 2),
        (10, 8, 1, "dlpack10_8", 1),  # one of the 8-bit floats
        (0, 32, 4, "int32x4", 16),
        (1, 4, 2, "uint4x2", 1),
    ],
)
def test_types_that_numpy_lacks_are_read(code: int, bits: int, lanes: int, dtype: str, nbytes: int) -> None:
    """Every type of whole bytes has a name that tells it from the others, known or not."""
    view = read_tensor(Producer(code=code, bits=bits, lanes=lanes))

    assert (dtype, nbytes) == (view.dtype, view.item_nbytes)


def test_elements_of_less_than_a_byte_are_refused() -> None:
    """Packed 4-bit elements have no addresses."""
    with pytest.raises(LayoutError, match="elements have 4 bits: view it as uint8"):
        read_tensor(Producer(code=1, bits=4))


@pytest.mark.parametrize(
    ("device", "on_cpu", "stream"), [(1, True, None), (3, True, None), (2, False, -1), (10, False, -1)]
)
def test_a_gpu_is_asked_not_to_wait(device: int, on_cpu: bool, stream: int | None) -> None:
    """Host memory, page-locked or not, is told from a GPU's, and only the address of a GPU tensor is asked for."""
    tensor = Producer(device=device)

    assert on_cpu == read_tensor(tensor).on_cpu
    assert [stream] == tensor.streams
