"""The driver as plain functions: what each method calls, how errors come back, and that its fake has the same shape."""

import ctypes
import importlib.util
import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

from fake_cuda import FakeDriver
from fake_cuda_rules import REFUSED_ONCE_BROKEN
from kvmoor.devices.cuda import cuda_error
from kvmoor.devices.cuda import driver as driver_module
from kvmoor.devices.cuda.cuda_error import STICKY_CODES
from kvmoor.devices.cuda.driver import CudaError, Driver
from kvmoor.errors import DeviceError, MissingDependencyError
from scripted_bindings import (
    CUdevice_attribute,
    CUfunction_attribute,
    CUresult,
    CUstreamCaptureMode,
    ScriptedBindings,
)

HANDLE, OTHER, BIG = 0x7FFF_1234_5678, 0x7FFF_0000_0008, 2**33
ARRAYS = np.array([1, 2**60]), np.array([3, 4]), np.array([5, BIG])
RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

# Method, its arguments, the calls of the driver that it makes, and what it returns.
METHODS = {
    "driver_version": ((), [("cuDriverGetVersion",)], 13000),
    "device_count": ((), [("cuDeviceGetCount",)], 2),
    "device_get": ((1,), [("cuDeviceGet", 1)], 1),
    "device_name": ((1,), [("cuDeviceGetName", 256, 1)], "Scripted GPU"),
    "device_attribute": (
        (1, "HOST_NUMA_ID"),
        [("cuDeviceGetAttribute", CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 1)],
        7,
    ),
    "device_uuid": ((1,), [("cuDeviceGetUuid", 1)], "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedeeef"),
    "pci_bus_id": ((1,), [("cuDeviceGetPCIBusId", 32, 1)], "0000:1b:00.0"),
    "context_current": ((), [("cuCtxGetCurrent",)], 0xABC),
    "context_push": ((HANDLE,), [("cuCtxPushCurrent", HANDLE)], None),
    "context_pop": ((), [("cuCtxPopCurrent",)], None),
    "context_set": ((0,), [("cuCtxSetCurrent", 0)], None),
    "context_device": ((), [("cuCtxGetDevice",)], 1),
    "primary_context_active": ((1,), [("cuDevicePrimaryCtxGetState", 1)], True),
    "primary_context_retain": ((1,), [("cuDevicePrimaryCtxRetain", 1)], 0xDEF),
    "primary_context_release": ((1,), [("cuDevicePrimaryCtxRelease", 1)], None),
    "exchange_capture_mode": (("relaxed",), [("cuThreadExchangeStreamCaptureMode", RELAXED)], "global"),
    "stream_create": ((-1,), [("cuStreamCreateWithPriority", 1, -1)], 0x111),
    "stream_destroy": ((HANDLE,), [("cuStreamDestroy", HANDLE)], None),
    "stream_query": ((HANDLE,), [("cuStreamQuery", HANDLE)], True),
    "stream_wait_event": ((HANDLE, OTHER), [("cuStreamWaitEvent", HANDLE, OTHER, 0)], None),
    "stream_write_value64": ((HANDLE, OTHER, BIG), [("cuStreamWriteValue64", HANDLE, OTHER, BIG, 0)], None),
    "stream_is_capturing": ((HANDLE,), [("cuStreamIsCapturing", HANDLE)], False),
    "event_create": ((), [("cuEventCreate", 2)], 0x222),
    "event_destroy": ((HANDLE,), [("cuEventDestroy", HANDLE)], None),
    "event_record": ((HANDLE, 0), [("cuEventRecord", HANDLE, 0)], None),
    "event_query": ((HANDLE,), [("cuEventQuery", HANDLE)], True),
    "event_elapsed_ms": ((HANDLE, OTHER), [("cuEventElapsedTime", HANDLE, OTHER)], 1.5),
    "module_load": ((b"\x7fELF",), [("cuModuleLoadData", b"\x7fELF")], 0x333),
    "module_unload": ((HANDLE,), [("cuModuleUnload", HANDLE)], None),
    "module_function": (
        (HANDLE, "copy"),
        [("cuModuleGetFunction", HANDLE, b"copy"), ("cuFuncLoad", 0x444)],
        0x444,
    ),
    "function_allow_shared": (
        (HANDLE, 132_096),
        [
            (
                "cuFuncSetAttribute",
                HANDLE,
                CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                132_096,
            )
        ],
        None,
    ),
    "launch": (
        (HANDLE, 4, 512, 64, OTHER, 0x999),
        [("cuLaunchKernel", HANDLE, 4, 1, 1, 512, 1, 1, 64, OTHER, 0x999, 0)],
        None,
    ),
    "memory_alloc": ((BIG,), [("cuMemAlloc", BIG)], 0x5000),
    "memory_free": ((HANDLE,), [("cuMemFree", HANDLE)], None),
    "host_alloc": ((BIG,), [("cuMemHostAlloc", BIG, 3)], 0x6000),
    "host_free": ((HANDLE,), [("cuMemFreeHost", HANDLE)], None),
    "host_register": ((HANDLE, BIG, False), [("cuMemHostRegister", HANDLE, BIG, 3)], None),
    "host_unregister": ((HANDLE,), [("cuMemHostUnregister", HANDLE)], None),
    "host_device_pointer": ((HANDLE,), [("cuMemHostGetDevicePointer", HANDLE, 0)], 0x7000),
    "pointer_device": ((HANDLE,), [("cuPointerGetAttribute", 9, HANDLE)], 2),
    "pointer_is_device": ((HANDLE,), [("cuPointerGetAttribute", 2, HANDLE)], True),
    "copy_async": ((HANDLE, OTHER, BIG, 0x111), [("cuMemcpyAsync", HANDLE, OTHER, BIG, 0x111)], None),
    "copy_batch_async": (
        (*ARRAYS, HANDLE),
        [("cuMemcpyBatchAsync", [1, 2**60], [3, 4], [5, BIG], [1, 0, 0, 0, 0, 0], 0, 1, HANDLE)],
        None,
    ),
    "memset_async": ((HANDLE, 255, BIG, OTHER), [("cuMemsetD8Async", HANDLE, 255, BIG, OTHER)], None),
}
every_method = pytest.mark.parametrize("method", METHODS)


