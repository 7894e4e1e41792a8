import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import leak_check
from kvmoor.errors import BrokenError, RequestError, SettingsError
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.process_identity import ProcessCalls, read_start_time
from kvmoor.host_memory.status_reader import find_status_segments
from kvmoor.host_memory.ticket import ArenaTicket
from shared_arena import LAYOUT, pattern, read_slot

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, or makes a namespace")
ATTACH = """
import os, sys
from kvmoor.errors import KvmoorError
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.ticket import ArenaTicket
from shared_arena import LAYOUT, read_slot
ticket = ArenaTicket.from_json(sys.stdin.readline())
{before}
try:
    with AttachedArena(ticket, LAYOUT) as attached:
        print("attached", read_slot(attached, 0, 17)[0], flush=True)
except KvmoorError as error:
    print(type(error).__name__, error, flush=True)
"""


class Owner:
    """Talk to a child process that shares an arena."""

    def __init__(self, process):
        self.process = process
        self.ticket = ArenaTicket.from_json(process.stdout.readline())

    @property
    def pid(self):
        return self.process.pid

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert "done\n" == self.process.stdout.readline()

    def kill(self):
        self.process.kill()
        self.process.wait(30)

    def stop(self):
        """Return once the kernel says that the process is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


@pytest.fixture
def start():
    """Return a function that starts a Python process; whatever still runs at the end is killed."""
    children = []

    def start(code, *wrapper):
        child = subprocess.Popen(
            [*wrapper, sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def start_owner(start):
    def start_owner(engine_id="engine"):
        return Owner(start(f"import shared_arena; shared_arena.serve_owner({engine_id!r})"))

    return start_owner


@pytest.fixture
def owner(start_owner):
    owner = start_owner()
    owner.tell("publish")
    return owner


def users_of(inodes):
    """Return the processes that have one of these memfds open or mapped."""
    users = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                mapped = {
                    int(line.split()[4])
                    for line in (process / "maps").read_text().splitlines()
                    if "memfd:kvmoor" in line
                }
                opened = {
                    entry.stat().st_ino for entry in (process / "fd").iterdir() if "memfd:kvmoor" in _target(entry)
                }
            except OSError:
                continue
            if (mapped | opened) & inodes:
                users.add(int(process.name))
    return users


def _target(entry):
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def memfds_of(ticket):
    return {file.inode for file in (ticket.status, *ticket.segments)}


def test_a_reader_sees_what_the_owner_stored(owner):
    """Bytes, order ids and published slots cross the process line, in every slab, without a name in /dev/shm."""
    names = {entry.name for entry in Path("/dev/shm").iterdir() if "kvmoor" in entry.name}
    slots = [(0, 0), (0, 15), (0, 16), (0, 39), (1, 0), (1, 59), (1, 60), (1, 79)]
    before = leak_check.snapshot()
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        for number, (group, slot) in enumerate(slots):
            owner.tell(f"fill {group} {slot} {100 + number}")
            assert pattern(group, slot) == read_slot(attached, group, slot)
            assert [100 + number] == attached.status.order_ids(group, [slot]).tolist()
        assert [40, 80, 80] == [attached.status.num_published(group) for group in range(3)]
        assert attached.owner_alive()
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        assert {"r--s"} == {fields[1] for fields in maps if int(fields[4]) in memfds_of(owner.ticket)}
        assert names == {entry.name for entry in Path("/dev/shm").iterdir() if "kvmoor" in entry.name}
    assert [] == leak_check.find_leaks(before)


def test_a_reader_cannot_write(owner, start):
    """The kernel ends a process that writes to what it attached, and the owner's bytes stay."""
    owner.tell("fill 0 17 5")
    code = ATTACH.replace(
        "print(", "import ctypes; ctypes.memset(int(attached.slot_addresses(0, [17])[0]), 0, 1); print("
    )
    child = start(code.format(before=""))
    child.communicate(owner.ticket.to_json() + "\n", timeout=30)
    assert -signal.SIGSEGV == child.returncode
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        assert pattern(0, 17) == read_slot(attached, 0, 17)


def test_only_ready_slots_of_a_dead_owner_can_be_read(owner):
    """After SIGKILL whole slots keep their bytes, half-filled and empty ones are refused, and all is gone at close."""
    owner.tell("fill 0 3 7")
    owner.tell("fill 1 70 8")
    owner.tell("fill 0 4 9")
    owner.tell("begin 0 4")  # yesterday it was whole, and it is being overwritten
    inodes = memfds_of(owner.ticket)
    before = leak_check.snapshot()
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        assert attached.slot_addresses(0, [3, 4, 5]).all()
        owner.kill()
        assert not attached.owner_alive()
        assert pattern(0, 3) == read_slot(attached, 0, 3)
        assert pattern(1, 70) == read_slot(attached, 1, 70)
        for slot in (4, 5):
            with pytest.raises(RequestError, match=rf"slot {slot} of group 0 cannot be read: .* has ended before"):
                attached.slot_addresses(0, [3, slot])
        assert {os.getpid()} == users_of(inodes)
    assert set() == users_of(inodes)
    assert [] == leak_check.find_leaks(before)


