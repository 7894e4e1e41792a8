"""Real engines run in processes of their own: vLLM changes torch, warnings and threads of whatever imports it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def run_script(tmp_path_factory) -> Callable[..., Any]:
    """Return a function that runs a script with a folder for its models, and returns what it printed last."""
    folder = tmp_path_factory.mktemp("models")

    def run(name: str, *arguments: str, timeout_s: float = 600.0, environment: dict[str, str] | None = None) -> Any:
        command = [sys.executable, str(SCRIPTS / name), str(folder), *arguments]
        environment = os.environ | {"PYTHONPATH": _python_path()} | (environment or {})
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert ended.returncode == 0, ended.stderr[-6000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def one_process(run_script) -> dict[str, Any]:
    """Run the quick cases on engines in one process, one after the other, and return what each found."""
    return run_script("one_process.py")


@pytest.fixture(scope="session")
def one_process_slow(run_script) -> dict[str, Any]:
    """Run the slow cases, and those that they are compared with."""
    return run_script("one_process.py", "--slow", timeout_s=1200.0)


@pytest.fixture
def script_environment() -> dict[str, str]:
    """Return the environment for a script that a test starts itself."""
    return os.environ | {"PYTHONPATH": _python_path()}


@pytest.fixture(scope="session")
def tiny_model(run_script) -> Path:
    """Return the folder of a tiny Llama."""
    return Path(run_script("write_models.py"))


def _python_path() -> str:
    """Let the processes of vLLM find the scripts, behind what the caller wants found first (an older vLLM, say)."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SCRIPTS)]))
