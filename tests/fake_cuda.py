"""A CUDA driver without a GPU: the methods of `Driver`, over host memory, with the rules and faults of the real one.

    fake = FakeDriver()                       # the calling thread has the context of GPU 0, as an engine's has
    fake.add_kernel("copy", run, 4096)        # run(fake, function, grid, block, parameters: bytes)
    ...                                       # the code under test queues work
    fake.run(stream)                          # what is queued there runs, up to a wait that is not over
    fake.run_all()                            # everything that can run, runs
    with fake.running(): ...                  # a thread runs whatever is queued, as a GPU does
    FakeDriver(auto=True)                     # queued work runs within the call that queues it

    fake.fail("launch", at=2, code=719)       # the third launch of all fails; name None: the third call of all
    fake.hang(stream); fake.release(stream)   # nothing of a stream runs in between
    fake.trap()                               # a kernel faults: everything fails from here on
    with fake.capturing(): ...                # calls that would break a graph capture are violations
    fake.check()                              # nothing was done that must not be, and no call could have blocked

Calls that a real driver would hold up until the GPU is done let queued work run first; if some cannot end, the call is
noted in `blocking_calls` and goes on at once, or blocks until it can end if `blocks_for_real` is set.
"""

import ctypes

import numpy as np

from fake_cuda_gpu import FakeGpu, context_of
from fake_cuda_memory import DeviceFault, Region, bytes_at, is_mapped
from fake_cuda_rules import ANY_SHARED_NBYTES, Capture, FakeCall
from fake_cuda_streams import FakeEvent, FakeStream, Item, Point
from kvmoor.devices.cuda.cuda_error import (
    ALREADY_REGISTERED,
    CAPTURED_EVENT,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_FOUND,
    NOT_READY,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    CudaError,
)

__all__ = ["Capture", "DeviceFault", "FakeCall", "FakeDriver", "bytes_at"]


