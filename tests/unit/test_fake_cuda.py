"""The fake driver: that it runs work in order, notices what a real one would not forgive, and fails on demand."""

import ctypes
import gc
import mmap
import random
import threading

import numpy as np
import pytest

from fake_cuda import DeviceFault, FakeDriver, bytes_at
from fake_cuda_memory import new_memory
from kvmoor.devices.cuda.driver import CudaError
from kvmoor.errors import DeviceError


@pytest.fixture
def fake():
    return FakeDriver()


def load(fake, run, *values, nbytes=8):
    """Make a kernel known and return its handle, and parameters that hold the values; keep the parameters alive."""
    fake.add_kernel("kernel", run, *[nbytes] * len(values))
    function = fake.module_function(fake.module_load(b"cubin"), "kernel")
    words = [ctypes.c_uint64(value) for value in values]
    pointers = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
    return function, pointers, words


def test_work_runs_in_order_and_only_when_told(fake):
    """Queued work waits for the test, then runs in the order of queueing, a piece at a time if wanted."""
    stream = fake.stream_create()
    ran = []
    for number in range(3):
        fake.enqueue(stream, lambda number=number: ran.append(number), f"work {number}")
    assert ([], ["work 0", "work 1", "work 2"]) == (ran, fake.pending(stream))
    assert fake.step(stream)
    assert [0] == ran
    assert 2 == fake.run(stream)
    assert [0, 1, 2] == ran
    assert not fake.step(stream)
    assert fake.stream_query(stream)


def test_an_event_that_was_never_recorded_is_done(fake):
    """As with the real driver, and waiting for it is no wait."""
    stream, event = fake.stream_create(), fake.event_create()
    assert fake.event_query(event)
    fake.stream_wait_event(stream, event)
    assert fake.stream_query(stream)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_waits_hold(fake, seed):
    """Streams may be run in any order, drawn at random: what waits for an event never runs before it."""
    streams = [fake.stream_create() for _ in range(4)]
    ran = []
    for number, stream in enumerate(streams):
        fake.enqueue(stream, lambda number=number: ran.append(number))
        event = fake.event_create()
        fake.event_record(event, stream)
        fake.stream_wait_event(streams[(number + 1) % 4], event)
    fake.run_all(random.Random(seed))
    assert ran.index(0) < ran.index(1) < ran.index(2) < ran.index(3)


def test_at_once_everything_runs_within_the_call():
    """In the automatic mode queued work is over when the call returns, unless it has to wait."""
    fake = FakeDriver(auto=True)
    first, second = fake.stream_create(), fake.stream_create()
    event = fake.event_create()
    fake.hang(first)
    fake.event_record(event, first)
    fake.stream_wait_event(second, event)
    ran = []
    fake.enqueue(second, lambda: ran.append(2))
    assert [] == ran
    fake.release(first)
    assert [2] == ran


def test_a_thread_runs_what_is_queued(fake):
    """Beside a test that waits, a thread of the fake's works off whatever is queued."""
    stream = fake.stream_create()
    done = threading.Event()
    with fake.running():
        fake.enqueue(stream, done.set)
        assert done.wait(30)
    fake.enqueue(stream, done.clear)
    assert done.is_set()


def test_copies_move_bytes_between_what_the_device_reaches(fake):
    """Device memory, the driver's own host memory and registered memory are all copied between, and compared here."""
    stream = fake.stream_create()
    device, host = fake.device_bytes(4096), fake.host_alloc(4096)
    registered, owner = new_memory(4096)
    fake.host_register(registered, 4096, False)
    device[:] = np.arange(4096) % 251
    fake.copy_async(host, device.ctypes.data, 4096, stream)
    fake.copy_async(registered, host, 4096, stream)
    fake.memset_async(host, 9, 4, stream)
    fake.stream_write_value64(stream, host + 8, 2**63 + 1)
    assert not bytes_at(registered, 4096).any()
    assert 4 == fake.run_all()
    np.testing.assert_array_equal(device, bytes_at(registered, 4096))
    assert [9] * 4 == bytes_at(host, 4).tolist()
    assert 2**63 + 1 == ctypes.c_uint64.from_address(host + 8).value
    fake.host_unregister(registered)
    fake.check()
    del owner