def public_names(kind):
    return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


@pytest.fixture
def bindings():
    return ScriptedBindings()


@pytest.fixture
def driver(bindings):
    driver = Driver(bindings)
    bindings.calls.clear()
    return driver


def test_the_table_of_methods_is_whole():
    """Every public method of the driver is in the table that the other tests run over."""
    assert set(METHODS) == public_names(Driver)


@every_method
def test_a_method_makes_its_call_and_returns_plain_values(driver, bindings, method):
    """Arguments reach the driver in its order with the flags we rely on, and results are ints, strings and booleans."""
    arguments, calls, expected = METHODS[method]
    result = getattr(driver, method)(*arguments)
    assert calls == bindings.calls
    assert expected == result
    assert type(expected) is type(result)


def test_the_fake_has_the_same_methods():
    """Whoever calls the driver can call the fake: names, order and defaults of all parameters are the same."""

    def shapes(kind):
        signatures = {method: inspect.signature(getattr(kind, method)) for method in METHODS}
        return {
            method: [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]
            for method, signature in signatures.items()
        }

    assert shapes(Driver) == shapes(FakeDriver)


def test_the_fake_has_the_same_attributes(driver):
    """What can be read off the driver can be read off the fake, and nothing else is public on the driver."""
    attributes = {name for name in vars(driver) if not name.startswith("_")}
    assert {"broken", "copy_batch_available"} == attributes
    assert attributes <= set(vars(FakeDriver()))


