"""A process in a group of its own, whose end comes: it is asked where it is, and killed with all that it started."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_DUMP_S = 4.0
"""How long processes may print where their threads are before they are killed."""
_LINGER_S = 1.0
"""How long what a process started may outlive it without being called left behind: Python's resource tracker does."""


class GroupProcess:
    """Start a command with a log; `stdin` is open, for `tell`."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path) -> None:
        self.ended_at = 0.0
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            process_group=0,
        )

    def tell(self, line: str) -> None:
        """Write a line to the process; if it is gone already, `wait` tells."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def wait(self, limit_s: float) -> str:
        """Return how it ended: "ok", an exit code, or that it was killed at the limit. Leaves none of its group."""
        try:
            code = self._process.wait(max(0.1, limit_s))
            verdict = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            verdict = f"killed after {limit_s:.0f} s"
            self._signal(signal.SIGABRT)  # PYTHONFAULTHANDLER: each process prints its stacks
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DUMP_S)
        self.ended_at = time.time()
        if not self._wait_gone(_LINGER_S):
            if verdict == "ok":
                verdict = "ok, but left processes behind"
            self._signal(signal.SIGKILL)
            self._wait_gone(20.0)
        self.close()
        return verdict

    def close(self) -> None:
        """Kill what is left, and let go of the files."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _has_living_member(self) -> bool:
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError, IndexError):
                state, _, group = status.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._process.pid and state != "Z":
                    return True
        return False

    def _wait_gone(self, timeout_s: float) -> bool:
        """Wait until nobody of the group lives: memory on the GPU is free only then. Return whether that is so."""
        deadline = time.monotonic() + timeout_s
        while self._has_living_member():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True
