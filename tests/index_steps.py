"""Short ways to fill an index and to ask what it finds."""

from collections.abc import Sequence

from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.lease import StoreLease
from kvmoor.transfer_messages import SlotRange


def keys_of(name: str, count: int, group: int = 0) -> list[BlockKey]:
    return [BlockKey(f"{name}{number}".encode().ljust(32), group) for number in range(count)]


def block_keys(keys: Sequence[BlockKey]) -> BlockKeys:
    """Return keys of one group as one object."""
    return BlockKeys([key.digest for key in keys], keys[0].group if keys else 0)


P, Q, R = keys_of("p", 8), keys_of("q", 8), keys_of("r", 8)


def index_of(*num_slots: int) -> BlockIndex:
    """Return an index with as many groups as numbers of slots."""
    index = BlockIndex(len(num_slots))
    for group, count in enumerate(num_slots):
        index.publish(SlotRange(group, 0, count))
    return index


def begin_store(index: BlockIndex, keys: Sequence[BlockKey]) -> StoreLease:
    lease = index.prepare_store(keys)
    assert lease is not None
    return lease


def store(index: BlockIndex, keys: Sequence[BlockKey]) -> StoreLease:
    lease = begin_store(index, keys)
    index.complete(lease)
    index.check_invariants()
    return lease


def found(index: BlockIndex, *prompts: Sequence[BlockKey]) -> list[int]:
    """Return for each prompt how many blocks a match finds."""
    lengths = []
    for prompt in prompts:
        lease = index.match(prompt)
        lengths.append(len(lease.keys))
        index.complete(lease)
    index.check_invariants()
    return lengths


def assert_no_slot_lost(index: BlockIndex) -> None:
    """Check that, with no lease open, each group can be filled anew with as many blocks as it has slots."""
    index.check_invariants()
    assert [] == index.unresolved_leases()
    for group in range(index.num_groups):
        store(index, keys_of("fresh", index.slot_usage(group).published, group))
        usage = index.slot_usage(group)
        assert usage.published == usage.ready == usage.evictable
        assert (0, 0, 0, 0) == (usage.outdated, usage.draining, usage.held, usage.leased)
