import contextlib
import ctypes
import dataclasses
import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest

import leak_check
from kvmoor.block_layout import BlockLayout
from kvmoor.errors import (
    BrokenError,
    ClosedError,
    CorruptDataError,
    KvmoorError,
    NoRoomError,
    RequestError,
    SettingsError,
)
from kvmoor.host_memory import status_segment
from kvmoor.host_memory.arena import ArenaState
from kvmoor.host_memory.arena_plan import GroupPlan
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.process_identity import ProcessCalls, identify_this_process, read_start_time
from kvmoor.host_memory.quarantine import quarantined_arenas, quarantined_nbytes
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.host_memory.ticket import ArenaTicket, make_ticket
from kvmoor.observation import ArenaQuarantined
from shared_arena import GROUPS, LAYOUT, PLAN, pattern, read_slot, sharing_owner

KINDS_OF_CALL = {name for name in dir(ProcessCalls) if not name.startswith("_")}
GIVING_BACK = {"munmap", "close"}


class CountedCalls(ProcessCalls):
    """Note the name of every system call; raise at one of them, or run something before it."""

    def __init__(self, fail_at=None, error=None, before=None):
        self.names = []
        for name in KINDS_OF_CALL:
            setattr(self, name, self.wrap(name, fail_at, error, before))

    def wrap(self, name, fail_at, error, before):
        real = getattr(super(), name)

        def call(*args):
            number = len(self.names)
            self.names.append(name)
            if fail_at in {number, name}:
                if before is not None:
                    before()
                else:
                    raise error
            return real(*args)

        return call


class Recorder:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)


@pytest.fixture
def owner():
    with sharing_owner() as owner:
        owner.fill(0, 39, 11)
        yield owner


def calls_of_attaching(owner):
    calls = CountedCalls()
    AttachedArena(owner.ticket, LAYOUT, calls=calls).close()
    return calls.names


def calls_of_a_segment():
    calls = CountedCalls()
    StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=1, calls=calls).close()
    return calls.names


def test_the_list_of_injected_calls_is_complete(owner):
    """Attaching and the segment make every kind of call that is theirs, so that none escapes the tests below."""
    theirs = {name for name in vars(ProcessCalls) if not name.startswith("_")}
    assert theirs <= {*calls_of_attaching(owner), *calls_of_a_segment()}


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EPERM, errno.ENOENT, errno.EIO])
def test_each_system_call_of_attaching_may_fail(owner, number):
    """Whichever call fails, attaching raises an error of ours that has the cause, and leaves nothing."""
    before = leak_check.snapshot()
    names = calls_of_attaching(owner)
    for fail_at, name in enumerate(names):
        if name in GIVING_BACK or name == "has_ended":  # poll does not fail for a descriptor that is open
            continue
        calls = CountedCalls(fail_at, OSError(number, os.strerror(number)))
        attached, raised = None, None
        try:
            attached = AttachedArena(owner.ticket, LAYOUT, calls=calls)
        except KvmoorError as error:
            raised = error
        if attached is None:
            assert name == "get_seals" or isinstance(raised.__cause__, OSError), (name, raised)
        else:
            assert "madvise" == name, name  # huge pages are a wish
            assert pattern(0, 39) == read_slot(attached, 0, 39)
            attached.close()
        assert [] == leak_check.find_leaks(before), f"{name} failed as call {fail_at}"
    assert pattern(0, 39) == read_slot(owner.arena, 0, 39)


def test_an_interrupt_at_any_call_of_attaching_leaves_nothing(owner):
    """Ctrl-C while attaching unwinds all of it."""
    before = leak_check.snapshot()
    for fail_at, name in enumerate(calls_of_attaching(owner)):
        if name in GIVING_BACK:
            continue
        with pytest.raises(KeyboardInterrupt):
            AttachedArena(owner.ticket, LAYOUT, calls=CountedCalls(fail_at, KeyboardInterrupt()))
        assert [] == leak_check.find_leaks(before), f"interrupted at {name}, call {fail_at}"


