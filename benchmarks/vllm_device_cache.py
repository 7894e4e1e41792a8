"""What does it cost vLLM's scheduler that ``eviction="device-lru"`` follows the device's own cache?

vLLM's own block pool and our scheduler's half, without an engine. A full device cache turns over by so many blocks a
step, all of which are in host memory: how long the pool takes to hand them out without and with our watch on it, and
how long the scheduler then takes to tell the index what has left. Medians of steps, per block. The yardstick is the
time that computing the tokens of a block takes: 16 tokens at 100,000 a second are 160 us.

    python benchmarks/vllm_device_cache.py [--quick] [--json]

Needs vLLM; no GPU.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from print_parts.machine import machine
from print_parts.tables import markdown

import kvmoor
from kvmoor.coordinator import Coordinator
from kvmoor.integrations.vllm.device_cache import DeviceCacheWatch
from kvmoor.integrations.vllm.keys import ChunkKeys
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.key_builder import Namespace
from kvmoor.transfer_messages import SlotRange

QUESTION = "What does it cost vLLM's scheduler that eviction=\"device-lru\" follows the device's own cache?"
TOKENS = 16
GROUP = (0).to_bytes(4, "big")


def make_pool(num_blocks: int) -> Any:
    """Return vLLM's pool, all of whose blocks are cached and free."""
    # One block is vLLM's null block.
    pool = import_module("vllm.v1.core.block_pool").BlockPool(
        num_blocks + 1, enable_caching=True, hash_block_size=TOKENS
    )
    turn_over(pool, num_blocks)
    return pool


def turn_over(pool: Any, num_blocks: int) -> tuple[float, list[bytes]]:
    """Hand blocks out, cache other content in them and free them; return the seconds of the first, and the keys."""
    began_s = time.perf_counter()
    blocks = pool.get_new_blocks(num_blocks)
    took_s = time.perf_counter() - began_s
    keys = [os.urandom(32) + GROUP for _ in blocks]
    for block, key in zip(blocks, keys, strict=True):
        block.set_block_hash(key, num_tokens=TOKENS)
        pool.cached_block_hash_to_block.insert(key, block)
    pool.free_blocks(reversed(blocks))
    return took_s, keys


def make_side(num_slots: int, blocks_per_chunk: int) -> SchedulerSide:
    """Return the scheduler's half with so many slots."""
    keys = ChunkKeys(
        Namespace(model="m", layout_fingerprint=bytes(32)),
        group_ids=[0],
        tokens_per_block=[TOKENS],
        blocks_per_chunk=blocks_per_chunk,
    )
    side = SchedulerSide(Coordinator(1, eviction="device-lru"), keys, num_groups=1, num_ranks=1)
    side.publish([SlotRange(0, 0, num_slots)])
    return side


def store(side: SchedulerSide, keys: list[bytes], blocks_per_chunk: int) -> None:
    """Have the chunks that end in these blocks in host memory."""
    prepared = side.prepare_store("r", keys[blocks_per_chunk - 1 :: blocks_per_chunk])
    assert prepared is not None
    side.complete_store("r", set(prepared.keys))


def per_block_us(num_blocks: int, num_steps: int, step: Callable[[], float]) -> float:
    """Return the median of what a step says it took, in microseconds a block."""
    return round(statistics.median(step() for _ in range(num_steps)) * 1e6 / num_blocks, 2)


def measure(device_blocks: int, num_blocks: int, blocks_per_chunk: int, num_steps: int) -> dict[str, Any]:
    """Turn over `num_blocks` blocks a step, in a pool without a watch and then in one with it."""
    unwatched = make_pool(device_blocks)
    plain_us = per_block_us(num_blocks, num_steps, lambda: turn_over(unwatched, num_blocks)[0])
    pool = make_pool(device_blocks)
    side = make_side(2 * device_blocks, blocks_per_chunk)
    for _ in range(device_blocks // num_blocks + 1):  # from here on all that leaves is in host memory
        store(side, turn_over(pool, num_blocks)[1], blocks_per_chunk)
    watch = DeviceCacheWatch(pool)
    tells_s = []

    def step() -> float:
        took_s, keys = turn_over(pool, num_blocks)
        began_s = time.perf_counter()
        side.note_left_device(watch.take_left())
        tells_s.append(time.perf_counter() - began_s)
        store(side, keys, blocks_per_chunk)
        return took_s

    return {
        "device_blocks": device_blocks,
        "blocks_a_step": num_blocks,
        "blocks_per_chunk": blocks_per_chunk,
        "pool_us_a_block": plain_us,
        "watched_pool_us_a_block": per_block_us(num_blocks, num_steps, step),
        "tell_us_a_block": round(statistics.median(tells_s) * 1e6 / num_blocks, 2),
        "tell_us_a_step": round(statistics.median(tells_s) * 1e6, 1),
    }


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small cache and few steps: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        version = import_module("vllm").__version__
    except ImportError as error:
        print(f"{QUESTION}\nnothing measured: vLLM cannot be imported ({error})")
        return 0
    device_blocks, num_steps = (400, 5) if options.quick else (50_000, 60)
    results = [
        measure(device_blocks, num_blocks, blocks_per_chunk, num_steps)
        for blocks_per_chunk in (1, 4)
        for num_blocks in ((8, 40) if options.quick else (8, 128, 1024))
    ]
    where = f"{machine(kvmoor, np)}, vLLM {version}"
    if options.json:
        print(json.dumps({"question": QUESTION, "machine": where, "results": results}))
        return 0
    print(QUESTION)
    print(f"{where}\n")
    print(markdown([{name.replace("_", " "): f"{value:,}" for name, value in row.items()} for row in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
