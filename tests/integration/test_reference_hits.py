"""The shared traces through the real index: hit for hit what an independent simulator counted."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from kvmoor.simulation.offline_optimum import OfflineOptimum
from kvmoor.simulation.replay import Replayer
from kvmoor.simulation.tiered_replay import TieredReplayer, TierPlan
from kvmoor.simulation.trace_files import ReaderOptions, read_trace

FOLDER = Path(__file__).parents[1] / "data/traces"
REFERENCE = json.loads((FOLDER / "reference_hits.json").read_text())
FILES = {
    "lmcache_agent_b16": "lmcache_agent_blocks_rle.jsonl.gz",
    "mc_synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "mc_conversation": "mooncake_conversation_trace.jsonl.gz",
    "ragpulse_b16": "ragpulse_0_trace.jsonl.gz",
    "cc_c40": "claude_code_sessions_rle.jsonl.gz",
    "cc_c200": "claude_code_sessions_rle.jsonl.gz",
}
QUICK = ["lmcache_agent_b16", "mc_synthetic"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mc_conversation", "ragpulse_b16")]
# Tens of millions of references: the optimum counts runs of them, the index takes a minute or two a capacity.
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("cc_c40", "cc_c200")]


@lru_cache(maxsize=2)  # one of the large ones takes 0.4 GB
def trace_of(name):
    return read_trace(FOLDER / FILES[name], options=ReaderOptions(concurrency=200 if name == "cc_c200" else 40))


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_trace_is_read_in_full(name):
    """The readers find the requests, blocks and tokens that the traces are known to have."""
    trace = trace_of(name)
    expected = [
        REFERENCE[name][each] for each in ("requests", "references", "unique_blocks", "block_size", "input_tokens")
    ]
    assert expected == [
        len(trace.requests),
        trace.num_references,
        trace.num_unique_blocks,
        trace.block_size,
        trace.num_tokens,
    ]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_lru_has_exactly_the_reference_hits(name):
    """Tail-first LRU has the reference's hits at all six capacities, and never a block that nothing can reach."""
    expected = REFERENCE[name]["hit_blocks"]["LRU tail-first"]
    replayer = Replayer(trace_of(name))
    results = [replayer.replay(int(capacity), policy="lru") for capacity in expected]
    assert expected == {str(result.capacity_blocks): result.hit_blocks for result in results}
    assert [0] * 6 == [result.unreachable_blocks for result in results]


@pytest.mark.parametrize("name", [*QUICK, *SLOW, *LARGE])
def test_the_offline_optimum_has_exactly_the_reference_hits(name):
    """Belady with deeper-first ties has the reference's hits at all six capacities, and all hits without a limit."""
    trace = trace_of(name)
    expected = REFERENCE[name]["hit_blocks"]["offline optimum"]
    optimum = OfflineOptimum(trace)
    assert expected == {capacity: optimum.hit_blocks(int(capacity)) for capacity in expected}
    assert REFERENCE[name]["infinite_hit_blocks"] == optimum.hit_blocks(trace.num_unique_blocks)


@pytest.mark.slow
def test_lru_has_exactly_the_reference_hits_on_the_largest_trace():
    """At one per cent of 2.9 million blocks too, where it has more than 95 per cent of the hits of the optimum."""
    result = Replayer(trace_of("cc_c40")).replay(29_480)
    expected = REFERENCE["cc_c40"]["hit_blocks"]
    assert (expected["LRU tail-first"]["29480"], 0) == (result.hit_blocks, result.unreachable_blocks)
    assert result.hit_blocks >= 0.95 * expected["offline optimum"]["29480"]


@pytest.mark.slow
def test_host_memory_that_knows_the_device_adds_to_it():
    """Behind a device of its size it adds over 20 points if it stores what leaves; what is computed adds nothing."""
    trace = trace_of("cc_c40")
    replayer = TieredReplayer(replace(trace, requests=trace.requests[16_000:20_000]))
    device = host = 14_740
    computed = replayer.replay(host, TierPlan(device, store_when="computed"), policy="lru")
    leaving = replayer.replay(host, TierPlan(device, store_when="leaving"), policy="device-lru")
    num_references = sum(len(request.blocks) for request in trace.requests[16_000:20_000])
    assert computed.hits.device == leaving.hits.device == computed.hit_blocks
    assert leaving.hits.host >= 0.2 * num_references
