"""A replay keeps the rules of the reference: checked against a plain model of them, and one by one."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.errors import SettingsError
from kvmoor.index.eviction import policies
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.simulation import replay as replay_module
from kvmoor.simulation.comparison import compare
from kvmoor.simulation.reachability import Reachability
from kvmoor.simulation.replay import Replayer
from kvmoor.simulation.trace import FIRST, Request, TraceBuilder


def trace_of(prompts, block_size=1):
    """Make a trace of prompts in which a letter is a block, known by all letters before it."""
    builder = TraceBuilder("made up")
    for time_s, prompt in enumerate(prompts):
        blocks = builder.number(prompt[: end + 1] for end in range(len(prompt)))
        builder.add([Request(float(time_s), len(prompt) * block_size, blocks)], block_size)
    return builder.finish()


def hits_of_plain_lru(prompts, capacity):
    """Count hits and stores with an ordered dictionary, by the rules as they are written down."""
    oldest_first = OrderedDict()
    hits = stored = 0
    for prompt in prompts:
        own = [prompt[: end + 1] for end in range(len(prompt))]
        found = next((place for place, block in enumerate(own) if block not in oldest_first), len(own))
        hits += found
        fitting = own[:capacity]
        missing = [block for block in fitting if block not in oldest_first]
        others = [block for block in oldest_first if block not in fitting]
        while len(oldest_first) + len(missing) > capacity:
            del oldest_first[others.pop(0)]
        stored += len(missing)
        for block in reversed(fitting):
            oldest_first[block] = None
            oldest_first.move_to_end(block)
    return hits, stored


class HeadFirstLru(TailFirstLru):
    """Eat prompts from their beginnings, as no policy should."""

    def insert(self, slots, digests):
        super().insert(slots[::-1], digests[::-1])


@given(st.lists(st.text("abc", max_size=5), min_size=1, max_size=20), st.integers(0, 8))
def test_lru_is_a_plain_lru_by_the_written_rules(prompts, capacity):
    """Through the real index, hits, stores and evictions are those of an ordered dictionary; nothing is unreachable."""
    result = Replayer(trace_of(prompts)).replay(capacity)
    assert hits_of_plain_lru(prompts, capacity) == (result.hit_blocks, result.stored_blocks)
    assert 0 <= result.stored_blocks - result.evicted_blocks <= capacity
    assert 0 == result.unreachable_blocks


@pytest.mark.parametrize(("capacity", "hits"), [(0, 0), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_a_prompt_longer_than_the_capacity_leaves_its_beginning(capacity, hits):
    """What does not fit is left out from the end; a capacity of 0 saves nothing, and none of this is an error."""
    result = Replayer(trace_of(["abcde", "abcde"])).replay(capacity)
    assert (hits, min(capacity, 5), 0) == (result.hit_blocks, result.stored_blocks, result.evicted_blocks)


def test_hit_tokens_are_whole_blocks():
    """A hit saves as many tokens as a block has."""
    result = Replayer(trace_of(["ab", "abc"], block_size=16)).replay(10)
    assert (2, 32, 3) == (result.hit_blocks, result.hit_tokens, result.stored_blocks)


def test_blocks_that_nothing_can_reach_are_counted(monkeypatch):
    """A policy that evicts beginnings before ends is found out, at the moment when it is at its worst."""
    monkeypatch.setattr(replay_module, "POLICIES", {"head-first": HeadFirstLru})
    # "x" evicts "a": "ab" stays without what is in front of it, and "abc" behind it is not counted again.
    # In the end "lmn" takes all the room.
    result = Replayer(trace_of(["abc", "x", "a", "lmn"])).replay(3, policy="head-first")
    assert 1 == result.unreachable_blocks


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_no_policy_beats_the_optimum(policy):
    """With each policy that can be named, the hits stay between none and those of the offline optimum."""
    prompts = ["abc", "abd", "xyz", "abc", "xyw", "abd", "q", "abc"] * 3
    compared = compare(trace_of(prompts), [5, 1, 3, 3], [policy, policy])
    assert [1, 3, 5] == [each.replay.capacity_blocks for each in compared]
    assert {policy} == {each.replay.policy for each in compared}
    for each in compared:
        assert 0 <= each.replay.hit_blocks <= each.optimum_hit_blocks
        assert each.replay.hit_tokens / trace_of(prompts).num_tokens == each.hit_ratio <= each.optimum_hit_ratio
        assert each.share_of_optimum <= 1


def test_nothing_to_find_is_all_of_the_optimum():
    """A trace in which nothing returns, or which has no full block, gives ratios and not a division by zero."""
    for prompts in (["ab", "xy"], [""]):
        (each,) = compare(trace_of(prompts), [4])
        assert (0.0, 0.0, 1.0) == (each.hit_ratio, each.optimum_hit_ratio, each.share_of_optimum)


def test_progress_adds_up_to_the_references():
    """Whoever draws a bar is told of every block once."""
    trace = trace_of(["abc", "ab", "", "xyzw"])
    seen = []
    Replayer(trace).replay(2, on_progress=seen.append)
    assert [3, 2, 0, 4] == seen
    assert trace.num_references == sum(seen)


def test_replays_do_not_see_each_other():
    """Each replay starts with an empty cache."""
    replayer = Replayer(trace_of(["ab", "ab"]))
    assert [2, 2] == [replayer.replay(4).hit_blocks for _ in range(2)]


@pytest.mark.parametrize(
    ("capacity", "policy", "message"), [(-1, "lru", "-1 blocks"), (1, "lfu", "'lfu': choose from lru")]
)
def test_what_cannot_be_replayed_is_refused(capacity, policy, message):
    """A capacity below 0 and a policy that does not exist are errors that say what would do."""
    with pytest.raises(SettingsError, match=message):
        Replayer(trace_of(["a"])).replay(capacity, policy=policy)


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=12), st.data())
def test_unreachable_blocks_are_counted_whatever_comes_and_goes(prompts, data):
    """The count is that of the cached blocks without the one in front of them, after each change."""
    trace = trace_of(prompts)
    reachability = Reachability(trace)
    cached = set()
    most = 0
    for _ in range(6):
        evicted = data.draw(st.lists(st.sampled_from(sorted(cached)), unique=True)) if cached else []
        cached -= set(evicted)
        missing = sorted(set(range(trace.num_unique_blocks)) - cached)
        stored = data.draw(st.lists(st.sampled_from(missing), unique=True)) if missing else []
        cached |= set(stored)
        reachability.note(evicted=np.array(evicted, np.int32), stored=np.array(stored, np.int32))
        most = max(most, sum(trace.predecessors[block] not in {FIRST, *cached} for block in cached))
        assert most == reachability.most_unreachable
