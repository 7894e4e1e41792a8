"""Follow what vLLM's own cache drops, on real engines in this process: ``device_cache.py FOLDER CASE...``.

Prints a JSON object with what each case found. After every step, what the plugin was told is held against the pool.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

from engine import Engine, prompt
from tiny_llama import write_model

import vllm
from kvmoor.errors import SettingsError
from kvmoor.integrations.vllm.compatibility import find_faults
from kvmoor.testing import ScriptedCopies

WALK = [1, 2, 3, 1, 2, 1, 4, 5, 6, 4, 2, 7, 1]
"""Prompts of 9 device blocks by their seeds; a device cache of 23 holds two of them."""


class Follower:
    """Step an engine, and count how often what the plugin was told is not what the pool did."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.engine = Engine(model, "connector", eviction="device-lru", **options)
        self.pool = self.engine.core.scheduler.kv_cache_manager.block_pool
        self.side = self.engine.connector.scheduler_side
        self.told: list[bytes] = []
        self.num_told = self.num_missed = self.num_wrong = 0
        self.prompt_of: dict[bytes, int] = {}  # by the digest of a block
        self.seed = 0
        self._note_left, self._prepare_store = self.side.note_left_device, self.side.prepare_store
        self.side.note_left_device, self.side.prepare_store = self._tell, self._store
        self.engine.wait_ready()

    def _tell(self, block_keys: list[bytes]) -> None:
        self.told += block_keys
        self._note_left(block_keys)

    def _store(self, request: str, offload_keys: list[bytes]) -> Any:
        for offload_key in offload_keys:
            self.prompt_of.update((key.digest, self.seed) for key in self.side._keys.of(offload_key))
        return self._prepare_store(request, offload_keys)

    def cached(self) -> set[bytes]:
        """Return what the pool holds now."""
        return set(self.pool.cached_block_hash_to_block._cache)

    def step(self, held_before: set[bytes] | None = None) -> dict[str, list[int]]:
        """Do one step, and compare."""
        before = self.cached() if held_before is None else held_before
        self.told = []
        answers = self.engine.step()
        after, told = self.cached(), set(self.told)
        self.num_told += len(self.told)
        self.num_missed += len(before - after - told)
        self.num_wrong += len(told & after) + len(self.told) - len(told)
        return answers

    def ask(self, seed: int, tokens: list[int] | None = None) -> list[int]:
        """Return the answer to one prompt."""
        self.seed = seed
        name = self.engine.add(prompt(seed) if tokens is None else tokens)
        answers: dict[str, list[int]] = {}
        while name not in answers:
            answers |= self.step()
        for _ in range(3):
            self.step()
        return answers[name]

    def oldest_first(self) -> list[int]:
        """Return whose blocks host memory holds, in the order in which they would give way, piece by piece."""
        group = self.side.coordinator._index._groups[0]
        assert 0 == len(group.policy._doubled)
        digests = group._digests[group.policy._single.oldest_first()].tolist()
        return [seed for seed, _ in groupby(self.prompt_of[digest] for digest in digests)]

    def found(self) -> dict[str, int]:
        """Return the counts."""
        self.side.coordinator.check_invariants()
        return {"told": self.num_told, "missed": self.num_missed, "wrong": self.num_wrong}

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def off(model: Path, **options: Any) -> list[list[int]]:
    """Answer the walk without offloading."""
    engine = Engine(model, "off", **options)
    try:
        return [engine.ask(prompt(seed))[0] for seed in WALK]
    finally:
        engine.close()


def walk(model: Path, **options: Any) -> dict[str, Any]:
    """Answer the walk."""
    follower = Follower(model, **options)
    try:
        answers = [follower.ask(seed) for seed in WALK]
        return follower.found() | {"answers": answers, "metrics": follower.engine.metrics()}
    finally:
        follower.close()


def order(model: Path) -> dict[str, Any]:
    """Have the first prompt leave the device after the second one was used."""
    follower = Follower(model)
    try:
        orders = []
        for seed in (1, 2, 3):
            follower.ask(seed)
            orders.append(follower.oldest_first())
        return follower.found() | {"orders": orders}
    finally:
        follower.close()


