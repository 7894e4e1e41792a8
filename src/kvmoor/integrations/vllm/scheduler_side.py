"""The scheduler's half of the plugin: vLLM's keys and jobs on one side, the `Coordinator` on the other.

    lookup -> prepare_load  -> (a rank fails: note_failed) -> complete_load
              prepare_store -> (a rank fails: note_failed) -> complete_store

vLLM names jobs by request and keys and cannot say that one failed. So every order is remembered under that name until
vLLM completes it, which is when all ranks have reported it, and what failed meanwhile is noted here.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_key import BlockKey
from kvmoor.coordinator import Coordinator
from kvmoor.index.block_state import ABSENT, READY, WRITING, BlockState
from kvmoor.integrations.vllm.chunk_events import ChunkEvents
from kvmoor.integrations.vllm.keys import ChunkKeys
from kvmoor.integrations.vllm.messages import NOT_COPIED, HostSlots
from kvmoor.integrations.vllm.slot_tally import SlotTally
from kvmoor.transfer_messages import Order, OrderId, OrderKind, Outcome, Report, SlotRange

_JobName = tuple[OrderKind, str, frozenset[bytes]]


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """Say which of the chunks asked for are to be copied, and to where. None of them: all are known."""

    keys: list[bytes]
    slots: HostSlots
    evicted: list[bytes] = field(default_factory=list)
    """Chunks that gave way; only known while events are wanted."""


@dataclass(slots=True)
class PluginCounts:
    """Count since they were last taken."""

    failed_loads: int = 0
    failed_stores: int = 0
    declined_stores: int = 0
    evicted_blocks: int = 0


class SchedulerSide:
    """Decide what vLLM's scheduler asks. One thread at a time; no call waits, copies or asks a worker.

    `num_ranks` workers each hold their own part of every block, further ranks none. A block is found only once all of
    them have stored theirs, and slots are handed out only once all of them have them. A store that they have not all
    reported after `job_timeout_s` is given up: a request that wants its blocks would wait for it. `events` tells what
    was stored and removed.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        keys: ChunkKeys,
        *,
        num_groups: int,
        num_ranks: int,
        job_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.events = ChunkEvents()
        self._coordinator = coordinator
        self._keys = keys
        self._num_groups = num_groups
        self.num_ranks: Final = num_ranks
        self._tally = SlotTally(num_ranks)
        self._capacity: tuple[int, ...] | None = None
        self._open: dict[_JobName, _OpenOrder] = {}
        self._by_id: dict[OrderId, _OpenOrder] = {}
        self._from_before_reset: list[_OpenOrder] = []
        self._job_timeout_s = job_timeout_s
        self._clock = clock
        self._counts = PluginCounts()

    @property
    def coordinator(self) -> Coordinator:
        """Return who keeps the books, for its numbers."""
        return self._coordinator

    def publish(self, ranges: Iterable[SlotRange]) -> None:
        """Take note of slots that one rank has made ready, each once."""
        self._coordinator.publish(self._tally.add(ranges))

    def limit(self, num_slots: Sequence[int]) -> None:
        """Take note of how many slots each group will have in the end: the least of all ranks."""
        self._capacity = tuple(num_slots)

    def lookup(self, offload_key: bytes) -> BlockState:
        """Say what there is of a chunk: READY if it can be loaded, WRITING if a store will decide. Takes microseconds.

        A READY chunk stays so until the step's `prepare_load`: nothing is evicted before its stores are prepared.
        """
        found = READY
        for key in self._keys.of(offload_key):
            state = self._coordinator.lookup(key)
            if state is ABSENT:
                return ABSENT
            if state is WRITING:
                found = WRITING
        return found

    def prepare_load(self, request: str, offload_keys: Sequence[bytes]) -> HostSlots:
        """Lease chunks that are READY, and say where they are."""
        keys = [key for offload_key in offload_keys for key in self._keys.of(offload_key)]
        lease = self._coordinator.match(keys)
        if len(lease) != len(keys):
            self._coordinator.release(lease)
            raise AssertionError(f"{len(lease)} of {len(keys)} blocks are there that were looked up in this step")
        order = self._coordinator.prepare_load(lease)
        self._remember(order, request, offload_keys, keys)
        return HostSlots(order.order_id, self._slots_of(order))

    def prepare_store(self, request: str, offload_keys: Sequence[bytes]) -> PreparedStore | None:
        """Give slots to the blocks of chunks that are not known yet; None if there are none to give for now.

        Of a prompt longer than host memory as much is taken as will ever fit.
        """
        offload_keys = self._fitting(offload_keys)
        blocks = [self._keys.of(offload_key) for offload_key in offload_keys]
        decision = self._coordinator.prepare_store([key for keys in blocks for key in keys])
        if decision.declined:
            self._counts.declined_stores += len(offload_keys)
            return None
        if decision.order is None:
            return PreparedStore([], HostSlots(OrderId(0), self._slots_of(None)))
        evicted = self.events.note_evicted(decision.evicted)
        self._counts.evicted_blocks += sum(len(digests) for _, digests in decision.evicted)
        chunks = dict(zip(offload_keys, blocks, strict=True))
        new_keys, slots = self._slots_of_new_blocks(chunks, decision.order, decision.positions)
        if (decision.order.kind, request, frozenset(new_keys)) in self._open:
            # A store of the same name has failed and is not over: vLLM could not say which of the two it completes.
            self._coordinator.withdraw(decision.order.order_id)
            self._counts.declined_stores += len(offload_keys)
            return None
        self._remember(decision.order, request, list(new_keys), [key for keys in new_keys.values() for key in keys])
        return PreparedStore(list(new_keys), HostSlots(decision.order.order_id, slots), evicted)

    def complete_load(self, request: str, offload_keys: Collection[bytes]) -> None:
        """Give up the lease of a load that every rank has reported."""
        self._complete(OrderKind.SLOT_TO_DEVICE, request, offload_keys)

    def complete_store(self, request: str, offload_keys: Collection[bytes]) -> None:
        """Let the chunks of a store be found, which every rank has reported, unless one of them failed."""
        order = self._complete(OrderKind.DEVICE_TO_SLOT, request, offload_keys)
        if order.outcome is Outcome.DONE:
            self.events.note_stored((name, self._keys.of(name)) for name in order.chunks)

    def note_failed(self, order_ids: Iterable[int]) -> None:
        """Take note that an order failed on some rank. What it was to load is in doubt, and is not found from now on.

        Nobody finds or waits for its blocks from now on. Its slots stay out of use until vLLM completes it: other ranks
        may still be copying. Orders from before a reset are of no interest any more.
        """
        for order_id in order_ids:
            order = self._by_id.get(OrderId(order_id))
            if order is None or order.outcome is Outcome.FAILED:
                continue
            order.outcome = Outcome.FAILED
            if order.kind is OrderKind.DEVICE_TO_SLOT:
                self._counts.failed_stores += 1
                self._report(order, Outcome.ABANDONED)
            else:
                self._counts.failed_loads += 1
                self._coordinator.forget(order.keys)
                self.events.note_dropped(order.chunks)

    def give_up_overdue_stores(self) -> None:
        """Let nobody wait any more for stores that ranks have not reported in time; to be called once a step."""
        before_s = self._clock() - self._job_timeout_s
        self.note_failed(
            [
                order.order_id
                for order in self._open.values()
                if order.begun_s < before_s and order.kind is OrderKind.DEVICE_TO_SLOT
            ]
        )

    def note_left_device(self, block_keys: Iterable[bytes]) -> None:
        """Take note that vLLM's own cache has dropped device blocks just now, of one prompt the first one first.

        `block_keys` are their hashes with the number of the group, as keys of chunks. A chunk of several blocks counts
        as dropped with its last block, whose hash is its own.
        """
        for keys in self._keys.of_last_blocks(block_keys):
            self._coordinator.leave_device(keys)

    def running_store(self, request: str, offload_keys: Collection[bytes]) -> OrderId:
        """Return the order of a store that vLLM has not completed yet."""
        return self._open[OrderKind.DEVICE_TO_SLOT, request, frozenset(offload_keys)].order_id

    def reset(self) -> None:
        """Let nobody find any block any more, stores in flight included.

        vLLM completes no order of before; their slots are free again with `note_reset_flushed`.
        """
        self._coordinator.reset()
        self._keys.next_epoch()
        self.events.clear()
        self._from_before_reset += self._open.values()
        self._open.clear()
        self._by_id.clear()

    def note_reset_flushed(self) -> None:
        """Take note that no rank works on anything from before the last reset any more."""
        for order in self._from_before_reset:
            self._report_end(order, Outcome.FAILED)
        self._from_before_reset.clear()

    def take_counts(self) -> PluginCounts:
        """Return what happened since the last call."""
        counts, self._counts = self._counts, PluginCounts()
        return counts

    def _fitting(self, offload_keys: Sequence[bytes]) -> Sequence[bytes]:
        """Leave out of each group what is more than host memory holds, from the end."""
        if self._capacity is None or len(offload_keys) * self._keys.blocks_per_chunk <= min(self._capacity):
            return offload_keys
        left = list(self._capacity)
        fitting = []
        for offload_key in offload_keys:
            keys = self._keys.of(offload_key)
            left[keys[0].group] -= len(keys)
            if left[keys[0].group] >= 0:
                fitting.append(offload_key)
        return fitting

    def _slots_of_new_blocks(
        self, chunks: dict[bytes, tuple[BlockKey, ...]], order: Order, positions: dict[int, NDArray[np.intp]]
    ) -> tuple[dict[bytes, list[BlockKey]], tuple[NDArray[np.int32], ...]]:
        """Return which blocks of which chunks a store fills, and their slots in the form of `HostSlots`.

        `positions` says where the blocks of the order stand among all blocks of their group, chunk after chunk.
        """
        parts = {part.group: part.slots for part in order.parts}
        new_keys: dict[bytes, list[BlockKey]] = {}
        all_slots = []
        for group in range(self._num_groups):
            names = [name for name, keys in chunks.items() if keys[0].group == group]
            slots = np.full((len(names), self._keys.blocks_per_chunk), NOT_COPIED, np.int32)
            slots.ravel()[positions.get(group, [])] = parts.get(group, ())
            is_new = slots != NOT_COPIED
            all_slots.append(slots[is_new.any(axis=1)].ravel())
            for row in np.flatnonzero(is_new.any(axis=1)):
                name = names[row]
                new_keys[name] = [key for key, new in zip(chunks[name], is_new[row], strict=True) if new]
        return new_keys, tuple(all_slots)

    def _slots_of(self, order: Order | None) -> tuple[NDArray[np.int32], ...]:
        parts = {} if order is None else {part.group: part.slots for part in order.parts}
        return tuple(np.array(parts.get(group, ()), np.int32) for group in range(self._num_groups))

    def _remember(self, order: Order, request: str, chunks: Sequence[bytes], keys: list[BlockKey]) -> None:
        name = (order.kind, request, frozenset(chunks))
        assert name not in self._open, f"request {request} has this {order.kind.value} in flight already"
        opened = _OpenOrder(order.order_id, order.kind, tuple(chunks), keys, self._clock())
        self._open[name] = self._by_id[order.order_id] = opened

    def _complete(self, kind: OrderKind, request: str, offload_keys: Collection[bytes]) -> "_OpenOrder":
        order = self._open.pop((kind, request, frozenset(offload_keys)))
        del self._by_id[order.order_id]
        self._report_end(order, order.outcome)
        return order

    def _report_end(self, order: "_OpenOrder", outcome: Outcome) -> None:
        """Tell that no rank works on an order any more."""
        has_failed_before = order.kind is OrderKind.DEVICE_TO_SLOT and order.outcome is Outcome.FAILED
        self._report(order, Outcome.SETTLED if has_failed_before else outcome)

    def _report(self, order: "_OpenOrder", outcome: Outcome) -> None:
        self._coordinator.handle_report(Report(order.order_id, order.kind, outcome, nbytes=0, seconds=0.0))


@dataclass(slots=True)
class _OpenOrder:
    """An order that vLLM has not completed: what it is about, and how it ends unless a rank says otherwise."""

    order_id: OrderId
    kind: OrderKind
    chunks: tuple[bytes, ...]
    keys: list[BlockKey]
    begun_s: float
    outcome: Outcome = Outcome.DONE
