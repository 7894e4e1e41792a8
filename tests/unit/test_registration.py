"""An arena page-locks what it publishes: when, on which thread, at what pace, and how it can be held up."""

import threading

import numpy as np
import pytest

from kvmoor.errors import RequestError, SettingsError
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.pacing import Clock, StepPacer
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.observation import SlotsPublished
from kvmoor.testing import ScriptedRegistrar
from kvmoor.transfer_messages import SlotRange

KIB, MIB = 2**10, 2**20
SLAB = 64 * KIB
both_backings = pytest.mark.parametrize("backing", list(Backing))
both_pins = pytest.mark.parametrize("pin", ["background", "eager"])


def plan_of(num_slabs):
    """Plan slabs of 16 slots, the last one half as large, and a group without tensors."""
    groups = (GroupPlan(0, 16, 4 * KIB, 16, SLAB, num_slots=16 * num_slabs - 8), GroupPlan(1, 16, 0, 0, 0, 80, 2 * MIB))
    return ArenaPlan(2 * MIB, groups, MemoryLimits(), "refuse")


class Recorder:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)


@pytest.fixture
def registrar():
    with ScriptedRegistrar() as scripted:
        yield scripted
    scripted.check()


@both_backings
@both_pins
def test_each_slab_is_registered_whole_and_undone_once(registrar, backing, pin):
    """The ranges are the slabs, in their order, and closing undoes each of them once."""
    plan = plan_of(4)
    with Arena(plan, backing=backing, registrar=registrar, pin=pin) as arena:
        assert arena.wait_registered(10)
        base = int(arena.slot_addresses(0, np.array([0]))[0])
        assert {base + slab.offset: slab.nbytes for slab in plan.slabs} == registrar.registered
        registered = [call.address for call in registrar.calls if call.operation == "register"]
        assert sorted(registered) == registered
        assert not any(call.read_only for call in registrar.calls)
    assert (4, 4) == (registrar.num_calls("register"), registrar.num_calls("unregister"))


@both_pins
def test_the_users_threads_never_meet_the_registrar(registrar, pin):
    """All calls come from threads of the arena, each prepared before its first one, one for each purpose (B16)."""
    Arena(plan_of(3), registrar=registrar, pin=pin, name="a").close()
    with Arena(plan_of(3), registrar=registrar, pin=pin, name="b") as arena:
        assert arena.wait_registered(10)
    calls = [(call.operation, call.thread) for call in registrar.calls if call.thread.endswith("-b")]
    mapper, undoer = "kvmoor-mapper-b", "kvmoor-unregister-b"
    assert [("prepare_thread", mapper), *[("register", mapper)] * 3] == calls[:4]
    assert [("prepare_thread", undoer), *[("unregister", undoer)] * 3] == calls[4:]
    assert {call.thread[: call.thread.rindex("-")] for call in registrar.calls} <= {mapper[:-2], undoer[:-2]}


def test_slots_are_seen_only_after_they_are_registered(registrar):
    """While the second slab is being registered, the first can be used and the second does not exist yet."""
    gate = registrar.hold_at(1)
    with Arena(plan_of(3), registrar=registrar) as arena:
        assert gate.wait_reached(10)
        assert [SlotRange(1, 0, 80), SlotRange(0, 0, 16)] == arena.take_published()
        assert [True, False] == arena.are_registered(0, np.array([15, 16])).tolist()
        assert not arena.wait_mapped(0)
        assert not arena.wait_registered(0)
        gate.release()
        assert arena.wait_registered(10)
        assert arena.wait_mapped(0)
        assert arena.are_registered(0, np.arange(40)).all()


def test_published_slots_tell_whether_they_are_registered(registrar):
    """The event says it for each range, and the statistics add it up."""
    registrar.fail_at(1)
    recorder = Recorder()
    with Arena(plan_of(3), registrar=registrar, observer=recorder) as arena:
        assert arena.wait_mapped(10)
        assert [(1, True), (0, True), (0, False), (0, True)] == [
            (event.group, event.registered) for event in recorder.events if isinstance(event, SlotsPublished)
        ]
        statistics = arena.statistics()
        assert (SLAB + SLAB // 2, SLAB, 1) == (
            statistics.registered_nbytes,
            statistics.staged_nbytes,
            statistics.failed_registrations,
        )
        assert "registered" == statistics.registration_mode
        assert "scripted failure of register 1 (driver code 2)" == statistics.registration_reason
    statistics = arena.statistics()
    assert (0, 0) == (statistics.registered_nbytes, statistics.staged_nbytes)


