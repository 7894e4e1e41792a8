"""Whose context kvmoor works in, and that a caller finds its own unchanged afterwards."""

import threading
from contextlib import suppress

import pytest

from fake_cuda import FakeDriver
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.driver import CudaError
from kvmoor.errors import DeviceError

PRIMARY_0, PRIMARY_1 = 0xC0_0000, 0xC0_0001


def on_a_thread(function):
    """Run a function on a thread of its own and return what it returns."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    return results[0]


def test_the_engines_current_context_is_used():
    """Without a number it is the context of the calling thread, on whatever GPU that is."""
    fake = FakeDriver(num_devices=3, engine_on=2)
    context = CudaContext(fake)
    assert (PRIMARY_0 + 2, 2, 2) == (context.handle, context.device, context.ordinal)
    assert [0, 0, 2] == [fake.primary_references(ordinal) for ordinal in range(3)]
    assert fake is context.driver


def test_a_context_of_the_engines_own_is_used_as_it_is():
    """An engine that does not compute in the primary context keeps its own, and no second one comes to be."""
    fake = FakeDriver(engine_on=None)
    own = fake.make_current(0, primary=False)
    context = CudaContext(fake)
    assert own == context.handle
    assert 0 == fake.primary_references(0) == fake.num_calls("primary_context_retain")
    fake.make_current(0)  # now some library uses the primary context as well
    fake.context_set(own)
    beside = CudaContext(fake)
    assert own == beside.handle
    assert 1 == fake.primary_references(0)
    for opened in (context, beside):
        opened.release()
    assert 1 == fake.primary_references(0)


def test_a_thread_without_a_context_finds_the_one_gpu_in_use():
    """On a thread where the engine never was, the one GPU that the process uses is meant, and none is made current."""
    fake = FakeDriver(num_devices=2, engine_on=1)
    context = on_a_thread(lambda: CudaContext(fake))
    assert (PRIMARY_1, 1) == (context.handle, context.ordinal)
    assert () == on_a_thread(lambda: (CudaContext(fake), fake.context_stack())[1])


@pytest.mark.parametrize(
    ("num_devices", "in_use", "found"), [(2, [], "0 of 2"), (2, [0, 1], "2 of 2"), (0, [], "no GPU")]
)
def test_a_gpu_that_nobody_named_is_never_guessed(num_devices, in_use, found):
    """With no context on the thread and no GPU or several in use, nothing is created and the error says what to do."""
    fake = FakeDriver(num_devices=num_devices, engine_on=None)
    for ordinal in in_use:
        fake.make_current(ordinal)
    fake.leave_context()
    with pytest.raises(DeviceError, match=rf"{found}.*pass ordinal"):
        CudaContext(fake)
    assert [1] * len(in_use) == [fake.primary_references(ordinal) for ordinal in in_use]
    assert 0 == fake.num_calls("primary_context_retain")


def test_a_number_chooses_the_gpu():
    """With a number the context is that GPU's: the current one if it is there, else its primary one."""
    fake = FakeDriver(num_devices=2, engine_on=0)
    assert PRIMARY_1 == CudaContext(fake, ordinal=1).handle
    assert (PRIMARY_0,) == fake.context_stack()
    own = fake.make_current(1, primary=False)
    assert own == CudaContext(fake, ordinal=1).handle
    assert PRIMARY_0 == CudaContext(fake, ordinal=0).handle


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_number_that_no_gpu_has_is_refused(ordinal):
    """The error says how many GPUs there are."""
    with pytest.raises(DeviceError, match=f"GPU {ordinal} was asked for, .* sees 2: .*CUDA_VISIBLE_DEVICES"):
        CudaContext(FakeDriver(num_devices=2), ordinal=ordinal)


@pytest.mark.parametrize("ordinal", [None, 0, 1])
def test_a_constructor_that_fails_leaves_no_reference(ordinal):
    """Whichever call of the driver fails, the references and the caller's context are what they were."""
    num_calls = FakeDriver(num_devices=2)
    CudaContext(num_calls, ordinal)
    for at in range(num_calls.num_calls()):
        fake = FakeDriver(num_devices=2)
        fake.fail(None, at, 2)
        with pytest.raises(CudaError):
            CudaContext(fake, ordinal)
        assert [1, 0] == [fake.primary_references(number) for number in (0, 1)]
        assert (PRIMARY_0,) == fake.context_stack()


def test_inside_the_block_the_context_is_current_and_afterwards_the_callers():
    """Blocks nest, and each restores what it found: another GPU's context, none, or ours."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    with context.current():
        assert PRIMARY_1 == fake.context_current()
        with context.current():
            assert (PRIMARY_0, PRIMARY_1) == fake.context_stack()
    assert (PRIMARY_0,) == fake.context_stack()
    fake.leave_context()
    with context.current():
        assert (PRIMARY_1,) == fake.context_stack()
    assert () == fake.context_stack()


def test_a_context_that_is_current_already_is_left_alone():
    """The usual case costs one question to the driver."""
    fake = FakeDriver()
    context = CudaContext(fake)
    fake.calls.clear()
    with context.current():
        assert ["context_current"] == [call.name for call in fake.calls]
    assert ["context_current"] == [call.name for call in fake.calls]


def test_an_error_inside_the_block_restores_the_context():
    """What is raised inside comes out as it is, and the caller's context is back."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    for block in (context.current, context.relaxed):
        with pytest.raises(KeyError), block():
            raise KeyError
        assert ((PRIMARY_0,), "global") == (fake.context_stack(), fake.capture_mode)


