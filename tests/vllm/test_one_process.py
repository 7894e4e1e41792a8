"""A real engine in one process: what it answers with offloading is what it answers without."""

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.mark.parametrize(
    "case", ["connector", "spec", "chunks", "small_host", "failed_load", "failed_store", "windows", "chunked", "shared"]
)
def test_answers_are_those_without_offloading(one_process, case) -> None:
    """Prompts that return are answered alike, whatever becomes of their blocks meanwhile."""
    assert one_process[one_process["references"][case]]["answers"] == one_process[case]["answers"]


def test_changed_bytes_change_answers(one_process) -> None:
    """The comparison can fail: with other bytes in host memory the answers are others, so they rest on these bytes."""
    assert ["changed_bytes"] == one_process["controls"]
    assert one_process["off"]["answers"] != one_process["changed_bytes"]["answers"]


def test_prompts_come_back_from_host_memory(one_process) -> None:
    """What the device dropped is not computed again, up to the last block of a prompt of exactly ten blocks."""
    assert [0, 0, 0, 288, 288, 288, 0, 0, 0, 320] == one_process["connector"]["cached"]
    assert one_process["connector"]["cached"] == one_process["spec"]["cached"]
    assert one_process["off"]["cached"][3] < 288
    assert one_process["connector"]["metrics"]["vllm:kv_offload_load_bytes"] > 0


def test_chunks_may_be_loaded_from_their_middle(one_process) -> None:
    """With four blocks a chunk, what the device still has of a chunk is left out, and whole chunks come back."""
    assert 256 == one_process["chunks"]["cached"][3]


def test_a_host_smaller_than_what_is_asked_evicts(one_process) -> None:
    """Blocks give way, and some prompts still come back further than the device alone would have it."""
    assert one_process["small_host"]["metrics"]["vllm:kvmoor_evicted_blocks"] > 0
    assert sum(one_process["off"]["cached"]) < sum(one_process["small_host"]["cached"])


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_failed_copy_is_counted_and_nothing_else(one_process, kind) -> None:
    """One scripted failure is one in the metrics; the request is computed, or its blocks are not found."""
    case = one_process[f"failed_{kind}"]

    assert 1 == case["num_failed"]
    assert 1 == case["metrics"][f"vllm:kvmoor_failed_{kind}s"]


def test_prompts_of_sliding_windows_come_back(one_process) -> None:
    """A model with two groups of KV caches has whole prompts brought back too."""
    assert 288 in one_process["windows"]["cached"]


def test_prompts_that_take_several_steps(one_process) -> None:
    """Of a prompt that eight steps compute, blocks are stored before it is computed whole, and all come back."""
    case = one_process["chunked"]

    assert (
        22 == case["steps"][0] == one_process["chunked_off"]["steps"][0]
    )  # 8 - 1, and one for each token but the last
    assert 0 < case["stored_early"] < 14
    assert [14 * 32] == case["cached"]
    assert one_process["chunked_off"]["cached"] < case["cached"]


def test_requests_that_share_a_prefix(one_process) -> None:
    """One prompt's blocks serve all that begin alike, one after the other and at once."""
    assert (0, 192) == (one_process["shared_off"]["cached"], one_process["shared"]["cached"])
    assert {0} == set(one_process["shared"]["left"].values())


def test_requests_that_preempt_each_other(one_process) -> None:
    """Eight requests on a device for two are answered alike, their stores are waited for, and nothing stays open."""
    assert one_process["crowd_off"]["answers"] == one_process["crowd"]["answers"]
    assert one_process["crowd"]["metrics"]["vllm:num_preemptions"] > 0
    assert 0 == one_process["crowd"]["metrics"].get("vllm:kvmoor_failed_stores", 0)
    assert {0} == set(one_process["crowd"]["left"].values())


def test_a_reset_with_stores_to_come(one_process) -> None:
    """Nothing is found afterwards, a second reset before the next step is none too many, and all slots come back."""
    case = one_process["reset_twice"]

    assert case["jobs"] > 0
    assert [True, True] == case["resets"]
    assert 0 == case["ready_after_reset"]
    assert ["b"] == case["answered"]
    assert case["same"]
    assert {0} == set(case["left"].values())


def test_a_reset_with_a_store_in_flight(one_process) -> None:
    """A copy that runs is waited for, what it stored is never found, and what is stored afterwards is."""
    case = one_process["reset_running_store"]

    assert ["store"] == case["copies"]
    assert "store" in case["waited_for"]
    assert 0 == case["ready_after_reset"]
    assert case["same"]
    assert 288 == case["cached"]
    assert {0} == set(case["left"].values())


def test_a_load_that_a_reset_overtakes(one_process) -> None:
    """What it brings is from before the reset, so its request is computed: nothing of it counts as loaded."""
    assert one_process["outdated_load"]["same"]
    assert 0 == one_process["outdated_load"]["metrics"].get("vllm:kv_offload_load_bytes", 0)