@pytest.mark.parametrize("make_error", [lambda: OSError(errno.ENOMEM, "Cannot allocate memory"), KeyboardInterrupt])
def test_each_system_call_of_a_segment_may_fail(make_error):
    """Whichever call fails, creating a status segment raises and leaves nothing."""
    before = leak_check.snapshot()
    names = calls_of_a_segment()
    for fail_at, name in enumerate(names):
        if name in GIVING_BACK:
            continue
        with pytest.raises((KvmoorError, KeyboardInterrupt)):
            StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=1, calls=CountedCalls(fail_at, make_error()))
        assert [] == leak_check.find_leaks(before), f"{name} failed as call {fail_at}"


REFUSED_TICKETS = {
    "another process": (lambda t: own(t, pid=1), BrokenError, "was replaced"),
    "no such process": (lambda t: own(t, pid=2**22 + 1), BrokenError, "is gone"),
    "another start time": (lambda t: own(t, start_time=t.owner.start_time + 1), BrokenError, "was replaced"),
    "another boot": (lambda t: own(t, boot_id="another"), SettingsError, "another host or before a restart"),
    "another pid namespace": (lambda t: own(t, pid_namespace=1), SettingsError, "in another pid namespace"),
    "a closed descriptor": (lambda t: segment(t, descriptor=10**6), BrokenError, "is not open"),
    "another descriptor": (
        lambda t: segment(t, descriptor=t.status.descriptor),
        BrokenError,
        r"segment 1 of the arena\) is another file by now",
    ),
    "another inode": (lambda t: segment(t, inode=t.segments[1].inode + 1), BrokenError, "is another file by now"),
    "another device": (lambda t: segment(t, device=t.segments[1].device + 1), BrokenError, "is another file by now"),
    "another status descriptor": (
        lambda t: replace(t, status=replace(t.status, descriptor=t.segments[0].descriptor)),
        BrokenError,
        "status segment.* is another file by now",
    ),
    "another status inode": (
        lambda t: replace(t, status=replace(t.status, inode=t.status.inode + 9)),
        BrokenError,
        "status segment.* is another file by now",
    ),
    "another status size": (
        lambda t: replace(t, status=replace(t.status, nbytes=8192)),
        BrokenError,
        "status segment.* has 4096 bytes, the ticket says 8192",
    ),
    "an arena as status": (lambda t: replace(t, status=t.segments[0]), CorruptDataError, "is not a status segment"),
    "another nonce": (lambda t: replace(t, nonce=bytes(16)), BrokenError, "the nonce"),
    "another layout": (lambda t: replace(t, layout_fingerprint=bytes(32)), SettingsError, "another layout"),
    "other groups": (
        lambda t: replace(t, groups=(t.groups[0], replace(t.groups[1], num_slots=79), t.groups[2])),
        BrokenError,
        "the status segment has .* slots",
    ),
    "other tokens": (
        lambda t: replace(t, groups=(replace(t.groups[0], tokens_per_block=32), *t.groups[1:])),
        SettingsError,
        "another layout",
    ),
}


REFUSED_TICKETS |= {
    # Files and slots are as many as before: without the owner's digest, slots would show each other's bytes.
    "fewer slots a slab": (lambda t: group(t, 0, slots_per_slab=15), CorruptDataError, "keeps its slots elsewhere"),
    "a group without bytes lies apart": (
        lambda t: group(t, 2, slab_pitch=2 * 2**20),
        CorruptDataError,
        "keeps its slots elsewhere",
    ),
}


def group(ticket, number, **changes):
    groups = list(ticket.groups)
    groups[number] = replace(groups[number], **changes)
    return replace(ticket, groups=tuple(groups))


def own(ticket, **changes):
    return replace(ticket, owner=replace(ticket.owner, **changes))


def segment(ticket, **changes):
    segments = list(ticket.segments)
    segments[1] = replace(segments[1], **changes)
    return replace(ticket, segments=tuple(segments))


@pytest.mark.parametrize("what", list(REFUSED_TICKETS))
def test_each_field_of_a_ticket_is_checked(owner, what):
    """A ticket that differs in one field is refused at once, with what was found and nothing left behind."""
    change, kind, message = REFUSED_TICKETS[what]
    before = leak_check.snapshot()
    with pytest.raises(kind, match=message):
        AttachedArena(change(owner.ticket), LAYOUT)
    assert [] == leak_check.find_leaks(before)


