"""How much memory this process may still take: what is free on the machine, and what its cgroups leave.

Going over a cgroup's limit is a kill, not an errno, so these numbers are read before memory is touched.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvmoor.byte_sizes import format_nbytes
from kvmoor.host_memory.huge_pages import read_reserved_nbytes

KEPT_FREE_NBYTES: Final = 64 * 2**20
"""What is never planned away: page tables and the process's own growth are charged to the same limit. Guessed."""
_NO_LIMIT: Final = 2**60
"""cgroup v1 says "no limit" with a number near 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Tell what was left when it was read; None where that is unknown or unlimited.

    `available_nbytes`: memory that the machine can give without swapping. `cgroup_nbytes`: what the tightest memory
    cgroup of this process, or of a parent, leaves below its limit; page cache that can be dropped counts as free.
    `cgroup_file` holds that limit. `hugetlb_nbytes`: what the kernel's reserve of 2 MiB pages can give, which neither
    of these two counts.

    The other three are about addresses and promises, which are taken as a whole when an arena is opened, and not as it
    fills: `address_nbytes` below RLIMIT_AS, `commit_nbytes` below the commit limit, which holds only where
    vm.overcommit_memory is 2. `memlock_nbytes` is RLIMIT_MEMLOCK itself: no limit of ours (an arena locks nothing, and
    a device driver need not look at it), but the first thing to know when page-locking is refused.
    """

    available_nbytes: int | None = None
    cgroup_nbytes: int | None = None
    cgroup_file: str = ""
    hugetlb_nbytes: int | None = None
    address_nbytes: int | None = None
    commit_nbytes: int | None = None
    memlock_nbytes: int | None = None

    @property
    def room_nbytes(self) -> int | None:
        """Return how much may be taken, `KEPT_FREE_NBYTES` below the tightest limit; None if no limit is known."""
        known = [nbytes for nbytes in (self.available_nbytes, self.cgroup_nbytes) if nbytes is not None]
        return max(0, min(known) - KEPT_FREE_NBYTES) if known else None

    @property
    def cgroup_is_tightest(self) -> bool:
        """Say whether a cgroup leaves less than the machine has."""
        return self.cgroup_nbytes is not None and (
            self.available_nbytes is None or self.cgroup_nbytes < self.available_nbytes
        )

    @property
    def tightest(self) -> str:
        """Return which limit decides, for messages."""
        return f"the cgroup limit {self.cgroup_file}" if self.cgroup_is_tightest else "the free memory of the machine"

    def describe(self) -> str:
        """Return the limits as one line of text."""
        parts = []
        if self.available_nbytes is not None:
            parts.append(f"the machine has {format_nbytes(self.available_nbytes)} available")
        if self.cgroup_nbytes is not None:
            parts.append(f"the cgroup limit {self.cgroup_file} leaves {format_nbytes(self.cgroup_nbytes)}")
        if self.hugetlb_nbytes:
            parts.append(f"{format_nbytes(self.hugetlb_nbytes)} of huge pages are reserved")
        if self.address_nbytes is not None:
            parts.append(f"the address-space limit leaves {format_nbytes(self.address_nbytes)}")
        if self.commit_nbytes is not None:
            parts.append(f"the commit limit leaves {format_nbytes(self.commit_nbytes)}")
        if self.memlock_nbytes is not None:
            parts.append(f"ulimit -l is {format_nbytes(self.memlock_nbytes)}")
        return ", ".join(parts) or "no memory limit is known"


def read_memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """Read the limits as they are now; what is missing or cannot be read is unknown. Raises nothing.

    `root` is where ``proc`` and ``sys`` are.
    """
    headrooms = [
        headroom
        for directory, files in _cgroup_directories(root)
        if (headroom := _read_headroom(directory, files)) is not None
    ]
    nbytes, path = min(headrooms, default=(None, root))
    meminfo = _read_kilobytes(root / "proc/meminfo")
    process_limits = _read_process_limits(root)
    return MemoryLimits(
        available_nbytes=meminfo.get("MemAvailable"),
        cgroup_nbytes=nbytes,
        cgroup_file="" if nbytes is None else f"/{path.relative_to(root)}",
        hugetlb_nbytes=read_reserved_nbytes(root),
        address_nbytes=_read_address_room(root, process_limits),
        commit_nbytes=_read_commit_room(root, meminfo),
        memlock_nbytes=process_limits.get("Max locked memory"),
    )


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Name the files of one cgroup version."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]
    """Page cache on both of its lists: the kernel drops it before it kills, also what was used twice."""


