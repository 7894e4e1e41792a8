"""The OpenAI server with the plugin: concurrent clients, metrics, and what is left when it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvmoor.host_memory.status_reader import find_status_segments

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

START_TIMEOUT_S = 180.0
ENGINE_ID = "kvmoor-server-test"
TRANSFER_CONFIG = {
    "kv_connector": "KvmoorConnector",
    "kv_connector_module_path": "kvmoor.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "engine_id": ENGINE_ID,
    "kv_connector_extra_config": {"host_memory": "64MiB"},
}


class Server:
    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "model": str(model),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "max-model-len": 512,
            "block-size": 32,
            "num-gpu-blocks-override": 24,
            "kv-cache-memory-bytes": 64 << 20,
            "max-num-seqs": 4,
            "kv-transfer-config": json.dumps(TRANSFER_CONFIG),
        }
        flags = ["skip-tokenizer-init", "return-tokens-as-token-ids", "enable-prompt-tokens-details", "enforce-eager"]
        # Not the `vllm` command: it asks for a distribution of that name, which builds for CPUs do not have.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--{name}={value}" for name, value in options.items()] + [f"--{flag}" for flag in flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, log.read_text()[-4000:]
            try:
                self.call("/health")
            except OSError:
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            else:
                return

    def call(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    def ask(self, seed: int) -> tuple[list[str], int]:
        """Return the answer to a prompt, and how many of its tokens were cached."""
        prompt = [(seed * 7919 + place * place * 31 + place) % 1000 + 10 for place in range(300)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        answer = json.loads(self.call("/v1/completions", body | {"ignore_eos": True, "detokenize": False}))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["logprobs"]["tokens"], details.get("cached_tokens") or 0

    def metric(self, name: str) -> float:
        lines = [line for line in self.call("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def kill(self) -> None:
        """Kill the server and all processes of its session."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait(30)
            self._log.close()


@pytest.fixture
def server(run_script, tmp_path) -> Iterator[Server]:
    folder = Path(run_script("write_models.py"))
    started = Server(folder, tmp_path / "server.log")
    yield started
    started.kill()


def test_clients_get_the_same_answers_from_host_memory(server) -> None:
    """Clients that ask at once, and again, are answered as the first was, and the figures say where from."""
    alone = {seed: server.ask(seed)[0] for seed in range(6)}
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(server.ask, [*range(6)] * 3))

    assert [alone[seed] for seed in range(6)] * 3 == [answer for answer, _ in answers]
    assert any(cached >= 288 for _, cached in answers)
    assert server.metric("vllm:kvmoor_stored_blocks") > 0
    assert server.metric("vllm:kv_offload_load_bytes_total") > 0


def test_nothing_of_ours_is_left(server) -> None:
    """While it serves its rank can be seen on the host; after SIGTERM it is gone in time, and its memory with it."""
    server.ask(1)
    assert 1 == len(find_status_segments(ENGINE_ID))

    server.process.send_signal(signal.SIGTERM)
    server.process.wait(20)

    assert [] == find_status_segments(ENGINE_ID)
    assert [] == [path for path in Path("/dev/shm").iterdir() if "kvmoor" in path.name]


def test_a_killed_server_leaves_nothing(server) -> None:
    """SIGKILL runs no code of ours, and needs none: the memory has no name."""
    server.ask(1)
    server.kill()

    assert [] == find_status_segments(ENGINE_ID)
    assert [] == [path for path in Path("/dev/shm").iterdir() if "kvmoor" in path.name]
