"""The CUDA device around its queues, over a driver without a GPU: what it takes, what it gives back, and when."""

import gc
import os
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from cuda_rig import ENGINE, ENGINE_ONLY, LOAD, SHORT_S, STORE, WAIT_S, CudaRig
from kvmoor.block_layout import BlockLayout, GroupLayout
from kvmoor.devices.cuda import device as device_module
from kvmoor.devices.cuda import freeing as freeing_module
from kvmoor.devices.cuda import launches, page_kernels
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.cuda_error import NOT_SUPPORTED, OUT_OF_MEMORY
from kvmoor.devices.cuda.device import CudaDevice
from kvmoor.devices.cuda.freeing import FreeingThread, kept_until_exit
from kvmoor.errors import (
    BusyError,
    ClosedError,
    DeviceError,
    LayoutError,
    MissingDependencyError,
    NoRoomError,
    SettingsError,
)
from kvmoor.registration import RegistrationError


@pytest.fixture
def rig():
    with CudaRig() as rig:
        yield rig


def freeing_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvmoor-cuda-free"]


def test_a_device_says_what_it_is(rig):
    """Name and number are the driver's; the state shows in its text."""
    device = rig.open()

    assert "Fake GPU 0" == device.name
    assert 0 == device.ordinal
    assert "<CudaDevice 0, Fake GPU 0>" == repr(device)
    assert "" == device.broken
    device.close(WAIT_S)
    assert "<CudaDevice 0, Fake GPU 0, closed>" == repr(device)


def test_a_device_works_on_the_gpu_it_was_told():
    """With a number the device is on that GPU, whatever context is current, and leaves that one current."""
    with CudaRig(num_devices=3) as rig:
        device = rig.open(ordinal=2)
        stack = rig.fake.context_stack()
        queue = device.open_copy_queue("store", STORE)
        blocks = rig.blocks()
        rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
        queue.enqueue(blocks.copies(1), 1, None)
        rig.fake.run_all()

        assert 1 == queue.completed()
        assert stack == rig.fake.context_stack()
        assert 2 == device.ordinal
        rig.fake.check()


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", None), ("x", None), (None, None)])
def test_the_numa_node_is_what_the_system_says(rig, tmp_path, monkeypatch, content, node):
    """The node is read by the place of the GPU on its bus; where the system does not tell there is none."""
    monkeypatch.setattr(device_module, "_PCI_DEVICES", tmp_path)
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    if content is not None:
        (folder / "numa_node").write_text(content)

    assert node == rig.open().numa_node


def test_a_layout_on_the_gpu_is_taken_and_prepared(rig):
    """Checking a layout does all that its first copies would have to wait for."""
    device = rig.open()
    blocks = rig.blocks()
    store = device.open_copy_queue("store", STORE)
    device.check_layout(blocks.layout())
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    before = {name: rig.fake.num_calls(name) for name in ("memory_alloc", "host_alloc", "stream_create", "module_load")}

    store.enqueue(blocks.copies(1), 1, None)

    assert before == {name: rig.fake.num_calls(name) for name in before}


def test_an_empty_group_needs_nothing(rig):
    """A group without tensors on this rank is no reason to refuse a layout."""
    rig.open().check_layout(BlockLayout((rig.blocks().group, GroupLayout((), 16)), on_host=False))


def test_tensors_elsewhere_are_refused():
    """Tensors in host memory, on another GPU or beyond the end of their memory are refused by name."""
    with CudaRig(num_devices=2) as rig:
        device = rig.open()
        blocks = rig.blocks()
        host = np.zeros(16 * 512, np.uint8)
        elsewhere = rig.fake.device_bytes(16 * 512, ordinal=1)
        tensor = blocks.group.tensors[1]
        for wrong, message in (
            (replace(tensor, base=host.ctypes.data), "tensor 0 of group 1 .*GPU memory.*CpuDevice"),
            (replace(tensor, base=elsewhere.ctypes.data), "tensor 0 of group 1 .*lies on GPU 1"),
            (replace(tensor, num_blocks=10**6), "tensor 0 of group 1 .*all their blocks"),
        ):
            with pytest.raises(LayoutError, match=message):
                device.check_layout(BlockLayout((blocks.group, GroupLayout((wrong,), 16)), on_host=False))


def test_a_queue_name_is_used_once(rig):
    """A second owner of the device is told so."""
    device = rig.open()
    device.open_copy_queue("store", STORE)

    with pytest.raises(BusyError, match="'store' already"):
        device.open_copy_queue("store", LOAD)


