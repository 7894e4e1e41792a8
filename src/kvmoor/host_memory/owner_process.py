"""The process that owns an arena, as those see it who read the arena: held by a pidfd, so never mistaken for another.

Only the kernel says whether it lives. A heartbeat that stopped means slow, and a closed socket means nothing.
"""

import contextlib
import errno
import fcntl
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from kvmoor.errors import BrokenError, ClosedError, CorruptDataError, KvmoorError, SettingsError
from kvmoor.host_memory.page_mapping import translate_os_error
from kvmoor.host_memory.process_identity import (
    ProcessCalls,
    ProcessIdentity,
    identify_this_process,
    read_start_time,
)

FIXED_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""A mapped file that shrinks kills its readers with SIGBUS."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Name one memfd of a process: the number of its descriptor there, and what has to be found behind it."""

    descriptor: int
    device: int
    inode: int
    nbytes: int


def describe_shared_file(fd: int, calls: ProcessCalls) -> SharedFile:
    """Return what others need to open one of our memfds."""
    try:
        found = calls.fstat(fd)
    except OSError as error:
        raise translate_os_error(
            error, f"looking at our descriptor {fd}", "it was closed by others: keep it open"
        ) from error
    return SharedFile(fd, found.st_dev, found.st_ino, found.st_size)


class OwnerProcess:
    """Hold on to the process that an identity names, and open what it shares; creates nothing and never waits.

    Raises `BrokenError` if that process is gone, was replaced or cannot be looked at, and `SettingsError` if it counts
    in another pid namespace or runs on another host. Any thread may call, but not during or after `close`.
    """

    def __init__(self, identity: ProcessIdentity, calls: ProcessCalls) -> None:
        self._pid = identity.pid
        self._calls = calls
        self._pidfd = -1
        _check_place(identity, identify_this_process(calls))
        with ExitStack() as opened:
            try:
                self._pidfd = calls.pidfd_open(identity.pid)
            except OSError as error:
                if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                    raise BrokenError(f"{self.name} is gone: start it again and use its new ticket") from error
                raise translate_os_error(
                    error,
                    f"opening a pidfd of {self.name}",
                    "raise the limit of open files (ulimit -n), or allow pidfd_open (Linux 5.3)",
                ) from error
            opened.callback(self.close)
            # Read behind the pidfd: should the number be used again from here on, check_alive will tell.
            try:
                start_time = read_start_time(identity.pid, calls)
            except OSError as error:
                raise self._translate(error, "reading its start time") from error
            if start_time != identity.start_time:
                raise BrokenError(
                    f"{self.name} was replaced: the ticket names one that started at tick {identity.start_time}, this "
                    f"one started at {start_time}; use a ticket of the process that runs now"
                )
            opened.pop_all()

    @property
    def name(self) -> str:
        """Return how messages call the process."""
        return f"the owner, process {self._pid},"

    @property
    def closed(self) -> bool:
        """Say whether the process was let go."""
        return self._pidfd < 0

    def is_alive(self) -> bool:
        """Say whether the process has not ended; a stopped one lives. Never blocks."""
        if self.closed:
            raise ClosedError(f"{self.name} is not watched any more: the attached arena was closed")
        return not self._calls.has_ended(self._pidfd)

    def check_alive(self) -> None:
        """Raise `BrokenError` if the process has ended."""
        if not self.is_alive():
            raise BrokenError(f"{self.name} has ended: start it again and use its new ticket")

    def open_file(self, shared: SharedFile, content: str) -> int:
        """Open a memfd of the process for reading, check that it is the one meant, and return the descriptor.

        `content` says in messages what lies in it. The caller closes the descriptor.
        """
        path = f"/proc/{self._pid}/fd/{shared.descriptor}"
        what = f"descriptor {shared.descriptor} of process {self._pid} ({content})"
        try:
            fd = self._calls.open_read_only(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):
                self.check_alive()
                raise BrokenError(f"{what} is not open: the owner closed its arena; use its new ticket") from error
            raise self._translate(error, f"opening {what}") from error
        try:
            self._check_file(fd, shared, what)
        except BaseException:
            close_descriptor(fd, self._calls)
            raise
        return fd

    def _check_file(self, fd: int, shared: SharedFile, what: str) -> None:
        try:
            found = self._calls.fstat(fd)
        except OSError as error:
            raise self._translate(error, f"looking at {what}") from error
        if (found.st_dev, found.st_ino) != (shared.device, shared.inode):
            raise BrokenError(
                f"{what} is another file by now: the ticket says inode {shared.inode} on device {shared.device}, found "
                f"inode {found.st_ino} on device {found.st_dev}; the owner closed its arena, use its new ticket"
            )
        if found.st_size != shared.nbytes:
            raise BrokenError(
                f"{what} has {found.st_size} bytes, the ticket says {shared.nbytes}: use a ticket of this arena"
            )
        check_fixed_size(fd, found, what, self._calls)

    def _translate(self, error: OSError, doing: str) -> KvmoorError:
        hidden = error.errno in (errno.ENOENT, errno.ESRCH)
        if hidden and not self.is_alive():
            return BrokenError(f"{self.name} ended during {doing}: start it again and use its new ticket")
        # With the mount option hidepid, processes of other users seem not to exist.
        if hidden or error.errno in (errno.EACCES, errno.EPERM):
            return BrokenError(
                f"the kernel refuses {doing} to this process, which runs as user {os.geteuid()} "
                f"({error.strerror}): attach as the user who runs the owner, with no fewer privileges than it has"
            )
        return translate_os_error(error, doing, "raise the limit of open files (ulimit -n), or mount /proc")

    def forked(self) -> None:
        """Let go in a forked child, whose descriptor is a copy."""
        self.close()

    def close(self) -> None:
        """Let the process go. Closes twice without harm."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            close_descriptor(pidfd, self._calls)


def check_fixed_size(fd: int, found: os.stat_result, what: str, calls: ProcessCalls) -> None:
    """Raise `CorruptDataError` unless a file is in memory and sealed against a change of size: then reading is safe."""
    seals = 0
    if stat.S_ISREG(found.st_mode):
        # What is no memfd has no seals, and the kernel says so with EINVAL.
        with contextlib.suppress(OSError):
            seals = calls.get_seals(fd)
    if seals & FIXED_SIZE_SEALS != FIXED_SIZE_SEALS:
        raise CorruptDataError(
            f"{what} is not sealed against shrinking and growing (seals {seals:#x}): it is not what kvmoor shares"
        )


def close_descriptor(fd: int, calls: ProcessCalls) -> None:
    """Close a descriptor. Linux has released it even when close reports an error, and a second try could hit others."""
    with contextlib.suppress(OSError):
        calls.close(fd)


def _check_place(owner: ProcessIdentity, reader: ProcessIdentity) -> None:
    if owner.boot_id != reader.boot_id:
        raise SettingsError(
            f"the owner, process {owner.pid}, runs on another host or before a restart of this one (boot id "
            f"{owner.boot_id}, here {reader.boot_id}): memory is shared within one host only"
        )
    if owner.pid_namespace != reader.pid_namespace:
        raise SettingsError(
            f"the owner, process {owner.pid}, counts in another pid namespace ({owner.pid_namespace}, here "
            f"{reader.pid_namespace}): run both in one container, or let the containers share it "
            "(docker: --pid=container:NAME, Kubernetes: shareProcessNamespace)"
        )
