"""How fast is the index, how much memory does it take for a block, and how long does a lookup take?

references   a trace through match, complete, prepare_store, complete, as `kvmoor simulate` does it; blocks named by
             all prompts together by processor seconds, in one thread. Making the keys is not counted: an engine has
             them. "plain" does the same with one OrderedDict, the shortest LRU cache there is in Python: no slots,
             no leases, nothing that keeps a block while it is copied
memory       bytes that the index takes for a block, digests included, with all slots full; then once more after
             as many other blocks have replaced them twice, since a hash table that changes is larger
match        one prompt of 10,000 blocks that are all there: match it and release it
lookup       10,000 keys that are known, one call each, again and again, as an engine asks about waiting requests
collector    one full run of Python's garbage collector beside the full index

python benchmarks/index_at_scale.py [--blocks 1000000] [--rounds 3] [--quick] [--json]
"""

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from print_parts.machine import machine

import kvmoor
from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.index.lease import StoreLease
from kvmoor.simulation.trace_files import ReaderOptions, read_trace
from kvmoor.transfer_messages import SlotRange

QUESTION = "How fast is the index, how much memory does it take for a block, and how long does a lookup take?"
TRACES = Path(__file__).parents[1] / "tests/data/traces"
FILES = {
    "lmcache_agent": "lmcache_agent_blocks_rle.jsonl.gz",
    "ragpulse": "ragpulse_0_trace.jsonl.gz",
    "mc_conversation": "mooncake_conversation_trace.jsonl.gz",
}
CAPACITY_SHARE = 0.05
PROMPT_BLOCKS = 10_000
STORE_BLOCKS = 1_000


def digest_of(number: int) -> bytes:
    """Return a digest; the bytes differ from the front on, as those of a hash do."""
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") + number.to_bytes(24, "little")


def filled(index: BlockIndex, keys: BlockKeys) -> StoreLease:
    """Store blocks at once."""
    lease = index.prepare_store(keys)
    assert lease is not None
    index.complete(lease)
    return lease


class PlainLru:
    """The yardstick: the least one can do, with the same answers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, int] = OrderedDict()

    def serve(self, digests: Sequence[bytes]) -> int:
        """Look a prompt up, then store it; return how many of its blocks were there."""
        blocks = self.blocks
        hits = 0
        for digest in digests:
            if digest not in blocks:
                break
            hits += 1
        for digest in reversed(digests[: self.capacity]):
            if digest in blocks:
                blocks.move_to_end(digest)
            else:
                blocks[digest] = 0
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
        return hits


def serve(index: BlockIndex, keys: BlockKeys, capacity: int) -> int:
    """Do the same with the real index."""
    match = index.match(keys)
    index.complete(match)
    filled(index, keys[:capacity])
    return len(match)


def measure_references(name: str, rounds: int, policies: Sequence[str]) -> dict[str, Any]:
    """Replay one trace with each policy and with the yardstick, in turn."""
    trace = read_trace(TRACES / FILES[name], options=ReaderOptions())
    digests = [digest_of(number) for number in range(trace.num_unique_blocks)]
    prompts = [BlockKeys([digests[block] for block in request.blocks.tolist()]) for request in trace.requests]
    capacity = int(trace.num_unique_blocks * CAPACITY_SHARE)
    seconds: dict[str, list[float]] = {each: [] for each in (*policies, "plain")}
    hits: dict[str, int] = {}
    for _ in range(rounds):
        for policy in policies:
            index = BlockIndex(1, POLICIES[policy])
            index.publish(SlotRange(0, 0, capacity))
            begin = time.process_time()
            hits[policy] = sum(serve(index, keys, capacity) for keys in prompts)
            seconds[policy].append(time.process_time() - begin)
        plain = PlainLru(capacity)
        begin = time.process_time()
        hits["plain"] = sum(plain.serve(keys.digests) for keys in prompts)
        seconds["plain"].append(time.process_time() - begin)
    assert hits["lru"] == hits["plain"], hits
    return {
        "trace": name,
        "blocks_a_request": trace.num_references / len(prompts),
        "capacity_blocks": capacity,
        "references_a_second": {each: trace.num_references / min(taken) for each, taken in seconds.items()},
    }


def measure_memory(num_blocks: int) -> tuple[BlockIndex, dict[str, Any]]:
    """Fill an index, replace everything twice, and say what it takes for a block."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = BlockIndex(1)
    index.publish(SlotRange(0, 0, num_blocks))
    figures = {}
    for generation, name in enumerate(("filled", "replaced", "replaced_twice")):
        for first in range(generation * num_blocks, (generation + 1) * num_blocks, STORE_BLOCKS):
            filled(index, BlockKeys([digest_of(number) for number in range(first, first + STORE_BLOCKS)]))
        gc.collect()
        figures[name] = (tracemalloc.get_traced_memory()[0] - before) / num_blocks
    tracemalloc.stop()
    begin = time.perf_counter()
    gc.collect()
    figures["collector_ms"] = (time.perf_counter() - begin) * 1e3
    return index, figures