def test_an_owner_that_closed_its_arena_is_not_dead(owner):
    """Readers are told of an orderly end: READY slots stay readable, others are refused, new readers too."""
    owner.tell("fill 0 3 7")
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        owner.tell("close")
        assert attached.owner_alive()
        assert attached.status.is_closed_by_owner()
        assert pattern(0, 3) == read_slot(attached, 0, 3)
        with pytest.raises(RequestError, match="closed its arena before the slot was READY"):
            attached.slot_addresses(0, [5])
        with pytest.raises(BrokenError, match="is not open: the owner closed its arena"):
            AttachedArena(owner.ticket, LAYOUT)


def test_a_hung_owner_is_slow_and_not_dead(owner):
    """A stopped owner can be attached to and read; its heartbeat grows stale and its pidfd says that it lives."""
    owner.tell("fill 0 17 5")
    owner.stop()
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        beats = attached.status.heartbeat().count
        assert attached.status.is_stale(0.0)  # by now some nanoseconds have passed without one
        assert beats == attached.status.heartbeat().count
        assert attached.owner_alive()
        assert pattern(0, 17) == read_slot(attached, 0, 17)
        owner.process.send_signal(signal.SIGCONT)
        owner.tell("beat")
        assert beats + 1 == attached.status.heartbeat().count
        assert not attached.status.is_stale(60.0)


def test_a_slow_owner_is_not_waited_for(start_owner):
    """Attaching to an owner that has published nothing yet works at once; its slots are refused until it has."""
    owner = start_owner()
    with AttachedArena(owner.ticket, LAYOUT) as attached:
        assert [0, 0, 0] == [attached.status.num_published(group) for group in range(3)]
        assert [] == attached.published_ranges()
        with pytest.raises(RequestError, match=r"slot 2 of group 0 cannot be read: the owner published 0 of 40 slots"):
            attached.slot_addresses(0, [2])
        owner.tell("publish")
        assert attached.slot_addresses(0, np.arange(40)).all()
        assert 5 == len(attached.published_ranges())


def test_a_dead_owner_is_refused_at_once(owner):
    """Whether reaped or not, an owner that has ended cannot be attached to, and nothing is left of the attempt."""
    before = leak_check.snapshot()
    owner.process.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is a zombie
    with pytest.raises(BrokenError, match="has ended: start it again"):
        AttachedArena(owner.ticket, LAYOUT)
    owner.process.wait(30)
    with pytest.raises(BrokenError, match="is gone: start it again"):
        AttachedArena(owner.ticket, LAYOUT)
    assert [] == leak_check.find_leaks(before)


def test_an_owner_that_was_started_again_needs_its_new_ticket(owner, start_owner):
    """The old ticket does not open the arena of the next owner, whatever of it is still right (B19)."""
    owner.kill()
    successor = start_owner()
    for ticket in (
        owner.ticket,
        # As if the kernel had given out the number again, with files of the same numbers.
        _with_owner(owner.ticket, successor.ticket),
    ):
        with pytest.raises(BrokenError):
            AttachedArena(ticket, LAYOUT)
    AttachedArena(successor.ticket, LAYOUT).close()


def _with_owner(old, new):
    return ArenaTicket(
        new.owner, old.segments, old.status, old.nonce, old.layout_fingerprint, old.groups, old.format_version
    )


def test_readers_come_and_go_without_a_trace(owner, start):
    """Three readers read at once and end in different ways; the owner is not touched and keeps nothing of them."""
    owner.tell("fill 0 17 5")
    descriptors = sorted(Path(f"/proc/{owner.pid}/fd").iterdir())
    readers = [
        start(ATTACH.format(before="").replace("flush=True)", "flush=True); sys.stdin.read()")) for _ in range(3)
    ]
    for reader in readers:
        reader.stdin.write(owner.ticket.to_json() + "\n")
        reader.stdin.flush()
    for reader in readers:
        assert f"attached {pattern(0, 17)[0]}\n" == reader.stdout.readline()
    inodes = memfds_of(owner.ticket)
    assert {owner.pid, *(reader.pid for reader in readers)} == users_of(inodes)
    readers[0].kill()
    readers[1].terminate()
    for reader in readers:
        reader.communicate(timeout=30)
    assert {owner.pid} == users_of(inodes)
    assert descriptors == sorted(Path(f"/proc/{owner.pid}/fd").iterdir())
    owner.tell("beat")


def test_a_killed_owner_and_reader_leave_nothing(owner, start):
    """SIGKILL of both ends leaves no memory, no file and no process, and a fresh start works (B18, B21)."""
    reader = start(ATTACH.format(before="").replace("flush=True)", "flush=True); sys.stdin.read()"))
    reader.stdin.write(owner.ticket.to_json() + "\n")
    reader.stdin.flush()
    assert reader.stdout.readline().startswith("attached")
    owner.kill()
    reader.kill()
    reader.communicate(timeout=30)
    assert set() == users_of(memfds_of(owner.ticket))


