"""Cases that take blocks away while something is under way: resets of the caches, and a sleep."""

from pathlib import Path
from typing import Any

from aborts import reach
from engine import Engine, prompt

from kvmoor.testing import ScriptedCopies


def reset_twice(model: Path) -> dict[str, Any]:
    """Reset with stores that wait for their step, and again before the next step."""
    with Engine(model, "connector", device_blocks=40) as engine:
        engine.wait_ready()
        reference, _ = engine.ask(prompt(1))
        engine.add(prompt(2), "b")
        engine.step()
        jobs = engine.in_flight()["jobs"]
        resets = [engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True) for _ in range(2)]
        ready = engine.connector.scheduler_side.coordinator.statistics().ready
        answers = engine.drain()
        again, _ = engine.ask(prompt(1))
        return {
            "jobs": jobs,
            "resets": resets,
            "ready_after_reset": ready,
            "answered": sorted(answers),
            "same": again == reference,
            "left": engine.settle(),
        }


def reset_running_store(model: Path) -> dict[str, Any]:
    """Reset while a store is being copied; its gate opens only once the worker waits for it."""
    with ScriptedCopies() as scripted, Engine(model, "connector", copy_hook=scripted) as engine:
        engine.wait_ready()
        reference = [engine.ask(prompt(seed))[0] for seed in (1, 2)]
        gate = scripted.hold("store")
        name = engine.add(prompt(3))
        reach(engine, gate)
        copies = engine.running_copies()
        waited_for = engine.note_waits(gate.release)
        engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        ready = engine.connector.scheduler_side.coordinator.statistics().ready
        answers = engine.drain()
        again = [engine.ask(prompt(seed))[0] for seed in (1, 2)]
        engine.empty_device()
        found_again = engine.ask(prompt(3))
        return {
            "copies": copies,
            "waited_for": waited_for,
            "ready_after_reset": ready,
            "same": again == reference and found_again[0] == answers[name],
            "cached": found_again[1],
            "left": engine.settle(),
        }


def reset_device_only(model: Path) -> dict[str, Any]:
    """Empty the device's cache alone while a request runs whose prefix the host holds."""
    with Engine(model, "connector", device_blocks=40) as engine:
        engine.wait_ready()
        reference, _ = engine.ask(prompt(1))
        name = engine.add(prompt(1))
        engine.step()
        engine.step()
        reset = engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        return {"reset": reset, "same": engine.drain()[name] == reference}


def outdated_load(model: Path) -> dict[str, Any]:
    """Reset while a load is under way: it must not bring back what was to be forgotten."""
    with ScriptedCopies() as scripted, Engine(model, "connector", copy_hook=scripted) as engine:
        engine.wait_ready()
        reference, _ = engine.ask(prompt(1))
        for seed in (2, 3):
            engine.ask(prompt(seed))
        gate = scripted.hold("load")
        name = engine.add(prompt(1))
        reach(engine, gate)
        engine.core.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
        gate.release()
        answers = engine.drain()
        found = {"same": answers[name] == reference, "num_loaded": scripted.num_copies("load")}
        return found | {"cached_again": engine.ask(prompt(2))[1], "metrics": engine.metrics()}


def sleep_and_wake(model: Path) -> dict[str, Any]:
    """Sleep and wake as vLLM does, but for the worker's part, which on a CPU does nothing: this stands in for it.

    It calls the connector where the worker of a GPU does, and overwrites the KV caches, which a GPU's gives up.
    """
    with ScriptedCopies() as scripted, Engine(model, "connector", copy_hook=scripted) as engine:
        engine.wait_ready()
        reference = [engine.ask(prompt(seed))[0] for seed in (1, 2)]
        worker = engine.core.model_executor.driver_worker.worker

        def fall_asleep(level: int = 1) -> None:
            engine.worker_connector.unregister_kv_caches()
            asleep["copies"] = engine.running_copies()
            for cache in worker.model_runner.kv_caches:
                cache.fill_(7.0)

        asleep: dict[str, Any] = {}
        worker.sleep = fall_asleep
        worker.wake_up = lambda tags=None: engine.worker_connector.restore_kv_caches()
        gate = scripted.hold("store")
        name = engine.add(prompt(3))
        reach(engine, gate)
        waited_for = engine.note_waits(gate.release)
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
        engine.llm.llm_engine.abort_request([name])  # a sleep aborts it, and in one process the frontend is not told
        again = [engine.ask(prompt(seed))[0] for seed in (1, 2)]
        engine.empty_device()
        found_again = engine.ask(prompt(1))
        return {
            "waited_for": waited_for,
            "copies_asleep": asleep["copies"],
            "same": again == reference and found_again[0] == reference[0],
            "cached": found_again[1],
            "left": engine.settle(),
        }
