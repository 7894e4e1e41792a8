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
from itertools import chain
from typing import Any, Final

import kvmoor
from kvmoor.host_memory.ticket import ArenaTicket
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
from kvmoor.integrations.vllm.device_cache import DeviceCacheWatch
from kvmoor.integrations.vllm.rank_sizes import RankSizes, least_slots
from kvmoor.integrations.vllm.refusals import refuse_configuration
from kvmoor.integrations.vllm.reset_fence import ResetFence
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.integrations.vllm.settings import read_settings
from kvmoor.integrations.vllm.shared_copy import (
    TicketReader,
    TicketRoute,
    why_each_rank_keeps_a_copy,
)
from kvmoor.integrations.vllm.spoiled_stores import SpoiledStores
from kvmoor.integrations.vllm.stale_blocks import blocks_behind, forget_window_blocks
from kvmoor.integrations.vllm.worker_side import WorkerSide
from kvmoor.reading_worker import ReadingWorker

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
                *("config", "_sliding_window_groups"),
            )
            self._num_ranks: int = parallel.world_size
            self._ticket_route = TicketRoute(num_readers := parallel.world_size - self.scheduler_side.num_ranks)
            self._overwrites_before_flush: bool = vllm_config.use_v2_model_runner
            self._zeroes_blocks: bool = kv_cache_config.needs_kv_cache_zeroing
            self._reset_epoch = 0
            self._reset_fence = ResetFence()
            settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
            if vllm_config.model_config.use_mla and parallel.world_size > 1 and not num_readers:
                reason = why_each_rank_keeps_a_copy(vllm_config, one_copy=settings.one_copy)
                _log.info("each rank keeps a copy of its KV caches in host memory: %s", reason)
            self._follows_device_cache = settings.eviction == "device-lru"
            self._device_cache: DeviceCacheWatch | None = None
            self._store_orders: dict[int, int] = {}  # by job id, until the job is over
            self._tables_of_sync_step: list[list[int]] = []
        else:
            require_attributes(self.connector_worker, "worker", "spec", "_unsubmitted_store_jobs", "_is_store_writer")
            self.connector_worker.spec.ranks_on_host = parallel.local_world_size
            self._rank: int = parallel.rank
            self._ticket_reader = TicketReader(parallel.rank)
            self._requests_of_loads: dict[int, str] = {}  # by job id
            self._blocks_of_sync_loads: dict[int, list[int]] = {}
            self._invalid_blocks: set[int] = set()
            self._spoiled_stores = SpoiledStores(vllm_config.max_concurrent_batches)
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
        spec, worker = self.connector_worker.spec, self.worker_side.worker
        config = spec.config
        # Of one copy the others read byte for byte what rank 0 stored.
        layout = worker.layout.fingerprint.hex() if spec.replicated_layout else config.kv_cache_layout
        shape = (kvmoor.__version__, spec.tokens_per_block, config.cache.blocks_per_chunk, layout)
        num_slots = None
        if not isinstance(worker, ReadingWorker):
            num_slots = tuple(group.num_slots for group in worker.arena.plan.groups)
        sizes = RankSizes(self._rank, num_slots, shape)
        return KvmoorHandshake(sizes, self.worker_side.take_published(), self._ticket())

    def _ticket(self) -> ArenaTicket | None:
        """Return what the other ranks need to read this one's host memory; None where they do not."""
        worker = self.worker_side.worker
        if isinstance(worker, ReadingWorker) or not self.connector_worker.spec.replicated_layout:
            return None
        return worker.ticket()

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
            self._ticket_route.note_ticket(handshake.ticket)
            self.scheduler_side.publish(self._ticket_route.release(handshake.published))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Learn from now on what the device's own cache drops, if that matters; vLLM calls it once, at start."""
        if self._follows_device_cache:
            require_attributes(gpu_block_pool, "metrics_collector", "cached_block_hash_to_block")
            require_attributes(gpu_block_pool.cached_block_hash_to_block, "_cache")
            self._device_cache = DeviceCacheWatch(gpu_block_pool)

    # The scheduler, in the order of a step.

    def has_pending_push_work(self) -> bool:
        """Say whether an idle engine should step on, since workers are heard at steps only."""
        return self._reset_fence.keeps_stepping or bool(super().has_pending_push_work())

    def build_connector_meta(self, scheduler_output: Any) -> KvmoorConnectorMetadata:
        """Tell the workers what to do in this step."""
        if self._device_cache is not None and (left := self._device_cache.take_left()):
            self.scheduler_side.note_left_device(left)  # before room is made for the stores of this step
        with self._fresh_loads_hidden(scheduler_output.preempted_req_ids or ()):
            meta = super().build_connector_meta(scheduler_output)
        self._store_orders.update((job_id, job.dst_spec.order_id) for job_id, job in meta.store_jobs.items())
        if self._overwrites_before_flush and (self._zeroes_blocks or scheduler_output.kv_cache_block_copies):
            # This runner zeroes and copies blocks before it lets stores of their former content begin.
            flushed = self._store_orders.keys() & (meta.jobs_to_flush or ())
            self.scheduler_side.note_failed(self._store_orders[job_id] for job_id in flushed)
        if any(getattr(job, "sync", False) for job in meta.load_jobs.values()):
            self._tables_of_sync_step = list(self._block_tables())  # a request may be aborted before the step's output
        return KvmoorConnectorMetadata(
            meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, self._reset_epoch, self._ticket_route.to_pass
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of what the workers did: failures first, because vLLM completes the jobs next."""
        if connector_output.invalid_block_ids:
            tables = (*self._tables_of_sync_step, *self._block_tables())
            self._kv_cache_manager.evict_blocks(blocks_behind(connector_output.invalid_block_ids, tables))
        self._tables_of_sync_step = []
        meta = connector_output.kv_connector_worker_meta
        was_open = self._reset_fence.is_open
        if isinstance(meta, KvmoorWorkerMetadata):
            self._ticket_route.note_ticket(meta.ticket)
            self._ticket_route.note_answers(meta.ticket_answers)
            published = chain.from_iterable(meta.published.values())  # none, where answers alone let slots go
            self.scheduler_side.publish(self._ticket_route.release(published))
            self.scheduler_side.note_failed(meta.failed_orders)
            self._reset_fence.note_reports(meta.completed_jobs)
        super().update_connector_output(connector_output)
        if self._reset_fence.is_open and not was_open:
            self.connector_scheduler.manager.on_reset_flushed()
        jobs = self.connector_scheduler._jobs  # noqa: SLF001 - there is no other way to learn which are over
        if len(self._store_orders) > len(jobs):
            self._store_orders = {job_id: order for job_id, order in self._store_orders.items() if job_id in jobs}

    def _block_tables(self) -> Iterator[list[int]]:
        """Return the device blocks of each request, in order; where blocks were freed already, none."""
        for request in self.connector_scheduler._req_status:  # noqa: SLF001 - those that may have loaded blocks
            yield from map(list, self._kv_cache_manager.get_block_ids(request))

    def reset_cache(self) -> bool | None:
        """Forget everything that is stored, stores in flight included."""
        scheduler = self.connector_scheduler
        if scheduler._current_batch_jobs_to_flush:  # noqa: SLF001 - vLLM asserts that there are none
            return True  # a second reset before the next step: nothing was stored since the first
        self._reset_epoch += 1
        due = {job_id: job.pending_count for job_id, job in scheduler._jobs.items()}  # noqa: SLF001 - it forgets them
        books = scheduler._req_status.values(), scheduler._sliding_window_groups  # noqa: SLF001 - it has gaps
        forget_window_blocks(*books, scheduler.config.blocks_per_chunk)
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
        self._ticket_reader.take(kv_connector_metadata.ticket, self.worker_side.worker)
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
            if failed.job_id in self._blocks_of_sync_loads:
                self._invalid_blocks.update(self._blocks_of_sync_loads[failed.job_id])
                self._spoiled_stores.note_failed_load()
        self._blocks_of_sync_loads.clear()  # vLLM waited for them in this step
        stores = self._connector_metadata.store_jobs.values()
        self._failed_orders.update(self._spoiled_stores.end_step(job.dst_spec.order_id for job in stores))
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
        answers = self._ticket_reader.take_answers()
        if base is None and not published and not self._failed_orders and not answers:
            return None
        base = base or OffloadingWorkerMetadata()
        failed, self._failed_orders = self._failed_orders, {}
        new_slots = {self._rank: published} if published else {}
        # With the slots, because the handshake does not reach every scheduler.
        ticket = self._ticket() if published else None
        return KvmoorWorkerMetadata(base.completed_jobs, base.transfer_stats, failed, new_slots, ticket, answers)

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
