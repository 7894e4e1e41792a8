"""Cases whose answers are compared with those of an engine without offloading."""

from pathlib import Path
from typing import Any

from engine import Engine, prompt

from kvmoor.testing import ScriptedCopies

RETURNING = [*map(prompt, (1, 2, 3, 1, 2, 1)), prompt(4, 320), prompt(5), prompt(6), prompt(4, 320)]
"""Prompts of 9 or 10 device blocks; a device cache of 23 holds two of them, and the last is exactly 10 blocks."""


def returning(model: Path, mode: Any, **options: Any) -> dict[str, Any]:
    """Ask prompts again that the device's cache has dropped meanwhile."""
    with Engine(model, mode, **options) as engine:
        if mode != "off":
            engine.wait_ready()
        asked = [engine.ask(tokens) for tokens in RETURNING]
        return {
            "answers": [answer for answer, _ in asked],
            "cached": [cached for _, cached in asked],
            "metrics": engine.metrics(),
        }


def with_fault(model: Path, queue: str, **options: Any) -> dict[str, Any]:
    """Let the first load, or the first store, fail at its third block."""
    with ScriptedCopies() as scripted:
        scripted.fail_at(2, queue=queue)
        found = returning(model, "connector", copy_hook=scripted, **options)
        return found | {"num_failed": scripted.num_failed}


def crowd(
    model: Path, mode: Any, *, as_if_zeroing: bool = False, slow_stores: bool = False, **options: Any
) -> dict[str, Any]:
    """Answer eight requests at once, twice, on a device too small for them: they preempt each other."""
    with ScriptedCopies() as scripted:
        if slow_stores:  # so that blocks are taken from requests while stores of them are being copied
            scripted.delay(0.005, queue="store")
            options["copy_hook"] = scripted
        with Engine(model, mode, device_blocks=20, **options) as engine:
            engine.sampling.max_tokens = 80  # so that answers grow into blocks that others have
            if as_if_zeroing:  # as the other model runner does, before it lets stores of the old content begin
                engine.connector._overwrites_before_flush = engine.connector._zeroes_blocks = True
            waited_for = engine.note_waits() if mode != "off" else []
            shared = prompt(9, 128)
            answers: list[list[int]] = []
            for _ in range(2):
                names = [engine.add([*shared, *prompt(seed, 100 + 13 * seed)]) for seed in range(8)]
                found = engine.drain()
                answers += [found[name] for name in names]
            if mode == "off":
                return {"answers": answers}
            left = engine.settle()
            return {"answers": answers, "left": left, "waited_for": sorted(waited_for), "metrics": engine.metrics()}


def chunked_prefill(model: Path, mode: Any, **options: Any) -> dict[str, Any]:
    """Ask prompts of 470 tokens, of which a step computes 64, alone and beside one that is answered meanwhile."""
    llm_options = {"max_num_batched_tokens": 64}
    with Engine(model, mode, llm_options=llm_options, **options) as engine:
        if mode != "off":
            engine.wait_ready()
        answers, steps, stored_early = [], [], 0
        for seed in (1, 2, 1):
            name = engine.add(prompt(seed, 470))
            while not (done := engine.step()):
                (request,) = engine.core.scheduler.requests.values()
                if mode != "off" and not answers and request.num_computed_tokens < 470:
                    stored_early = max(stored_early, engine.connector.scheduler_side.coordinator.statistics().ready)
                steps.append(name)
            answers.append(done[name])
        engine.drain()
        cached = [engine.ask(prompt(2, 470))[1]]
        beside = [engine.add(prompt(3, 40)), engine.add([*prompt(1, 256), *prompt(7, 200)])]
        done = engine.drain()
        answers += [done[name] for name in beside]
        counts = [steps.count(name) for name in dict.fromkeys(steps)]
        return {"answers": answers, "steps": counts, "stored_early": stored_early, "cached": cached}


def shared_prefix(model: Path, mode: Any, **options: Any) -> dict[str, Any]:
    """Ask prompts that begin with the same 192 tokens: at once, after they left the device, and at once again."""
    with Engine(model, mode, **options) as engine:
        if mode != "off":
            engine.wait_ready()
        shared = prompt(9, 192)
        first, second, third = ([*shared, *prompt(seed, 100)] for seed in (11, 12, 13))
        answers = []
        for tokens in ([first, second], [third]):
            names = [engine.add(each) for each in tokens]
            done = engine.drain()
            answers += [done[name] for name in names]
            engine.empty_device()
        answer, cached = engine.ask([*shared, *prompt(14, 100)])
        answers.append(answer)
        engine.empty_device()
        names = [engine.add(each) for each in (first, second, third)]
        done = engine.drain()
        answers += [done[name] for name in names]
        found = {"answers": answers, "cached": cached}
        return found if mode == "off" else found | {"left": engine.settle()}
