"""The connector: vLLM's own, with the channels that it lacks.

    scheduler                                          worker of each rank
    build_connector_meta   -- jobs, reset epoch -->    bind_connector_metadata, handle_preemptions, start_load_kv
    update_connector_output  <-- jobs that ended,      get_transfer_results, build_connector_worker_meta
                                 failed orders, new slots

A load that fails has its request computed again: the worker names the request, the scheduler drops the keys before
vLLM looks the request up once more. A store that fails is never found.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import kvmoor
from kvmoor.integrations.vllm.compatibility import (
    TELLS_OF_FLUSHED_RESETS,
    KVConnectorRole,
    OffloadingConnector,
    OffloadingWorkerMetadata,
    require_attributes,
)
from kvmoor.integrations.vllm.connector_messages import (
    KvmoorConnectorMetadata,
    KvmoorHandshake,
    KvmoorWorkerMetadata,
)
from kvmoor.integrations.vllm.rank_sizes import RankSizes, least_slots
from kvmoor.integrations.vllm.refusals import refuse_configuration
from kvmoor.integrations.vllm.reset_fence import ResetFence
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.integrations.vllm.settings import read_settings
from kvmoor.integrations.vllm.worker_side import WorkerSide

_log = logging.getLogger("kvmoor")

_SPEC: Final = {"spec_name": "KvmoorConnectorSpec", "spec_module_path": "kvmoor.integrations.vllm"}


class KvmoorConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM counts as untyped
    """Offload to host memory and survive failures.

    vLLM makes one in its scheduler process and one in each worker, and calls each from one thread.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _name_our_spec(vllm_config)
        refuse_configuration(vllm_config, kv_cache_config, is_before_033=not TELLS_OF_FLUSHED_RESETS)
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if role is KVConnectorRole.SCHEDULER:
            require_attributes(
                self.connector_scheduler,
                *("manager", "_jobs", "_req_status", "_current_batch_jobs_to_flush", "_current_batch_load_jobs"),
            )
            self._num_ranks: int = parallel.world_size
            self._overwrites_before_flush: bool = vllm_config.use_v2_model_runner
            self._zeroes_blocks: bool = kv_cache_config.needs_kv_cache_zeroing
            self._reset_epoch = 0
            self._reset_fence = ResetFence()
            self._store_orders: dict[int, int] = {}  # by job id, until the job is over
        else:
            require_attributes(self.connector_worker, "worker", "spec", "_unsubmitted_store_jobs")
            self.connector_worker.spec.ranks_on_host = parallel.local_world_size
            self._rank: int = parallel.rank
            self._requests_of_loads: dict[int, str] = {}  # by job id
            self._blocks_of_sync_loads: dict[int, list[int]] = {}
            self._invalid_blocks: set[int] = set()
            self._failed_orders: dict[int, str] = {}

    @property
    def scheduler_side(self) -> SchedulerSide:
        """Return the scheduler's half; only in its process."""
        side: SchedulerSide = self.connector_scheduler.manager.side
        return side

    @property
    def worker_side(self) -> WorkerSide:
        """Return the worker's half; only in a worker, and once the KV caches are registered."""
        side: WorkerSide = self.connector_worker.worker.side
        return side

    # What vLLM asks before anything runs.

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the series of vLLM's metrics, in its frontend, which makes no connector."""
        _name_our_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout of KV caches to ask vLLM for; it may decide otherwise."""
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if settings.kv_layout != "auto":
            return settings.kv_layout
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    def get_handshake_metadata(self) -> KvmoorHandshake:
        """Tell what this rank holds."""
        spec, plan = self.connector_worker.spec, self.worker_side.worker.arena.plan
        config = spec.config
        shape = (kvmoor.__version__, spec.tokens_per_block, config.cache.blocks_per_chunk, config.kv_cache_layout)
        num_slots = tuple(group.num_slots for group in plan.groups)
        return KvmoorHandshake(RankSizes(self._rank, num_slots, shape), self.worker_side.take_published())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take note of what the ranks hold; vLLM calls it at start, and again after a sleep.

        Beside other connectors vLLM hands over what the first of them said: then the ranks' reports have to do.
        """
        handshakes = [handshake for handshake in metadata.values() if isinstance(handshake, KvmoorHandshake)]
        if metadata and not handshakes:
            return
        sizes = [handshake.sizes for handshake in handshakes]
        self.scheduler_side.limit(least_slots(sizes, num_ranks=self._num_ranks))
        for handshake in handshakes:
            self.scheduler_side.publish(handshake.published)

    # The scheduler, in the order of a step.

    def has_pending_push_work(self) -> bool:
        """Say whether an idle engine should step on, since workers are heard at steps only."""
        return self._reset_fence.keeps_stepping or bool(super().has_pending_push_work())

    def build_connector_meta(self, scheduler_output: Any) -> KvmoorConnectorMetadata:
        """Tell the workers what to do in this step."""
        with self._fresh_loads_hidden(scheduler_output.preempted_req_ids or ()):
            meta = super().build_connector_meta(scheduler_output)
        self._store_orders.update((job_id, job.dst_spec.order_id) for job_id, job in meta.store_jobs.items())
        if self._overwrites_before_flush and (self._zeroes_blocks or scheduler_output.kv_cache_block_copies):
            # This runner zeroes and copies blocks before it lets stores of their former content begin.
            flushed = self._store_orders.keys() & (meta.jobs_to_flush or ())
            self.scheduler_side.note_failed(self._store_orders[job_id] for job_id in flushed)
        return KvmoorConnectorMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, self._reset_epoch)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of what the workers did: failures first, because vLLM completes the jobs next."""
        meta = connector_output.kv_connector_worker_meta
        was_open = self._reset_fence.is_open
        if isinstance(meta, KvmoorWorkerMetadata):
            for published in meta.published.values():
                self.scheduler_side.publish(published)
            self.scheduler_side.note_failed(meta.failed_orders)
            self._reset_fence.note_reports(meta.completed_jobs)
        super().update_connector_output(connector_output)
        if self._reset_fence.is_open and not was_open:
            self.connector_scheduler.manager.on_reset_flushed()
        jobs = self.connector_scheduler._jobs  # noqa: SLF001 - there is no other way to learn which are over
        if len(self._store_orders) > len(jobs):
            self._store_orders = {job_id: order for job_id, order in self._store_orders.items() if job_id in jobs}

    def reset_cache(self) -> bool | None:
        """Forget everything that is stored, stores in flight included."""
        scheduler = self.connector_scheduler
        if scheduler._current_batch_jobs_to_flush:  # noqa: SLF001 - vLLM asserts that there are none
            return True  # a second reset before the next step: nothing was stored since the first
        self._reset_epoch += 1
        due = {job_id: job.pending_count for job_id, job in scheduler._jobs.items()}  # noqa: SLF001 - it forgets them
        result: bool | None = super().reset_cache()
        if not TELLS_OF_FLUSHED_RESETS:
            self._reset_fence.add(due)
            if self._reset_fence.is_open:
                scheduler.manager.on_reset_flushed()
        return result

    @contextmanager
    def _fresh_loads_hidden(self, preempted: Any) -> Iterator[None]:
        """Keep from vLLM below 0.33 that a request which was preempted in this step is loading again already.

        A reset of the device's cache alone does that, and vLLM then asserts that preempted requests have only stores. A
        load of this very step was not submitted yet, so there is nothing of it to flush.
        """
        scheduler = self.connector_scheduler
        hidden = []
        for request in () if TELLS_OF_FLUSHED_RESETS else preempted:
            status = scheduler._req_status.get(request)  # noqa: SLF001 - where it remembers jobs of requests
            if status is not None:
                fresh = status.transfer_jobs & scheduler._current_batch_load_jobs.keys()  # noqa: SLF001 - as above
                status.transfer_jobs -= fresh
                hidden.append((status, fresh))
        try:
            yield
        finally:
            for status, fresh in hidden:
                status.transfer_jobs |= fresh

    # A worker, in the order of a step.

    def handle_preemptions(self, kv_connector_metadata: KvmoorConnectorMetadata) -> None:
        """Let the stores of the last step begin, and wait for jobs whose blocks are reused or that a reset ends."""
        self.worker_side.note_reset(kv_connector_metadata.reset_epoch)
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KvmoorConnectorMetadata) -> None:
        """Take what the scheduler says; the last call before the forward, after all writes of earlier work."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.load_jobs:
            self.worker_side.mark_loads()
        for job_id, job in connector_metadata.load_jobs.items():
            if getattr(job, "sync", False):
                self._blocks_of_sync_loads[job_id] = job.dst_spec.block_ids.tolist()
            else:
                self._requests_of_loads[job_id] = job.req_id

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return which requests' loads have ended, and which of them have to be computed."""
        results = super().get_transfer_results(finished_req_ids)
        failed_requests = set()
        for failed in self.worker_side.take_failed():
            self._failed_orders[failed.order_id] = failed.reason
            if failed.job_id in self._requests_of_loads:
                failed_requests.add(self._requests_of_loads[failed.job_id])
            self._invalid_blocks.update(self._blocks_of_sync_loads.get(failed.job_id, ()))
        self._blocks_of_sync_loads.clear()  # vLLM waited for them in this step
        results.failed_recving = (results.failed_recving or set()) | (failed_requests & results.finished_recving)
        ended = [job for job, request in self._requests_of_loads.items() if request in results.finished_recving]
        for job_id in ended:
            del self._requests_of_loads[job_id]
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads within this step failed to fill (vLLM 0.33)."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> KvmoorWorkerMetadata | None:
        """Tell the scheduler what happened here since the last step that had news."""
        base = super().build_connector_worker_meta()
        published = self.worker_side.take_published()
        if base is None and not published and not self._failed_orders:
            return None
        base = base or OffloadingWorkerMetadata()
        failed, self._failed_orders = self._failed_orders, {}
        new_slots = {self._rank: published} if published else {}
        return KvmoorWorkerMetadata(base.completed_jobs, base.transfer_stats, failed, new_slots)

    def unregister_kv_caches(self) -> None:
        """Let go of the device's memory before a sleep (vLLM 0.33): wait for copies, refuse stores not yet begun."""
        held_back = self.connector_worker._unsubmitted_store_jobs  # noqa: SLF001 - vLLM does not drop them itself
        self.worker_side.give_up_device_memory(job_id for job_id, *_ in held_back)

    def restore_kv_caches(self) -> None:
        """Take note that the device's memory is back, at the same addresses: there is nothing to do."""


def _name_our_spec(vllm_config: Any) -> None:
    """Have vLLM find our spec: it looks it up by these keys, in every process that asks for it."""
    extra, model = vllm_config.kv_transfer_config.kv_connector_extra_config, vllm_config.model_config
    # The commit that was loaded, where the model came from a hub, or else what the user asked for.
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    extra.setdefault("model_revision", revision or "")
    extra.update(_SPEC)