def test_an_event_needs_a_stream(rig):
    """A device that was not told where the engine computes refuses to guess; told so, it asks each time."""
    device = rig.open(current_stream=None)
    with pytest.raises(SettingsError, match="current_stream=torch"):
        device.record_event()

    stream = rig.fake.stream_create()
    asked = []

    def current_stream():
        asked.append(stream)
        return stream

    device.use_stream(current_stream)
    rig.fake.enqueue(stream)
    event = device.record_event()
    assert not event.is_done()
    rig.fake.run_all()
    assert event.is_done()
    assert device.record_event(ENGINE) is not None
    assert 1 == len(asked)
    rig.fake.stream_destroy(stream)


def test_no_event_is_recorded_into_a_capture(rig):
    """While the engine's stream captures there is no event: it would be part of the graph and draw copies into it."""
    device = rig.open()
    with rig.fake.capturing(ENGINE), pytest.raises(DeviceError, match="captur"):
        device.record_event()
    rig.fake.check()


def test_staging_memory_is_the_drivers_own(rig):
    """Staging memory is page-locked, on a page boundary, usable without registering, and freed also after `close`."""
    device = rig.open()
    address = device.allocate_staging(10_000)
    assert 0 == address % 4096
    assert 10_000 == device.staging_nbytes
    assert rig.fake.host_device_pointer(address) == address

    assert device.close(WAIT_S)
    with pytest.raises(ClosedError):
        device.allocate_staging(4096)
    device.free_staging(address)

    assert 0 == device.staging_nbytes
    rig.assert_clean()


def test_no_room_for_staging_memory_is_said(rig):
    """A lack of memory is told apart from a device that fails."""
    device = rig.open()
    for code, error in ((OUT_OF_MEMORY, NoRoomError), (NOT_SUPPORTED, DeviceError)):
        rig.fake.fail("host_alloc", at=rig.fake.num_calls("host_alloc"), code=code)
        with pytest.raises(error):
            device.allocate_staging(4096)
    assert 0 == device.staging_nbytes
    assert device.close(WAIT_S)
    rig.assert_clean()


def test_memory_at_two_addresses_is_refused(rig):
    """Where the GPU sees page-locked memory at another address no copy is possible: a device cannot be opened."""
    rig.fake.device_pointer_offset = 2**40
    with pytest.raises(DeviceError, match="one address for both"):
        rig.open()
    rig.assert_clean()


def test_everything_is_given_back(rig):
    """A device that is closed leaves nothing: no memory, streams, events or code, and no thread."""
    device = rig.open(strategy=CopyStrategy(copy_engine_from_nbytes=2048))
    blocks = rig.blocks(page_nbytes=(1024, 512))
    device.check_layout(blocks.layout())
    unregister = blocks.register(device.registrar)
    queues = [device.open_copy_queue("store", STORE), device.open_copy_queue("load", LOAD)]
    rig.fake.enqueue(ENGINE)
    for queue in queues:
        queue.enqueue(blocks.copies(1, 2, 3), 1, device.record_event())
    rig.fake.run_all()

    assert device.close(WAIT_S)
    assert [1, 1] == [queue.completed() for queue in queues]
    assert all(queue.seconds(1) is not None for queue in queues)
    unregister()

    assert device._holdings._freeing.wait_idle(WAIT_S)
    rig.assert_clean()
    assert [] == freeing_threads()
    assert device not in kept_until_exit()


def test_a_device_closes_twice_and_takes_nothing_then(rig):
    """Closing again changes nothing, and every request is refused."""
    device = rig.open()
    blocks = rig.blocks()
    assert device.close(WAIT_S)
    assert device.closed
    assert device.close(0.0)

    for request in (
        lambda: device.open_copy_queue("store", STORE),
        device.record_event,
        lambda: device.check_layout(blocks.layout()),
        lambda: device.allocate_staging(4096),
    ):
        with pytest.raises(ClosedError, match="make another device"):
            request()


def test_leaving_a_with_block_closes(rig):
    """A device is its own context manager."""
    with rig.open() as device:
        device.open_copy_queue("store", STORE)
    rig.assert_clean()