class FakeDriver(FakeGpu):
    """Stand in for `Driver`. Any thread may call anything; calls and queued work run one at a time.

    `num_devices` GPUs, of which the calling thread uses `engine_on` already (None: none of them).
    """

    def driver_version(self):
        with self._call("driver_version"):
            return 13000

    def device_count(self):
        with self._call("device_count"):
            return self._num_devices

    def device_get(self, ordinal):
        with self._call("device_get", ordinal):
            if not 0 <= ordinal < self._num_devices:
                raise CudaError("device_get", INVALID_DEVICE)
            return ordinal

    def device_name(self, device):
        with self._call("device_name", device):
            return f"Fake GPU {device}"

    def device_attribute(self, device, name):
        with self._call("device_attribute", device, name):
            if name not in self.attributes:
                raise AttributeError(f"tell FakeDriver.attributes about {name}")
            return self.attributes[name]

    def device_uuid(self, device):
        with self._call("device_uuid", device):
            return f"GPU-00000000-0000-0000-0000-{device:012x}"

    def pci_bus_id(self, device):
        with self._call("pci_bus_id", device):
            return f"0000:{0x1B + device:02x}:00.0"

    def context_current(self):
        with self._call("context_current"):
            return self._thread.contexts[-1] if self._thread.contexts else 0

    def context_push(self, context):
        with self._call("context_push", context):
            self._check_context(context)
            self._thread.contexts.append(context)

    def context_pop(self):
        with self._call("context_pop"):
            self._thread.contexts.pop()

    def context_set(self, context):
        with self._call("context_set", context):
            if context:
                self._check_context(context)
            self._thread.contexts[-1:] = [context] if context else []

    def context_device(self):
        with self._call("context_device"):
            return self._ordinal()

    def primary_context_active(self, device):
        with self._call("primary_context_active", device):
            return device in self._primary

    def primary_context_retain(self, device):
        with self._call("primary_context_retain", device):
            self._primary[device] = self._primary.get(device, 0) + 1
            return context_of(device)

    def primary_context_release(self, device):
        with self._call("primary_context_release", device):
            if device not in self._primary:
                raise CudaError("primary_context_release", INVALID_CONTEXT)
            self._primary[device] -= 1
            if not self._primary[device]:
                del self._primary[device]

    def exchange_capture_mode(self, mode):
        with self._call("exchange_capture_mode", mode):
            previous, self._thread.capture_mode = self._thread.capture_mode, mode
            return previous

    def stream_create(self, priority=0):
        with self._call("stream_create", priority):
            handle = next(self._handles)
            self._streams[handle] = FakeStream(handle, self._thread.contexts[-1])
            return handle

    def stream_destroy(self, stream):
        with self._call("stream_destroy", stream):
            destroyed = self._stream(stream)
            if destroyed.is_default:
                raise CudaError("stream_destroy", INVALID_HANDLE)
            del self._streams[stream]
            self._orphans[stream] = destroyed  # what is queued still runs

    def stream_query(self, stream):
        with self._call("stream_query", stream):
            return not self._stream(stream).is_busy

    def stream_wait_event(self, stream, event):
        with self._call("stream_wait_event", stream, event):
            point = self._event(event).point
            if point is not None and point.is_captured:
                self._violate("a stream was made to wait for an event of a capture, which draws it into the graph")
            if point is not None:
                self._put(self._stream(stream), Item("wait", waits_for=point))

    def stream_write_value64(self, stream, address, value):
        with self._call("stream_write_value64", stream, address, value):
            if address % 8 or not self.attributes["CAN_USE_64_BIT_STREAM_MEM_OPS"]:
                raise CudaError("stream_write_value64", NOT_SUPPORTED)
            self._check_access(address, 8, write=True)

            def write():
                self.memory.touch(address, 8, write=True)
                ctypes.c_uint64.from_address(address).value = value

            self._put_own(stream, Item("write value", write))

    def stream_is_capturing(self, stream):
        with self._call("stream_is_capturing", stream):
            return self._stream(stream).is_capturing

    def event_create(self, timing=False):
        with self._call("event_create", timing):
            handle = next(self._handles)
            self._events[handle] = FakeEvent(timing, self._thread.contexts[-1])
            return handle

    def event_destroy(self, event):
        with self._call("event_destroy", event):
            self._event(event)
            del self._events[event]

    def event_record(self, event, stream):
        with self._call("event_record", event, stream):
            recorded, onto = self._event(event), self._stream(stream)
            if recorded.context != (self._thread.contexts[-1] if onto.is_default else onto.context):
                self._violate("an event was recorded on a stream of another context")
                raise CudaError("event_record", INVALID_HANDLE)
            recorded.point = point = Point(is_captured=onto.is_capturing)
            if onto.is_capturing:
                self._violate("an event was recorded into a capture, which makes it part of the graph")
                return

            def reach():
                point.is_reached = True
                point.reached_at_ms = self._clock_ms

            self._put(onto, Item("record", reach))

    def event_query(self, event):
        with self._call("event_query", event):
            point = self._event(event).point
            if point is not None and point.is_captured:
                raise CudaError("event_query", CAPTURED_EVENT)
            return point is None or point.is_reached

    def event_elapsed_ms(self, start, end):
        with self._call("event_elapsed_ms", start, end):
            events = self._event(start), self._event(end)
            if any(not event.keeps_time or event.point is None for event in events):
                raise CudaError("event_elapsed_ms", INVALID_HANDLE)
            if not all(event.point.is_reached for event in events):
                raise CudaError("event_elapsed_ms", NOT_READY)
            return events[1].point.reached_at_ms - events[0].point.reached_at_ms

    def module_load(self, cubin):
        with self._call("module_load", cubin):
            handle = next(self._handles)
            self._modules[handle] = bytes(cubin)
            return handle

    def module_unload(self, module):
        with self._call("module_unload", module):
            if self._modules.pop(module, None) is None:
                raise CudaError("module_unload", INVALID_HANDLE)

    def module_function(self, module, name):
        with self._call("module_function", module, name):
            if module not in self._modules:
                raise CudaError("module_function", INVALID_HANDLE)
            if name not in self._kernels:
                raise CudaError("module_function", NOT_FOUND)
            handle = next(self._handles)
            self._functions[handle] = module, name
            return handle

    def function_allow_shared(self, function, nbytes):
        with self._call("function_allow_shared", function, nbytes):
            if function not in self._functions:
                raise CudaError("function_allow_shared", INVALID_HANDLE)
            if nbytes > self.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"]:
                raise CudaError("function_allow_shared", INVALID_VALUE)
            self._shared_nbytes[function] = nbytes

    def launch(self, function, grid, block, shared_nbytes, stream, parameters_address):
        with self._call("launch", function, grid, block, shared_nbytes, stream, parameters_address):
            module, name = self._functions.get(function, (0, ""))
            if module not in self._modules:
                raise CudaError("launch", INVALID_HANDLE)
            if (
                not 1 <= block <= 1024
                or grid < 1
                or shared_nbytes > self._shared_nbytes.get(function, ANY_SHARED_NBYTES)
            ):
                raise CudaError("launch", INVALID_VALUE)
            run, sizes = self._kernels[name]
            pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters_address)
            # Copied now, as the driver does: what the caller does to its buffer afterwards must not matter.
            parameters = b"".join(
                ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)
            )
            self._put_own(stream, Item(f"launch {name}", lambda: run(self, function, grid, block, parameters)))

    def memory_alloc(self, nbytes):
        with self._call("memory_alloc", nbytes):
            if nbytes < 1:
                raise CudaError("memory_alloc", INVALID_VALUE)
            return self.memory.allocate("device", nbytes, self._ordinal())

    def memory_free(self, address):
        with self._call("memory_free", address):
            self._remove("device", address, "memory_free", INVALID_VALUE)

    def host_alloc(self, nbytes):
        with self._call("host_alloc", nbytes):
            if nbytes < 1:
                raise CudaError("host_alloc", INVALID_VALUE)
            return self.memory.allocate("host", nbytes, self._ordinal())

    def host_free(self, address):
        with self._call("host_free", address):
            self._remove("host", address, "host_free", INVALID_VALUE)

    def host_register(self, address, nbytes, read_only):
        with self._call("host_register", address, nbytes, read_only):
            if nbytes < 1 or not is_mapped(address, nbytes):
                self._violate(f"{nbytes} bytes at {address:#x} were to be registered and are not mapped")
                raise CudaError("host_register", INVALID_VALUE)
            if self.memory.overlapping(address, nbytes):
                self._violate(f"{nbytes} bytes at {address:#x} were to be registered and partly are so already")
                raise CudaError("host_register", ALREADY_REGISTERED)
            self.memory.add(Region("registered", address, nbytes, self._ordinal(), read_only))

    def host_unregister(self, address):
        with self._call("host_unregister", address):
            self._remove("registered", address, "host_unregister", NOT_REGISTERED)

    def host_device_pointer(self, address):
        with self._call("host_device_pointer", address):
            region = self.memory.find(address)
            if region is None or region.kind not in {"host", "registered"}:
                raise CudaError("host_device_pointer", INVALID_VALUE)
            return address + self.device_pointer_offset

    def pointer_device(self, address):
        with self._call("pointer_device", address):
            region = self.memory.find(address)
            return None if region is None else region.ordinal

    def pointer_is_device(self, address):
        with self._call("pointer_is_device", address):
            region = self.memory.find(address)
            return region is not None and region.kind in {"device", "engine"}

    def copy_async(self, destination, source, nbytes, stream):
        with self._call("copy_async", destination, source, nbytes, stream):
            self._check_copy(destination, source, nbytes)
            self._put_own(stream, Item("copy", lambda: self._copy(destination, source, nbytes)))

    def copy_batch_async(self, destinations, sources, sizes, stream):
        with self._call("copy_batch_async", destinations, sources, sizes, stream):
            if not self.copy_batch_available or self._stream(stream).is_default:
                raise CudaError("copy_batch_async", NOT_SUPPORTED)
            for array in (destinations, sources, sizes):
                assert array.dtype == np.int64, "the driver reads 8 bytes an entry"
                assert array.flags.c_contiguous, "the driver reads entries back to back"
                assert len(array) == len(sizes) > 0, "the driver reads as many entries of each"
            copies = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
            for copy in copies:
                self._check_copy(*copy)

            def run():
                for copy in reversed(copies):  # in any order, and this is one that nobody expects
                    self._copy(*copy)

            self._put_own(stream, Item(f"batch of {len(copies)}", run))

    def memset_async(self, address, value, nbytes, stream):
        with self._call("memset_async", address, value, nbytes, stream):
            self._check_access(address, nbytes, write=True)
            self._put_own(stream, Item("memset", lambda: ctypes.memset(address, value, nbytes)))
