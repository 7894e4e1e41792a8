"""Walk at random through what an engine does, over a GPU that runs late: ``call_orders.py FOLDER NUM_SEEDS CASE...``.

Prints a JSON object with what each case found; a seed that finds fault is named, so that it can be run alone:
``call_orders.py FOLDER 1 v1_async --seed 17 --events 120``. A case may be followed by ``+mutation``: see `MUTATIONS`.
"""

import argparse
import gc
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])

from call_orders_mutations import MUTATIONS
from fake_engine import DRAFTED, MAX_TOKENS, WINDOWED, FakeEngine, Setup
from fake_model import NUM_TOKENS, answer

import vllm

_SECOND_ASYNC = Setup(is_second=True, is_async=True)
_DRAFTER = Setup(layers=DRAFTED, num_drafts=3)
CASES = {
    "v1": Setup(),
    "v1_async": Setup(is_async=True),
    "v2": Setup(is_second=True),
    "v2_async": _SECOND_ASYNC,
    "v1_drafter": _DRAFTER,
    "v1_async_drafter": replace(_DRAFTER, is_async=True),
    "v2_drafter": replace(_DRAFTER, is_second=True),
    "v2_async_drafter": replace(_DRAFTER, is_async=True, is_second=True),
    "v1_windows": Setup(layers=WINDOWED, num_blocks=60),
    "v2_async_windows": replace(_SECOND_ASYNC, layers=WINDOWED, num_blocks=60),
    "v1_async_chunks": Setup(is_async=True, extra={"blocks_per_chunk": 4}),
    "v2_async_chunks": replace(_SECOND_ASYNC, extra={"blocks_per_chunk": 4}),
    "v1_zeroing": Setup(is_async=True, zeroes_blocks=True),
    "v2_zeroing": Setup(is_second=True, zeroes_blocks=True),
    "v2_async_zeroing": replace(_SECOND_ASYNC, zeroes_blocks=True),
    "v1_ranks": Setup(is_async=True, paces=(1.0, 0.4)),
    "v2_ranks": replace(_SECOND_ASYNC, paces=(0.4, 1.0)),
    "v1_faults": Setup(is_async=True, paces=(1.0, 0.5), fails={"load": 0.15, "store": 0.1}),
    "v2_faults": replace(_SECOND_ASYNC, fails={"load": 0.2, "store": 0.1}),
    "v1_windows_faults": Setup(layers=WINDOWED, num_blocks=60, fails={"load": 0.2, "store": 0.1}),
    "v2_staged": replace(_SECOND_ASYNC, extra={"pin": "off"}),
    "v2_packed": replace(_SECOND_ASYNC, layout="BLHNC"),
}
if vllm.__version__ >= "0.33":
    _BUDGET = {"sync_load_budget_bytes": 1 << 30}
    CASES |= {
        "v1_sync_loads": Setup(extra=_BUDGET, zeroes_blocks=True),
        "v2_sync_loads": Setup(is_second=True, extra=_BUDGET, zeroes_blocks=True),
        "v1_sync_load_faults": Setup(extra=_BUDGET, fails={"expedited load": 0.2, "store": 0.1}),
        "v2_sync_load_faults": Setup(is_second=True, extra=_BUDGET, fails={"expedited load": 0.2, "load": 0.1}),
        "v2_windows_chunks": replace(_SECOND_ASYNC, layers=WINDOWED, num_blocks=60, extra={"blocks_per_chunk": 4}),
    }
_ROOTS, _ROOT_LENGTH, _LONGEST_SUFFIX, _LONGEST_ANSWER = 6, 56, 12, 14
_NUM_OPEN = 7
_NUM_LOOKED_AT = 12
_CONTROL_SEEDS = 6
"""How many walks a broken plugin may survive."""


