"""What an `Offloader` answers: submissions, matches, results of jobs, and its own reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvmoor.block_key import BlockKey
from kvmoor.coordinator import Coordinator, CoordinatorStatistics
from kvmoor.index.lease import LoadLease
from kvmoor.transfer_messages import OrderId, OrderKind, Outcome
from kvmoor.worker_reports import CloseReport, WorkerStatistics


@dataclass(frozen=True, slots=True)
class StoreSubmission:
    """Say what became of a store.

    `job_id` is None if nothing is copied: `num_known` blocks were stored or being stored before, and `declined`, if not
    empty, says why the others were not taken (a later call may store them).
    """

    job_id: OrderId | None
    num_submitted: int
    num_known: int
    declined: str = ""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Tell how a job ended (`Outcome` says what each means for its device blocks) and why it went wrong, if it did."""

    job_id: OrderId
    kind: OrderKind
    outcome: Outcome
    num_blocks: int
    nbytes: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OffloaderCloseReport:
    """Tell how closing went: the worker's report, and the keys of matches and stores that nobody resolved."""

    worker: CloseReport
    unresolved_keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class OffloaderStatistics:
    """The numbers of both halves."""

    blocks: CoordinatorStatistics
    transfers: WorkerStatistics


class Match:
    """The longest ready prefix of some keys. Its blocks stay where they are until it is loaded or released.

    A context manager: leaving it releases a match that was not loaded. Any thread may use it, one of them loads it.
    """

    def __init__(self, coordinator: Coordinator, lease: LoadLease) -> None:
        self._coordinator = coordinator
        self.lease = lease
        """What holds the blocks; for `Offloader.submit_load`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "leased" if self._coordinator.is_free(self.lease) else "loaded or released"
        return f"<Match of {self.num_blocks} blocks, {state}>"

    @property
    def keys(self) -> Sequence[BlockKey]:
        """Return the keys of the matched blocks, a prefix of those asked for."""
        return self.lease.keys

    @property
    def num_blocks(self) -> int:
        """Return how many blocks matched."""
        return len(self.lease)

    def keep(self, num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks. Raises `RequestError` once the match is loaded or released."""
        self._coordinator.keep(self.lease, num_blocks)

    def release(self) -> None:
        """Give the blocks back; does nothing once the match is loaded or released."""
        self._coordinator.release(self.lease)
