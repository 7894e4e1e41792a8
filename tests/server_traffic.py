"""Clients that ask a server at once, each in a thread, and compare every answer with the one that is known."""

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from server_rig import ANSWER_TIMEOUT_S, Answer, completion_body, read_completion

PATH: Final = "/v1/completions"
HEADERS: Final = {"Content-Type": "application/json"}
MAX_EXAMPLES: Final = 5

Tokens = tuple[int, ...]


class Traffic:
    """Ask prompts over and over, in random order, until it is stopped; each client waits for its answer.

    An answer that is complete must be the known one, one that was cut short the beginning of it. Every
    `abort_every`-th request of a client is dropped: at once, or after the first token came.
    """

    def __init__(
        self, port: int, known: Mapping[Tokens, Sequence[str]], *, num_clients: int, abort_every: int = 0
    ) -> None:
        self._port = port
        self._known = {tokens: tuple(answer) for tokens, answer in known.items()}
        self._bodies = {tokens: completion_body(tokens) for tokens in known}
        self._stream_bodies = {tokens: completion_body(tokens, stream=True) for tokens in known}
        self._asked = tuple(known)
        self._abort_every = abort_every
        self._changed = threading.Condition()
        self._stopping = False
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self.counts: Counter[str] = Counter()
        """How many were "answered", "cut short", "dropped", "wrong", "error"; and "cached tokens"."""
        self.examples: list[str] = []
        """What the first errors and wrong answers were."""
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in range(num_clients)]

    def __enter__(self) -> Self:
        for client, thread in enumerate(self._threads):
            self._connections[client] = self._connect()
            thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def ask_only(self, prompts: Sequence[Tokens]) -> None:
        """Ask only some of the prompts from now on."""
        self._asked = tuple(prompts)

    def wait_for(self, what: str, count: int, timeout_s: float) -> None:
        """Wait until there are so many of `counts`. Raises `TimeoutError` at the deadline."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.counts[what] >= count, timeout_s):
                raise TimeoutError(f"{self.counts[what]} {what} after {timeout_s:g} s, {self.counts}, {self.examples}")

    def stop_asking(self) -> None:
        """Let every client wait for the answer to its request and then ask no more; returns at once."""
        self._stopping = True

    def hang_up(self) -> None:
        """Stop asking, and have every client give up the request whose answer it waits for."""
        self.stop_asking()
        for connection in self._connections.values():
            with suppress(AttributeError, OSError):  # it has no socket at the moment, or no longer
                connection.sock.shutdown(socket.SHUT_RDWR)

    def stop(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Let every client finish its request, and end."""
        self.stop_asking()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        assert not left, f"{left} clients still wait for an answer after {timeout_s:g} s"

    def _run(self, client: int) -> None:
        chosen = random.Random(client)
        connection = self._connections[client]
        num_asked = 0
        while not self._stopping:
            tokens = chosen.choice(self._asked)
            num_asked += 1
            try:
                if self._abort_every and num_asked % self._abort_every == 0:
                    self._drop(tokens, after_first_token=chosen.random() < 0.5)
                    self._note("dropped")
                else:
                    connection.request("POST", PATH, self._bodies[tokens], HEADERS)
                    response = connection.getresponse()
                    text = response.read()
                    if response.status != http.client.OK:
                        raise http.client.HTTPException(f"status {response.status}: {text[:200]!r}")
                    self._check(tokens, read_completion(text))
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                connection = self._connections[client] = self._connect()
                self._note("error", repr(error))
                if isinstance(error, ConnectionRefusedError):
                    break  # nobody listens any more
        connection.close()

    def _check(self, tokens: Tokens, answer: Answer) -> None:
        known = self._known[tokens]
        is_complete = answer.finish_reason == "length"
        if answer.tokens == (known if is_complete else known[: len(answer.tokens)]):
            self._note("answered" if is_complete else "cut short", num_cached=answer.num_cached)
        else:
            self._note("wrong", f"{answer.tokens} ({answer.finish_reason}) instead of {known}")

    def _drop(self, tokens: Tokens, *, after_first_token: bool) -> None:
        """Ask for a stream of tokens and go away, before or while it comes."""
        connection = self._connect()
        try:
            connection.request("POST", PATH, self._stream_bodies[tokens], HEADERS)
            if after_first_token:
                response = connection.getresponse()
                if response.status != http.client.OK:
                    raise http.client.HTTPException(f"status {response.status}")
                response.readline()
                response.close()
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)

    def _note(self, what: str, example: str = "", num_cached: int = 0) -> None:
        with self._changed:
            self.counts[what] += 1
            self.counts["cached tokens"] += num_cached
            if example and len(self.examples) < MAX_EXAMPLES:
                self.examples.append(example)
            self._changed.notify_all()
