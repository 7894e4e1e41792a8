"""What an eviction policy promises, and what it is promised. `kvmoor.testing.eviction_contract` checks the promises."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol


class EvictionPolicy(Protocol):
    """Choose which blocks of one group give way. One instance a group; it sees digests, never slots or bytes.

    A policy *holds* the blocks that may be evicted now: those inserted or restored and not since withdrawn, removed or
    evicted. A block that a load leases is withdrawn, so no policy has to know about leases. A block *arrives* from the
    `evict` that makes room for it until it is inserted, or removed because its store has failed: it has a slot, is not
    held, and is no victim.

    The caller (`BlockIndex`) guarantees:

    - one call at a time;
    - a list names a block once, in the order of the prompt: a block is of use only together with all before it;
    - a list may be empty;
    - `withdraw` names held blocks, `restore` withdrawn ones, `touch` either, `remove` these and arriving ones;
      `insert` names no withdrawn ones. Only `insert` and the `arriving` of `evict` name blocks that have gone or are
      new: `evict` none but these;
    - held, withdrawn and arriving blocks are never more than the slots that `resize` has told.

    The implementer has to:

    - hold exactly the blocks described above, at every moment (``len(policy)``, ``digest in policy``);
    - keep the lists only during the call, and bound what it remembers of blocks that have gone;
    - need neither `resize` nor `arriving` in order to hold the right blocks: both only help to choose victims;
    - never raise, wait or do I/O: the caller holds its lock.
    """

    def resize(self, num_slots: int) -> None:
        """Note how many slots the group has now. It has none at first, and they only become more."""

    def insert(self, digests: Sequence[bytes]) -> None:
        """Take in the blocks of one finished store. Those held already were part of the same prompt: used once more."""

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note that blocks were used: named by a store that begins, or leased by one more load. Holds what it held."""

    def withdraw(self, digests: Sequence[bytes]) -> None:
        """Note that blocks were used by a load and, until they are restored, cannot be evicted."""

    def restore(self, digests: Sequence[bytes]) -> None:
        """Hold blocks again: the last load that used them has ended."""

    def remove(self, digests: Sequence[bytes]) -> None:
        """Forget blocks that have gone for another reason than eviction."""

    def evict(
        self, num_blocks: int, excluding: AbstractSet[bytes], arriving: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        """Give up exactly `num_blocks` held blocks outside `excluding`, first victim first.

        They make room for a store of the `arriving` blocks. It asks for no victim where free slots suffice. None, with
        nothing changed, if and only if fewer are held outside `excluding`.
        """

    def __len__(self) -> int: ...

    def __contains__(self, digest: object) -> bool: ...