def test_without_a_registrar_everything_is_direct():
    """A device that reaches plain memory has nothing to register: all slots count as usable directly."""
    recorder = Recorder()
    with Arena(plan_of(3), observer=recorder) as arena:
        assert arena.wait_registered(10)
        assert arena.are_registered(0, np.arange(40)).all()
        statistics = arena.statistics()
        assert ("direct", "", 0, 0, 0) == (
            statistics.registration_mode,
            statistics.registration_reason,
            statistics.registered_nbytes,
            statistics.staged_nbytes,
            statistics.failed_registrations,
        )
        assert all(event.registered for event in recorder.events)
        assert arena.pause_registration(0)
        arena.resume_registration()
        arena.cancel_registration()
        assert "direct" == arena.statistics().registration_mode


def test_switched_off_nothing_is_registered(registrar):
    """With pin "off" the registrar gets no call, all slots are staged, and nobody waits for registrations."""
    with Arena(plan_of(3), registrar=registrar, pin="off") as arena:
        assert arena.wait_mapped(10)
        assert not arena.wait_registered(10)
        assert not arena.are_registered(0, np.arange(40)).any()
        statistics = arena.statistics()
        assert ("staging", "page-locking is switched off") == (
            statistics.registration_mode,
            statistics.registration_reason,
        )
        assert (0, arena.nbytes) == (statistics.registered_nbytes, statistics.staged_nbytes)
    assert 0 == registrar.num_calls()


def test_eager_registers_all_before_it_returns(registrar):
    """When the constructor is done, so is the page-locking, whatever `mapping` says."""
    with Arena(plan_of(5), registrar=registrar, pin="eager", mapping="background") as arena:
        assert 5 == len(registrar.registered)
        assert arena.wait_registered(0)
        assert arena.wait_mapped(0)
        assert arena.mapped_nbytes == arena.nbytes == arena.statistics().registered_nbytes


def test_mapping_eagerly_may_register_in_the_background(registrar):
    """All slabs are published when the constructor returns; that includes their registration, in their order."""
    with Arena(plan_of(5), registrar=registrar, mapping="eager") as arena:
        assert arena.wait_registered(0)


@pytest.mark.parametrize("pin", ["", "lazy", None])
def test_other_ways_to_pin_are_refused(pin):
    """A wrong option is an error before anything is allocated, and names the right ones."""
    with pytest.raises(SettingsError, match='give "background", "eager" or "off"'):
        Arena(plan_of(1), pin=pin)


def test_slots_that_do_not_exist_are_not_registered(registrar):
    """Numbers outside are False, groups without tensors True, and a wrong group is a RequestError."""
    with Arena(plan_of(2), registrar=registrar, pin="eager") as arena:
        assert [False, True, True, False] == arena.are_registered(0, np.array([-1, 0, 23, 24])).tolist()
        assert [[True, True]] == arena.are_registered(1, np.array([[0, 79]])).tolist()
        assert (0,) == arena.are_registered(0, np.array([], np.int64)).shape
        with pytest.raises(RequestError, match="group 2 does not exist"):
            arena.are_registered(2, np.array([0]))


