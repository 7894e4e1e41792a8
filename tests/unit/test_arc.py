"""Adaptive replacement keeps what returns, learns from what it gave up too early, and forgets in time."""

import random
from collections.abc import Iterable, Sequence

import numpy as np

from index_steps import keys_of
from kvmoor.index.eviction.arc import TailFirstArc
from kvmoor.index.slot_arrays import Slots

A, B, C, D, E, F, G, H = (bytes([letter]) * 32 for letter in b"ABCDEFGH")


class Arc:
    """The policy of a small cache whose blocks are named by their digests: it gives them slots, like an index does."""

    def __init__(self, num_slots: int) -> None:
        self.policy = TailFirstArc()
        self.policy.resize(num_slots, num_slots)
        self.slot_of: dict[bytes, int] = {}
        self._free = list(range(num_slots))

    def insert(self, *digests: bytes) -> None:
        for digest in digests:
            if digest not in self.slot_of:
                self.slot_of[digest] = self._free.pop(0)
        self.policy.insert(self.slots(digests), digests)

    def evict(self, num_blocks: int, excluding: Iterable[bytes] = (), arriving: Sequence[bytes] = ()) -> list[bytes]:
        held = [digest for digest in excluding if digest in self.slot_of]
        victims = self.policy.evict(num_blocks, self.slots(held), arriving)
        assert victims is not None
        digest_in = {slot: digest for digest, slot in self.slot_of.items()}
        evicted = [digest_in[slot] for slot in victims.tolist()]
        self._release(evicted)
        return evicted

    def remove(self, *digests: bytes) -> None:
        self.policy.remove(self.slots(digests))
        self._release(digests)

    def store(self, *digests: bytes) -> list[bytes]:
        """Use blocks like a request does: known ones are touched, room is made for the others. Returns what went."""
        new = [digest for digest in digests if digest not in self.slot_of]
        self.policy.touch(self.slots([digest for digest in digests if digest in self.slot_of]))
        victims = self.evict(max(0, len(new) - len(self._free)), digests, new)
        self.insert(*digests)
        return victims

    def order(self) -> tuple[list[bytes], list[bytes]]:
        """Return the blocks used once and those used more often, oldest first."""
        for slot, digest in {**self.policy._once, **self.policy._twice, **self.policy._withdrawn}.items():
            assert slot == self.slot_of[digest]
        return list(self.policy._once.values()), list(self.policy._twice.values())

    def ghosts(self) -> tuple[list[bytes], list[bytes]]:
        return list(self.policy._ghosts_of_once), list(self.policy._ghosts_of_twice)

    def slots(self, digests: Iterable[bytes]) -> Slots:
        return np.array([self.slot_of[digest] for digest in digests], np.int32)

    def _release(self, digests: Iterable[bytes]) -> None:
        self._free += [self.slot_of.pop(digest) for digest in digests]


def test_a_stored_prompt_is_used_once_and_eaten_from_its_end() -> None:
    """New blocks come to those used once, the later ones of a call as the older ones."""
    arc = Arc(4)

    arc.store(A, B, C)

    assert ([C, B, A], []) == arc.order()
    assert [C, B] == arc.evict(2)


def test_a_second_use_moves_a_block() -> None:
    """A store that names held blocks moves them to those used more often, the beginning of the prompt as the newest."""
    arc = Arc(4)
    arc.store(A, B, C)

    arc.policy.touch(arc.slots([A, B]))

    assert ([C], [B, A]) == arc.order()


def test_a_load_is_a_use() -> None:
    """A block that was loaded comes back as one used more often, tail-first and newer than what came meanwhile."""
    arc = Arc(6)
    arc.store(A, B, C)
    arc.policy.withdraw(arc.slots([A, B]))
    arc.store(D)
    arc.policy.touch(arc.slots([A, B, C]))

    arc.policy.restore(arc.slots([A, B]))

    assert ([D], [C, B, A]) == arc.order()


def test_a_known_beginning_is_newer_than_the_end_that_returns() -> None:
    """Blocks that come back from their ghosts are older than the beginning of their prompt, which is of use alone."""
    arc = Arc(3)
    arc.store(A)
    arc.store(A, B)
    arc.store(C)
    arc.store(D)
    assert ([B], []) == arc.ghosts()

    arc.store(A, B)

    assert [B, A] == arc.order()[1]


