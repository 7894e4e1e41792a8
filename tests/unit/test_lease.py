"""A lease is resolved exactly once, by the index that gave it."""

from collections.abc import Callable

import pytest

from index_steps import begin_store, index_of
from kvmoor.block_key import BlockKey
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.lease import Lease, LeaseState, LoadLease, StoreLease
from kvmoor.transfer_messages import SlotRange

KEYS = [BlockKey(bytes([number]) * 32) for number in range(8)]


def stored_index(num_blocks: int) -> BlockIndex:
    index = index_of(num_blocks)
    index.complete(begin_store(index, KEYS[:num_blocks]))
    return index


def test_a_lease_names_its_keys_and_slots() -> None:
    """A store lease has one slot for each new key, in the order of the call, and says how many were known."""
    index = stored_index(2)
    index.publish(SlotRange(0, 2, 2))

    lease = begin_store(index, [KEYS[3], KEYS[0], KEYS[2]])

    assert (KEYS[3], KEYS[2]) == lease.keys
    assert (2, 3) == lease.slots
    assert (2, 1) == (len(lease), lease.num_known)
    assert (KEYS[3], KEYS[0], KEYS[2]) == lease.call_keys
    assert ((), 0) == (lease.evicted_keys, lease.num_evicted)


def test_repr_is_the_state() -> None:
    """What a log shows of a lease is its kind, its size and what became of it."""
    index = index_of(2)
    lease = begin_store(index, KEYS[:2])

    assert "<StoreLease of 2 blocks, open>" == repr(lease)
    index.complete(lease)
    assert "<StoreLease of 2 blocks, completed>" == repr(lease)
    assert "<LoadLease of 0 blocks, open>" == repr(index.match([]))


@pytest.mark.parametrize("first", [BlockIndex.complete, BlockIndex.abort, BlockIndex.hold])
@pytest.mark.parametrize("second", [BlockIndex.complete, BlockIndex.abort, BlockIndex.hold])
def test_a_store_is_resolved_once(
    first: Callable[[BlockIndex, StoreLease], object], second: Callable[[BlockIndex, StoreLease], object]
) -> None:
    """Resolving a store a second time is refused and changes nothing."""
    index = index_of(2)
    lease = begin_store(index, KEYS[:2])
    assert not lease.resolved
    first(index, lease)
    state, usage = lease.state, index.slot_usage(0)

    with pytest.raises(RequestError, match="a lease is resolved once"):
        second(index, lease)

    assert lease.resolved
    assert (state, usage) == (lease.state, index.slot_usage(0))
    index.check_invariants()


@pytest.mark.parametrize("first", [BlockIndex.complete, BlockIndex.abort])
@pytest.mark.parametrize("second", [BlockIndex.complete, BlockIndex.abort])
def test_a_load_is_resolved_once(
    first: Callable[[BlockIndex, Lease], object], second: Callable[[BlockIndex, Lease], object]
) -> None:
    """Resolving a load a second time is refused, so that no count goes below zero (B42)."""
    index = stored_index(2)
    lease, other = index.match(KEYS[:2]), index.match(KEYS[:2])
    first(index, lease)

    with pytest.raises(RequestError, match="a lease is resolved once"):
        second(index, lease)

    assert 2 == index.num_leased
    index.check_invariants()
    index.complete(other)
    assert 0 == index.num_leased


