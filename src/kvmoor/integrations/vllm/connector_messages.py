"""What travels between the connector's halves beside vLLM's own jobs. All of it is pickled between processes."""

from dataclasses import dataclass, field

from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.integrations.vllm.compatibility import (
    KVConnectorHandshakeMetadata,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from kvmoor.integrations.vllm.rank_sizes import RankSizes
from kvmoor.transfer_messages import SlotRange


@dataclass
class KvmoorHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM counts as untyped
    """Tell the scheduler, at start, what a rank has room for, and which slots are `published` by now.

    `ticket` is how other ranks read this one's host memory, where they share it.
    """

    sizes: RankSizes
    published: tuple[SlotRange, ...]
    ticket: ArenaTicket | None = None


@dataclass
class KvmoorConnectorMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]
    """Tell every worker what to do in a step.

    `reset_epoch` counts the resets so far. `ticket` is there until every rank that is to read it has answered.
    """

    reset_epoch: int = 0
    ticket: ArenaTicket | None = None


@dataclass
class KvmoorWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """Tell the scheduler what happened on the ranks since they last spoke.

    `failed_orders` says why, by order id; `published` has the slots that became usable, by rank. `ticket` comes with
    the slots of a rank whose memory others read, and `ticket_answers` has what these said to it, by rank.
    """

    failed_orders: dict[int, str] = field(default_factory=dict)
    published: dict[int, tuple[SlotRange, ...]] = field(default_factory=dict)
    ticket: ArenaTicket | None = None
    ticket_answers: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: "KvmoorWorkerMetadata") -> "KvmoorWorkerMetadata":
        """Return what both say."""
        base = super().aggregate(other)
        return KvmoorWorkerMetadata(
            base.completed_jobs,
            base.transfer_stats,
            failed_orders=other.failed_orders | self.failed_orders,
            published=self.published | other.published,
            ticket=self.ticket or other.ticket,
            ticket_answers=self.ticket_answers | other.ticket_answers,
        )