def test_while_paused_mapping_goes_on_without_a_call(registrar):
    """Pause returns when the running call has ended, no other begins, memory is touched; resuming goes on."""
    gate = registrar.hold_at(1)
    with Arena(plan_of(4), registrar=registrar) as arena:
        assert gate.wait_reached(10)
        answers = []
        pausing = threading.Thread(target=lambda: answers.append(arena.pause_registration(30)))
        pausing.start()
        assert not arena.pause_registration(0)  # that call is still running
        gate.release()
        pausing.join(10)
        assert [True] == answers
        num_calls = registrar.num_calls()
        with arena._mapper._changed:
            assert arena._mapper._changed.wait_for(lambda: arena.mapped_nbytes == arena.nbytes, 10)
        assert not arena.wait_registered(0)
        assert 32 == arena.num_published(0)
        arena.resume_registration()
        assert not arena.wait_registered(0.02)  # one pause is left
        assert num_calls == registrar.num_calls()
        arena.resume_registration()
        assert arena.wait_registered(10)
        arena.resume_registration()  # one too many is harmless
        assert arena.pause_registration(0)


def test_a_pause_before_the_first_call_keeps_the_registrar_untouched(registrar):
    """Not even the thread is prepared, and closing a paused arena needs no resume."""
    mapping, let_go = threading.Event(), threading.Event()

    class HeldCalls(SystemCalls):
        def memset(self, address, nbytes):
            mapping.set()
            assert let_go.wait(30)
            super().memset(address, nbytes)

    arena = Arena(plan_of(3), registrar=registrar, calls=HeldCalls())
    assert mapping.wait(10)
    assert arena.pause_registration(0)
    let_go.set()
    with arena._mapper._changed:
        assert arena._mapper._changed.wait_for(lambda: arena.mapped_nbytes == arena.nbytes, 10)
    assert arena.close(10)
    assert 0 == registrar.num_calls()


def test_closing_ends_a_pause_for_what_is_registered(registrar):
    """A paused arena is undone and unmapped like any other: close does not wait for a resume."""
    arena = Arena(plan_of(3), registrar=registrar, pin="eager")
    assert arena.pause_registration(0)
    assert arena.close(10)
    assert 3 == registrar.num_calls("unregister")


def test_cancelling_takes_effect_within_one_slab(registrar):
    """The slab under way ends registered, all others are published staged, and what is registered stays."""
    gate = registrar.hold_at(1)
    with Arena(plan_of(5), registrar=registrar) as arena:
        assert gate.wait_reached(10)
        arena.cancel_registration()
        arena.cancel_registration()
        assert not arena.wait_registered(60)  # known at once
        gate.release()
        assert arena.wait_mapped(10)
        assert [True] * 32 + [False] * 40 == arena.are_registered(0, np.arange(72)).tolist()
        assert (2, 2) == (registrar.num_calls("register"), len(registrar.registered))
        statistics = arena.statistics()
        assert ("staging", "page-locking was cancelled") == (
            statistics.registration_mode,
            statistics.registration_reason,
        )


def test_cancelling_while_paused_publishes_all_at_once(registrar):
    """Slabs that wait for the end of a pause are not held back by it any more."""
    gate = registrar.hold_at(0)
    with Arena(plan_of(5), registrar=registrar) as arena:
        assert gate.wait_reached(10)
        arena.pause_registration(0)
        gate.release()
        arena.cancel_registration()
        assert arena.wait_mapped(10)
        assert SLAB == arena.statistics().registered_nbytes


def test_closing_wakes_those_who_wait_for_registrations(registrar):
    """A waiter gets False when the arena closes, not at its deadline."""
    arena = Arena(plan_of(5), registrar=registrar)
    arena.pause_registration()
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(arena.wait_registered(60)))
    waiter.start()
    assert arena.close(10)
    waiter.join(10)
    assert not waiter.is_alive()
    assert answers in ([False], [True])  # true only if all five were faster than the pause


def test_ranges_are_undone_before_their_memory_goes(registrar):
    """No munmap comes before the last unregistration: a device that maps pages which are gone reads wrong bytes."""
    unregistered_by_then = []

    class NotedCalls(SystemCalls):
        def munmap(self, address, nbytes):
            unregistered_by_then.append(registrar.num_calls("unregister"))
            super().munmap(address, nbytes)

    with Arena(plan_of(4), registrar=registrar, pin="eager", calls=NotedCalls()):
        unregistered_by_then.clear()  # a reservation is trimmed with munmap too
    assert {4} == set(unregistered_by_then)


