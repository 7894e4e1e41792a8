"""One copy of KV caches that every rank holds alike (MLA): which ranks read it, and how they come to do so.

    rank 0      handshake, reports of new slots  --ticket-->  scheduler
    scheduler   metadata of each step            --ticket-->  every rank, until all readers have answered
    readers     attach, then their reports       --answer-->  scheduler: from then on slots are handed out

Rank 0 keeps the copy and writes it; vLLM has the others acknowledge stores without running them. No load can reach a
reader before the ticket, because nothing is stored before every reader has said that it can read.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.reading_worker import ReadingWorker
from kvmoor.transfer_messages import SlotRange

_log = logging.getLogger("kvmoor")

OWNER_RANK: Final = 0
"""Who keeps the copy: vLLM has this rank submit the stores."""

ATTACH_ATTEMPTS: Final = 20
"""At how many steps a reader tries to attach before it gives up: what is short at one may be there at the next, such as
descriptors. Guessed."""

ATTACHED: Final = ""
"""What a reader answers that can read; any other answer is the reason why it cannot."""


class TicketRoute:
    """Bring the ticket from the rank that keeps the copy to the `num_readers` others. In the scheduler, one thread."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._ticket: ArenaTicket | None = None
        self._answers: dict[int, str] = {}
        self._held_back: list[SlotRange] = []

    @property
    def to_pass(self) -> ArenaTicket | None:
        """Return the ticket while there are readers that have not answered it."""
        return self._ticket if len(self._answers) < self._num_readers else None

    def note_ticket(self, ticket: ArenaTicket | None) -> None:
        """Take the ticket in; the owner sends it with whatever it says of slots, the same each time."""
        self._ticket = self._ticket or ticket

    def note_answers(self, answers: Mapping[int, str]) -> None:
        """Take note of what readers say, by rank."""
        self._answers.update(answers)
        for rank, answer in answers.items():
            if answer != ATTACHED:
                _log.error(
                    "rank %d cannot read the one copy that rank %d keeps, so nothing is stored: %s. Set one_copy to "
                    '"off" to keep a copy on each rank',
                    rank,
                    OWNER_RANK,
                    answer,
                )

    def release(self, published: Iterable[SlotRange]) -> list[SlotRange]:
        """Return which slots may be handed out by now, of those that are new and those held back before."""
        self._held_back += published
        if self._num_readers > sum(answer == ATTACHED for answer in self._answers.values()):
            return []
        released, self._held_back = self._held_back, []
        return released


class TicketReader:
    """Attach the worker of a rank that reads, when the ticket comes, and answer once. One thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_attempts = 0
        self._has_answered = False
        self._answers: dict[int, str] = {}

    def take(self, ticket: ArenaTicket | None, worker: object) -> None:
        """Take what the metadata of a step brings. A worker that cannot attach loads nothing; the engine goes on."""
        if ticket is None or self._has_answered or not isinstance(worker, ReadingWorker):
            return
        self._num_attempts += 1
        try:
            worker.attach(ticket)
        except Exception as error:  # whatever it is, the engine goes on without offloading
            if self._num_attempts < ATTACH_ATTEMPTS:
                return
            _log.error("the one copy of host memory cannot be read here: %s", error)
            self._answers[self._rank] = f"{error}" or type(error).__name__
        else:
            self._answers[self._rank] = ATTACHED
        self._has_answered = True

    def take_answers(self) -> dict[int, str]:
        """Return what was not told yet: nothing, or the answer by rank."""
        answers, self._answers = self._answers, {}
        return answers


def why_each_rank_keeps_a_copy(vllm_config: Any, *, one_copy: str) -> str:
    """Return why ranks that hold the same KV caches do not share one copy, where vLLM does not say; for the log."""
    parallel = vllm_config.parallel_config
    if one_copy == "off":
        return 'one_copy is "off"'
    if parallel.local_world_size != parallel.world_size:
        return f"of {parallel.world_size} ranks {parallel.local_world_size} are on one host, and only they could share"
    if (executor := parallel.distributed_executor_backend) != "mp":
        return f"vLLM allows one copy with its executor 'mp' only, and this is {executor!r}"
    if parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size > 1:
        return "vLLM allows one copy beside tensor parallelism alone"
    return "vLLM does not say that all KV caches of this model are the same on all ranks"
