"""Which blocks are in host memory, in which slots, who uses them, and which give way.

    store:  prepare_store -> complete | abort | hold -> release_held
    load:   match (-> keep) (-> start_load) -> complete | abort
    wait:   join -> take_ended_waiters

Slots are counted, so that none can be lost (`SlotUsage`): published == free + writing + ready + outdated + draining +
held. Blocks are numbers in arrays by slot: a million of them are no objects that the collector has to walk.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from kvmoor.block_key import BlockKey
from kvmoor.errors import RequestError
from kvmoor.index.block_group import BlockGroup
from kvmoor.index.block_state import ABSENT, READY, WRITING, BlockState
from kvmoor.index.call_keys import as_sequence, keys_by_group
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.index_counts import IndexCounts
from kvmoor.index.lease import COMPLETED, Lease, LeasePart, LeaseState, LoadLease, StoreLease, StorePart
from kvmoor.index.lease_book import LeaseBook, check_deadline, check_hashable
from kvmoor.index.waiting import Waiter, WaitingList, WaitState
from kvmoor.transfer_messages import SlotRange


class BlockIndex(IndexCounts):
    """Map block keys to slots, for one process.

    Not thread-safe: every call is made under the coordinator's lock. It only decides: no call copies, waits or does
    I/O, and what time it is, it is told. A block is found (`match`, `lookup`) only from `complete` on, and a lease is
    resolved exactly once. Keys are fastest as `BlockKeys`.

    Raises `RequestError`, with nothing changed, for keys of a group that does not exist, a key named twice in one call,
    and a lease that is resolved already or belongs to another index. An empty list of keys is no error.
    """

    def __init__(self, num_groups: int, policy_factory: Callable[[], EvictionPolicy] = TailFirstLru) -> None:
        if num_groups < 1:
            raise RequestError(f"num_groups is {num_groups}: give the number of groups of the layout, 1 or more")
        super().__init__(BlockGroup(number, policy_factory) for number in range(num_groups))
        self._claims = LeaseBook()
        self._waiting = WaitingList()
        self._ended_waiters: list[Waiter] = []

    def __repr__(self) -> str:
        return (
            f"<BlockIndex: {self.num_published} slots, {self.num_ready} ready, {self.num_writing} writing, "
            f"{self.num_leased} leased, {len(self._claims)} leases open>"
        )

    def publish(self, slots: SlotRange) -> None:
        """Take slots into use. No slot may be published twice."""
        self._group(slots.group).publish(slots.first, slots.num_slots)

    def lookup(self, key: BlockKey) -> BlockState:
        """Return ABSENT, WRITING or READY: what there is of one block. The fastest way to ask, and changes nothing."""
        try:
            group = self._groups[key.group]
        except IndexError:
            raise self._no_such_group(key.group) from None
        slot = group.current.slot_of.get(key.digest)
        return ABSENT if slot is None else group.states[slot]

    def contains(self, key: BlockKey) -> bool:
        """Say whether a block is ready."""
        return self.lookup(key) is READY

    def match(self, keys: Sequence[BlockKey], *, holder: Hashable = None, deadline_s: float | None = None) -> LoadLease:
        """Lease the blocks of the longest prefix of `keys` that is ready throughout.

        It may be empty: an empty lease holds nothing, so nobody has to resolve it. One with a `holder` ends with
        `release_holder`, one with a `deadline_s` with the `expire` after it, if its load has not begun.
        """
        check_hashable(holder)
        check_deadline(deadline_s)
        keys = as_sequence(keys)
        calls = keys_by_group(keys, len(self._groups))
        found = [self._groups[call.group].find_prefix(call.digests) for call in calls]
        num_matched = min(
            (
                int(call.positions[len(slots)])
                for call, slots in zip(calls, found, strict=True)
                if len(slots) < len(call.digests)
            ),
            default=len(keys),
        )
        parts = []
        for call, slots in zip(calls, found, strict=True):
            count = int(np.searchsorted(call.positions, num_matched)) if len(calls) > 1 else len(slots)
            if count:
                group = self._groups[call.group]
                group.lease(slots[:count])
                parts.append(
                    LeasePart(call.group, call.digests[:count], slots[:count], call.positions[:count], group.current)
                )
        lease = LoadLease(self, parts, holder, deadline_s)
        if parts:
            self._claims.add(lease)
        return lease

    def touch(self, keys: Sequence[BlockKey]) -> int:
        """Count a use of those that are ready, without a lease; return how many there are."""
        num_ready = 0
        for call in keys_by_group(keys, len(self._groups)):
            ready = self._groups[call.group].ready_slots(call.digests)
            self._groups[call.group].policy.touch(ready)
            num_ready += len(ready)
        return num_ready

    def prepare_store(self, keys: Sequence[BlockKey]) -> StoreLease | None:
        """Reserve a slot for each key that is neither ready nor being written; the lease may be empty.

        Evicts what it has to, but nothing that is leased or named in `keys`. All or nothing over all groups: None if
        the slots do not suffice even so, and then nothing has changed and nothing was evicted. Name the known beginning
        of a prompt too: it then stays at least as long as the end that is stored now, and what an earlier call could
        not store is stored now.
        """
        keys = as_sequence(keys)
        calls = keys_by_group(keys, len(self._groups))
        plans = []
        for call in calls:
            plan = self._groups[call.group].plan_store(call.digests)
            if plan is None:
                return None
            plans.append(plan)
        parts: list[StorePart] = []
        evicted: list[tuple[int, Sequence[bytes]]] = []
        try:
            for call, plan in zip(calls, plans, strict=True):
                part, victims = self._groups[call.group].start_writing(plan, call.positions)
                parts.append(part)
                if len(victims):
                    self._num_evicted += len(victims)
                    evicted.append((call.group, victims))
        except BaseException:  # an eviction policy of somebody's own may raise
            for part in parts:
                self._groups[part.group].fail_writing(part, hold=False)
            raise
        lease = StoreLease(self, parts, call_keys=keys, evicted=evicted)
        self._claims.add(lease)
        return lease

    def start_load(self, lease: LoadLease) -> None:
        """Note that a load reads the slots: from now on the lease ends with `complete` or `abort` only."""
        self._check_open(lease)
        if not isinstance(lease, LoadLease):
            raise RequestError(f"{lease!r} is a store's: only what `match` returned can be loaded")
        lease.in_flight = True

    def cancel_load(self, lease: LoadLease) -> None:
        """Undo `start_load`: the load was never begun. What would have ended the lease meanwhile ends it now."""
        self._check_open(lease)
        lease.in_flight = False
        if lease.ends_with_load:
            self.abort(lease)

    def keep(self, lease: Lease, num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks of a match; used through `LoadLease.keep`."""
        self._check_open(lease)
        if not isinstance(lease, LoadLease):
            raise RequestError(f"{lease!r} is a store's: it is completed or aborted as a whole")
        if lease.in_flight:
            raise RequestError(f"{lease!r} is being loaded: keep less of it before")
        if type(num_blocks) is not int or not 0 <= num_blocks <= len(lease):
            raise RequestError(f"{lease!r} cannot keep {num_blocks!r}: give 0 to {len(lease)}")
        kept = []
        for part in lease.parts:
            head, tail = part.split(num_blocks)  # a match covers the first keys of its call
            self._groups[part.group].unlease(tail)
            if len(head):
                kept.append(head)
        lease.parts = kept
        if not kept:
            self._claims.remove(lease)

    def complete(self, lease: Lease) -> int:
        """Make the blocks of a store ready, or release those of a load. Returns how many blocks became ready.

        A block that was forgotten while its store ran does not become ready; its slot is free again.
        """
        self._resolve(lease, COMPLETED)
        if not isinstance(lease, StoreLease):
            self._unlease(lease)
            return 0
        num_ready = 0
        for part in lease.parts:
            num_ready += self._groups[part.group].finish_writing(part)
        self._end_waiting(lease)
        return num_ready

    def abort(self, lease: Lease) -> None:
        """Give up a store of which no copy is running, or release a load: the slots are free again, the keys absent."""
        self._resolve(lease, LeaseState.ABORTED)
        if not isinstance(lease, StoreLease):
            self._unlease(lease)
            return
        for part in lease.parts:
            self._groups[part.group].fail_writing(part, hold=False)
        self._end_waiting(lease)

    def hold(self, lease: StoreLease) -> None:
        """Give up a store whose copy may still be running: the slots stay out of use until `release_held`.

        Its keys are absent at once. There is no such thing for a load: as long as its copy may run, it stays leased.
        """
        self._check_store(lease)
        self._resolve(lease, LeaseState.HELD)
        for part in lease.parts:
            self._groups[part.group].fail_writing(part, hold=True)
        self._end_waiting(lease)

    def release_held(self, lease: StoreLease) -> None:
        """Free the slots of a held store: its copy is proven over. The blocks stay absent."""
        self._check_store(lease)
        if lease.state is not LeaseState.HELD:
            raise RequestError(f"{lease!r} is not held: release_held() follows hold(), once")
        lease.state = LeaseState.RELEASED
        for part in lease.parts:
            self._groups[part.group].release_held(part.slots)

    def join(
        self,
        keys: Sequence[BlockKey],
        *,
        holder: Hashable = None,
        deadline_s: float | None = None,
        lease_deadline_s: float | None = None,
    ) -> Waiter:
        """Wait for those of the first `keys` that are being written: one transfer serves all who want its blocks.

        Leases what is ready before them. The waiter comes out of `take_ended_waiters` when all those transfers have
        ended, well or not, or when its deadline has passed; one that has nothing to wait for is READY at once and does
        not. It has a lease then, of as much as there is, which the caller resolves, or `lease_deadline_s` does if no
        load has begun by then. Keys that are absent, and all behind them, are not waited for.
        """
        check_hashable(holder)
        check_deadline(deadline_s)
        check_deadline(lease_deadline_s)
        keys = as_sequence(keys)
        calls = keys_by_group(keys, len(self._groups))
        found = [self._groups[call.group].slots_of(call.digests) for call in calls]
        num_coming = len(keys)
        for call, slots in zip(calls, found, strict=True):
            absent = call.positions[slots < 0]
            num_coming = min(num_coming, int(absent[0])) if len(absent) else num_coming
        coming = keys[:num_coming]
        lease = self.match(coming, holder=holder, deadline_s=lease_deadline_s)
        waiter = Waiter(coming, lease, holder, deadline_s, lease_deadline_s)
        for call, slots in zip(calls, found, strict=True):
            some = slots[call.positions < num_coming]
            writing = some[self._groups[call.group].states.are(some, WRITING)]
            self._waiting.add(waiter, call.group, writing)
        if waiter.num_pending:
            self._claims.add(waiter)
        else:
            waiter.state = WaitState.READY
        return waiter

    def take_ended_waiters(self) -> list[Waiter]:
        """Return those whose waiting has ended since the last call, in that order, but not if their lease has too."""
        ended, self._ended_waiters = self._ended_waiters, []
        return [waiter for waiter in ended if not waiter.lease.resolved]

    def release_holder(self, holder: Hashable) -> int:
        """Release what a holder has: its matches whose loads have not begun, and its waiting. Returns how many."""
        check_hashable(holder)
        num_released = 0
        for claim in self._claims.of_holder(holder):
            num_released += self._give_back(claim, LeaseState.ABORTED, WaitState.CANCELLED)
        return num_released

    def expire(self, now_s: float) -> int:
        """Release matches and end the waiting whose deadline is not after `now_s`. Returns how many."""
        num_expired = 0
        for claim in self._claims.take_due(now_s):
            num_expired += self._give_back(claim, LeaseState.EXPIRED, WaitState.EXPIRED)
        return num_expired

    def forget(self, keys: Sequence[BlockKey]) -> int:
        """Let nobody find these blocks any more, in whichever state they are. Returns how many ready ones were dropped.

        Loads that lease them finish undisturbed and stores in flight go on; each slot is free once nothing uses it.
        """
        calls = keys_by_group(keys, len(self._groups))
        return sum(self._groups[call.group].drop(call.digests) for call in calls)

    def reset(self) -> int:
        """Let nobody find any block any more, stores in flight included. Returns how many were ready. Costs O(1).

        Nothing is freed now: the blocks of before are the first to give way when room is needed.
        """
        num_ready = sum(group.reset() for group in self._groups)
        for waiter in self._waiting.clear():
            self._end_waiter(waiter, WaitState.PARTIAL)
        return num_ready

    def enter_device(self, keys: Sequence[BlockKey]) -> None:
        """Note that the device's own cache holds these blocks too, so that a policy may prefer to evict them here.

        Blocks that are not ready here are left out; tell of them once they are.
        """
        for call in keys_by_group(keys, len(self._groups)):
            group = self._groups[call.group]
            group.policy.enter_device(group.ready_slots(call.digests))

    def leave_device(self, keys: Sequence[BlockKey]) -> None:
        """Note that the device's own cache has dropped these blocks just now: from now on this is the only copy."""
        for call in keys_by_group(keys, len(self._groups)):
            group = self._groups[call.group]
            group.policy.leave_device(group.ready_slots(call.digests))

    def unresolved_leases(self) -> list[Lease]:
        """Return the leases that nobody has resolved, oldest first."""
        return self._claims.leases()

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance; for tests. Costs O(slots).

        For each group:
        - published == free + writing + ready + outdated + draining + held;
        - a key leads to a WRITING or READY slot, no two keys to one, and each READY slot of this generation has a key;
        - the lease count of a slot is the number of open leases that cover it; 1 while WRITING, 0 if ABSENT or FAILED;
        - the policy holds exactly the READY blocks of this generation without a lease.
        """
        covered: list[dict[int, int]] = [{} for _ in self._groups]
        for lease in self._claims.leases():
            assert not lease.resolved, lease
            for part in lease.parts:
                for slot in part.slots.tolist():
                    covered[part.group][slot] = covered[part.group].get(slot, 0) + 1
        for group, counts in zip(self._groups, covered, strict=True):
            group.check_invariants(counts)
        assert all(waiter.num_pending for waiter in self._claims.waiters()), "somebody waits for nothing"

    def _unlease(self, lease: Lease) -> None:
        for part in lease.parts:
            self._groups[part.group].unlease(part)

    def _give_back(self, claim: Lease | Waiter, lease_state: LeaseState, wait_state: WaitState) -> bool:
        """End a claim whose holder or whose time has gone; say whether it could be ended."""
        if isinstance(claim, Waiter):
            self._waiting.remove(claim)
            self._end_waiter(claim, wait_state)
            return True
        if claim.in_flight:
            claim.ends_with_load = True  # its copy touches the slots, until a report says otherwise
            return False
        self._resolve(claim, lease_state)
        self._unlease(claim)
        return True

    def _end_waiting(self, lease: StoreLease) -> None:
        """Let those go on who waited for nothing but this store."""
        if not self._waiting:
            return
        for part in lease.parts:
            for waiter in self._waiting.end(part.group, part.slots):
                self._end_waiter(waiter, WaitState.PARTIAL)

    def _end_waiter(self, waiter: Waiter, state: WaitState) -> None:
        """End a waiter, with a lease of as much as there is; READY if that is all."""
        self._claims.remove(waiter)
        before = waiter.lease
        if state is not WaitState.CANCELLED:
            waiter.lease = self.match(waiter.keys, holder=waiter.holder, deadline_s=waiter.lease_deadline_s)
            if len(waiter.lease) == len(waiter.keys):
                state = WaitState.READY
            self._ended_waiters.append(waiter)
        waiter.state = state
        if before.in_flight:
            before.ends_with_load = True
        elif len(before) and not before.resolved:
            self.abort(before)

    def _resolve(self, lease: Lease, state: LeaseState) -> None:
        self._check_open(lease)
        self._claims.remove(lease)  # an empty match is not kept
        lease.state = state
        lease.in_flight = False

    def _check_open(self, lease: Lease) -> None:
        self._check_owner(lease)
        if lease.resolved:
            raise RequestError(f"{lease!r} {lease.state.value} already: a lease is resolved once, by its one owner")

    def _check_store(self, lease: object) -> None:
        self._check_owner(lease)
        if not isinstance(lease, StoreLease):
            raise RequestError(
                f"{lease!r} is a load's: it stays leased until its copy is over, then complete or abort it"
            )

    def _check_owner(self, lease: object) -> None:
        if not isinstance(lease, Lease) or lease.owner is not self:
            raise RequestError(f"{lease!r} is not a lease of this index: resolve it with the index that gave it")
