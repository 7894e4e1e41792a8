import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest

import leak_check
from kvmoor.errors import KvmoorError, NoRoomError, RequestError
from kvmoor.host_memory.arena import Arena, ArenaState
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import KEPT_FREE_NBYTES, MemoryLimits
from kvmoor.host_memory.pacing import BREATH_S, Clock, StepPacer
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.quarantine import quarantined_nbytes
from kvmoor.host_memory.slab_mapper import SlabMapper
from kvmoor.host_memory.slab_memory import Backing, SlabMemory
from kvmoor.observation import ArenaQuarantined, MappingFailed, SlotsPublished
from kvmoor.testing import ScriptedRegistrar
from kvmoor.transfer_messages import SlotRange

KIB, MIB = 2**10, 2**20
both_backings = pytest.mark.parametrize("backing", list(Backing))
KINDS_OF_CALL = {name for name in vars(SystemCalls) if not name.startswith("_")}
GIVING_BACK = {"munmap", "close", "punch_hole"}
HUGE_PAGE_ADVICE = {mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE}


def make_plan(memory_check="refuse"):
    """Plan 3 slabs for one group and 1 slab for another."""
    groups = (
        GroupPlan(0, 16, 64 * KIB, 32, 2 * MIB, num_slots=80),
        GroupPlan(1, 16, 4 * KIB, 512, 2 * MIB, num_slots=80, offset=6 * MIB),
    )
    return ArenaPlan(6 * MIB, groups, MemoryLimits(), memory_check)


class CountedCalls(SystemCalls):
    """Note the name of every system call, and raise at one of them, or at all of one kind."""

    failed_advice = None

    def __init__(self, fail_at=None, error=None):
        self.names = []
        for name in KINDS_OF_CALL:
            setattr(self, name, self.wrap(name, fail_at, error))

    def wrap(self, name, fail_at, error):
        real = getattr(super(), name)

        def call(*args):
            number = len(self.names)
            self.names.append(name)
            if fail_at in {number, name}:
                if name == "madvise":
                    self.failed_advice = args[2]
                raise error
            return real(*args)

        return call


class Recorder:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)

    def of_kind(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def calls_of_an_eager_arena(backing):
    calls = CountedCalls()
    Arena(make_plan(), backing=backing, mapping="eager", calls=calls).close()
    return calls.names


def test_the_list_of_injected_calls_is_complete():
    """Each kind of system call is made by one of the two backings, so that none escapes the tests below.

    A hole is punched only after a failure; the others belong to a placement that has to be asked for.
    """
    made = {name for backing in Backing for name in calls_of_an_eager_arena(backing)}
    assert KINDS_OF_CALL - {"punch_hole", "mbind", "read_byte"} == made


@both_backings
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EPERM, errno.EINVAL])
def test_each_system_call_may_fail_once(backing, number):
    """Whichever call fails, the constructor raises and leaves nothing, or a slab is lost and the rest works."""
    before = leak_check.snapshot()
    names = calls_of_an_eager_arena(backing)
    for fail_at, name in enumerate(names):
        if name in GIVING_BACK:
            continue
        error = OSError(number, os.strerror(number))
        recorder = Recorder()
        calls = CountedCalls(fail_at, error)
        arena, raised = None, None
        try:
            arena = Arena(make_plan(), backing=backing, mapping="eager", calls=calls, observer=recorder)
        except KvmoorError as kvmoor_error:
            raised = kvmoor_error
        if arena is None:
            assert os.strerror(number) in str(raised)
            assert error is raised.__cause__ or recorder.of_kind(MappingFailed)
        else:
            statistics = arena.statistics()
            lost = recorder.of_kind(MappingFailed)
            assert statistics.num_lost_slabs == len(lost)
            # Advice about huge pages may be refused in any way, advice that keeps memory private as unknown only.
            tolerated = name == "madvise" and (number == errno.EINVAL or calls.failed_advice in HUGE_PAGE_ADVICE)
            assert (0 if tolerated else 1) == len(lost), name
            assert 160 - sum(event.num_slots for event in lost) == sum(statistics.num_published)
            assert statistics.nbytes == statistics.mapped_nbytes + statistics.lost_nbytes
            assert arena.wait_mapped(0)
            assert arena.close()
        assert [] == leak_check.find_leaks(before), f"{name} failed as call {fail_at}"