@pytest.mark.parametrize("number", range(len(GROUPS)))
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GroupPlan)])
@pytest.mark.parametrize("change", [-1, 1, 4096, 2 * 2**20])
def test_each_number_of_the_geometry_is_checked(owner, number, name, change):
    """No number from which an address is computed can differ from the owner's, whether sizes still add up or not."""
    value = getattr(GROUPS[number], name) + change
    with pytest.raises((CorruptDataError, SettingsError, BrokenError)):
        AttachedArena(group(owner.ticket, number, **{name: value}), LAYOUT)


@pytest.mark.parametrize("changes", [{"pid": 1}, {"start_time": 1}])
def test_a_status_segment_of_another_process_is_refused(owner, monkeypatch, changes):
    """Whoever made the segment has to be whom the ticket names: the same number at the same time."""
    us = owner.ticket.owner
    other = replace(us, **{name: getattr(us, name) + more for name, more in changes.items()})
    monkeypatch.setattr(status_segment, "identify_this_process", lambda calls: other)
    with StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=1) as segment:
        ticket = replace(make_ticket(owner.arena, segment, LAYOUT), owner=us)
        before = leak_check.snapshot()
        with pytest.raises(BrokenError, match=rf"belongs to process {other.pid}, started at tick {other.start_time}"):
            AttachedArena(ticket, LAYOUT)
        assert [] == leak_check.find_leaks(before)


def test_the_size_of_a_segment_is_checked(owner):
    """A file of another size than the ticket says is refused, although ticket and geometry agree."""
    groups = (replace(GROUPS[0], num_slots=16), GROUPS[1], GROUPS[2])
    groups = (groups[0], replace(groups[1], offset=2 * 2**20), replace(groups[2], offset=6 * 2**20))

    class Grown(ProcessCalls):
        def fstat(self, fd):
            found = list(super().fstat(fd))
            found[6] += 4096
            return os.stat_result(found)

    with pytest.raises(BrokenError, match=r"has .* bytes, the ticket says"):
        AttachedArena(owner.ticket, LAYOUT, calls=Grown())
    with pytest.raises(CorruptDataError, match="the segments of a ticket have"):
        replace(owner.ticket, groups=groups)


@pytest.mark.parametrize("number", [None, 0, 4])
def test_a_file_that_may_shrink_is_refused(owner, number):
    """A file without the seals would be a SIGBUS waiting to happen, so it is not mapped: status and segments alike."""
    file = owner.ticket.status if number is None else owner.ticket.segments[number]

    class Unsealed(ProcessCalls):
        def get_seals(self, fd):
            return 0 if os.fstat(fd).st_ino == file.inode else super().get_seals(fd)

    with pytest.raises(CorruptDataError, match=rf"descriptor {file.descriptor} of process .* is not sealed"):
        AttachedArena(owner.ticket, LAYOUT, calls=Unsealed())


def test_an_unpickled_ticket_is_checked_before_it_is_used(owner):
    """Values that no owner writes are refused by name, before anything is opened."""
    ticket = pickle.loads(pickle.dumps(owner.ticket))
    object.__setattr__(ticket, "groups", (replace(GROUPS[0], num_slots=2**40), *GROUPS[1:]))
    calls = CountedCalls()
    with pytest.raises(CorruptDataError, match=r"groups\[0\] of a ticket contradicts itself"):
        AttachedArena(ticket, LAYOUT, calls=calls)
    assert [] == calls.names


def test_another_layout_is_refused_before_anything_is_opened(owner):
    """A reader whose blocks mean something else makes not one system call."""
    calls = CountedCalls()
    other = BlockLayout(LAYOUT.groups[::-1])
    with pytest.raises(SettingsError, match="the same model, dtype and block size"):
        AttachedArena(owner.ticket, other, calls=calls)
    assert [] == calls.names


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), PermissionError(1, "No")])
def test_a_refusal_by_the_kernel_is_explained(owner, error):
    """What the kernel forbids, as it does to other users, comes with the remedy."""
    with pytest.raises(BrokenError, match=r"the kernel refuses.*attach as the user who runs the owner") as raised:
        AttachedArena(owner.ticket, LAYOUT, calls=CountedCalls("open_read_only", error))
    assert error is raised.value.__cause__


