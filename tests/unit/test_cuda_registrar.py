"""Page-locking with the CUDA driver: what is asked of it, what its refusals mean, and that no capture suffers (B15)."""

import logging
import mmap
import random
import threading

import numpy as np
import pytest

from fake_cuda import FakeDriver
from fake_cuda_memory import new_memory
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.cuda_error import STICKY_CODES
from kvmoor.devices.cuda.driver import CudaError
from kvmoor.devices.cuda.registrar import CudaRegistrar
from kvmoor.errors import DeviceError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.registration import RegistrationError

KIB, MIB = 2**10, 2**20
SLAB = 64 * KIB
PASSING = {2, 304, 712, 900, 901, 906, 999}
PERMANENT = {1, 3, 4, 46, 201, 709, 800, 801, 12345} | STICKY_CODES


@pytest.fixture
def fake():
    return FakeDriver()


@pytest.fixture
def registrar(fake):
    return CudaRegistrar(CudaContext(fake))


@pytest.fixture
def memory():
    """Return the address of four pages, which stay mapped for the test."""
    address, owner = new_memory(4 * mmap.PAGESIZE)
    yield address
    del owner


def arena_on(registrar, num_slabs=4, **options):
    """Open an arena whose slabs hold 16 slots each."""
    groups = (GroupPlan(0, 16, 4 * KIB, 16, SLAB, num_slots=16 * num_slabs),)
    return Arena(ArenaPlan(2 * MIB, groups, MemoryLimits(), "refuse"), registrar=registrar, **options)


def test_a_range_is_registered_where_the_device_sees_it(fake, registrar, memory):
    """The driver is asked once for the whole range, and then where the device finds it; undoing is one call, too."""
    fake.calls.clear()
    registrar.register(memory, 2 * mmap.PAGESIZE)
    assert [("host_register", (memory, 2 * mmap.PAGESIZE, False)), ("host_device_pointer", (memory,))] == [
        (call.name, call.arguments) for call in fake.calls if call.name.startswith("host_")
    ]
    registrar.unregister(memory, 2 * mmap.PAGESIZE)
    assert [] == fake.leaks()
    fake.check()


def test_its_name_is_for_people(registrar):
    """Messages say who refused."""
    assert "CUDA driver" == registrar.name


@pytest.mark.parametrize("code", sorted(PASSING | PERMANENT))
def test_a_refusal_carries_code_remedy_and_whether_to_try_again(fake, registrar, memory, code):
    """Nothing is registered; the error has the driver's code, a way out, and says if other ranges may do better."""
    fake.fail("host_register", 0, code)
    with pytest.raises(
        RegistrationError, match=f"{mmap.PAGESIZE} bytes at {memory:#x} could not be page-locked"
    ) as caught:
        registrar.register(memory, mmap.PAGESIZE)
    error = caught.value
    assert (code, code in PERMANENT) == (error.code, error.permanent)
    assert error.remedy or code in {800, 12345}
    assert isinstance(error.__cause__, CudaError)
    assert [] == fake.leaks()


def test_what_to_do_about_the_usual_refusals(fake, registrar, memory):
    """Confidential computing, the platform's limit and an unsuitable mapping each get words of their own (B04, B05)."""
    remedies = {}
    for at, code in enumerate((801, 2, 1, 712)):
        fake.fail("host_register", at, code)
        with pytest.raises(RegistrationError) as caught:
            registrar.register(memory, mmap.PAGESIZE)
        remedies[code] = caught.value.remedy
    assert "confidential computing" in remedies[801]
    assert "host_memory" in remedies[2]
    assert "ulimit -l" in remedies[2]
    assert "driver's own" in remedies[1]
    assert "nobody else" in remedies[712]


