"""Real engines whose ranks are processes of their own."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvmoor.host_memory.status_reader import find_status_segments

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

CACHED = [0, 0, 0, 288, 288, 288]


def check_answers(one_process, found) -> None:
    """Check that answers are those of one rank without offloading, and that prompts came back."""
    assert one_process["off"]["answers"][: len(CACHED)] == found["answers"]
    assert CACHED == found["cached"]


def test_two_ranks_answer_as_one_does(run_script, one_process) -> None:
    """Each rank keeps its part of every block, and prompts come back."""
    check_answers(one_process, run_script("several_processes.py", "connector", "2", "1"))


@pytest.mark.slow
def test_two_ranks_of_the_pure_spec_answer_as_one_does(run_script, one_process) -> None:
    """The same through vLLM's own connector, which learns of ready slots from the ranks' status segments."""
    check_answers(one_process, run_script("several_processes.py", "spec", "2", "1"))


@pytest.mark.slow
def test_two_stages_answer_as_one_does(run_script, one_process) -> None:
    """With pipeline parallelism each stage keeps the layers it has."""
    check_answers(one_process, run_script("several_processes.py", "connector", "1", "2"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_copy_fails_on_one_rank_of_two(run_script, one_process, kind) -> None:
    """What failed on one rank has failed: the request is computed on both, and answered alike."""
    fault = {"KVMOOR_TEST_FAULT": f"1:{kind}:2"}
    found = run_script("several_processes.py", "faulty", "2", "1", environment=fault)

    assert one_process["off"]["answers"][: len(CACHED)] == found["answers"]
    assert 1 == found["metrics"][f"vllm:kvmoor_failed_{kind}s"]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rank-0", "rank-1", "engine-core"])
def test_a_killed_process_leaves_nothing(tiny_model, script_environment, who) -> None:
    """After SIGKILL in the middle of an answer all ranks end, vLLM raises its own error, and nothing is left."""
    import psutil

    engine_id = f"kvmoor-killed-{who}"
    script = Path(__file__).parent / "scripts" / "killed_process.py"
    command = [sys.executable, str(script), str(tiny_model.parent), who, engine_id]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=script_environment, start_new_session=True, **pipes) as started:
        try:
            stdout, stderr = started.communicate(timeout=600)
            assert 0 == started.returncode, stderr[-4000:]
            told = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
            family = [psutil.Process(pid) for pid in told[0]["family"] if psutil.pid_exists(pid)]
            _, alive = psutil.wait_procs(family, timeout=30)
        finally:
            with suppress(ProcessLookupError):  # what should not be there any more
                os.killpg(started.pid, signal.SIGKILL)

    assert ["rank-0", "rank-1"] == told[0]["ranks"]
    assert ("none" if who == "engine-core" else "EngineDeadError") == told[1]["error"]
    assert [] == alive
    assert [] == find_status_segments(engine_id)
    assert [] == [path for path in Path("/dev/shm").iterdir() if "kvmoor" in path.name]
