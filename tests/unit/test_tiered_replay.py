"""Tiers: what each finds and stores, by worked examples, and what must hold whatever the prompts are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.errors import SettingsError
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.simulation import replay as replay_module
from kvmoor.simulation.comparison import compare_tiers
from kvmoor.simulation.replay import Replayer
from kvmoor.simulation.tiered_replay import REMEMBERED_PER_DISK_BLOCK, TieredReplayer, TierPlan
from kvmoor.simulation.trace import Request, TraceBuilder
from kvmoor.simulation.trace_keys import numbers_of
from plain_tiers import PLAIN_HOSTS, PlainTiers

PROMPTS = st.lists(st.text("abc", max_size=6), min_size=1, max_size=20)
SIZES = st.integers(0, 8)


def trace_of(prompts):
    """Make a trace of prompts in which a letter is a block of 16 tokens, known by all letters before it."""
    builder = TraceBuilder("made up")
    for time_s, prompt in enumerate(prompts):
        blocks = builder.number(prompt[: end + 1] for end in range(len(prompt)))
        builder.add([Request(float(time_s), len(prompt) * 16, blocks)], 16)
    return builder.finish()


def replay(prompts, host, policy="lru", **plan):
    return TieredReplayer(trace_of(prompts)).replay(host, TierPlan(**plan), policy=policy)


def counts(tier_counts):
    return tier_counts.device, tier_counts.host, tier_counts.disk


@given(PROMPTS, SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.sampled_from(sorted(PLAIN_HOSTS)))
def test_tiers_are_plain_caches_with_the_written_rules(prompts, device, host, disk, leaving, second_reference, policy):
    """Through real indexes, hits, stores, evictions and saved writes are those of a plain model of the rules."""
    leaving = leaving and device > 0
    trace = trace_of(prompts)
    plan = TierPlan(
        device, disk, "leaving" if leaving else "computed", "second-reference" if second_reference else "all"
    )
    num_remembered = max(1, min(trace.num_unique_blocks, REMEMBERED_PER_DISK_BLOCK * disk))
    plain = PlainTiers(
        device,
        host,
        disk,
        leaving=leaving,
        num_remembered=num_remembered if second_reference else None,
        policy=policy,
    )
    for prompt in prompts:
        plain.serve([prompt[: end + 1] for end in range(len(prompt))])
    result = TieredReplayer(trace).replay(host, plan, policy=policy)
    assert [tier.hits for tier in plain.tiers] == [*counts(result.hits)]
    assert [tier.stored for tier in plain.tiers] == [*counts(result.stored)]
    assert [tier.evicted for tier in plain.tiers] == [*counts(result.evicted)]
    assert len(plain.declined) == result.saved_writes


class DeviceWatcher(TailFirstLru):
    """Note which blocks the device is said to have."""

    def __init__(self):
        super().__init__()
        self.number_of = {}
        self.on_device = set()

    def insert(self, slots, digests):
        super().insert(slots, digests)
        self.number_of.update(zip(slots.tolist(), numbers_of(digests).tolist(), strict=True))

    def evict(self, *args):
        victims = super().evict(*args)
        self.on_device -= {self.number_of.pop(slot) for slot in victims.tolist()}
        return victims

    def enter_device(self, slots):
        self.on_device |= {self.number_of[slot] for slot in slots.tolist()}

    def leave_device(self, slots):
        self.on_device -= {self.number_of[slot] for slot in slots.tolist()}


@given(PROMPTS, st.integers(1, 8), SIZES, SIZES, st.sampled_from(["computed", "leaving"]))
def test_host_memory_is_told_what_the_device_has(prompts, device, host, disk, store_when):
    """After the last request, what host memory was told of its blocks is what the device holds of them."""
    watchers = []
    plain = PlainTiers(device, host, disk, leaving=store_when == "leaving", num_remembered=None)
    number_of = {}
    for prompt in prompts:
        own = [prompt[: end + 1] for end in range(len(prompt))]
        plain.serve(own)
        for block in own:
            number_of.setdefault(block, len(number_of))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "POLICIES", {"watch": lambda: watchers.append(DeviceWatcher()) or watchers[-1]})
        replay(prompts, host, "watch", device_blocks=device, disk_blocks=disk, store_when=store_when)
    (watcher,) = watchers
    in_both = plain.device.oldest_first.keys() & plain.host.oldest_first.keys()
    assert {number_of[block] for block in in_both} == watcher.on_device


@given(PROMPTS, SIZES, st.sampled_from(sorted(POLICIES)))
def test_host_memory_alone_is_replayed_as_ever(prompts, host, policy):
    """Without a device and a disk, hits, stores and evictions are those of a plain replay."""
    alone = Replayer(trace_of(prompts)).replay(host, policy=policy)
    tiered = replay(prompts, host, policy)
    assert (0, alone.hit_blocks, 0) == counts(tiered.hits)
    assert (0, alone.stored_blocks, 0) == counts(tiered.stored)
    assert (0, alone.evicted_blocks, 0) == counts(tiered.evicted)
    assert alone.hit_tokens == tiered.hit_tokens


@given(
    PROMPTS,
    st.integers(1, 8),
    SIZES,
    SIZES,
    st.sampled_from(["computed", "leaving"]),
    st.sampled_from(["all", "second-reference"]),
    st.sampled_from(sorted(POLICIES)),
)
def test_what_holds_for_all_tiers(prompts, device, host, disk, store_when, disk_admission, policy):
    """The device finds what it finds alone, no tier overflows, and all tiers together do not beat the optimum."""
    plan = TierPlan(device, disk, store_when, disk_admission)
    trace = trace_of(prompts)
    (each,) = compare_tiers(trace, [host], plan, [policy])
    result = each.replay
    alone = Replayer(trace).replay(device)
    assert (alone.hit_blocks, alone.stored_blocks) == (result.hits.device, result.stored.device)
    held = [stored - gone for stored, gone in zip(counts(result.stored), counts(result.evicted), strict=True)]
    assert all(0 <= blocks <= size for blocks, size in zip(held, (device, host, disk), strict=True))
    assert result.hit_blocks <= each.optimum_hit_blocks
    assert 0 <= result.saved_writes <= trace.num_unique_blocks
    assert "second-reference" == disk_admission or 0 == result.saved_writes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("store_when", ["computed", "leaving"])
@pytest.mark.parametrize(("host", "disk"), [(100, 0), (2, 100)])
def test_room_for_all_finds_all(store_when, policy, host, disk):
    """With host memory, or a disk, for every block of the trace, nothing is computed twice."""
    prompts = ["abcd", "abxy", "klmn", "abcd", "abxyz", "klm", "abcde", "q", "klmnop"]
    result = replay(prompts, host, policy, device_blocks=3, disk_blocks=disk, store_when=store_when)
    trace = trace_of(prompts)
    assert trace.num_references - trace.num_unique_blocks == result.hit_blocks


@given(PROMPTS, SIZES)
def test_a_small_host_that_stores_what_is_computed_adds_nothing(prompts, device):
    """An inclusive tier that is not larger than the device holds what that holds too, so it never finds anything."""
    for host in range(device + 1):
        assert 0 == replay(prompts, host, device_blocks=device).hits.host


def test_what_leaves_the_device_is_found_in_host_memory():
    """A block that the device drops is stored then, with all others that go in one go, and found later."""
    # "uvw" drops "abc", which goes to host memory and is loaded from there. "uvw" finds no room beside it then.
    result = replay(["abc", "uvw", "abc"], 3, device_blocks=3, store_when="leaving")
    assert (0, 3, 0) == counts(result.hits)
    assert (9, 3, 0) == counts(result.stored)
    assert (6, 0, 0) == counts(result.evicted)


def test_blocks_that_are_on_the_device_too_give_way_first_if_the_policy_knows():
    """`device-lru` gives up the copy of what was loaded, `lru` what left the device longest ago."""
    # After five prompts "d" and "e" are on the device, "a", "b" and "c" in host memory. "c" is loaded. When "f" comes,
    # "e" leaves the device and needs room in host memory: "b" left the device longest ago, and "c" is on it.
    found = {
        policy: replay("abcdecfb", 3, policy, device_blocks=2, store_when="leaving").hits.host
        for policy in ("lru", "device-lru")
    }
    assert {"lru": 1, "device-lru": 2} == found


def test_a_prompt_longer_than_the_device_leaves_with_its_end():
    """What does not fit on the device leaves it at once, so the rest of the prompt is found in host memory."""
    result = replay(["abcde", "abcde"], 3, device_blocks=2, store_when="leaving")
    assert (2, 3, 0) == counts(result.hits)
    assert 3 == result.stored.host


def test_a_block_is_taken_from_the_first_tier_that_has_it():
    """The device answers before host memory, and that before the disk."""
    # "k" drops the end of "abc", "c", which drops nothing in host memory yet; "l" drops "b", and "c" falls to the disk.
    result = replay(["abc", "k", "l", "abc"], 1, device_blocks=3, disk_blocks=9, store_when="leaving")
    assert (1, 1, 1) == counts(result.hits)


def test_what_falls_out_of_host_memory_is_written_once():
    """A block that the disk has is not written again when it falls out again, however often it was promoted."""
    result = replay(["ab", "xy", "ab", "xy", "ab"], 2, disk_blocks=10)
    assert (0, 0, 6) == counts(result.hits)
    assert (0, 10, 4) == counts(result.stored)


def test_a_copy_of_what_is_on_the_device_is_not_written_to_disk():
    """Where host memory gets what leaves, a copy that gives way while the device has the block is no loss."""
    prompts = ["x", "y", "x", "z"]  # "y" takes the place of the copy of "x" in host memory, "x" that of "y"
    result = replay(prompts, 1, "device-lru", device_blocks=1, disk_blocks=10, store_when="leaving")
    assert 1 == result.hits.host
    assert 1 == result.stored.disk  # "y" only


def test_the_second_reference_saves_writes():
    """What is referred to once never comes to the disk and is counted; what comes back is written, and found."""
    prompts = ["ab", "lmn", "ab", "uvw", "ab"]
    everything = replay(prompts, 3, disk_blocks=20)
    assert (7, 0) == (everything.stored.disk, everything.saved_writes)  # all but "u", which is in host memory still
    chosen = replay(prompts, 3, disk_blocks=20, disk_admission="second-reference")
    assert (2, 5) == (chosen.stored.disk, chosen.saved_writes)  # "ab" when it falls out for the second time
    assert (4, 2) == (everything.hits.disk, chosen.hits.disk)


def test_what_the_disk_has_dropped_has_to_be_admitted_anew():
    """A block that was on disk, fell off it and was forgotten is one that was never seen."""
    # "x" and "y" are written, "y" takes the place of "x". When that comes back, "w" and "v" are remembered, not "x".
    result = replay("xxyyzwvxq", 1, disk_blocks=1, disk_admission="second-reference")
    assert (0, 7, 2) == counts(result.stored)
    assert 4 == result.saved_writes  # "z", "w", "v" and "x", the second time


def test_progress_adds_up_to_the_references():
    """Whoever draws a bar is told of every block once."""
    trace = trace_of(["abc", "ab", "", "xyzw"])
    seen = []
    TieredReplayer(trace).replay(2, TierPlan(3, 4), on_progress=seen.append)
    assert [3, 2, 0, 4] == seen


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"device_blocks": -1}, "the device holds -1 blocks"),
        ({"disk_blocks": -1}, "the disk holds -1 blocks"),
        ({"store_when": "later"}, "store_when is 'later': choose from computed, leaving"),
        ({"store_when": "leaving"}, "nothing ever leaves"),
        ({"disk_admission": "none"}, "disk_admission is 'none': choose from all, second-reference"),
    ],
)
def test_plans_that_cannot_be_are_refused(plan, message):
    """Each is an error that says what would do."""
    with pytest.raises(SettingsError, match=message):
        TierPlan(**plan)


@pytest.mark.parametrize(("capacity", "policy", "message"), [(-1, "lru", "-1 blocks"), (1, "lfu", "choose from")])
def test_what_cannot_be_replayed_is_refused(capacity, policy, message):
    """The size and the policy of host memory are checked as in a plain replay."""
    with pytest.raises(SettingsError, match=message):
        replay(["a"], capacity, policy)
