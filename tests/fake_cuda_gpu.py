"""The GPUs behind the fake driver: what tests do with them, and the rules that every call of the driver follows."""

import ctypes
import itertools
import threading
from contextlib import contextmanager

from fake_cuda_memory import DeviceFault, FakeMemory, Region, bytes_at, is_mapped
from fake_cuda_rules import (
    ATTRIBUTES,
    HARMLESS_TO_CAPTURES,
    NEED_NO_CONTEXT,
    QUEUE_LIMIT,
    REFUSED_ONCE_BROKEN,
    SURVIVE_A_FAULT,
    WAIT_FOR_THE_DEVICE,
    Capture,
    FakeCall,
    Fault,
    ThreadState,
)
from fake_cuda_streams import FakeStream, Item
from kvmoor.devices.cuda.cuda_error import (
    CAPTURE_UNSUPPORTED,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    LAUNCH_FAILED,
    CudaError,
)
from kvmoor.errors import DeviceError


class FakeGpu:
    """Hold what a driver and its GPUs know, for `FakeDriver`, which adds the calls."""

    def __init__(self, *, num_devices=1, engine_on=0, auto=False, copy_batch_available=True):
        self.broken = ""
        self.copy_batch_available = copy_batch_available
        self.auto = auto
        self.blocks_for_real = False
        self.attributes = dict(ATTRIBUTES)
        self.device_pointer_offset = 0
        """How far the device's address of page-locked memory is from the host's; 0 on every platform we know."""
        self.item_ms = 1.0
        """How long each piece of queued work takes, for events that keep time."""
        self.before_call = None
        """Called with a `FakeCall` before it is looked at, for tests that act at a certain call."""
        self.calls = []
        self.violations = []
        self.blocking_calls = []
        self.captures = []
        self.memory = FakeMemory()
        self._changed = threading.Condition(threading.RLock())  # guards everything
        self._thread = ThreadState()
        self._num_devices = num_devices
        self._handles = itertools.count(0x7100_0000, 0x10)
        self._primary = {}  # ordinal -> number of references, above 0
        self._other_contexts = {}  # handle -> ordinal
        self._streams = {0: FakeStream(0, 0), 2: FakeStream(2, 0)}  # the default ones: legacy, and of each thread
        self._orphans = {}  # destroyed, which does not stop what is queued
        self._events = {}
        self._modules = {}  # handle -> cubin
        self._functions = {}  # handle -> (module, name)
        self._shared_nbytes = {}  # function -> what it may have, where that was raised
        self._kernels = {}  # name -> (run, sizes of the parameters)
        self._faults = []
        self._num_calls = {None: 0}
        self._fault_code = 0
        self._clock_ms = 0.0
        if engine_on is not None:
            self._primary[engine_on] = 1
            self._thread.contexts.append(context_of(engine_on))

    # What tests do

    def add_kernel(self, name, run, *parameter_nbytes):
        """Make a kernel known under its name; `parameter_nbytes` are the sizes of its parameters.

        `run(fake, function, grid, block, parameters)` gets the bytes of all parameters back to back, copied by the
        launch. It calls `touch` before it reads or writes, and may raise `DeviceFault`.
        """
        self._kernels[name] = run, parameter_nbytes

    def function_name(self, function):
        """Return which kernel a handle stands for."""
        return self._functions[function][1]

    def touch(self, address, nbytes, *, write=False):
        """Raise `DeviceFault` unless the device reaches all these bytes."""
        self.memory.touch(address, nbytes, write=write)

    def device_bytes(self, nbytes, ordinal=0):
        """Return new device memory of the engine's, as a uint8 array."""
        return bytes_at(self.memory.allocate("engine", nbytes, ordinal), nbytes)

    def adopt_device(self, array, ordinal=0):
        """Make memory of the test's device memory."""
        self.memory.add(Region("engine", array.ctypes.data, array.nbytes, ordinal), owner=array)

    def make_current(self, ordinal, *, primary=True):
        """Make a context of a GPU the calling thread's, as an engine does; return its handle.

        By default the primary one, else a new one.
        """
        with self._changed:
            if primary:
                self._primary.setdefault(ordinal, 1)
                context = context_of(ordinal)
            else:
                context = next(self._handles)
                self._other_contexts[context] = ordinal
            self._thread.contexts[-1:] = [context]
            return context

    def leave_context(self):
        """Let no context be current on the calling thread."""
        self._thread.contexts.clear()

    def primary_references(self, ordinal):
        """Return how many users the primary context of a GPU has, the engine among them."""
        return self._primary.get(ordinal, 0)

    def context_stack(self):
        """Return the calling thread's contexts, the current one last."""
        return tuple(self._thread.contexts)

    @property
    def capture_mode(self):
        """How the calling thread gets along with captures."""
        return self._thread.capture_mode

    def fail(self, name, at, code):
        """Let one call fail, counted from 0 over all calls of that name; None: over all calls."""
        self._faults.append(Fault(name, at, code))

    def num_calls(self, name=None):
        return self._num_calls.get(name, 0)

    def enqueue(self, stream, work=None, label="engine"):
        """Queue work of the engine's: a callable that runs in its turn."""
        with self._changed:
            self._put(self._stream(stream), Item(label, work))
            self._settle()

    def pending(self, stream):
        """Return the labels of what is queued and has not run."""
        with self._changed:
            return [item.label for item in self._stream(stream).items]

    def step(self, stream):
        """Run one piece of work; return whether there was one that could run."""
        with self._changed:
            return self._step(self._stream(stream))

    def run(self, stream):
        """Run what is queued on a stream, up to a wait that is not over; return how many pieces ran."""
        return sum(1 for _ in iter(lambda: self.step(stream), False))

    def run_all(self, random=None):
        """Run all that can run; `random` draws which stream comes next. Return how many pieces ran."""
        with self._changed:
            count = 0
            while ready := [stream for stream in self._all_streams() if stream.can_step]:
                self._step(random.choice(ready) if random is not None else ready[0])
                count += 1
            return count

    @contextmanager
    def running(self):
        """Let a thread run whatever can run, as a GPU does."""
        stopping = []

        def work_off():
            with self._changed:
                while not stopping:
                    if not self.run_all():
                        self._changed.wait()

        thread = threading.Thread(target=work_off, name="fake-gpu", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                stopping.append(True)
                self._changed.notify_all()
            thread.join()

    def hang(self, stream):
        """Let nothing of a stream run any more, what is queued on it included, as if its kernel never ended."""
        with self._changed:
            self._stream(stream).is_hung = True

    def release(self, stream):
        """Let a stream go on."""
        with self._changed:
            (self._orphans.get(stream) or self._stream(stream)).is_hung = False
            self._settle()

    def trap(self, code=LAUNCH_FAILED):
        """Let a kernel fault: what is queued never runs, and nearly every call fails from now on."""
        with self._changed:
            self._fault_code = self._fault_code or code
            for stream in self._all_streams():
                stream.items.clear()
                stream.is_hung = False
            self._changed.notify_all()

    @contextmanager
    def capturing(self, stream=None, mode="global"):
        """Be capturing a graph on the calling thread, and on a stream if one is given."""
        capture = Capture(mode, threading.get_ident(), stream)
        with self._changed:
            self.captures.append(capture)
            if stream is not None:
                self._stream(stream).is_capturing = True
        try:
            yield capture
        finally:
            with self._changed:
                self.captures.remove(capture)
                if stream is not None:
                    self._stream(stream).is_capturing = False

    def check(self):
        """Assert that nothing was done that must not be, and that no call could have blocked."""
        for region in self.memory.of_kind("registered"):
            if not is_mapped(region.address, region.nbytes):
                self.violations.append(f"{region.address:#x} was unmapped while it was registered")
        problems = [*self.violations, *(f"could have blocked: {call}" for call in self.blocking_calls)]
        if problems:
            raise AssertionError("; ".join(problems))

    def leaks(self):
        """Return what was opened and not given back, as text; the engine's own is not among it."""
        regions = [region for kind in ("device", "host", "registered") for region in self.memory.of_kind(kind)]
        held = [f"{region.kind} memory, {region.nbytes} bytes" for region in regions]
        held += [f"stream {stream.handle:#x}" for stream in self._streams.values() if not stream.is_default]
        held += [f"event {handle:#x}" for handle in self._events]
        held += [f"module {handle:#x}" for handle in self._modules]
        return held

    # How calls behave

    @contextmanager
    def _call(self, name, *arguments):
        """Enclose one call: note it, let it fail if it has to, and run what it queued if nobody else does."""
        thread = threading.current_thread()
        call = FakeCall(name, arguments, thread.ident, thread.name)
        if self.before_call is not None:
            self.before_call(call)
        with self._changed:
            self.calls.append(call)
            if self.broken and name in REFUSED_ONCE_BROKEN:
                raise DeviceError(f"{name} is not called any more, since it could block: {self.broken}")
            try:
                self._inject(name)
                self._check_capture(call)
                if self._fault_code and name not in SURVIVE_A_FAULT:
                    raise CudaError(name, self._fault_code)
                if name not in NEED_NO_CONTEXT and not self._thread.contexts:
                    raise CudaError(name, INVALID_CONTEXT)
                if name in WAIT_FOR_THE_DEVICE:
                    self._wait_for_the_device(name)
                yield
                self._settle()
            except CudaError as error:
                if error.is_sticky:
                    self.trap(error.code)
                    self.broken = self.broken or str(error)
                raise

    def _inject(self, name):
        at = {None: self.num_calls(), name: self.num_calls(name)}
        self._num_calls.update({key: number + 1 for key, number in at.items()})
        for fault in self._faults:
            if at.get(fault.name) == fault.at:
                raise CudaError(name, fault.code)

    def _check_capture(self, call):
        if call.name in HARMLESS_TO_CAPTURES or self._thread.capture_mode == "relaxed":
            return
        for capture in self.captures:
            if capture.mode == "global" or (capture.mode == "thread_local" and capture.thread_id == call.thread_id):
                capture.lost = True
                self._violate(f"{call.name} of thread {call.thread}, which is not relaxed, broke a capture")
                raise CudaError(call.name, CAPTURE_UNSUPPORTED)

    def _wait_for_the_device(self, name):
        self.run_all()
        if not any(stream.is_busy for stream in self._all_streams()):
            return
        self.blocking_calls.append(name)
        while self.blocks_for_real and any(stream.is_busy for stream in self._all_streams()):
            self._changed.wait()
            self.run_all()

    def _put(self, stream, item):
        if self._fault_code:
            return
        if len(stream.items) >= QUEUE_LIMIT:
            self.blocking_calls.append(f"{item.label}, behind {len(stream.items)} others on its stream")
        stream.items.append(item)
        self._changed.notify_all()

    def _put_own(self, handle, item):
        """Queue work of kvmoor's, which has to keep off the default streams."""
        stream = self._stream(handle)
        if stream.is_default:
            self._violate(f"{item.label} was queued on a default stream")
        elif self._thread.contexts[-1] != stream.context:
            self._violate(f"{item.label} was queued on a stream of another context than the current one")
            raise CudaError(item.label, INVALID_HANDLE)
        if stream.is_capturing:
            self._violate(f"{item.label} was queued on a stream that captures")
        self._put(stream, item)

    def _step(self, stream):
        if not stream.can_step:
            return False
        item = stream.items.popleft()
        self._clock_ms += self.item_ms
        try:
            if item.work is not None:
                item.work()
        except DeviceFault as fault:
            self.trap(fault.code)
        except Exception as error:
            self._violate(f"{item.label} raised {error!r}")
            self.trap()
            raise
        self._changed.notify_all()
        return True

    def _settle(self):
        """Run all that can run if that is to happen at once."""
        if self.auto:
            self.run_all()
        self._changed.notify_all()

    def _copy(self, destination, source, nbytes):
        self.memory.touch(source, nbytes, write=False)
        self.memory.touch(destination, nbytes, write=True)
        ctypes.memmove(destination, source, nbytes)

    def _check_copy(self, destination, source, nbytes):
        self._check_access(destination, nbytes, write=True)
        self._check_access(source, nbytes, write=False)

    def _check_access(self, address, nbytes, *, write):
        problem = self.memory.problem(address, nbytes, write=write)
        if problem:
            self._violate(f"a copy was queued although {problem}")
            raise CudaError("copy", INVALID_VALUE)

    def _remove(self, kind, address, call, code):
        if self.memory.remove(kind, address) is None:
            self._violate(f"{call} of {address:#x}, where no {kind} memory begins")
            raise CudaError(call, code)

    def _violate(self, message):
        self.violations.append(message)

    def _ordinal(self):
        context = self._thread.contexts[-1]
        return self._other_contexts.get(context, context - context_of(0))

    def _check_context(self, context):
        if context not in self._other_contexts and context - context_of(0) not in self._primary:
            raise CudaError("context", INVALID_CONTEXT)

    def _all_streams(self):
        return [*self._streams.values(), *self._orphans.values()]

    def _stream(self, handle):
        stream = self._streams.get(0 if handle == 1 else handle)  # 1: CU_STREAM_LEGACY
        if stream is None:
            raise CudaError(f"stream {handle:#x}", INVALID_HANDLE)
        return stream

    def _event(self, handle):
        event = self._events.get(handle)
        if event is None:
            raise CudaError(f"event {handle:#x}", INVALID_HANDLE)
        return event


def context_of(ordinal):
    """Return the handle of a GPU's primary context."""
    return 0xC0_0000 + ordinal
