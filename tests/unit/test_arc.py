"""Adaptive replacement keeps what returns, learns from what it gave up too early, and forgets in time."""

import random

from index_steps import P, Q, R, keys_of
from kvmoor.block_key import BlockKey
from kvmoor.index.block_index import BlockIndex
from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.lease import Lease
from kvmoor.transfer_messages import SlotRange

A, B, C, D, E, F, G, H = (bytes([letter]) * 32 for letter in b"ABCDEFGH")
NOTHING: frozenset[bytes] = frozenset()


def policy_of(num_slots: int) -> TailFirstArc:
    policy = TailFirstArc()
    policy.resize(num_slots)
    return policy


def store(policy: TailFirstArc, *digests: bytes) -> list[bytes]:
    """Use blocks like a request does: those held are touched, room is made for the others. Returns what gave way."""
    new = [digest for digest in digests if digest not in policy]
    policy.touch([digest for digest in digests if digest in policy])
    num_free = policy._num_slots - len(policy)
    victims = policy.evict(max(0, len(new) - num_free), frozenset(digests), new)
    assert victims is not None
    policy.insert(digests)
    return victims


def order(policy: TailFirstArc) -> tuple[list[bytes], list[bytes]]:
    """Return the blocks used once and those used more often, oldest first."""
    return list(policy._once), list(policy._twice)


def ghosts(policy: TailFirstArc) -> tuple[list[bytes], list[bytes]]:
    return list(policy._ghosts_of_once), list(policy._ghosts_of_twice)


def test_a_stored_prompt_is_used_once_and_eaten_from_its_end() -> None:
    """New blocks come to those used once, the later ones of a call as the older ones."""
    policy = policy_of(4)

    store(policy, A, B, C)

    assert ([C, B, A], []) == order(policy)
    assert [C, B] == policy.evict(2, NOTHING)


def test_a_second_use_moves_a_block() -> None:
    """A store that names held blocks moves them to those used more often, the beginning of the prompt as the newest."""
    policy = policy_of(4)
    store(policy, A, B, C)

    policy.touch([A, B])

    assert ([C], [B, A]) == order(policy)


def test_a_load_is_a_use() -> None:
    """A block that was loaded comes back as one used more often, tail-first and newer than what came meanwhile."""
    policy = policy_of(6)
    store(policy, A, B, C)
    policy.withdraw([A, B])
    store(policy, D)
    policy.touch([A, B, C])

    policy.restore([A, B])

    assert ([D], [C, B, A]) == order(policy)


def test_a_known_beginning_is_newer_than_the_end_that_returns() -> None:
    """Blocks that come back from their ghosts are older than the beginning of their prompt, which is of use alone."""
    policy = policy_of(3)
    store(policy, A)
    store(policy, A, B)
    store(policy, C)
    store(policy, D)
    assert ([B], []) == ghosts(policy)

    store(policy, A, B)

    assert [B, A] == order(policy)[1]


def test_used_once_gives_way_first() -> None:
    """With the target at 0 no block used more often is evicted while one used once is there."""
    policy = policy_of(4)
    store(policy, A, B)
    store(policy, A, B)
    store(policy, C, D)

    assert [D, C, B, A] == policy.evict(4, NOTHING)
    assert ([D, C], [B, A]) == ghosts(policy)


def test_a_scan_leaves_what_is_used_twice() -> None:
    """A hundred prompts that never return pass by, and what returned before them is still there."""
    policy = policy_of(10)
    store(policy, A, B, C)
    store(policy, A, B, C)

    for key in keys_of("scan", 100):
        store(policy, key.digest)

    assert [C, B, A] == order(policy)[1]
    assert (10, 0.0) == (len(policy), policy.target)


def test_a_ghost_of_used_once_raises_the_target() -> None:
    """A block that was evicted after one use and returns says that there should be more blocks used once."""
    policy = policy_of(4)
    store(policy, A, B)
    store(policy, A, B)
    store(policy, C, D)
    store(policy, E)
    assert ([D], []) == ghosts(policy)

    store(policy, D)

    assert 1.0 == policy.target
    assert ([E], [B, A, D]) == order(policy)  # C was over the old and the new target
    assert ([C], []) == ghosts(policy)


