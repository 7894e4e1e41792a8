"""How near to the best possible cache do the eviction policies come on recorded traffic?

Each trace is replayed through the real index with each policy at six capacities, and its hits are held against those of
the offline optimum, which knows the future. Traces with a reference are also counted against it, hit for hit.

    python benchmarks/policies.py [--trace NAME ...] [--quick] [--json]

Six small and middle traces take some minutes, claude_code (80 million blocks a replay) some minutes a replay and 1 GB.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from print_parts.machine import machine
from print_parts.tables import markdown
from trace_parts.traces import FOLDER, TRACES, progress

import kvmoor
from kvmoor.simulation.offline_optimum import OfflineOptimum
from kvmoor.simulation.replay import Replayer

QUESTION = "How near to the best possible cache do the eviction policies come on recorded traffic?"
POLICIES = "lru", "arc"
SHARES = 0.001, 0.005, 0.01, 0.05, 0.1, 0.25
"""Capacities, as shares of the different blocks of a trace."""
LARGE_SHARES = 0.01, 0.05
FLOORS = {
    ("lmcache_agent", 0.01): 95.0,
    ("lmcache_agent", 0.05): 99.7,
    ("claude_code_40", 0.01): 95.0,
    ("claude_code_40", 0.05): 99.7,
    ("ragpulse", 0.005): 98.5,
    ("mc_conversation", 0.05): 52.0,
    ("mc_conversation", 0.1): 75.0,
    ("mc_conversation", 0.25): 96.0,
}
"""Per cent of the optimum that `lru` has to reach."""


@dataclass(frozen=True)
class Row:
    """What one policy reached with one capacity on one trace."""

    trace: str
    share: float
    capacity_blocks: int
    policy: str
    hit_blocks: int
    hit_percent: float
    optimum_hit_blocks: int
    percent_of_optimum: float
    is_as_reference: bool | None
    """Whether an independent simulator counted as many hits; None if it was not asked."""
    references_a_second: float
    """By the time of the processor that the replay took."""


def measure(name: str, shares: Sequence[float]) -> list[Row]:
    """Replay one trace at each capacity with each policy."""
    trace = TRACES[name].read()
    expected = json.loads((FOLDER / "reference_hits.json").read_text())[TRACES[name].reference]["hit_blocks"]
    optimum, replayer = OfflineOptimum(trace), Replayer(trace)
    rows = []
    for share in shares:
        capacity = int(share * trace.num_unique_blocks + 0.5)
        most = optimum.hit_blocks(capacity)
        for policy in POLICIES:
            progress(f"{name}, {capacity:,} blocks, {policy}")
            began_s = time.process_time()
            result = replayer.replay(capacity, policy=policy)
            took_s = time.process_time() - began_s
            known = expected["LRU tail-first"].get(str(capacity)) if policy == "lru" else None
            rows.append(
                Row(
                    name,
                    share,
                    capacity,
                    policy,
                    result.hit_blocks,
                    round(100 * result.hit_blocks / trace.num_references, 2),
                    most,
                    round(100 * result.hit_blocks / most, 2),
                    None if known is None else known == result.hit_blocks,
                    round(trace.num_references / took_s),
                )
            )
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print a markdown table."""
    table = [
        {
            "trace": row.trace,
            "capacity": f"{100 * row.share:g} % = {row.capacity_blocks:,}",
            "policy": row.policy,
            "hit blocks": f"{row.hit_percent:.2f} %",
            "of optimum": f"{row.percent_of_optimum:.2f} %",
            "floor": floor_of(row),
            "as reference": {None: "", True: "exactly", False: "NO"}[row.is_as_reference],
            "refs/s": f"{row.references_a_second:,}",
        }
        for row in rows
    ]
    print(markdown(table))


def floor_of(row: Row) -> str:
    """Say whether the row is above its floor, if it has one."""
    floor = FLOORS.get((row.trace, row.share)) if row.policy == "lru" else None
    if floor is None:
        return ""
    return f"{floor:g} %: {'met' if row.percent_of_optimum >= floor else 'MISSED'}"


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this trace; repeat it (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="the smallest trace at two capacities: to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    names = ["lmcache_agent"] if options.quick else options.trace or list(TRACES)
    report: dict[str, Any] = {"question": QUESTION, "machine": machine(kvmoor, np)}
    rows = []
    for name in names:
        rows += measure(name, LARGE_SHARES if options.quick or TRACES[name].is_large else SHARES)
    if options.json:
        print(json.dumps({**report, "results": [vars(row) for row in rows]}))
        return 0
    print(report["question"])
    print(f"{report['machine']}\n")
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
