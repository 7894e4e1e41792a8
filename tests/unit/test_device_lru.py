"""Copies of what was loaded and is on the device give way first; leaving the device is a use."""

import random

import numpy as np
import pytest

from kvmoor.index.eviction.device_lru import DeviceAwareLru
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policy import EvictionPolicy
from kvmoor.index.slot_arrays import Slots

A, B, C, D, E, F = range(6)


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def insert(policy: EvictionPolicy, *numbers: int) -> None:
    policy.insert(slots_of(*numbers), [bytes([number]) * 32 for number in numbers])


def policy_of(*prompts: tuple[int, ...]) -> DeviceAwareLru:
    """Return a policy that holds some prompts, the last one as the most recent."""
    policy = DeviceAwareLru()
    policy.resize(8, 8)
    for prompt in prompts:
        insert(policy, *prompt)
    return policy


def load(policy: EvictionPolicy, *numbers: int) -> None:
    """Load blocks, as the most recent ones, and have them on the device."""
    policy.withdraw(slots_of(*numbers))
    policy.restore(slots_of(*numbers))
    policy.enter_device(slots_of(*numbers))


def evict(policy: EvictionPolicy, num_blocks: int, *excluding: int) -> list[int]:
    victims = policy.evict(num_blocks, slots_of(*excluding))
    assert victims is not None
    return victims.tolist()


def order(policy: EvictionPolicy) -> list[int]:
    """Empty the policy and return what it held, first victim first."""
    return evict(policy, len(policy))


def test_what_was_loaded_and_is_on_the_device_goes_first() -> None:
    """Copies of blocks that came to the device from here are evicted before all others, however recent they are."""
    policy = policy_of((A, B), (C, D))

    load(policy, C, D)

    assert [D, C, B, A] == order(policy)


def test_a_copy_of_what_was_computed_is_no_spare_one() -> None:
    """A block that was stored when it was computed keeps its place, though the device has it too."""
    policy = policy_of((A, B), (C, D))

    policy.enter_device(slots_of(A, C, D))

    assert [B, A, D, C] == order(policy)


def test_a_block_may_enter_while_its_load_is_under_way() -> None:
    """An engine may tell what enters before the load has ended: it was loaded all the same."""
    policy = policy_of((A, B), (C,))
    policy.withdraw(slots_of(A, B))

    policy.enter_device(slots_of(A, B))
    policy.restore(slots_of(A, B))

    assert [B, A, C] == order(policy)


def test_a_store_that_names_a_block_keeps_its_copy() -> None:
    """Whoever stores at once does not store a block again when it leaves, so what is stored anew is no spare copy."""
    policy = policy_of((A,), (B,), (C,))
    load(policy, A, B)

    insert(policy, A)
    policy.enter_device(slots_of(A))

    assert [B, C, A] == order(policy)


def test_a_block_is_as_old_as_its_absence_from_the_device() -> None:
    """What the device has dropped is the most recent of the single ones, of one prompt the end first."""
    policy = policy_of((A, B, C), (D,), (E,))
    load(policy, A, B, C)

    policy.leave_device(slots_of(A, B))

    assert [C, D, E, B, A] == order(policy)


def test_what_left_has_to_be_loaded_anew() -> None:
    """A block that left the device and was computed there again, although it is here, was not loaded."""
    policy = policy_of((A,), (B,))
    load(policy, A)
    policy.leave_device(slots_of(A))

    policy.enter_device(slots_of(A))

    assert [B, A] == order(policy)


def test_entering_again_is_no_use() -> None:
    """An engine may repeat what the device holds: the order stays."""
    policy = policy_of((A,), (B,))
    load(policy, A)
    load(policy, B)

    policy.enter_device(slots_of(A))

    assert [A, B] == order(policy)


def test_of_what_is_on_the_device_the_oldest_goes_first() -> None:
    """A use counts among the doubled ones too, and of one prompt the end goes first."""
    policy = policy_of((A, B), (C,))
    load(policy, A, B)
    load(policy, C)

    policy.touch(slots_of(A, B))

    assert [C, B, A] == order(policy)


def test_a_use_moves_a_block_among_its_own_kind() -> None:
    """A use of blocks of both kinds leaves each where it is, only more recent."""
    policy = policy_of((A, B), (C,), (D,))
    load(policy, A)
    load(policy, D)

    policy.touch(slots_of(A, B))

    assert [D, A, C, B] == order(policy)


def test_dropping_a_block_that_was_not_known_to_be_there_counts_too() -> None:
    """An engine may tell only what leaves: it was there until now all the same."""
    policy = policy_of((A,), (B,))

    policy.leave_device(slots_of(A))

    assert [B, A] == order(policy)


