"""vLLM's OpenAI server on a tiny model, as a process that tests and benchmarks start, ask, signal and look into."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from server_processes import find_leftovers, kill_session, session_processes, wait_no_processes, wait_until

START_TIMEOUT_S: Final = 600.0
"""It takes 25 s on two cores that nobody else uses."""
ANSWER_TIMEOUT_S: Final = 60.0
MAX_TOKENS: Final = 8
BLOCK_TOKENS: Final = 32
BLOCK_NBYTES: Final = 128 * 1024
"""Four layers of keys and values, two heads of 64 numbers of four bytes, for 32 tokens."""


class ServerError(Exception):
    """The server did not do what was asked of it; the message ends with the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What a server answered: the tokens, why it ended, and how many tokens of the prompt were cached."""

    tokens: tuple[str, ...]
    finish_reason: str
    num_cached: int


def prompt(seed: int, num_tokens: int = 300) -> list[int]:
    """Return a prompt that shares no block with that of another seed."""
    return [(seed * 7919 + place * place * 31 + place) % 1000 + 10 for place in range(num_tokens)]


def completion_body(tokens: Sequence[int], *, max_tokens: int = MAX_TOKENS, stream: bool = False) -> bytes:
    """Return what is posted to /v1/completions: greedy, of a given length, with tokens instead of text."""
    body: dict[str, Any] = {"model": "tiny", "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0}
    return json.dumps(body | {"logprobs": 0, "ignore_eos": True, "detokenize": False, "stream": stream}).encode()


def read_completion(text: bytes | str) -> Answer:
    """Read what the server sent back."""
    answer = json.loads(text)
    (choice,) = answer["choices"]
    tokens = tuple(choice["logprobs"]["tokens"]) if choice["logprobs"] else ()
    details = answer["usage"]["prompt_tokens_details"] or {}
    return Answer(tokens, choice["finish_reason"], details.get("cached_tokens") or 0)


class Server:
    """A server in a session of its own; the constructor returns at once, `wait_ready` once it answers.

    `host_memory` None: without the plugin. `transfer` and `extra` replace entries of ``kv_transfer_config`` and of its
    ``kv_connector_extra_config``. Leaving the with block kills what is left of it.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        host_memory: str | None = "64MiB",
        ranks: int = 1,
        device_blocks: int = 24,
        shutdown_timeout_s: int = 0,
        transfer: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.engine_id = f"kvmoor-server-{uuid.uuid4().hex[:8]}"
        self.log = log
        options: dict[str, Any] = {
            "model": str(model),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": 512,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": device_blocks,
            "kv-cache-memory-bytes": 64 << 20,
            "max-num-seqs": 8,
            "tensor-parallel-size": ranks,
        }
        if shutdown_timeout_s:
            options["shutdown-timeout"] = shutdown_timeout_s
        if host_memory is not None:
            config = {
                "kv_connector": "KvmoorConnector",
                "kv_connector_module_path": "kvmoor.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": self.engine_id,
                "kv_connector_extra_config": {"host_memory": host_memory} | (extra or {}),
            }
            options["kv-transfer-config"] = json.dumps(config | (transfer or {}))
        flags = ["skip-tokenizer-init", "return-tokens-as-token-ids", "enable-prompt-tokens-details", "enforce-eager"]
        flags.append("disable-uvicorn-access-log")
        # Not the `vllm` command: it asks for a distribution of that name, which builds for CPUs do not have.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--{name}={value}" for name, value in options.items()] + [f"--{flag}" for flag in flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Wait until it answers. Raises `ServerError` if it ends or does not in time; then nothing is left of it."""
        try:
            if not wait_until(lambda: self.process.poll() is not None or self._is_healthy(), timeout_s):
                raise self._error(f"it does not answer {timeout_s:g} s after its start")
            if self.process.poll() is not None:
                raise self._error(f"it ended with {self.process.returncode} instead of answering")
        except BaseException:  # no with block has been entered yet that would end it
            self.kill()
            raise
        return self

    def wait_engine_ended(self, timeout_s: float) -> float:
        """Wait until engine core and workers have ended, and return the seconds. Raises `ServerError` at the deadline.

        The API server may live on: it waits for its clients, also where nobody is left to answer them.
        """
        started = time.monotonic()
        if not wait_until(lambda: not self._engine_processes(), timeout_s):
            raise self._error(f"of it live on after {timeout_s:g} s: {self._engine_processes()}")
        return time.monotonic() - started

    def _engine_processes(self) -> list[str]:
        return [role for role in self.processes().values() if role not in {"API server", "helper"}]

    def wait_ended(self, timeout_s: float) -> float:
        """Wait until no process of it is left, and return the seconds. Raises `ServerError` at the deadline."""
        started = time.monotonic()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"it has not ended after {timeout_s:g} s") from None
        left = wait_no_processes(self.process.pid, max(0.0, started + timeout_s - time.monotonic()))
        if left:
            raise self._error(f"of it live on after {timeout_s:g} s: {left}")
        return time.monotonic() - started

    def call(self, path: str, body: bytes | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        """Return what it answers to a GET, or to a POST if there is a body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.read().decode()

    def ask(self, tokens: Sequence[int]) -> Answer:
        """Return the answer to a prompt."""
        return read_completion(self.call("/v1/completions", completion_body(tokens)))

    def metric(self, name: str) -> float:
        """Return the sum of a series of its metrics; 0 if there is none of this name."""
        lines = [line for line in self.call("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def processes(self) -> dict[int, str]:
        """Return its living processes and their roles, see `session_processes`."""
        return session_processes(self.process.pid)

    def pid_of(self, role: str) -> int:
        """Return the one process of a role."""
        (pid,) = (pid for pid, its_role in self.processes().items() if its_role == role)
        return pid

    def leftovers(self) -> list[str]:
        """Describe what there is of kvmoor's memory and names, see `find_leftovers`."""
        return find_leftovers(self.engine_id)

    def terminate(self) -> None:
        """Send SIGTERM to the API server, as who stops a service does."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill what is left of it; also what vLLM itself leaves when its parent is killed."""
        kill_session(self.process.pid)
        self.process.wait(30)

    def log_tail(self, num_characters: int = 4000) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-num_characters:]

    def _is_healthy(self) -> bool:
        try:
            self.call("/health", timeout_s=5.0)
        except OSError:
            return False
        return True

    def _error(self, what: str) -> ServerError:
        return ServerError(f"{what}; its log ends:\n{self.log_tail()}")