def test_a_batch_copies_all_of_it_in_no_order(fake):
    """Each pair is copied, from the arrays as they were at the call."""
    stream = fake.stream_create()
    source, target = fake.host_alloc(64), fake.device_bytes(64)
    bytes_at(source, 64)[:] = range(64)
    offsets = np.array([32, 0, 48])
    arrays = target.ctypes.data + offsets, source + offsets, np.array([8, 16, 4])
    fake.copy_batch_async(*arrays, stream)
    arrays[2][:] = 0
    fake.run_all()
    expected = np.zeros(64, np.uint8)
    for offset, nbytes in ((32, 8), (0, 16), (48, 4)):
        expected[offset : offset + nbytes] = range(offset, offset + nbytes)
    np.testing.assert_array_equal(expected, target)
    for wrong in (arrays[2].astype(np.int32), np.arange(6)[::2], np.zeros(0, np.int64)):
        with pytest.raises(AssertionError):
            fake.copy_batch_async(wrong, wrong, wrong, stream)


@pytest.mark.parametrize("where", ["straddled", "unregistered", "freed", "read only"])
def test_copies_of_what_the_device_does_not_reach_are_noticed(fake, where):
    """A copy across two registrations, of plain or freed memory, or into memory registered for reading is refused."""
    stream, device = fake.stream_create(), fake.device_bytes(8192)
    memory, owner = new_memory(3 * mmap.PAGESIZE)
    address, nbytes = memory, 64
    if where == "straddled":
        for page in range(2):
            fake.host_register(memory + page * mmap.PAGESIZE, mmap.PAGESIZE, False)
        address, nbytes = memory + mmap.PAGESIZE - 32, 64
    elif where == "read only":
        fake.host_register(memory, mmap.PAGESIZE, True)
        fake.copy_async(device.ctypes.data, memory, 64, stream)
        assert [] == fake.violations
    elif where == "freed":
        address = fake.host_alloc(4096)
        fake.host_free(address)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        fake.copy_async(address, device.ctypes.data, nbytes, stream)
    with pytest.raises(AssertionError, match="a copy was queued although"):
        fake.check()
    del owner


def test_memory_that_goes_while_a_copy_is_queued_is_a_fault(fake):
    """A copy that runs after its memory was unregistered faults the device, as late writes do."""
    stream, device = fake.stream_create(), fake.device_bytes(64)
    memory, owner = new_memory(4096)
    fake.host_register(memory, 4096, False)
    fake.hang(stream)
    fake.copy_async(memory, device.ctypes.data, 64, stream)
    fake.host_unregister(memory)
    assert ["host_unregister"] == fake.blocking_calls
    fake.release(stream)
    fake.run_all()
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        fake.stream_query(stream)
    with pytest.raises(AssertionError, match="could have blocked: host_unregister"):
        fake.check()
    del owner


def test_registering_keeps_the_books(fake):
    """What is registered twice, not mapped, undone twice or unmapped meanwhile is a violation."""
    memory, owner = new_memory(2 * mmap.PAGESIZE)
    fake.host_register(memory, 2 * mmap.PAGESIZE, False)
    with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
        fake.host_register(memory + mmap.PAGESIZE, mmap.PAGESIZE, False)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        fake.host_register(4096, 4096, False)
    fake.host_unregister(memory)
    with pytest.raises(CudaError, match="NOT_REGISTERED"):
        fake.host_unregister(memory)
    assert 3 == len(fake.violations)
    fake.violations.clear()
    with mmap.mmap(-1, 256 * mmap.PAGESIZE) as short:
        fake.host_register(ctypes.addressof(ctypes.c_char.from_buffer(short)), 256 * mmap.PAGESIZE, False)
        gc.collect()
    with pytest.raises(AssertionError, match="was unmapped while it was registered"):
        fake.check()
    del owner


def test_a_launch_takes_its_parameters_along(fake):
    """A kernel gets grid, block and the parameters as they were at the launch, whatever becomes of the buffer."""
    seen = []
    function, pointers, words = load(fake, lambda *arguments: seen.append(arguments), 7, 8)
    fake.launch(function, 4, 512, 0, fake.stream_create(), ctypes.addressof(pointers))
    words[0].value = 99
    assert [] == seen
    fake.run_all()
    assert [(fake, function, 4, 512, (7).to_bytes(8, "little") + (8).to_bytes(8, "little"))] == seen
    assert "kernel" == fake.function_name(function)
    fake.check()


def test_a_kernel_that_reaches_too_far_faults(fake):
    """A kernel may cross from one registered range to the next, and faults where it leaves them or may not write."""
    memory, owner = new_memory(3 * mmap.PAGESIZE)
    fake.host_register(memory, mmap.PAGESIZE, False)
    fake.host_register(memory + mmap.PAGESIZE, mmap.PAGESIZE, True)
    fake.touch(memory + 10, mmap.PAGESIZE)
    for address, write in ((memory + mmap.PAGESIZE, True), (memory + 2 * mmap.PAGESIZE - 1, False)):
        with pytest.raises(DeviceFault):
            fake.touch(address, 2, write=write)
    stream = fake.stream_create()
    function, pointers, _ = load(fake, lambda gpu, *_: gpu.touch(memory, 4096, write=True) or gpu.touch(1, 1), 0)
    fake.launch(function, 1, 32, 0, stream, ctypes.addressof(pointers))
    fake.enqueue(stream, lambda: pytest.fail("ran after the fault"))
    fake.run_all()
    with pytest.raises(CudaError) as caught:
        fake.stream_query(stream)
    assert 700 == caught.value.code
    del owner


