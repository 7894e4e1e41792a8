"""The scripted registrar does what its script says and notices what an arena must not do."""

import threading

import pytest

from kvmoor.registration import Registrar, RegistrationError
from kvmoor.testing import RegistrationBudget, ScriptedRegistrar
from kvmoor.testing.scripted_registrar import RegistrarCall

MB = 10**6


@pytest.fixture
def registrar():
    with ScriptedRegistrar() as scripted:
        scripted.prepare_thread()
        yield scripted


def run_elsewhere(target, *args):
    """Run something on a thread of its own and return what it raised."""
    raised = []

    def run():
        try:
            target(*args)
        except RegistrationError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="elsewhere")
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_calls_are_noted_with_their_threads(registrar):
    """Operation, range, flag and thread of each call are there, in order."""
    registrar.register(4096, 8192, read_only=True)
    run_elsewhere(registrar.prepare_thread)
    run_elsewhere(registrar.register, 65536, 4096)
    registrar.unregister(4096, 8192)
    here = threading.current_thread().name
    assert (
        RegistrarCall("prepare_thread", here),
        RegistrarCall("register", here, 4096, 8192, read_only=True),
        RegistrarCall("prepare_thread", "elsewhere"),
        RegistrarCall("register", "elsewhere", 65536, 4096),
        RegistrarCall("unregister", here, 4096, 8192),
    ) == registrar.calls
    assert (5, 2, 1) == (registrar.num_calls(), registrar.num_calls("register"), registrar.num_calls("unregister"))
    assert {65536: 4096} == registrar.registered


def test_it_is_a_registrar(registrar):
    """What it offers is the whole protocol, with a name."""
    as_protocol: Registrar = registrar
    assert "scripted registrar" == as_protocol.name


def test_a_clean_life_passes_the_check(registrar):
    """Each range registered once and unregistered once, also twice in turn at one address, is right."""
    for _ in range(2):
        registrar.register(0, 4096)
        registrar.register(4096, 4096)
        registrar.unregister(0, 4096)
        registrar.unregister(4096, 4096)
    registrar.check()


def test_what_stays_registered_fails_the_check_unless_allowed(registrar):
    """A range that was never unregistered is found at the end; a quarantined arena is allowed to keep it."""
    registrar.register(4096, 8192)
    with pytest.raises(AssertionError, match="still registered: 8192 bytes at 0x1000"):
        registrar.check()
    registrar.check(allow_registered=True)


@pytest.mark.parametrize(("address", "nbytes"), [(12288, 4096), (4096, 16384), (8192, 8192), (65536, 0)])
def test_overlapping_and_empty_ranges_are_violations(registrar, address, nbytes):
    """A range that meets another one, and one of no bytes, is refused and noted."""
    registrar.register(8192, 8192)
    with pytest.raises(RegistrationError):
        registrar.register(address, nbytes)
    with pytest.raises(AssertionError, match="overlaps"):
        registrar.check(allow_registered=True)


def test_unregistering_twice_or_something_else_is_a_violation(registrar):
    """Only what is registered can be undone, as a whole and once."""
    registrar.register(0, 8192)
    with pytest.raises(RegistrationError):
        registrar.unregister(0, 4096)
    registrar.unregister(0, 8192)
    with pytest.raises(RegistrationError):
        registrar.unregister(0, 8192)
    assert ("4096 bytes at 0x0 is not registered", "8192 bytes at 0x0 is not registered any more") == (
        registrar.violations
    )


def test_a_failed_registration_registers_nothing(registrar):
    """The call that fails leaves the range free: it can be registered later, and needs no unregistering."""
    registrar.fail_at(1)
    registrar.register(0, 4096)
    with pytest.raises(RegistrationError, match="scripted failure of register 1") as raised:
        registrar.register(4096, 4096)
    assert (2, False) == (raised.value.code, raised.value.permanent)
    registrar.register(4096, 4096)
    assert {0: 4096, 4096: 4096} == registrar.registered
    assert () == registrar.violations


def test_failures_from_one_call_on_and_for_good(registrar):
    """`fail_from` fails that call and all later ones, `fail_permanently` all, with its code and remedy."""
    error = OSError("surprise")
    registrar.fail_from(1, error)
    registrar.register(0, 4096)
    for _ in range(2):
        with pytest.raises(OSError, match="surprise"):
            registrar.register(4096, 4096)
    other = ScriptedRegistrar()
    other.fail_permanently(801, "not supported", remedy="buy another")
    for _ in range(2):
        raised = run_elsewhere(other.register, 0, 4096)
        assert ("not supported", 801, "buy another", True) == (
            str(raised),
            raised.code,
            raised.remedy,
            raised.permanent,
        )


