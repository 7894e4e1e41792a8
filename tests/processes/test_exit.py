"""Processes that end with something of kvmoor open: they leave in time, with their own exit code, and leave nothing."""

import time

import pytest

from child_processes import WAIT_S, children, names_in_shared_memory

PREAMBLE = """
import os, sys, threading
import numpy as np
from device_blocks import DeviceBlocks, content_keys
from kvmoor import process_end
from kvmoor.devices.cpu import CpuDevice
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies

process_end.EXIT_TIMEOUT_S = 0.3
scripted = ScriptedCopies()
blocks = DeviceBlocks()

def open_offloader(**options):
    return Offloader(blocks.layout(), host_memory="64KiB", device=CpuDevice(copy_hook=scripted), **options)

def begin_endless_copy(offloader):
    gate = scripted.hang_at(scripted.num_copies())
    offloader.submit_store(content_keys(0), [0])
    assert gate.wait_reached(30)

def leave():
    print("leaving", flush=True)
"""
EXIT_S = 0.3
START_AND_STOP_S = 8.0
"""What a start and an end of the interpreter may take beside; they take 0.3 s, on a busy machine a few times that."""


@pytest.fixture
def start():
    with children(PREAMBLE) as start_child:
        yield start_child


WAYS = [
    pytest.param("", 0, id="falls off the end"),
    pytest.param("sys.exit(3)", 3, id="sys.exit"),
    pytest.param("raise ZeroDivisionError", 1, id="exception"),
    pytest.param("os._exit(4)", 4, id="os._exit"),
    pytest.param("threading.Thread(target=int).start(); sys.exit(5)", 5, id="with a thread of its own"),
    pytest.param("os.kill(os.getpid(), 15)", -15, id="SIGTERM by default"),
]


@pytest.mark.parametrize(("way", "code"), WAYS)
def test_an_endless_copy_does_not_hold_up_exit(start, way, code):
    """A process with a copy that never ends leaves within its deadline, with its own exit code (B17, B24)."""
    before = names_in_shared_memory()
    child = start(f"""
        offloader = open_offloader()
        begin_endless_copy(offloader)
        leave()
        {way}
    """)
    assert "leaving\n" == child.stdout.readline()
    started = time.monotonic()
    output, errors = child.communicate(timeout=WAIT_S)
    seconds = time.monotonic() - started
    assert (code, "") == (child.returncode, output), errors
    assert seconds < EXIT_S + START_AND_STOP_S
    assert ("ZeroDivisionError" in errors) is (way == "raise ZeroDivisionError")
    assert before == names_in_shared_memory()


def test_exit_waits_for_a_copy_that_ends(start):
    """A copy that ends within the exit deadline is waited for, and everything is given back, without a word."""
    child = start("""
        process_end.EXIT_TIMEOUT_S = 30.0
        class Slow(ScriptedCopies):
            def __call__(self, copy):
                super().__call__(copy)
                os.write(1, b"copied\\n")
        scripted = Slow()
        gate = scripted.hold("store")
        offloader = open_offloader()
        offloader.submit_store(content_keys(0), [0])
        assert gate.wait_reached(30)
        class Owner:  # opened later, so closed earlier: the copy goes on once exit has begun
            def close(self, timeout_s):
                gate.release()
        owner = Owner()
        process_end.register(owner, close=owner.close)
        leave()
    """)
    output, errors = child.communicate(timeout=WAIT_S)
    assert (0, "leaving\ncopied\n", "") == (child.returncode, output, errors)


def test_a_forgotten_close_is_a_resource_warning_at_most(start):
    """Without a close the process ends cleanly and silently; who asks for such warnings gets exactly one."""
    code = """
        offloader = open_offloader()
        job = offloader.submit_store(content_keys(0, 1), [0, 1]).job_id
        offloader.wait([job], 30)
        leave()
    """
    for options, num_warnings in (((), 0), (("-W", "always::ResourceWarning"), 1)):
        child = start(code, *options)
        output, errors = child.communicate(timeout=WAIT_S)
        assert (0, "leaving\n") == (child.returncode, output)
        assert num_warnings == errors.count("ResourceWarning: <"), errors
        assert ("was still open at the end of the process" in errors) is bool(num_warnings)


def test_a_closed_offloader_has_nothing_to_do_at_exit(start):
    """After a close, exit says nothing and takes no time, even where the close had to quarantine."""
    child = start("""
        process_end.EXIT_TIMEOUT_S = 600.0
        with open_offloader() as closed:
            pass
        offloader = open_offloader()
        begin_endless_copy(offloader)
        assert not offloader.close(0.0).worker.graceful
        leave()
    """, "-W", "always::ResourceWarning")  # fmt: skip
    output, errors = child.communicate(timeout=WAIT_S)
    assert (0, "leaving\n", 0) == (child.returncode, output, errors.count("ResourceWarning")), errors


@pytest.mark.parametrize("hangs_on", ["SlotsPublished", "ArenaQuarantined"])
def test_a_hung_observer_does_not_hold_up_exit(start, hangs_on):
    """An observer that never returns, on our thread or on the one that leaves, cannot keep the process."""
    child = start(f"""
        reached = threading.Event()
        class Hung:
            def on_event(self, event):
                if type(event).__name__ == "{hangs_on}":
                    reached.set()
                    threading.Event().wait()
        offloader = open_offloader(observer=Hung())
        if "{hangs_on}" == "SlotsPublished":
            assert reached.wait(30)
        else:
            begin_endless_copy(offloader)  # so that closing at exit quarantines
        leave()
        sys.exit(6)
    """)
    output, errors = child.communicate(timeout=WAIT_S)
    assert (6, "leaving\n") == (child.returncode, output)
    assert "stay mapped until the process ends" in errors


def test_two_offloaders_share_the_exit_deadline(start):
    """Several things that hang take one deadline together, not one each."""
    child = start("""
        process_end.EXIT_TIMEOUT_S = 0.5
        opened = [open_offloader() for _ in range(8)]
        for offloader in opened:
            begin_endless_copy(offloader)
        leave()
    """)
    assert "leaving\n" == child.stdout.readline()
    started = time.monotonic()
    child.communicate(timeout=WAIT_S)
    assert 0 == child.returncode
    assert time.monotonic() - started < 8 * 0.5


def test_exit_while_another_thread_closes(start):
    """If a thread is still closing beside an endless copy, exit does not unmap under it, and leaves in time."""
    child = start("""
        offloader = open_offloader()
        begin_endless_copy(offloader)
        threading.Thread(target=offloader.close, args=(600.0,), daemon=True).start()
        while not offloader.closed:
            threading.Event().wait(0.001)
        leave()
        sys.exit(7)
    """)
    output, errors = child.communicate(timeout=WAIT_S)
    assert (7, "leaving\n") == (child.returncode, output)
    assert "BusyError" in errors


def test_a_child_of_a_process_pool_ends_normally(start):
    """A `multiprocessing` child that opens an offloader of its own and forgets it ends with code 0, without a word."""
    child = start("""
        import multiprocessing
        def work():
            offloader = open_offloader()
            job = offloader.submit_store(content_keys(0), [0]).job_id
            offloader.wait([job], 30)
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(30)
        print(process.exitcode)
    """)
    output, errors = child.communicate(timeout=WAIT_S)
    assert (0, "0\n", "") == (child.returncode, output, errors)
