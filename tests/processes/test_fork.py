"""Children forked from a process with an open offloader: they have nothing of it, and keep nothing of it alive."""

import os
import signal
from pathlib import Path

import pytest

from child_processes import WAIT_S, children, processes_with_memfd

PREAMBLE = """
import multiprocessing, os, re, signal, subprocess, sys, threading, warnings
from pathlib import Path
import numpy as np
from device_blocks import DeviceBlocks, content_keys
from kvmoor import process_end
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import ClosedError
from kvmoor.host_memory.arena import Arena, ArenaState
from kvmoor.host_memory.quarantine import quarantined_nbytes
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking beside threads, which is the point here
HOST_NBYTES = 16 << 20
scripted = ScriptedCopies()
blocks = DeviceBlocks()
for number in range(4):
    blocks.fill(number, number)

def open_offloader(**options):
    return Offloader(blocks.layout(), host_memory=HOST_NBYTES, device=CpuDevice(copy_hook=scripted), **options)

def store(offloader, *numbers):
    job = offloader.submit_store(content_keys(*numbers), list(numbers)).job_id
    offloader.wait([job], 30)

def load(offloader, number, block_id):
    with offloader.match(content_keys(number)) as match:
        job = offloader.submit_load(match, [block_id])
    offloader.wait([job], 30)
    return bool((blocks.content(block_id) == blocks.pattern(number)).all())

def say(*values):
    os.write(1, (" ".join(map(str, values)) + "\\n").encode())

def refused(call):
    try:
        call()
    except ClosedError as error:
        return "ClosedError" if "forked" in str(error) or "closed" in str(error) else str(error)
    return "allowed"

def fork(in_child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs fails the test by its exit status
        in_child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def maps(address, pid="self"):
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False
"""


@pytest.fixture
def start():
    with children(PREAMBLE) as start_child:
        yield start_child


@pytest.fixture
def run(start):
    """Return a function that runs code in a process of its own and returns the lines it printed."""

    def run_child(code, *options):
        child = start(code, *options)
        output, errors = child.communicate(timeout=WAIT_S)
        assert (0, "") == (child.returncode, errors)
        return output.splitlines()

    return run_child


def test_a_child_sees_it_closed(run):
    """Whatever a forked child asks of its parent's offloader is refused or answered from nothing, and never hangs."""
    lines = run("""
        offloader = open_offloader()
        store(offloader, 0, 1)
        job = offloader.submit_store(content_keys(2), [2]).job_id
        def in_child():
            say(offloader.closed, offloader._worker.closed)
            say(refused(lambda: offloader.submit_store(content_keys(3), [3])))
            say(refused(lambda: offloader.match(content_keys(0))))
            say(refused(lambda: offloader.wait([job], 0)))
            say(refused(lambda: offloader._worker.arena.slot_addresses(0, np.array([0]))))
            say(offloader.poll_results(), offloader.statistics().transfers.running, offloader.statistics().blocks.ready)
            report = offloader.close(5)
            say(report.worker.quarantined_nbytes, report.unresolved_keys, report.worker.seconds)
            arena = offloader._worker.arena
            say(arena.state.value, arena.close(0), arena.descriptors)
        say(fork(in_child))
    """)
    assert ["True True", *["ClosedError"] * 4, "[] 0 0", "0 () 0.0", "closed True ()", "0"] == lines


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)", "pass"])
def test_a_child_ends_at_once_and_the_parent_goes_on(run, way):
    """The child's exit closes nothing of the parent's, which stores and loads on, also a job from before the fork."""
    lines = run(f"""
        offloader = open_offloader()
        gate = scripted.hold("store")
        job = offloader.submit_store(content_keys(0, 1), [0, 1]).job_id
        assert gate.wait_reached(30)
        def in_child():
            {way}
        say(fork(in_child))
        gate.release()
        offloader.wait([job], 30)
        store(offloader, 2)
        say(load(offloader, 0, 8), load(offloader, 2, 9))
        say(offloader.close().worker.graceful)
    """)
    assert ["0", "True True", "True"] == lines