def test_a_leased_block_comes_back_as_what_it_has_become() -> None:
    """What is told of a block while a load leases it counts once it is restored."""
    policy = policy_of((A, B), (C, D), (E,))
    load(policy, C, D)
    policy.withdraw(slots_of(A, B, C, D))
    policy.enter_device(slots_of(A, B))
    policy.leave_device(slots_of(C, D))
    assert [E] == order(policy)

    policy.restore(slots_of(C, D))
    policy.restore(slots_of(A, B))

    assert [B, A, D, C] == order(policy)


def test_a_lease_does_not_change_where_a_block_is() -> None:
    """A block that was doubled before a load still is after it."""
    policy = policy_of((A,), (B,))
    load(policy, B)

    policy.withdraw(slots_of(B))
    policy.restore(slots_of(B))

    assert [B, A] == order(policy)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("end", ["evicted", "removed", "removed while leased"])
def test_the_next_block_of_a_slot_was_not_loaded(end: str, on_device: bool) -> None:
    """What was known of a block, that it was loaded or also that it is on the device, ends with it."""
    policy = policy_of((A,))
    policy.withdraw(slots_of(A))
    policy.restore(slots_of(A))
    if on_device:
        policy.enter_device(slots_of(A))
    if end == "evicted":
        assert [A] == evict(policy, 1)
    else:
        if end == "removed while leased":
            policy.withdraw(slots_of(A))
        policy.remove(slots_of(A))

    insert(policy, B)
    insert(policy, A)
    policy.enter_device(slots_of(A))

    assert [B, A] == order(policy)


def test_victims_of_both_kinds_make_up_the_number() -> None:
    """If the doubled ones do not suffice, the oldest of the others follow; what is excluded stays."""
    policy = policy_of((A,), (B,), (C,), (D,), (E,))
    load(policy, D)
    load(policy, E)

    assert [D, A, C] == evict(policy, 3, E, B)

    assert [E, B] == order(policy)


def test_a_refused_eviction_changes_nothing() -> None:
    """If too few blocks can give way, both kinds are what they were."""
    policy = policy_of((A,), (B,), (C,))
    load(policy, C)

    assert policy.evict(3, slots_of(B)) is None
    assert policy.evict(3, slots_of(C)) is None

    assert [C, A, B] == order(policy)


def test_more_slots_change_nothing() -> None:
    """A group that grows knows what was on the device before."""
    policy = policy_of((A,), (B,))
    load(policy, B)

    policy.resize(200, 200)
    insert(policy, 199)
    load(policy, 199)
    policy.touch(slots_of(B))

    assert [199, B, A] == order(policy)


def test_without_a_word_about_the_device_it_is_lru() -> None:
    """Whatever else is called, in whichever order, the victims are those of least recently used."""
    rng = random.Random(3)
    policies: list[EvictionPolicy] = [DeviceAwareLru(), TailFirstLru()]
    held: list[int] = []
    withdrawn: list[int] = []
    for policy in policies:
        policy.resize(30, 30)
    for _ in range(2000):
        move = rng.choice(["insert", "insert", "touch", "withdraw", "restore", "remove", "evict"])
        known = {"withdraw": held, "restore": withdrawn, "insert": sorted({*range(30)} - {*withdrawn})}
        options = known.get(move, held + withdrawn)
        chosen = rng.sample(options, rng.randint(0, min(6, len(options))))
        answers = []
        for policy in policies:
            if move == "insert":
                insert(policy, *chosen)
            elif move == "evict":
                victims = policy.evict(min(3, len(policy)), slots_of(*chosen))
                answers.append(None if victims is None else victims.tolist())
            else:
                getattr(policy, move)(slots_of(*chosen))
        if move == "restore":
            withdrawn = [slot for slot in withdrawn if slot not in chosen]
        elif move == "withdraw":
            withdrawn += chosen
        elif move == "remove":
            withdrawn = [slot for slot in withdrawn if slot not in chosen]
        held = [slot for slot in range(30) if slot in policies[0]]
        assert answers[1:] == answers[:1]
        assert held == [slot for slot in range(30) if slot in policies[1]]
    for policy in policies:
        policy.restore(slots_of(*withdrawn))
    assert order(policies[0]) == order(policies[1])


def test_its_repr_tells_how_it_stands() -> None:
    """The text shows how many blocks are of which kind."""
    policy = policy_of((A, B), (C,))
    load(policy, C)

    assert "<DeviceAwareLru: 1 loaded blocks that are on the device, 2 others>" == repr(policy)