def test_a_ghost_of_used_twice_lowers_the_target() -> None:
    """A block that was evicted after several uses and returns says that there should be fewer blocks used once."""
    policy = policy_of(3)
    policy._target = 2.0
    store(policy, A)
    store(policy, A)
    store(policy, C, B)
    assert [A] == store(policy, D)
    assert ([], [A]) == ghosts(policy)

    assert [B] == store(policy, A)

    assert 1.0 == policy.target
    assert ([C, D], [A]) == order(policy)
    assert ([B], []) == ghosts(policy)


def test_blocks_evicted_from_a_cache_of_blocks_used_once_leave_no_ghosts() -> None:
    """As long as nothing has returned, nothing is remembered: the first list and its ghosts are bounded together."""
    policy = policy_of(2)
    store(policy, A, B)

    assert [B] == store(policy, C)

    assert ([], []) == ghosts(policy)


def test_the_target_moves_faster_where_ghosts_are_fewer() -> None:
    """A hit among the fewer ghosts weighs as much as all the others are more."""
    policy = policy_of(6)
    policy._ghosts_of_once = type(policy._ghosts_of_once).fromkeys([A])
    policy._ghosts_of_twice = type(policy._ghosts_of_twice).fromkeys([B, C, D, E])

    policy.insert([A])
    assert 4.0 == policy.target
    policy.insert([B])
    assert 3.0 == policy.target


def test_the_target_stays_between_nothing_and_all_slots() -> None:
    """However often one list is missed, the target is within the capacity."""
    policy = policy_of(2)
    for digest in (A, B, C, D):
        policy._ghosts_of_once[digest] = None
        policy.insert([digest])
        assert policy.target <= 2
    assert 2.0 == policy.target
    for digest in (E, F, G, H):
        policy._ghosts_of_twice[digest] = None
        policy.insert([digest])
        assert policy.target >= 0
    assert 0.0 == policy.target


def test_at_its_target_only_a_ghost_of_used_twice_takes_from_used_once() -> None:
    """If as many blocks are used once as there should be, the next victim depends on who comes."""
    for newcomer, victim in ((H, A), (F, B)):
        policy = policy_of(2)
        policy.insert([A])
        policy.touch([A])
        policy.insert([B])
        policy._ghosts_of_twice[F] = None
        policy._target = 1.0 if newcomer == H else 2.0  # the ghost itself takes one off

        assert [victim] == policy.evict(1, NOTHING, [newcomer])


def test_arriving_blocks_come_the_last_first() -> None:
    """The end of a prompt arrives, and teaches, before its beginning does."""
    policy = policy_of(4)
    policy._ghosts_of_once[A] = None
    policy._ghosts_of_twice[B] = None

    policy.evict(0, NOTHING, [A, B])

    assert 1.0 == policy.target  # down to 0 for B, where it was, then up for A


def test_arriving_and_leased_blocks_count_in_their_lists() -> None:
    """What has a slot and cannot be evicted now fills its list all the same."""
    policy = policy_of(4)
    policy._target = 1.0
    store(policy, A)
    store(policy, A)
    store(policy, B)
    policy.evict(0, NOTHING, [C])

    assert [B] == policy.evict(1, NOTHING)  # with C two are used once, which is over the target
    policy.insert([C])
    assert [A] == policy.evict(1, NOTHING)


def test_the_list_that_has_candidates_gives() -> None:
    """If all blocks of one list are excluded or leased, the other one gives way, whatever the target says."""
    policy = policy_of(4)
    store(policy, A, B)
    store(policy, A, B)
    store(policy, C, D)

    assert [B] == policy.evict(1, frozenset([C, D]))
    policy.withdraw([A])
    policy._target = 4.0
    assert [D, C] == policy.evict(2, NOTHING)


