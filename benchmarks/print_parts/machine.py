"""What a figure holds for: each benchmark prints it beside its figures."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from types import ModuleType


def processor() -> str:
    """Return the name of the processor, or else its kind."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def machine(*packages: ModuleType) -> str:
    """Describe the machine in one line, with the cores that this process may use, and versions."""
    versions = [f"Python {platform.python_version()}", *(f"{each.__name__} {each.__version__}" for each in packages)]
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}; {', '.join(versions)}"
