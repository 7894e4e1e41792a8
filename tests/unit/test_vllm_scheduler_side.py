"""What the scheduler's half of the vLLM plugin promises. No vLLM is needed."""

import pytest

from kvmoor.coordinator import Coordinator
from kvmoor.index.block_state import ABSENT, READY, WRITING
from kvmoor.integrations.vllm.chunk_events import ChunkEvent
from kvmoor.integrations.vllm.keys import ChunkKeys
from kvmoor.integrations.vllm.scheduler_side import SchedulerSide
from kvmoor.key_builder import Namespace
from kvmoor.transfer_messages import SlotRange

A, B, C, D = (name.encode().ljust(32) + bytes(4) for name in "abcd")
OTHER_GROUP = b"a".ljust(32) + (1).to_bytes(4, "big")


TIMEOUT_S = 30.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_side(
    *, blocks_per_chunk: int = 1, num_slots: int = 4, num_ranks: int = 1, clock: Clock | None = None
) -> SchedulerSide:
    keys = ChunkKeys(
        Namespace(model="m", layout_fingerprint=bytes(32)),
        group_ids=[0, 1],
        tokens_per_block=[16, 16],
        blocks_per_chunk=blocks_per_chunk,
    )
    options = {"num_groups": 2, "num_ranks": num_ranks, "job_timeout_s": TIMEOUT_S}
    side = SchedulerSide(Coordinator(2), keys, **options, clock=clock or Clock())
    for _ in range(num_ranks):
        side.publish([SlotRange(0, 0, num_slots), SlotRange(1, 0, num_slots)])
    return side


@pytest.fixture
def side():
    side = make_side()
    side.events.keep()
    yield side
    side.coordinator.check_invariants()


def store(side: SchedulerSide, *keys: bytes, request: str = "r") -> None:
    prepared = side.prepare_store(request, list(keys))
    assert prepared is not None
    side.complete_store(request, set(prepared.keys))


def test_a_chunk_is_found_only_when_its_store_is_complete(side) -> None:
    """Until every rank has reported a store its chunks are on their way, and neither there nor absent."""
    prepared = side.prepare_store("r", [A, B])

    assert [A, B] == prepared.keys
    assert WRITING is side.lookup(A)
    side.complete_store("r", {A, B})
    assert READY is side.lookup(A)


def test_what_is_known_is_not_stored_again(side) -> None:
    """A prompt is offered again and again: known chunks cost nothing, and the others get slots."""
    store(side, A, B)

    assert [] == side.prepare_store("other", [A, B]).keys
    prepared = side.prepare_store("other", [A, B, C])
    assert [C] == prepared.keys
    assert [1, 0] == [len(slots) for slots in prepared.slots.slots]


def test_groups_have_their_own_slots(side) -> None:
    """The same hash in another group is another chunk, in a slot of that group."""
    prepared = side.prepare_store("r", [A, OTHER_GROUP])

    assert [A, OTHER_GROUP] == prepared.keys
    assert [1, 1] == [len(slots) for slots in prepared.slots.slots]


def test_nothing_is_stored_before_all_ranks_have_slots() -> None:
    """A slot that one rank has not mapped yet is not handed out."""
    side = make_side(num_ranks=2, num_slots=0)
    side.publish([SlotRange(0, 0, 4), SlotRange(1, 0, 4)])
    assert side.prepare_store("r", [A]) is None
    assert 1 == side.take_counts().declined_stores

    side.publish([SlotRange(0, 0, 2), SlotRange(1, 0, 2)])

    assert side.prepare_store("r", [A]) is not None


def test_a_store_that_failed_on_any_rank_is_never_found(side) -> None:
    """It is called complete all the same; its slots are free again, and it may be stored anew."""
    prepared = side.prepare_store("r", [A])
    side.note_failed([prepared.slots.order_id])
    side.note_failed([prepared.slots.order_id])  # a second rank says so too
    side.complete_store("r", {A})

    assert ABSENT is side.lookup(A)
    assert 1 == side.take_counts().failed_stores
    store(side, A)
    assert READY is side.lookup(A)


def test_a_failed_load_is_not_found_when_its_request_looks_again(side) -> None:
    """Else the request would load the same bytes for ever. Its slots stay until all ranks are done with them."""
    store(side, A, B)
    host = side.prepare_load("r", [A, B])
    side.note_failed([host.order_id])

    assert ABSENT is side.lookup(A)
    assert 2 == side.coordinator.statistics().leased
    side.complete_load("r", {A, B})
    assert 0 == side.coordinator.statistics().leased
    assert 1 == side.take_counts().failed_loads


def test_what_is_being_loaded_does_not_give_way(side) -> None:
    """As long as a load is open its slots are not given to others."""
    store(side, A, B, C, D)
    side.prepare_load("r", [A, B, C, D])

    assert side.prepare_store("other", [b"x".ljust(32) + bytes(4)]) is None
    side.complete_load("r", {A, B, C, D})
    assert side.prepare_store("other", [b"x".ljust(32) + bytes(4)]) is not None