@both_backings
def test_an_interrupt_at_any_call_leaves_nothing(backing):
    """Ctrl-C during an eager constructor unwinds it completely."""
    before = leak_check.snapshot()
    for fail_at, name in enumerate(calls_of_an_eager_arena(backing)):
        if name in GIVING_BACK:
            continue
        with pytest.raises(KeyboardInterrupt):
            Arena(make_plan(), backing=backing, mapping="eager", calls=CountedCalls(fail_at, KeyboardInterrupt()))
        assert [] == leak_check.find_leaks(before), f"interrupted in {name}, call {fail_at}"


def test_a_lost_slab_is_reported_and_never_handed_out():
    """Mapping goes on after a slab that cannot be allocated; its slots are refused, those of the others work."""

    class FullOnce(SystemCalls):
        def posix_fallocate(self, fd, offset, nbytes):
            if nbytes == 2 * MIB and offset == 0 and self.full:
                self.full -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().posix_fallocate(fd, offset, nbytes)

        full = 1

    recorder = Recorder()
    with Arena(make_plan(), backing=Backing.MEMFD, calls=FullOnce(), observer=recorder) as arena:
        assert arena.wait_mapped(10)
        (failed,) = recorder.of_kind(MappingFailed)
        assert (0, 32) == (failed.group, failed.num_slots)
        assert "No space left on device" in failed.reason
        assert [SlotRange(1, 0, 80), SlotRange(0, 32, 32), SlotRange(0, 64, 16)] == arena.take_published()
        assert 48 == len(arena.slot_addresses(0, np.arange(32, 80)))
        with pytest.raises(RequestError, match="slot 31 of group 0"):
            arena.slot_addresses(0, np.array([40, 31]))
        statistics = arena.statistics()
        assert (1, 2 * MIB) == (statistics.num_lost_slabs, statistics.lost_nbytes)
        assert failed.reason == statistics.lost_reason


def limits_that_leave(*rooms):
    """Return a stand-in for reading the limits: each call answers with the next room, the last one for ever."""
    return limits_from(list(rooms))


def limits_from(rooms):
    """Do the same from a list, which the test may change on the way."""

    def read():
        nbytes = rooms.pop(0) if len(rooms) > 1 else rooms[0]
        return MemoryLimits(available_nbytes=KEPT_FREE_NBYTES + nbytes)

    return read


def test_a_slab_is_given_up_rather_than_going_over_a_limit():
    """The limits are read again before each slab, because going over a cgroup is a kill, and no room is a reason."""
    recorder = Recorder()
    read_limits = limits_that_leave(2 * MIB, 2 * MIB, 2 * MIB - 1, 2 * MIB)
    with Arena(make_plan(), mapping="eager", observer=recorder, read_limits=read_limits) as arena:
        (failed,) = recorder.of_kind(MappingFailed)
        assert "2.1 MB of host memory were to be mapped, 2.1 MB are left within the free memory" in failed.reason
        assert (48, 80) == (arena.num_published(0), arena.num_published(1))


def test_limits_are_not_asked_again_when_the_check_only_warns():
    """With memory_check "warn" the user has decided to try."""
    with Arena(make_plan("warn"), mapping="eager", read_limits=limits_that_leave(0)) as arena:
        assert 160 == arena.num_published(0) + arena.num_published(1)


def test_an_eager_arena_without_a_single_slot_is_an_error():
    """If a group can get no slot at all the constructor says why and leaves nothing behind."""
    with pytest.raises(NoRoomError, match=r"no slot of group 0 could be mapped: .* lower host_memory"):
        Arena(make_plan(), mapping="eager", read_limits=limits_that_leave(0))