class Walk:
    """One walk: `run` does it and returns what it saw, or raises."""

    def __init__(self, folder, setup):
        self.setup = setup
        self.draw = random.Random(setup.seed)
        self.engine = FakeEngine(folder, setup)
        self.engine.within_step = self._abort_within_step
        self.asked = {}
        self.seen = Counter()
        self.num_failed = 0
        self.to_ask_again = []
        self.aborts_within_steps = True
        self.roots = [[self.draw.randrange(NUM_TOKENS) for _ in range(_ROOT_LENGTH)] for _ in range(_ROOTS)]

    def run(self, num_events):
        try:
            for _ in range(num_events):
                self._do_something()
                self._check_bytes()
            self._finish()
            self._look_at_all_that_is_stored()
            self._check_books()
        finally:
            self.engine.close()
        self._check_gpus()
        return self.seen

    def _do_something(self):
        engine, kind = self.engine, self.draw.random()
        if kind < 0.18 and len(engine.open) < _NUM_OPEN:
            self._add(self._prompt(), self.draw.randint(1, _LONGEST_ANSWER))
        elif kind < 0.205 and engine.open:
            request = self.draw.choice(sorted(engine.open))
            self.seen["aborts"] += 1
            self.seen["aborted loads"] += self._is_loading(request)
            engine.abort(request)
        elif kind < 0.22:
            self._reset()
        elif engine.has_work:
            engine.step()

    def _abort_within_step(self):
        """Abort a request now and then where it is hardest: its step ran, a copy failed, and nobody was told yet."""
        num_failed, self.num_failed = self.num_failed, sum(rank.num_failed for rank in self.engine.ranks)
        candidates = sorted(self.engine.open & self.asked.keys()) if self.aborts_within_steps else []
        if candidates and self.draw.random() < (0.5 if self.num_failed > num_failed else 0.01):
            request = self.draw.choice(list(filter(self._is_loading, candidates)) or candidates)
            self.seen["aborts within a step"] += 1
            self.engine.abort(request)
            prompt = self.asked[request][0]
            self.to_ask_again += prompt, prompt[: self.draw.randint(1, len(prompt))]  # the shorter one is asked first

    def _prompt(self):
        if self.to_ask_again and self.draw.random() < 0.7:
            return self.to_ask_again.pop()
        root = self.draw.choice(self.roots)
        length = self.draw.choice([self.draw.randint(1, _ROOT_LENGTH), _ROOT_LENGTH, 48, 32])
        suffix = self.draw.choice([0, self.draw.randint(0, _LONGEST_SUFFIX)])
        return root[:length] + [self.draw.randrange(NUM_TOKENS) for _ in range(suffix)]

    def _add(self, prompt, num_tokens):
        request = f"request-{len(self.asked)}"
        self.asked[request] = prompt, num_tokens
        assert len(prompt) + num_tokens <= MAX_TOKENS
        self.engine.add(request, prompt, num_tokens)

    def _is_loading(self, request):
        return any(request == job.req_id and not job.is_store for job in self._jobs.values())

    @property
    def _jobs(self):
        return self.engine.connector.connector_scheduler._jobs

    def _reset(self):
        running, connector = self.draw.random() < 0.6, self.draw.random() < 0.5
        self.seen["resets of the host"] += connector
        self.seen["resets with jobs"] += connector and bool(self._jobs)
        try:
            is_reset = self.engine.core.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            if "waiting for remote KV" not in str(error):  # vLLM does not reset while requests load
                raise
            self.seen["resets refused"] += 1
            return
        self.seen["resets"] += is_reset
        if is_reset and connector:
            self.seen["new weights"] += 1
            self.engine.change_weights()

    def _finish(self):
        self.engine.drain()
        self._check_bytes()
        for request, (prompt, num_tokens) in self.asked.items():
            if request in self.engine.answers:  # neither aborted nor looked at
                expected = answer(self.setup.layers, prompt, num_tokens)
                assert expected == self.engine.answers[request], f"{request}: {self.engine.answers[request]}"
                del self.engine.answers[request]
                self.seen["answers"] += 1

    def _look_at_all_that_is_stored(self):
        """Ask everything once more with nothing on the device: what is stored now, and wrong, is loaded."""
        self.aborts_within_steps = False
        self.engine.settle()
        self.seen["loads of the walk"] += self._num_loads()
        statistics = self.engine.connector.scheduler_side.coordinator.statistics()
        assert (0, 0, 0) == (statistics.leased, statistics.writing, statistics.held), statistics
        self.seen["evicted"] += statistics.evicted
        asked = [prompt for prompt, _ in self.asked.values()]
        for prompt in [*self.roots, *asked[-_NUM_LOOKED_AT:]]:
            self.engine.core.reset_prefix_cache(False, False)
            self._add(prompt, 1)
            self._finish()
        self.engine.settle()

    def _num_loads(self):
        return sum(rank.num_jobs("load", "expedited load") for rank in self.engine.ranks)

    def _check_bytes(self):
        assert not self.engine.wrong, self.engine.wrong[:2]

    def _check_books(self):
        side = self.engine.connector.scheduler_side
        statistics = side.coordinator.statistics()
        side.coordinator.check_invariants()
        assert (0, 0, 0) == (statistics.leased, statistics.writing, statistics.held), statistics
        assert not side._open, side._open
        assert not side._by_id
        assert not side._from_before_reset
        assert not self.engine.connector._store_orders
        assert 0 == statistics.unknown_reports
        self.seen["loads"] += self._num_loads()
        self.seen["stores"] += sum(rank.num_jobs("store") for rank in self.engine.ranks)
        self.seen["failed"] += sum(rank.num_failed for rank in self.engine.ranks)
        self.seen["flushed"] += sum(rank.num_flushed for rank in self.engine.ranks)
        self.seen["excused"] += sum(rank.num_excused for rank in self.engine.ranks)
        self.seen["preempted"] += self.engine.num_preempted
        for rank in self.engine.ranks:
            worker = rank.connector.worker_side
            assert not worker._running
            assert not worker.worker.statistics().running
            assert not rank.connector._requests_of_loads
            assert not rank.connector._failed_orders

    def _check_gpus(self):
        for rank in self.engine.ranks:
            rank.gpu.run_all()
            rank.gpu.check()
            assert not rank.gpu.leaks(), rank.gpu.leaks()


def run_case(folder, name, seeds, num_events):
    """Do the walks of a case and return what they saw together; `failures` by seed."""
    case, _, mutation = name.partition("+")
    seen, failures = Counter(), {}
    gc.freeze()  # or vLLM goes through all of itself, whenever an engine starts or ends
    for seed in seeds:
        with MUTATIONS[mutation]():
            try:
                seen += Walk(folder, replace(CASES[case], seed=seed)).run(num_events)
            except Exception as error:
                if os.environ.get("CALL_ORDERS_RAISE"):
                    raise
                failures[seed] = f"{type(error).__name__}: {error}"[:600]
                if mutation:
                    break  # found out; how often does not matter
    return {"seen": dict(seen), "failures": failures}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_seeds", type=int)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--events", type=int, default=150, help="how long a walk is")
    asked = parser.parse_args()
    logging.getLogger("kvmoor").setLevel(logging.CRITICAL)
    found = {"version": vllm.__version__}
    known = [name for name in asked.cases or CASES if name.partition("+")[0] in CASES]
    for name in known:
        began = time.monotonic()
        num_seeds = max(asked.num_seeds, _CONTROL_SEEDS) if "+" in name else asked.num_seeds
        found[name] = run_case(asked.folder, name, range(asked.seed, asked.seed + num_seeds), asked.events)
        print(f"case {name}: {time.monotonic() - began:.1f} s {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
