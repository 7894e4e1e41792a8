"""The end of a process, with plain objects: real exits and real forks, each in an interpreter of its own."""

import gc
import sys
import threading
import weakref

import pytest

from child_processes import WAIT_S, children
from kvmoor import process_end

PREAMBLE = """
import gc, logging, os, sys, threading, time
from kvmoor import process_end
from kvmoor.process_end import close_in_forked_child, is_leaving, register

def say(text):
    os.write(1, f"{text}\\n".encode())

class Owner:
    def __init__(self, name, *, exits=True, forks=True):
        self.name = name
        self.registration = register(
            self, close=self.close if exits else None, forked=self.forked if forks else None
        )

    def __repr__(self):
        return f"<Owner {self.name}>"

    def close(self, timeout_s):
        say(f"close {self.name}")

    def forked(self):
        say(f"forked {self.name}")

def fork(in_child):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        in_child()
        sys.exit(0)  # a normal exit, with all that is registered for it
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.fixture
def run():
    """Return a function that runs code in a process of its own: its exit code, stdout and stderr."""
    with children(PREAMBLE) as start:

        def run_child(code, *options):
            child = start(code, *options)
            output, errors = child.communicate(timeout=WAIT_S)
            return child.returncode, output.split("\n")[:-1], errors

        yield run_child


def test_exit_closes_what_is_open_newest_first(run):
    """What is open at exit is closed in reverse order of opening, and what was released is left alone."""
    ended = run("a, b, c, d = (Owner(name) for name in 'abcd'); b.registration.release(); b.registration.release()")
    assert (0, ["close d", "close c", "close a"], "") == ended


@pytest.mark.parametrize("way", ["sys.exit(7)", "raise SystemExit(7)", "exit(7)"])
def test_exit_keeps_the_exit_code(run, way):
    """The process ends with its own exit code, also when a close raises, and the next one is closed all the same."""
    code, output, errors = run(f"""
        class Broken(Owner):
            def close(self, timeout_s):
                raise OSError("the driver is gone")
        first, broken, last = Owner("first"), Broken("broken"), Owner("last")
        {way}
    """)
    assert (7, ["close last", "close first"]) == (code, output)
    assert "OSError: the driver is gone" in errors
    assert "closing at exit raised" in errors


def test_an_unhandled_exception_closes_too(run):
    """A process that ends by an exception closes what is open, and reports the exception as ever."""
    code, output, errors = run("owner = Owner('a'); 1 / 0")
    assert (1, ["close a"]) == (code, output)
    assert "ZeroDivisionError" in errors.splitlines()[-1]


def test_all_closes_share_one_deadline(run):
    """Each close is told what is left of the one exit deadline, and nothing once it is used up."""
    code, output, _ = run("""
        process_end.EXIT_TIMEOUT_S = 0.1
        class Slow(Owner):
            def close(self, timeout_s):
                say(0.0 < timeout_s <= 0.1)
                threading.Event().wait(timeout_s)  # a copy that never ends
        class Late(Owner):
            def close(self, timeout_s):
                say(timeout_s)
        late, slow = Late("late"), Slow("slow")
    """)
    assert (0, ["True", "0.0"]) == (code, output)
    assert 5.0 == process_end.EXIT_TIMEOUT_S


def test_a_forgotten_close_is_a_resource_warning(run):
    """What was still open is named in a ResourceWarning, which nobody sees who did not ask for it."""
    code, output, errors = run("owner = Owner('a')", "-W", "default")
    assert (0, ["close a"]) == (code, output)
    assert "ResourceWarning: <Owner a> was still open at the end of the process" in errors


def test_warnings_as_errors_do_not_skip_the_close(run):
    """With warnings as errors the warning becomes a line in the log, and everything is closed."""
    code, output, errors = run("a, b = Owner('a'), Owner('b')", "-W", "error")
    assert (0, ["close b", "close a"]) == (code, output)
    assert "<Owner b> was still open" in errors
    assert "Traceback" not in errors


def test_exit_forgets_owners_that_are_gone(run):
    """An owner that was dropped is neither kept alive nor closed."""
    assert (0, ["close b"], "") == run("a, b = Owner('a'), Owner('b'); del a; gc.collect()")


def test_a_registration_does_not_keep_its_owner_alive():
    """The methods of an owner may be registered: it goes with its last reference, and its registration with it."""

    class Owner:
        def close(self, timeout_s):
            raise AssertionError

        def forked(self):
            raise AssertionError

    before = len(process_end._owners)
    owner = Owner()
    registration = process_end.register(owner, close=owner.close, forked=owner.forked)
    assert before + 1 == len(process_end._owners)
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    assert before == len(process_end._owners)
    registration.release()


def test_any_thread_may_register():
    """Threads that register, drop and release at once, with the collector running, leave nothing registered."""

    class Owner:
        def close(self, timeout_s):
            raise AssertionError

    def work():
        for number in range(300):
            owner = Owner()
            owner.itself = owner  # only the collector sees that it is gone, wherever it happens to run
            registration = process_end.register(owner, close=owner.close)
            if number % 2:
                registration.release()

    gc.collect()
    before = len(process_end._owners)
    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    gc.collect()
    assert before == len(process_end._owners)


def test_a_forked_child_is_told_and_closes_nothing(run):
    """In a forked child every owner is marked closed, oldest first; its exit closes nothing, the parent's does."""
    ended = run("""
        a, b = Owner("a"), Owner("b")
        exit_only, fork_only = Owner("exit only", forks=False), Owner("fork only", exits=False)
        fork(lambda: say("child"))
    """)
    told = ["forked a", "forked b", "forked fork only", "child"]
    assert (0, [*told, "close exit only", "close b", "close a"], "") == ended


