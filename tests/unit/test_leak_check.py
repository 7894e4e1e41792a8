"""The leak check can fail: a check that never does proves nothing."""

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import leak_check
from kvmoor.host_memory.page_mapping import SystemCalls

TESTS = Path(__file__).parents[1]
MAP_NORESERVE = 0x4000  # not in the mmap module
LEAKY_TESTS = """
import mmap
import os
import threading

import pytest

kept = []


def map_like_an_arena():
    mapping = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    kept.append(mapping)


def test_descriptor():
    os.memfd_create("other")


def test_memfd():
    os.memfd_create("kvmoor-test")


def test_mapping():
    map_like_an_arena()


def test_thread():
    threading.Thread(target=threading.Event().wait, args=(60,), name="kvmoor-test", daemon=True).start()


def test_fails_and_leaks():
    os.memfd_create("other")
    assert False


@pytest.mark.usefixtures("expects_quarantine")
def test_quarantine_ok():
    map_like_an_arena()
    os.memfd_create("kvmoor-test")
    threading.Thread(target=threading.Event().wait, args=(60,), name="kvmoor-test", daemon=True).start()


@pytest.mark.usefixtures("expects_quarantine")
def test_quarantine_and_descriptor():
    os.memfd_create("other")


def test_clean_ok():
    os.close(os.memfd_create("other"))
"""


@pytest.fixture
def before() -> leak_check.Resources:
    return leak_check.snapshot()


def test_nothing_is_reported_when_nothing_is_left(before):
    """A process that gave everything back has no leaks."""
    os.close(os.memfd_create("kvmoor-test"))
    assert [] == leak_check.find_leaks(before)


def test_an_open_descriptor_is_reported_with_its_target(before):
    """A descriptor left open is named with what it refers to."""
    descriptor = os.memfd_create("kvmoor-test")
    try:
        leaks = leak_check.find_leaks(before)
    finally:
        os.close(descriptor)
    assert [f"file descriptor {descriptor}: /memfd:kvmoor-test (deleted)"] == leaks


def test_a_descriptor_replaced_under_its_number_is_reported(before):
    """A count would not see it: one descriptor closed by mistake, another left open in its place."""
    first = os.memfd_create("first")
    before = leak_check.snapshot()
    os.close(first)
    second = os.memfd_create("second")
    try:
        leaks = leak_check.find_leaks(before)
    finally:
        os.close(second)
    assert first == second
    assert [f"file descriptor {first}: /memfd:second (deleted)"] == leaks


def test_a_thread_that_does_not_end_is_reported(before):
    """A thread of kvmoor that outlives the wait is named; another library's thread is not."""
    leave = threading.Event()
    threads = [threading.Thread(target=leave.wait, args=(60,), name=name) for name in ("kvmoor-lane", "other")]
    for thread in threads:
        thread.start()
    try:
        leaks = leak_check.find_leaks(before, timeout_s=0.01)
    finally:
        leave.set()
        for thread in threads:
            thread.join(60)
    assert ["thread kvmoor-lane"] == leaks


def test_a_thread_on_its_way_out_is_waited_for(before):
    """A thread that ends within the wait is no leak."""
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, args=(60,), name="kvmoor-lane")
    thread.start()
    releaser = threading.Timer(0.05, leave.set)
    releaser.start()
    assert [] == leak_check.find_leaks(before, timeout_s=60)
    releaser.join(60)


class FarReservation:
    """Addresses far from all others: beside a heap of libc's the kernel would join the two into one mapping."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._nbytes = nbytes
        self.address = SystemCalls().mmap(0x3000_0000_1000, nbytes, 0, flags, -1, 0)

    def close(self) -> None:
        SystemCalls().munmap(self.address, self._nbytes)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("anonymous", "anonymous memory"), ("memfd", "/memfd:kvmoor-test"), ("reserved", "reserved addresses")],
)
def test_a_mapping_like_that_of_an_arena_is_reported_in_bytes(before, kind, name):
    """Memory mapped as an arena maps it and never unmapped is reported, and nothing once it is unmapped."""
    nbytes = 4 << 20
    if kind == "memfd":
        descriptor = os.memfd_create("kvmoor-test")
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes)  # keeps a descriptor of its own
        os.close(descriptor)
    elif kind == "anonymous":
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    else:
        mapping = FarReservation(nbytes)
    try:
        leaks = leak_check.find_leaks(before)
        allowed = leak_check.find_leaks(before, expects_quarantine=True)
    finally:
        mapping.close()
    assert any(leak.startswith(f"{nbytes} bytes of {name}") for leak in leaks), leaks
    assert not any("bytes of" in leak for leak in allowed)
    assert [] == leak_check.find_leaks(before)


@pytest.mark.parametrize("others_follow", [False, True])
def test_a_mapping_in_the_exact_place_of_another_is_reported_in_the_end(monkeypatch, others_follow):
    """What the check after a test takes for memory of before it, the check after all tests finds, whatever follows."""
    monkeypatch.setattr(leak_check, "_mistaken", [])
    mapping = FarReservation(1 << 20)  # too small to be taken for an arena's
    try:
        before = leak_check.snapshot()
        SystemCalls().madvise(mapping.address, 1 << 20, mmap.MADV_HUGEPAGE)
        at_once = leak_check.find_leaks(before)
        if others_follow:
            with mmap.mmap(-1, 12_345_678, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
                assert [] == leak_check.find_leaks(leak_check.snapshot())
        in_the_end = leak_check.find_mistaken()
    finally:
        mapping.close()
    assert [] == at_once
    assert [f"{1 << 20} bytes of anonymous memory at {mapping.address:#x}"] == in_the_end


def test_what_is_quarantined_in_the_place_of_another_is_held_against_nobody(monkeypatch):
    """Memory that stays on purpose is no leak of a later test, nor of all, in whose place it may be."""
    monkeypatch.setattr(leak_check, "_mistaken", [])
    mapping = FarReservation(1 << 20)
    try:
        before = leak_check.snapshot()
        SystemCalls().madvise(mapping.address, 1 << 20, mmap.MADV_HUGEPAGE)
        at_once = leak_check.find_leaks(before, expects_quarantine=True)
        later = leak_check.find_leaks(leak_check.snapshot())
        in_the_end = leak_check.find_mistaken()
    finally:
        mapping.close()
    assert ([], [], []) == (at_once, later, in_the_end)


def test_ordinary_memory_is_not_reported(before):
    """Large memory of the interpreter or of numpy is not taken for an arena."""
    import numpy as np

    kept = [np.ones(16 << 20, dtype=np.uint8), bytearray(16 << 20)]
    assert [] == leak_check.find_leaks(before)
    del kept


def test_a_library_in_a_folder_of_this_name_is_not_reported(before, tmp_path):
    """A clone named kvmoor holds libraries under that name, and they stay loaded."""
    path = tmp_path / "kvmoor.so"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        leaks = leak_check.find_leaks(before)
    assert [] == [leak for leak in leaks if "bytes of" in leak]


def test_a_test_that_leaks_fails(tmp_path):
    """The fixture turns each kind of leak into a failure of the test that made it, and of no other."""
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:randomly", "-p", "no:cacheprovider", "-rA", "-q"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    errors = {line.split("::")[1].split(" ")[0] for line in run.stdout.splitlines() if line.startswith("ERROR ")}
    assert 1 == run.returncode, run.stdout + run.stderr
    assert {
        "test_descriptor",
        "test_memfd",
        "test_mapping",
        "test_thread",
        "test_fails_and_leaks",
        "test_quarantine_and_descriptor",
    } == errors, run.stdout
