"""What vLLM's scheduler asks: its types on one side, `SchedulerSide` on the other."""

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

from kvmoor.index.block_state import READY, WRITING
from kvmoor.integrations.vllm import metrics
from kvmoor.integrations.vllm.compatibility import (
    TELLS_OF_FLUSHED_RESETS,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from kvmoor.integrations.vllm.host_status import HostStatus
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide


class KvmoorManager(OffloadingManager):  # type: ignore[misc]  # vLLM counts as untyped
    """Answer the scheduler of vLLM. Called by its one thread."""

    lock: ClassVar[Any] = nullcontext()  # vLLM 0.33 enters it; there is only one thread

    def __init__(self, side: SchedulerSide, host_status: HostStatus | None) -> None:
        self.side = side
        self._host_status = host_status
        self._stores: dict[frozenset[bytes], HostSlots] = {}  # only to ask `host_status` about them
        self._awaits_flush = False

    def on_new_request(self, _req_context: Any) -> Any:
        """Offload chunks of a request as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, _req_context: Any) -> Any:
        """Say whether a chunk can be loaded, may be soon, or is not there."""
        state = self.side.lookup(key)
        if state is READY:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if state is WRITING else LookupResult.MISS

    def get_load_source(self, _key: bytes, _req_context: Any) -> str:
        """Name where a hit came from, for vLLM's figures (a member of its enum by value; 0.30 and 0.31 have none)."""
        return "host"

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> HostSlots:
        """Lease chunks that were a HIT in this step."""
        return self.side.prepare_load(req_context.req_id, list(keys))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Give the lease up."""
        self._derive_flush()
        self.side.complete_load(req_context.req_id, keys)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Give slots to what is not stored yet; None while there are none to give: vLLM asks again next step."""
        self._look_at_ranks()
        prepared = self.side.prepare_store(req_context.req_id, list(keys))
        if prepared is None:
            return None
        if self._host_status is not None and prepared.keys:
            self._stores[frozenset(prepared.keys)] = prepared.slots
        return PrepareStoreOutput(prepared.keys, prepared.slots, prepared.evicted)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Let chunks be found if every rank stored them whole."""
        self._derive_flush()
        slots = self._stores.pop(frozenset(keys), None)
        if not success or (slots is not None and self._host_status and not self._host_status.vouches_for(slots)):
            self.side.note_failed([self.side.running_store(req_context.req_id, keys)])
        self.side.complete_store(req_context.req_id, keys)

    def on_schedule_end(self, _context: Any) -> None:
        """Give up stores that take too long; vLLM calls it once a step."""
        self.side.give_up_overdue_stores()

    def touch(self, _keys: Collection[bytes], _req_context: Any) -> None:
        """Do nothing: uses count when they are loaded or offered again."""

    def take_events(self) -> Iterable[Any]:
        """Return what was stored and removed since the last call."""
        return [
            OffloadingEvent(keys=event.keys, medium=Medium.CPU, removed=event.removed)
            for event in self.side.events.take()
        ]

    def get_stats(self) -> Any:
        """Return the figures since the last call."""
        return metrics.collect(self.side)

    def reset_cache(self) -> None:
        """Forget everything; slots in use stay out of use until `on_reset_flushed`."""
        self._stores.clear()
        self.side.reset()
        self._awaits_flush = self._host_status is not None and not TELLS_OF_FLUSHED_RESETS

    def on_reset_flushed(self) -> None:
        """Take the slots of before the reset back into use."""
        self.side.note_reset_flushed()

    def shutdown(self) -> None:
        """Let go of what was mapped; takes no time."""
        if self._host_status is not None:
            self._host_status.close()

    def _derive_flush(self) -> None:
        """Take the first job that is complete since a reset for the end of all jobs from before it, if nobody tells.

        Every rank waits for those before it begins anything that was decided later.
        """
        if self._awaits_flush:
            self._awaits_flush = False
            self.on_reset_flushed()

    def _look_at_ranks(self) -> None:
        if self._host_status is None:
            return
        self.side.publish(self._host_status.take_published())
        if (num_slots := self._host_status.num_slots) is not None:
            self.side.limit(num_slots)