def reset(model: Path) -> dict[str, Any]:
    """Empty the device's cache alone, twice, and have what was there come back from host memory."""
    follower = Follower(model)
    try:
        answers = [follower.ask(1), follower.ask(2)]
        for seed in (1, 2):
            held = follower.cached()
            resets = follower.engine.core.reset_prefix_cache(reset_running_requests=False, reset_connector=False)
            assert resets
            num_told = follower.num_told
            name = follower.engine.add(prompt(seed))
            follower.step(held)
            num_told = follower.num_told - num_told
            answers.append(follower.engine.drain()[name])
        return follower.found() | {
            "same": answers[:2] == answers[2:],
            "held": len(held),
            "told_at_reset": num_told,
            "loaded": follower.engine.metrics()["vllm:kv_offload_load_bytes"] > 0,
        }
    finally:
        follower.close()


def crowd(model: Path, mode: Any) -> list[list[int]] | dict[str, Any]:
    """Answer eight requests at once that share a prefix and preempt each other."""
    prompts = [[*prompt(9, 128), *prompt(seed, 100 + 13 * seed)] for seed in range(8)]
    follower = Follower(model, device_blocks=20, host_memory="4MiB") if mode != "off" else None
    engine = follower.engine if follower else Engine(model, "off", device_blocks=20)
    engine.sampling.max_tokens = 80
    step = follower.step if follower else engine.step
    try:
        answers: dict[str, list[int]] = {}
        names = [engine.add(tokens) for _ in range(2) for tokens in prompts]
        while len(answers) < len(names):
            answers |= step()
        ordered = [answers[name] for name in names]
        return follower.found() | {"answers": ordered, "metrics": engine.metrics()} if follower else ordered
    finally:
        engine.close()


def failed_load(model: Path) -> dict[str, Any]:
    """Let the first load fail: vLLM computes its blocks."""
    with ScriptedCopies() as scripted:
        scripted.fail_at(2, queue="load")
        return walk(model, copy_hook=scripted) | {"num_failed": scripted.num_failed}


def residency(model: Path) -> dict[str, Any]:
    """Leave vLLM's own observer of the pool in its place behind ours."""
    options = {"kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0}
    follower = Follower(model, llm_options=options)
    try:
        for seed in WALK[:4]:
            follower.ask(seed)
        collector = follower.engine.core.scheduler.kv_metrics_collector
        return follower.found() | {"residencies": len(collector.block_metrics)}
    finally:
        follower.close()


def refused(model: Path) -> str:
    """Ask the pure spec for the policy."""
    try:
        Engine(model, "spec", eviction="device-lru").close()
    except SettingsError as error:
        return str(error)
    return ""


def faults() -> list[str]:
    """Take away from vLLM what the watch hangs on."""
    from vllm.v1.core.block_pool import BlockHashToBlockMap
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    del KVCacheMetricsCollector.on_block_evicted
    del BlockHashToBlockMap.get_one_block
    return list(find_faults())


def main() -> None:
    folder, *chosen = sys.argv[1:]
    model = write_model(Path(folder) / "full")
    windows = write_model(Path(folder) / "windows", sliding_window=96)
    short = {"llm_options": {"max_model_len": 352}}
    cases: dict[str, Callable[[], Any]] = {
        "off": lambda: off(model),
        "walk": lambda: walk(model),
        "small_host": lambda: walk(model, host_memory="3MiB"),
        "chunks": lambda: walk(model, blocks_per_chunk=4),
        "windows_off": lambda: off(windows, llm_options=short["llm_options"]),
        "windows": lambda: walk(windows, **short),
        "order": lambda: order(model),
        "reset": lambda: reset(model),
        "crowd_off": lambda: crowd(model, "off"),
        "crowd": lambda: crowd(model, "connector"),
        "failed_load": lambda: failed_load(model),
        "residency": lambda: residency(model),
        "refused": lambda: refused(model),
        "faults": faults,  # the last one: nothing works after it
    }
    found: dict[str, Any] = {"version": vllm.__version__}
    for name in chosen or cases:
        print(f"case {name}", file=sys.stderr, flush=True)
        found[name] = cases[name]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