def test_waiting_for_slots_ends_at_once_when_there_can_be_none():
    """A group whose slabs are all lost answers the wait with False, while others are still being mapped."""
    let_go = threading.Event()

    class HeldCalls(SystemCalls):
        num_touches = 0

        def memset(self, address, nbytes):
            self.num_touches += 1
            if self.num_touches == 2:  # the only slab of group 1
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            if self.num_touches == 3:  # the second slab of group 0
                assert let_go.wait(60)
            super().memset(address, nbytes)

    with Arena(make_plan(), calls=HeldCalls()) as arena:
        started = time.monotonic()
        assert not arena.wait_published(50)
        assert time.monotonic() - started < 25
        assert not arena.wait_mapped(0)
        let_go.set()
        assert arena.wait_mapped(60)
        assert (80, 0) == (arena.num_published(0), arena.num_published(1))


class SteppedClock(Clock):
    """A clock that moves only when a test moves it, except that waits between registrations take no time."""

    def __init__(self):
        self.seconds = 1000.0
        self.waiting = threading.Semaphore(0)  # released once for each wait that begins
        self.timeouts = []
        self.conditions = []

    def now(self):
        return self.seconds

    def wait(self, changed, timeout_s):
        if timeout_s <= BREATH_S:
            self.seconds += timeout_s
            return
        self.timeouts.append(timeout_s)
        self.conditions.append(changed)
        self.waiting.release()
        changed.wait(30)

    def advance(self, seconds):
        self.seconds += seconds
        for changed in self.conditions[-1:]:
            with changed:
                changed.notify_all()


def test_slabs_that_found_no_room_are_tried_again_until_there_is():
    """A dip of free memory costs time and no slots: the interval doubles up to 30 s, and each slab is reported once."""
    clock, recorder = SteppedClock(), Recorder()
    rooms = [0]
    with Arena(make_plan(), observer=recorder, read_limits=limits_from(rooms), pacer=StepPacer(clock)) as arena:
        assert clock.waiting.acquire(timeout=10)
        assert not arena.wait_mapped(0)
        statistics = arena.statistics()
        assert (0, arena.nbytes) == (statistics.lost_nbytes, statistics.waiting_nbytes)
        assert "0 B are left" in statistics.lost_reason
        for _ in range(7):
            clock.advance(clock.timeouts[-1] - 0.125)
            assert clock.waiting.acquire(timeout=10)
            clock.advance(0.125)
            assert clock.waiting.acquire(timeout=10)
        assert [1, 2, 4, 8, 16, 30, 30, 30] == clock.timeouts[::2]
        assert 4 == len(recorder.of_kind(MappingFailed))
        assert [] == arena.take_published()
        rooms[0] = 6 * MIB
        clock.advance(30)
        assert arena.wait_mapped(10)
        assert [(80, 80), 0] == [arena.statistics().num_published, arena.statistics().waiting_nbytes]
        assert arena.mapped_nbytes == arena.nbytes
        assert 4 == len(recorder.of_kind(SlotsPublished))


def test_a_try_that_maps_something_is_followed_soon_by_the_next():
    """Room that comes back little by little is used as it comes: progress puts the interval back to its beginning."""
    clock, rooms = SteppedClock(), [0]
    with Arena(make_plan(), read_limits=limits_from(rooms), pacer=StepPacer(clock)) as arena:
        for seconds in (0, 1, 2, 4):
            clock.advance(seconds)
            assert clock.waiting.acquire(timeout=10)
        assert 8 == clock.timeouts[-1]
        rooms[:] = [2 * MIB, 0]
        clock.advance(8)
        assert clock.waiting.acquire(timeout=10)
        assert 32 == arena.num_published(0)
        assert 1 == clock.timeouts[-1]