def test_segments_of_living_processes_are_found(start_owner):
    """The finder sees the owners of this host and no ended one."""
    first, second = start_owner("found-1"), start_owner("found-2")
    assert [first.pid] == [found.pid for found in find_status_segments("found-1")]
    (found,) = find_status_segments("found-2")
    with found.open() as reader:
        assert second.ticket.nonce == reader.header.nonce
    second.kill()
    assert [] == find_status_segments("found-2")
    with pytest.raises(BrokenError, match="look for it again"):
        found.open()


def test_a_forked_copy_of_a_descriptor_is_not_an_owner(start):
    """A child that holds its parent's descriptor, forked behind the interpreter's back, is not listed beside it."""
    code = """
        import ctypes, os, sys
        from kvmoor.host_memory.status_segment import StatusSegment
        from shared_arena import LAYOUT, PLAN
        segment = StatusSegment(PLAN, LAYOUT, engine_id="forking", rank=0)
        if not ctypes.CDLL(None).fork():
            print(os.getpid(), flush=True)
            sys.stdin.read()
            os._exit(0)
        os.wait()
        segment.close()
    """
    parent = start("if True:" + code)
    child_pid = int(parent.stdout.readline())
    assert any("kvmoor:forking" in _target(entry) for entry in Path(f"/proc/{child_pid}/fd").iterdir())
    assert [parent.pid] == [found.pid for found in find_status_segments("forking")]
    parent.communicate(timeout=30)


def test_a_forked_copy_of_an_owner_cannot_be_attached_to(start):
    """A child that holds all files of the owner, under their numbers, is refused: what the owner says is not of it."""
    code = """
        import ctypes, os, sys
        import shared_arena
        with shared_arena.sharing_owner("forking") as owner:
            has_printed, child_prints = os.pipe()
            if not ctypes.CDLL(None).fork():
                print(os.getpid(), flush=True)
                os.write(child_prints, b"1")
                sys.stdin.read()
                os._exit(0)
            os.read(has_printed, 1)
            print(owner.ticket.to_json(), flush=True)
            os.wait()
    """
    parent = start("if True:" + code)
    child_pid, ticket = int(parent.stdout.readline()), ArenaTicket.from_json(parent.stdout.readline())
    AttachedArena(ticket, LAYOUT).close()
    child = replace(ticket.owner, pid=child_pid, start_time=read_start_time(child_pid, ProcessCalls()))
    with pytest.raises(BrokenError, match=rf"belongs to process {parent.pid}, .* names process {child_pid},"):
        AttachedArena(replace(ticket, owner=child), LAYOUT)
    parent.communicate(timeout=30)


def test_attached_pages_stay_out_of_core_dumps(owner):
    """The kernel dumps nothing of an owner's memory with a reader that crashes, and gives none of it to its forks."""
    with AttachedArena(owner.ticket, LAYOUT):
        flags = flags_of_mappings(memfds_of(owner.ticket))
    assert 6 == len(flags)  # five slabs and the status segment
    assert all({"dd", "dc"} <= found for found in flags), flags


def flags_of_mappings(inodes):
    """Return the flags of each mapping of these files, as the kernel lists them for this process."""
    flags, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            ours = int(fields[4]) in inodes
        elif ours and fields[0] == "VmFlags:":
            flags.append(set(fields[1:]))
    return flags


@needs_root
@pytest.mark.root
def test_the_kernel_refuses_another_user(owner, start):
    """A reader that runs as another user is refused by the kernel, and told why."""
    before = "import encodings.idna\nos.setgroups([]); os.setgid(65534); os.setuid(65534)"
    child = start(ATTACH.format(before=before))
    output, _ = child.communicate(owner.ticket.to_json() + "\n", timeout=30)
    assert output.startswith("BrokenError the kernel refuses opening descriptor"), output
    assert "runs as user 65534" in output
    assert "attach as the user who runs the owner" in output
    assert {owner.pid} == users_of(memfds_of(owner.ticket))


@needs_root
@pytest.mark.root
def test_another_pid_namespace_is_named(owner, start):
    """A reader in another pid namespace is told so, with what to do."""
    child = start(ATTACH.format(before=""), "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    output, _ = child.communicate(owner.ticket.to_json() + "\n", timeout=30)
    if not output:
        pytest.skip("this machine cannot make a pid namespace")
    assert output.startswith("SettingsError "), output
    assert "in another pid namespace" in output
    assert "shareProcessNamespace" in output


def test_a_ticket_of_another_boot_is_refused(owner):
    """A ticket that outlived a restart of the host, or came from another one, is refused before anything is opened."""
    fields = owner.ticket.to_json().replace(owner.ticket.owner.boot_id, "11111111-2222-3333-4444-555555555555")
    with pytest.raises(SettingsError, match="another host or before a restart"):
        AttachedArena(ArenaTicket.from_json(fields), LAYOUT)