@pytest.mark.parametrize("last", ["a range", "staging memory"])
def test_the_registrar_outlives_the_device(last):
    """After `close` ranges can be unregistered and staging memory freed; the device's context goes with the last."""
    with CudaRig(engine_on=None) as rig:
        device = rig.open(ordinal=0, current_stream=None)
        blocks = rig.blocks()
        unregister = blocks.register(device.registrar)
        address = device.allocate_staging(4096)

        assert device.close(WAIT_S)
        ends = [unregister, lambda: device.free_staging(address)]
        for end in ends if last == "staging memory" else reversed(ends):
            assert device._holdings._freeing.wait_idle(WAIT_S)
            assert {0: 1} == rig.fake._primary
            end()

        assert device._holdings._freeing.wait_idle(WAIT_S)
        assert {} == rig.fake._primary
        rig.assert_clean()


def test_a_running_job_keeps_the_device(rig):
    """As long as a job runs nothing is given back, and no call is made that would block; afterwards all is."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    blocks = rig.blocks()
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    address = device.allocate_staging(4096)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.hang(queue.stream)

    started = time.monotonic()
    assert not device.close(SHORT_S)
    assert time.monotonic() - started < WAIT_S
    device.free_staging(address)
    assert device in kept_until_exit()
    assert not device.close(0.0)
    rig.fake.check()
    rig.fake.release(queue.stream)
    rig.fake.run_all()

    assert device.close(WAIT_S)
    rig.fake.host_unregister(blocks.address)
    assert ["host memory, 8192 bytes"] == rig.fake.leaks()  # what was to be freed while a copy could run


def test_a_hanging_engine_keeps_the_device(rig):
    """If the engine does not come to where it was last marked, nothing is freed: that would block behind it."""
    device = rig.open()
    rig.fake.enqueue(ENGINE)
    rig.fake.hang(ENGINE)
    device.record_event()

    assert not device.close(SHORT_S)
    rig.fake.check()
    rig.fake.release(ENGINE)
    rig.fake.run_all()

    assert device.close(WAIT_S)
    rig.assert_clean()


@pytest.mark.parametrize("as_function", [False, True])
def test_a_stream_is_marked_again_before_anything_is_freed(rig, as_function):
    """Work that the engine queued since the last event, and that hangs, is seen: nothing is freed behind it."""
    device = rig.open(current_stream=(lambda: ENGINE) if as_function else ENGINE)
    device.record_event()
    rig.fake.run_all()
    rig.fake.enqueue(ENGINE)
    rig.fake.hang(ENGINE)

    assert not device.close(SHORT_S)
    rig.fake.check()
    rig.fake.release(ENGINE)
    rig.fake.run_all()

    assert device.close(WAIT_S)
    rig.assert_clean()


@pytest.mark.parametrize("gone", [0x7777, None, lambda: 1 / 0, object()])
def test_a_stream_that_is_gone_is_not_touched_by_close(rig, gone):
    """A handle that may be destroyed by now, a function that raises and what is no stream do not keep the device."""
    device = rig.open()
    device.use_stream(gone)

    assert device.close(WAIT_S)
    rig.assert_clean()
    assert all(0x7777 not in call.arguments for call in rig.fake.calls)


def test_a_driver_that_blocks_does_not_block_close(rig, monkeypatch):
    """What hangs unseen holds up a thread of its own and nobody else; it goes on once that is over."""
    monkeypatch.setattr(device_module, "_FREE_TIMEOUT_S", SHORT_S)
    rig.fake.blocks_for_real = True
    device = rig.open(current_stream=None)
    address = device.allocate_staging(4096)
    rig.fake.hang(ENGINE)

    started = time.monotonic()
    assert not device.close(SHORT_S)
    device.free_staging(address)
    assert time.monotonic() - started < WAIT_S
    assert all(thread.daemon for thread in freeing_threads())
    assert device not in kept_until_exit()  # nothing of it runs: only Python objects could be lost

    rig.fake.release(ENGINE)
    assert device.close(WAIT_S)
    assert device._holdings._freeing.wait_idle(WAIT_S)
    assert [] == rig.fake.leaks()


def test_a_broken_device_closes_at_once(rig, caplog):
    """After a fault nothing runs and nothing can be given back; no call that could block is made any more."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    blocks = rig.blocks()
    unregister = blocks.register(device.registrar)
    address = device.allocate_staging(4096)
    queue.enqueue(blocks.copies(1), 1, None)
    rig.fake.trap()

    assert device.close(SHORT_S)
    assert "LAUNCH_FAILED" in device.broken
    assert "broken" not in repr(device)
    device.free_staging(address)
    with pytest.raises(RegistrationError):
        unregister()
    assert 1 == queue.completed()
    assert isinstance(queue.failure(1), DeviceError)
    assert "could not be given back" not in caplog.text  # nothing was tried
    rig.fake.check()


