"""Both model runners of vLLM, call for call, on a GPU that runs late: every copy brings the bytes that it should.

vLLM's scheduler, batch queue and connectors are real; the model is one whose bytes are known, and is asked at random.
More walks: ``KVMOOR_CALL_ORDERS_SEEDS=50``; see ``scripts/call_orders.py`` for one case, or one seed, alone.
"""

import os

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

CASES = (
    *("v1", "v1_async", "v2", "v2_async"),
    *("v1_async_drafter", "v2_drafter", "v2_async_drafter"),
    *("v1_windows", "v2_async_windows", "v1_async_chunks", "v2_async_chunks"),
    *("v1_zeroing", "v2_zeroing", "v2_packed", "v2_staged", "v2_ranks"),
)
WITH_FAULTS = ("v1_faults", "v2_faults", "v1_windows_faults")
SINCE_033 = ("v1_sync_loads", "v2_sync_loads", "v1_sync_load_faults", "v2_sync_load_faults", "v2_windows_chunks")
CONTROLS_SINCE_033 = ("v2_sync_load_faults+aborts_within_a_step_are_not_seen",)
CONTROLS = (
    "v2_async_drafter+loads_wait_for_nothing",
    "v1_async_drafter+stores_wait_for_nothing",
    "v2_ranks+nobody_waits",
    "v1_faults+failures_are_not_noted",
    *CONTROLS_SINCE_033,
)


@pytest.fixture(scope="module")
def found(run_script):
    """Do the walks of all cases in one process, and those of the controls until one finds fault; return what they saw.

    Those that this vLLM does not have are left out.
    """
    num_seeds = os.environ.get("KVMOOR_CALL_ORDERS_SEEDS", "1")
    cases = [*CASES, *WITH_FAULTS, *SINCE_033, *CONTROLS]
    return run_script("call_orders.py", num_seeds, *cases, timeout_s=600.0 + 120.0 * int(num_seeds))


def skip_what_is_missing(found, case, since_033):
    """Skip what the version of vLLM does not have; what it has must have been found."""
    if case in since_033 and found["version"] < "0.33":
        pytest.skip(f"vLLM {found['version']} has no such case")


@pytest.mark.parametrize("case", [*CASES, *WITH_FAULTS, *SINCE_033])
def test_late_copies_bring_the_right_bytes(found, case) -> None:
    """Tokens are computed from the right bytes, answers are right, and no order, lease or slot is left over."""
    skip_what_is_missing(found, case, SINCE_033)
    assert {} == found[case]["failures"]
    assert found[case]["seen"]["answers"] > 0
    assert found[case]["seen"]["loads of the walk"] > 0


def test_walks_come_across_what_they_are_for(found) -> None:
    """Together they see what is hard: blocks reused under a store, preemptions, loads of aborted requests, resets."""
    together: dict[str, int] = {}
    for case in CASES:
        for name, count in found[case]["seen"].items():
            together[name] = together.get(name, 0) + count

    hard = ("flushed", "preempted", "aborted loads", "aborts within a step", "resets with jobs", "new weights")
    for name in (*hard, "evicted"):
        assert together.get(name, 0) > 0, name


@pytest.mark.parametrize("case", WITH_FAULTS)
def test_copies_fail_in_walks_with_faults(found, case) -> None:
    """Loads and stores that fail leave other bytes behind, and nobody reads them."""
    assert found[case]["seen"]["failed"] > 0


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_plugin_is_found_out(found, control) -> None:
    """Copies that wait for nothing, waits that end at once, failures and aborts that nobody notes give wrong bytes."""
    skip_what_is_missing(found, control, CONTROLS_SINCE_033)
    (failure,) = found[control]["failures"].values()
    assert "Wrong(" in failure