POINTS = {
    "unseen": ("WAITING", set()),
    "queued": ("WAITING", set()),
    "prefill": ("RUNNING", set()),
    "store in flight": ("RUNNING", {"store"}),
    "load in flight": ("WAITING_FOR_REMOTE_KVS", {"load"}),
    "just finished": ("FINISHED", {"store"}),
    "twice": ("WAITING_FOR_REMOTE_KVS", {"load"}),
}


def check_aborts(case) -> None:
    """Check that each point was what its name says, that nothing is left, and that later answers are right."""
    points = case["points"]
    assert {name: (at["status"], set(at["copies"])) for name, at in points.items()} == POINTS
    assert 0 == points["queued"]["computed"] < points["prefill"]["computed"] < 300
    assert [] == [what for what, count in case["left"].items() if count]
    assert case["same"]


def test_aborts_leave_nothing_behind(one_process) -> None:
    """Aborted unseen, queued, half computed, with a copy either way in flight, just finished or twice: all is over."""
    check_aborts(one_process["abort"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("tiny_host", "windows_failed_load", "windows_chunks", "chunked_chunks", "crowd_chunks", "crowd_zeroing"),
        *("crowd_slow_stores", "shared_chunks", "sync_loads", "failed_sync_load"),
    ],
)
def test_answers_of_slow_cases_are_those_without_offloading(one_process_slow, case) -> None:
    """The same in further combinations; what a version of vLLM does not have is left out."""
    skip_what_is_missing(one_process_slow, case)
    assert one_process_slow[one_process_slow["references"][case]]["answers"] == one_process_slow[case]["answers"]
    assert {0} >= set(one_process_slow[case].get("left", {}).values())


def skip_what_is_missing(found, case) -> None:
    if case not in found:
        pytest.skip(f"vLLM {found['version']} does not have what {case} tries")


@pytest.mark.slow
def test_loads_with_sliding_windows_may_fail(one_process_slow) -> None:
    """A load of two groups that fails is counted once, and its prompts come back later."""
    assert 1 == one_process_slow["windows_failed_load"]["metrics"]["vllm:kvmoor_failed_loads"]
    assert 288 in one_process_slow["windows_failed_load"]["cached"]


@pytest.mark.slow
def test_stores_of_preempted_requests_are_waited_for(one_process_slow) -> None:
    """Blocks that are taken from a request while they are being stored are not reused before that is over."""
    case = one_process_slow["crowd_slow_stores"]

    assert case["metrics"]["vllm:num_preemptions"] > 0
    assert "store" in case["waited_for"]


@pytest.mark.slow
def test_stores_of_blocks_that_were_zeroed_are_not_found(one_process_slow) -> None:
    """Where a model runner overwrites blocks before it flushes their stores, those stores count as failed."""
    assert one_process_slow["crowd_zeroing"]["metrics"]["vllm:kvmoor_failed_stores"] > 0


@pytest.mark.slow
def test_a_reset_of_the_device_alone(one_process_slow) -> None:
    """A running request loads its prefix again and goes on as if nothing had happened."""
    assert {"reset": True, "same": True} == one_process_slow["reset_device_only"]


@pytest.mark.slow
def test_events_tell_what_is_there(one_process_slow) -> None:
    """Who follows vLLM's KV cache events knows which chunks are in host memory, also after some gave way."""
    case = one_process_slow["events"]

    assert ["BlockRemoved", "BlockStored"] == case["kinds"]
    assert case["there"] == case["told"] > 0


@pytest.mark.slow
def test_a_failed_load_within_a_step_is_counted(one_process_slow) -> None:
    """From vLLM 0.33 on a load may be waited for within its step; one that fails is computed in that very step."""
    skip_what_is_missing(one_process_slow, "failed_sync_load")
    assert 0 == one_process_slow["sync_loads"]["metrics"].get("vllm:kvmoor_failed_loads", 0)
    assert 1 == one_process_slow["failed_sync_load"]["metrics"]["vllm:kvmoor_failed_loads"]


@pytest.mark.slow
def test_a_sleep_waits_for_copies(one_process_slow) -> None:
    """Before the device's memory goes, running copies are over; afterwards nothing of before is answered with."""
    skip_what_is_missing(one_process_slow, "sleep")
    case = one_process_slow["sleep"]

    assert "store" in case["waited_for"]
    assert [] == case["copies_asleep"]
    assert case["same"]
    assert 288 == case["cached"]
    assert {0} == set(case["left"].values())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["abort_beside", "abort_guessing"])
def test_aborts_beside_another_connector_and_with_guessed_tokens(one_process_slow, case) -> None:
    """The same seven points, with a second connector behind ours, and with speculative tokens."""
    skip_what_is_missing(one_process_slow, case)
    check_aborts(one_process_slow[case])
    if case == "abort_guessing":
        assert one_process_slow[case]["metrics"]["vllm:spec_decode_num_drafts"] > 0
