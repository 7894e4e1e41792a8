"""Ways to break the plugin, each of which a walk has to notice: see `call_orders`."""

from contextlib import contextmanager

from kvmoor.integrations.vllm.connector import KvmoorConnector
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.integrations.vllm.spoiled_stores import SpoiledStores
from kvmoor.integrations.vllm.worker_side import EndedJob, WorkerSide


@contextmanager
def _with(owner, name, value):
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing():
    return _with(WorkerSide, "wait", WorkerSide.wait)


@contextmanager
def _loads_wait_for_the_last_step():
    """Order loads after what was queued when the last step ended: not after its drafter, nor after zeroing."""
    get_finished = WorkerSide.get_finished

    def mark_at_the_end(self):
        ended = get_finished(self)
        self._load_event = self._device.record_event()
        return ended

    close = WorkerSide.close

    def drop_and_close(self, timeout_s):
        self._load_event = None
        return close(self, timeout_s)

    with (
        _with(WorkerSide, "get_finished", mark_at_the_end),
        _with(WorkerSide, "mark_loads", lambda _self: None),
        _with(WorkerSide, "close", drop_and_close),
    ):
        yield


def _loads_wait_for_nothing():
    def mark_nothing(self):
        self._load_event = _Reached()

    return _with(WorkerSide, "mark_loads", mark_nothing)


def _stores_wait_for_nothing():
    start = WorkerSide._start

    def start_at_once(self, job, order, wait_for):
        start(self, job, order, wait_for or _Reached())

    return _with(WorkerSide, "_start", start_at_once)


def _nobody_waits():
    return _with(WorkerSide, "wait", lambda _self, _job_ids: None)


def _aborts_within_a_step_are_not_seen():
    build = KvmoorConnector.build_connector_meta

    def build_and_forget(self, scheduler_output):
        metadata = build(self, scheduler_output)
        self._tables_of_sync_step = []
        return metadata

    return _with(KvmoorConnector, "build_connector_meta", build_and_forget)


def _failures_are_not_noted():
    return _with(SchedulerSide, "note_failed", lambda _self, _order_ids: None)


def _failures_are_not_told():
    return _with(WorkerSide, "take_failed", lambda _self: [])


def _zeroed_stores_count():
    init = KvmoorConnector.__init__

    def forget_zeroing(self, *arguments):
        init(self, *arguments)
        self._overwrites_before_flush = False

    return _with(KvmoorConnector, "__init__", forget_zeroing)


def _jobs_end_at_once():
    """Report a job as over when it was queued."""
    start = WorkerSide._start

    def start_and_end(self, job, order, wait_for):
        start(self, job, order, wait_for)
        if self._running.get(order.order_id) is job:
            del self._running[order.order_id]
            self._ended.append(EndedJob(job.job_id, 1, 1.0))

    return _with(WorkerSide, "_start", start_and_end)


def _spoiled_stores_count():
    return _with(SpoiledStores, "note_failed_load", lambda _self: None)


class _Reached:
    """A point that the device has come to."""

    def is_done(self):
        return True


MUTATIONS = {
    "": _nothing,
    "loads_wait_for_the_last_step": _loads_wait_for_the_last_step,
    "loads_wait_for_nothing": _loads_wait_for_nothing,
    "stores_wait_for_nothing": _stores_wait_for_nothing,
    "nobody_waits": _nobody_waits,
    "aborts_within_a_step_are_not_seen": _aborts_within_a_step_are_not_seen,
    "failures_are_not_noted": _failures_are_not_noted,
    "failures_are_not_told": _failures_are_not_told,
    "zeroed_stores_count": _zeroed_stores_count,
    "jobs_end_at_once": _jobs_end_at_once,
    "spoiled_stores_count": _spoiled_stores_count,
}
