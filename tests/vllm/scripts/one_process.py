"""Run cases on real engines in this process, one after the other: ``one_process.py FOLDER CASE...``.

Prints a JSON object with what each case found. Answers are compared where they are known, so that little is printed.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

from engine import Engine, prompt
from tiny_llama import write_model

import vllm
from kvmoor.testing import ScriptedCopies

RETURNING = [*map(prompt, (1, 2, 3, 1, 2, 1)), prompt(4, 320), prompt(5), prompt(6), prompt(4, 320)]
"""Prompts of 9 or 10 device blocks; a device cache of 23 holds two of them, and the last is exactly 10 blocks."""


def _returning(engine: Engine) -> dict[str, Any]:
    if engine.llm.llm_engine.vllm_config.kv_transfer_config is not None:
        engine.wait_ready()
    asked = [engine.ask(tokens) for tokens in RETURNING]
    return {
        "answers": [answer for answer, _ in asked],
        "cached": [cached for _, cached in asked],
        "metrics": engine.metrics(),
    }


def returning(model: Path, mode: Any, **options: Any) -> dict[str, Any]:
    """Ask prompts again that the device's cache has dropped meanwhile."""
    engine = Engine(model, mode, **options)
    try:
        return _returning(engine)
    finally:
        engine.close()


def with_fault(model: Path, queue: str, **options: Any) -> dict[str, Any]:
    """Let the first load, or the first store, fail at its third block."""
    with ScriptedCopies() as scripted:
        scripted.fail_at(2, queue=queue)
        found = returning(model, "connector", copy_hook=scripted, **options)
        return found | {"num_failed": scripted.num_failed}


def crowd(model: Path, mode: Any, *, as_if_zeroing: bool = False, **options: Any) -> dict[str, Any]:
    """Answer eight requests at once, twice, on a device too small for them: they preempt each other."""
    engine = Engine(model, mode, device_blocks=20, **options)
    engine.sampling.max_tokens = 80  # so that answers grow into blocks that others have
    if as_if_zeroing:  # as the other model runner does, before it lets stores of the old content begin
        engine.connector._overwrites_before_flush = engine.connector._zeroes_blocks = True
    try:
        shared = prompt(9, 128)
        answers: list[list[int]] = []
        for _ in range(2):
            names = [engine.add([*shared, *prompt(seed, 100 + 13 * seed)]) for seed in range(8)]
            found = engine.drain()
            answers += [found[name] for name in names]
        if mode == "off":
            return {"answers": answers}
        engine.connector.scheduler_side.coordinator.check_invariants()
        num_open = len(engine.connector.scheduler_side._open)
        return {"answers": answers, "open": num_open, "metrics": engine.metrics()}
    finally:
        engine.close()


def reset_twice(model: Path) -> dict[str, Any]:
    """Reset with stores in flight, and again before the next step."""
    engine = Engine(model, "connector", device_blocks=40)
    try:
        engine.wait_ready()
        reference, _ = engine.ask(prompt(1))
        engine.add(prompt(2), "b")
        engine.step()
        jobs = len(engine.connector.connector_scheduler._jobs)
        resets = [engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True) for _ in range(2)]
        stored_after = engine.connector.scheduler_side.coordinator.statistics()
        answers = engine.drain()
        again, _ = engine.ask(prompt(1))
        engine.connector.scheduler_side.coordinator.check_invariants()
        return {
            "jobs": jobs,
            "resets": resets,
            "ready_after_reset": stored_after.ready,
            "answered": sorted(answers),
            "same": again == reference,
            "held_back": len(engine.connector.scheduler_side._from_before_reset),
        }
    finally:
        engine.close()


def reset_device_only(model: Path) -> dict[str, Any]:
    """Empty the device's cache alone while a request runs whose prefix the host holds."""
    engine = Engine(model, "connector", device_blocks=40)
    try:
        engine.wait_ready()
        reference, _ = engine.ask(prompt(1))
        name = engine.add(prompt(1))
        engine.step()
        engine.step()
        reset = engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        return {"reset": reset, "same": engine.drain()[name] == reference}
    finally:
        engine.close()


