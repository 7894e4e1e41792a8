"""The processes of a server that runs in a session of its own: which they are, what they hold, and what they leave."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmoor.host_memory.status_reader import find_status_segments

POLL_S = 0.02


@dataclass(frozen=True)
class Holdings:
    """What one process holds at one moment."""

    rss_nbytes: int
    descriptors: int
    threads: int
    mappings: int


def session_processes(session: int) -> dict[int, str]:
    """Return the living processes of a session, each with its role; also those that have lost their parent.

    A role is "API server", "engine core", "worker 0", ..., "helper": those of Python's multiprocessing, or "ending": a
    process that was killed has lost its memory, and with it its title, before it lets go of its descriptors.
    """
    found = {}
    for pid in _all_pids():
        with suppress(OSError, ValueError):
            # The name is in parentheses and may hold anything; after it: state, parent, process group, session.
            state, _, _, of_session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state not in "ZX":
                found[pid] = "API server" if pid == session else _role(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def _role(command: bytes) -> str:
    """Name a process by the title that vLLM gives it."""
    title = command.rstrip(b"\0 ").decode(errors="replace")
    if not title:
        return "ending"
    if title == "VLLM::EngineCore":
        return "engine core"
    if title.startswith("VLLM::Worker"):
        return f"worker {title.partition('_TP')[2] or 0}"
    return "helper"


def wait_no_processes(session: int, timeout_s: float) -> dict[int, str]:
    """Wait until no process of a session lives; return those that do at the deadline."""
    wait_until(lambda: not session_processes(session), timeout_s)
    return session_processes(session)


def kill_session(session: int, timeout_s: float = 30.0) -> None:
    """Kill every process of a session, and wait until they are gone."""
    for pid in session_processes(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = wait_no_processes(session, timeout_s)
    assert not left, f"processes outlive SIGKILL by {timeout_s:g} s: {left}"


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for what nobody tells of, such as the end of another's child; say whether it came by the deadline."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def holdings(pid: int) -> Holdings:
    """Read what a process holds. Raises `OSError` if it has ended."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Holdings(
        rss_nbytes=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=sum(1 for _ in (folder / "fd").iterdir()),
        threads=int(status["Threads"]),
        mappings=(folder / "maps").read_text().count("\n"),
    )


def find_leftovers(engine_id: str) -> list[str]:
    """Describe what there is of kvmoor's on this host: any name in /dev/shm, and memory and segments of this engine."""
    found = [f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir() if "kvmoor" in path.name]
    found += [f"status segment of rank {segment.rank}" for segment in find_status_segments(engine_id)]
    for pid in _all_pids():
        with suppress(OSError):  # it ended meanwhile, or is another user's
            found += [f"{name} in process {pid}" for name in _memfds(pid) if f"memfd:kvmoor:{engine_id}:" in name]
    return found


def _memfds(pid: int) -> Iterator[str]:
    """Name the memfds that a process has open or mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            yield line[line.index("/memfd:") :]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if (target := str(descriptor.readlink())).startswith("/memfd:"):
                yield target


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