def test_a_hidden_owner_is_not_called_dead(owner):
    """With hidepid, processes of others seem not to exist; the pidfd tells that apart from an end."""

    class Hidden(ProcessCalls):
        def read_text(self, path):
            if path == f"/proc/{os.getpid()}/stat" and self.seen:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            self.seen |= path.endswith("/stat")
            return super().read_text(path)

        seen = False

    with pytest.raises(BrokenError, match="the kernel refuses reading its start time"):
        AttachedArena(owner.ticket, LAYOUT, calls=Hidden())


@pytest.mark.parametrize("line", ["", "1 (a) b) S 1", "1 (x) S " + "y " * 30])
def test_a_strange_stat_line_is_reported(line):
    """A /proc that reads differently is an error with the line in it, not a wrong start time."""

    class Strange(ProcessCalls):
        def read_text(self, path):
            return line

    with pytest.raises(BrokenError, match="expected the start time in field 22"):
        read_start_time(1, Strange())


def test_brackets_in_a_command_do_not_shift_the_fields():
    """The start time is found behind a command with spaces and brackets."""
    fields = " ".join(str(number) for number in range(4, 53))

    class Named(ProcessCalls):
        def read_text(self, path):
            return f"7 (a) (b 1 2) S {fields}\n"

    assert 22 == read_start_time(7, Named())


def test_a_foreign_proc_is_noticed():
    """A /proc of another pid namespace would show the wrong processes under our numbers."""

    class Foreign(ProcessCalls):
        def read_link(self, path):
            return "1234567"

    with pytest.raises(BrokenError, match="/proc belongs to another pid namespace"):
        identify_this_process(Foreign())


def test_an_owner_that_ends_while_we_attach_is_noticed():
    """Whenever the owner dies before the last check, attaching fails and says that it has ended; later it succeeds."""
    code = "import shared_arena; shared_arena.serve_owner('mortal')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = leak_check.snapshot()
    for kind in ("pidfd_open", "read_text", "open_read_only", "fstat", "pread", "has_ended"):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        ) as child:
            ticket = ArenaTicket.from_json(child.stdout.readline())

            def end(child=child):
                child.kill()
                child.wait()  # reaped: the number could be used again

            with pytest.raises(BrokenError, match=r"has ended|is gone|ended during|was replaced"):
                AttachedArena(ticket, LAYOUT, calls=CountedCalls(kind, before=end))
    assert [] == leak_check.find_leaks(before)


def test_published_slots_of_a_living_owner_can_be_read(owner):
    """While the owner lives, what it published has addresses, in the shape asked for; what it did not has none."""
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        slots = np.array([[0, 17], [39, 16]])
        offsets = attached.slot_addresses(0, slots) - attached.slot_addresses(0, [0])
        expected = owner.arena.slot_addresses(0, slots) - owner.arena.slot_addresses(0, np.array([0]))
        assert expected.tolist() == offsets.tolist()
        assert pattern(0, 39) == read_slot(attached, 0, 39)
        assert [0, 0] == attached.slot_addresses(2, [3, 79]).tolist()
        assert 0 == attached.slot_addresses(0, []).size
        ranges = attached.published_ranges()
        assert sum(slab.nbytes for slab in PLAN.slabs) == sum(nbytes for _, nbytes in ranges)
        for group, slot in ((0, 40), (0, -1), (3, 0)):
            with pytest.raises(RequestError):
                attached.slot_addresses(group, [slot])


def test_closing_gives_everything_back_once(owner):
    """After close nothing of the owner is mapped or open here, a second close is harmless, and nothing can be used."""
    before = leak_check.snapshot()
    attached = AttachedArena(owner.ticket, LAYOUT)
    assert "open" in repr(attached)
    assert attached.close()
    assert attached.close()
    assert (True, ArenaState.CLOSED) == (attached.closed, attached.state)
    assert [] == leak_check.find_leaks(before)
    for call in (
        lambda: attached.slot_addresses(0, [0]),
        attached.published_ranges,
        attached.owner_alive,
        lambda: attached.status.num_published(0),
        lambda: attached.quarantine("late"),
    ):
        with pytest.raises(ClosedError):
            call()


