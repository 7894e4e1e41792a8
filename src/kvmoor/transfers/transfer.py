"""One job on a lane, and the states it may pass through."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmoor.transfer_messages import Order, Outcome, Report
from kvmoor.transfers.copy_plan import CopyPlan


class TransferState(Enum):
    """Say where a job stands. A job that is over touches neither its slots nor its device blocks any more."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"
    SETTLED = "settled"


_LEGAL_MOVES: Final = {
    TransferState.RUNNING: {TransferState.DONE, TransferState.FAILED, TransferState.ABANDONED},
    TransferState.ABANDONED: {TransferState.SETTLED},
}


@dataclass(slots=True)
class Transfer:
    """Keep one job: its order, its descriptors and its number on the lane. Times are those of the lane's clock."""

    order: Order
    plan: CopyPlan
    sequence: int
    submitted_at: float
    deadline_at: float
    state: TransferState = TransferState.RUNNING

    def end(self, state: TransferState, *, now: float, reason: str = "") -> Report:
        """Move to a later state and report it."""
        assert state in _LEGAL_MOVES.get(self.state, ()), f"a transfer cannot go from {self.state} to {state}"
        self.state = state
        return Report(
            order_id=self.order.order_id,
            kind=self.order.kind,
            outcome=Outcome(state.value),
            nbytes=self.plan.nbytes if state is TransferState.DONE else 0,
            seconds=now - self.submitted_at,
            reason=reason,
        )
