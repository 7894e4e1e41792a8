import ctypes
import gc
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import ClosedError, RequestError, SettingsError
from kvmoor.host_memory import quarantine
from kvmoor.host_memory.arena import Arena, ArenaState
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan, plan_arena
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.quarantine import QuarantinedArena, keep_until_exit, quarantined_arenas, quarantined_nbytes
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.observation import ArenaQuarantined, SlotsPublished
from kvmoor.transfer_messages import SlotRange

KIB, MIB = 2**10, 2**20
both_backings = pytest.mark.parametrize("backing", list(Backing))
both_mappings = pytest.mark.parametrize("mapping", ["background", "eager"])


def make_layout(*groups):
    """Return a layout from (tokens per block, page bytes) pairs; 0 bytes: a group without tensors."""
    return BlockLayout(
        tuple(
            GroupLayout((TensorPages(2**30, 8, nbytes, nbytes),) if nbytes else (), tokens_per_block=tokens)
            for tokens, nbytes in groups
        )
    )


def small_plan(nbytes=64 * KIB):
    return plan_arena(make_layout((16, 4 * KIB)), nbytes)


def plan_of_three_slabs():
    """Plan 2 slabs of 2 MiB and one of half that size, and a group without tensors."""
    groups = (GroupPlan(0, 16, 64 * KIB, 32, 2 * MIB, num_slots=80), GroupPlan(1, 16, 0, 0, 0, 80, offset=6 * MIB))
    return ArenaPlan(6 * MIB, groups, MemoryLimits(), "refuse")


class Recorder:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)


class HeldCalls(SystemCalls):
    """Hold the mapping thread in its n-th touch until the test lets go."""

    def __init__(self, hold_at):
        self.hold_at = hold_at
        self.num_touches = 0
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def memset(self, address, nbytes):
        self.num_touches += 1
        if self.num_touches == self.hold_at:
            self.reached.set()
            assert self.let_go.wait(30)
        super().memset(address, nbytes)


@both_backings
@both_mappings
def test_slots_hold_what_is_written_to_them(backing, mapping):
    """Every slot is memory of its own: patterns written to all of them are all read back."""
    with Arena(plan_of_three_slabs(), backing=backing, mapping=mapping) as arena:
        assert arena.wait_mapped(10)
        addresses = arena.slot_addresses(0, np.arange(80)).tolist()
        for slot, address in enumerate(addresses):
            ctypes.memset(address, slot + 1, 64 * KIB)
        assert [bytes([slot + 1]) * 64 * KIB for slot in range(80)] == [
            ctypes.string_at(address, 64 * KIB) for address in addresses
        ]


def test_neighbouring_slots_of_a_slab_are_adjacent_and_page_aligned():
    """Runs of slots are runs of bytes, which is what makes merged copies possible."""
    with Arena(plan_of_three_slabs(), mapping="eager") as arena:
        addresses = arena.slot_addresses(0, np.arange(80))
        assert {64 * KIB} == set(np.diff(addresses).tolist())  # these slabs have no rest, so even slabs are adjacent
        assert 0 == addresses[0] % (2 * MIB)


def test_memory_ends_with_the_last_slot():
    """Behind the last slot nothing can be written, so the kernel cannot round a small arena up to a huge page."""
    with Arena(small_plan(), mapping="eager") as arena:
        last = int(arena.slot_addresses(0, np.array([15]))[0])
        assert "rw-p" == protection_at(last + 4 * KIB - 1)
        assert "---p" == protection_at(last + 4 * KIB)


