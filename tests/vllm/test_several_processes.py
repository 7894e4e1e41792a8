"""Real engines whose ranks are processes of their own."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

CACHED = [0, 0, 0, 288, 288, 288]


@pytest.fixture(scope="module")
def reference(run_script):
    return run_script("several_processes.py", "off", "1")


@pytest.mark.parametrize("mode", ["connector", "spec"])
def test_two_ranks_answer_as_one_does(run_script, reference, mode) -> None:
    """Each rank keeps its part of every block, and prompts come back."""
    found = run_script("several_processes.py", mode, "2")

    assert reference["answers"] == found["answers"]
    assert CACHED == found["cached"]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_copy_fails_on_one_rank_of_two(run_script, reference, kind) -> None:
    """What failed on one rank has failed: the request is computed on both, and answered alike."""
    fault = {"KVMOOR_TEST_FAULT": f"1:{kind}:2"}
    found = run_script("several_processes.py", "faulty", "2", environment=fault)

    assert reference["answers"] == found["answers"]
    assert 1 == found["metrics"][f"vllm:kvmoor_failed_{kind}s"]