def test_a_mistake_in_a_fake_kernel_is_not_hidden(fake):
    """What a kernel raises by mistake comes out of the run, and stays on the list."""
    function, pointers, _ = load(fake, lambda *_: 1 / 0, 0)
    fake.launch(function, 1, 32, 0, fake.stream_create(), ctypes.addressof(pointers))
    with pytest.raises(ZeroDivisionError):
        fake.run_all()
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        fake.check()


def test_after_a_fault_everything_fails_and_nothing_blocks(fake):
    """Queued work never runs, every call answers with the fault, and once that is known the risky ones are refused."""
    stream, event, host = fake.stream_create(), fake.event_create(), fake.host_alloc(64)
    fake.hang(stream)
    fake.enqueue(stream, lambda: pytest.fail("ran"))
    fake.trap()
    fake.run_all()
    assert fake.context_current()
    assert "" == fake.broken
    for call in (lambda: fake.event_query(event), fake.stream_create, lambda: fake.stream_query(stream)):
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
            call()
    assert fake.broken
    with pytest.raises(DeviceError, match="is not called any more"):
        fake.host_free(host)
    fake.check()


@pytest.mark.parametrize("call", ["host_free", "memory_free", "host_unregister"])
def test_calls_that_wait_for_a_hung_stream_are_noticed(fake, call):
    """While a stream hangs such a call is noted and goes on; while none does it first lets the queued work run."""
    memory, owner = new_memory(4096)
    address = {"host_free": fake.host_alloc, "memory_free": fake.memory_alloc}.get(call, lambda _: memory)(4096)
    if call == "host_unregister":
        fake.host_register(memory, 4096, False)
    stream = fake.stream_create()
    ran = []
    fake.enqueue(stream, lambda: ran.append(1))
    fake.hang(stream)
    getattr(fake, call)(address)
    assert ([], [call]) == (ran, fake.blocking_calls)
    fake.release(stream)
    other = fake.host_alloc(4096)
    fake.host_free(other)
    assert ([1], [call]) == (ran, fake.blocking_calls)
    del owner


def test_calls_block_for_real_if_wanted(fake):
    """A test of deadlines can have the call blocked until the stream goes on, while others go through."""
    fake.blocks_for_real = True
    address, stream = fake.host_alloc(4096), fake.stream_create()
    context = fake.context_current()
    fake.hang(stream)

    def free():
        fake.context_set(context)
        fake.host_free(address)

    thread = threading.Thread(target=free)
    thread.start()
    while not fake.blocking_calls:
        assert thread.is_alive()
    assert not fake.stream_query(stream)
    assert thread.is_alive()
    fake.release(stream)
    thread.join(30)
    assert not thread.is_alive()


def test_too_much_on_a_stream_is_noticed(fake):
    """A stream takes about a thousand launches; the next one would block."""
    stream = fake.stream_create()
    for _ in range(1024):
        fake.enqueue(stream)
    assert [] == fake.blocking_calls
    fake.enqueue(stream, label="one more")
    assert ["one more, behind 1024 others on its stream"] == fake.blocking_calls


