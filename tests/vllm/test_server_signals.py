"""A server that is stopped or killed in the middle of traffic: how it ends, and that nothing of ours is left.

What vLLM itself does (0.32): after SIGTERM its API server waits for the requests it has, also for those that its engine
has left unanswered, until their clients give up. After SIGKILL of its engine core or of a worker all the others end by
themselves. After SIGKILL of its API server the engine core and the workers live on, with and without the plugin: nobody
watches the parent. The memory of the plugin is theirs, so it goes when they are ended.
"""

import os
import signal

import pytest

from server_rig import Server, prompt
from server_traffic import Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

SEEDS = range(6)
ANSWER_TIMEOUT_S = 60.0
OWN_SHUTDOWN_S = 20.0
"""What vLLM gives its processes when their work is done (5 s, SIGTERM, 4 s, SIGKILL), and some for slow machines."""


@pytest.fixture(scope="module")
def known(tiny_model, tmp_path_factory) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the answers of a server without the plugin."""
    log = tmp_path_factory.mktemp("reference") / "server.log"
    with Server(tiny_model, log, host_memory=None).wait_ready() as server:
        return {tokens: server.ask(tokens).tokens for tokens in (tuple(prompt(seed)) for seed in SEEDS)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shutdown_timeout_s", [0, 20])
def test_sigterm_in_the_middle_of_traffic(tiny_model, tmp_path, known, ranks, shutdown_timeout_s) -> None:
    """It ends in the time that vLLM has for it, no answer is wrong, and nothing of ours is left."""
    options = {"ranks": ranks, "shutdown_timeout_s": shutdown_timeout_s}
    with Server(tiny_model, tmp_path / "server.log", **options).wait_ready() as server:
        with Traffic(server.port, known, num_clients=12) as traffic:
            traffic.wait_for("answered", 40, ANSWER_TIMEOUT_S)
            assert [] == traffic.examples
            assert ranks == len([left for left in server.leftovers() if "status segment" in left])

            traffic.stop_asking()
            server.terminate()
            server.wait_engine_ended(shutdown_timeout_s + OWN_SHUTDOWN_S)
            left = server.leftovers()
            traffic.hang_up()
            server.wait_ended(OWN_SHUTDOWN_S)

        assert [] == left == server.leftovers()
        assert 0 == traffic.counts["wrong"]


@pytest.mark.parametrize(
    ("ranks", "role"),
    [
        (1, "API server"),
        (1, "engine core"),
        (1, "worker 0"),
        (2, "API server"),
        (2, "engine core"),
        (2, "worker 0"),
        (2, "worker 1"),
    ],
)
def test_sigkill_in_the_middle_of_traffic(tiny_model, tmp_path, known, ranks, role) -> None:
    """Whichever process is killed, the others end, no answer is wrong, and nothing of ours is left."""
    with Server(tiny_model, tmp_path / "server.log", ranks=ranks).wait_ready() as server:
        with Traffic(server.port, known, num_clients=12) as traffic:
            traffic.wait_for("answered", 40, ANSWER_TIMEOUT_S)
            assert [] == traffic.examples
            assert ranks == len([left for left in server.leftovers() if "status segment" in left])

            os.kill(server.pid_of(role), signal.SIGKILL)
            if role == "API server":
                server.process.wait(OWN_SHUTDOWN_S)
                server.kill()  # what vLLM leaves
            else:
                server.wait_engine_ended(OWN_SHUTDOWN_S)
                traffic.hang_up()
                server.wait_ended(OWN_SHUTDOWN_S)
            left = server.leftovers()

        assert [] == left
        assert 0 == traffic.counts["wrong"]
