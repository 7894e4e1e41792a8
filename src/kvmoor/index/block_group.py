"""The blocks of one group: their slots, states and lease counts, told to one eviction policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import BrokenError
from kvmoor.index.block_state import ABSENT, EVICTED, FAILED, READY, WRITING, BlockState, BlockStates
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.generation import Generation
from kvmoor.index.lease import LeasePart, StorePart
from kvmoor.index.slot_arrays import NO_SLOT, NO_SLOTS, Slots, grown
from kvmoor.index.slot_pool import SlotPool

_FIRST_LOOK: Final = 128
"""How many blocks of a prompt are looked up at first. Guessed: fewer cost about as much, more are wasted on a miss."""
_LOOK_GROWTH: Final = 4
_NO_DIGESTS: Final[Sequence[bytes]] = ()


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """Count the slots of one group: `published` is the sum of the next six, the last two count some of them again."""

    published: int
    free: int
    writing: int
    """A store fills them; their keys may have been forgotten meanwhile."""
    ready: int
    """A lookup finds their blocks."""
    outdated: int
    """Whole, but from before a reset: nobody finds their blocks, and they are the first to give way."""
    draining: int
    """Their keys are gone, loads lease them still."""
    held: int
    leased: int
    """Ready, outdated or draining ones that at least one load leases."""
    evictable: int
    """Ready ones that no lease covers."""


@dataclass(frozen=True, slots=True, eq=False)
class StorePlan:
    """Say what a store of some blocks of one group takes."""

    digests: Sequence[bytes]
    slots: Slots
    """Where the blocks are; `NO_SLOT` for those that need a slot."""
    new_at: NDArray[np.intp]
    """Which of `digests` these are."""
    ready: Slots
    """The slots of those that are ready already."""
    spared: Slots
    """Those of `ready` that would be evictable, were they not named by this very store."""
    num_victims: int
    """How many others have to give way."""


class BlockGroup:
    """Keep the books of one group for `BlockIndex`, which checks what it passes and keeps the leases."""

    def __init__(self, number: int, policy_factory: Callable[[], EvictionPolicy]) -> None:
        self.number = number
        self.pool = SlotPool()
        self.states = BlockStates()
        self.current = Generation(policy_factory())
        self.num_leased = 0
        self._policy_factory = policy_factory
        self._outdated: list[Generation] = []  # those that have READY slots still, oldest first
        self._slot_limit = 0
        # By slot. A store counts as one lease. The digest is that of the last block. The number of fillings is odd from
        # the store of a block until its key is dropped, so one number stands for one block in this slot.
        self._lease_counts: NDArray[np.int32] = np.zeros(1, np.int32)
        self._fills: NDArray[np.uint32] = np.zeros(1, np.uint32)
        self._digests: NDArray[np.object_] = np.empty(1, object)

    @property
    def policy(self) -> EvictionPolicy:
        """Return who chooses among the blocks that can be found."""
        return self.current.policy

    def publish(self, first: int, num_slots: int) -> None:
        """Take slots into use."""
        self.pool.publish(first, num_slots)
        self._slot_limit = max(self._slot_limit, first + num_slots)
        self.policy.resize(self.pool.num_published, self._slot_limit)
        self.states.grow(self._slot_limit)
        self._lease_counts = grown(self._lease_counts, self._slot_limit)
        self._fills = grown(self._fills, self._slot_limit)
        self._digests = grown(self._digests, self._slot_limit)

    def slots_of(self, digests: Sequence[bytes]) -> Slots:
        """Return the slots of blocks that are WRITING or READY, and `NO_SLOT` for the others."""
        return np.fromiter(map(self.current.slot_of.get, digests, repeat(NO_SLOT)), np.int32, len(digests))

    def find_prefix(self, digests: Sequence[bytes]) -> Slots:
        """Return the slots of the longest prefix that is READY throughout. Looks not much further than that."""
        pieces = []
        start, size = 0, _FIRST_LOOK
        while start < len(digests):
            slots = self.slots_of(digests[start : start + size])
            ready = self.states.are(slots, READY)
            if not ready.all():
                pieces.append(slots[: int(ready.argmin())])
                break
            pieces.append(slots)
            start, size = start + size, size * _LOOK_GROWTH
        if len(pieces) > 1:
            return np.concatenate(pieces)
        return pieces[0] if pieces else NO_SLOTS

    def ready_slots(self, digests: Sequence[bytes]) -> Slots:
        """Return the slots of those that are READY, in the order of `digests`."""
        slots = self.slots_of(digests)
        return slots[self.states.are(slots, READY)]

    def plan_store(self, digests: Sequence[bytes]) -> StorePlan | None:
        """Return what it takes to store blocks, or None if there is no room even after eviction. Changes nothing."""
        slots = self.slots_of(digests)
        new_at = (slots == NO_SLOT).nonzero()[0]
        ready = slots[self.states.are(slots, READY)]
        spared = ready[self._lease_counts.take(ready) == 0]
        num_victims = max(0, len(new_at) - self.pool.num_free)
        num_evictable = len(self.policy) - len(spared) + sum(len(each.policy) for each in self._outdated)
        if num_victims > num_evictable:
            return None
        return StorePlan(digests, slots, new_at, ready, spared, num_victims)

    def start_writing(self, plan: StorePlan, positions: NDArray[np.intp]) -> tuple[StorePart, Sequence[bytes]]:
        """Evict what has to give way, give a slot to each new block, and return these and the digests of the evicted.

        `positions`: where in the call the digests of the plan stand.
        """
        self.policy.touch(plan.ready)
        new = _chosen(plan.digests, plan.new_at)
        taken, evicted, slots = NO_SLOTS, _NO_DIGESTS, plan.slots
        if len(new):
            freed, evicted = self._make_room(plan, new)
            taken = self._allocate(len(new), freed)
            self.states.move(taken, ABSENT, WRITING)
            self._lease_counts[taken] = 1
            self._fills[taken] += 1
            self._digests[taken] = _objects(new)
            self.current.slot_of.update(zip(new, taken.tolist(), strict=True))
            slots = slots.copy()
            slots[plan.new_at] = taken
        fills = self._fills.take(slots)
        part = StorePart(
            self.number, new, taken, positions[plan.new_at], self.current, plan.new_at, plan.digests, slots, fills
        )
        return part, evicted

    def finish_writing(self, part: StorePart) -> int:
        """Make those blocks READY whose keys still lead to their slots, free the others; return how many are READY."""
        call_is_there = self._fills.take(part.call_slots) == part.call_fills
        self._lease_counts[part.slots] = 0
        wanted = part.slots
        if part.generation is not self.current:
            call_is_there[:] = False
        if not call_is_there.all():
            # A key may have been dropped; and a block that was known may have given way to another meanwhile.
            is_wanted = self._have_keys(part.slots) & (part.generation is self.current)
            wanted, dropped = part.slots[is_wanted], part.slots[~is_wanted]
            self._end_fillings(dropped)
            self.states.move(dropped, WRITING, FAILED)
            self._free(dropped, FAILED)
        self.states.move(wanted, WRITING, READY)
        part.generation.num_ready += len(wanted)
        # The known blocks of the call are ordered anew along with the new ones: they are the rest of the same prompt.
        usable = call_is_there & self.states.are(part.call_slots, READY)
        usable &= self._lease_counts.take(part.call_slots) == 0
        if usable.all():
            self.policy.insert(part.call_slots, part.call_digests)
        else:
            self.policy.insert(part.call_slots[usable], list(compress(part.call_digests, usable.tolist())))
        return len(wanted)

    def fail_writing(self, part: LeasePart, *, hold: bool) -> None:
        """Make blocks FAILED and their keys absent; free the slots, or hold them for `release_held`."""
        if part.generation is self.current:
            known = self._have_keys(part.slots).tolist()  # else it was forgotten, and perhaps stored anew elsewhere
            failed = list(compress(part.digests, known))
            for digest in failed:
                del self.current.slot_of[digest]
            self.policy.give_up(failed)
        self._lease_counts[part.slots] = 0
        self._end_fillings(part.slots)
        self.states.move(part.slots, WRITING, FAILED)
        if hold:
            self.pool.hold(part.slots)
        else:
            self._free(part.slots, FAILED)

    def release_held(self, slots: Slots) -> None:
        """Make held slots ABSENT and give them back to the pool."""
        self.states.move(slots, FAILED, ABSENT)
        self.pool.release_held(slots)

    def lease(self, slots: Slots) -> None:
        """Count one more lease on READY blocks."""
        counts = self._lease_counts.take(slots)
        self._lease_counts[slots] = counts + 1
        if not counts.any():
            self.num_leased += len(slots)
            self.policy.withdraw(slots)
            return
        first_lease = counts == 0
        self.num_leased += int(np.count_nonzero(first_lease))
        self.policy.withdraw(slots[first_lease])
        self.policy.touch(slots[~first_lease])

    def unlease(self, part: LeasePart) -> None:
        """Count one lease less on READY or EVICTED blocks."""
        counts = self._lease_counts.take(part.slots) - 1
        assert (counts >= 0).all(), f"slots {part.slots[counts < 0]} are not leased"
        self._lease_counts[part.slots] = counts
        unused = part.slots if not counts.any() else part.slots[counts == 0]
        self.num_leased -= len(unused)
        ready = self.states.are(unused, READY)
        if ready.all():
            part.generation.policy.restore(unused)
        else:
            part.generation.policy.restore(unused[ready])
            self._free(unused[~ready], EVICTED)

    def drop(self, digests: Sequence[bytes]) -> int:
        """Make keys absent; return how many blocks were READY. Slots in use are freed by whoever uses them last."""
        slots = self.slots_of(digests)
        is_ready = self.states.are(slots, READY)
        is_writing = self.states.are(slots, WRITING)
        for digest in digests:
            self.current.slot_of.pop(digest, None)
        self.policy.give_up(list(compress(digests, is_writing.tolist())))
        self._end_fillings(slots[is_writing])
        ready = slots[is_ready]
        self.policy.remove(ready)
        self.current.num_ready -= len(ready)
        self._end_fillings(ready)
        self.states.move(ready, READY, EVICTED)
        self._free(ready[self._lease_counts.take(ready) == 0], EVICTED)
        return len(ready)

    def reset(self) -> int:
        """Let nobody find any block any more, stores in flight included; return how many were READY. Costs O(1)."""
        old = self.current
        if old.num_ready:
            self._outdated.append(old)
        self.current = Generation(self._policy_factory())
        self.policy.resize(self.pool.num_published, self._slot_limit)
        return old.num_ready

    def usage(self) -> SlotUsage:
        """Return what the slots are used for."""
        return SlotUsage(
            published=self.pool.num_published,
            free=self.pool.num_free,
            writing=self.states.count(WRITING),
            ready=self.current.num_ready,
            outdated=self.states.count(READY) - self.current.num_ready,
            draining=self.states.count(EVICTED),
            held=self.pool.num_held,
            leased=self.num_leased,
            evictable=len(self.policy),
        )

    def check_invariants(self, lease_counts: dict[int, int]) -> None:
        """Raise AssertionError if the books do not balance; `lease_counts` is what the open leases say of the slots."""
        self.pool.check_invariants()
        self.states.check_invariants()
        usage = self.usage()
        parts = (usage.free, usage.writing, usage.ready, usage.outdated, usage.draining, usage.held)
        assert usage.published == sum(parts), usage
        assert usage.held == self.states.count(FAILED), usage
        slot_of = self.current.slot_of
        states = [self.states[slot] for slot in range(len(self.states))]
        found = set(slot_of.values())
        assert len(found) == len(slot_of), "two keys have one slot"
        assert {states[slot] for slot in found} <= {WRITING, READY}
        assert all(self._digests[slot] == digest for digest, slot in slot_of.items()), "a slot has another block's key"
        assert all(self._fills[slot] & 1 for slot in found), "a block that is found has no filling"
        assert usage.ready == sum(states[slot] is READY for slot in found), "a block has no key"
        assert usage.outdated == sum(each.num_ready for each in self._outdated), usage
        assert lease_counts == {slot: int(count) for slot, count in enumerate(self._lease_counts) if count}
        assert all(count == 1 for slot, count in lease_counts.items() if states[slot] is WRITING)
        whole = [slot for slot in lease_counts if states[slot] in {READY, EVICTED}]
        assert usage.leased == len(whole) == len(lease_counts) - usage.writing, usage
        assert usage.draining == sum(states[slot] is EVICTED for slot in whole), "nobody waits for a slot"
        evictable = [slot for slot in found if states[slot] is READY and not self._lease_counts[slot]]
        assert all(slot in self.policy for slot in evictable), "the policy lacks an evictable block"
        assert usage.evictable == len(evictable), "the policy holds a block that cannot be evicted"

    def _make_room(self, plan: StorePlan, new: Sequence[bytes]) -> tuple[Slots, Sequence[bytes]]:
        """Evict as many blocks as the plan says; return their slots, ABSENT and ascending, and their digests."""
        outdated = self._evict_outdated(plan.num_victims)
        num_victims = plan.num_victims - len(outdated)
        chosen = self.policy.evict(num_victims, plan.spared, new)
        victims = NO_SLOTS if chosen is None else chosen
        if num_victims or len(victims):
            self._check_victims(self.policy, num_victims, victims, plan.spared)
        if not plan.num_victims:
            return NO_SLOTS, _NO_DIGESTS
        evicted: Sequence[bytes] = self._digests.take(victims).tolist()
        for digest in evicted:
            del self.current.slot_of[digest]
        self.current.num_ready -= len(victims)
        slots = np.concatenate([outdated, victims]) if len(outdated) else victims.copy()
        slots.sort()
        self._fills[slots] += 1  # a block that is READY has its key until now
        self.states.move(slots, READY, EVICTED)
        self.states.move(slots, EVICTED, ABSENT)
        return slots, evicted

    def _allocate(self, num_slots: int, freed: Slots) -> Slots:
        """Return free slots and then `freed` ones, which were not given back to the pool."""
        free = self.pool.allocate(num_slots - len(freed))
        assert free is not None, "the plan counted the free slots"
        if len(free) and len(freed):
            return np.concatenate([free, freed])
        return free if len(free) else freed

    def _evict_outdated(self, num_blocks: int) -> Slots:
        """Return the slots of up to so many blocks from before a reset that no lease covers; they are READY still."""
        pieces = []
        for generation in list(self._outdated):
            num_wanted = min(num_blocks, len(generation.policy))
            if not num_wanted:
                continue  # all that is left of it is leased
            chosen = generation.policy.evict(num_wanted)
            slots = NO_SLOTS if chosen is None else chosen
            self._check_victims(generation.policy, num_wanted, slots, NO_SLOTS)
            # What is left of its map goes along with the blocks, so that no call has to let all of it go at once.
            for _ in range(min(2 * len(slots), len(generation.slot_of))):
                generation.slot_of.popitem()
            generation.num_ready -= len(slots)
            if not generation.num_ready:
                self._outdated.remove(generation)
            pieces.append(slots)
            num_blocks -= len(slots)
            if not num_blocks:
                break
        return np.concatenate(pieces) if pieces else NO_SLOTS

    def _check_victims(self, policy: EvictionPolicy, num_victims: int, victims: Slots, spared: Slots) -> None:
        """Raise `BrokenError` unless a policy gave what was asked of it.

        It may be the user's own; were a leased block overwritten, a load would bring back wrong bytes.
        """
        self._lease_counts[spared] += 1  # for the moment, as if they were leased
        usable: set[int] = set()
        given: object = victims  # not every policy checks types
        if isinstance(given, np.ndarray) and given.dtype == np.int32 and given.ndim == 1:
            there = victims[(victims >= 0) & (victims < self._slot_limit)]
            free_to_go = self.states.are(there, READY) & (self._lease_counts.take(there) == 0)
            usable = set(there[free_to_go].tolist())
        self._lease_counts[spared] -= 1
        if not len(victims) == len(usable) == num_victims:
            raise BrokenError(
                f"the eviction policy {policy!r} was asked for {num_victims} blocks and gave {len(victims)}, "
                f"{len(usable)} of them usable (slots in an int32 array): run the tests of "
                "kvmoor.testing.eviction_contract on it"
            )

    def _have_keys(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which slots hold blocks whose keys were not dropped."""
        odd: NDArray[np.bool_] = self._fills[slots] % 2 == 1
        return odd

    def _end_fillings(self, slots: Slots) -> None:
        """Note that the keys of the blocks in `slots` are dropped, if they were not before."""
        self._fills[slots] += self._fills[slots] % 2

    def _free(self, slots: Slots, origin: BlockState) -> None:
        """Make EVICTED or FAILED slots ABSENT and give them back to the pool."""
        self.states.move(slots, origin, ABSENT)
        self.pool.release(slots)


def _chosen(digests: Sequence[bytes], at: NDArray[np.intp]) -> Sequence[bytes]:
    """Return some of `digests`; fast where they are one piece, as the end of a prompt is."""
    if not len(at):
        return _NO_DIGESTS
    first, last = int(at[0]), int(at[-1])
    if last - first + 1 == len(at):
        return digests[first : last + 1]
    return [digests[position] for position in at.tolist()]


def _objects(digests: Sequence[bytes]) -> NDArray[np.object_]:
    """Return an array of references; without the detour numpy would cut zeros off the ends of the bytes."""
    objects = np.empty(len(digests), object)
    objects[:] = digests
    return objects
