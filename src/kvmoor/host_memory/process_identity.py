"""Which process a number means: a process id alone is used again by the next process, also on another host.

Everything here is read from the kernel. A process that vanishes meanwhile is an answer, not a crash.
"""

import fcntl
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmoor.errors import BrokenError
from kvmoor.host_memory.page_mapping import SystemCalls

_COMMAND_FIELD: Final = 2  # of /proc/PID/stat, counted from 1
_PARENT_FIELD: Final = 4
_START_TIME_FIELD: Final = 22


class ProcessCalls(SystemCalls):
    """Add the system calls with which a process finds another one and reads what that one shares."""

    def pidfd_open(self, pid: int) -> int:
        """Return a descriptor that means this process for ever, even after its number is used again."""
        return os.pidfd_open(pid)

    def has_ended(self, pidfd: int) -> bool:
        """Say whether the process behind a pidfd has ended. Never blocks."""
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def open_read_only(self, path: str) -> int:
        """Open a file for reading; never waits for a writer, should the path name a pipe by now."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)

    def fstat(self, fd: int) -> os.stat_result:
        """Tell what a descriptor stands for."""
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        """Tell what a path stands for."""
        return Path(path).stat()

    def read_link(self, path: str) -> str:
        """Return where a link leads."""
        return str(Path(path).readlink())

    def read_text(self, path: str) -> str:
        """Return the contents of a small file."""
        return Path(path).read_text(encoding="utf-8", errors="replace")

    def get_seals(self, fd: int) -> int:
        """Return what is forbidden for a memfd."""
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Read a part of a file."""
        return os.pread(fd, nbytes, offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Write a part of a file."""
        return os.pwrite(fd, data, offset)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Name one process for good.

    `start_time`: clock ticks from the boot of the host. `boot_id`: which boot of which host. `pid_namespace`: the inode
    of the namespace in which `pid` counts.
    """

    pid: int
    start_time: int
    boot_id: str
    pid_namespace: int


def identify_this_process(calls: ProcessCalls) -> ProcessIdentity:
    """Return who we are. Raises `BrokenError` without a usable /proc."""
    pid = os.getpid()
    try:
        mounted_for = calls.read_link("/proc/self")
        if mounted_for != str(pid):
            raise BrokenError(
                f"/proc belongs to another pid namespace (it calls process {pid} {mounted_for}): mount the own one"
            )
        return ProcessIdentity(
            pid,
            read_start_time(pid, calls),
            calls.read_text("/proc/sys/kernel/random/boot_id").strip(),
            calls.stat("/proc/self/ns/pid").st_ino,
        )
    except OSError as error:
        raise BrokenError(f"reading /proc/self failed ({error.strerror or error}): mount /proc") from error


def read_start_time(pid: int, calls: ProcessCalls) -> int:
    """Return when a process started, in clock ticks from the boot of the host. Raises `OSError` if it is gone."""
    return _read_stat(pid, _START_TIME_FIELD, "start time", calls)


def descends_from(pid: int, ancestor: int, calls: ProcessCalls) -> bool:
    """Say whether a process is another one or was started by it, directly or not. False if it is gone.

    A process whose parent has ended belongs to whoever adopted it.
    """
    try:
        while pid != ancestor:
            if pid == 0:  # the parent of the first process of all, or one outside of the pid namespace
                return False
            pid = _read_stat(pid, _PARENT_FIELD, "parent", calls)
    except (OSError, BrokenError):
        return False
    return True


def _read_stat(pid: int, field: int, what: str, calls: ProcessCalls) -> int:
    line = calls.read_text(f"/proc/{pid}/stat")
    # The command stands in brackets and may hold anything, brackets and spaces included; nothing behind it does.
    fields = line.rpartition(")")[2].split()
    try:
        return int(fields[field - _COMMAND_FIELD - 1])
    except (IndexError, ValueError) as error:
        raise BrokenError(f"/proc/{pid}/stat reads {line[:80]!r}: expected the {what} in field {field}") from error
