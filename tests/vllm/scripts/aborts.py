"""Abort requests at the moments that differ in what is under way: see `POINTS`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Engine, prompt

from kvmoor.testing import CopyGate, ScriptedCopies

REACHED_TIMEOUT_S = 10.0
STEP_TOKENS = 64
"""Tokens that a step computes: a prompt of 300 takes five."""


def abort_at_each_point(model: Path, **llm_options: Any) -> dict[str, Any]:
    """Abort at each point with copies that a gate holds up, and say what was under way then and what was left."""
    llm_options["max_num_batched_tokens"] = STEP_TOKENS
    with (
        ScriptedCopies() as scripted,
        Engine(model, "connector", copy_hook=scripted, llm_options=llm_options) as engine,
    ):
        engine.wait_ready()
        reference = [engine.ask(prompt(seed))[0] for seed in (1, 2, 3)]
        found, left = {}, {}
        for name, point in POINTS.items():
            at_abort = point(engine, scripted)
            found[name] = at_abort
            left[name] = engine.settle()
        again = [engine.ask(prompt(seed))[0] for seed in (1, 2, 3)]
        left["end"] = engine.settle()
        not_over = {f"{what} after {name}": count for name, counts in left.items() for what, count in counts.items()}
        return {"points": found, "same": again == reference, "left": not_over, "metrics": engine.metrics()}


def _unseen(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """Before any step has looked at the request."""
    name = engine.add(prompt(1))
    return _abort(engine, name)


def _queued(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """While it waits behind as many requests as may run at once, never scheduled."""
    for seed in range(4):
        engine.add(prompt(50 + seed, 40))
    name = engine.add(prompt(1))
    engine.step()
    return _abort(engine, name)


def _prefill(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """With part of its prompt computed."""
    name = engine.add(prompt(60))
    engine.step()
    engine.step()
    return _abort(engine, name)


def _storing(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """While a store of it is being copied."""
    return _while_held(engine, scripted, "store", prompt(61))


def _loading(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """While its load is being copied."""
    engine.empty_device()
    return _while_held(engine, scripted, "load", prompt(1))


def _just_finished(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """Right after its last token, its stores still being copied."""
    gate = scripted.hold("store")
    name = engine.add(prompt(62))
    full_name = _request(engine, name).request_id
    _step_until(engine, lambda: name in engine.step())
    assert gate.wait_reached(REACHED_TIMEOUT_S)
    at_abort = {"status": "FINISHED", "computed": 0, "copies": engine.running_copies()}
    engine.llm.llm_engine.abort_request([name])
    engine.core.abort_requests([full_name])  # the frontend knows it no more, and does not pass it on
    engine.step()
    gate.release()
    return at_abort


def _twice(engine: Engine, scripted: ScriptedCopies) -> dict[str, Any]:
    """Twice in one step and once more after it, while its load is being copied."""
    engine.empty_device()
    return _while_held(engine, scripted, "load", prompt(1), num_aborts=2)


POINTS: dict[str, Callable[[Engine, ScriptedCopies], dict[str, Any]]] = {
    "unseen": _unseen,
    "queued": _queued,
    "prefill": _prefill,
    "store in flight": _storing,
    "load in flight": _loading,
    "just finished": _just_finished,
    "twice": _twice,
}


def _while_held(
    engine: Engine, scripted: ScriptedCopies, queue: str, tokens: list[int], *, num_aborts: int = 1
) -> dict[str, Any]:
    """Abort while a gate holds up the copies of a queue; one more step is done before they go on."""
    gate = scripted.hold(queue)
    name = engine.add(tokens)
    reach(engine, gate)
    at_abort = _abort(engine, name, num_aborts)
    gate.release()
    return at_abort


def reach(engine: Engine, gate: CopyGate) -> None:
    """Step until a copy waits at the gate."""
    _step_until(engine, lambda: bool(engine.step() or engine.running_copies()))
    assert gate.wait_reached(REACHED_TIMEOUT_S)


def _step_until(engine: Engine, stepped: Callable[[], bool]) -> None:
    for _ in range(100):
        if stepped():
            return
    raise AssertionError(f"not seen in 100 steps: {engine.in_flight()}")


def _abort(engine: Engine, name: str, num_aborts: int = 1) -> dict[str, Any]:
    """Abort, step once, and abort again as often as asked; return what was under way before."""
    request = _request(engine, name)
    at_abort = {
        "status": request.status.name,
        "computed": request.num_computed_tokens,
        "copies": engine.running_copies(),
    }
    engine.llm.llm_engine.abort_request([name])
    for _ in range(1, num_aborts):
        engine.core.abort_requests([request.request_id])  # the frontend passes on the first only
    engine.step()
    for _ in range(1, num_aborts):
        engine.core.abort_requests([request.request_id])
    return at_abort


def _request(engine: Engine, name: str) -> Any:
    """Return the scheduler's request; vLLM appends to the names it is given."""
    (request,) = (each for each in engine.core.scheduler.requests.values() if each.request_id.startswith(name))
    return request
