"""The keys of a call are checked and sorted by group, whichever way they are given."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from index_steps import P, Q, begin_store, block_keys, found, index_of, keys_of, store
from kvmoor.block_key import BlockKey, BlockKeys
from kvmoor.errors import RequestError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.call_keys import keys_by_group
from kvmoor.index.lease import Lease, StoreLease
from kvmoor.transfer_messages import SlotRange

MIXED = [key for pair in zip(keys_of("m", 4, 1), keys_of("m", 4, 0), strict=True) for key in pair]
"""Keys of groups 1 and 0 in turn."""


def every_call(index: BlockIndex) -> list[Callable[[Sequence[BlockKey]], object]]:
    """Return all calls that take several keys."""
    return [
        index.prepare_store,
        index.match,
        index.join,
        index.touch,
        index.forget,
        index.enter_device,
        index.leave_device,
    ]


def as_plain(keys: Sequence[BlockKey], num_groups: int) -> list[tuple[int, list[bytes], list[int]]]:
    return [(call.group, list(call.digests), call.positions.tolist()) for call in keys_by_group(keys, num_groups)]


def test_keys_are_sorted_by_group() -> None:
    """Groups come in the order in which the call names them first, with the digests and positions of each in order."""
    assert [
        (1, [key.digest for key in MIXED[::2]], [0, 2, 4, 6]),
        (0, [key.digest for key in MIXED[1::2]], [1, 3, 5, 7]),
    ] == as_plain(MIXED, 2)


@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_both_kinds_of_keys_are_sorted_alike(group: int, count: int) -> None:
    """A list of keys of one group, a tuple of them and `BlockKeys` give the same."""
    keys = keys_of("p", count, group)

    assert as_plain(keys, 3) == as_plain(tuple(keys), 3) == as_plain(BlockKeys([k.digest for k in keys], group), 3)
    assert [] == keys_by_group((), 3)
    for call in keys_by_group(keys, 3):
        assert np.issubdtype(call.positions.dtype, np.integer)


def test_a_slice_of_keys_has_positions_of_its_own() -> None:
    """Positions count in the call, not in what it was cut from."""
    assert [(0, [key.digest for key in P[3:5]], [0, 1])] == as_plain(block_keys(P)[3:5], 1)


def test_long_calls_have_all_their_positions() -> None:
    """Whatever was asked before, each call has one position for each key."""
    for count in (10, 5000, 100_001, 10):
        (call,) = keys_by_group(BlockKeys([number.to_bytes(32) for number in range(count)]), 1)
        assert list(range(count)) == call.positions.tolist()


def test_both_kinds_of_keys_have_the_same_effects() -> None:
    """On 3,000 random calls an index finds, stores and evicts the same for `BlockKeys` as for lists of keys."""
    rng = random.Random(5)
    indexes = [BlockIndex(2), BlockIndex(2)]
    for index in indexes:
        index.publish(SlotRange(0, 0, 6))
        index.publish(SlotRange(1, 0, 4))
    prompts = [keys_of(name, 8, group) for name in "pq" for group in range(2)]
    open_leases: list[list[Lease]] = []
    for _ in range(3000):
        keys = rng.choice(prompts)[: rng.randint(0, 8)]
        move = rng.choice(["prepare_store", "prepare_store", "match", "match", "forget", "touch", "complete", "abort"])
        if move in {"complete", "abort"}:
            if open_leases:
                leases = open_leases.pop(rng.randrange(len(open_leases)))
                results = [getattr(index, move)(lease) for index, lease in zip(indexes, leases, strict=True)]
                assert results[0] == results[1]
            continue
        if move == "forget":
            keys = keys[:1]
        first, second = getattr(indexes[0], move)(keys), getattr(indexes[1], move)(block_keys(keys))
        if not isinstance(first, Lease):
            assert first == second
            continue
        assert (list(first.keys), first.slots) == (list(second.keys), second.slots)
        if isinstance(first, StoreLease):
            assert (first.evicted_keys, first.num_known) == (second.evicted_keys, second.num_known)
            assert list(first.call_keys) == list(second.call_keys)
        open_leases.append([first, second])
    for group in range(2):
        assert indexes[0].slot_usage(group) == indexes[1].slot_usage(group)


@pytest.mark.parametrize("absent", range(8))
def test_a_match_over_groups_ends_at_the_first_block_that_is_absent(absent: int) -> None:
    """The order of the call decides, whichever group the first missing block is of, and no other group leases more."""
    index = index_of(4, 4)
    store(index, MIXED)
    index.forget(MIXED[absent : absent + 1])

    match = index.match(MIXED)

    assert tuple(MIXED[:absent]) == tuple(match.keys)
    assert absent == len(match) == len(match.slots) == index.num_leased
    index.check_invariants()
    index.complete(match)
    assert [absent] == found(index, MIXED)


@pytest.mark.parametrize("kept", range(9))
def test_a_match_over_groups_is_cut_in_the_order_of_the_call(kept: int) -> None:
    """What is kept of a match are its first blocks, whichever groups they are of."""
    index = index_of(4, 4)
    store(index, MIXED)
    match = index.match(MIXED)
    slots = match.slots

    match.keep(kept)

    assert (tuple(MIXED[:kept]), slots[:kept]) == (tuple(match.keys), match.slots)
    assert kept == index.num_leased
    index.check_invariants()


def test_a_store_over_groups_names_its_slots_in_the_order_of_the_call() -> None:
    """Some blocks known, some new, in two groups in turn: each key has its own slot."""
    index = index_of(4, 4)
    known = store(index, [MIXED[2], MIXED[5]])
    lease = begin_store(index, MIXED)
    index.complete(lease)

    slot_of = {**dict(zip(known.keys, known.slots, strict=True)), **dict(zip(lease.keys, lease.slots, strict=True))}

    assert tuple(key for key in MIXED if key not in known.keys) == tuple(lease.keys)
    assert 2 == lease.num_known
    match = index.match(MIXED)
    assert tuple(slot_of[key] for key in MIXED) == match.slots


def test_duplicate_keys_are_refused() -> None:
    """A key named twice in one call is refused with both positions, and nothing changes."""
    index = index_of(3)
    store(index, P[:1])

    for call in every_call(index):
        with pytest.raises(RequestError, match=r"BlockKey\(.*, group=0\) stands at positions 1 and 3"):
            call([P[0], Q[0], P[1], Q[0]])

    assert (2, []) == (index.slot_usage(0).free, index.unresolved_leases())


def test_one_digest_in_two_groups_is_no_duplicate() -> None:
    """The same content in two groups is two blocks."""
    index = index_of(1, 1)

    assert [2] == found(index, store(index, [BlockKey(bytes(32), 0), BlockKey(bytes(32), 1)]).keys)


def test_groups_that_do_not_exist_are_refused() -> None:
    """A key or a range of an unknown group is refused with what exists, and nothing changes."""
    index = index_of(1, 1)
    stray = BlockKey(bytes(32), 2)

    for call in every_call(index):
        with pytest.raises(RequestError, match=r"key 1, .* the index has groups 0 to 1"):
            call([P[0], stray])
    for call in every_call(index):
        with pytest.raises(RequestError, match=r"1 keys of group 2.* the index has groups 0 to 1"):
            call(block_keys([stray]))
    for call in (
        lambda: index.lookup(stray),
        lambda: index.contains(stray),
        lambda: index.publish(SlotRange(2, 0, 1)),
        lambda: index.slot_usage(-1),
    ):
        with pytest.raises(RequestError, match="the index has groups 0 to 1"):
            call()
    assert BlockState.ABSENT is index.lookup(P[0])
    index.check_invariants()


def test_what_is_no_key_is_refused() -> None:
    """A bare digest is refused by position, and an index needs a group."""
    with pytest.raises(RequestError, match="key 1 is a bytes: give BlockKey objects"):
        index_of(1).match([P[0], bytes(32)])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="num_groups is 0"):
        BlockIndex(0)


@pytest.mark.parametrize(("num_zeros", "num_keys"), [(1, 2), (16, 2), (31, 2), (32, 1)])
def test_digests_that_end_in_zero_bytes_are_whole(num_zeros: int, num_keys: int) -> None:
    """A digest that ends in zeros is found, evicted and named like any other."""
    index = index_of(2)
    keys = [BlockKey(bytes([number + 1]) * (32 - num_zeros) + bytes(num_zeros)) for number in range(num_keys)]
    assert tuple(keys) == store(index, keys).keys
    assert [len(keys)] == found(index, keys)

    evicted = store(index, Q[:2]).evicted_keys

    assert tuple(reversed(keys)) == evicted
    assert {BlockState.ABSENT} == {index.lookup(key) for key in keys}
    store(index, keys[:1])
    assert 1 == index.forget(keys[:1])
    index.check_invariants()