@pytest.mark.parametrize("pin", ["background", "eager", "off"])
def test_an_eager_arena_goes_on_trying_in_the_background(pin):
    """The constructor returns with what fits, and a thread maps the rest when there is room."""
    clock, read_limits = SteppedClock(), limits_that_leave(2 * MIB, 2 * MIB, 0, 0, 6 * MIB)
    with ScriptedRegistrar() as registrar:
        options = {"mapping": "eager", "registrar": registrar, "pin": pin, "pacer": StepPacer(clock)}
        with Arena(make_plan(), read_limits=read_limits, **options) as arena:
            assert (32, 80) == (arena.num_published(0), arena.num_published(1))
            assert clock.waiting.acquire(timeout=10)
            clock.advance(1)
            assert arena.wait_mapped(10)
            assert (80, 80) == (arena.num_published(0), arena.num_published(1))
        registrar.check()


def test_a_bug_in_the_mapping_thread_leaves_nobody_waiting():
    """Whatever is raised there, the slabs that are left are lost with the reason, and waits end."""

    def read_limits():
        raise LookupError("surprise")

    recorder = Recorder()
    with Arena(make_plan(), observer=recorder, read_limits=read_limits) as arena:
        assert arena.wait_mapped(60)
        assert not arena.wait_published(60)
        assert 4 == len(recorder.of_kind(MappingFailed))
        assert "LookupError: surprise" in recorder.events[0].reason


def test_an_observer_that_raises_does_not_stop_mapping():
    """What observers do is their own business: every slot is published all the same."""

    class Raising:
        def on_event(self, event):
            raise RuntimeError("observer")

    with Arena(make_plan(), mapping="eager", observer=Raising()) as arena:
        assert arena.mapped_nbytes == arena.nbytes


@both_backings
def test_no_thread_for_mapping_is_no_room(monkeypatch, backing):
    """If the system gives no thread, the constructor says which limit to raise and leaves nothing behind."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoRoomError, match=r"can't start new thread.*raise the limit of threads"):
        Arena(make_plan(), backing=backing)


class LargeSlab:
    """One slab of 32 MiB, mapped by four threads on the caller's demand."""

    plan = ArenaPlan(32 * MIB, (GroupPlan(0, 16, MIB, 32, 32 * MIB, num_slots=32),), MemoryLimits(), "refuse")

    def __init__(self, calls):
        self.memory = SlabMemory(self.plan, Backing.ANONYMOUS, "test", calls)
        self.recorder = Recorder()
        self.mapper = SlabMapper(
            self.plan, self.memory, observer=self.recorder, read_limits=MemoryLimits, name="test", num_threads=4
        )

    def run(self):
        self.mapper.run()
        assert self.mapper.join(0)
        return self.memory.read_residency().resident_nbytes


@pytest.fixture
def large_slab():
    opened = []

    def make(calls=None):
        opened.append(LargeSlab(calls or SystemCalls()))
        return opened[-1]

    yield make
    for slab in opened:
        slab.memory.close()


def test_several_threads_touch_one_slab_whole(large_slab):
    """Each byte is touched by one of four threads, and all have ended when the slab is published."""
    threads = set()

    class NotedCalls(SystemCalls):
        def memset(self, address, nbytes):
            threads.add(threading.current_thread())
            super().memset(address, nbytes)

    slab = large_slab(NotedCalls())
    assert 32 * MIB == slab.run()
    assert 4 == len(threads)
    assert [SlotsPublished(0, 32, 32 * MIB, 32 * MIB)] == slab.recorder.events