def test_a_failed_store_leaves_nothing_behind() -> None:
    """Blocks that were expected and do not come count nowhere, and what they have taught stays."""
    policy = policy_of(2)
    store(policy, A)
    store(policy, A)
    store(policy, B)
    store(policy, C)
    assert ([B], []) == ghosts(policy)
    assert [A] == policy.evict(1, NOTHING, [B])  # the target is 1 now, and so many are used once

    policy.remove([B])
    policy.evict(0, NOTHING, [D])
    policy.remove([D])

    assert (set(), set()) == (policy._absent_once, policy._absent_twice)
    assert (1.0, ([C], [])) == (policy.target, order(policy))
    policy.insert([B])
    assert [C, B] == order(policy)[0]  # a new block: its ghost was used up


def test_a_refused_eviction_changes_nothing() -> None:
    """If too few blocks can give way, neither lists nor ghosts nor target have changed."""
    policy = policy_of(3)
    store(policy, A, B, C)
    store(policy, D)
    before = (order(policy), ghosts(policy), policy.target)

    assert policy.evict(3, frozenset([A]), [C, E, F]) is None

    assert before == (order(policy), ghosts(policy), policy.target)


def test_ghosts_are_bounded_by_the_slots() -> None:
    """Whatever comes and goes, no more blocks are remembered than there are slots, also in a group without any."""
    rng = random.Random(4)
    for num_slots in (1, 2, 7):
        policy = policy_of(num_slots)
        keys = [key.digest for key in keys_of("k", 4 * num_slots)]
        for _ in range(400):
            start = rng.randrange(len(keys))
            store(policy, *keys[start : start + rng.randint(1, num_slots)])
            policy.remove([digest for digest in policy._twice if rng.random() < 0.05])
            once_ghosts, twice_ghosts = ghosts(policy)
            assert len(policy._once) + len(once_ghosts) <= num_slots
            assert len(once_ghosts) + len(twice_ghosts) == policy.num_ghosts <= num_slots
            assert not {*once_ghosts, *twice_ghosts} & {*policy._once, *policy._twice}
    unsized = TailFirstArc()
    unsized.insert([A, B])
    assert [B] == unsized.evict(1, NOTHING)
    assert 0 == unsized.num_ghosts


def test_an_index_tells_its_policy_all_it_needs() -> None:
    """Slots, stores that fail, loads and resets reach the policy: its books and those of the index agree throughout."""
    rng = random.Random(5)
    policy = TailFirstArc()
    index = BlockIndex(1, lambda: policy)
    prompts = [P, Q, R, P[:3] + Q[3:], [BlockKey(key.digest) for key in keys_of("s", 8)]]
    stores: list[Lease] = []
    loads: list[Lease] = []
    for step in range(3000):
        if step % 500 == 0:
            index.publish(SlotRange(0, 2 * (step // 500), 2))
        keys = rng.choice(prompts)[: rng.randint(1, 6)]
        move = rng.choice(["store", "store", "match", "end store", "fail store", "end load", "forget", "clear"])
        if move == "store" and (lease := index.prepare_store(keys)):
            stores.append(lease)
        elif move == "match" and (match := index.match(keys)).keys:
            loads.append(match)
        elif move == "end store" and stores:
            index.complete(stores.pop(rng.randrange(len(stores))))
        elif move == "fail store" and stores:
            index.abort(stores.pop(rng.randrange(len(stores))))
        elif move == "end load" and loads:
            index.complete(loads.pop(rng.randrange(len(loads))))
        elif move == "forget":
            index.forget(keys[:1])
        elif move == "clear" and rng.random() < 0.05:
            index.clear()
        index.check_invariants()
        assert index.num_published == policy._num_slots
        group = index._groups[0]
        not_held = {digest for digest in group.slot_of if digest not in policy}  # being written, or leased
        assert not_held == policy._absent_once | policy._absent_twice
        assert policy.num_ghosts <= policy._num_slots
    assert index.num_evicted > 50


def test_its_repr_tells_how_it_stands() -> None:
    """The text shows the slots, both lists, the target and the ghosts."""
    policy = policy_of(2)
    store(policy, A, B)
    store(policy, C)

    assert "<TailFirstArc of 2 slots: 2 blocks used once, the target is 0.0, 0 used more often, 0 ghosts>" == repr(
        policy
    )
