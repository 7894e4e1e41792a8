import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OPEN_ARENA = """
import ctypes, os, sys, threading, time
import numpy as np
from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.slab_memory import Backing

layout = BlockLayout((GroupLayout((TensorPages(2**30, 8, 65536, 65536),), tokens_per_block=16),))
plan = plan_arena(layout, 8 * 2**20)
"""


@pytest.fixture
def start_child():
    """Return a function that starts a Python process; whatever is still running at the end is killed."""
    children = []

    def start(code):
        path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])
        child = subprocess.Popen(
            [sys.executable, "-c", OPEN_ARENA + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def names_in_shared_memory():
    """Return our names under /dev/shm; other programs may use it at the same time."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "kvmoor" in entry.name}


@pytest.mark.parametrize("backing", ["ANONYMOUS", "MEMFD"])
def test_a_killed_process_leaves_no_name_behind(start_child, backing):
    """SIGKILL at any time leaves nothing in /dev/shm, because an arena never had a name there (B18, B19, B21)."""
    before = names_in_shared_memory()
    child = start_child(
        f"""
        arena = Arena(plan, backing=Backing.{backing}, mapping="eager", name="victim")
        print("ready", flush=True)
        sys.stdin.read()
        """
    )
    assert "ready\n" == child.stdout.readline()
    assert before == names_in_shared_memory()
    targets = [str(entry.readlink()) for entry in Path(f"/proc/{child.pid}/fd").iterdir()]
    segments = [target for target in targets if target.startswith("/memfd:kvmoor:victim:")]
    assert (1 if backing == "MEMFD" else 0) == len(segments)
    child.kill()
    child.communicate(timeout=30)
    assert -signal.SIGKILL == child.returncode
    assert before == names_in_shared_memory()


def test_a_process_can_end_while_its_arena_is_being_mapped(start_child):
    """A mapping thread that hangs does not hold up the exit of the interpreter."""
    child = start_child(
        """
        reached = threading.Event()
        class StuckCalls(SystemCalls):
            def memset(self, address, nbytes):
                reached.set()
                time.sleep(600)
        arena = Arena(plan, calls=StuckCalls())
        reached.wait(30)
        print("leaving", flush=True)
        """
    )
    output, _ = child.communicate(timeout=30)
    assert "leaving\n" == output
    assert 0 == child.returncode


def test_a_late_copy_may_run_while_the_interpreter_exits(start_child):
    """Quarantined memory, and the objects kept with it, stay until the very end of the process."""
    child = start_child(
        """
        class Tensors:
            def __del__(self, say=os.write):
                say(1, b"freed")
        arena = Arena(plan, mapping="eager")
        address = int(arena.slot_addresses(0, np.array([0]))[0])
        arena.quarantine("a copy never ended", keep_alive=(Tensors(),))
        def copy():
            while True:
                ctypes.memset(address, 1, 65536)
        threading.Thread(target=copy, daemon=True).start()
        del arena
        print("leaving", flush=True)
        """
    )
    output, _ = child.communicate(timeout=30)
    assert "leaving\n" == output
    assert 0 == child.returncode


def test_an_open_arena_that_is_dropped_at_exit_stays_mapped(start_child):
    """No finaliser unmaps: a copy that still runs while the interpreter clears its modules meets memory."""
    child = start_child(
        """
        arena = Arena(plan, mapping="eager")
        address = int(arena.slot_addresses(0, np.array([0]))[0])
        class AtTheEnd:
            def __del__(self, copy=ctypes.memset, address=address, say=os.write):
                copy(address, 1, 65536)
                say(1, b"copied")
        arena.last = AtTheEnd()
        arena.cycle = arena
        """
    )
    output, _ = child.communicate(timeout=30)
    assert "copied" == output
    assert 0 == child.returncode
