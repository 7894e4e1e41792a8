"""The cache of compiled kernels: what it trusts, and that nothing about it keeps a kernel from being compiled."""

import errno
import os
import threading
from pathlib import Path

import pytest

from kvmoor.devices.cuda.cubin_cache import load_or_compile
from kvmoor.errors import DeviceError

MODULE = "kvmoor.devices.cuda.cubin_cache"
SOURCE, ARCHITECTURE, DRIVER = "__global__ void copy();", "sm_90", 13000


class Compiler:
    """Counts what it is asked for; its results differ from call to call, so that a cached one is known."""

    def __init__(self):
        self.calls = []
        self.version = "13.0"
        self.error = None
        self.lock = threading.Lock()

    def compile(self, source, architecture, *, options):
        with self.lock:
            self.calls.append((source, architecture, options))
            if self.error:
                raise self.error
            return f"{source} {architecture} {options} {len(self.calls)}".encode() * 1000


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(f"{MODULE}.compile_source", compiler.compile)
    monkeypatch.setattr(f"{MODULE}.compiler_version", lambda: compiler.version)
    return compiler


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "kvmoor" / "cubin"


def load(folder, **changes):
    arguments = {"source": SOURCE, "architecture": ARCHITECTURE, "driver_version": DRIVER, **changes}
    return load_or_compile(arguments.pop("source"), arguments.pop("architecture"), folder=folder, **arguments)


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_kernel_is_compiled_once(compiler, folder):
    """The second process of a machine gets the bytes that the first one compiled."""
    first = load(folder)
    assert first == load(folder) == load(folder)
    assert 1 == len(compiler.calls)


@pytest.mark.parametrize(
    "changes",
    [{"source": SOURCE + " "}, {"architecture": "sm_100"}, {"driver_version": 13010}, {"options": ("--std=c++20",)}],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_the_result_depends_on_is_part_of_the_key(compiler, folder, changes):
    """With another source, architecture, driver or options the kernel is compiled anew, and the old entry stays."""
    first = load(folder)
    assert first != load(folder, **changes)
    assert first == load(folder)
    assert 2 == len(compiler.calls)


def test_another_compiler_compiles_anew(compiler, folder):
    """The version of NVRTC is part of the key."""
    first = load(folder)
    compiler.version = "13.1"
    assert first != load(folder)


def test_fields_of_the_key_do_not_run_into_each_other(compiler, folder):
    """Text that moves from one field into the next makes another key."""
    assert load(folder, source="ab", architecture="c") != load(folder, source="a", architecture="bc")


def test_without_a_folder_nothing_is_kept(compiler):
    """None switches the cache off."""
    assert load(None) != load(None)
    assert 2 == len(compiler.calls)


def test_only_this_user_can_read_what_is_kept(compiler, folder, tmp_path):
    """All folders that are made, and the file, are the user's alone, whatever the umask says."""
    previous = os.umask(0)
    try:
        load(folder)
    finally:
        os.umask(previous)
    modes = {path: path.stat().st_mode & 0o777 for path in (*tmp_path.rglob("*"),)}
    assert {0o700} == {mode for path, mode in modes.items() if path.is_dir()}
    assert 0o600 == modes[only_file(folder)]


def damage_by_cutting(path):
    os.truncate(path, path.stat().st_size - 1)


def damage_by_emptying(path):
    os.truncate(path, 0)


def damage_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def damage_the_checksum(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_emptying, damage_a_bit, damage_the_checksum])
def test_a_damaged_file_is_compiled_again_and_repaired(compiler, folder, damage):
    """Bytes that are not what was written never reach the GPU."""
    load(folder)
    damage(only_file(folder))

    repaired = load(folder)

    assert 2 == len(compiler.calls)
    assert repaired == load(folder)
    assert 2 == len(compiler.calls)


def test_a_whole_file_under_the_wrong_name_is_not_taken(compiler, folder):
    """An intact entry for another architecture, renamed, fails its check."""
    load(folder, architecture="sm_80")
    other = only_file(folder)
    load(folder)
    (mine,) = set(folder.iterdir()) - {other}
    other.replace(mine)

    assert b"sm_90" in load(folder)
    assert 3 == len(compiler.calls)


def make_writable_for_others(path):
    path.chmod(0o666)


def make_a_link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def make_a_pipe(path):
    path.unlink()
    os.mkfifo(path)  # opening it would wait for a writer


@pytest.mark.parametrize("change", [make_writable_for_others, make_a_link, make_a_pipe])
def test_what_others_could_have_written_is_not_trusted(compiler, folder, change):
    """A file that others may write, a link and a pipe are not read; the kernel is compiled at once."""
    load(folder)
    change(next(folder.glob("*.cubin")))
    load(folder)
    assert 2 == len(compiler.calls)


def test_a_file_of_another_user_is_not_trusted(compiler, folder, monkeypatch):
    """Whoever owns the file decides what runs on the GPU."""
    load(folder)
    monkeypatch.setattr("os.geteuid", lambda: only_file(folder).stat().st_uid + 1)
    load(folder)
    assert 2 == len(compiler.calls)


def test_a_folder_in_place_of_the_entry_is_survived(compiler, folder):
    """Something that can be neither read nor replaced costs the cache, not the kernel."""
    load(folder)
    path = only_file(folder)
    path.unlink()
    (path / "full").mkdir(parents=True)
    assert load(folder) != load(folder)


def test_a_file_in_place_of_the_folder_is_survived(compiler, folder):
    """If the folder cannot be made each start compiles."""
    folder.parent.parent.write_text("not a folder")
    assert load(folder) != load(folder)


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fdopen", "pathlib.Path.replace", "pathlib.Path.mkdir"])
def test_a_full_disk_costs_the_cache_only_and_leaves_nothing(compiler, folder, monkeypatch, step):
    """Whichever step of keeping the result fails, it is returned, and no half-written file stays."""

    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(step, fail)
        assert b"sm_90" in load(folder)

    assert [] == list(folder.glob("*"))
    assert load(folder) == load(folder)


def test_a_kernel_that_does_not_compile_is_not_kept(compiler, folder):
    """The compiler's error is the caller's, and the next call asks the compiler again."""
    compiler.error = DeviceError("line 1: no")
    with pytest.raises(DeviceError, match="line 1: no"):
        load(folder)
    assert not folder.exists()
    compiler.error = None
    assert load(folder) == load(folder)


def test_many_at_once_agree_and_leave_one_file(compiler, folder):
    """Processes that start together may all compile; each gets a whole kernel, and what is kept is one of them."""
    barrier = threading.Barrier(8)
    results = []

    def run():
        barrier.wait()
        results.append(load(folder))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 8 == len(results)
    assert load(folder) in results
    assert ".cubin" == only_file(folder).suffix


def test_what_a_killed_process_left_is_removed(compiler, folder):
    """A temporary file older than an hour goes with the next write; one that is being written stays."""
    folder.mkdir(parents=True)
    old, new = folder / ".writing-old", folder / ".writing-new"
    for path in (old, new):
        path.write_bytes(b"half a kernel")
    os.utime(old, (1, 1))

    load(folder)

    assert {new.name} == {path.name for path in folder.iterdir() if path.suffix != ".cubin"}


def test_a_relative_folder_works(compiler, tmp_path, monkeypatch):
    """The folder may be named from where the process is."""
    monkeypatch.chdir(tmp_path)
    assert load(Path("cache")) == load(Path("cache"))
