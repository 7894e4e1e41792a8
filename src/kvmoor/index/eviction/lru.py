"""Least recently used, eating prompts from their ends."""

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice


class TailFirstLru:
    """Evict what was used longest ago, and of one prompt the end first. An `EvictionPolicy`.

    Blocks named in one call are ordered as if the last of them had been used first, because the beginning of a prompt
    is of use without its end and not the other way round.

    A block is in use until the last lease on it ends, so that moment counts, not the one of its match. As every match
    that covers a block covers all before it, no block of a prompt then becomes older than those behind it.
    """

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._oldest_first)

    def __contains__(self, digest: object) -> bool:
        return digest in self._oldest_first

    def resize(self, num_slots: int) -> None:
        """Need no number of slots: what was used last does not depend on it."""

    def insert(self, digests: Sequence[bytes]) -> None:
        """Make blocks the most recent ones, the first of the list the very most."""
        for digest in reversed(digests):
            self._oldest_first[digest] = None
            self._oldest_first.move_to_end(digest)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Make the held ones the most recent ones; a leased block gets its place when it is restored."""
        self.insert([digest for digest in digests if digest in self._oldest_first])

    def withdraw(self, digests: Sequence[bytes]) -> None:
        """Hold the blocks no longer."""
        for digest in digests:
            del self._oldest_first[digest]

    def restore(self, digests: Sequence[bytes]) -> None:
        """Hold the blocks again, as the most recent ones."""
        self.insert(digests)

    def remove(self, digests: Sequence[bytes]) -> None:
        """Forget the blocks, held or not."""
        for digest in digests:
            self._oldest_first.pop(digest, None)

    def evict(
        self,
        num_blocks: int,
        excluding: AbstractSet[bytes],
        arriving: Sequence[bytes] = (),  # noqa: ARG002  (recency asks only about what is there)
    ) -> list[bytes] | None:
        """Give up the oldest blocks, whatever arrives. Looks at `num_blocks` and as many as it has to pass over."""
        candidates = (digest for digest in self._oldest_first if digest not in excluding)
        victims = list(islice(candidates, num_blocks))
        if len(victims) < num_blocks:
            return None
        self.withdraw(victims)
        return victims
