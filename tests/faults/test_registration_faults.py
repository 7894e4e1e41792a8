"""Registrars that refuse, fail, sleep and hang: the arena always starts, always ends, and says which mode it is in."""

import fcntl
import logging
import random
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvmoor.errors import BrokenError, NoRoomError
from kvmoor.host_memory import arena as arena_module
from kvmoor.host_memory.arena import Arena, ArenaState
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.quarantine import quarantined_nbytes
from kvmoor.observation import ArenaQuarantined, RegistrationDegraded
from kvmoor.registration import RegistrationError
from kvmoor.testing import RegistrationBudget, ScriptedRegistrar

KIB, MIB = 2**10, 2**20
SLAB = 64 * KIB
quarantines = pytest.mark.usefixtures("expects_quarantine")


def plan_of(num_slabs, slab_nbytes=SLAB):
    slot_nbytes = slab_nbytes // 16
    group = GroupPlan(0, 16, slot_nbytes, 16, slab_nbytes, num_slots=16 * num_slabs)
    return ArenaPlan(num_slabs * slab_nbytes, (group,), MemoryLimits(), "refuse")


class Recorder:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)

    def of_kind(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def registrar():
    with ScriptedRegistrar() as scripted:
        yield scripted


@pytest.fixture
def recorder():
    return Recorder()


def registered_slabs(arena):
    """Return for each slab whether it is registered, and check that its slots agree."""
    flags = arena.are_registered(0, np.arange(arena.plan.groups[0].num_slots)).reshape(-1, 16)
    assert (flags.all(axis=1) == flags.any(axis=1)).all()
    return flags[:, 0].tolist()


def check_memory_works(arena):
    """Write to and read from every slot that there is, whether registered or not."""
    import ctypes

    slots = np.arange(arena.num_published(0))
    for address in arena.slot_addresses(0, slots).tolist():
        ctypes.memset(address, 7, 4096)
        assert b"\x07" * 4096 == ctypes.string_at(address, 4096)


# Refusals


@pytest.mark.parametrize("failing", range(5))
def test_a_refused_slab_is_staged_and_the_others_are_undone_once(registrar, failing):
    """Whichever slab fails, its slots work and are not called registered, and it is never unregistered (B01)."""
    registrar.fail_at(failing)
    with Arena(plan_of(5), registrar=registrar) as arena:
        assert arena.wait_mapped(10)
        assert not arena.wait_registered(60)
        assert [slab != failing for slab in range(5)] == registered_slabs(arena)
        check_memory_works(arena)
    assert (5, 4) == (registrar.num_calls("register"), registrar.num_calls("unregister"))
    registrar.check()


def test_a_limit_of_one_range_is_met_by_slabs(registrar):
    """No call asks for more than one slab, so a limit of one range above that is never met, however large the pool."""
    registrar.refuse_above(SLAB)
    with Arena(plan_of(48), registrar=registrar) as arena:
        assert arena.wait_registered(10)
    registrar.check()


def test_ranges_above_a_size_end_in_staging(registrar, recorder):
    """Where even a slab is too large the arena gives up after three in a row and works without."""
    registrar.refuse_above(SLAB - 1)
    with Arena(plan_of(6), registrar=registrar, observer=recorder) as arena:
        assert arena.wait_mapped(10)
        assert [False] * 6 == registered_slabs(arena)
        assert (3, "staging") == (registrar.num_calls("register"), arena.statistics().registration_mode)
        check_memory_works(arena)
    assert 0 == registrar.num_calls("unregister")
    (event,) = recorder.of_kind(RegistrationDegraded)
    assert "scripted registrar refused to page-lock host memory: 3 times in a row, last 65536 bytes" in event.reason
    assert "(driver code 2)" in event.reason
    assert 'pass pin="off"' in event.remedy


def test_failures_count_only_in_a_row(registrar, recorder):
    """Two failures, a success and two failures are four staged slabs and no reason to give up."""
    for failing in (0, 1, 3, 4):
        registrar.fail_at(failing)
    with Arena(plan_of(7), registrar=registrar, observer=recorder) as arena:
        assert arena.wait_mapped(10)
        assert [False, False, True, False, False, True, True] == registered_slabs(arena)
        statistics = arena.statistics()
        assert ("registered", 4, 4 * SLAB) == (
            statistics.registration_mode,
            statistics.failed_registrations,
            statistics.staged_nbytes,
        )
    assert [] == recorder.of_kind(RegistrationDegraded)
    registrar.check()


def test_a_platform_without_registration_is_a_mode(registrar, recorder, caplog):
    """801 for everything: one call, the pool works, and it is said once, with code, cause and remedy (B04)."""
    registrar.fail_permanently(801, "operation not supported")
    with caplog.at_level(logging.INFO, "kvmoor"), Arena(plan_of(6), registrar=registrar, observer=recorder) as arena:
        assert arena.wait_mapped(10)
        check_memory_works(arena)
        statistics = arena.statistics()
        assert ("staging", 0, 6 * SLAB) == (
            statistics.registration_mode,
            statistics.registered_nbytes,
            statistics.staged_nbytes,
        )
    assert ["prepare_thread", "register"] == [call.operation for call in registrar.calls]
    (event,) = recorder.of_kind(RegistrationDegraded)
    assert statistics.registration_reason == event.reason
    for part in ("operation not supported", "driver code 801", "confidential computing", "ulimit -l"):
        assert part in event.reason
    assert "without confidential computing" in event.remedy
    (record,) = caplog.records
    assert logging.WARNING == record.levelno
    assert event.reason in record.getMessage()
    assert event.remedy in record.getMessage()


def test_the_registrars_own_remedy_is_passed_on(registrar, recorder):
    """Whoever knows the driver knows better what helps."""
    registrar.fail_permanently(999, "no", remedy="turn it off and on")
    with Arena(plan_of(1), registrar=registrar, observer=recorder, pin="eager"):
        assert ["turn it off and on"] == [event.remedy for event in recorder.of_kind(RegistrationDegraded)]


def test_the_limit_of_locked_memory_is_reported_and_is_no_reason(recorder):
    """With 64 KiB allowed a registrar that does not care registers all; a refusal names the limit once (B13)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KIB, hard))
    try:
        with ScriptedRegistrar() as registrar, Arena(plan_of(4), registrar=registrar) as arena:
            assert arena.wait_registered(10)
        with ScriptedRegistrar() as registrar:
            registrar.fail_from(0)
            with Arena(plan_of(4), registrar=registrar, observer=recorder) as arena:
                assert arena.wait_mapped(10)
                check_memory_works(arena)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    (event,) = recorder.of_kind(RegistrationDegraded)
    assert "ulimit -l, is 65.5 kB, and page-locking for a device does not depend on it" in event.reason


def test_a_refusal_after_cancelling_is_not_reported_as_degradation(registrar, recorder):
    """What the user stopped did not degrade: the reason stays that it was cancelled."""
    registrar.fail_permanently(801)
    gate = registrar.hold_at(0)
    with Arena(plan_of(3), registrar=registrar, observer=recorder) as arena:
        assert gate.wait_reached(10)
        arena.cancel_registration()
        gate.release()
        assert arena.wait_mapped(10)
        statistics = arena.statistics()
        assert (1, "page-locking was cancelled") == (
            statistics.failed_registrations,
            statistics.registration_reason,
        )
    assert [] == recorder.of_kind(RegistrationDegraded)


def test_a_failure_leaves_nothing_behind_for_the_next_call():
    """A tolerated failure is over when its call is: the next registration of that thread is not blamed for it (B03)."""

    class StickyRuntime(ScriptedRegistrar):
        """A runtime that keeps the last error of each thread until somebody asks, and a registrar that asks."""

        def __init__(self):
            super().__init__()
            self.last_error = threading.local()

        def register(self, address, nbytes, *, read_only=False):
            pending = getattr(self.last_error, "code", 0)
            assert not pending, "an older error is reported here"
            try:
                super().register(address, nbytes, read_only=read_only)
            except RegistrationError as error:
                self.last_error.code = error.code
                del self.last_error.code  # "report and clear", on the same thread and through the same handle
                raise

    registrar = StickyRuntime()
    for failing in (0, 2):
        registrar.fail_at(failing)
    with Arena(plan_of(4), registrar=registrar) as arena:
        assert arena.wait_mapped(10)
        assert [False, True, False, True] == registered_slabs(arena)
        assert 2 == arena.statistics().failed_registrations
    registrar.check()


@quarantines
def test_a_registrar_with_a_bug_proves_nothing(registrar, recorder):
    """An error that promises nothing may have registered the range: staging from then on, and quarantine at the end."""
    registrar.fail_at(2, ZeroDivisionError("bug"))
    arena = Arena(plan_of(5), registrar=registrar, observer=recorder)
    assert arena.wait_mapped(10)
    assert [True, True, False, False, False] == registered_slabs(arena)
    check_memory_works(arena)
    (event,) = recorder.of_kind(RegistrationDegraded)
    assert "ZeroDivisionError: bug" in event.reason
    assert not arena.close(10)
    assert ArenaState.QUARANTINED is arena.state
    assert 2 == registrar.num_calls("unregister")
    (event,) = recorder.of_kind(ArenaQuarantined)
    assert "slab 2 (65.5 kB) may be registered (ZeroDivisionError: bug)" in event.reason
    registrar.check()


@pytest.mark.parametrize("error", [RegistrationError("no context"), OSError("no context")])
def test_a_thread_that_cannot_be_prepared_registers_nothing(registrar, recorder, error):
    """A thread that could break a capture makes no call; the arena is staged, and closes whole."""
    registrar.fail_from(0, error, operation="prepare_thread")
    with Arena(plan_of(5), registrar=registrar, observer=recorder) as arena:
        assert arena.wait_mapped(10)
        assert 5 * SLAB == arena.statistics().staged_nbytes
    assert arena.closed
    assert 0 == registrar.num_calls("register")
    assert "no context" in recorder.of_kind(RegistrationDegraded)[0].reason


def test_an_eager_arena_starts_degraded_rather_than_not_at_all(registrar, recorder):
    """Refusals are no reason for an eager constructor to fail: it returns in staging mode."""
    registrar.fail_from(2)
    with Arena(plan_of(8), registrar=registrar, observer=recorder, pin="eager") as arena:
        assert [True, True] + [False] * 6 == registered_slabs(arena)
        assert 1 == len(recorder.of_kind(RegistrationDegraded))
    registrar.check()


# Ranks of one host


def test_each_rank_ends_in_one_state_whoever_is_refused():
    """One of four ranks is refused: each is registered whole or says that it is staging, and undoes all (B02)."""
    for seed in range(200):
        rng = random.Random(seed)
        refused, from_slab = rng.randrange(4), rng.randrange(4)
        registrars = [ScriptedRegistrar() for _ in range(4)]
        registrars[refused].fail_from(from_slab)
        arenas = [Arena(plan_of(6), registrar=registrar) for registrar in registrars]
        for rank, arena in enumerate(arenas):
            assert arena.wait_mapped(10)
            statistics = arena.statistics()
            expected = ("staging", from_slab * SLAB) if rank == refused else ("registered", 6 * SLAB)
            assert expected == (statistics.registration_mode, statistics.registered_nbytes), seed
            assert statistics.nbytes == statistics.registered_nbytes + statistics.staged_nbytes
        for arena, registrar in zip(arenas, registrars, strict=True):
            assert arena.close(10)
            registrar.check()


def test_a_budget_that_admits_five_of_eight_ranks_is_survived():
    """With too little for all, every rank starts, no more than there is is held, and all is given back (B05)."""
    budget = RegistrationBudget(5 * 6 * SLAB)
    registrars = [ScriptedRegistrar(budget=budget) for _ in range(8)]
    started = time.monotonic()
    arenas = [Arena(plan_of(6), registrar=registrar, name=f"rank{rank}") for rank, registrar in enumerate(registrars)]
    for arena in arenas:
        assert arena.wait_mapped(10)
        check_memory_works(arena)
    assert time.monotonic() - started < 10
    modes = [arena.statistics().registration_mode for arena in arenas]
    assert "staging" in modes
    assert 30 * SLAB == sum(arena.statistics().registered_nbytes for arena in arenas) + budget.left_nbytes
    assert budget.left_nbytes < SLAB
    for arena, registrar in zip(arenas, registrars, strict=True):
        assert arena.close(10)
        registrar.check()
    assert 30 * SLAB == budget.left_nbytes


# Slow and hanging registrars


def test_slots_are_usable_long_before_a_slow_pin_ends(registrar):
    """50 ms a MB: the first slots come after the first slab, and closing in the midst takes one slab (B06)."""
    registrar.sleep_per_mb(0.05)
    started = time.monotonic()
    with Arena(plan_of(32, 2 * MIB), registrar=registrar) as arena:
        assert arena.wait_published(10)
        assert time.monotonic() - started < 1.6  # all of it takes 3.4 s
        assert not arena.wait_registered(0)
        check_memory_works(arena)
        closing = time.monotonic()
        assert arena.close(2)
        assert time.monotonic() - closing < 2
    assert registrar.num_calls("register") < 20
    registrar.check()


def test_a_failure_in_the_midst_of_a_slow_pin_ends_it(registrar):
    """What is not registered by then is published at once, and nothing of it stays registered after the end (B06)."""
    registrar.sleep_per_mb(0.05)
    registrar.fail_permanently(801)
    with Arena(plan_of(32, 2 * MIB), registrar=registrar) as arena:
        assert arena.wait_mapped(2)
        assert "staging" == arena.statistics().registration_mode
    registrar.check()


@quarantines
@pytest.mark.parametrize("timeout_s", [0.0, 0.1])
def test_a_registration_that_never_ends_cannot_hold_up_close(registrar, recorder, timeout_s):
    """Close returns False by its deadline, the memory stays, and the registrar gets no further call, ever."""
    gate = registrar.hold_at(2)
    arena = Arena(plan_of(5), registrar=registrar, observer=recorder, name="stuck")
    assert gate.wait_reached(10)
    before = quarantined_nbytes()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvmoor-mapper-stuck"]
    started = time.monotonic()
    assert not arena.close(timeout_s)
    assert time.monotonic() - started < timeout_s + 0.05
    assert ArenaState.QUARANTINED is arena.state
    (event,) = recorder.of_kind(ArenaQuarantined)
    assert "registering slab 2 (65.5 kB) did not end in time" == event.reason
    assert arena.mapped_nbytes == event.nbytes == quarantined_nbytes() - before >= 3 * SLAB
    num_calls = registrar.num_calls()
    gate.release()  # the late success meets memory, and nobody
    thread.join(10)
    assert not thread.is_alive()
    assert not arena.close(10)
    assert num_calls == registrar.num_calls()
    assert 32 == arena.num_published(0)
    registrar.check(allow_registered=True)


@quarantines
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("operation", ["unregister", "prepare_thread"])
def test_an_unregistration_that_never_ends_cannot_hold_up_close(registrar, recorder, operation, index):
    """Host unregister blocks behind a hung stream: False by the deadline, still mapped, no further call afterwards."""
    if operation == "prepare_thread":
        index = 1  # of the thread that unregisters
    gate = registrar.hold_at(index, operation=operation)
    arena = Arena(plan_of(5), registrar=registrar, observer=recorder, pin="eager", name="stuck")
    started = time.monotonic()
    assert not arena.close(0.1)
    assert time.monotonic() - started < 0.15
    assert gate.wait_reached(0)
    (event,) = recorder.of_kind(ArenaQuarantined)
    assert "did not end in time" in event.reason
    assert 5 * SLAB == event.nbytes
    num_calls = registrar.num_calls()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvmoor-unregister-stuck"]
    assert thread.daemon
    gate.release()
    thread.join(10)
    assert not thread.is_alive()
    assert num_calls == registrar.num_calls()
    assert not arena.close(10)
    registrar.check(allow_registered=True)


@quarantines
def test_a_range_that_cannot_be_unregistered_is_quarantined(registrar, recorder):
    """The others are undone once each, nothing is unmapped, and the reason names the range and the driver's answer."""
    registrar.fail_at(1, operation="unregister")
    arena = Arena(plan_of(4), registrar=registrar, observer=recorder, pin="eager")
    assert not arena.close(10)
    assert not arena.close(10)
    assert (4, 1) == (registrar.num_calls("unregister"), len(registrar.registered))
    (event,) = recorder.of_kind(ArenaQuarantined)
    assert "could not be unregistered (scripted failure of unregister 1 (driver code 2))" in event.reason


@quarantines
def test_a_quarantined_arena_makes_no_call(registrar):
    """Where copies may still run nothing is unregistered, and a slab that waits for its turn is not registered."""
    arena = Arena(plan_of(4), registrar=registrar, pin="eager")
    num_calls = registrar.num_calls()
    arena.quarantine("a copy never ended")
    assert not arena.close(10)
    assert num_calls == registrar.num_calls()
    with ScriptedRegistrar() as other:
        gate = other.hold_at(0)
        arena = Arena(plan_of(4), registrar=other, name="waiting")
        assert gate.wait_reached(10)
        arena.quarantine("a copy never ended")
        gate.release()
        for thread in threading.enumerate():
            if thread.name == "kvmoor-mapper-waiting":
                thread.join(10)
        assert (2, 0) == (other.num_calls(), arena.num_published(0))


def test_a_registration_that_ends_while_closing_is_undone(registrar):
    """Close waits for the running call within its deadline, and what it registered is unregistered too."""
    gate = registrar.hold_at(1)
    arena = Arena(plan_of(4), registrar=registrar)
    assert gate.wait_reached(10)
    closer = threading.Thread(target=arena.close, args=(30,))
    closer.start()
    assert not arena.wait_mapped(60)  # ends when closing has begun
    gate.release()
    closer.join(10)
    assert arena.closed
    assert (2, 2) == (registrar.num_calls("register"), registrar.num_calls("unregister"))
    registrar.check()


@quarantines
def test_no_thread_to_unregister_with_is_quarantine(registrar, recorder, monkeypatch):
    """A caller's thread could block for ever, so without a thread of its own nothing is unregistered or unmapped."""
    arena = Arena(plan_of(4), registrar=registrar, observer=recorder, pin="eager")

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not arena.close(10)
    assert 0 == registrar.num_calls("unregister")
    assert "can't start new thread" in recorder.of_kind(ArenaQuarantined)[0].reason


@quarantines
def test_an_eager_constructor_does_not_wait_for_ever(registrar, monkeypatch):
    """If nothing becomes of any slab for minutes it raises, names the call that hangs, and quarantines the rest."""
    monkeypatch.setattr(arena_module, "_EAGER_STALL_S", 0.2)
    monkeypatch.setattr(arena_module.Arena.close, "__defaults__", (0.1,))
    registrar.hold_at(3)
    before = quarantined_nbytes()
    with pytest.raises(BrokenError, match=r'registering slab 3.*page-locks memory, or pass pin="background"'):
        Arena(plan_of(5), registrar=registrar, pin="eager")
    assert before < quarantined_nbytes()


def test_a_constructor_that_fails_undoes_what_was_registered(registrar):
    """An eager arena one of whose groups gets no slot unregisters the slabs of the others before it raises."""

    class FullOnce(SystemCalls):
        num_touches = 0

        def memset(self, address, nbytes):
            self.num_touches += 1
            if self.num_touches == 2:  # the only slab of group 1
                raise OSError(12, "Cannot allocate memory")
            super().memset(address, nbytes)

    groups = (GroupPlan(0, 16, 4 * KIB, 16, SLAB, 48), GroupPlan(1, 16, 4 * KIB, 16, SLAB, 16, offset=2 * MIB))
    plan = ArenaPlan(4 * MIB, groups, MemoryLimits(), "refuse")
    with pytest.raises(NoRoomError, match="no slot of group 1"):
        Arena(plan, registrar=registrar, pin="eager", calls=FullOnce())
    assert (3, 3) == (registrar.num_calls("register"), registrar.num_calls("unregister"))
    registrar.check()


# Captures and neighbours


def test_no_call_falls_into_a_capture_window_while_paused():
    """500 windows at random moments: with the pause held not one call is inside, and all ends registered (B15).

    A window that nobody announces is harmless too: each thread is prepared before its first call (B16).
    """
    for seed in range(500):
        rng = random.Random(seed)
        with ScriptedRegistrar() as registrar:
            registrar.sleep_per_mb(rng.choice([0, 0.002]))
            with Arena(plan_of(5), registrar=registrar) as arena:
                with registrar.capture_window():
                    arena.wait_published(rng.choice([0, 0.0003, 0.001]))
                assert arena.pause_registration(10)
                with registrar.capture_window():
                    before = registrar.calls
                    arena.wait_registered(rng.choice([0, 0.0005]))
                    assert before == registrar.calls, seed
                arena.resume_registration()
                assert arena.wait_registered(10), seed
            registrar.check()


NEIGHBOUR = """
import fcntl, pathlib, sys, time
lock, stop = open(sys.argv[1], "w"), pathlib.Path(sys.argv[2])
while not stop.exists():
    started = time.monotonic()
    fcntl.flock(lock, fcntl.LOCK_EX)
    print(time.monotonic() - started, flush=True)
    fcntl.flock(lock, fcntl.LOCK_UN)
    time.sleep(0.01)
"""


def test_a_neighbour_gets_the_drivers_lock_between_two_slabs(tmp_path):
    """While 64 slabs are registered another process that wants the same lock waits for one call, not for all (B07)."""
    lock_path, stop_path = tmp_path / "lock", tmp_path / "stop"
    slab_s = 0.02

    class LockedRegistrar(ScriptedRegistrar):
        def register(self, address, nbytes, *, read_only=False):
            with lock_path.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().register(address, nbytes, read_only=read_only)

    command = [sys.executable, "-c", NEIGHBOUR, str(lock_path), str(stop_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour, LockedRegistrar() as registrar:
        try:
            assert neighbour.stdout.readline()  # it runs
            registrar.sleep_per_mb(slab_s / SLAB * 1e6)
            with Arena(plan_of(64), registrar=registrar) as arena:
                assert arena.wait_registered(60)
        finally:
            stop_path.touch()
            output, _ = neighbour.communicate(timeout=30)
    waits = [float(line) for line in output.splitlines()]
    # On an idle machine one slab is waited for at most. A busy one wakes the neighbour late, and then it misses turns,
    # but never all of them.
    assert len(waits) > 10
    assert np.percentile(waits, 50) < 5 * slab_s
    assert max(waits) < 32 * slab_s
    registrar.check()
