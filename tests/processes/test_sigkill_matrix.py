"""SIGKILL of any of a coordinator and three ranks, at eight points of their life: nothing of kvmoor is left."""

import json
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest

from child_processes import child_environment, names_in_shared_memory, processes_with_memfd

SCRIPT = Path(__file__).parent / "scripts" / "rank_group.py"
NUM_PROCESSES = 4
ANSWER_S = 100.0
"""What a whole run may take: it has waits of 20 s of its own, and takes 0.2 s."""
POINTS = (
    "before open",
    "after reserve",
    "while mapping",
    "first slot published",
    "store in flight",
    "load in flight",
    "closing",
    "after close",
)


class Groups:
    """The process that is forked for each run, and the folder that its runs use for temporary files."""

    def __init__(self, process, folder):
        self._process = process
        self.folder = folder

    def run(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], ANSWER_S)[0], "no answer: a process hangs"
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**child_environment(), "TMPDIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        try:
            yield Groups(process, folder)
        finally:
            process.kill()


def check_one_run(groups, point, seed):
    chance = random.Random(f"{point}, {seed}")
    victims = sorted(chance.sample(range(NUM_PROCESSES), chance.randint(1, NUM_PROCESSES)))
    run = f"kill-{POINTS.index(point)}-{seed}"
    names = names_in_shared_memory()

    answer = groups.run(run=run, point=point, victims=victims)

    what = f"{point}, seed {seed}, SIGKILL of {victims}: {answer}"
    assert [] == answer["lost"], what
    assert [-9 if number in victims else 0 for number in range(NUM_PROCESSES)] == answer["codes"], what
    assert 0 == answer["fresh_start"], what
    assert [] == [pid for pid in answer["pids"] if Path(f"/proc/{pid}").exists()], what
    assert set() == processes_with_memfd(run), what
    assert names == names_in_shared_memory(), what
    assert [] == list(groups.folder.iterdir()), what


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_of_killed_processes(groups, point):
    """Survivors close and end by themselves, no process, file or memory is left, and a fresh start succeeds (B18)."""
    for seed in range(2):
        check_one_run(groups, point, seed)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_of_killed_processes_with_many_seeds(groups, point):
    """The same for fifty random choices of who is killed (B18, B19, B21)."""
    for seed in range(50):
        check_one_run(groups, point, seed)


def test_the_search_for_leftovers_finds_what_is_left(groups):
    """What the checks above look at shows a memfd of ours while its process lives."""
    code = "import os, sys; os.memfd_create('kvmoor:kill-leftover:0'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert {process.pid} == processes_with_memfd("kill-leftover")
        process.stdin.close()
    assert set() == processes_with_memfd("kill-leftover")