def test_a_child_closes_what_it_opened_itself(run):
    """What a forked child opens is closed at its own exit, and only that."""
    ended = run("""
        parent = Owner("parent")
        def in_child():
            global child
            child = Owner("child")
        fork(in_child)
    """)
    assert (0, ["forked parent", "close child", "close parent"], "") == ended


def test_the_parent_keeps_what_it_opened(run):
    """A fork changes nothing in the parent: a second child is told again."""
    code, output, _ = run("a = Owner('a'); fork(lambda: None); fork(lambda: None)")
    assert (0, ["forked a", "forked a", "close a"]) == (code, output)


def test_a_child_of_a_child_is_told_of_its_parent_only(run):
    """What was marked closed in a child is not marked again in the child's own children."""
    ended = run("""
        parent = Owner("parent", exits=False)
        def in_child():
            global child
            child = Owner("child", exits=False)
            fork(lambda: None)
        fork(in_child)
    """)
    assert (0, ["forked parent", "forked child"], "") == ended


def test_a_fork_beside_busy_threads_does_not_hang(run):
    """Whatever other threads register and release meanwhile, a child comes up and ends."""
    code, output, errors = run("""
        sys.setswitchinterval(1e-5)
        started = threading.Barrier(3)
        def work():
            started.wait()
            while not done:
                register(Owner, close=print, forked=int).release()
        done = False
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait()
        for _ in range(50):
            fork(lambda: None)
        done = True
        for thread in threads:
            thread.join()
    """)
    assert (0, []) == (code, output), errors


def test_one_owner_that_raises_does_not_hide_a_fork_from_the_next(run):
    """If marking one thing closed raises, the next one is marked all the same."""
    code, output, errors = run("""
        class Broken(Owner):
            def forked(self):
                raise OSError("no")
        broken, owner = Broken("broken"), Owner("owner", exits=False)
        fork(lambda: None)
        broken.registration.release()
    """)
    assert (0, ["forked owner"]) == (code, output)
    assert "OSError: no" in errors


def test_descriptors_are_closed_in_a_forked_child(run):
    """A descriptor that was handed in, and not released, is closed in the child and stays open in the parent."""
    ended = run("""
        descriptor, released = os.memfd_create("kvmoor:test"), os.memfd_create("released")
        close_in_forked_child(descriptor)
        close_in_forked_child(released).release()
        def links():
            links = []
            for entry in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{entry}"))
                except OSError:
                    pass  # the descriptor that lists the folder
            return [sum(name in link for link in links) for name in ("kvmoor:test", "released")]
        fork(lambda: say(links()))
        say(links())
    """)
    assert (0, ["[0, 1]", "[1, 1]"], "") == ended


def test_a_reused_descriptor_number_is_left_alone(run):
    """Between closing a descriptor and releasing it, its number may go to another file, which a child keeps."""
    ended = run("""
        descriptor = os.memfd_create("kvmoor:test")
        registration = close_in_forked_child(descriptor)
        os.close(descriptor)
        fork(lambda: None)  # nothing to close is fine, too
        other = os.memfd_create("other")
        say(other == descriptor)
        fork(lambda: say(os.readlink(f"/proc/self/fd/{other}")))
        registration.release()
        registration.release()
    """)
    assert (0, ["True", "/memfd:other (deleted)"], "") == ended


def test_a_fork_that_the_interpreter_was_not_told_of_closes_nothing(run):
    """A child forked by foreign code never closes what is the parent's."""
    ended = run("""
        import ctypes
        a = Owner("a")
        pid = ctypes.PyDLL(None).fork()
        if pid == 0:
            sys.exit(0)
        say(os.waitpid(pid, 0)[1])
    """)
    assert (0, ["0", "close a"], "") == ended


def test_the_interpreter_knows_that_it_leaves(run):
    """`is_leaving` is true from the moment that closing at exit begins, and false before."""
    ended = run("""
        class Asking(Owner):
            def close(self, timeout_s):
                say(is_leaving())
        owner = Asking("a")
        say(is_leaving())
    """)
    assert (0, ["False", "True"], "") == ended


def test_no_signal_handler_is_installed(run):
    """The library leaves every signal as it was."""
    ended = run("""
        import signal
        import kvmoor.offloader
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        say(handlers.pop(signal.SIGINT) is signal.default_int_handler)
        say(set(handlers.values()) <= {signal.SIG_DFL, signal.SIG_IGN, None})
    """)
    assert (0, ["True", "True"], "") == ended


def test_an_abandoned_process_ends_at_once(run):
    """`abandon_process` writes out what was printed, ends with its code, and runs no exit hook and no finaliser."""
    ended = run("""
        import atexit
        owner = Owner("a")
        atexit.register(say, "hook")
        print("printed")
        sys.stderr.write("complained")
        process_end.abandon_process(7)
    """)
    assert (7, ["printed"], "complained") == ended


def test_an_abandoned_process_does_not_wait_for_its_readers(run):
    """A pipe that nobody empties does not keep the process: what does not fit is lost."""
    code, _, _ = run("""
        process_end._FLUSH_TIMEOUT_S = 0.1
        reader, writer = os.pipe()
        sys.stdout = open(writer, "w", buffering=1 << 20)
        sys.stdout.write("x" * (1 << 19))
        process_end.abandon_process(3)
    """)
    assert 3 == code


def test_a_process_is_abandoned_from_an_exit_hook_too(run):
    """Where the interpreter is leaving already and starts no thread any more, the end comes all the same."""
    code, output, errors = run("""
        import atexit
        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        def leave():
            threading.Thread.start = refuse
            sys.stdout.write("flushed\\n")
            process_end.abandon_process(5)
        atexit.register(leave)
    """)
    assert (5, ["flushed"], "") == (code, output, errors)