def test_used_once_gives_way_first() -> None:
    """With the target at 0 no block used more often is evicted while one used once is there."""
    arc = Arc(4)
    arc.store(A, B)
    arc.store(A, B)
    arc.store(C, D)

    assert [D, C, B, A] == arc.evict(4)
    assert ([D, C], [B, A]) == arc.ghosts()


def test_a_scan_leaves_what_is_used_twice() -> None:
    """A hundred prompts that never return pass by, and what returned before them is still there."""
    arc = Arc(10)
    arc.store(A, B, C)
    arc.store(A, B, C)

    for key in keys_of("scan", 100):
        arc.store(key.digest)

    assert [C, B, A] == arc.order()[1]
    assert (10, 0.0) == (len(arc.policy), arc.policy.target)


def test_a_ghost_of_used_once_raises_the_target() -> None:
    """A block that was evicted after one use and returns says that there should be more blocks used once."""
    arc = Arc(4)
    arc.store(A, B)
    arc.store(A, B)
    arc.store(C, D)
    arc.store(E)
    assert ([D], []) == arc.ghosts()

    arc.store(D)

    assert 1.0 == arc.policy.target
    assert ([E], [B, A, D]) == arc.order()  # C was over the old and the new target
    assert ([C], []) == arc.ghosts()


def test_a_ghost_of_used_twice_lowers_the_target() -> None:
    """A block that was evicted after several uses and returns says that there should be fewer blocks used once."""
    arc = Arc(3)
    arc.policy._target = 2.0
    arc.store(A)
    arc.store(A)
    arc.store(C, B)
    assert [A] == arc.store(D)
    assert ([], [A]) == arc.ghosts()

    assert [B] == arc.store(A)

    assert 1.0 == arc.policy.target
    assert ([C, D], [A]) == arc.order()
    assert ([B], []) == arc.ghosts()


def test_blocks_evicted_from_a_cache_of_blocks_used_once_leave_no_ghosts() -> None:
    """As long as nothing has returned, nothing is remembered: the first list and its ghosts are bounded together."""
    arc = Arc(2)
    arc.store(A, B)

    assert [B] == arc.store(C)

    assert ([], []) == arc.ghosts()


def test_the_target_moves_faster_where_ghosts_are_fewer() -> None:
    """A hit among the fewer ghosts weighs as much as all the others are more."""
    arc = Arc(6)
    arc.policy._ghosts_of_once = type(arc.policy._ghosts_of_once).fromkeys([A])
    arc.policy._ghosts_of_twice = type(arc.policy._ghosts_of_twice).fromkeys([B, C, D, E])

    arc.insert(A)
    assert 4.0 == arc.policy.target
    arc.insert(B)
    assert 3.0 == arc.policy.target


def test_the_target_stays_between_nothing_and_all_slots() -> None:
    """However often one list is missed, the target is within the capacity."""
    arc = Arc(2)
    for digest in (A, B, C, D):
        arc.policy._ghosts_of_once[digest] = None
        arc.insert(digest)
        arc.remove(digest)
        assert arc.policy.target <= 2
    assert 2.0 == arc.policy.target
    for digest in (E, F, G, H):
        arc.policy._ghosts_of_twice[digest] = None
        arc.insert(digest)
        arc.remove(digest)
        assert arc.policy.target >= 0
    assert 0.0 == arc.policy.target


def test_at_its_target_only_a_ghost_of_used_twice_takes_from_used_once() -> None:
    """If as many blocks are used once as there should be, the next victim depends on who comes."""
    for newcomer, victim in ((H, A), (F, B)):
        arc = Arc(2)
        arc.insert(A)
        arc.policy.touch(arc.slots([A]))
        arc.insert(B)
        arc.policy._ghosts_of_twice[F] = None
        arc.policy._target = 1.0 if newcomer == H else 2.0  # the ghost itself takes one off

        assert [victim] == arc.evict(1, arriving=[newcomer])


def test_arriving_blocks_come_the_last_first() -> None:
    """The end of a prompt arrives, and teaches, before its beginning does."""
    arc = Arc(4)
    arc.policy._ghosts_of_once[A] = None
    arc.policy._ghosts_of_twice[B] = None

    arc.evict(0, arriving=[A, B])

    assert 1.0 == arc.policy.target  # down to 0 for B, where it was, then up for A


def test_arriving_and_leased_blocks_count_in_their_lists() -> None:
    """What has a slot and cannot be evicted now fills its list all the same."""
    arc = Arc(4)
    arc.policy._target = 1.0
    arc.store(A)
    arc.store(A)
    arc.store(B)
    arc.evict(0, arriving=[C])

    assert [B] == arc.evict(1)  # with C two are used once, which is over the target
    arc.insert(C)
    assert [A] == arc.evict(1)


