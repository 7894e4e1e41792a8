"""What vLLM has a rank do: its types on one side, `WorkerSide` on the other."""

import logging
from typing import Any, Final

from kvmoor.integrations.vllm.compatibility import OffloadingWorker, TransferResult
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.integrations.vllm.worker_side import WorkerSide

_log = logging.getLogger("kvmoor")

WORKER_CLOSE_TIMEOUT_S: Final = 2.0
"""What closing a rank may take; the executor kills workers after 5 s, which it shares with us."""


class KvmoorWorker(OffloadingWorker):  # type: ignore[misc]
    """Run the jobs of vLLM's worker on one rank. Called by the thread that runs the model."""

    def __init__(self, side: WorkerSide) -> None:
        self.side = side

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: HostSlots) -> bool:
        """Begin to store."""
        self.side.submit_store(job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: HostSlots, dst_spec: Any, expedited: bool = False) -> bool:
        """Begin to load."""
        self.side.submit_load(job_id, src_spec, dst_spec, expedited=expedited)
        return True

    def get_finished(self) -> list[Any]:
        """Return the jobs whose copies are over; how they went is told beside it, since vLLM takes only success."""
        return [TransferResult(job.job_id, True, job.nbytes, job.seconds) for job in self.side.get_finished()]

    def wait(self, job_ids: set[int]) -> None:
        """Return once these jobs touch no device block any more, or raise."""
        self.side.wait(job_ids)

    def shutdown(self) -> None:
        """Close, within two seconds."""
        report = self.side.close(WORKER_CLOSE_TIMEOUT_S)
        if not report.graceful:
            _log.warning("closing was not graceful: %s", report)