def test_a_destroyed_stream_runs_to_its_end(fake):
    """Destroying returns at once, the handle is void, and what was queued still runs, also if it hung."""
    stream = fake.stream_create()
    ran = []
    fake.enqueue(stream, lambda: ran.append(1))
    fake.hang(stream)
    fake.stream_destroy(stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        fake.stream_query(stream)
    fake.release(stream)
    fake.run_all()
    assert [1] == ran
    assert [] == fake.leaks()


def test_calls_fail_where_the_test_says(fake):
    """By name and number, by number alone, and with a sticky code for good."""
    fake.fail("stream_create", 1, 2)
    fake.stream_create()
    with pytest.raises(CudaError, match=r"stream_create: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        fake.stream_create()
    fake.stream_create()
    assert (3, 3) == (fake.num_calls("stream_create"), fake.num_calls())
    fake.fail(None, 4, 719)
    fake.device_count()
    with pytest.raises(CudaError, match="device_count"):
        fake.device_count()
    with pytest.raises(CudaError, match="event_create: CUDA_ERROR_LAUNCH_FAILED"):
        fake.event_create()


def test_calls_without_a_context_fail(fake):
    """What needs a context says so on a thread without one, and what is no context cannot be made current."""
    fake.leave_context()
    for call in (fake.stream_create, fake.event_create, fake.context_pop, lambda: fake.memory_alloc(8)):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
            call()
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
        fake.context_push(0xC0_0001)
    assert 0 == fake.context_current()


def test_work_on_the_wrong_stream_is_noticed():
    """Work of kvmoor's on a default stream, or on one of another GPU than the current one, is a violation."""
    fake = FakeDriver(num_devices=2)
    stream, host = fake.stream_create(), fake.host_alloc(64)
    fake.memset_async(host, 0, 8, 0)
    assert ["memset was queued on a default stream"] == fake.violations
    fake.make_current(1)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        fake.memset_async(host, 0, 8, stream)
    assert "a stream of another context" in fake.violations[-1]


def test_captures_of_each_mode_have_their_victims(fake):
    """A global capture minds every thread that is not relaxed, a thread-local one its own, a relaxed one none."""
    lost = {}
    context = fake.context_current()

    def query(mode):
        fake.context_set(context)
        fake.exchange_capture_mode(mode)
        try:
            fake.event_query(event)
        except CudaError:
            pass
        finally:
            fake.exchange_capture_mode("global")

    event = fake.event_create()
    for capture_mode in ("global", "thread_local", "relaxed"):
        for thread_mode in ("global", "relaxed"):
            with fake.capturing(mode=capture_mode) as capture:
                thread = threading.Thread(target=query, args=(thread_mode,))
                thread.start()
                thread.join(30)
            others = capture.lost
            with fake.capturing(mode=capture_mode) as capture:
                query(thread_mode)
            lost[capture_mode, thread_mode] = others, capture.lost
    assert {
        ("global", "global"): (True, True),
        ("global", "relaxed"): (False, False),
        ("thread_local", "global"): (False, True),
        ("thread_local", "relaxed"): (False, False),
        ("relaxed", "global"): (False, False),
        ("relaxed", "relaxed"): (False, False),
    } == lost


def test_a_capture_draws_in_what_touches_it(fake):
    """Recording an event on a stream that captures, or waiting for such an event, is a violation."""
    graph, copies, event = fake.stream_create(), fake.stream_create(), fake.event_create()
    with fake.capturing(graph):
        assert fake.stream_is_capturing(graph)
        fake.event_record(event, graph)
        fake.stream_wait_event(copies, event)
    assert not fake.stream_is_capturing(graph)
    assert 2 == len(fake.violations)


def test_events_with_timing_tell_the_time_between_them(fake):
    """Each piece of work takes as long as the test says; an event without timing, or not reached, tells nothing."""
    stream, timed = fake.stream_create(), [fake.event_create(timing=True) for _ in range(2)]
    fake.item_ms = 2.0
    fake.event_record(timed[0], stream)
    for _ in range(3):
        fake.enqueue(stream)
    fake.event_record(timed[1], stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_READY"):
        fake.event_elapsed_ms(*timed)
    fake.run_all()
    assert 8.0 == fake.event_elapsed_ms(*timed)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        fake.event_elapsed_ms(timed[0], fake.event_create())


def test_what_stays_open_is_listed(fake):
    """Everything that kvmoor opens is a leak until it is given back; what is the engine's is not."""
    fake.device_bytes(64)
    opened = fake.stream_create(), fake.event_create(), fake.module_load(b""), fake.memory_alloc(8), fake.host_alloc(8)
    assert ["device", "host", "stream", "event", "module"] == [text.split()[0] for text in fake.leaks()]
    closers = fake.stream_destroy, fake.event_destroy, fake.module_unload, fake.memory_free, fake.host_free
    for close, handle in zip(closers, opened, strict=True):
        close(handle)
    assert [] == fake.leaks()
    for close, handle in zip(closers, opened, strict=True):
        with pytest.raises(CudaError):
            close(handle)


def test_pointers_tell_where_they_belong(fake):
    """Device memory and the driver's host memory know their GPU, and other memory is unknown."""
    array = np.zeros(16, np.uint8)
    device, host = fake.device_bytes(64, ordinal=1).ctypes.data, fake.host_alloc(64)
    assert [1, 0, None] == [fake.pointer_device(address) for address in (device + 63, host, array.ctypes.data)]
    assert [True, False, False] == [fake.pointer_is_device(address) for address in (device, host, array.ctypes.data)]
    fake.adopt_device(array)
    assert fake.pointer_is_device(array.ctypes.data)