_V1: Final = _CgroupFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
# Above memory.high nobody is killed, but every allocation is throttled and memory that cannot be reclaimed stays so.
_V2: Final = _CgroupFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def _cgroup_directories(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the directories of this process's memory cgroups, each after its parents."""
    mounts = _read_cgroup_mounts(root)
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            files = _V1
        elif hierarchy == "0" and not controllers:
            files = _V2
        else:
            continue
        for mount_root, mount_point in mounts[files]:
            directory = root / mount_point.lstrip("/")
            yield directory, files
            for part in _parts_below(path, mount_root):
                directory /= part
                yield directory, files


def _parts_below(path: str, mount_root: str) -> tuple[str, ...]:
    """Return the way from the root of a mount to a cgroup.

    Empty where the mount does not show it: in a cgroup namespace a process may see its own cgroup as ``/..``.
    """
    parts = PurePosixPath(path).parts[1:]
    root_parts = PurePosixPath(mount_root).parts[1:]
    if ".." in parts or parts[: len(root_parts)] != root_parts:
        return ()
    return parts[len(root_parts) :]


def _read_cgroup_mounts(root: Path) -> dict[_CgroupFiles, list[tuple[str, str]]]:
    """Return (root inside the hierarchy, mount point) of the mounted memory hierarchies.

    A container without a cgroup namespace sees the host's path of its cgroup, but only that cgroup mounted; the
    mount's root tells. Without mountinfo the customary places are tried.
    """
    mounts: dict[_CgroupFiles, list[tuple[str, str]]] = {_V1: [], _V2: []}
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            mounts[_V2].append((mount[3], mount[4]))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts[_V1].append((mount[3], mount[4]))
    return {
        _V1: mounts[_V1] or [("/", "/sys/fs/cgroup/memory")],
        _V2: mounts[_V2] or [("/", "/sys/fs/cgroup"), ("/", "/sys/fs/cgroup/unified")],
    }


def _read_headroom(directory: Path, files: _CgroupFiles) -> tuple[int, Path] | None:
    """Return what one cgroup leaves and the file of its limit; None if it has none or it cannot be read."""
    limits = [
        (limit, directory / name)
        for name in files.limits
        if (limit := _parse_number(_read_text(directory / name))) is not None and limit < _NO_LIMIT
    ]
    if not limits:
        return None
    limit, path = min(limits)
    # If only the usage cannot be read, the limit itself is still a bound.
    usage = _parse_number(_read_text(directory / files.usage)) or 0
    reclaimable = 0
    for line in _read_text(directory / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in files.reclaimable:
            reclaimable += _parse_number(value) or 0
    return max(0, limit - max(0, usage - reclaimable)), path


def _read_kilobytes(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines look like ``MemAvailable:  700 kB``, in bytes."""
    numbers = {}
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(":")
        kilobytes = _parse_number(value.removesuffix("kB"))
        if kilobytes is not None:
            numbers[key] = kilobytes * 1024
    return numbers


_PROCESS_LIMIT: Final = re.compile(r"(Max [a-z ]+?)  +(\d+) ")


def _read_process_limits(root: Path) -> dict[str, int]:
    """Return the soft limits of this process that are numbers, by the kernel's names for them."""
    matches = map(_PROCESS_LIMIT.match, _read_text(root / "proc/self/limits").splitlines())
    return {match[1]: int(match[2]) for match in matches if match is not None}


def _read_address_room(root: Path, process_limits: dict[str, int]) -> int | None:
    limit = process_limits.get("Max address space")
    if limit is None:
        return None
    return max(0, limit - _read_kilobytes(root / "proc/self/status").get("VmSize", 0))


def _read_commit_room(root: Path, meminfo: dict[str, int]) -> int | None:
    if _parse_number(_read_text(root / "proc/sys/vm/overcommit_memory")) != 2 or "CommitLimit" not in meminfo:
        return None
    return max(0, meminfo["CommitLimit"] - meminfo.get("Committed_AS", 0))


def _parse_number(text: str) -> int | None:
    text = text.strip()
    # 20 digits hold every 64-bit number; more is garbage.
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def _read_text(path: Path) -> str:
    """Return what a file holds, or nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