def test_after_a_refusal_the_same_range_can_be_registered(fake, registrar, memory):
    """A refusal leaves nothing behind, neither a registration nor an error for whoever calls next (B03)."""
    fake.fail("host_register", 0, 2)
    with pytest.raises(RegistrationError):
        registrar.register(memory, mmap.PAGESIZE)
    registrar.register(memory, mmap.PAGESIZE)
    registrar.unregister(memory, mmap.PAGESIZE)
    fake.check()


def test_a_range_that_the_device_sees_elsewhere_is_of_no_use(fake, registrar, memory):
    """It is given back at once, and since that is the platform's way no other range is tried."""
    fake.device_pointer_offset = 0x1000
    with pytest.raises(RegistrationError, match=rf"elsewhere \(at {memory + 0x1000:#x}\)") as caught:
        registrar.register(memory, mmap.PAGESIZE)
    assert caught.value.permanent
    assert "unified addressing" in caught.value.remedy
    assert [] == fake.leaks()
    fake.check()


def test_a_range_whose_place_cannot_be_told_is_of_no_use(fake, registrar, memory):
    """If the driver does not say where the device sees it, it is given back."""
    fake.fail("host_device_pointer", 0, 1)
    with pytest.raises(RegistrationError, match="the driver does not tell where") as caught:
        registrar.register(memory, mmap.PAGESIZE)
    assert (1, True) == (caught.value.code, caught.value.permanent)
    assert [] == fake.leaks()


def test_a_range_that_cannot_be_given_back_is_not_called_unregistered(fake, registrar, memory):
    """`RegistrationError` promises that nothing is registered; where that is not so, another error is raised."""
    fake.device_pointer_offset = 0x1000
    fake.fail("host_unregister", 0, 999)
    with pytest.raises(CudaError, match="host_unregister"):
        registrar.register(memory, mmap.PAGESIZE)


def test_memory_mapped_for_reading_is_registered_for_reading(fake, registrar, memory):
    """The flag reaches the driver; a GPU that cannot do so is asked no further."""
    registrar.register(memory, mmap.PAGESIZE, read_only=True)
    assert fake.memory.find(memory).read_only
    registrar.unregister(memory, mmap.PAGESIZE)
    fake.attributes["READ_ONLY_HOST_REGISTER_SUPPORTED"] = 0
    fake.calls.clear()
    with pytest.raises(RegistrationError, match="mapped for reading only") as caught:
        registrar.register(memory, mmap.PAGESIZE, read_only=True)
    assert (801, True) == (caught.value.code, caught.value.permanent)
    assert "host_register" not in {call.name for call in fake.calls}
    registrar.register(memory, mmap.PAGESIZE)
    registrar.unregister(memory, mmap.PAGESIZE)


@pytest.mark.parametrize("code", [1, 2, 719, 900])
def test_a_range_that_stays_registered_is_reported_so(fake, registrar, memory, code):
    """If undoing fails, the error says that the range may still be registered."""
    registrar.register(memory, mmap.PAGESIZE)
    fake.fail("host_unregister", 0, code)
    with pytest.raises(
        RegistrationError, match=f"{mmap.PAGESIZE} bytes at {memory:#x} may still be page-locked"
    ) as caught:
        registrar.unregister(memory, mmap.PAGESIZE)
    assert code == caught.value.code


def test_a_range_that_is_unregistered_already_is_no_error(fake, registrar, memory, caplog):
    """Somebody else undid it: what was asked for is so, and a warning tells of it."""
    registrar.register(memory, mmap.PAGESIZE)
    fake.fail("host_unregister", 0, 713)
    with caplog.at_level(logging.WARNING, "kvmoor"):
        registrar.unregister(memory, mmap.PAGESIZE)
    assert "unregistered by somebody else" in caplog.text