def test_unregistering_can_fail_too(registrar):
    """A range whose unregistering failed is still registered."""
    registrar.fail_at(0, operation="unregister")
    registrar.register(0, 4096)
    with pytest.raises(RegistrationError):
        registrar.unregister(0, 4096)
    assert {0: 4096} == registrar.registered


def test_ranges_above_a_size_are_refused(registrar):
    """The largest size that is allowed passes, one byte more does not."""
    registrar.refuse_above(MB)
    registrar.register(0, MB)
    with pytest.raises(RegistrationError, match="1000001 bytes are more than 1000000 in one range"):
        registrar.register(10 * MB, MB + 1)


def test_a_budget_is_shared_and_given_back():
    """What one registrar holds another cannot have, until it is unregistered."""
    budget = RegistrationBudget(3 * MB)
    first, second = ScriptedRegistrar(budget=budget), ScriptedRegistrar(budget=budget)
    first.register(0, 2 * MB)
    with pytest.raises(RegistrationError, match="more than the budget leaves"):
        second.register(0, 2 * MB)
    assert MB == budget.left_nbytes
    first.unregister(0, 2 * MB)
    second.register(0, 2 * MB)
    assert MB == budget.left_nbytes


def test_a_held_call_waits_for_its_gate(registrar):
    """The call that is held has been noted, has not registered, and does so once the gate opens."""
    gate = registrar.hold_at(0)
    thread = threading.Thread(target=lambda: (registrar.prepare_thread(), registrar.register(0, 4096)))
    thread.start()
    assert gate.wait_reached(10)
    assert (1, {}) == (registrar.num_calls("register"), registrar.registered)
    gate.release()
    thread.join(10)
    assert {0: 4096} == registrar.registered


def test_leaving_the_script_lets_go_of_all():
    """Gates open and sleeps end, those that come later too, so that no thread of a test stays behind."""
    with ScriptedRegistrar() as registrar:
        registrar.sleep_per_mb(10**6)
        gate = registrar.hold_at(0)
        thread = threading.Thread(target=lambda: (registrar.prepare_thread(), registrar.register(0, MB)))
        thread.start()
    thread.join(10)
    assert not thread.is_alive()
    registrar.hold_at(1)
    assert gate.wait_reached(0)
    registrar.unregister(0, MB)


def test_an_unprepared_thread_is_a_violation_in_and_outside_of_captures(registrar):
    """Each thread is prepared for itself; a capture that is open is named."""
    run_elsewhere(registrar.register, 0, 4096)
    with registrar.capture_window():
        registrar.register(4096, 4096)  # prepared: harmless
        run_elsewhere(registrar.register, 8192, 4096)
    registrar.register(65536, 4096)
    assert (
        "register 0 came from thread elsewhere, not prepared",
        "register 2 came from thread elsewhere, not prepared during a capture",
    ) == registrar.violations
    assert [False, False, True, True, False] == [call.in_capture for call in registrar.calls]


def test_a_capture_that_opens_during_a_call_of_an_unprepared_thread_is_hit(registrar):
    """The call need not begin inside the window."""
    for prepares in (True, False):
        gate = registrar.hold_at(int(not prepares))

        def call(prepares=prepares):
            if prepares:
                registrar.prepare_thread()
            registrar.register(2**20 * prepares, 4096)

        thread = threading.Thread(target=call, name="elsewhere")
        thread.start()
        assert gate.wait_reached(10)
        with registrar.capture_window():
            pass
        gate.release()
        thread.join(10)
    assert (
        "register 1 came from thread elsewhere, not prepared",
        "a call of thread elsewhere, not prepared, ran into a capture",
    ) == registrar.violations


def test_two_calls_at_once_are_a_violation(registrar):
    """Callers promise one thread at a time; the second one is noted."""
    gate = registrar.hold_at(0)
    thread = threading.Thread(target=lambda: (registrar.prepare_thread(), registrar.register(0, 4096)))
    thread.start()
    assert gate.wait_reached(10)
    registrar.register(4096, 4096)
    gate.release()
    thread.join(10)
    assert ("register 1 began while another call was running",) == registrar.violations
