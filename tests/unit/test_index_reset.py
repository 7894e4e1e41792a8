"""After a reset nothing of before is found, at no cost, and no slot is lost or given away too early."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import pytest

from child_processes import WAIT_S, children
from index_steps import P, Q, R, assert_no_slot_lost, begin_store, found, index_of, keys_of, store
from kvmoor.errors import BrokenError
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.block_state import BlockState
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.index.lease import LoadLease, StoreLease
from kvmoor.index.slot_arrays import NO_SLOTS, Slots
from kvmoor.transfer_messages import SlotRange


def test_nothing_of_before_is_found() -> None:
    """A reset says how many blocks were ready, and from then on all of them are absent and can be stored anew (B37)."""
    index = index_of(4)
    store(index, P[:3])

    assert 3 == index.reset()
    assert 0 == index.reset()

    assert [BlockState.ABSENT] * 3 == [index.lookup(key) for key in P[:3]]
    assert [0] == found(index, P)
    assert (0, 0, 0) == (index.touch(P), index.forget(P), index.num_ready)
    usage = index.slot_usage(0)
    assert (1, 3, 0) == (usage.free, usage.outdated, usage.evictable)
    assert tuple(P[:3]) == store(index, P[:3]).keys
    assert [3] == found(index, P)
    assert_no_slot_lost(index)


def test_a_reset_covers_all_groups() -> None:
    """One call resets the blocks of every group."""
    index = index_of(2, 3)
    store(index, [*keys_of("p", 2, 0), *keys_of("p", 3, 1)])

    assert 5 == index.reset()

    assert [0, 0] == found(index, keys_of("p", 2, 0), keys_of("p", 3, 1))
    assert [2, 3] == [index.slot_usage(group).outdated for group in range(2)]
    assert_no_slot_lost(index)


def test_a_reset_of_nothing_is_harmless() -> None:
    """An index without slots, blocks or leases can be reset."""
    for index in (BlockIndex(2), index_of(3, 0)):
        assert 0 == index.reset()
        index.check_invariants()
    assert_no_slot_lost(index)


def num_steps(call: Callable[[], object]) -> int:
    """Return how many instructions of the interpreter a call takes, which unlike its time is always the same."""
    taken = 0

    def count(frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        nonlocal taken
        frame.f_trace_opcodes = True
        taken += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return taken


def full_index(num_blocks: int) -> tuple[BlockIndex, LoadLease, StoreLease]:
    """Return an index with as many blocks ready, leased and being written, and the leases."""
    index = index_of(3 * num_blocks)
    store(index, keys_of("p", num_blocks))
    store(index, keys_of("q", num_blocks))
    return index, index.match(keys_of("q", num_blocks)), begin_store(index, keys_of("r", num_blocks))


def test_a_reset_touches_no_block() -> None:
    """A reset takes as many steps with 3,000 blocks, leased and being written among them, as with 3."""
    small, large = full_index(1)[0], full_index(1000)[0]

    assert num_steps(small.reset) == num_steps(large.reset) > 0


@pytest.mark.parametrize("eviction", POLICIES)
def test_resets_take_no_memory_by_slot(eviction: str) -> None:
    """What is kept of the time before a reset does not become resident for slots that nobody used then."""
    # In a process of its own: the more one has freed before, the more of its new arrays lie in memory that is resident.
    with children() as start:
        child = start(f"""
            import mmap
            from pathlib import Path
            from index_steps import P, begin_store
            from kvmoor.index.block_index import BlockIndex
            from kvmoor.index.eviction.policies import POLICIES
            from kvmoor.transfer_messages import SlotRange

            def resident_nbytes():
                return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

            def store_one(index):
                index.complete(begin_store(index, P[:1]))

            index = BlockIndex(1, POLICIES[{eviction!r}])
            index.publish(SlotRange(0, 0, 2_000_000))
            store_one(index)
            before = resident_nbytes()
            for _ in range(20):
                index.reset()
                store_one(index)
            print(resident_nbytes() - before)
        """)
        printed, errors = child.communicate(timeout=WAIT_S)

    assert int(printed) < 20 * 4 * 2_000_000 / 4, errors


def test_a_reset_reaches_stores_in_flight() -> None:
    """What was being stored at a reset is not found when its store completes, and its slot is free then (B37)."""
    index = index_of(6)
    store(index, P[:2])
    slow = begin_store(index, Q[:2])
    match = index.match(P[:1])

    assert 2 == index.reset()

    index.check_invariants()
    assert [0, 0] == found(index, P, Q)
    anew = begin_store(index, Q[:2])
    assert set(slow.slots).isdisjoint(anew.slots)
    assert 0 == index.complete(slow)
    assert [0] == found(index, Q)
    assert 2 == index.complete(anew)
    index.complete(match)
    index.check_invariants()
    assert [0, 2] == found(index, P, Q)
    usage = index.slot_usage(0)
    assert (2, 2, 2) == (usage.free, usage.outdated, usage.ready)
    assert_no_slot_lost(index)


def release_later(index: BlockIndex, lease: StoreLease) -> None:
    index.hold(lease)
    index.check_invariants()
    index.release_held(lease)


ENDS = [BlockIndex.complete, BlockIndex.abort, release_later]


@pytest.mark.parametrize("end_old", ENDS)
@pytest.mark.parametrize("end_new", ENDS)
@pytest.mark.parametrize("first", ["old", "new"])
def test_a_key_stored_anew_is_another_block(
    end_old: Callable[[BlockIndex, StoreLease], object],
    end_new: Callable[[BlockIndex, StoreLease], object],
    first: str,
) -> None:
    """Of two stores of one key, one begun before a reset, only the new one decides, in whichever order they end."""
    index = index_of(4)
    old = begin_store(index, P[:2])
    index.reset()
    new = begin_store(index, P[:2])
    assert set(old.slots).isdisjoint(new.slots)

    for which in [0, 1] if first == "old" else [1, 0]:
        (end_old, end_new)[which](index, (old, new)[which])
        index.check_invariants()

    assert [2 * (end_new is BlockIndex.complete)] == found(index, P)
    if end_new is BlockIndex.complete:
        assert new.slots == index.match(P, holder="r").slots
        index.release_holder("r")
    assert_no_slot_lost(index)


def test_loads_of_before_keep_their_slots() -> None:
    """A load that began before a reset reads undisturbed: its slots are given to nobody until it ends (B30, B37)."""
    index = index_of(3)
    store(index, P[:3])
    match = index.match(P[:2])
    index.start_load(match)
    index.reset()

    assert [match.slots[0] + 2] == list(store(index, Q[:1]).slots)
    assert index.prepare_store([*Q[:1], R[0]]) is None
    assert (2, 2) == (index.num_leased, index.slot_usage(0).outdated)
    index.complete(match)

    assert set(match.slots) == set(store(index, [*Q[:1], *R[:2]]).slots)
    assert_no_slot_lost(index)


def test_a_match_of_before_can_be_shortened() -> None:
    """What a match gives back after a reset is the first to give way, what it keeps is not."""
    index = index_of(3)
    store(index, P[:3])
    match = index.match(P[:3])
    slots = match.slots
    index.reset()

    match.keep(1)

    index.check_invariants()
    assert index.prepare_store(Q[:3]) is None
    assert set(slots[1:]) == set(store(index, Q[:2]).slots)
    index.abort(match)
    assert_no_slot_lost(index)


def test_many_resets_with_leases_of_many_times() -> None:
    """Leases from before several resets end in any order; each gives its own slots back, and none is lost."""
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        index = index_of(16)
        leases: list[tuple[LoadLease, StoreLease]] = []
        for _ in range(4):
            store(index, P[:2])
            leases.append((index.match(P[:2]), begin_store(index, Q[:2])))
            assert 2 == index.reset()
            index.check_invariants()
        assert (8, 8, 8) == (index.num_leased, index.num_writing, index.slot_usage(0).outdated)
        assert index.prepare_store(R[:1]) is None

        for number, position in enumerate(order):
            load, writing = leases[position]
            index.complete(load)
            assert 0 == index.complete(writing)
            lease = store(index, keys_of(f"new {number} ", 4))
            assert {*load.slots, *writing.slots} == set(lease.slots)
            assert 0 == index.num_evicted

        assert [4, 4, 4, 4] == found(index, *(keys_of(f"new {number} ", 4) for number in range(4)))
        assert_no_slot_lost(index)


def test_blocks_of_before_give_way_first() -> None:
    """Room is made by blocks of before the resets, oldest reset first, and by what is found only when they are gone."""
    index = index_of(6)
    first = store(index, P[:2])
    index.reset()
    second = store(index, P[:2])
    index.reset()
    store(index, Q[:2])
    found(index, Q)

    leases = [store(index, R[number : number + 1]) for number in range(4)]

    assert [set(first.slots), set(second.slots)] == [
        {leases[0].slots[0], leases[1].slots[0]},
        {leases[2].slots[0], leases[3].slots[0]},
    ]
    assert [()] * 4 == [lease.evicted_keys for lease in leases]
    assert 0 == index.num_evicted
    assert [2, 4] == found(index, Q, R)
    assert (Q[1],) == store(index, R[4:5]).evicted_keys
    assert 1 == index.num_evicted


def test_free_slots_come_before_blocks_of_before() -> None:
    """Nothing is taken from the time before as long as free slots suffice."""
    index = index_of(4)
    store(index, P[:2])
    index.reset()

    store(index, Q[:2])

    assert (2, 2, 0) == (index.slot_usage(0).outdated, index.slot_usage(0).ready, index.slot_usage(0).free)


def test_one_store_may_take_from_all_times() -> None:
    """Free slots, blocks of several times before and blocks that are found make room together."""
    index = index_of(6)
    for _ in range(2):
        store(index, P[:2])
        index.reset()
    store(index, Q[:1])

    assert index.prepare_store(R[:7]) is None
    index.check_invariants()
    assert (Q[0],) == store(index, R[:6]).evicted_keys

    assert [6] == found(index, R)
    assert_no_slot_lost(index)


def test_held_stores_outlast_resets() -> None:
    """Slots of a store given up before or after a reset come back with its late end, and only then."""
    index = index_of(4)
    before, after = begin_store(index, P[:2]), begin_store(index, Q[:2])
    index.hold(before)
    index.reset()
    index.hold(after)
    index.reset()
    index.check_invariants()
    assert 4 == index.num_held
    assert index.prepare_store(P[:1]) is None

    index.release_held(before)
    assert set(before.slots) == set(store(index, P[:2]).slots)
    index.release_held(after)

    assert (2, 0) == (index.slot_usage(0).free, index.num_held)
    assert [2] == found(index, P)
    assert_no_slot_lost(index)


def test_a_block_forgotten_before_a_reset_is_freed_by_its_last_load() -> None:
    """A leased block that was forgotten is not one of before the reset: its slot is free when its load ends."""
    index = index_of(2)
    store(index, P[:2])
    match = index.match(P[:2])
    index.forget(P[:1])
    assert 1 == index.reset()
    index.check_invariants()

    index.complete(match)

    usage = index.slot_usage(0)
    assert (1, 1, 0) == (usage.free, usage.outdated, usage.draining)
    assert_no_slot_lost(index)


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_policy_survives_resets(eviction: str) -> None:
    """With each policy, stores, matches and evictions go on over ten resets, and no slot is lost."""
    index = BlockIndex(1, POLICIES[eviction])
    index.publish(SlotRange(0, 0, 10))
    for number in range(10):
        prompts = [keys_of(f"{number} {name}", 6) for name in "abc"]
        matches = []
        for prompt in prompts:
            assert 6 == len(store(index, prompt).keys)
            matches.append(index.match(prompt[:2]))
            index.complete(index.match(prompt))
            matches[-1].keep(1)
        if number == 4:
            index.publish(SlotRange(0, 10, 4))
        index.reset()
        for match in matches:
            index.complete(match)
            index.check_invariants()
    assert_no_slot_lost(index)


@pytest.mark.parametrize("trouble", ["leased", "twice", "too few", "none"])
def test_a_policy_of_before_that_breaks_its_promise_is_named(trouble: str) -> None:
    """What the policy of before a reset gives is checked as well: an error, never an overwritten block."""
    broken = False

    class Broken(TailFirstLru):
        def evict(self, num_blocks: int, excluding: Slots = NO_SLOTS, arriving: Sequence[bytes] = ()) -> Slots | None:
            if not broken or num_blocks == 0:
                return super().evict(num_blocks, excluding, arriving)
            victims = {
                "leased": [free_to_go[0], match.slots[0]],
                "twice": [free_to_go[0], free_to_go[0]],
                "too few": [free_to_go[0]],
                "none": None,
            }[trouble]
            return None if victims is None else np.array(victims, np.int32)

    index = BlockIndex(1, Broken)
    index.publish(SlotRange(0, 0, 3))
    free_to_go = store(index, P[:2]).slots
    store(index, Q[:1])
    match = index.match(Q[:1])
    index.reset()
    broken = True

    with pytest.raises(BrokenError, match="was asked for 2 blocks and gave"):
        index.prepare_store(R[:2])

    assert 1 == index.num_leased
    assert [BlockState.ABSENT] * 2 == [index.lookup(key) for key in R[:2]]
