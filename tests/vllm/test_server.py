"""The OpenAI server with the plugin: concurrent clients, metrics, clients that go away, settings that are refused."""

import pytest

from server_processes import wait_until
from server_rig import BLOCK_NBYTES, BLOCK_TOKENS, MAX_TOKENS, Server, prompt
from server_traffic import Traffic

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

SEEDS = range(6)
ANSWER_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 20.0


def test_a_server_from_its_start_to_sigterm(tiny_model, tmp_path) -> None:
    """Clients that ask at once get the answers that one alone got, from host memory too, and SIGTERM leaves nothing."""
    with Server(tiny_model, tmp_path / "server.log").wait_ready() as server:
        known = {tokens: server.ask(tokens).tokens for tokens in (tuple(prompt(seed)) for seed in SEEDS)}
        assert 1 == len([left for left in server.leftovers() if "status segment" in left])

        with Traffic(server.port, known, num_clients=8) as traffic:
            traffic.wait_for("answered", 60, ANSWER_TIMEOUT_S)
            assert [] == traffic.examples
            # All prompts have 9 whole blocks, and the device's cache holds two of them.
            assert server.metric("vllm:kvmoor_stored_blocks") == 9 * len(SEEDS)
            assert server.metric("vllm:kv_offload_load_bytes_total") > 0
            assert traffic.counts["cached tokens"] > 0

            traffic.stop_asking()
            server.terminate()
            server.wait_engine_ended(EXIT_TIMEOUT_S)
            left = server.leftovers()
            traffic.hang_up()  # vLLM waits for clients, also for those that its engine has left unanswered
            server.wait_ended(EXIT_TIMEOUT_S)

        assert [] == left == server.leftovers()
        assert 0 == traffic.counts["wrong"]


@pytest.mark.slow
def test_clients_that_go_away_give_back_all_slots(tiny_model, tmp_path) -> None:
    """Requests dropped before and while they are answered hold no slot: a prompt as large as host memory fits later."""
    with Server(tiny_model, tmp_path / "server.log", host_memory="1536KiB").wait_ready() as server:
        known = {tokens: server.ask(tokens).tokens for tokens in (tuple(prompt(seed)) for seed in SEEDS)}
        with Traffic(server.port, known, num_clients=8, abort_every=2) as traffic:
            traffic.wait_for("dropped", 100, ANSWER_TIMEOUT_S)
            traffic.wait_for("answered", 100, ANSWER_TIMEOUT_S)
        assert [] == traffic.examples
        assert wait_until(lambda: _num_requests(server) == 0, ANSWER_TIMEOUT_S)

        # A store takes all the slots it needs or none: one that is leased or being written would have it declined.
        num_slots = int(server.metric("vllm:kvmoor_ready_slots"))
        before = server.metric("vllm:kv_offload_store_bytes_total"), server.metric("vllm:kvmoor_declined_stores_total")
        server.ask(prompt(99, num_slots * BLOCK_TOKENS))
        _step(server)
        after = server.metric("vllm:kv_offload_store_bytes_total"), server.metric("vllm:kvmoor_declined_stores_total")

        assert (before[0] + num_slots * BLOCK_NBYTES, before[1]) == after
        assert known == {tokens: server.ask(tokens).tokens for tokens in known}


def _num_requests(server: Server) -> float:
    """Return how many requests vLLM has; it tells only while it works."""
    _step(server)
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")


def _step(server: Server) -> None:
    """Let the engine do some steps, at which it hears of its workers, for a prompt without a whole block."""
    server.ask(prompt(0, BLOCK_TOKENS - MAX_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {"host_memry": "1GiB"}}, "has a key 'host_memry' that nobody reads: did you mean 'host_memory'?"),
        ({"transfer": {"kv_load_failure_policy": "fail"}}, 'set it to "recompute" in kv_transfer_config'),
        ({"host_memory": "20TiB"}, 'pass memory_check="warn" to try all the same'),
    ],
)
def test_a_server_that_cannot_serve_ends_and_says_why(tiny_model, tmp_path, options, message) -> None:
    """Settings that cannot be end the server by itself, in bounded time, not with 0, and its log says what to do."""
    with Server(tiny_model, tmp_path / "server.log", **options) as server:
        server.wait_ended(120.0)

        assert server.process.returncode not in {0, None}
        assert message in server.log.read_text()
        assert [] == server.leftovers()
