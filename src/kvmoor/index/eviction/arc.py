"""Adaptive replacement: recency and frequency, with a balance that follows the traffic.

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03. Their T1 is `_once`, T2
`_twice`, B1 `_ghosts_of_once`, B2 `_ghosts_of_twice`, and p `_target`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from itertools import islice


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
        # Least recently used first. The upper two are held.
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._twice: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts_of_once: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts_of_twice: OrderedDict[bytes, None] = OrderedDict()
        # Not held, but in a slot: arriving blocks without a ghost; those with one, and those that a load leases.
        self._absent_once: set[bytes] = set()
        self._absent_twice: set[bytes] = set()

    def __repr__(self) -> str:
        return (
            f"<TailFirstArc of {self._num_slots} slots: {len(self._once)} blocks used once, the target is "
            f"{self._target:.1f}, {len(self._twice)} used more often, {self.num_ghosts} ghosts>"
        )

    def __len__(self) -> int:
        return len(self._once) + len(self._twice)

    def __contains__(self, digest: object) -> bool:
        return digest in self._once or digest in self._twice

    @property
    def target(self) -> float:
        """Return how many blocks used once there should be, 0 to the number of slots."""
        return self._target

    @property
    def num_ghosts(self) -> int:
        """Return how many evicted blocks are remembered: never more than there are slots."""
        return len(self._ghosts_of_once) + len(self._ghosts_of_twice)

    def resize(self, num_slots: int) -> None:
        """Note the number of slots, which bounds the target and the ghosts."""
        self._num_slots = num_slots

    def insert(self, digests: Sequence[bytes]) -> None:
        """Hold new blocks as used once, or more often if their ghosts were there; those held already are used again."""
        for digest in reversed(digests):
            if digest in self or digest in self._absent_twice:
                self._absent_twice.discard(digest)
                self._use(digest)
                continue
            if digest not in self._absent_once and self._recall(digest) is not _Ghost.NONE:  # came without notice
                self._use(digest)
            else:
                self._absent_once.discard(digest)
                self._once[digest] = None
            self._trim_ghosts()

    def touch(self, digests: Sequence[bytes]) -> None:
        """Count a use of the held ones; that of a leased one was counted when it was withdrawn."""
        for digest in reversed(digests):
            if digest in self:
                self._use(digest)

    def withdraw(self, digests: Sequence[bytes]) -> None:
        """Count a use, and hold the blocks no longer."""
        for digest in digests:
            self._drop(digest)
            self._absent_twice.add(digest)

    def restore(self, digests: Sequence[bytes]) -> None:
        """Hold the blocks again, as the most recent ones of those used more than once."""
        for digest in reversed(digests):
            self._absent_twice.remove(digest)
            self._use(digest)

    def remove(self, digests: Sequence[bytes]) -> None:
        """Forget the blocks, held, withdrawn or arriving. They leave no ghosts."""
        for digest in digests:
            self._drop(digest)
            self._absent_once.discard(digest)
            self._absent_twice.discard(digest)

    def evict(
        self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        """Take in arriving blocks one by one, the last first, and give up one block for each that has no free slot."""
        once = _candidates(self._once, num_blocks, excluding)
        twice = _candidates(self._twice, num_blocks, excluding)
        if len(once) + len(twice) < num_blocks:
            return None
        candidates = iter(once), iter(twice)
        num_free = len(arriving) - num_blocks
        victims = [self._replace(_Ghost.NONE, *candidates) for _ in range(-num_free)]  # for nobody in particular
        for position, digest in enumerate(reversed(arriving)):
            ghost = self._recall(digest)
            if position >= num_free:
                victims.append(self._replace(ghost, *candidates))
            (self._absent_once if ghost is _Ghost.NONE else self._absent_twice).add(digest)
            self._trim_ghosts()
        self._trim_ghosts()
        return victims

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

    def _replace(self, ghost: _Ghost, once: Iterator[bytes], twice: Iterator[bytes]) -> bytes:
        """Turn one block into a ghost, for one that comes; where a list has no candidate, the other one gives."""
        num_once = len(self._once) + len(self._absent_once)
        from_once = num_once >= self._target if ghost is _Ghost.OF_TWICE else num_once > self._target
        victim = next(once, None) if from_once else next(twice, None)
        if victim is None:
            victim = next(twice) if from_once else next(once)
        if victim in self._once:
            del self._once[victim]
            self._ghosts_of_once[victim] = None
        else:
            del self._twice[victim]
            self._ghosts_of_twice[victim] = None
        return victim

    def _trim_ghosts(self) -> None:
        """Forget the oldest ghosts: blocks used once and their ghosts, and all ghosts, are as many as slots at most."""
        num_once = len(self._once) + len(self._absent_once)
        while self._ghosts_of_once and num_once + len(self._ghosts_of_once) > self._num_slots:
            self._ghosts_of_once.popitem(last=False)
        while self._ghosts_of_twice and self.num_ghosts > self._num_slots:
            self._ghosts_of_twice.popitem(last=False)

    def _use(self, digest: bytes) -> None:
        self._once.pop(digest, None)
        self._twice[digest] = None
        self._twice.move_to_end(digest)

    def _drop(self, digest: bytes) -> None:
        self._once.pop(digest, None)
        self._twice.pop(digest, None)


def _candidates(oldest_first: OrderedDict[bytes, None], count: int, excluding: AbstractSet[bytes]) -> list[bytes]:
    """Return up to `count` blocks that may be victims; looks at these and at those it has to pass over."""
    return list(islice((digest for digest in oldest_first if digest not in excluding), count))
