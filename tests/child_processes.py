"""Python processes that tests start: they import what the test imports, and none outlives it."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

WAIT_S: Final = 30.0
"""What a child may take before the test fails; it needs a tenth of a second."""

Start = Callable[..., subprocess.Popen[str]]


@contextmanager
def children(preamble: str = "") -> Iterator[Start]:
    """Give a function that starts `python -c preamble + code`; whatever still runs at the end is killed."""
    with ExitStack() as started:

        def start(code: str, *options: str) -> subprocess.Popen[str]:
            child = start_python(*options, "-c", preamble + textwrap.dedent(code))
            started.callback(_end, child)
            return child

        yield start


def start_python(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start an interpreter that SIGINT ends, even if these tests run as a background job, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment or child_environment(),
        )
    finally:
        signal.signal(signal.SIGINT, before)


def child_environment() -> dict[str, str]:
    """Return this environment, with all that this process can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    with child:  # closes the pipes and waits
        pass


def names_in_shared_memory() -> set[str]:
    """Return our names under /dev/shm; other programs may use it at the same time."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "kvmoor" in entry.name}


def processes_with_memfd(name: str) -> set[int]:
    """Return the processes that keep a memfd of ours alive, by a descriptor or a mapping, whose name begins so."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            links = [str(entry.readlink()) for entry in (process / "fd").iterdir()]
            mappings = (process / "maps").read_text()
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
        if f"/memfd:kvmoor:{name}" in "\n".join([*links, mappings]):
            found.add(int(process.name))
    return found
