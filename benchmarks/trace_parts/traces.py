"""What the benchmarks that replay traces share: the traces, the machine they run on, and tables."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvmoor
from kvmoor.simulation.trace import Trace
from kvmoor.simulation.trace_files import ReaderOptions, read_trace

FOLDER = Path(__file__).parents[2] / "tests/data/traces"


@dataclass(frozen=True)
class SharedTrace:
    """One of the traces that come with the project; see the README beside them."""

    file: str
    reference: str
    """Its name in ``reference_hits.json``."""
    concurrency: float = 40.0
    is_large: bool = False

    def read(self) -> Trace:
        """Read all of it."""
        return read_trace(FOLDER / self.file, options=ReaderOptions(concurrency=self.concurrency, seed=1))


TRACES = {
    "lmcache_agent": SharedTrace("lmcache_agent_blocks_rle.jsonl.gz", "lmcache_agent_b16"),
    "mc_synthetic": SharedTrace("mooncake_synthetic_trace.jsonl.gz", "mc_synthetic"),
    "mc_conversation": SharedTrace("mooncake_conversation_trace.jsonl.gz", "mc_conversation"),
    "ragpulse": SharedTrace("ragpulse_0_trace.jsonl.gz", "ragpulse_b16"),
    "claude_code_40": SharedTrace("claude_code_sessions_rle.jsonl.gz", "cc_c40", is_large=True),
}


def machine() -> str:
    """Describe what the speeds hold for; hits are the same everywhere."""
    try:
        model = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        model = platform.machine()
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}; "
        f"kvmoor {kvmoor.__version__}, Python {platform.python_version()}, NumPy {np.__version__}"
    )


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Write rows with the same columns as a table, aligned to the right from the second column on."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first = next(iter(widths))
    lines = [
        widths.keys(),
        ["-" * width if name == first else "-" * (width - 1) + ":" for name, width in widths.items()],
    ]
    lines += [row.values() for row in rows]
    return "\n".join(
        "| "
        + " | ".join(
            f"{cell:{'<' if name == first else '>'}{width}}"
            for cell, (name, width) in zip(line, widths.items(), strict=True)
        )
        + " |"
        for line in lines
    )


def progress(text: str) -> None:
    """Say on stderr what is being done, where somebody watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
