"""Slots are handed out in runs, and none is lost or handed out twice."""

import random

import numpy as np
import pytest

from kvmoor.index.slot_arrays import Slots
from kvmoor.index.slot_pool import SlotPool


def pool_of(num_slots: int) -> SlotPool:
    pool = SlotPool()
    pool.publish(0, num_slots)
    return pool


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def allocated(pool: SlotPool, num_slots: int) -> tuple[int, ...] | None:
    slots = pool.allocate(num_slots)
    assert slots is None or slots.dtype == np.int32
    return None if slots is None else tuple(slots.tolist())


def counts(pool: SlotPool) -> tuple[int, int, int]:
    pool.check_invariants()
    return pool.num_published, pool.num_free, pool.num_held


def test_a_new_pool_has_no_slots() -> None:
    """Before anything is published there is nothing to hand out, and asking for nothing gives nothing."""
    pool = SlotPool()

    assert pool.allocate(1) is None
    assert () == allocated(pool, 0)
    assert (0, 0, 0) == counts(pool)


def test_published_slots_are_free() -> None:
    """Slots published in any order, with gaps, are free at once."""
    pool = SlotPool()
    pool.publish(8, 4)
    pool.publish(0, 4)
    pool.publish(20, 0)

    assert (8, 8, 0) == counts(pool)
    assert set(range(4)) | set(range(8, 12)) == set(allocated(pool, 8) or ())


def test_all_or_nothing() -> None:
    """A request for more than what is free gets None and takes nothing."""
    pool = pool_of(3)

    assert pool.allocate(4) is None
    assert (3, 3, 0) == counts(pool)
    assert (0, 1, 2) == allocated(pool, 3)
    assert pool.allocate(1) is None


def test_neighbouring_allocations_are_adjacent() -> None:
    """Allocations from one run follow each other, so that a longer copy can join them."""
    pool = pool_of(8)

    assert (0, 1, 2) == allocated(pool, 3)
    assert (3, 4) == allocated(pool, 2)
    assert (5,) == allocated(pool, 1)


def test_ranges_published_side_by_side_are_one_run() -> None:
    """Where one published range ends and another begins makes no gap."""
    pool = SlotPool()
    pool.publish(4, 4)
    pool.publish(0, 4)

    assert (0, 1, 2, 3, 4, 5, 6, 7) == allocated(pool, 8)


def test_the_shortest_run_that_suffices_is_taken() -> None:
    """A request takes the run that fits best and leaves longer ones whole."""
    pool = pool_of(12)
    pool.allocate(12)
    pool.release(slots_of(0, 1, 2, 3, 4, 6, 7, 8, 10))  # runs of 5, 3 and 1

    assert (6, 7) == allocated(pool, 2)
    assert (8,) == allocated(pool, 1)
    assert (10,) == allocated(pool, 1)
    assert (0, 1, 2, 3, 4) == allocated(pool, 5)


def test_long_requests_take_few_pieces() -> None:
    """Where no run suffices, the longest go first and the rest comes from the run that fits it best."""
    pool = pool_of(14)
    pool.allocate(14)
    pool.release(slots_of(0, 2, 3, 5, 6, 7, 9, 10, 11, 12))  # runs of 1, 2, 3 and 4

    assert (9, 10, 11, 12, 2, 3) == allocated(pool, 6)
    assert (5, 6, 7, 0) == allocated(pool, 4)


def test_released_slots_join_their_neighbours() -> None:
    """Slots released one by one, in any order, are one run again."""
    pool = pool_of(6)
    pool.allocate(6)

    for slot in (4, 0, 2, 5, 1, 3):
        pool.release(slots_of(slot))

    assert (6, 6, 0) == counts(pool)
    assert (0, 1, 2, 3, 4, 5) == allocated(pool, 6)


def test_held_slots_are_neither_free_nor_used() -> None:
    """A held slot is not handed out until it is released, and then it is."""
    pool = pool_of(4)
    slots = slots_of(*(allocated(pool, 3) or ()))

    pool.hold(slots[:2])

    assert (4, 1, 2) == counts(pool)
    assert pool.allocate(2) is None
    pool.release_held(slots[:2])
    pool.release(slots[2:])
    assert (4, 4, 0) == counts(pool)
    assert (0, 1, 2, 3) == allocated(pool, 4)


def test_what_is_not_out_cannot_be_given_back() -> None:
    """Releasing, holding or publishing a slot twice, and a slot that does not exist, is caught."""
    pool = pool_of(4)
    used, held, *_ = allocated(pool, 3) or ()
    pool.hold(slots_of(held))

    for call in (
        lambda: pool.release(slots_of(3)),
        lambda: pool.release(slots_of(held)),
        lambda: pool.release(slots_of(used, used)),
        lambda: pool.release(slots_of(7)),
        lambda: pool.hold(slots_of(held)),
        lambda: pool.hold(slots_of(3)),
        lambda: pool.release_held(slots_of(2)),
        lambda: pool.release_held(slots_of(held, held)),
        lambda: pool.publish(3, 2),
        lambda: pool.publish(-1, 1),
        lambda: pool.allocate(-1),
    ):
        with pytest.raises(AssertionError):
            call()


def test_what_was_handed_out_is_the_callers_own() -> None:
    """Arrays of two allocations share no memory with each other or with the pool, also where nothing was asked for."""
    pool = pool_of(6)
    first, second = pool.allocate(3), pool.allocate(3)
    assert first is not None
    assert second is not None

    first[:] = 0

    assert [3, 4, 5] == second.tolist()
    pool.release(second)
    assert (6, 3, 0) == counts(pool)
    nothing = pool.allocate(0)
    assert nothing is not None
    assert 0 == len(nothing)
    pool.release(nothing)
    pool.hold(nothing)
    pool.release_held(nothing)
    assert (6, 3, 0) == counts(pool)


def test_no_slot_is_lost_or_handed_out_twice() -> None:
    """On a random walk every slot is at each moment in exactly one place."""
    rng = random.Random(7)
    pool = SlotPool()
    free: set[int] = set()
    used: list[int] = []
    held: list[int] = []
    for step in range(2000):
        if step % 200 == 0:
            first = step // 200 * 11  # ranges of 10 and a gap of 1
            pool.publish(first, 10)
            free |= set(range(first, first + 10))
        move = rng.choice(["allocate", "allocate", "release", "hold", "release_held"])
        if move == "allocate":
            wanted = rng.randint(0, 12)
            slots = allocated(pool, wanted)
            assert (slots is None) == (wanted > len(free))
            if slots is not None:
                assert wanted == len(set(slots))
                assert set(slots) <= free
                free -= set(slots)
                used += slots
        elif move == "release":
            rng.shuffle(used)
            given, used = used[:4], used[4:]
            pool.release(slots_of(*given))
            free |= set(given)
        elif move == "hold":
            given, used = used[:2], used[2:]
            pool.hold(slots_of(*given))
            held += given
        else:
            given, held = held[:3], held[3:]
            pool.release_held(slots_of(*given))
            free |= set(given)
        assert len(free) == pool.num_free
        assert len(held) == pool.num_held
        pool.check_invariants()