def abort(model: Path) -> dict[str, Any]:
    """Abort requests after 0 to 5 steps, cold ones and ones that load; nothing may stay leased."""
    engine = Engine(model, "connector")
    try:
        engine.wait_ready()
        reference = [engine.ask(prompt(seed))[0] for seed in (1, 2, 3)]
        for num_steps in range(6):
            for seed in (1, 10 + num_steps):
                name = engine.add(prompt(seed))
                for _ in range(num_steps):
                    engine.step()
                engine.llm.llm_engine.abort_request([name])
                engine.drain()
        again = [engine.ask(prompt(seed))[0] for seed in (1, 2, 3)]
        engine.drain()
        statistics = engine.connector.scheduler_side.coordinator.statistics()
        engine.connector.scheduler_side.coordinator.check_invariants()
        return {"same": again == reference, "leased": statistics.leased, "writing": statistics.writing}
    finally:
        engine.close()


def outdated_load(model: Path) -> dict[str, Any]:
    """Reset while a load is under way: it must not bring back what was to be forgotten."""
    with ScriptedCopies() as scripted:
        engine = Engine(model, "connector", copy_hook=scripted)
        try:
            engine.wait_ready()
            reference, _ = engine.ask(prompt(1))
            for seed in (2, 3):
                engine.ask(prompt(seed))
            held = scripted.hold("load")
            name = engine.add(prompt(1))
            engine.step()
            assert held.wait_reached(10.0)
            engine.core.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
            held.release()
            answers = engine.drain()
            found = {"same": answers[name] == reference, "num_loaded": scripted.num_copies("load")}
            return found | {"cached_again": engine.ask(prompt(2))[1], "metrics": engine.metrics()}
        finally:
            engine.close()


def events(model: Path) -> dict[str, Any]:
    """Follow vLLM's events: what they say is in host memory is what is there, and chunks are told by their hashes."""
    config = {"enable_kv_cache_events": True, "publisher": "null"}
    engine = Engine(model, "connector", host_memory="3MiB", llm_options={"kv_events_config": config})
    try:
        engine.wait_ready()
        batches: list[Any] = []
        engine.core.scheduler.kv_event_publisher.publish = batches.append
        for tokens in RETURNING:
            engine.ask(tokens)
        engine.drain()
        there: set[Any] = set()
        kinds: set[str] = set()
        for event in (event for batch in batches for event in batch.events if getattr(event, "medium", "") == "CPU"):
            kinds.add(type(event).__name__)
            if type(event).__name__ == "BlockStored":
                there |= set(event.block_hashes)
            else:
                there -= set(event.block_hashes)
        return {
            "kinds": sorted(kinds),
            "told": len(there),
            "there": engine.connector.scheduler_side.coordinator.statistics().ready,
        }
    finally:
        engine.close()


def main() -> None:
    folder, *chosen = sys.argv[1:]
    model = write_model(Path(folder) / "full")
    windows = write_model(Path(folder) / "windows", sliding_window=96)
    short = {"llm_options": {"max_model_len": 352}}  # with two groups a request takes more blocks
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "off": lambda: returning(model, "off"),
        "connector": lambda: returning(model, "connector"),
        "spec": lambda: returning(model, "spec"),
        "control": lambda: returning(model, "connector", flip_loaded_bytes=True),
        "chunks": lambda: returning(model, "connector", blocks_per_chunk=4),
        "small_host": lambda: returning(model, "connector", host_memory="3MiB"),
        "tiny_host": lambda: returning(model, "connector", host_memory="1MiB"),
        "failed_load": lambda: with_fault(model, "load"),
        "failed_store": lambda: with_fault(model, "store"),
        "windows_off": lambda: returning(windows, "off", **short),
        "windows": lambda: returning(windows, "connector", **short),
        "windows_failed_load": lambda: with_fault(windows, "load", **short),
        "crowd_off": lambda: crowd(model, "off"),
        "crowd": lambda: crowd(model, "connector"),
        "crowd_chunks": lambda: crowd(model, "connector", blocks_per_chunk=2, host_memory="4MiB"),
        "crowd_zeroing": lambda: crowd(model, "connector", as_if_zeroing=True),
        "reset_twice": lambda: reset_twice(model),
        "reset_device_only": lambda: reset_device_only(model),
        "abort": lambda: abort(model),
        "outdated_load": lambda: outdated_load(model),
        "events": lambda: events(model),
    }
    if vllm.__version__ >= "0.33":
        budget = {"sync_load_budget_bytes": 1 << 30}
        cases["sync_loads"] = lambda: returning(model, "connector", **budget)
        cases["failed_sync_load"] = lambda: with_fault(model, "expedited load", **budget)
    found: dict[str, Any] = {"version": vllm.__version__}
    for name in chosen or cases:
        print(f"case {name}", file=sys.stderr, flush=True)
        found[name] = cases[name]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