def test_a_child_leaves_the_parents_with_blocks(run):
    """A child that leaves through its parent's with blocks closes and releases nothing there, and does not hang."""
    lines = run("""
        with CpuDevice(copy_hook=scripted) as device, Offloader(
            blocks.layout(), host_memory=HOST_NBYTES, device=device
        ) as offloader:
            store(offloader, 0, 1)
            with offloader.match(content_keys(0, 1)) as match:
                pid = os.fork()
                if pid == 0:
                    signal.alarm(20)
                    sys.exit(3)
                say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                say(offloader.statistics().blocks.leased)
            say(load(offloader, 1, 9))
    """)
    assert ["3", "2", "True"] == lines


def test_a_child_does_not_hang_on_locks_that_were_held(run):
    """A thread of the parent may hold every lock of an offloader when it forks; the child gets by all the same."""
    lines = run("""
        device = CpuDevice(copy_hook=scripted)
        offloader = Offloader(blocks.layout(), host_memory=HOST_NBYTES, device=device)
        store(offloader, 0)
        match = offloader.match(content_keys(0))
        worker, arena, coordinator = offloader._worker, offloader._worker.arena, offloader._coordinator
        queues = device._queues
        held = [
            offloader._reports_lock, worker._lock, worker._close_lock, coordinator._lock, arena._close_lock,
            arena._mapper._changed, *(queue._changed for queue in queues),
            *(queue._stream._progress.changed for queue in queues),
        ]
        ready, done = threading.Event(), threading.Event()
        def hold():
            for lock in held:
                lock.acquire()
            ready.set()
            done.wait(30)
            for lock in held:
                lock.release()
        thread = threading.Thread(target=hold)
        thread.start()
        ready.wait(30)
        def in_child():
            match.release()
            offloader.poll_results(), offloader.statistics(), arena.statistics(), repr(arena), repr(offloader)
            arena.take_published(), arena.wait_mapped(20.0), offloader.close(20.0)
            say(device.close(20.0), arena.close(0.0), refused(lambda: offloader.match(content_keys(0))))
        say(fork(in_child))
        done.set()
        thread.join()
        say(offloader.close().worker.graceful)
    """)
    assert ["True True ClosedError", "0", "True"] == lines


def test_a_child_may_open_its_own(run):
    """In a forked child a new offloader works: it maps, copies, closes, and is closed at exit if it was forgotten."""
    lines = run("""
        offloader = open_offloader()
        store(offloader, 0)
        def in_child():
            global own, forgotten
            with open_offloader() as own:
                store(own, 1, 2)
                say(load(own, 2, 10))
            say(own.close().worker.graceful)
            forgotten = open_offloader()
            store(forgotten, 3)
        say(fork(in_child))
        say(load(offloader, 0, 9))
    """)
    assert ["True", "True", "0", "True"] == lines


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing_children(start, tmp_path, method):
    """A `multiprocessing` child, however it is started, ends with code 0 and has neither our memory nor descriptors."""
    script = tmp_path / "parent.py"
    script.write_text(
        PREAMBLE
        + f"""
def work(base):
    inherited = [link for link in map(os.readlink, descriptors()) if "memfd:kvmoor" in link]
    say(maps(base), inherited)

def descriptors():
    for entry in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{{entry}}"):
            yield f"/proc/self/fd/{{entry}}"

if __name__ == "__main__":
    offloader = open_offloader(mapping="eager")
    arena = Arena(offloader.plan, backing=Backing.MEMFD, mapping="eager")
    process = multiprocessing.get_context("{method}").Process(target=work, args=(arena._memory.base,))
    process.start()
    process.join(30)
    say(process.exitcode, maps(arena._memory.base))
    arena.close()
"""
    )
    child = start(f"import runpy; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')")
    output, _ = child.communicate(timeout=WAIT_S)
    assert (0, ["False []", "0 True"]) == (child.returncode, output.splitlines())


