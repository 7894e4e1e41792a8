"""Which blocks are in host memory, in which slots, who uses them, and which give way.

    store:  prepare_store -> complete | abort | hold -> release_held
    load:   match (-> keep) -> complete | abort

Slots are counted, so that none can be lost (`SlotUsage`): published == free + writing + ready + draining + held.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvmoor.block_key import BlockKey
from kvmoor.errors import RequestError
from kvmoor.index.block_group import BlockGroup, SlotUsage, StorePlan
from kvmoor.index.block_state import BlockState
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.lease import Lease, LeaseState, LoadLease, StoreLease
from kvmoor.transfer_messages import SlotRange


class BlockIndex:
    """Map block keys to slots, for one process.

    Not thread-safe: every call is made under the coordinator's lock. It only decides: no call copies, waits or does
    I/O. A block is found (`match`, `contains`) only from `complete` on, and a lease is resolved exactly once.

    Raises `RequestError`, with nothing changed, for keys of a group that does not exist, a key named twice in one call,
    and a lease that is resolved already or belongs to another index. An empty list of keys is no error.
    """

    def __init__(self, num_groups: int, policy_factory: Callable[[], EvictionPolicy] = TailFirstLru) -> None:
        if num_groups < 1:
            raise RequestError(f"num_groups is {num_groups}: give the number of groups of the layout, 1 or more")
        self._groups = tuple(BlockGroup(policy_factory()) for _ in range(num_groups))
        self._open_leases: dict[Lease, None] = {}
        self._num_evicted = 0

    def __repr__(self) -> str:
        return (
            f"<BlockIndex: {self.num_published} slots, {self.num_ready} ready, {self.num_writing} writing, "
            f"{self.num_leased} leased, {len(self._open_leases)} leases open>"
        )

    def publish(self, slots: SlotRange) -> None:
        """Take slots into use. No slot may be published twice."""
        self._group(slots.group).publish(slots.first, slots.num_slots)

    def prepare_store(self, keys: Sequence[BlockKey]) -> StoreLease | None:
        """Reserve a slot for each key that is neither ready nor being written; the lease may be empty.

        Evicts what it has to, but nothing that is leased or named in `keys`. All or nothing over all groups: None if
        the slots do not suffice even so, and then nothing has changed and nothing was evicted. Name the known beginning
        of a prompt too: it then stays at least as long as the end that is stored now.
        """
        positions = self._positions_by_group(keys)
        plans: dict[int, StorePlan] = {}
        for number, named in positions.items():
            plan = self._groups[number].plan_store(list(named))
            if plan is None:
                return None
            plans[number] = plan
        evicted_keys: list[BlockKey] = []
        for number, plan in plans.items():
            victims = self._groups[number].evict_for(plan)
            self._num_evicted += len(victims)
            evicted_keys += [BlockKey(digest, number) for digest in victims]
        slot_at: dict[int, int] = {}
        for number, plan in plans.items():
            slots = self._groups[number].start_writing(plan)
            named = positions[number]
            slot_at.update(zip((named[digest] for digest in plan.new), slots, strict=True))
        order = sorted(slot_at)
        lease = StoreLease(
            self,
            tuple(keys[position] for position in order),
            tuple(slot_at[position] for position in order),
            tuple(keys),
            tuple(evicted_keys),
        )
        self._open_leases[lease] = None
        return lease

    def match(self, keys: Sequence[BlockKey]) -> LoadLease:
        """Lease the blocks of the longest prefix of `keys` that is ready throughout.

        It may be empty: an empty lease holds nothing, so nobody has to resolve it.
        """
        self._positions_by_group(keys)
        slots = []
        for key in keys:
            slot = self._groups[key.group].find_ready(key.digest)
            if slot is None:
                break
            slots.append(slot)
        lease = LoadLease(self, tuple(keys[: len(slots)]), tuple(slots))
        for group, digests, part in self._parts(lease.keys, lease.slots):
            group.lease(digests, part)
        if slots:
            self._open_leases[lease] = None
        return lease

    def keep(self, lease: Lease, num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks of a match; used through `LoadLease.keep`."""
        self._check_open(lease)
        if not isinstance(lease, LoadLease):
            raise RequestError(f"{lease!r} is a store's: it is completed or aborted as a whole")
        if not 0 <= num_blocks <= len(lease.keys):
            raise RequestError(f"{lease!r} cannot keep {num_blocks}: give 0 to {len(lease.keys)}")
        tail = list(self._parts(lease.keys[num_blocks:], lease.slots[num_blocks:]))
        lease.keys, lease.slots = lease.keys[:num_blocks], lease.slots[:num_blocks]
        for group, digests, part in tail:
            group.unlease(digests, part)
        if not num_blocks:
            self._open_leases.pop(lease, None)

    def complete(self, lease: Lease) -> int:
        """Make the blocks of a store ready, or release those of a load. Returns how many blocks became ready.

        A block that was forgotten while its store ran does not become ready; its slot is free again.
        """
        self._resolve(lease, LeaseState.COMPLETED)
        if not isinstance(lease, StoreLease):
            self._unlease(lease)
            return 0
        num_ready = 0
        for group, digests, part in self._parts(lease.keys, lease.slots):
            num_ready += group.finish_writing(digests, part)
        # The known blocks of the call are ordered anew along with the new ones: they are the rest of the same prompt.
        for number, named in self._positions_by_group(lease.call_keys).items():
            self._groups[number].note_stored(list(named))
        return num_ready

    def abort(self, lease: Lease) -> None:
        """Give up a store of which no copy is running, or release a load: the slots are free again, the keys absent."""
        self._resolve(lease, LeaseState.ABORTED)
        if not isinstance(lease, StoreLease):
            self._unlease(lease)
            return
        for group, digests, part in self._parts(lease.keys, lease.slots):
            group.fail_writing(digests, part)
            group.free(part)

    def hold(self, lease: StoreLease) -> None:
        """Give up a store whose copy may still be running: the slots stay out of use until `release_held`.

        Its keys are absent at once. There is no such thing for a load: as long as its copy may run, it stays leased.
        """
        self._check_store(lease)
        self._resolve(lease, LeaseState.HELD)
        for group, digests, part in self._parts(lease.keys, lease.slots):
            group.fail_writing(digests, part)
            group.hold(part)

    def release_held(self, lease: StoreLease) -> None:
        """Free the slots of a held store: its copy is proven over. The blocks stay absent."""
        self._check_store(lease)
        if lease.state is not LeaseState.HELD:
            raise RequestError(f"{lease!r} is not held: release_held() follows hold(), once")
        lease.state = LeaseState.RELEASED
        for group, _, part in self._parts(lease.keys, lease.slots):
            group.release_held(part)

    def forget(self, keys: Sequence[BlockKey]) -> int:
        """Let nobody find these blocks any more, in whichever state they are. Returns how many ready ones were dropped.

        Loads that lease them finish undisturbed and stores in flight go on; each slot is free once nothing uses it.
        """
        positions = self._positions_by_group(keys)
        return sum(self._groups[number].drop(list(named)) for number, named in positions.items())

    def clear(self) -> int:
        """Forget every block, stores in flight included. Returns how many ready ones were dropped; costs O(blocks)."""
        return sum(group.drop(list(group.slot_of)) for group in self._groups)

    def contains(self, key: BlockKey) -> bool:
        """Say whether a block is ready."""
        return self.state(key) is BlockState.READY

    def state(self, key: BlockKey) -> BlockState:
        """Return ABSENT, WRITING or READY: what a lookup of the key finds."""
        group = self._group(key.group)
        slot = group.slot_of.get(key.digest)
        return BlockState.ABSENT if slot is None else group.states[slot]

    @property
    def num_groups(self) -> int:
        """Return how many groups there are."""
        return len(self._groups)

    @property
    def num_published(self) -> int:
        """Return how many slots there are, in all groups; so do the other numbers."""
        return sum(group.pool.num_published for group in self._groups)

    @property
    def num_ready(self) -> int:
        """Return how many blocks can be found."""
        return sum(group.states.count(BlockState.READY) for group in self._groups)

    @property
    def num_writing(self) -> int:
        """Return how many slots are being filled, also for keys that were forgotten meanwhile."""
        return sum(group.states.count(BlockState.WRITING) for group in self._groups)

    @property
    def num_leased(self) -> int:
        """Return how many whole blocks are covered by at least one open match."""
        return sum(group.num_leased for group in self._groups)

    @property
    def num_held(self) -> int:
        """Return how many slots wait for `release_held`."""
        return sum(group.pool.num_held for group in self._groups)

    @property
    def num_evicted(self) -> int:
        """Return how many blocks have given way to others since the start."""
        return self._num_evicted

    def slot_usage(self, group: int) -> SlotUsage:
        """Return what the slots of one group are used for."""
        return self._group(group).usage()

    def unresolved_leases(self) -> list[Lease]:
        """Return the leases that nobody has resolved, oldest first."""
        return list(self._open_leases)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance; for tests. Costs O(slots).

        For each group:
        - published == free + writing + ready + draining + held;
        - a key leads to a WRITING or READY slot, no two keys to one, and each READY slot has a key;
        - the lease count of a slot is the number of open leases that cover it; 1 while WRITING, 0 if ABSENT or FAILED;
        - the policy holds exactly the READY blocks without a lease.
        """
        covered: list[dict[int, int]] = [{} for _ in self._groups]
        for lease in self._open_leases:
            assert not lease.resolved, lease
            for key, slot in zip(lease.keys, lease.slots, strict=True):
                covered[key.group][slot] = covered[key.group].get(slot, 0) + 1
        for group, counts in zip(self._groups, covered, strict=True):
            group.check_invariants(counts)

    def _group(self, number: int) -> BlockGroup:
        if not 0 <= number < len(self._groups):
            raise RequestError(f"group {number} does not exist: the index has groups 0 to {len(self._groups) - 1}")
        return self._groups[number]

    def _positions_by_group(self, keys: Iterable[object]) -> dict[int, dict[bytes, int]]:
        """Return the digests of each group, in order, with where they stand in the call; refuses unusable keys."""
        found: dict[int, dict[bytes, int]] = {}
        for position, key in enumerate(keys):
            if not isinstance(key, BlockKey):
                raise RequestError(f"key {position} is a {type(key).__name__}: give BlockKey objects")
            if key.group >= len(self._groups):
                raise RequestError(
                    f"key {position}, {key!r}, is of a group that does not exist: "
                    f"the index has groups 0 to {len(self._groups) - 1}"
                )
            first = found.setdefault(key.group, {}).setdefault(key.digest, position)
            if first != position:
                raise RequestError(f"{key!r} stands at positions {first} and {position}: name a block once in a call")
        return found

    def _parts(
        self, keys: Sequence[BlockKey], slots: Sequence[int]
    ) -> Iterator[tuple[BlockGroup, list[bytes], list[int]]]:
        """Split keys and their slots by group, each part in the order of the call."""
        parts: dict[int, tuple[list[bytes], list[int]]] = {}
        for key, slot in zip(keys, slots, strict=True):
            digests, part = parts.setdefault(key.group, ([], []))
            digests.append(key.digest)
            part.append(slot)
        return ((self._groups[number], digests, part) for number, (digests, part) in parts.items())

    def _unlease(self, lease: Lease) -> None:
        for group, digests, part in self._parts(lease.keys, lease.slots):
            group.unlease(digests, part)

    def _resolve(self, lease: Lease, state: LeaseState) -> None:
        self._check_open(lease)
        self._open_leases.pop(lease, None)  # an empty match is not kept
        lease.state = state

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