def protection_at(address):
    """Return what /proc/self/maps says of an address; None if nothing is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return protection
    return None


def test_an_eager_arena_is_whole_when_its_constructor_returns():
    """All slots are published and all bytes mapped before anything else happens."""
    with Arena(plan_of_three_slabs(), mapping="eager") as arena:
        assert ArenaState.OPEN is arena.state
        assert (80, 80) == (arena.num_published(0), arena.num_published(1))
        assert arena.mapped_nbytes == arena.nbytes == 5 * MIB
        assert arena.wait_published(0)
        assert arena.wait_mapped(0)


@both_backings
def test_resident_growth_of_an_eager_arena_is_what_was_planned(backing):
    """96 MiB asked for are 96 MiB of resident memory, within 2 percent (B11)."""
    plan = plan_arena(make_layout((16, 192 * KIB), (16, 0)), 96 * MIB)
    before = resident_nbytes()
    with Arena(plan, backing=backing, mapping="eager") as arena:
        growth = resident_nbytes() - before
        assert 0.98 * 96 * MIB <= growth <= 1.02 * 96 * MIB
        assert plan.nbytes <= 96 * MIB
        assert arena.read_residency().resident_nbytes == plan.nbytes


def resident_nbytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_huge_pages_are_reported_from_what_the_kernel_did():
    """Only whole huge pages inside the arena are counted; an arena smaller than one has none."""
    with Arena(small_plan(), mapping="eager") as small, Arena(plan_of_three_slabs(), mapping="eager") as arena:
        assert 0 == small.read_residency().huge_page_nbytes
        assert arena.read_residency().huge_page_nbytes in {0, 2 * MIB, 4 * MIB}
        assert 5 * MIB == arena.read_residency().resident_nbytes


def test_slabs_are_published_one_after_the_other():
    """While a later slab is still being touched, the slots of the earlier ones work, and only those."""
    calls = HeldCalls(hold_at=2)
    with Arena(plan_of_three_slabs(), calls=calls) as arena:
        assert calls.reached.wait(10)
        assert arena.wait_published(10)
        assert 32 == arena.num_published(0)
        assert 2 * MIB == arena.mapped_nbytes
        assert 32 == len(arena.slot_addresses(0, np.arange(32)))
        with pytest.raises(RequestError, match="slot 32 of group 0 cannot be used: 32 of 80 slots are published"):
            arena.slot_addresses(0, np.array([3, 32]))
        assert not arena.wait_mapped(0)
        calls.let_go.set()
        assert arena.wait_mapped(10)
        assert 80 == len(arena.slot_addresses(0, np.arange(80)))


def test_every_published_slot_is_taken_once():
    """The ranges that come out cover each group exactly once, and a second call has nothing more."""
    with Arena(plan_of_three_slabs(), mapping="eager") as arena:
        assert [
            SlotRange(1, 0, 80),
            SlotRange(0, 0, 32),
            SlotRange(0, 32, 32),
            SlotRange(0, 64, 16),
        ] == arena.take_published()
        assert [] == arena.take_published()


def test_publishing_is_observed_with_its_progress():
    """Each event says how much of the arena is mapped by then."""
    recorder = Recorder()
    with Arena(plan_of_three_slabs(), mapping="eager", observer=recorder):
        assert [
            SlotsPublished(1, 80, 0, 5 * MIB),
            SlotsPublished(0, 32, 2 * MIB, 5 * MIB),
            SlotsPublished(0, 32, 4 * MIB, 5 * MIB),
            SlotsPublished(0, 16, 5 * MIB, 5 * MIB),
        ] == recorder.events


@pytest.mark.parametrize(
    ("group", "slots"),
    [(0, [-1]), (0, [80]), (0, [0, 2**62]), (1, [80]), (2, [0]), (-1, [0]), (0, [0.5]), (0, [True])],
)
def test_slots_that_do_not_exist_are_refused(group, slots):
    """A wrong group, a number outside, or something that is no whole number is a RequestError."""
    with Arena(plan_of_three_slabs(), mapping="eager") as arena, pytest.raises(RequestError):
        arena.slot_addresses(group, np.array(slots))


def test_no_slots_have_no_addresses():
    """An empty request is answered with an empty array."""
    with Arena(small_plan(), mapping="eager") as arena:
        assert (0,) == arena.slot_addresses(0, np.array([])).shape


def test_slots_of_a_group_without_tensors_have_no_place():
    """They exist, are published, and their address is 0, because no byte of them is ever copied."""
    with Arena(plan_of_three_slabs(), mapping="eager") as arena:
        assert [0, 0] == arena.slot_addresses(1, np.array([0, 79])).tolist()


@both_backings
@both_mappings
def test_closing_gives_everything_back_and_may_be_repeated(backing, mapping):
    """After close the addresses are unmapped and the descriptors closed; a second close changes nothing."""
    arena = Arena(plan_of_three_slabs(), backing=backing, mapping=mapping)
    assert arena.wait_published(10)
    address = int(arena.slot_addresses(0, np.array([0]))[0])
    descriptors = arena.descriptors
    assert (3 if backing is Backing.MEMFD else 0) == len(descriptors)
    assert arena.close(10)
    assert arena.close(0)
    assert arena.closed
    assert protection_at(address) is None
    assert 0 == arena.mapped_nbytes
    assert () == arena.descriptors
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert arena.read_residency() is None


def test_a_closed_arena_refuses_to_give_addresses():
    """Addresses of memory that is gone are never handed out; the error names the state."""
    arena = Arena(small_plan(), mapping="eager")
    arena.close()
    with pytest.raises(ClosedError, match="closed"):
        arena.slot_addresses(0, np.array([0]))
    assert [] == arena.take_published()


def test_closing_stops_mapping_and_wakes_those_who_wait():
    """Close ends the mapping thread after the write it is in; waiters return without their deadline."""
    calls = HeldCalls(hold_at=2)
    arena = Arena(plan_of_three_slabs(), calls=calls)
    assert calls.reached.wait(10)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(arena.wait_mapped(60)))
    waiter.start()
    closer = threading.Thread(target=lambda: answers.append(arena.close(30)))
    closer.start()
    waiter.join(10)
    assert [False] == answers
    calls.let_go.set()
    closer.join(10)
    assert [False, True] == answers
    assert 2 == calls.num_touches


def test_many_small_arenas_leave_nothing_behind():
    """Descriptors, threads and mappings are as many after 200 arenas as before."""

    def open_and_close(count):
        for number in range(count):
            backing = Backing.MEMFD if number % 2 else Backing.ANONYMOUS
            with Arena(small_plan(), backing=backing, mapping="eager" if number % 3 else "background") as arena:
                assert arena.wait_mapped(10)

    open_and_close(12)  # what the interpreter and libc keep for good
    before = count_held()
    open_and_close(200)
    after = count_held()
    assert before[:2] == after[:2]
    assert after[2] <= before[2] + 5  # the allocators' own mappings come and go


def count_held():
    """Return the numbers of open descriptors, threads and mappings."""
    gc.collect()
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count(), mappings


@pytest.mark.usefixtures("expects_quarantine")
@both_backings
def test_a_quarantined_arena_stays_usable_memory(backing):
    """A late copy may read and write it; neither close nor losing every reference unmaps it or closes descriptors."""
    recorder = Recorder()
    arena = Arena(plan_of_three_slabs(), backing=backing, mapping="eager", observer=recorder)
    address = int(arena.slot_addresses(0, np.array([79]))[0])
    descriptors = arena.descriptors
    before = quarantined_nbytes()
    arena.quarantine("a copy never ended")
    assert ArenaState.QUARANTINED is arena.state
    assert before + 5 * MIB == quarantined_nbytes()
    assert ArenaQuarantined(5 * MIB, "a copy never ended") == recorder.events[-1]
    assert not arena.close(0)
    del arena
    gc.collect()
    ctypes.memset(address, 9, 64 * KIB)
    assert b"\t" * 64 * KIB == ctypes.string_at(address, 64 * KIB)
    for fd in descriptors:
        os.fstat(fd)


@pytest.mark.usefixtures("expects_quarantine")
def test_quarantine_can_be_told_twice_and_counts_once():
    """A second call adds what has to be kept alive; bytes and event are not repeated."""
    recorder = Recorder()
    arena = Arena(small_plan(), mapping="eager", observer=recorder)
    before = quarantined_nbytes()
    arena.quarantine("first", keep_alive=("tensors",))
    arena.quarantine("second", keep_alive=("device",))
    assert before + 64 * KIB == quarantined_nbytes()
    assert [("tensors",), ("device",)] == [
        record.keep_alive for record in quarantined_arenas() if record.arena is arena
    ]
    assert 1 == sum(isinstance(event, ArenaQuarantined) for event in recorder.events)


@pytest.mark.usefixtures("expects_quarantine")
def test_quarantining_stops_mapping():
    """Nothing is published after a quarantine, and the mapping thread ends."""
    calls = HeldCalls(hold_at=2)
    arena = Arena(plan_of_three_slabs(), calls=calls)
    assert calls.reached.wait(10)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvmoor-mapper-arena"]
    arena.quarantine("test")
    assert 2 * MIB == arena.mapped_nbytes
    calls.let_go.set()
    thread.join(10)
    assert not thread.is_alive()
    assert 32 == arena.num_published(0)
    assert [] == arena.take_published()
    with pytest.raises(ClosedError, match="quarantined"):
        arena.slot_addresses(0, np.array([0]))


def test_what_is_quarantined_outlives_the_list_of_it():
    """The interpreter empties modules when it exits; what a late copy needs is kept even then."""

    class Tensors:
        pass

    tensors = Tensors()
    alive = weakref.ref(tensors)
    keep_until_exit(QuarantinedArena(None, "test", 0, (tensors,)))
    quarantine._kept.pop()
    del tensors
    gc.collect()
    assert alive() is not None


def test_quarantine_after_closing_comes_too_late_and_says_so():
    """Memory that is gone cannot be kept: the caller has to know."""
    arena = Arena(small_plan())
    arena.close()
    with pytest.raises(ClosedError, match="unmapped already"):
        arena.quarantine("too late")


def test_forgetting_to_close_only_warns():
    """Dropping an open arena warns and leaves the memory mapped, because a copy may still touch it."""
    held = [Arena(small_plan(), mapping="eager")]
    address = int(held[0].slot_addresses(0, np.array([0]))[0])
    memory = held[0]._memory
    with pytest.warns(ResourceWarning, match="never closed"):
        held.clear()
    ctypes.memset(address, 1, 64 * KIB)
    memory.close()
    assert protection_at(address) is None


@pytest.mark.parametrize(
    "options",
    [{"mapping": "lazy"}, {"name": ""}, {"name": "a\0b"}, {"name": "x" * 250}],
    ids=["lazy", "", "nul", "long"],
)
def test_wrong_options_are_refused(options):
    """Bad arguments are an error before anything is allocated."""
    with pytest.raises(SettingsError):
        Arena(small_plan(), **options)


def test_statistics_tell_how_far_it_is():
    """Every number of the record agrees with the arena."""
    with Arena(plan_of_three_slabs(), mapping="eager", name="seven") as arena:
        statistics = arena.statistics()
        assert (ArenaState.OPEN, Backing.ANONYMOUS) == (statistics.state, statistics.backing)
        assert (5 * MIB, 5 * MIB, 0) == (statistics.nbytes, statistics.mapped_nbytes, statistics.lost_nbytes)
        assert (3, 0, "") == (statistics.num_slabs, statistics.num_lost_slabs, statistics.lost_reason)
        assert ((80, 80), (80, 80)) == (statistics.num_slots, statistics.num_published)
        assert "<Arena 'seven' open, 5.24 MB of 5.24 MB mapped>" == repr(arena)
