"""Slots stay in the order of their last use, whatever the ring behind them goes through."""

import random
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvmoor.index.eviction import use_order as use_order_module
from kvmoor.index.eviction.use_order import UseOrder
from kvmoor.index.slot_arrays import Slots

NUM_SLOTS = 12


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


@pytest.fixture(scope="module", autouse=True)
def small_ring() -> Iterator[None]:
    """Let a few uses fill the ring, wrap it and squeeze it, and a few victims need several looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(use_order_module, "_SPARE_ENTRIES", 3)
        patch.setattr(use_order_module, "_WINDOW", 2)
        yield


def order_of(num_slots: int = NUM_SLOTS) -> UseOrder:
    order = UseOrder()
    order.resize(num_slots)
    return order


some_slots = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=NUM_SLOTS)
calls = st.one_of(
    st.tuples(st.just("use"), some_slots),
    st.tuples(st.just("use"), some_slots),
    st.tuples(st.just("discard"), some_slots),
    st.tuples(st.just("take"), st.integers(0, 6), some_slots),
    st.tuples(st.just("take"), st.integers(0, 3), st.just([])),
)


class Model:
    """The same in a list, oldest first."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def use(self, slots: list[int]) -> None:
        self.discard(slots)
        self.held += slots

    def discard(self, slots: list[int]) -> None:
        self.held = [slot for slot in self.held if slot not in slots]

    def take(self, count: int, spared: list[int]) -> list[int]:
        taken = [slot for slot in self.held if slot not in spared][:count]
        self.discard(taken)
        return taken


def make(call: tuple, order: UseOrder, model: Model) -> None:
    """Make one call of both, and compare them."""
    match call:
        case ("use", slots):
            order.use(slots_of(*slots))
            model.use(slots)
        case ("discard", slots):
            order.discard(slots_of(*slots))
            model.discard(slots)
        case ("take", count, spared):
            taken = order.take_oldest(count, slots_of(*spared))
            assert np.int32 == taken.dtype
            assert model.take(count, spared) == taken.tolist()
    order.check_invariants()
    assert model.held == order.oldest_first().tolist()
    assert len(model.held) == len(order)
    assert set(model.held) == {slot for slot in range(NUM_SLOTS) if slot in order}


@given(st.lists(calls, max_size=60))
def test_it_agrees_with_a_list(steps: list[tuple]) -> None:
    """After any calls the held slots and their order are those of a list that moves each used one to its end."""
    order, model = order_of(), Model()
    for call in steps:
        make(call, order, model)


@given(st.lists(calls, max_size=20), st.integers(1, 4))
def test_it_agrees_with_a_list_for_as_long_as_it_is_used(steps: list[tuple], rounds: int) -> None:
    """The same calls again and again, which lead the ring around itself, change nothing of that."""
    order, model = order_of(), Model()
    for _ in range(5 * rounds):
        for call in steps:
            make(call, order, model)


def test_it_agrees_with_a_list_on_long_walks() -> None:
    """Many slots and victims at a time, with the squeezing in whichever place, change nothing of that either."""
    for seed in range(40):
        rng = random.Random(seed)
        order, model = order_of(60), Model()
        for _ in range(200):
            chosen = rng.sample(range(60), rng.randint(0, rng.choice([20, 60])))
            if rng.random() < 0.6:
                order.use(slots_of(*chosen))
                model.use(chosen)
            else:
                count = rng.randint(0, 60)
                spared = chosen if rng.random() < 0.5 else []
                assert model.take(count, spared) == order.take_oldest(count, slots_of(*spared)).tolist()
            assert model.held == order.oldest_first().tolist()
        order.check_invariants()


@pytest.mark.parametrize("slots", [range(NUM_SLOTS), range(2), [3]])
def test_uses_without_end_need_no_more_room(slots: list[int]) -> None:
    """However often slots are used, the ring stays within a few entries for each slot."""
    order = order_of()
    order.use(slots_of(*range(NUM_SLOTS)))
    for _ in range(500):
        order.use(slots_of(*slots))
    order.check_invariants()

    assert len(order._ring) <= 6 * NUM_SLOTS + 12
    rest = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert [*rest, *slots] == order.oldest_first().tolist()


def test_stale_entries_do_not_wait_until_the_ring_is_full() -> None:
    """Each use clears away some, so that what lies between the oldest and the latest use stays a few for each slot."""
    order = order_of(1000)
    order.use(slots_of(*range(1000)))
    assert len(order._ring) >= 1000
    order.discard(slots_of(*range(2, 1000)))
    for _ in range(1000):
        order.use(slots_of(0, 1))

    longest = 0
    for _ in range(500):
        order.use(slots_of(0, 1))
        longest = max(longest, order._tail - order._head)

    assert longest <= 4 * 2 + 2 * 3


def test_what_is_discarded_needs_no_room() -> None:
    """Slots that come and go one by one leave nothing in the ring that is never cleared."""
    order = order_of(1000)
    for number in range(5000):
        order.use(slots_of(number % 1000))
        order.discard(slots_of(number % 1000))
    order.check_invariants()

    assert 0 == len(order)
    assert len(order._ring) <= 20


def test_more_slots_keep_the_order() -> None:
    """A larger limit leaves what is held as it is, and makes room for the new slots."""
    order = order_of(4)
    order.use(slots_of(3, 0, 2))

    order.resize(100)
    order.use(slots_of(99))

    assert [3, 0, 2, 99] == order.oldest_first().tolist()


def test_what_is_no_slot_is_not_held() -> None:
    """Whatever is asked for, only held slots are there."""
    order = order_of(4)
    order.use(slots_of(3, 0))

    assert 3 in order
    assert np.int32(3) in order
    for other in (1, -1, 4, 10_000, b"3", None, "3", 3.5):
        assert other not in order
    assert [True, False, True, False] == order.holds(slots_of(0, 1, 3, 2)).tolist()


def test_spared_slots_keep_their_place() -> None:
    """What is passed over is the next victim, in the same order as before."""
    order = order_of()
    order.use(slots_of(*range(8)))

    assert [2, 4] == order.take_oldest(2, slots_of(3, 0, 1)).tolist()

    assert [0, 1, 3, 5, 6, 7] == order.take_oldest(8).tolist()


def test_it_gives_no_more_than_it_has() -> None:
    """Who asks for more than there is gets all of it."""
    order = order_of()
    order.use(slots_of(5, 6))

    assert [] == order.take_oldest(0).tolist()
    assert [6] == order.take_oldest(3, slots_of(5)).tolist()
    assert [5] == order.take_oldest(3).tolist()
    assert [] == order.take_oldest(3).tolist()


def test_the_arrays_it_was_given_stay_the_callers() -> None:
    """It neither writes to them nor reads them later, and what it returns is not its own memory."""
    order = order_of()
    used, spared = slots_of(1, 2, 3), slots_of(2)
    order.use(used)

    used[:] = 9
    taken = order.take_oldest(1, spared)
    assert [2] == spared.tolist()
    spared[:] = 9
    taken[:] = 9

    assert [2, 3] == order.oldest_first().tolist()
