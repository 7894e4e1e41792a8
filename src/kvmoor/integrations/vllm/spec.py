"""What vLLM's offloading connector is given: from its configuration a spec makes the scheduler's half and a rank's."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar

from kvmoor.block_key import digest_fields
from kvmoor.block_layout import BlockLayout
from kvmoor.coordinator import Coordinator
from kvmoor.devices.device import Device
from kvmoor.errors import SettingsError, UnsupportedError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.integrations.vllm import metrics
from kvmoor.integrations.vllm.compatibility import (
    VLLM_VERSION,
    OffloadingSpec,
    show_log,
    version_number,
)
from kvmoor.integrations.vllm.devices import open_device
from kvmoor.integrations.vllm.host_status import HostStatus
from kvmoor.integrations.vllm.keys import ChunkKeys
from kvmoor.integrations.vllm.layout import describe_kv_caches
from kvmoor.integrations.vllm.manager import KvmoorManager
from kvmoor.integrations.vllm.rank_worker import KvmoorWorker
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.integrations.vllm.settings import PluginSettings, read_settings
from kvmoor.integrations.vllm.shared_copy import OWNER_RANK
from kvmoor.integrations.vllm.thread_affinity import threads_on_all_cores
from kvmoor.integrations.vllm.worker_side import WorkerSide
from kvmoor.key_builder import Namespace
from kvmoor.reading_worker import ReadingWorker
from kvmoor.worker import TransferWorker

_log = logging.getLogger("kvmoor")


class KvmoorSpec(OffloadingSpec):  # type: ignore[misc]
    """Offload to host memory through vLLM's own ``OffloadingConnector``.

    That connector cannot tell of failures, so a load that keeps failing ends the engine, and it carries nothing back
    from the workers, so these have to be on the scheduler's host. ``KvmoorConnector`` has neither limit.
    """

    failures_are_told: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        show_log()
        self.settings: PluginSettings = read_settings(config.extra_config)
        self.offload_prompt_only = self.settings.offload_prompt_only
        self.ranks_on_host: int = config.parallel.world_size
        self.replicated_layout = self._keeps_one_copy()  # then vLLM has only rank 0 store
        self._manager: KvmoorManager | None = None
        self._worker: KvmoorWorker | None = None
        if config.canonical_layout:
            raise UnsupportedError("canonical_layout is not supported: remove it from kv_connector_extra_config")
        self._refuse_what_it_lacks()

    def _keeps_one_copy(self) -> bool:
        """Say whether rank 0 keeps one copy of what all ranks hold alike: not without a way for its ticket."""
        if self.config.replicated_layout and self.config.parallel.rank == 0:
            _log.warning("KvmoorSpec keeps a copy of these KV caches on each rank: KvmoorConnector needs only one")
        return False

    def _refuse_what_it_lacks(self) -> None:
        parallel = self.config.parallel
        if self.settings.eviction == "device-lru":
            raise SettingsError(
                "eviction is 'device-lru', and KvmoorSpec is not told what the device's own cache holds: use "
                "KvmoorConnector, or 'lru' or 'arc'"
            )
        if parallel.pp_size > 1:
            raise UnsupportedError(
                f"pipeline_parallel_size is {parallel.pp_size}, and KvmoorSpec does not know the sizes of every rank: "
                "use KvmoorConnector"
            )
        if parallel.rank == 0:
            _log.warning(
                "KvmoorSpec runs without the channels of KvmoorConnector: a load that keeps failing ends the engine, "
                "all ranks have to be on this host, and what vLLM itself gets wrong around resets, zeroed blocks and "
                "failed loads stays so (docs/vllm.md)"
            )

    @classmethod
    def build_metric_definitions(cls, _extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Declare the plugin's series in vLLM's metrics."""
        return metrics.metric_definitions()

    @classmethod
    def config_info_keys(cls, _extra_config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of static facts in vLLM's metrics: none."""
        return ()

    def get_manager(self) -> KvmoorManager:
        """Make the scheduler's half, once."""
        if self._manager is None:
            config = self.config
            num_groups = len(config.groups)
            keys = ChunkKeys(
                self.namespace(),
                group_ids=[group.group_id for group in config.groups],
                tokens_per_block=[group.tokens_per_block for group in config.groups],
                blocks_per_chunk=config.cache.blocks_per_chunk,
            )
            coordinator = Coordinator(num_groups, eviction=self.settings.eviction)
            num_ranks = 1 if self.replicated_layout else config.parallel.world_size
            side = SchedulerSide(
                coordinator,
                keys,
                num_groups=num_groups,
                num_ranks=num_ranks,
                job_timeout_s=self.settings.job_timeout_s,
            )
            if config.enable_kv_cache_events:
                side.events.keep()
            self._manager = KvmoorManager(side, self._host_status())
        return self._manager

    def _host_status(self) -> HostStatus | None:
        return HostStatus(self.config.engine_id, self.config.parallel.world_size)

    def get_worker(self, kv_caches: Any) -> KvmoorWorker:
        """Open this rank's host memory, once; returns before it is mapped."""
        if self._worker is None:
            self._worker = KvmoorWorker(self._open(kv_caches))
        return self._worker

    def _open(self, kv_caches: Any) -> WorkerSide:
        config, settings = self.config, self.settings
        layout = describe_kv_caches(
            kv_caches,
            tokens_per_block=[group.tokens_per_block for group in config.groups],
            content=f"vllm {config.model.dtype} {config.kv_cache_layout}",
        )
        device = open_device(layout)
        with ExitStack() as opened, threads_on_all_cores() if layout.on_host else nullcontext():
            opened.callback(device.close, 0.0)
            worker = self._open_worker(layout, device, opened)
        return WorkerSide(
            worker,
            device,
            blocks_per_chunk=config.cache.blocks_per_chunk,
            failures_are_told=self.failures_are_told,
            job_timeout_s=settings.job_timeout_s,
        )

    def _open_worker(self, layout: BlockLayout, device: Device, opened: ExitStack) -> TransferWorker | ReadingWorker:
        """Open who moves the bytes of this rank, and closes the device from then on."""
        config, settings = self.config, self.settings
        if self.replicated_layout and config.parallel.rank != OWNER_RANK:
            opened.pop_all()
            return ReadingWorker(
                layout,
                device,
                job_timeout_s=settings.job_timeout_s,
                pin="off" if settings.pin == "off" else "background",
                name=f"{config.engine_id}:{config.parallel.rank}",
            )
        plan = plan_arena(
            layout,
            settings.host_memory,
            memory_check=settings.memory_check,
            ranks_on_host=1 if self.replicated_layout else self.ranks_on_host,
            numa=settings.numa,
            device_numa_node=device.numa_node,
            huge_pages=settings.huge_pages,
        )
        if config.parallel.rank == 0:
            who = "rank 0 keeps one copy for all ranks:" if self.replicated_layout else "each rank has"
            _log.info("of engine %s, %s %s", config.engine_id, who, plan.describe())
        opened.pop_all()
        return TransferWorker(
            layout,
            plan,
            device,
            job_timeout_s=settings.job_timeout_s,
            mapping=settings.mapping,
            pin=settings.pin,
            backing=Backing.MEMFD if self.replicated_layout else Backing.ANONYMOUS,
            engine_id=config.engine_id,
            rank=config.parallel.rank,
        )

    def namespace(self) -> Namespace:
        """Name what all keys of this engine have in common."""
        config = self.config
        parallel = config.parallel
        groups = {f"{group.group_id}": group.tokens_per_block for group in config.groups}
        return Namespace(
            model=config.model.name,
            revision=self.settings.model_revision or None,
            layout_fingerprint=digest_fields({**groups, "bytes_per_block": config.worker_kv_bytes_per_block}),
            parallel_sizes={
                "tensor": parallel.tp_size,
                "pipeline": parallel.pp_size,
                "prefill_context": parallel.pcp_size,
                "decode_context": parallel.dcp_size,
            },
            extra={
                "engine": "vllm",
                "dtype": config.model.dtype,
                "kv_cache_layout": config.kv_cache_layout or "",
                "tokens_per_hash": config.cache.tokens_per_hash,
                "blocks_per_chunk": config.cache.blocks_per_chunk,
                # It hashes adapters by their name alone, all later ones with their path.
                "hashed_by": "0.30" if version_number(VLLM_VERSION) == "0.30" else "",
            },
        )


class KvmoorConnectorSpec(KvmoorSpec):
    """What `KvmoorConnector` runs on: it tells of failures and of ready slots itself."""

    failures_are_told: ClassVar[bool] = True

    def _keeps_one_copy(self) -> bool:
        # vLLM says so only of ranks that are all on one host.
        return bool(self.config.replicated_layout) and self.settings.one_copy == "auto"

    def _refuse_what_it_lacks(self) -> None:
        """Refuse nothing: the connector looks at vLLM's configuration itself."""

    def _host_status(self) -> HostStatus | None:
        """Return None: ranks report through the connector."""