def test_the_list_that_has_candidates_gives() -> None:
    """If all blocks of one list are excluded or leased, the other one gives way, whatever the target says."""
    arc = Arc(4)
    arc.store(A, B)
    arc.store(A, B)
    arc.store(C, D)

    assert [B] == arc.evict(1, [C, D])
    arc.policy.withdraw(arc.slots([A]))
    arc.policy._target = 4.0
    assert [D, C] == arc.evict(2)


def test_a_failed_store_leaves_nothing_behind() -> None:
    """Blocks that were expected and do not come count nowhere, and what they have taught stays."""
    arc = Arc(2)
    arc.store(A)
    arc.store(A)
    arc.store(B)
    arc.store(C)
    assert ([B], []) == arc.ghosts()
    assert [A] == arc.evict(1, arriving=[B])  # the target is 1 now, and so many are used once

    arc.policy.give_up([B])
    arc.evict(0, arriving=[D])
    arc.policy.give_up([D])

    assert (set(), set()) == (arc.policy._arriving_once, arc.policy._arriving_twice)
    assert (1.0, ([C], [])) == (arc.policy.target, arc.order())
    arc.insert(B)
    assert [C, B] == arc.order()[0]  # a new block: its ghost was used up


def test_a_refused_eviction_changes_nothing() -> None:
    """If too few blocks can give way, neither lists nor ghosts nor target have changed."""
    arc = Arc(3)
    arc.store(A, B, C)
    arc.store(D)
    before = (arc.order(), arc.ghosts(), arc.policy.target)

    assert arc.policy.evict(3, arc.slots([A]), [C, E, F]) is None

    assert before == (arc.order(), arc.ghosts(), arc.policy.target)


def test_ghosts_are_bounded_by_the_slots() -> None:
    """Whatever comes and goes, no more blocks are remembered than there are slots."""
    rng = random.Random(4)
    for num_slots in (1, 2, 7):
        arc = Arc(num_slots)
        keys = [key.digest for key in keys_of("k", 4 * num_slots)]
        for _ in range(400):
            start = rng.randrange(len(keys))
            arc.store(*keys[start : start + rng.randint(1, num_slots)])
            arc.remove(*(digest for digest in arc.order()[1] if rng.random() < 0.05))
            once, twice = arc.order()
            once_ghosts, twice_ghosts = arc.ghosts()
            assert len(once) + len(once_ghosts) <= num_slots
            assert len(once_ghosts) + len(twice_ghosts) == arc.policy.num_ghosts <= num_slots
            assert not {*once_ghosts, *twice_ghosts} & {*once, *twice}


def test_blocks_that_come_without_notice_bound_the_ghosts_too() -> None:
    """A block that nobody announced fills its list, and an old ghost of that list goes for it."""
    arc = Arc(2)
    arc.insert(A)
    arc.policy._ghosts_of_once[F] = None

    arc.insert(B)

    assert (([A, B], []), ([], [])) == (arc.order(), arc.ghosts())


def test_a_block_is_known_by_its_digest_when_it_comes_back_in_another_slot() -> None:
    """The ghost of a block is found whichever slot the block had, and that of another one in this slot is not."""
    arc = Arc(2)
    arc.store(A)
    arc.store(A)
    arc.store(B)
    slot_of_b = arc.slot_of[B]
    arc.store(C)
    assert (slot_of_b, ([B], [])) == (arc.slot_of[C], arc.ghosts())
    arc.remove(A)

    arc.store(B)

    assert slot_of_b != arc.slot_of[B]
    assert ([C], [B]) == arc.order()


def test_the_device_does_not_matter_to_it() -> None:
    """Blocks that enter or leave the device stay where they are in the lists."""
    arc = Arc(4)
    arc.store(A, B)
    arc.store(A, B)
    arc.store(C, D)

    arc.policy.enter_device(arc.slots([D, B]))
    arc.policy.leave_device(arc.slots([A, C]))

    assert ([D, C], [B, A]) == arc.order()


def test_its_repr_tells_how_it_stands() -> None:
    """The text shows the slots, both lists, the target and the ghosts."""
    arc = Arc(2)
    arc.store(A, B)
    arc.store(C)

    text = "<TailFirstArc of 2 slots: 2 blocks used once, the target is 0.0, 0 used more often, 0 ghosts>"
    assert text == repr(arc.policy)
