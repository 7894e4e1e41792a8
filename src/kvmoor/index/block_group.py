"""The blocks of one group: their slots, states and lease counts, told to one eviction policy."""

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvmoor.errors import BrokenError
from kvmoor.index.block_state import BlockState, BlockStates
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """Count the slots of one group: `published` is the sum of the next five, the last two count some of them again."""

    published: int
    free: int
    writing: int
    """A store fills them; their keys may have been forgotten meanwhile."""
    ready: int
    """Whole, and found by their keys."""
    draining: int
    """Whole, but their keys are forgotten: they are free once the loads that lease them end."""
    held: int
    """Given up while a copy may still write to them: they wait for `BlockIndex.release_held`."""
    leased: int
    """Ready or draining ones that at least one open `LoadLease` covers."""
    evictable: int
    """Ready ones that no lease covers."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Say what a store of some blocks of one group takes."""

    new: Sequence[bytes]
    """Those that need a slot."""
    ready: Sequence[bytes]
    """Those that are ready already."""
    spared: AbstractSet[bytes]
    """Those of `ready` that would be evictable, were they not named by this very store."""
    num_victims: int
    """How many others have to give way."""


class BlockGroup:
    """Keep the books of one group for `BlockIndex`, which checks what it passes and keeps the leases."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.pool = SlotPool()
        self.policy = policy
        self.states = BlockStates()
        self.slot_of: dict[bytes, int] = {}  # the blocks that a lookup finds: WRITING or READY
        self.num_leased = 0
        self._lease_counts = array("L")  # by slot; a store counts as one

    def publish(self, first: int, num_slots: int) -> None:
        """Take slots into use."""
        self.pool.publish(first, num_slots)
        self.policy.resize(self.pool.num_published)
        self.states.grow(first + num_slots)
        self._lease_counts.extend([0] * (len(self.states) - len(self._lease_counts)))

    def find_ready(self, digest: bytes) -> int | None:
        """Return the slot of a READY block, or None."""
        slot = self.slot_of.get(digest)
        return slot if slot is not None and self.states[slot] is BlockState.READY else None

    def is_evictable(self, digest: bytes) -> bool:
        """Say whether a block is READY and no lease covers it."""
        slot = self.find_ready(digest)
        return slot is not None and not self._lease_counts[slot]

    def plan_store(self, digests: Sequence[bytes]) -> StorePlan | None:
        """Return what it takes to store blocks, or None if there is no room even after eviction. Changes nothing."""
        new = [digest for digest in digests if digest not in self.slot_of]
        ready = [digest for digest in digests if self.find_ready(digest) is not None]
        spared = {digest for digest in ready if self.is_evictable(digest)}
        num_victims = max(0, len(new) - self.pool.num_free)
        if num_victims > len(self.policy) - len(spared):
            return None
        return StorePlan(new, ready, spared, num_victims)

    def evict_for(self, plan: StorePlan) -> list[bytes]:
        """Note the use of those that are READY already, evict the blocks that have to give way, and return these."""
        self.policy.touch(plan.ready)
        if not plan.new:
            return []
        victims = self.policy.evict(plan.num_victims, plan.spared, plan.new) or []
        usable = {digest for digest in victims if self.is_evictable(digest)} - plan.spared
        if len(victims) != plan.num_victims or len(usable) != plan.num_victims:
            # A policy may be the user's own; were a leased block overwritten, a load would bring back wrong bytes.
            raise BrokenError(
                f"the eviction policy {self.policy!r} was asked for {plan.num_victims} blocks and gave {len(victims)}, "
                f"{len(usable)} of them usable: run the tests of kvmoor.testing.eviction_contract on it"
            )
        slots = [self.slot_of.pop(digest) for digest in victims]
        self.states.move(slots, BlockState.EVICTED)
        self.free(slots)
        return victims

    def start_writing(self, plan: StorePlan) -> tuple[int, ...]:
        """Give a slot to each new block and return the slots."""
        slots = self.pool.allocate(len(plan.new))
        assert slots is not None, "evict_for comes first"
        self.states.move(slots, BlockState.WRITING)
        for slot in slots:
            self._lease_counts[slot] = 1
        self.slot_of.update(zip(plan.new, slots, strict=True))
        return slots

    def finish_writing(self, digests: Sequence[bytes], slots: Sequence[int]) -> int:
        """Make those blocks READY whose keys still lead to their slots, free the others; return how many are READY."""
        wanted: list[int] = []
        forgotten: list[int] = []
        for digest, slot in zip(digests, slots, strict=True):
            (wanted if self.slot_of.get(digest) == slot else forgotten).append(slot)
            self._lease_counts[slot] = 0
        self.states.move(wanted, BlockState.READY)
        self.states.move(forgotten, BlockState.FAILED)
        self.free(forgotten)
        return len(wanted)

    def note_stored(self, digests: Sequence[bytes]) -> None:
        """Tell the policy about all blocks of a finished store, in the order of the call, known ones included."""
        self.policy.insert([digest for digest in digests if self.is_evictable(digest)])

    def fail_writing(self, digests: Sequence[bytes], slots: Sequence[int]) -> None:
        """Make blocks FAILED, and their keys absent."""
        failed: list[bytes] = []
        for digest, slot in zip(digests, slots, strict=True):
            if self.slot_of.get(digest) == slot:  # else it was forgotten, and perhaps stored anew elsewhere
                del self.slot_of[digest]
                failed.append(digest)
            self._lease_counts[slot] = 0
        self.policy.remove(failed)
        self.states.move(slots, BlockState.FAILED)

    def hold(self, slots: Sequence[int]) -> None:
        """Keep FAILED slots out of use."""
        self.pool.hold(slots)

    def release_held(self, slots: Sequence[int]) -> None:
        """Make held slots ABSENT and give them back to the pool."""
        self.states.move(slots, BlockState.ABSENT)
        self.pool.release_held(slots)

    def lease(self, digests: Sequence[bytes], slots: Sequence[int]) -> None:
        """Count one more lease on READY blocks."""
        first_lease: list[bytes] = []
        one_more: list[bytes] = []
        for digest, slot in zip(digests, slots, strict=True):
            (one_more if self._lease_counts[slot] else first_lease).append(digest)
            self._lease_counts[slot] += 1
        self.num_leased += len(first_lease)
        self.policy.withdraw(first_lease)
        self.policy.touch(one_more)

    def unlease(self, digests: Sequence[bytes], slots: Sequence[int]) -> None:
        """Count one lease less on READY or EVICTED blocks."""
        idle: list[bytes] = []
        drained: list[int] = []
        for digest, slot in zip(digests, slots, strict=True):
            self._lease_counts[slot] -= 1  # an unsigned array raises below zero
            if self._lease_counts[slot]:
                continue
            self.num_leased -= 1
            if self.states[slot] is BlockState.READY:
                idle.append(digest)
            else:
                drained.append(slot)
        self.policy.restore(idle)
        self.free(drained)

    def drop(self, digests: Sequence[bytes]) -> int:
        """Make keys absent; return how many blocks were READY. Slots in use are freed by whoever uses them last."""
        ready = [digest for digest in digests if self.find_ready(digest) is not None]
        slots = [self.slot_of[digest] for digest in ready]
        self.policy.remove([digest for digest in digests if digest in self.slot_of])
        self.states.move(slots, BlockState.EVICTED)
        self.free([slot for slot in slots if not self._lease_counts[slot]])
        for digest in digests:
            self.slot_of.pop(digest, None)
        return len(ready)

    def free(self, slots: Sequence[int]) -> None:
        """Make EVICTED or FAILED slots ABSENT and give them back to the pool."""
        self.states.move(slots, BlockState.ABSENT)
        self.pool.release(slots)

    def usage(self) -> SlotUsage:
        """Return what the slots are used for."""
        return SlotUsage(
            published=self.pool.num_published,
            free=self.pool.num_free,
            writing=self.states.count(BlockState.WRITING),
            ready=self.states.count(BlockState.READY),
            draining=self.states.count(BlockState.EVICTED),
            held=self.pool.num_held,
            leased=self.num_leased,
            evictable=len(self.policy),
        )

    def check_invariants(self, lease_counts: dict[int, int]) -> None:
        """Raise AssertionError if the books do not balance; `lease_counts` is what the open leases say of the slots."""
        self.pool.check_invariants()
        self.states.check_invariants()
        usage = self.usage()
        assert usage.published == usage.free + usage.writing + usage.ready + usage.draining + usage.held, usage
        assert usage.held == self.states.count(BlockState.FAILED), usage
        states = [self.states[slot] for slot in range(len(self.states))]
        found = set(self.slot_of.values())
        assert len(found) == len(self.slot_of), "two keys have one slot"
        assert {states[slot] for slot in found} <= {BlockState.WRITING, BlockState.READY}
        assert found >= {slot for slot, state in enumerate(states) if state is BlockState.READY}, "a block has no key"
        assert lease_counts == {slot: count for slot, count in enumerate(self._lease_counts) if count}
        assert all(count == 1 for slot, count in lease_counts.items() if states[slot] is BlockState.WRITING)
        whole = [slot for slot in lease_counts if states[slot] in {BlockState.READY, BlockState.EVICTED}]
        assert usage.leased == len(whole) == len(lease_counts) - usage.writing, usage
        assert usage.draining == sum(states[slot] is BlockState.EVICTED for slot in whole), "nobody waits for a slot"
        evictable = [digest for digest in self.slot_of if self.is_evictable(digest)]
        assert all(digest in self.policy for digest in evictable), "the policy lacks an evictable block"
        assert usage.evictable == len(evictable), "the policy holds a block that cannot be evicted"