def test_a_lease_of_another_index_is_refused() -> None:
    """An index resolves only what it gave itself."""
    index, other = stored_index(2), stored_index(2)
    load = other.match(KEYS[:2])
    other.forget(KEYS[:1])
    other.publish(SlotRange(0, 2, 1))
    store = begin_store(other, [KEYS[5]])

    for call in (
        lambda: index.complete(load),
        lambda: index.abort(store),
        lambda: index.hold(store),
        lambda: index.release_held(store),
        lambda: index.keep(load, 1),
        lambda: index.complete(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestError, match="not a lease of this index"):
            call()
    assert not load.resolved
    assert not store.resolved


def test_a_held_store_is_released_once() -> None:
    """Held slots come back exactly once, and only after they were held."""
    index = index_of(2)
    lease = begin_store(index, KEYS[:2])

    with pytest.raises(RequestError, match="is not held"):
        index.release_held(lease)
    index.hold(lease)
    assert LeaseState.HELD is lease.state
    index.release_held(lease)
    assert LeaseState.RELEASED is lease.state
    with pytest.raises(RequestError, match="is not held"):
        index.release_held(lease)

    assert 2 == index.slot_usage(0).free
    index.check_invariants()


def test_only_a_store_can_be_held() -> None:
    """A load whose copy is not proven over simply stays leased."""
    index = stored_index(1)
    lease = index.match(KEYS[:1])

    with pytest.raises(RequestError, match="stays leased until its copy is over"):
        index.hold(lease)  # type: ignore[arg-type]

    assert not lease.resolved


def test_keep_releases_the_end_of_a_match_now() -> None:
    """Blocks behind the kept ones can be evicted at once; the kept ones stay leased."""
    index = stored_index(4)
    lease = index.match(KEYS[:4])
    slots = lease.slots

    lease.keep(1)

    assert (KEYS[0],) == lease.keys
    assert slots[:1] == lease.slots
    assert 1 == index.num_leased
    index.check_invariants()
    assert index.prepare_store(KEYS[4:8]) is None
    assert begin_store(index, KEYS[4:7]).evicted_keys == (KEYS[3], KEYS[2], KEYS[1])
    index.complete(lease)
    index.check_invariants()


@pytest.mark.parametrize("num_blocks", [-1, 3])
def test_keep_refuses_numbers_outside_the_match(num_blocks: int) -> None:
    """A match keeps from none to all of its blocks."""
    index = stored_index(2)
    lease = index.match(KEYS[:2])

    with pytest.raises(RequestError, match=f"cannot keep {num_blocks}: give 0 to 2"):
        lease.keep(num_blocks)

    assert 2 == len(lease.keys)


def test_a_lease_may_keep_all_or_nothing() -> None:
    """Keeping everything changes nothing; keeping nothing leaves an empty lease that may be dropped."""
    index = stored_index(2)
    lease = index.match(KEYS[:2])

    lease.keep(2)
    assert 2 == index.num_leased
    lease.keep(0)

    assert 0 == index.num_leased
    assert [] == index.unresolved_leases()
    index.complete(lease)
    index.check_invariants()


def test_keep_after_the_end_is_refused() -> None:
    """A resolved match has nothing left to keep, and a store is not shortened."""
    index = stored_index(2)
    lease = index.match(KEYS[:2])
    index.abort(lease)

    with pytest.raises(RequestError, match="was aborted already"):
        lease.keep(1)
    with pytest.raises(RequestError, match="completed or aborted as a whole"):
        index.keep(begin_store(index, KEYS[2:3]), 0)


def test_parts_are_the_slots_by_group() -> None:
    """A lease has a part for each group, with its digests, slots and positions in the order of the call."""
    index = index_of(2, 2)
    keys = [BlockKey(bytes([number]) * 32, number % 2) for number in (1, 2, 3)]

    lease = begin_store(index, keys)

    assert [1, 0] == [part.group for part in lease.parts]
    assert [[0, 2], [1]] == [part.positions.tolist() for part in lease.parts]
    assert [[keys[0].digest, keys[2].digest], [keys[1].digest]] == [list(part.digests) for part in lease.parts]
    assert [[0, 1], [0]] == [part.slots.tolist() for part in lease.parts]
    assert 3 == len(lease) == sum(map(len, lease.parts))


def test_a_match_has_no_empty_parts() -> None:
    """A group of which nothing is matched, or nothing is kept, has no part in the lease."""
    index = index_of(2, 2)
    keys = [BlockKey(bytes([number]) * 32, number % 2) for number in (1, 2, 3)]
    index.complete(begin_store(index, keys))

    assert [1] == [part.group for part in index.match([keys[0], BlockKey(bytes(32), 0)]).parts]
    lease = index.match(keys)
    lease.keep(1)
    assert [1] == [part.group for part in lease.parts]
    lease.keep(0)
    assert [] == list(lease.parts)


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_a_load_under_way_keeps_all_its_blocks(num_blocks: int) -> None:
    """Once a load has begun its lease is not shortened; after the load is withdrawn it can be."""
    index = stored_index(2)
    lease = index.match(KEYS[:2])
    index.start_load(lease)

    with pytest.raises(RequestError, match="is being loaded"):
        lease.keep(num_blocks)
    assert 2 == index.num_leased == len(lease)
    index.cancel_load(lease)
    lease.keep(num_blocks)

    assert num_blocks == index.num_leased == len(lease)
    index.check_invariants()


@pytest.mark.parametrize("end", [BlockIndex.complete, BlockIndex.abort])
def test_a_load_is_over_when_its_lease_is(end: Callable[[BlockIndex, Lease], object]) -> None:
    """A resolved lease is in flight no more, and no load of it can begin or be withdrawn."""
    index, other = stored_index(2), stored_index(2)
    lease = index.match(KEYS[:2])
    index.start_load(lease)
    assert lease.in_flight

    end(index, lease)

    assert not lease.in_flight
    assert 0 == index.num_leased
    for call in (BlockIndex.start_load, BlockIndex.cancel_load):
        with pytest.raises(RequestError, match="a lease is resolved once"):
            call(index, lease)
        with pytest.raises(RequestError, match="not a lease of this index"):
            call(index, other.match(KEYS[:1]))


def test_unresolved_leases_are_listed_with_their_keys() -> None:
    """Whoever closes can say which blocks somebody still uses."""
    index = stored_index(3)
    store = begin_store(index, [KEYS[5]])
    load = index.match(KEYS[:1])
    done = index.match(KEYS[:2])
    index.complete(done)

    assert [store, load] == index.unresolved_leases()
    assert [(KEYS[5],), (KEYS[0],)] == [lease.keys for lease in index.unresolved_leases()]


def test_leases_are_equal_only_to_themselves() -> None:
    """Two leases on the same blocks are two leases."""
    index = stored_index(1)

    first, second = index.match(KEYS[:1]), index.match(KEYS[:1])

    assert first != second
    assert isinstance(first, LoadLease)
    assert 2 == len({first, second})