@pytest.mark.parametrize(
    "name",
    ["device_name", "device_attribute", "memory_alloc", "host_alloc", "module_load", "module_function"],
)
def test_a_device_that_cannot_be_opened_leaves_nothing(rig, name):
    """Whichever call fails on the way, what was opened before is given back, the context included."""
    rig.fake.fail(name, at=0, code=OUT_OF_MEMORY)
    with pytest.raises(DeviceError):
        rig.open(ordinal=0)

    rig.assert_clean()
    assert {0: 1} == rig.fake._primary


@pytest.mark.parametrize("name", ["stream_create", "memset_async"])
def test_a_queue_that_cannot_be_opened_leaves_nothing(rig, name):
    """What a failed queue had opened is given back with the device, which goes on."""
    device = rig.open()
    rig.fake.fail(name, at=rig.fake.num_calls(name), code=OUT_OF_MEMORY)
    with pytest.raises(DeviceError):
        device.open_copy_queue("store", STORE)
    device.open_copy_queue("store", STORE)

    rig.fake.run_all()
    assert device.close(WAIT_S)
    rig.assert_clean()


def test_no_memory_for_a_table_is_said_when_the_layout_is_checked(rig):
    """A layout whose tables do not fit into the GPU is an error at start; nothing is lost by it."""
    device = rig.open()
    blocks = rig.blocks(page_nbytes=(2**20,) * 160, num_blocks=1, num_slots=1)
    rig.fake.fail("memory_alloc", at=rig.fake.num_calls("memory_alloc"), code=OUT_OF_MEMORY)

    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        device.check_layout(blocks.layout())
    device.check_layout(blocks.layout())

    rig.fake.run_all()
    assert device.close(WAIT_S)
    rig.assert_clean()


def test_a_kernel_for_newer_gpus_is_refused(rig):
    """A strategy that asks for a kernel that this GPU cannot run is refused by name."""
    rig.fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 8
    with pytest.raises(DeviceError, match="page kernel bulk cannot run"):
        rig.open(strategy=CopyStrategy(store_kernel="bulk"))
    rig.assert_clean()


def test_a_kernel_with_much_shared_memory_runs_where_the_gpu_allows_it():
    """Shared memory above 48 KiB is allowed for the kernel first; a GPU that has not as much refuses it by name."""
    strategy = CopyStrategy(store_kernel="bulk_deep", copy_engine_from_nbytes=None)
    with CudaRig() as rig:
        blocks = rig.blocks()
        rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
        queue = rig.open(strategy=strategy).open_copy_queue("store", STORE)
        queue.enqueue(blocks.copies(1, 5), 1, None)
        rig.fake.run_all()
        blocks.assert_stored(1, 5)
        allowed = {call.arguments for call in rig.fake.calls if call.name == "function_allow_shared"}
        assert {launches.BULK_DEEP.shared_nbytes} == {nbytes for _, nbytes in allowed}
        assert 2 == len(allowed)  # the small function and the large one

        rig.fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 101_376  # as on an L4
        with pytest.raises(DeviceError, match=r"bulk_deep cannot run.*132096 bytes.*found 9\.0 and 101376"):
            rig.open(strategy=strategy)


def test_the_kernel_is_compiled_for_the_gpu_and_once(monkeypatch):
    """The code is made for the compute capability found, and is the same for all devices of a process."""
    made = []
    monkeypatch.setattr(page_kernels, "choose_architecture", lambda major, minor: f"sm_{major}{minor}")
    monkeypatch.setattr(page_kernels, "page_copy_source", lambda: "source")
    monkeypatch.setattr(page_kernels, "load_or_compile", lambda *args, **options: made.append((args, options)) or b"x")
    page_kernels._compile.cache_clear()

    assert b"x" == page_kernels._compile(9, 0, 13000, None) == page_kernels._compile(9, 0, 13000, None)

    assert [(("source", "sm_90"), {"folder": None, "driver_version": 13000})] == made
    page_kernels._compile.cache_clear()


