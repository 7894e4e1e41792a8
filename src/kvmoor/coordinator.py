"""The half that decides: which blocks are stored, where, and what may be seen. It moves no bytes.

    match / prepare_store / prepare_load   ->  orders for the worker
    handle_report                          <-  what became of them

Nothing becomes visible before it is proven: a stored block can be found only after the report that says it is whole.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_key import BlockKey
from kvmoor.deadlines import checked_timeout
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.eviction.policies import EvictionChoice, policy_factory
from kvmoor.index.lease import LoadLease, StoreLease
from kvmoor.index.waiting import Waiter
from kvmoor.observation import BlocksEvicted, Observer, SilentObserver, StoreDeclined, notify
from kvmoor.process_end import register
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome, Report, SlotRange


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """Say what becomes of a store.

    `order` is None if nothing has to be copied: all blocks are known, or `declined` says why none was taken.
    `positions` gives for each part of the order where its blocks stand among the keys of that group in the call.
    """

    order: Order | None
    positions: dict[int, NDArray[np.intp]]
    num_known: int
    declined: str = ""
    evicted: Sequence[tuple[int, Sequence[bytes]]] = ()
    """What gave way: groups, and digests of their blocks."""


@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """Numbers of blocks: slots (`published`) and their use now, from `evicted` on totals since the start."""

    published: int
    ready: int
    writing: int
    leased: int
    held: int
    evicted: int
    stored: int
    loaded: int
    declined: int
    unknown_reports: int


class Coordinator:
    """Decide about blocks. Any thread may call; every method holds one lock for bookkeeping only and never waits."""

    def __init__(
        self,
        num_groups: int,
        *,
        observer: Observer | None = None,
        eviction: EvictionChoice = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._observer = observer or SilentObserver()
        # Guards the index, the orders and the counters.
        self._lock = threading.Lock()
        self._num_groups = num_groups
        self._index = BlockIndex(num_groups, policy_factory(eviction))
        self._orders: dict[OrderId, StoreLease | LoadLease] = {}
        register(self, forked=self._forked)
        self._last_order_id = 0
        self._stored = self._loaded = self._declined = self._unknown_reports = 0

    def _forked(self) -> None:
        """Know nothing in a forked child: blocks and leases are the parent's, and perhaps caught in mid-change."""
        self._lock = threading.Lock()
        self._index = BlockIndex(self._num_groups)
        self._orders = {}

    def publish(self, ranges: Iterable[SlotRange]) -> None:
        """Take slots into use that the worker has made ready."""
        with self._lock:
            for slot_range in ranges:
                self._index.publish(slot_range)

    def prepare_store(self, keys: Sequence[BlockKey]) -> StoreDecision:
        """Reserve slots for the blocks that are not known yet, all of them or none; evicts others if it has to.

        The order has to be resolved: by `handle_report`, or by `withdraw` if it was never submitted. Raises
        `RequestError` for duplicate keys or a group that does not exist.
        """
        with self._lock:
            lease = self._index.prepare_store(keys)
            if lease is None:
                self._declined += len(keys)
                decision = StoreDecision(None, {}, 0, declined=self._why_no_room())
            elif not len(lease):
                self._index.complete(lease)
                decision = StoreDecision(None, {}, lease.num_known)
            else:
                order = self._order(OrderKind.DEVICE_TO_SLOT, lease)
                decision = StoreDecision(order, _positions(lease), lease.num_known, evicted=lease.evicted)
        if lease is None:
            notify(self._observer, StoreDeclined(len(keys), decision.declined))
        elif lease.num_evicted:
            notify(self._observer, BlocksEvicted(lease.num_evicted))
        return decision

    def match(self, keys: Sequence[BlockKey], *, request: Hashable = None, timeout_s: float | None = None) -> LoadLease:
        """Lease the longest prefix of `keys` that can be loaded now; may be empty. Raises as `prepare_store` does.

        It is released by `finish_request` of its `request`, and if its load has not begun within `timeout_s`.
        """
        if timeout_s is not None:
            timeout_s = checked_timeout(timeout_s, option="timeout_s")
        with self._lock:
            self._index.expire(now := self._clock())
            return self._index.match(keys, holder=request, deadline_s=None if timeout_s is None else now + timeout_s)

    def join(self, keys: Sequence[BlockKey], *, request: Hashable, timeout_s: float) -> Waiter:
        """Wait for blocks that are being written, at most so long; see `BlockIndex.join`.

        What is there in the end is leased for as long again, for its load to begin.
        """
        timeout_s = checked_timeout(timeout_s, option="timeout_s")
        with self._lock:
            self._index.expire(now := self._clock())
            return self._index.join(
                keys, holder=request, deadline_s=now + timeout_s, lease_deadline_s=now + 2 * timeout_s
            )

    def take_ended_waiters(self) -> list[Waiter]:
        """Return those whose waiting has ended since the last call, past deadlines included."""
        with self._lock:
            self._index.expire(self._clock())
            return self._index.take_ended_waiters()

    def finish_request(self, request: Hashable) -> int:
        """Release what a request holds that ended or was aborted; return how many claims. Loads under way go on.

        A request that is not known holds nothing.
        """
        with self._lock:
            return self._index.release_holder(request)

    def lookup(self, key: BlockKey) -> BlockState:
        """Return ABSENT, WRITING or READY: what there is of one block, without leasing it."""
        with self._lock:
            return self._index.lookup(key)

    def forget(self, keys: Sequence[BlockKey]) -> int:
        """Let nobody find blocks any more whose bytes are in doubt; return how many ready ones were dropped."""
        with self._lock:
            return self._index.forget(keys)

    def touch(self, keys: Sequence[BlockKey]) -> int:
        """Count a use of blocks that the engine did not have to load; return how many of them are stored."""
        with self._lock:
            return self._index.touch(keys)

    def enter_device(self, keys: Sequence[BlockKey]) -> None:
        """Take note that the engine's own cache holds these blocks as well."""
        with self._lock:
            self._index.enter_device(keys)

    def leave_device(self, keys: Sequence[BlockKey]) -> None:
        """Take note that the engine's own cache has dropped these blocks."""
        with self._lock:
            self._index.leave_device(keys)

    def is_free(self, lease: LoadLease) -> bool:
        """Say whether a match can still be loaded: nobody has released it, and no order holds it."""
        with self._lock:
            return self._is_free(lease)

    def keep(self, lease: LoadLease, num_blocks: int) -> None:
        """Give back all but the first `num_blocks` blocks of a match that is free."""
        with self._lock:
            self._check_free(lease)
            lease.keep(num_blocks)

    def release(self, lease: LoadLease) -> None:
        """Give back a match; does nothing if it is not free."""
        with self._lock:
            if self._is_free(lease):
                self._index.abort(lease)

    def prepare_load(self, lease: LoadLease) -> Order:
        """Turn a match that is free into an order, which then holds the lease. Resolved like that of a store."""
        with self._lock:
            self._check_free(lease)
            self._index.start_load(lease)
            return self._order(OrderKind.SLOT_TO_DEVICE, lease)

    def withdraw(self, order_id: OrderId) -> None:
        """Undo an order that was never submitted: nothing of a store becomes visible, and a match is free again."""
        with self._lock:
            lease = self._orders.pop(order_id, None)
            if isinstance(lease, StoreLease):
                self._index.abort(lease)
            elif lease is not None:
                self._index.cancel_load(lease)

    def handle_report(self, report: Report) -> int:
        """Act on the end of an order and return how many blocks it had; unknown orders are counted and ignored."""
        with self._lock:
            lease = self._orders.get(report.order_id)
            if lease is None:
                self._unknown_reports += 1
                return 0
            if report.outcome is not Outcome.ABANDONED:
                del self._orders[report.order_id]
            if isinstance(lease, StoreLease):
                self._end_store(lease, report.outcome)
            else:
                self._end_load(lease, report.outcome)
            return len(lease)

    def reset(self, *, keep: bool = False) -> None:
        """Let nobody find any block any more, stores in flight included; costs the same however many there are.

        Running copies keep their slots until they end. `keep`: the blocks are still right (the engine only slept, say),
        so do nothing: stores in flight become visible too.
        """
        if keep:
            return
        with self._lock:
            self._index.reset()

    def unresolved_keys(self) -> list[BlockKey]:
        """Return the keys of all leases that nobody has resolved."""
        with self._lock:
            return [key for lease in self._index.unresolved_leases() for key in lease.keys]

    def statistics(self) -> CoordinatorStatistics:
        """Return how many blocks are where."""
        with self._lock:
            return CoordinatorStatistics(
                published=self._index.num_published,
                ready=self._index.num_ready,
                writing=self._index.num_writing,
                leased=self._index.num_leased,
                held=self._index.num_held,
                evicted=self._index.num_evicted,
                stored=self._stored,
                loaded=self._loaded,
                declined=self._declined,
                unknown_reports=self._unknown_reports,
            )

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance; for tests."""
        with self._lock:
            self._index.check_invariants()

    def _is_free(self, lease: LoadLease) -> bool:
        # In a forked child the index is a new one, so that no match of the parent's is free there.
        return lease.owner is self._index and not lease.resolved and not lease.in_flight

    def _check_free(self, lease: LoadLease) -> None:
        if lease.owner is not self._index:
            raise RequestError("this match is of another offloader: load it with the one that gave it")
        if not self._is_free(lease):
            raise RequestError("this match was loaded or released already: match the keys anew")

    def _order(self, kind: OrderKind, lease: StoreLease | LoadLease) -> Order:
        self._last_order_id += 1
        parts = tuple(OrderPart(part.group, tuple(part.slots.tolist())) for part in lease.parts if len(part))
        order = Order(OrderId(self._last_order_id), kind, parts)
        self._orders[order.order_id] = lease
        return order

    def _end_store(self, lease: StoreLease, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self._stored += self._index.complete(lease)
        elif outcome is Outcome.FAILED:
            self._index.abort(lease)
        elif outcome is Outcome.ABANDONED:
            self._index.hold(lease)
        else:
            self._index.release_held(lease)

    def _end_load(self, lease: LoadLease, outcome: Outcome) -> None:
        if outcome is Outcome.ABANDONED:
            return  # the copy may still read the slots, so the lease stays
        if outcome is Outcome.DONE:
            self._loaded += len(lease)
        self._index.complete(lease)

    def _why_no_room(self) -> str:
        if self._index.num_published == 0:
            return "no slot is ready yet: host memory is still being mapped"
        return (
            f"no room: {self._index.num_leased} blocks are being loaded and {self._index.num_writing} stored, "
            "and what is left does not suffice: raise host_memory or store fewer blocks at once"
        )


def _positions(lease: StoreLease) -> dict[int, NDArray[np.intp]]:
    """Return for each group where its blocks that are stored stand among all its blocks of the call."""
    return {part.group: part.new_at for part in lease.parts if len(part)}
