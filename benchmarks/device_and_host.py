"""What does host memory add behind a device that has a cache of its own, by when blocks are stored there?

claude_code with 40 sessions at once, through the real index: a device with 14,740 blocks (0.5 % of the different ones),
which evicts what was used least recently, and host memory behind it. First all of it with host memory of the same size,
then a stretch of 4,000 requests from its middle, from a cold start, also with half and twice the size. "points" are per
cent of all prompt tokens; the yardstick is the device alone, measured in the same replay.

    python benchmarks/device_and_host.py [--quick] [--json]

A replay of all refers to 81 million blocks: minutes for each of them, and 1 GB.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from print_parts.machine import machine
from print_parts.tables import markdown
from trace_parts.traces import TRACES, progress

import kvmoor
from kvmoor.simulation.offline_optimum import OfflineOptimum
from kvmoor.simulation.tiered_replay import StoreWhen, TieredReplayer, TierPlan
from kvmoor.simulation.trace import Trace

QUESTION = "What does host memory add behind a device that has a cache of its own, by when blocks are stored there?"
DEVICE_BLOCKS = 14_740
STRETCH = slice(16_000, 20_000)
WAYS: tuple[tuple[StoreWhen, str], ...] = (
    ("computed", "lru"),
    ("computed", "device-lru"),
    ("leaving", "lru"),
    ("leaving", "device-lru"),
)
TARGET_POINTS = 20.0
"""What host memory of the device's size has to add in the best of these ways, over all of the trace."""


@dataclass(frozen=True)
class Row:
    """What came of one replay."""

    requests: int
    device_blocks: int
    host_blocks: int
    store_when: str
    policy: str
    device_percent: float
    """Prompt tokens that the device finds."""
    combined_percent: float
    gained_points: float
    percent_of_optimum: float
    """Hits by those of the best cache that is as large as both."""
    host_stores: int
    """Blocks written into host memory."""
    references_a_second: float
    """By the time of the processor that the replay took."""


def measure(trace: Trace, device: int, hosts: Sequence[int]) -> list[Row]:
    """Replay a trace in all ways with each size of host memory."""
    optimum, replayer = OfflineOptimum(trace), TieredReplayer(trace)
    percent = 100 * trace.block_size / trace.num_tokens
    rows = []
    for host in hosts:
        most = optimum.hit_blocks(device + host)
        for store_when, policy in WAYS:
            progress(f"{len(trace.requests):,} requests, {host:,} blocks in host memory, {store_when}, {policy}")
            began_s = time.process_time()
            result = replayer.replay(host, TierPlan(device, store_when=store_when), policy=policy)
            took_s = time.process_time() - began_s
            rows.append(
                Row(
                    len(trace.requests),
                    device,
                    host,
                    store_when,
                    policy,
                    round(result.hits.device * percent, 2),
                    round(result.hit_blocks * percent, 2),
                    round(result.hits.host * percent, 2),
                    round(100 * result.hit_blocks / most, 2),
                    result.stored.host,
                    round(trace.num_references / took_s),
                )
            )
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print a markdown table."""
    table = [
        {
            "requests": f"{row.requests:,}",
            "device": f"{row.device_blocks:,}",
            "host": f"{row.host_blocks:,}",
            "stored when": row.store_when,
            "policy": row.policy,
            "device alone": f"{row.device_percent:.2f} %",
            "together": f"{row.combined_percent:.2f} %",
            "points": f"{row.gained_points:+.2f}",
            "of optimum": f"{row.percent_of_optimum:.2f} %",
            "host stores": f"{row.host_stores:,}",
            "refs/s": f"{row.references_a_second:,}",
        }
        for row in rows
    ]
    print(markdown(table))


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest trace at one size: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.quick:
        rows = measure(TRACES["lmcache_agent"].read(), 391, [391])
    else:
        trace = TRACES["claude_code_40"].read()
        rows = measure(trace, DEVICE_BLOCKS, [DEVICE_BLOCKS])
        stretch = replace(trace, requests=trace.requests[STRETCH])
        rows += measure(stretch, DEVICE_BLOCKS, [DEVICE_BLOCKS // 2, DEVICE_BLOCKS, 2 * DEVICE_BLOCKS])
    if options.json:
        print(
            json.dumps({"question": QUESTION, "machine": machine(kvmoor, np), "results": [vars(row) for row in rows]})
        )
        return 0
    print(QUESTION)
    print(f"{machine(kvmoor, np)}\n")
    show(rows)
    if not options.quick:
        best = max(rows[: len(WAYS)], key=lambda row: row.gained_points)
        print(
            f"\nbest with host memory of the device's size: {best.gained_points:+.2f} points ({best.store_when}, "
            f"{best.policy}), target {TARGET_POINTS:g}: {'met' if best.gained_points >= TARGET_POINTS else 'MISSED'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
