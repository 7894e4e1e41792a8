"""Run a script of tests/gpu/scripts in a process of its own, with a watchdog."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from child_processes import child_environment

SCRIPTS: Final = Path(__file__).parent / "gpu" / "scripts"
_PR_SET_PDEATHSIG: Final = 1  # from sys/prctl.h
DUMP_S: Final = 3.0
"""How long a child may take to print its stacks before it is killed."""


def run_gpu_child(
    script: str, *arguments: str, watchdog_s: float, wrapper: tuple[str, ...] = (), fails: bool = False
) -> dict[str, Any]:
    """Return the JSON object that the script printed last, and under ``"seconds_to_exit"`` how long it lived after it.

    A child that outlives the watchdog prints its stacks, is killed, and fails the test; so does one that does not exit
    with 0, unless it `fails`.
    """
    command = [*wrapper, sys.executable, "-X", "faulthandler", str(SCRIPTS / script), *arguments]
    with tempfile.TemporaryFile("w+") as printed:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**child_environment(), "PYTHONUNBUFFERED": "1"},
            process_group=0,  # so that the watchdog ends what the child started, too
        )
        try:
            late = _wait(child, watchdog_s)
            ended_at = time.time()
        finally:
            _kill(child)
        printed.seek(0)
        output = printed.read()
    assert not late, f"{script} {' '.join(arguments)} was killed after {watchdog_s:g} s:\n{output[-6000:]}"
    if not fails:
        assert child.returncode == 0, f"{' '.join(command[-3:])} exited with {child.returncode}:\n{output[-6000:]}"
    result = _last_json(output)
    result["output"] = output
    result["exit_code"] = child.returncode
    if "printed_at" in result:
        result["seconds_to_exit"] = ended_at - result["printed_at"]
    return result


def end_with_parent() -> None:
    """Let this process be killed when the one that started it ends, watchdog or not. For the scripts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def report(**values: Any) -> None:
    """Print the result of a child; the last thing it does before it ends."""
    print(json.dumps({**values, "printed_at": time.time()}), flush=True)


def _wait(child: subprocess.Popen[str], watchdog_s: float) -> bool:
    """Wait for the end of a child; return whether the watchdog had to act."""
    try:
        child.wait(watchdog_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # faulthandler prints where every thread is
        with suppress(subprocess.TimeoutExpired):
            child.wait(DUMP_S)
        return True
    return False


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_json(output: str) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {}