def test_flags_are_what_the_options_say(driver, bindings):
    """A timed event keeps time, and memory that is mapped for reading is registered for reading."""
    driver.event_create(timing=True)
    driver.host_register(HANDLE, 4096, True)
    driver.stream_create()
    assert [
        ("cuEventCreate", 0),
        ("cuMemHostRegister", HANDLE, 4096, 3 | 8),
        ("cuStreamCreateWithPriority", 1, 0),
    ] == bindings.calls


@every_method
def test_a_refusal_is_a_cuda_error(driver, bindings, method):
    """Whichever call fails, the error names it, the driver's code and name, and what to do; nothing is broken by it."""
    arguments, calls, _ = METHODS[method]
    call = calls[-1][0]
    bindings.codes[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match=rf"{call}: CUDA_ERROR_OUT_OF_MEMORY \(2\): free GPU memory") as caught:
        getattr(driver, method)(*arguments)
    error = caught.value
    assert (call, 2, "CUDA_ERROR_OUT_OF_MEMORY", False) == (error.call, error.code, error.name, error.is_sticky)
    assert error.remedy
    assert "" == driver.broken


@every_method
def test_a_fault_of_the_device_is_remembered(driver, bindings, method):
    """Whichever call brings the news of a fault, the driver is broken from then on, with the first fault as reason."""
    arguments, calls, _ = METHODS[method]
    bindings.codes[calls[-1][0]] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(CudaError, match="restart the process") as caught:
        getattr(driver, method)(*arguments)
    assert caught.value.is_sticky
    assert str(caught.value) == driver.broken
    bindings.codes["cuMemsetD8Async"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError):
        driver.memset_async(HANDLE, 0, 8, OTHER)
    assert str(caught.value) == driver.broken or "memset_async" == method


@pytest.mark.parametrize("code", sorted(STICKY_CODES))
def test_every_sticky_code_breaks_the_driver(driver, bindings, code):
    """All errors after which nothing can succeed are taken as such, also where the bindings do not name them."""
    bindings.codes["cuMemcpyAsync"] = code
    with pytest.raises(CudaError) as caught:
        driver.copy_async(1, 2, 3, 4)
    assert code == caught.value.code
    assert "unknown" not in caught.value.name
    assert driver.broken


@every_method
def test_once_broken_nothing_that_may_block_is_called(driver, bindings, method):
    """After a fault exactly the calls that may block are refused, with the fault as reason.

    The others still go through, and the fake does the same.
    """
    arguments, calls, _ = METHODS[method]
    driver.broken = "a kernel faulted"
    if method not in REFUSED_ONCE_BROKEN:
        getattr(driver, method)(*arguments)
        assert calls == bindings.calls
        return
    with pytest.raises(DeviceError, match="is not called any more, since it could block: a kernel faulted"):
        getattr(driver, method)(*arguments)
    assert [] == bindings.calls
    fake = FakeDriver()
    fake.broken = "a kernel faulted"
    with pytest.raises(DeviceError, match="is not called any more, since it could block: a kernel faulted"):
        getattr(fake, method)(*arguments)


@pytest.mark.parametrize(
    ("method", "call"), [("event_query", "cuEventQuery"), ("stream_query", "cuStreamQuery")], ids=["event", "stream"]
)
def test_not_ready_is_an_answer(driver, bindings, method, call):
    """A query of something unfinished says False and breaks nothing."""
    bindings.codes[call] = CUresult.CUDA_ERROR_NOT_READY
    assert getattr(driver, method)(HANDLE) is False
    assert "" == driver.broken