def quantiles(act: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return median, 99th per cent and longest of the milliseconds that something takes."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        act()
        taken.append((time.perf_counter() - begin) * 1e3)
    taken.sort()
    return {"p50": statistics.median(taken), "p99": taken[int(0.99 * (len(taken) - 1))], "max": taken[-1]}


def measure_match(index: BlockIndex, num_blocks: int, repeats: int) -> dict[str, Any]:
    """Match a long prompt in a full index, and look for it in a plain dictionary of as many blocks."""
    keys = BlockKeys([digest_of(number) for number in range(3 * num_blocks, 3 * num_blocks + PROMPT_BLOCKS)])
    for first in range(0, len(keys), STORE_BLOCKS):
        filled(index, keys[first : first + STORE_BLOCKS])
    plain = PlainLru(num_blocks)
    for first in range(0, num_blocks, STORE_BLOCKS):
        plain.serve([digest_of(number) for number in range(first, first + STORE_BLOCKS)])
    plain.serve(keys.digests)

    def match() -> None:
        lease = index.match(keys)
        assert len(lease) == PROMPT_BLOCKS
        index.complete(lease)

    def serve_plain() -> None:
        assert plain.serve(keys.digests) == PROMPT_BLOCKS

    return {"index": quantiles(match, repeats), "plain": quantiles(serve_plain, repeats)}


def measure_lookup(index: BlockIndex, num_blocks: int, repeats: int) -> dict[str, float]:
    """Return nanoseconds a key: a lookup in the index, and in a plain dictionary."""
    numbers = range(3 * num_blocks, 3 * num_blocks + PROMPT_BLOCKS)
    keys = [BlockKey(digest_of(number)) for number in numbers]
    plain = OrderedDict((key.digest, 0) for key in keys)

    def ask_index() -> None:
        lookup = index.lookup
        for key in keys:
            lookup(key)

    def ask_plain() -> None:
        for key in keys:
            key.digest in plain  # noqa: B015  (the question is what the answer costs)

    per_key = 1e6 / PROMPT_BLOCKS
    return {
        "index": quantiles(ask_index, repeats)["p50"] * per_key,
        "plain": quantiles(ask_plain, repeats)["p50"] * per_key,
    }


def main() -> None:
    """Measure, and print a table or one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="slots of the large index (default: 1,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each trace is replayed (default: 3)")
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    num_blocks = 20_000 if options.quick else options.blocks // STORE_BLOCKS * STORE_BLOCKS
    names = ["lmcache_agent"] if options.quick else list(FILES)
    rounds = 1 if options.quick else options.rounds
    repeats = 5 if options.quick else 300
    references = [measure_references(name, rounds, ("lru", "arc")) for name in names]
    index, memory = measure_memory(num_blocks)
    report = {
        "question": QUESTION,
        "machine": machine(kvmoor, np),
        "references": references,
        "num_blocks": num_blocks,
        "bytes_a_block": memory,
        "match_ms": measure_match(index, num_blocks, repeats),
        "lookup_ns": measure_lookup(index, num_blocks, repeats),
    }
    if options.json:
        json.dump(report, sys.stdout)
        return
    print(QUESTION)
    print(report["machine"])
    print("\nBlock references a second, in one thread, at 5 % of the different blocks")
    print(f"{'trace':<16} {'blocks a request':>17} {'lru':>12} {'arc':>12} {'plain':>12}")
    for row in references:
        speeds = row["references_a_second"]
        print(
            f"{row['trace']:<16} {row['blocks_a_request']:>17.0f} {speeds['lru']:>12,.0f} {speeds['arc']:>12,.0f} "
            f"{speeds['plain']:>12,.0f}"
        )
    print(
        f"\nBytes a block at {num_blocks:,} blocks: filled {memory['filled']:.0f}, "
        f"all replaced {memory['replaced']:.0f},"
    )
    print(f"twice {memory['replaced_twice']:.0f}; one run of the collector takes {memory['collector_ms']:.1f} ms")
    print(f"\nMatch and release {PROMPT_BLOCKS:,} blocks, ms (plain: find them and use them)")
    for name, taken in report["match_ms"].items():
        print(f"{name:<8} p50 {taken['p50']:.2f}   p99 {taken['p99']:.2f}   max {taken['max']:.2f}")
    print(f"\nLookup of one known key of {PROMPT_BLOCKS:,}, ns")
    print("   ".join(f"{name} {taken:.0f}" for name, taken in report["lookup_ns"].items()))


if __name__ == "__main__":
    main()
