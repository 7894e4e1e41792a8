"""A real engine in one process: what it answers with offloading is what it answers without."""

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def found(run_script):
    """Run every case, on one engine after the other in one process, and return what each found."""
    return run_script("one_process.py")


@pytest.mark.parametrize(
    "case", ["connector", "spec", "chunks", "small_host", "tiny_host", "failed_load", "failed_store"]
)
def test_answers_are_those_without_offloading(found, case) -> None:
    """Prompts that return are answered alike: from blocks, from chunks of four, from a host too small, after faults."""
    assert found["off"]["answers"] == found[case]["answers"]


def test_changed_bytes_change_answers(found) -> None:
    """The comparison can fail: with other bytes in host memory the answers are others, so they rest on these bytes."""
    assert found["off"]["answers"] != found["control"]["answers"]


def test_prompts_come_back_from_host_memory(found) -> None:
    """What the device dropped is not computed again, up to the last block of a prompt of exactly ten blocks."""
    assert [0, 0, 0, 288, 288, 288, 0, 0, 0, 320] == found["connector"]["cached"]
    assert found["connector"]["cached"] == found["spec"]["cached"]
    assert found["off"]["cached"][3] < 288
    assert found["connector"]["metrics"]["vllm:kv_offload_load_bytes"] > 0


def test_chunks_may_be_loaded_from_their_middle(found) -> None:
    """With four blocks a chunk, what the device still has of a chunk is left out, and whole chunks come back."""
    assert 256 == found["chunks"]["cached"][3]


def test_a_host_smaller_than_what_is_asked_evicts(found) -> None:
    """Blocks give way, and some prompts still come back further than the device alone would have it."""
    assert found["small_host"]["metrics"]["vllm:kvmoor_evicted_blocks"] > 0
    assert sum(found["off"]["cached"]) < sum(found["small_host"]["cached"])


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_failed_copy_is_counted_and_nothing_else(found, kind) -> None:
    """One scripted failure is one in the metrics; the request is computed, or its blocks are not found."""
    case = found[f"failed_{kind}"]

    assert 1 == case["num_failed"]
    assert 1 == case["metrics"][f"vllm:kvmoor_failed_{kind}s"]


@pytest.mark.parametrize("case", ["windows", "windows_failed_load"])
def test_sliding_windows(found, case) -> None:
    """A model with two groups of KV caches is answered alike, also when a load fails, and its prompts come back."""
    assert found["windows_off"]["answers"] == found[case]["answers"]
    assert 288 in found[case]["cached"]


@pytest.mark.parametrize("case", ["crowd", "crowd_chunks", "crowd_zeroing"])
def test_requests_that_preempt_each_other(found, case) -> None:
    """Eight requests on a device for two, which share a prefix, are answered alike and leave no order open."""
    assert found["crowd_off"]["answers"] == found[case]["answers"]
    assert found[case]["metrics"]["vllm:num_preemptions"] > 0
    assert 0 == found[case]["open"]


def test_stores_of_blocks_that_were_zeroed_are_not_found(found) -> None:
    """Where a model runner overwrites blocks before it flushes their stores, those stores count as failed."""
    assert found["crowd_zeroing"]["metrics"]["vllm:kvmoor_failed_stores"] > 0
    assert 0 == found["crowd"]["metrics"].get("vllm:kvmoor_failed_stores", 0)


def test_a_reset_with_stores_in_flight(found) -> None:
    """Nothing is found afterwards, a second reset before the next step is none too many, and all slots come back."""
    case = found["reset_twice"]

    assert case["jobs"] > 0
    assert [True, True] == case["resets"]
    assert (0, 0) == (case["ready_after_reset"], case["held_back"])
    assert ["b"] == case["answered"]
    assert case["same"]


def test_a_reset_of_the_device_alone(found) -> None:
    """A running request loads its prefix again and goes on as if nothing had happened."""
    assert {"reset": True, "same": True} == found["reset_device_only"]


def test_a_load_that_a_reset_overtakes(found) -> None:
    """What it brings is from before the reset, so its request is computed: nothing of it counts as loaded."""
    assert found["outdated_load"]["same"]
    assert 0 == found["outdated_load"]["metrics"].get("vllm:kv_offload_load_bytes", 0)


def test_aborts_leave_nothing_behind(found) -> None:
    """Requests aborted after any number of steps leave no lease and no store, and later answers are right."""
    assert {"same": True, "leased": 0, "writing": 0} == found["abort"]


def test_events_tell_what_is_there(found) -> None:
    """Who follows vLLM's KV cache events knows which chunks are in host memory, also after some gave way."""
    case = found["events"]

    assert ["BlockRemoved", "BlockStored"] == case["kinds"]
    assert case["there"] == case["told"] > 0


@pytest.mark.parametrize("case", ["sync_loads", "failed_sync_load"])
def test_loads_within_a_step(found, case) -> None:
    """From vLLM 0.33 on a load may be waited for within its step; one that fails is computed in that very step."""
    if case not in found:
        pytest.skip(f"vLLM {found['version']} has no loads within a step")
    assert found["off"]["answers"] == found[case]["answers"]
    assert (case == "failed_sync_load") == (found[case]["metrics"].get("vllm:kvmoor_failed_loads", 0) == 1)
