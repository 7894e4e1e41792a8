"""One copy of KV caches that all ranks hold alike: kept by the first, read by the others."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

BLOCK_NBYTES = 2 * 16 * 128
PROMPT_BLOCKS = 7
NUM_PROMPTS = 3
HOST_NBYTES = 4 << 20


def check_answers(found):
    """Check what holds whatever fails: right answers, no wrong bytes on any rank, and an orderly end."""
    assert [True] * 6 == found["right"]
    assert [0, 0] == [rank["num_wrong"] for rank in found["ranks"]]
    assert [True, True] == found["graceful"]
    assert [0, 0] == found["exit_codes"]


@pytest.mark.parametrize("mode", ["shared", "late"])
def test_one_copy_serves_all_ranks(run_script, mode) -> None:
    """The first rank has all of host_memory and stores each block; every rank loads from it, whoever tells of it."""
    found = run_script("replicated.py", mode)

    check_answers(found)
    first, second = found["ranks"]
    assert ["TransferWorker", "ReadingWorker"] == [first["worker"], second["worker"]]
    assert [HOST_NBYTES, 0] == [first["own_nbytes"], second["own_nbytes"]]
    assert [NUM_PROMPTS * PROMPT_BLOCKS * BLOCK_NBYTES, 0] == [first["stored_nbytes"], second["stored_nbytes"]]
    assert first["loaded_nbytes"] == second["loaded_nbytes"] > 2 * PROMPT_BLOCKS * BLOCK_NBYTES
    assert HOST_NBYTES // BLOCK_NBYTES == found["published"]
    assert NUM_PROMPTS * PROMPT_BLOCKS == found["stored"]


@pytest.mark.parametrize("mode", ["off", "spec"])
def test_each_rank_can_keep_a_copy(run_script, mode) -> None:
    """With one_copy off, and with vLLM's own connector, both ranks store, and each has its part of host_memory."""
    found = run_script("replicated.py", mode)

    check_answers(found)
    assert [HOST_NBYTES // 2] * 2 == [rank["own_nbytes"] for rank in found["ranks"]]
    assert [NUM_PROMPTS * PROMPT_BLOCKS * BLOCK_NBYTES] * 2 == [rank["stored_nbytes"] for rank in found["ranks"]]


def test_nothing_is_stored_that_a_rank_could_not_read(run_script) -> None:
    """A rank that cannot attach says so, and the engine serves as if there were no host memory."""
    found = run_script("replicated.py", "refused")

    check_answers(found)
    assert [0, 0] == [found["published"], found["stored"]]
    assert [0, 0] == [rank["stored_nbytes"] + rank["loaded_nbytes"] for rank in found["ranks"]]


@pytest.mark.parametrize(("mode", "rank"), [("load", 1), ("store", 0)])
def test_a_copy_fails_on_the_rank_that_makes_it(run_script, mode, rank) -> None:
    """What a reader failed to load is computed on all ranks; what the first rank failed to store is not found."""
    found = run_script("replicated.py", mode)

    check_answers(found)
    assert 1 == found["ranks"][rank]["num_failed"]
    assert 0 == found["ranks"][1 - rank]["num_failed"]
    assert found["ranks"][1]["loaded_nbytes"] > 0