def test_a_capture_elsewhere_counts_for_the_legacy_stream(driver, bindings):
    """Asking the legacy stream while a stream that synchronises with it captures is answered yes, not with an error."""
    bindings.codes["cuStreamIsCapturing"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert driver.stream_is_capturing(0)
    bindings.codes.clear()
    bindings.values["cuStreamIsCapturing"] = (2,)  # a capture that was lost and not ended yet
    assert driver.stream_is_capturing(0)


def test_memory_that_cuda_does_not_know_belongs_to_no_gpu(driver, bindings):
    """Plain host memory is an answer, not an error: it is on no GPU."""
    bindings.codes["cuPointerGetAttribute"] = 1
    assert driver.pointer_device(HANDLE) is None
    assert not driver.pointer_is_device(HANDLE)
    bindings.codes.clear()
    bindings.pointer_attribute = -2  # what newer drivers say instead
    assert driver.pointer_device(HANDLE) is None
    bindings.pointer_attribute = 1  # host memory that was page-locked
    assert not driver.pointer_is_device(HANDLE)


@pytest.mark.parametrize("method", ["event_query", "stream_query", "host_register", "context_current", "launch"])
def test_an_error_that_the_bindings_do_not_know_is_a_device_error(driver, bindings, method):
    """A driver that is newer than the bindings can fail in ways for which they raise instead of returning."""
    arguments, calls, _ = METHODS[method]
    bindings.codes[calls[0][0]] = ValueError("955 is not a valid CUresult")
    with pytest.raises(DeviceError, match=r"955 is not a valid CUresult.*update cuda-bindings"):
        getattr(driver, method)(*arguments)


def test_a_function_that_the_driver_lacks_is_a_device_error(driver, bindings):
    """The bindings raise when they cannot find a function; that names the function and what to do."""
    bindings.codes["cuMemsetD8Async"] = RuntimeError('Function "cuMemsetD8Async" not found')
    with pytest.raises(DeviceError, match="cuMemsetD8Async: update the NVIDIA driver"):
        driver.memset_async(HANDLE, 0, 8, OTHER)


def test_kernels_of_old_drivers_load_at_their_first_launch(driver, bindings):
    """Before CUDA 12.4 a kernel cannot be asked to load; that is no reason to fail."""
    bindings.codes["cuFuncLoad"] = RuntimeError('Function "cuFuncLoad" not found')
    assert 0x444 == driver.module_function(HANDLE, "copy")
    bindings.codes["cuFuncLoad"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match="cuFuncLoad"):
        driver.module_function(HANDLE, "copy")


def test_drivers_before_cuda_13_have_no_batch_copy():
    """Whether there is a batch call is known beforehand, and calling it all the same says what it takes."""
    driver = Driver(ScriptedBindings(version=12090))
    assert not driver.copy_batch_available
    with pytest.raises(CudaError, match=r"CUDA 13\.0 or later") as caught:
        driver.copy_batch_async(*ARRAYS, HANDLE)
    assert 801 == caught.value.code
    assert Driver(ScriptedBindings()).copy_batch_available


def test_without_the_bindings_the_error_names_the_extra(monkeypatch):
    """Who has not installed the CUDA extra learns its name."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependencyError, match=r"kvmoor\[cuda\]"):
        Driver()


@pytest.mark.parametrize("failure", [RuntimeError("libcuda not found"), OSError("no such file")], ids=repr)
def test_without_a_driver_the_error_names_its_library(bindings, failure):
    """Without an NVIDIA driver the error says what is missing and what to do, whatever the bindings raise."""
    bindings.codes["cuInit"] = failure
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1.*install the driver") as caught:
        Driver(bindings)
    assert failure is caught.value.__cause__


def test_a_machine_without_a_gpu_says_so(bindings):
    """A driver that finds no GPU is an error with a remedy, not a device."""
    bindings.codes["cuInit"] = 100
    with pytest.raises(CudaError, match=r"CUDA_ERROR_NO_DEVICE \(100\): no GPU is visible"):
        Driver(bindings)


def test_importing_the_modules_loads_no_bindings():
    """The modules of the CUDA device can be imported, read and tested where no CUDA package is."""
    modules = "driver", "driver_calls", "context", "streams", "registrar", "cuda_error", "entry_points"
    code = "".join(f"import kvmoor.devices.cuda.{name}\n" for name in modules)
    code += "import sys; print([name for name in sys.modules if name.split('.')[0] in {'cuda', 'torch'}])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (0, "[]\n") == (run.returncode, run.stdout), run.stderr


# Against the real bindings, which can be imported without a driver.


@pytest.fixture
def real():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    return pytest.importorskip("cuda.bindings.driver")


def test_the_real_bindings_have_every_function_with_as_many_parameters(real):
    """What the methods call exists, and takes as many arguments as it gets."""
    for method, (_, calls, _) in METHODS.items():
        for name, *arguments in calls:
            if name in {"cuMemcpyBatchAsync", "cuPointerGetAttribute"}:
                continue  # called past the bindings
            signature = getattr(real, name).__doc__.strip().split("\n")[0]
            parameters = re.fullmatch(rf"{name}\((.*)\)", signature).group(1)
            count = len(parameters.split(",")) if parameters else 0
            assert count == len(arguments), (method, signature)
    assert callable(real.cuInit)
    assert "cuGetProcAddress(char *symbol, int cudaVersion, flags)" in real.cuGetProcAddress.__doc__


def test_the_real_bindings_have_the_same_numbers(real):
    """Flags and modes that are written as numbers, or stood in for, are the driver's."""
    assert driver_module._STREAM_NON_BLOCKING == real.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert driver_module._EVENT_DISABLE_TIMING == real.CUevent_flags.CU_EVENT_DISABLE_TIMING
    assert driver_module._HOST_ALLOC_PORTABLE_DEVICEMAP == (
        real.CU_MEMHOSTALLOC_PORTABLE | real.CU_MEMHOSTALLOC_DEVICEMAP
    )
    assert driver_module._HOST_REGISTER_PORTABLE_DEVICEMAP == (
        real.CU_MEMHOSTREGISTER_PORTABLE | real.CU_MEMHOSTREGISTER_DEVICEMAP
    )
    assert driver_module._HOST_REGISTER_READ_ONLY == real.CU_MEMHOSTREGISTER_READ_ONLY
    assert driver_module._MEMORY_TYPE_DEVICE == real.CUmemorytype.CU_MEMORYTYPE_DEVICE
    attributes = real.CUpointer_attribute
    assert driver_module._POINTER_MEMORY_TYPE == attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert driver_module._POINTER_DEVICE_ORDINAL == attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    in_order = real.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert driver_module._SOURCE_READ_IN_STREAM_ORDER == in_order
    for ours in CUstreamCaptureMode:
        assert ours == getattr(real.CUstreamCaptureMode, ours.name)
    for ours in CUdevice_attribute:
        assert ours == getattr(real.CUdevice_attribute, ours.name)
    for ours in CUfunction_attribute:
        assert ours == getattr(real.CUfunction_attribute, ours.name)


def test_the_batch_attributes_have_the_layout_of_the_bindings(real):
    """The struct that is written by hand holds what the bindings write, and leaves room for all of theirs."""
    theirs = real.CUmemcpyAttributes()
    theirs.srcAccessOrder = real.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    theirs.flags = 0xFFFF
    words = (ctypes.c_uint32 * 8).from_address(theirs.getPtr())[:]
    assert driver_module._SOURCE_READ_IN_STREAM_ORDER == words[0]
    assert 0xFFFF in words[1:8]  # the last field: so the struct ends within the room that ours has


def test_names_and_stickiness_are_the_drivers(real):
    """Every code that kvmoor names has the driver's name; what NVIDIA documents as leaving no way on is sticky."""
    for code, (name, _) in cuda_error._KNOWN.items():
        assert name == real.CUresult(code).name
    for result in real.CUresult:
        text = " ".join((getattr(result, "__doc__", "") or "").split())
        if "any further CUDA work will return the same error" in text:
            assert result.value in STICKY_CODES, result


def test_a_real_machine_without_a_driver_gets_a_device_error(real):
    """The bindings raise something of their own there; it comes out as ours, with what to do."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver")
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1.*install the driver"):
        Driver()