def test_a_broken_device_is_not_called(fake, registrar, memory):
    """After a fault no registration is begun or undone, since both could block; the errors say so."""
    registrar.register(memory, mmap.PAGESIZE)
    fake.trap()
    with pytest.raises(CudaError):
        fake.stream_create()
    assert fake.broken
    with pytest.raises(RegistrationError, match="is not called any more") as caught:
        registrar.register(memory + mmap.PAGESIZE, mmap.PAGESIZE)
    assert caught.value.permanent
    with pytest.raises(RegistrationError, match=r"may still be page-locked.*is not called any more"):
        registrar.unregister(memory, mmap.PAGESIZE)
    assert 1 == fake.num_calls("host_register")


def test_any_thread_registers_without_harm(fake, registrar, memory):
    """A thread that was not prepared, has no context and belongs to an engine that captures: no capture is lost."""
    results = []

    def use():
        registrar.register(memory, mmap.PAGESIZE)
        registrar.unregister(memory, mmap.PAGESIZE)
        results.append((fake.capture_mode, fake.context_stack()))

    with fake.capturing() as capture:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(30)
        use()
    assert [("global", ()), ("global", (0xC0_0000,))] == results
    assert not capture.lost
    fake.check()


def test_an_arena_registers_its_slabs_and_undoes_them(fake, registrar):
    """With the real registrar every slab is registered by a prepared thread before it is published, and undone once."""
    with arena_on(registrar) as arena:
        assert arena.wait_registered(10)
        assert arena.are_registered(0, np.arange(64)).all()
        assert 4 == fake.num_calls("host_register")
        assert 4 * SLAB == sum(region.nbytes for region in fake.memory.of_kind("registered"))
    assert [] == fake.leaks()
    assert {"kvmoor"} == {call.thread.split("-")[0] for call in fake.calls if call.name.startswith("host_")}
    fake.check()


@pytest.mark.parametrize("code", [801, 1, 2])
def test_an_arena_lives_without_registration(fake, registrar, code):
    """Where nothing can be page-locked the arena comes up all the same and says how it is copied to (B04)."""
    for at in range(4):
        fake.fail("host_register", at, code)
    with arena_on(registrar) as arena:
        assert arena.wait_mapped(10)
        statistics = arena.statistics()
        assert ("staging", 0) == (statistics.registration_mode, statistics.registered_nbytes)
        assert f"driver code {code}" in statistics.registration_reason
    assert (1 if code != 2 else 3) == fake.num_calls("host_register")
    fake.check()


def test_captures_at_any_time_survive_page_locking():
    """500 arenas page-lock while captures of every mode begin and end between any two of the driver's calls (B15).

    No capture is lost, no call is refused, and every arena comes up registered whole.
    """
    for seed in range(500):
        chance = random.Random(seed)
        fake = FakeDriver()
        registrar = CudaRegistrar(CudaContext(fake))
        open_captures, seen = [], []

        def begin_or_end(call, chance=chance, fake=fake, open_captures=open_captures, seen=seen):
            if open_captures and chance.random() < 0.3:
                open_captures.pop().__exit__(None, None, None)
            elif len(open_captures) < 2 and chance.random() < 0.5:
                window = fake.capturing(mode=chance.choice(["global", "thread_local", "relaxed"]))
                seen.append(window.__enter__())
                open_captures.append(window)

        fake.before_call = begin_or_end
        with arena_on(registrar, chance.randint(1, 3), pin=chance.choice(["background", "eager"])) as arena:
            assert arena.wait_registered(10), f"seed {seed}"
        for window in open_captures:
            window.__exit__(None, None, None)
        assert seen
        assert not any(capture.lost for capture in seen), f"seed {seed}"
        assert [] == fake.leaks(), f"seed {seed}"
        fake.check()


def test_a_thread_that_is_not_prepared_would_lose_captures(fake, memory):
    """The fake notices what the registrar avoids: without the relaxed mode the call is refused and the capture lost."""
    with fake.capturing() as capture, pytest.raises(DeviceError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        fake.host_register(memory, mmap.PAGESIZE, False)
    assert capture.lost
    with pytest.raises(AssertionError, match="which is not relaxed, broke a capture"):
        fake.check()
