"""Legal calls of an eviction policy in random order, and what has to come of them; for `EvictionContract`."""

import random
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.slot_arrays import NO_SLOTS, Slots

SLOT_LIMIT: Final = 40
"""No slot of a test has this number or a higher one."""


class EvictionWalk:
    """Make random legal calls, and know what should be held."""

    def __init__(self, policy: EvictionPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._num_digests = 0
        self._gone: list[bytes] = []
        self._digest_in: dict[int, bytes] = {}  # of held and of withdrawn blocks
        self._held: set[int] = set()
        self._withdrawn: set[int] = set()
        self._arriving: list[bytes] = []
        self._free: list[int] = []
        self._num_slots = self._slot_limit = 0
        self._grow()

    def step(self) -> None:
        """Make one call."""
        moves = (
            [self._arrive] * 3
            + [self._insert] * 4
            + [self._give_up, self._touch, self._remove, self._enter, self._leave]
            + [self._withdraw, self._restore] * 2
        )
        self._rng.choice(moves)()
        if self._rng.random() < 0.02:
            self._grow()
        assert_holds(self._policy, self._held)

    def _grow(self) -> None:
        """Publish some more slots, not always the next ones."""
        fresh = sorted(set(range(SLOT_LIMIT)) - {*self._digest_in, *self._free})
        if self._num_slots + 4 <= 12:
            self._free += self._rng.sample(fresh, 4)
            self._num_slots += 4
            self._slot_limit = max([*self._digest_in, *self._free]) + 1
            self._policy.resize(self._num_slots, self._slot_limit)

    def _arrive(self) -> None:
        """Make room for blocks that are new or were here before, or for nobody in particular."""
        coming = [self._new_digest() for _ in range(self._rng.randint(0, 4))]
        missing = max(0, len(coming) + len(self._arriving) - len(self._free))
        num_blocks = missing if coming else self._rng.randint(0, 4)
        excluding = self._sample(set(range(self._slot_limit)))
        candidates = self._held - set(excluding)
        if num_blocks > len(candidates):
            assert self._policy.evict(num_blocks, slots_of(*excluding), coming) is None
            self._gone += coming
            return
        victims = victims_of(self._policy, num_blocks, slots_of(*excluding), coming)
        assert num_blocks == len(victims & candidates)
        self._release(victims)
        self._arriving += coming

    def _insert(self) -> None:
        """End a store: some blocks that arrive, some that are held, sometimes one that came without notice."""
        coming = self._rng.sample(self._arriving, self._rng.randint(0, min(3, len(self._arriving))))
        self._arriving = [digest for digest in self._arriving if digest not in coming]
        if len(self._free) > len(self._arriving) + len(coming) and self._rng.random() < 0.5:
            coming.append(self._new_digest())
        blocks = [(slot, self._digest_in[slot]) for slot in self._sample(self._held)]
        blocks += [(self._free.pop(self._rng.randrange(len(self._free))), digest) for digest in coming]
        self._rng.shuffle(blocks)
        self._digest_in.update(blocks)
        self._held |= {slot for slot, _ in blocks}
        self._policy.insert(slots_of(*(slot for slot, _ in blocks)), [digest for _, digest in blocks])

    def _give_up(self) -> None:
        failed = self._rng.sample(self._arriving, self._rng.randint(0, len(self._arriving)))
        self._arriving = [digest for digest in self._arriving if digest not in failed]
        self._gone += failed
        self._policy.give_up(failed)

    def _touch(self) -> None:
        self._policy.touch(slots_of(*self._sample(self._held | self._withdrawn)))

    def _enter(self) -> None:
        self._policy.enter_device(slots_of(*self._sample(self._held | self._withdrawn)))

    def _leave(self) -> None:
        self._policy.leave_device(slots_of(*self._sample(self._held | self._withdrawn)))

    def _withdraw(self) -> None:
        chosen = self._sample(self._held)
        self._policy.withdraw(slots_of(*chosen))
        self._held -= set(chosen)
        self._withdrawn |= set(chosen)

    def _restore(self) -> None:
        chosen = self._sample(self._withdrawn)
        self._policy.restore(slots_of(*chosen))
        self._withdrawn -= set(chosen)
        self._held |= set(chosen)

    def _remove(self) -> None:
        chosen = self._sample(self._held | self._withdrawn)
        self._policy.remove(slots_of(*chosen))
        self._release(chosen)

    def _release(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._gone.append(self._digest_in.pop(slot))
            self._free.append(slot)
        self._held -= set(slots)
        self._withdrawn -= set(slots)

    def _new_digest(self) -> bytes:
        """Return the digest of a block that is nowhere now, often of one that has been here."""
        if self._gone and self._rng.random() < 0.5:
            return self._gone.pop(self._rng.randrange(len(self._gone)))
        self._num_digests += 1
        return digest_of(self._num_digests)

    def _sample(self, slots: set[int]) -> list[int]:
        return self._rng.sample(sorted(slots), self._rng.randint(0, min(4, len(slots))))


def digest_of(number: int) -> bytes:
    """Return a digest that no other number has."""
    return number.to_bytes(32, "little")


def slots_of(*numbers: int) -> Slots:
    """Return an array that nobody can write to: a policy has no reason to."""
    slots = np.array(numbers, np.int32)
    slots.flags.writeable = False
    return slots


def victims_of(
    policy: EvictionPolicy, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()
) -> set[int]:
    """Evict, and return the victims once they are known to be a list of different slots outside `excluding`."""
    victims = policy.evict(num_blocks, excluding, arriving)
    assert isinstance(victims, np.ndarray), f"evict returned {victims!r}, not an array of slots"
    assert (np.dtype(np.int32), 1) == (victims.dtype, victims.ndim)
    different: set[int] = set(victims.tolist())
    assert len(victims) == len(different)
    assert not different & set(excluding.tolist())
    return different


def assert_holds(policy: EvictionPolicy, slots: Iterable[int]) -> None:
    """Raise AssertionError unless the policy holds the blocks in exactly these slots."""
    expected = set(slots)
    assert expected == {slot for slot in range(SLOT_LIMIT) if slot in policy}
    assert len(expected) == len(policy)