def test_many_threads_may_close(owner):
    """Concurrent calls of close unmap once, and each says that it is done."""
    calls = CountedCalls()
    attached = AttachedArena(owner.ticket, LAYOUT, calls=calls)
    results = []
    threads = [threading.Thread(target=lambda: results.append(attached.close())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [True] * 8 == results
    assert 2 == calls.names.count("munmap")  # the slots, the status segment


def test_close_does_not_wait_for_ever_for_another_thread(owner):
    """A thread that hangs in close holds up others until their deadline only."""
    entered, leave = threading.Event(), threading.Event()

    class Stuck(ProcessCalls):
        def munmap(self, address, nbytes):
            entered.set()
            leave.wait(30)
            super().munmap(address, nbytes)

    attached = AttachedArena(owner.ticket, LAYOUT, calls=Stuck())
    thread = threading.Thread(target=attached.close)
    thread.start()
    assert entered.wait(10)
    assert not attached.close(0.01)
    leave.set()
    thread.join(10)
    assert attached.closed


def test_what_is_never_closed_is_reported(owner):
    """A forgotten attachment is a warning; its pages stay, because a copy may still read them."""
    attached = AttachedArena(owner.ticket, LAYOUT)
    closing = attached._closing
    address = int(attached.slot_addresses(0, [39])[0])
    with warnings.catch_warnings(record=True, action="always") as warned:
        del attached
        gc.collect()
    assert ["AttachedArena"] == [str(warning.message).split()[0][1:] for warning in warned]
    assert pattern(0, 39)[:8] == ctypes.string_at(address, 8)
    closing.close()


def test_a_quarantined_attachment_stays_readable(owner, expects_quarantine):
    """A copy that may still read keeps its pages until the process ends; the owner is let go, and it is reported."""
    recorder = Recorder()
    attached = AttachedArena(owner.ticket, LAYOUT, observer=recorder)
    address = int(attached.slot_addresses(0, [39])[0])
    before = quarantined_nbytes()
    attached.quarantine("a copy never ended")
    attached.quarantine("again", keep_alive=(object(),))
    assert PLAN.nbytes == quarantined_nbytes() - before
    assert [ArenaQuarantined(PLAN.nbytes, "a copy never ended")] == recorder.events
    assert not attached.close()
    assert ArenaState.QUARANTINED is attached.state
    assert pattern(0, 39)[:8] == ctypes.string_at(address, 8)
    with pytest.raises(ClosedError, match="quarantined"):
        attached.slot_addresses(0, [39])


def test_pages_that_cannot_be_unmapped_are_kept(owner, expects_quarantine):
    """If the kernel refuses to unmap, close says so, keeps the pages and gives the rest back."""
    recorder = Recorder()
    attached = AttachedArena(
        owner.ticket,
        LAYOUT,
        observer=recorder,
        calls=CountedCalls("munmap", OSError(errno.ENOMEM, "Cannot allocate memory")),
    )
    assert not attached.close()
    assert not attached.close()
    assert attached is quarantined_arenas()[-1].arena
    assert 1 == len(recorder.events)
    assert attached.status.closed
    with contextlib.suppress(NoRoomError):
        attached.status.close()


def test_a_forked_child_does_not_keep_the_memory(owner):
    """A forked child has neither the mappings nor, after `forked`, the descriptors, and closes nothing of ours."""
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        address = int(attached.slot_addresses(0, [39])[0])
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                attached.forked()
                inherited = any(
                    int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
                    for line in open("/proc/self/maps", encoding="ascii")  # noqa: PTH123, SIM115
                    if "kvmoor:shared" in line
                )
                if attached.close() and attached.closed and not inherited:
                    code = 0
            os._exit(code)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert attached.owner_alive()
        assert pattern(0, 39) == read_slot(attached, 0, 39)
