"""The offline optimum against trying everything."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.errors import SettingsError
from kvmoor.simulation.offline_optimum import OfflineOptimum
from kvmoor.simulation.trace import Request, TraceBuilder


def trace_of(prompts):
    """Make a trace of prompts in which a letter is a block, known by all letters before it."""
    builder = TraceBuilder("made up")
    for time_s, prompt in enumerate(prompts):
        blocks = builder.number(prompt[: end + 1] for end in range(len(prompt)))
        builder.add([Request(float(time_s), len(prompt), blocks)], 1)
    return builder.finish()


def best_by_trying(prompts, capacity):
    """Return the most hits that any cache can have that may keep any blocks it has, or has just seen, and no others."""
    hits_of = {frozenset(): 0}  # by what is cached
    for prompt in prompts:
        own = [prompt[: end + 1] for end in range(len(prompt))]
        after = {}
        for cached, hits in hits_of.items():
            found = next((place for place, block in enumerate(own) if block not in cached), len(own))
            at_hand = cached | set(own)
            for size in range(min(capacity, len(at_hand)) + 1):
                for kept in map(frozenset, combinations(sorted(at_hand), size)):
                    after[kept] = max(after.get(kept, 0), hits + found)
        hits_of = after
    return max(hits_of.values())


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=6), st.integers(0, 3))
def test_no_choice_of_blocks_has_more_hits(prompts, capacity):
    """On small traces the optimum is what trying every choice of blocks finds to be the most, and not more."""
    assert best_by_trying(prompts, capacity) == OfflineOptimum(trace_of(prompts)).hit_blocks(capacity)


def test_what_never_returns_is_not_kept():
    """A prompt that comes once takes no room from one that comes back."""
    assert 2 == OfflineOptimum(trace_of(["ab", "xyz", "ab"])).hit_blocks(2)


def test_deeper_blocks_give_way_first():
    """Where a whole prompt returns and does not fit, its leading blocks are kept: one hit for each of them."""
    assert 3 == OfflineOptimum(trace_of(["abcde", "abcde"])).hit_blocks(3)


def test_one_optimum_answers_for_many_capacities():
    """Asking for one capacity changes nothing for the next, in any order."""
    optimum = OfflineOptimum(trace_of(["abc", "abd", "xy", "abc", "xy"]))
    first = [optimum.hit_blocks(capacity) for capacity in range(8)]
    assert first == sorted(first)
    assert first[::-1] == [optimum.hit_blocks(capacity) for capacity in reversed(range(8))]


def test_without_a_limit_everything_that_returns_is_found():
    """A cache as large as the trace has a hit for every block but the first of its kind; one without room has none."""
    trace = trace_of(["abc", "", "abd", "abc"])
    optimum = OfflineOptimum(trace)
    assert trace.num_references - trace.num_unique_blocks == optimum.hit_blocks(trace.num_unique_blocks)
    assert 0 == optimum.hit_blocks(0)


def test_a_capacity_below_zero_is_refused():
    """Nobody has fewer than no blocks."""
    with pytest.raises(SettingsError, match="-1 blocks"):
        OfflineOptimum(trace_of(["a"])).hit_blocks(-1)


def test_runs_are_counted_whatever_the_type_of_the_numbers():
    """The blocks of a request may be an array of any whole numbers that the builder gave."""
    builder = TraceBuilder("made up")
    numbers = builder.number("abc")
    builder.add([Request(0.0, 3, numbers.astype(np.int64)), Request(1.0, 3, numbers)], 1)
    assert 3 == OfflineOptimum(builder.finish()).hit_blocks(3)