def test_a_context_that_cannot_be_popped_is_replaced():
    """A pop may fail with the error of earlier work; the caller's context is current again all the same."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    fake.fail("context_pop", 0, 719)
    with pytest.raises(CudaError, match="context_pop"), context.current():
        pass
    assert PRIMARY_0 == fake.context_current()


def test_a_second_error_is_a_note_on_the_first():
    """If the body fails and restoring fails too, the body's error arrives, with a note about the context."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    fake.fail("context_pop", 0, 201)
    fake.fail("context_set", 0, 201)
    with pytest.raises(KeyError) as caught, context.current():
        raise KeyError("first")
    assert ["first"] == list(caught.value.args)
    (note,) = caught.value.__notes__
    assert "could not be restored: context_set" in note


def test_a_failed_pop_alone_does_not_hide_the_first_error():
    """If restoring succeeds the second way, the body's error arrives without a note."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    fake.fail("context_pop", 0, 719)
    with pytest.raises(KeyError) as caught, context.current():
        raise KeyError("first")
    assert not hasattr(caught.value, "__notes__")
    assert PRIMARY_0 == fake.context_current()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_relaxed_holds_for_the_block_only(mode):
    """Inside, calls harm no capture; afterwards the thread gets along with captures as it did before."""
    fake = FakeDriver(num_devices=2)
    fake.exchange_capture_mode(mode)
    context = CudaContext(fake, ordinal=1)
    with context.relaxed():
        assert ("relaxed", PRIMARY_1) == (fake.capture_mode, fake.context_current())
        with context.relaxed():
            fake.event_create()
        assert "relaxed" == fake.capture_mode
    assert (mode, (PRIMARY_0,)) == (fake.capture_mode, fake.context_stack())


@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_mode_that_cannot_be_restored_is_tried_again(mode, ends_well):
    """A call that fails once leaves no thread relaxed, whether the block ended well or not, and is no error."""
    fake = FakeDriver()
    fake.exchange_capture_mode(mode)
    context = CudaContext(fake)
    fake.fail("exchange_capture_mode", 2, 1)
    with suppress(KeyError), context.relaxed():
        assert "relaxed" == fake.capture_mode
        if not ends_well:
            raise KeyError
    assert (mode, 4) == (fake.capture_mode, fake.num_calls("exchange_capture_mode"))


def test_a_mode_that_stays_lost_is_said():
    """If restoring fails twice the caller learns of it: as the error, or as a note on the one that is on its way."""
    fake = FakeDriver()
    context = CudaContext(fake)
    for at in (1, 2, 4, 5):
        fake.fail("exchange_capture_mode", at, 1)
    with pytest.raises(CudaError, match="exchange_capture_mode"), context.relaxed():
        pass
    fake._thread.capture_mode = "global"
    with pytest.raises(KeyError) as caught, context.relaxed():
        raise KeyError("first")
    (note,) = caught.value.__notes__
    assert "captures could not be restored: exchange_capture_mode" in note


def test_a_context_and_a_mode_are_both_restored():
    """A context that cannot be popped does not keep the mode from being restored."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    fake.fail("context_pop", 0, 201)
    with pytest.raises(CudaError, match="context_pop"), context.relaxed():
        pass
    assert ("global", PRIMARY_0) == (fake.capture_mode, fake.context_current())


def test_relaxed_that_cannot_begin_changes_nothing():
    """If the context cannot be made current, the thread's mode is what it was."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)
    fake.fail("context_push", 0, 201)
    with pytest.raises(CudaError, match="context_push"), context.relaxed():
        pytest.fail("the body ran")
    assert ("global", (PRIMARY_0,)) == (fake.capture_mode, fake.context_stack())


def test_a_prepared_thread_is_relaxed_and_has_the_context():
    """A thread of kvmoor's is prepared once and for all; other threads are not touched by it."""
    fake = FakeDriver(num_devices=2)
    context = CudaContext(fake, ordinal=1)

    def prepare():
        context.prepare_thread()
        context.prepare_thread()
        return fake.capture_mode, fake.context_stack()

    assert ("relaxed", (PRIMARY_1,)) == on_a_thread(prepare)
    assert ("global", (PRIMARY_0,)) == (fake.capture_mode, fake.context_stack())


def test_release_gives_one_reference_back_once():
    """The engine's own reference stays, and a second call does nothing."""
    fake = FakeDriver()
    context = CudaContext(fake)
    assert 2 == fake.primary_references(0)
    context.release()
    context.release()
    assert 1 == fake.primary_references(0)
    fake.check()


def test_a_broken_context_stays_with_the_process():
    """After a fault, releasing makes no call that could block, and raises nothing."""
    fake = FakeDriver()
    context = CudaContext(fake)
    fake.trap()
    with pytest.raises(CudaError):
        fake.event_create()
    fake.calls.clear()
    context.release()
    assert [] == fake.calls
