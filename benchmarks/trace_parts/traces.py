"""What the benchmarks that replay traces share: the traces, and saying how far it is."""

import sys
from dataclasses import dataclass
from pathlib import Path

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


def progress(text: str) -> None:
    """Say on stderr what is being done, where somebody watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
