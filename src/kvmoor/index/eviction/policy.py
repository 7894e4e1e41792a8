"""What an eviction policy promises, and what it is promised. `kvmoor.testing.eviction_contract` checks the promises."""

from collections.abc import Sequence
from typing import Protocol

from kvmoor.index.slot_arrays import NO_SLOTS, Slots


class EvictionPolicy(Protocol):
    """Choose which blocks of one group give way. One instance a group, and a new one after each reset.

    A block that is in a slot goes by its slot number: a list of blocks is an int32 array, in the order of the prompt. A
    block that is not, or not yet, goes by its digest. The number of a slot means another block once this one has gone.

    A policy *holds* the blocks that may be evicted now: those inserted or restored and not since withdrawn, removed or
    evicted. A block that a load leases is withdrawn, so no policy has to know about leases. A block *arrives* from the
    `evict` that makes room for it until it is inserted, or given up because its store has failed.

    The caller (`BlockIndex`) guarantees:

    - one call at a time;
    - a list names a block once, in the order of the prompt: a block is of use only together with all before it;
    - a list may be empty;
    - `withdraw` names held blocks, `restore` withdrawn ones, `touch`, `remove`, `enter_device` and `leave_device`
      either; `insert` names held ones and such as arrived or came without notice, never withdrawn ones;
    - held, withdrawn and arriving blocks are never more than the slots that `resize` has told, and each slot of a list
      is below its limit.

    The implementer has to:

    - hold exactly the blocks described above, at every moment (``len(policy)``, ``slot in policy``);
    - keep the arrays only during the call, and bound what it remembers of blocks that have gone;
    - need neither `arriving` nor what is told of the device in order to hold the right blocks: both only help to
      choose victims;
    - never raise, wait or do I/O: the caller holds its lock.
    """

    def resize(self, num_slots: int, slot_limit: int) -> None:
        """Note how many slots the group has now, all below `slot_limit`. It has none at first; they only get more."""

    def insert(self, slots: Slots, digests: Sequence[bytes]) -> None:
        """Take in the blocks of one finished store. Those held already were part of the same prompt: used once more."""

    def touch(self, slots: Slots) -> None:
        """Note that blocks were used: named by a store that begins, or leased by one more load. Holds what it held."""

    def withdraw(self, slots: Slots) -> None:
        """Note that blocks were used by a load and, until they are restored, cannot be evicted."""

    def restore(self, slots: Slots) -> None:
        """Hold blocks again: the last load that used them has ended."""

    def remove(self, slots: Slots) -> None:
        """Forget blocks that have gone for another reason than eviction."""

    def give_up(self, digests: Sequence[bytes]) -> None:
        """Forget arriving blocks: their store has failed."""

    def enter_device(self, slots: Slots) -> None:
        """Note that the device's own cache holds these blocks as well; what is not known stays as it was."""

    def leave_device(self, slots: Slots) -> None:
        """Note that the device's own cache has dropped these blocks just now."""

    def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
        """Give up exactly `num_blocks` held blocks outside `excluding`, first victim first.

        They make room for a store of the `arriving` blocks. It asks for no victim where free slots suffice. None, with
        nothing changed, if and only if fewer are held outside `excluding`.
        """

    def __len__(self) -> int: ...

    def __contains__(self, slot: object) -> bool: ...