def test_threads_that_cannot_start_are_done_without(large_slab, monkeypatch):
    """With no further thread to be had, the one there is touches everything."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    slab = large_slab()
    assert 32 * MIB == slab.run()
    assert 32 == slab.mapper.num_published(0)


def test_an_error_in_a_helping_thread_loses_the_slab(large_slab):
    """What fails on another thread is not overlooked: the slab is lost with that reason."""

    class FailingElsewhere(SystemCalls):
        def memset(self, address, nbytes):
            if threading.current_thread().name == "kvmoor-mapper-test":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().memset(address, nbytes)

    slab = large_slab(FailingElsewhere())
    slab.run()
    (failed,) = slab.recorder.events
    assert "Input/output error" in failed.reason
    assert 0 == slab.mapper.num_published(0)


@pytest.mark.usefixtures("expects_quarantine")
def test_a_mapping_thread_that_does_not_stop_is_quarantined_by_the_deadline():
    """Close returns False within its deadline, the memory under the stuck write stays, and nothing is published."""
    reached, let_go = threading.Event(), threading.Event()

    class StuckCalls(SystemCalls):
        def memset(self, address, nbytes):
            reached.set()
            assert let_go.wait(30)
            super().memset(address, nbytes)

    recorder = Recorder()
    arena = Arena(make_plan(), calls=StuckCalls(), observer=recorder, name="stuck")
    assert reached.wait(10)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvmoor-mapper-stuck"]
    started = time.monotonic()
    assert not arena.close(0.05)
    assert time.monotonic() - started < 0.25
    assert ArenaState.QUARANTINED is arena.state
    assert [ArenaQuarantined(0, "the thread that maps it did not stop in time")] == recorder.events
    let_go.set()  # the late write meets memory
    thread.join(10)
    assert not thread.is_alive()
    assert not arena.close(0)
    assert 0 == arena.num_published(0)


@pytest.mark.usefixtures("expects_quarantine")
@both_backings
def test_memory_that_cannot_be_unmapped_is_quarantined(backing):
    """If the kernel refuses, the arena is kept and counted, and close says False, the second time too."""
    before = quarantined_nbytes()
    calls = CountedCalls("munmap", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    recorder = Recorder()
    arena = Arena(make_plan(), backing=backing, mapping="eager", calls=calls, observer=recorder)
    assert not arena.close()
    assert not arena.close()
    assert 1 == calls.names.count("munmap")
    assert before + arena.nbytes == quarantined_nbytes()
    (event,) = recorder.of_kind(ArenaQuarantined)
    assert "Cannot allocate memory" in event.reason


def test_a_descriptor_that_reports_an_error_on_closing_is_closed():
    """An error of close(2) is not a leak: the arena counts as closed and the other descriptors are closed too."""
    calls = CountedCalls()
    real_close = calls.close

    def close_and_complain(fd):
        real_close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    calls.close = close_and_complain
    arena = Arena(make_plan(), backing=Backing.MEMFD, mapping="eager", calls=calls)
    assert arena.close()
    assert 4 == calls.names.count("close")


def test_a_second_closer_does_not_wait_past_its_deadline():
    """While one thread is closing, another that closes too gets False at its deadline, and nothing is done twice."""
    reached, let_go = threading.Event(), threading.Event()

    class SlowUnmap(SystemCalls):
        def munmap(self, address, nbytes):
            reached.set()
            assert let_go.wait(30)
            super().munmap(address, nbytes)

    arena = Arena(make_plan(), mapping="eager", calls=SlowUnmap())
    closer = threading.Thread(target=arena.close)
    closer.start()
    assert reached.wait(10)
    started = time.monotonic()
    assert not arena.close(0.01)
    assert time.monotonic() - started < 0.21
    let_go.set()
    closer.join(10)
    assert arena.close(0)
    assert ArenaState.CLOSED is arena.state


def test_closing_from_within_an_event_does_not_deadlock():
    """An observer must not call back; if one does on the mapping thread, that thread does not wait for itself."""
    answers = []
    holder = []

    class Closing:
        def on_event(self, event):
            if isinstance(event, SlotsPublished) and not answers:
                answers.append(holder[0].join(5.0))

    memory = SlabMemory(make_plan(), Backing.ANONYMOUS, "test", SystemCalls())
    mapper = SlabMapper(make_plan(), memory, observer=Closing(), read_limits=MemoryLimits, name="test", num_threads=1)
    holder.append(mapper)
    mapper.start()
    assert mapper.wait_mapped(10)
    assert mapper.join(10)
    memory.close()
    assert [False] == answers