def test_a_forked_child_has_a_closed_device(rig):
    """In a forked child nothing is called, nothing is given back, and the device says that it is closed."""
    device = rig.open()
    address = device.allocate_staging(4096)
    before = rig.fake.num_calls()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert device.closed
            assert device.close(WAIT_S)
            assert "" == device.broken
            device.free_staging(address)
            with pytest.raises(ClosedError):
                device.record_event()
            assert before == rig.fake.num_calls()
            code = 0
        finally:
            os._exit(code)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert not device.closed
    device.free_staging(address)
    assert device.close(WAIT_S)
    rig.assert_clean()


def test_a_process_that_ends_frees_nothing(rig, monkeypatch):
    """Once the interpreter leaves no thread can be started: the device proves what it can and lets the process end."""
    device = rig.open()
    queue = device.open_copy_queue("store", STORE)
    blocks = rig.blocks()
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    address = device.allocate_staging(4096)
    queue.enqueue(blocks.copies(1), 1, None)
    monkeypatch.setattr(device_module, "is_leaving", lambda: True)

    assert not device.close(0.0)
    rig.fake.run_all()
    assert device.close(WAIT_S)
    device.free_staging(address)

    assert 1 == queue.completed()
    assert 0 == rig.fake.num_calls("host_free")
    assert [] == freeing_threads()
    rig.fake.host_unregister(blocks.address)


def test_a_thread_that_cannot_be_prepared_frees_nothing():
    """If the thread that frees cannot make the context its own, it calls nothing; what was asked ends all the same."""
    called = []

    def fail():
        raise DeviceError("no context")

    freeing = FreeingThread(fail)
    freeing.submit("memory", lambda: called.append(1))

    assert freeing.wait_idle(WAIT_S)
    assert [] == called


def test_nothing_is_freed_once_the_process_ends(monkeypatch):
    """While the interpreter leaves no call is made and no thread started, which could fail."""
    called = []
    freeing = FreeingThread(lambda: None)
    monkeypatch.setattr(freeing_module, "is_leaving", lambda: True)
    freeing.submit("memory", lambda: called.append(1))

    assert freeing.wait_idle(WAIT_S)
    assert [] == called


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch, caplog):
    """Without a thread nothing counts as given back; the next call makes up for it."""
    called = []
    freeing = FreeingThread(lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse_to_start)
        freeing.submit("memory", lambda: called.append(1))
        assert not freeing.wait_idle(0.0)
    assert "no thread" in caplog.text

    freeing.submit("memory", lambda: called.append(2))
    assert freeing.wait_idle(WAIT_S)

    assert [1, 2] == called


def _refuse_to_start(thread):
    raise RuntimeError("can't start new thread")


def test_one_object_that_cannot_be_freed_does_not_keep_the_others(rig, caplog):
    """An error of one call is logged, and the next one is made."""
    device = rig.open()
    device.open_copy_queue("store", STORE)
    rig.fake.run_all()
    rig.fake.fail("stream_destroy", at=0, code=OUT_OF_MEMORY)

    assert device.close(WAIT_S)

    assert ["stream"] == [leak.split()[0] for leak in rig.fake.leaks()]
    assert "a stream of a CUDA device could not be given back" in caplog.text


def test_missing_bindings_are_named(monkeypatch):
    """Without the bindings the device says which package to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependencyError, match=r"pip install \"kvmoor\[cuda\]\""):
        CudaDevice()


def test_two_devices_share_a_driver(rig):
    """Two owners on one GPU do not disturb each other."""
    first, second = rig.open(), rig.open(strategy=ENGINE_ONLY)
    blocks = rig.blocks()
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    queues = [device.open_copy_queue("store", STORE) for device in (first, second)]
    queues[0].enqueue(blocks.copies(1), 1, None)
    rig.fake.hang(queues[0].stream)
    queues[1].enqueue(blocks.copies(2), 1, None)
    rig.fake.run_all()

    assert [0, 1] == [queue.completed() for queue in queues]
    rig.fake.release(queues[0].stream)
    rig.fake.run_all()
    assert first.close(WAIT_S)
    assert second.close(WAIT_S)
    rig.fake.host_unregister(blocks.address)
    rig.assert_clean()


def test_a_device_that_was_never_closed_warns():
    """Forgetting to close a device is a warning that names it."""
    with CudaRig() as rig:
        rig.open()
        rig.devices.clear()
        with pytest.warns(ResourceWarning, match="CudaDevice 0, Fake GPU 0> was never closed"):
            gc.collect()
