"""Run cases on real engines in this process, one after the other: ``one_process.py FOLDER [--slow] [--all] [CASE...]``.

Without names the quick cases are run, with ``--slow`` the others. With ``--all`` both are, and one that raises is told
as ``{"error": ...}`` and ends no other. Prints a JSON object with what each case found. Answers are compared where they
are known, so that little is printed.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

from aborts import abort_at_each_point
from answers import RETURNING, chunked_prefill, crowd, returning, shared_prefix, with_fault
from engine import Engine, beside_another
from resets import outdated_load, reset_device_only, reset_running_store, reset_twice, sleep_and_wake
from tiny_llama import write_model

import vllm


@dataclass(frozen=True)
class Case:
    """A case, and by which other one its answers are judged; without one it judges itself, as ``same``."""

    run: Callable[[], dict[str, Any]]
    reference: str = ""
    is_slow: bool = False
    is_control: bool = False
    """Its answers have to differ."""
    since: str = "0.30"
    """The first version of vLLM that has what is tried, on CPUs."""


def events(model: Path) -> dict[str, Any]:
    """Follow vLLM's events: what they say is in host memory is what is there, and chunks are told by their hashes."""
    config = {"enable_kv_cache_events": True, "publisher": "null"}
    with Engine(model, "connector", host_memory="3MiB", llm_options={"kv_events_config": config}) as engine:
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
        ready = engine.connector.scheduler_side.coordinator.statistics().ready
        return {"kinds": sorted(kinds), "told": len(there), "there": ready, "same": len(there) == ready}


def all_cases(folder: Path) -> dict[str, Case]:
    """Return the cases in the order in which they are run."""
    model = write_model(folder / "full")
    windows = write_model(folder / "windows", sliding_window=96)
    short: dict[str, Any] = {"llm_options": {"max_model_len": 352}}  # with two groups a request takes more blocks
    in_step: dict[str, Any] = {"sync_load_budget_bytes": 1 << 30}
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {
        "off": Case(lambda: returning(model, "off")),
        "connector": Case(lambda: returning(model, "connector"), "off"),
        "changed_bytes": Case(lambda: returning(model, "connector", flip_loaded_bytes=True), "off", is_control=True),
        "chunks": Case(lambda: returning(model, "connector", blocks_per_chunk=4), "off"),
        "small_host": Case(lambda: returning(model, "connector", host_memory="3MiB"), "off"),
        "failed_load": Case(lambda: with_fault(model, "load"), "off"),
        "failed_store": Case(lambda: with_fault(model, "store"), "off"),
        "spec": Case(lambda: returning(model, "spec"), "off"),
        "windows_off": Case(lambda: returning(windows, "off", **short)),
        "windows": Case(lambda: returning(windows, "connector", **short), "windows_off"),
        "chunked_off": Case(lambda: chunked_prefill(model, "off")),
        "chunked": Case(lambda: chunked_prefill(model, "connector"), "chunked_off"),
        "crowd_off": Case(lambda: crowd(model, "off")),
        "crowd": Case(lambda: crowd(model, "connector"), "crowd_off"),
        "shared_off": Case(lambda: shared_prefix(model, "off")),
        "shared": Case(lambda: shared_prefix(model, "connector"), "shared_off"),
        "abort": Case(lambda: abort_at_each_point(model)),
        "reset_twice": Case(lambda: reset_twice(model)),
        "reset_running_store": Case(lambda: reset_running_store(model)),
        "outdated_load": Case(lambda: outdated_load(model)),
        "tiny_host": Case(lambda: returning(model, "connector", host_memory="1MiB"), "off", is_slow=True),
        "windows_failed_load": Case(lambda: with_fault(windows, "load", **short), "windows_off", is_slow=True),
        "windows_chunks": Case(
            lambda: returning(windows, "connector", blocks_per_chunk=4, **short), "windows_off", True, since="0.33"
        ),
        "chunked_chunks": Case(
            lambda: chunked_prefill(model, "connector", blocks_per_chunk=4), "chunked_off", is_slow=True
        ),
        "crowd_chunks": Case(
            lambda: crowd(model, "connector", blocks_per_chunk=2, host_memory="4MiB"), "crowd_off", is_slow=True
        ),
        "crowd_zeroing": Case(lambda: crowd(model, "connector", as_if_zeroing=True), "crowd_off", is_slow=True),
        "crowd_slow_stores": Case(lambda: crowd(model, "connector", slow_stores=True), "crowd_off", is_slow=True),
        "shared_chunks": Case(
            lambda: shared_prefix(model, "connector", blocks_per_chunk=4), "shared_off", is_slow=True
        ),
        "reset_device_only": Case(lambda: reset_device_only(model), is_slow=True),
        "events": Case(lambda: events(model), is_slow=True),
        "sync_loads": Case(lambda: returning(model, "connector", **in_step), "off", is_slow=True, since="0.33"),
        "failed_sync_load": Case(
            lambda: with_fault(model, "expedited load", **in_step), "off", is_slow=True, since="0.33"
        ),
        "sleep": Case(lambda: sleep_and_wake(model), is_slow=True, since="0.33"),
        "abort_beside": Case(
            # An empty folder: the other connector cannot load what it finds there of a longer step.
            lambda: abort_at_each_point(model, kv_transfer_config=beside_another(Path(mkdtemp(dir=folder)))),
            is_slow=True,
        ),
        # The last: vLLM cannot always start an engine in a process that has guessed tokens.
        "abort_guessing": Case(
            lambda: abort_at_each_point(model, speculative_config=guesses), is_slow=True, since="0.31"
        ),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    flags = {argument for argument in sys.argv[2:] if argument.startswith("--")}
    chosen = set(sys.argv[2:]) - flags
    cases = {name: case for name, case in all_cases(folder).items() if vllm.__version__ >= case.since}
    if chosen:
        cases = {name: case for name, case in cases.items() if name in chosen}
    elif "--all" not in flags:
        references = {case.reference for case in cases.values() if case.is_slow and case.reference}
        slow = "--slow" in flags
        cases = {name: each for name, each in cases.items() if each.is_slow == slow or (slow and name in references)}
    found: dict[str, Any] = {"version": vllm.__version__, "references": {}, "controls": []}
    for name, case in cases.items():
        print(f"case {name}", file=sys.stderr, flush=True)
        try:
            found[name] = case.run()
        except Exception:
            if "--all" not in flags:
                raise
            found[name] = {"error": traceback.format_exc()}
            traceback.print_exc()
        found["references"][name] = case.reference
        found["controls"] += [name] if case.is_control else []
    print(json.dumps(found))


if __name__ == "__main__":
    main()