class SimulatedClock(Clock):
    """Time passes only while the mapping thread waits; meanwhile an engine steps, if it has a step length."""

    def __init__(self):
        self.seconds = 1024.0
        self.step_s = None
        self.num_steps_left = 0
        self.next_step = self.seconds
        self.pacer = StepPacer(self)

    def now(self):
        return self.seconds

    def wait(self, changed, timeout_s):
        end = self.seconds + max(timeout_s, 1e-9)
        while self.num_steps_left and self.next_step <= end:
            self.seconds = max(self.seconds, self.next_step)
            self.pacer.note_step()
            self.num_steps_left -= 1
            self.next_step += self.step_s
        self.seconds = end

    def begin_steps(self, step_s, count):
        """Let the engine have made nine steps, and make more whenever time passes."""
        self.step_s, self.num_steps_left = step_s, count
        for _ in range(9):
            self.pacer.note_step()
            self.seconds += step_s
        self.next_step = self.seconds


class TimedRegistrar(ScriptedRegistrar):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.times = []

    def register(self, address, nbytes, *, read_only=False):
        self.times.append(self.clock.seconds)
        super().register(address, nbytes, read_only=read_only)


@pytest.fixture
def clock():
    return SimulatedClock()


def intervals_ms(clock, num_slabs):
    """Register slabs and return the times between the calls in milliseconds."""
    registrar = TimedRegistrar(clock)
    with Arena(plan_of(num_slabs), registrar=registrar, pacer=clock.pacer) as arena:
        assert arena.wait_registered(30)
    registrar.check()
    return (np.diff(registrar.times) * 1e3).round(3).tolist()


def test_while_the_engine_idles_registrations_follow_one_another(clock):
    """Only the breath of a millisecond is between two of them."""
    assert [1.0] * 7 == intervals_ms(clock, 8)


def test_while_the_engine_steps_there_is_one_registration_in_50_ms(clock):
    """It is neither more often nor less often, whatever the step length above two milliseconds."""
    clock.begin_steps(0.010, 10**6)
    assert [50.0] * 7 == intervals_ms(clock, 8)


@pytest.mark.parametrize(("stutter_s", "fewest_ms"), [(0.0, 112.5), (0.030, 142.5)])
def test_short_steps_are_left_alone_for_hundreds(clock, stutter_s, fewest_ms):
    """250 steps of 0.45 ms are longer than 50 ms, and they come first, however long the engine stutters between."""
    clock.begin_steps(0.00045, 10**6)
    clock.next_step += stutter_s
    assert fewest_ms - 0.5 <= intervals_ms(clock, 2)[0] <= fewest_ms + 1.0


def test_full_speed_comes_back_when_the_engine_idles(clock):
    """After its last step the engine counts as stepping for 100 ms; from then on the rest goes at full speed."""
    clock.begin_steps(0.010, 12)
    # Steps at 0, 10 ... 110 ms after the first registration: idle from 210 ms on.
    assert [50.0, 50.0, 50.0, 50.0, 10.0, 1.0, 1.0, 1.0, 1.0] == intervals_ms(clock, 10)


def test_steps_are_noted_by_the_arena(clock):
    """`note_step` of the arena is the pacer's input."""
    with Arena(plan_of(1), pacer=clock.pacer) as arena:
        arena.pacer.note_step()
        arena.pacer.note_step()
    assert 2 == clock.pacer._steps_since_registration


def test_mapping_does_not_wait_for_the_pace(registrar):
    """While slabs wait for their turn the next ones are touched, so that pacing costs no time on top of mapping."""

    class StoppedClock(Clock):
        waits = threading.Event()

        def wait(self, changed, timeout_s):
            self.waits.set()
            changed.wait(30)

        def now(self):
            return 1024.0

    clock = StoppedClock()
    pacer = StepPacer(clock)
    pacer.note_step()
    pacer.note_registration()
    with Arena(plan_of(6), registrar=registrar, pacer=pacer) as arena:
        assert clock.waits.wait(10)
        assert arena.mapped_nbytes == arena.nbytes
        assert 0 == arena.num_published(0)
        assert 0 == registrar.num_calls()