def test_a_reset_forgets_everything_and_frees_slots_when_flushed(side) -> None:
    """Stores in flight keep their slots until no rank works on them, and never become visible."""
    store(side, A)
    side.prepare_store("r", [B, C])
    load = side.prepare_load("l", [A])
    side.reset()

    assert [ABSENT] * 3 == [side.lookup(key) for key in (A, B, C)]
    side.note_failed([load.order_id])  # a worker says so afterwards
    assert side.prepare_store("r", [A, B]) is None  # one slot is free, three are in use
    side.note_reset_flushed()
    store(side, A, B, C, D)
    assert [READY] * 4 == [side.lookup(key) for key in (A, B, C, D)]


def test_of_a_long_prompt_is_kept_what_fits() -> None:
    """A prompt longer than host memory is not declined step after step: its beginning is stored."""
    side = make_side(num_slots=2)
    side.limit([2, 2])

    assert [A, B] == side.prepare_store("r", [A, B, C, D]).keys


def test_a_chunk_is_found_only_with_all_its_blocks() -> None:
    """With several blocks in a chunk one that gave way makes the chunk absent, and only that one is stored again."""
    side = make_side(blocks_per_chunk=2, num_slots=5)
    store(side, A, B)
    store(side, C)  # one slot was free, so one block of an older chunk gives way

    assert 1 == [side.lookup(key) for key in (A, B)].count(ABSENT)
    (gone,) = [key for key in (A, B) if side.lookup(key) is ABSENT]
    prepared = side.prepare_store("r", [gone])
    assert [gone] == prepared.keys
    assert 1 == (prepared.slots.slots[0] == -1).sum()


def test_events_tell_of_chunks(side) -> None:
    """Stored, given way, and dropped for a failed load: each is told once, in vLLM's names."""
    store(side, A, B, C, D)
    prepared = side.prepare_store("r", [b"x".ljust(32) + bytes(4)])
    assert 1 == len(prepared.evicted)
    kept = next(key for key in (A, B, C, D) if key not in prepared.evicted)
    side.note_failed([side.prepare_load("l", [kept]).order_id])

    events = side.events.take()

    assert [
        ChunkEvent([A, B, C, D], removed=False),
        ChunkEvent(prepared.evicted, removed=True),
        ChunkEvent([kept], removed=True),
    ] == events
    assert [] == side.events.take()
    side.complete_load("l", {kept})


def test_requests_that_load_the_same_are_told_apart(side) -> None:
    """Each load has its own lease, whoever completes first."""
    store(side, A)
    side.prepare_load("one", [A])
    side.prepare_load("two", [A])
    side.complete_load("two", {A})

    assert 1 == side.coordinator.statistics().leased
    side.complete_load("one", {A})
    assert 0 == side.coordinator.statistics().leased


def test_a_store_that_takes_too_long_is_waited_for_by_nobody() -> None:
    """A copy that is never proven over keeps its slots, not the requests that share its prefix."""
    clock = Clock()
    side = make_side(clock=clock)
    side.prepare_store("r", [A, B])
    clock.now_s = TIMEOUT_S
    side.give_up_overdue_stores()
    assert WRITING is side.lookup(A)

    clock.now_s += 0.1
    side.give_up_overdue_stores()

    assert ABSENT is side.lookup(A)
    assert (0, 2) == (side.coordinator.statistics().writing, side.coordinator.statistics().held)
    assert 1 == side.take_counts().failed_stores
    store(side, A, B, request="other")
    assert READY is side.lookup(A)
    side.complete_store("r", {A, B})
    assert (2, 0) == (side.coordinator.statistics().ready, side.coordinator.statistics().held)
    side.coordinator.check_invariants()


def test_a_load_that_takes_long_keeps_its_lease() -> None:
    """Only stores are given up here: a rank says when a load is over, or ends the engine."""
    clock = Clock()
    side = make_side(clock=clock)
    store(side, A)
    side.prepare_load("r", [A])
    clock.now_s = 10 * TIMEOUT_S
    side.give_up_overdue_stores()

    assert READY is side.lookup(A)
    side.complete_load("r", {A})
    side.coordinator.check_invariants()


def test_a_failed_store_that_is_not_over_is_not_begun_again(side) -> None:
    """VLLM names a job by request and chunks, so two of one name could not be told apart: it is asked to try later."""
    order_id = side.prepare_store("r", [A, B]).slots.order_id
    side.note_failed([order_id])

    assert side.prepare_store("r", [A, B]) is None
    side.complete_store("r", {A, B})
    assert [A, B] == side.prepare_store("r", [A, B]).keys
    side.complete_store("r", {A, B})
    assert READY is side.lookup(B)


def test_a_store_that_failed_before_a_reset_gives_its_slots_back(side) -> None:
    """Its slots stay out of use until no rank works on it any more, and are free then."""
    side.note_failed([side.prepare_store("r", [A, B]).slots.order_id])
    side.reset()
    assert 2 == side.coordinator.statistics().held

    side.note_reset_flushed()

    assert 0 == side.coordinator.statistics().held
    store(side, A, B, C, D)
