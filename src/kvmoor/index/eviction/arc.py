"""Adaptive replacement: recency and frequency, with a balance that follows the traffic.

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03. Their T1 is `_once`, T2
`_twice`, B1 `_ghosts_of_once`, B2 `_ghosts_of_twice`, and p `_target`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice

import numpy as np

from kvmoor.index.slot_arrays import NO_SLOTS, Slots


class _Ghost(Enum):
    """Say whose ghost a coming block finds."""

    NONE = "its ghost is not there"
    OF_ONCE = "it had been used once"
    OF_TWICE = "it had been used more often"


class TailFirstArc:
    """Evict from blocks used once or from blocks used more often, in a share that is learnt. An `EvictionPolicy`.

    A block comes to those used once, and goes to the others when it is used again. What was evicted is remembered for
    a while, by its digest alone (a *ghost*): if a block comes back whose ghost is there, its list was too short, so the
    target moves in its favour. Traffic that never returns passes through the first list and leaves the second alone.

    Blocks named in one call are ordered as if the last of them had been used first, as in `TailFirstLru`. A store that
    names blocks held already uses them, even if the same request stored them a moment ago.

    Leased and arriving blocks count in the lists they belong to, but are no victims.
    """

    def __init__(self) -> None:
        self._num_slots = 0
        self._target = 0.0  # how many blocks used once there should be
        # By slot, least recently used first; both are held. The digest is what becomes the ghost.
        self._once: OrderedDict[int, bytes] = OrderedDict()
        self._twice: OrderedDict[int, bytes] = OrderedDict()
        # By digest, oldest first: what has gone is in no slot.
        self._ghosts_of_once: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts_of_twice: OrderedDict[bytes, None] = OrderedDict()
        # Not held, but counted: those that a load leases, by slot, as used more often; arriving ones, by digest, as
        # used once if they had no ghost and as used more often if they had.
        self._withdrawn: dict[int, bytes] = {}
        self._arriving_once: set[bytes] = set()
        self._arriving_twice: set[bytes] = set()

    def __repr__(self) -> str:
        return (
            f"<TailFirstArc of {self._num_slots} slots: {len(self._once)} blocks used once, the target is "
            f"{self._target:.1f}, {len(self._twice)} used more often, {self.num_ghosts} ghosts>"
        )

    def __len__(self) -> int:
        return len(self._once) + len(self._twice)

    def __contains__(self, slot: object) -> bool:
        return slot in self._once or slot in self._twice

    @property
    def target(self) -> float:
        """Return how many blocks used once there should be, 0 to the number of slots."""
        return self._target

    @property
    def num_ghosts(self) -> int:
        """Return how many evicted blocks are remembered: never more than there are slots."""
        return len(self._ghosts_of_once) + len(self._ghosts_of_twice)

    def resize(self, num_slots: int, slot_limit: int) -> None:  # noqa: ARG002  (its lists need no room by slot)
        """Note the number of slots, which bounds the target and the ghosts."""
        self._num_slots = num_slots

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        """Hold new blocks as used once, or more often if their ghosts were there; those held already are used again."""
        for slot, digest in zip(reversed(slots.tolist()), reversed(digests), strict=True):
            if slot in self:
                self._use(slot)
            elif digest in self._arriving_twice:
                self._arriving_twice.discard(digest)
                self._twice[slot] = digest
            elif digest in self._arriving_once:
                self._arriving_once.discard(digest)
                self._once[slot] = digest
            else:  # came without notice
                (self._once if self._recall(digest) is _Ghost.NONE else self._twice)[slot] = digest
                self._trim_ghosts()

    def touch(self, slots: Slots) -> None:
        """Count a use of the held ones; that of a leased one was counted when it was withdrawn."""
        for slot in reversed(slots.tolist()):
            if slot in self:
                self._use(slot)

    def withdraw(self, slots: Slots) -> None:
        """Count a use, and hold the blocks no longer."""
        for slot in slots.tolist():
            self._withdrawn[slot] = (self._once if slot in self._once else self._twice).pop(slot)

    def restore(self, slots: Slots) -> None:
        """Hold the blocks again, as the most recent ones of those used more than once."""
        for slot in reversed(slots.tolist()):
            self._twice[slot] = self._withdrawn.pop(slot)

    def remove(self, slots: Slots) -> None:
        """Forget the blocks, held or withdrawn. They leave no ghosts."""
        for slot in slots.tolist():
            self._once.pop(slot, None)
            self._twice.pop(slot, None)
            self._withdrawn.pop(slot, None)

    def give_up(self, digests: Sequence[bytes]) -> None:
        """Count the blocks no longer. What their ghosts have taught stays."""
        self._arriving_once.difference_update(digests)
        self._arriving_twice.difference_update(digests)

    def enter_device(self, slots: Slots) -> None:
        """Do nothing: where else a block is does not matter to it."""

    def leave_device(self, slots: Slots) -> None:
        """Do nothing."""

    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        """Take in arriving blocks one by one, the last first, and give up one block for each that has no free slot."""
        spared = set(excluding.tolist())
        once = _candidates(self._once, num_blocks, spared)
        twice = _candidates(self._twice, num_blocks, spared)
        if len(once) + len(twice) < num_blocks:
            return None
        candidates = iter(once), iter(twice)
        num_free = len(arriving) - num_blocks
        victims = [self._replace(_Ghost.NONE, *candidates) for _ in range(-num_free)]  # for nobody in particular
        for position, digest in enumerate(reversed(arriving)):
            ghost = self._recall(digest)
            if position >= num_free:
                victims.append(self._replace(ghost, *candidates))
            (self._arriving_once if ghost is _Ghost.NONE else self._arriving_twice).add(digest)
            self._trim_ghosts()
        self._trim_ghosts()
        return np.array(victims, np.int32)

    def _recall(self, digest: bytes) -> _Ghost:
        """Take the ghost of a block that comes back, if there is one, and move the target towards its list."""
        num_once, num_twice = len(self._ghosts_of_once), len(self._ghosts_of_twice)
        if digest in self._ghosts_of_once:
            del self._ghosts_of_once[digest]
            self._target = min(float(self._num_slots), self._target + max(1.0, num_twice / num_once))
            return _Ghost.OF_ONCE
        if digest in self._ghosts_of_twice:
            del self._ghosts_of_twice[digest]
            self._target = max(0.0, self._target - max(1.0, num_once / num_twice))
            return _Ghost.OF_TWICE
        return _Ghost.NONE

    def _replace(self, ghost: _Ghost, once: Iterator[int], twice: Iterator[int]) -> int:
        """Turn one block into a ghost, for one that comes; where a list has no candidate, the other one gives."""
        num_once = len(self._once) + len(self._arriving_once)
        from_once = num_once >= self._target if ghost is _Ghost.OF_TWICE else num_once > self._target
        victim = next(once, None) if from_once else next(twice, None)
        if victim is None:
            victim = next(twice) if from_once else next(once)
        if victim in self._once:
            self._ghosts_of_once[self._once.pop(victim)] = None
        else:
            self._ghosts_of_twice[self._twice.pop(victim)] = None
        return victim

    def _trim_ghosts(self) -> None:
        """Forget the oldest ghosts: blocks used once and their ghosts, and all ghosts, are as many as slots at most."""
        num_once = len(self._once) + len(self._arriving_once)
        while self._ghosts_of_once and num_once + len(self._ghosts_of_once) > self._num_slots:
            self._ghosts_of_once.popitem(last=False)
        while self._ghosts_of_twice and self.num_ghosts > self._num_slots:
            self._ghosts_of_twice.popitem(last=False)

    def _use(self, slot: int) -> None:
        if slot in self._once:
            self._twice[slot] = self._once.pop(slot)
        else:
            self._twice.move_to_end(slot)


def _candidates(oldest_first: OrderedDict[int, bytes], count: int, spared: set[int]) -> list[int]:
    """Return up to `count` slots that may be victims; looks at these and at those it has to pass over."""
    return list(islice((slot for slot in oldest_first if slot not in spared), count))