@pytest.mark.parametrize("backing", ["ANONYMOUS", "MEMFD"])
@pytest.mark.parametrize("fate", ["open", "quarantined", "dropped"])
def test_a_child_outlives_a_killed_parent_without_its_memory(start, backing, fate):
    """After SIGKILL of the parent no process has its memory, though a forked child lives on, whatever became of it."""
    child = start(f"""
        layout = blocks.layout()
        from kvmoor.host_memory.arena_plan import plan_arena
        name = f"fork-{{os.getpid()}}"
        arena = Arena(plan_arena(layout, HOST_NBYTES), backing=Backing.{backing}, mapping="eager", name=name)
        nbytes, base = arena.nbytes, arena._memory.base
        if "{fate}" == "quarantined":
            arena.quarantine("a copy never ended")
        warnings.simplefilter("ignore")
        if "{fate}" == "dropped":
            del arena
        def resident(pid):
            status = Path(f"/proc/{{pid}}/status").read_text()
            return sum(int(kilobytes) * 1024 for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", status))
        own = resident("self")
        pid = os.fork()
        if pid == 0:
            say(os.getpid())
            say(maps(base), resident("self") <= own - nbytes + (2 << 20), quarantined_nbytes())
            sys.stdin.read()  # until the test lets go
            os._exit(0)
        signal.pause()
    """)
    try:
        grandchild = int(child.stdout.readline())
        assert "False True 0\n" == child.stdout.readline()
        name = f"fork-{child.pid}"
        assert ({child.pid} if backing == "MEMFD" else set()) == processes_with_memfd(name)
        os.kill(child.pid, signal.SIGKILL)
        assert -signal.SIGKILL == child.wait(WAIT_S)
        assert Path(f"/proc/{grandchild}").exists()
        assert set() == processes_with_memfd(name)
    finally:
        child.kill()
        child.stdin.close()
        assert "" == child.stdout.read()  # the grandchild has ended, too


@pytest.mark.parametrize("close_fds", [True, False])
def test_started_programs_inherit_no_descriptor(run, close_fds):
    """A program that the process starts gets none of our descriptors, even if told to inherit what it can."""
    lines = run(f"""
        offloader = open_offloader()
        arena = Arena(offloader.plan, backing=Backing.MEMFD, mapping="eager")
        say(len(arena.descriptors))
        print(subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds={close_fds}, capture_output=True, text=True)
              .stdout.count("kvmoor"), flush=True)
        arena.close()
        offloader.close()
    """)
    assert ["1", "0"] == lines


def test_a_fork_while_the_arena_is_mapped(run):
    """Children forked at any moment of the mapping have nothing of it, and the mapping goes on in the parent."""
    lines = run("""
        from kvmoor.host_memory.arena_plan import plan_arena
        from kvmoor.host_memory.page_mapping import SystemCalls
        step, go_on = threading.Semaphore(0), threading.Semaphore(0)
        class Stepwise(SystemCalls):
            def memset(self, address, nbytes):
                step.release()
                assert go_on.acquire(timeout=30)
                super().memset(address, nbytes)
        for backing in Backing:
            arena = Arena(plan_arena(blocks.layout(), 8 << 20), backing=backing, calls=Stepwise())
            base = arena._memory.base
            for _ in range(4):
                assert step.acquire(timeout=30)
                assert 0 == fork(lambda: say(maps(base), arena.state.value, arena.close(0), arena.wait_mapped(0)))
                go_on.release()
            say(arena.wait_mapped(30), arena.close())
    """)
    assert [*["False closed True False"] * 4, "True True"] * 2 == lines


def test_a_child_calls_no_registrar(run):
    """What the parent page-locked is the parent's: a child that closes and exits makes no call of the registrar."""
    lines = run("""
        class Registrar:
            name = "test"
            calls = 0
            def prepare_thread(self):
                pass
            def register(self, address, nbytes, *, read_only=False):
                self.calls += 1
            def unregister(self, address, nbytes):
                self.calls += 1
        registrar = Registrar()
        device = CpuDevice(copy_hook=scripted, registrar=registrar)
        offloader = Offloader(blocks.layout(), host_memory=HOST_NBYTES, device=device)
        say(offloader._worker.wait_registered(30))
        store(offloader, 0)
        def in_child():
            before = registrar.calls
            offloader.close()
            device.close(0.0)
            say(offloader._worker.arena.statistics().registered_nbytes, registrar.calls - before)
        say(fork(in_child))
        say(load(offloader, 0, 9), offloader.close().worker.graceful, registrar.calls > 1)
    """)
    assert ["True", "0 0", "0", "True True True"] == lines
