"""On real engines, the index knows of the device's own cache what its block pool does, and answers stay the same."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

PLAIN = ["off", "walk", "order", "reset", "refused", "faults"]
HARDER = ["off", "small_host", "chunks", "windows_off", "windows", "crowd_off", "crowd", "failed_load", "residency"]


@pytest.fixture(scope="module")
def found(run_script):
    """Run the plain cases, on one engine after the other in one process."""
    return run_script("device_cache.py", *PLAIN)


@pytest.fixture(scope="module")
def found_harder(run_script):
    """Run the others."""
    return run_script("device_cache.py", *HARDER)


@pytest.mark.parametrize("case", ["walk", "order", "reset"])
def test_what_is_told_is_what_the_pool_dropped(found, case) -> None:
    """After every step, each block that is in the device's cache no more was told, once, and no other."""
    assert found[case]["told"] > 0
    assert (0, 0) == (found[case]["missed"], found[case]["wrong"])


@pytest.mark.parametrize("case", ["small_host", "chunks", "windows", "crowd", "failed_load", "residency"])
def test_it_is_told_whatever_happens(found_harder, case) -> None:
    """The same with evictions, chunks of four, two groups, preemptions, a failed load, another observer of the pool."""
    assert found_harder[case]["told"] > 0
    assert (0, 0) == (found_harder[case]["missed"], found_harder[case]["wrong"])


def test_answers_are_those_without_offloading(found) -> None:
    """Prompts that return are answered alike, from host memory too."""
    assert found["off"] == found["walk"]["answers"]
    assert found["walk"]["metrics"]["vllm:kv_offload_load_bytes"] > 0


@pytest.mark.parametrize(
    ("reference", "case"),
    [
        ("off", "small_host"),
        ("off", "chunks"),
        ("off", "failed_load"),
        ("windows_off", "windows"),
        ("crowd_off", "crowd"),
    ],
)
def test_answers_stay_the_same_whatever_happens(found_harder, reference, case) -> None:
    """Prompts are answered alike: host memory too small, chunks of four, a failed load, two groups, preemptions."""
    assert found_harder[reference] == found_harder[case]["answers"]


def test_the_cases_are_what_they_say(found_harder) -> None:
    """Blocks gave way in host memory and others were loaded, the load failed, requests preempted each other."""
    assert found_harder["small_host"]["metrics"]["vllm:kvmoor_evicted_blocks"] > 0
    assert found_harder["small_host"]["metrics"]["vllm:kv_offload_load_bytes"] > 0
    assert 1 == found_harder["failed_load"]["num_failed"]
    assert found_harder["crowd"]["metrics"]["vllm:num_preemptions"] > 0


def test_leaving_the_device_counts_as_a_use(found) -> None:
    """The end of the first prompt, which the third one drove out, stays longer in host memory than the second."""
    assert [[1], [1, 2], [1, 2, 1, 3]] == found["order"]["orders"]


def test_a_reset_of_the_device_alone_drops_everything(found) -> None:
    """All that was cached is told with the next step, and comes back from host memory."""
    case = found["reset"]

    assert case["held"] == case["told_at_reset"] > 0
    assert case["same"]
    assert case["loaded"]


def test_who_watched_the_pool_before_still_does(found_harder) -> None:
    """The residency figures that vLLM may keep of its blocks go on."""
    assert found_harder["residency"]["residencies"] > 0


def test_the_pure_spec_refuses_what_it_cannot_do(found) -> None:
    """It is not bound to the pool, and says so instead of being plain `lru`."""
    assert "KvmoorSpec is not told what the device's own cache holds: use KvmoorConnector" in found["refused"]


def test_a_pool_that_tells_nothing_is_refused_at_start(found) -> None:
    """What the watch hangs on is among the names that are checked."""
    assert ["BlockHashToBlockMap.get_one_block", "KVCacheMetricsCollector.on_block_evicted"] == found["faults"]
