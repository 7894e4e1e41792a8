"""How the ticket of the one copy reaches the ranks that read it, and what holds until then. No vLLM is needed."""

import logging
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.integrations.vllm.rank_sizes import RankSizes, least_slots
from kvmoor.integrations.vllm.shared_copy import (
    ATTACH_ATTEMPTS,
    ATTACHED,
    TicketReader,
    TicketRoute,
    why_each_rank_keeps_a_copy,
)
from kvmoor.integrations.vllm.worker_side import WorkerSide
from kvmoor.transfer_messages import OrderId, SlotRange
from reading_rig import JOB_TIMEOUT_S, NUM_SLOTS, WAIT_S, Owner, Reader

SLOTS = (SlotRange(0, 0, NUM_SLOTS),)


@pytest.fixture
def owner():
    with Owner() as owner:
        owner.publish()
        owner.keep(1, {3: 33})
        yield owner


@pytest.fixture
def reader():
    with Reader() as reader:
        yield reader


def side_of(reader):
    return WorkerSide(
        reader.worker,
        reader.worker._device,
        blocks_per_chunk=1,
        failures_are_told=True,
        job_timeout_s=JOB_TIMEOUT_S,
    )


def load(side, job_id, slot, block):
    device_side = SimpleNamespace(block_ids=np.array([block], np.int32), group_sizes=[1], block_indices=[0])
    side.submit_load(job_id, HostSlots(OrderId(job_id), (np.array([slot], np.int32),)), device_side, expedited=False)


def test_slots_are_handed_out_once_every_reader_has_attached(owner) -> None:
    """Until then they are held back, those of later reports too, and the ticket is passed on."""
    route = TicketRoute(2)
    ticket = owner.worker.ticket()
    assert route.to_pass is None
    route.note_ticket(ticket)
    assert [] == route.release(SLOTS)
    route.note_answers({2: ATTACHED})
    assert ticket == route.to_pass
    assert [] == route.release([SlotRange(0, 32, 4)])
    route.note_ticket(None)
    route.note_answers({1: ATTACHED})

    assert route.to_pass is None
    assert [*SLOTS, SlotRange(0, 32, 4)] == route.release(())
    assert [SlotRange(0, 36, 4)] == route.release([SlotRange(0, 36, 4)])
    assert [] == route.release(())


def test_without_readers_nothing_is_held_back() -> None:
    """Where each rank keeps its own, slots go straight through and no ticket is passed."""
    route = TicketRoute(0)

    assert list(SLOTS) == route.release(SLOTS)
    assert route.to_pass is None


def test_a_reader_that_cannot_attach_keeps_all_slots_back(owner, caplog) -> None:
    """Nothing is stored then; the log says which rank, why, and what helps, and no ticket is sent for ever."""
    route = TicketRoute(1)
    route.note_ticket(owner.worker.ticket())
    with caplog.at_level(logging.ERROR, "kvmoor"):
        route.note_answers({1: "no such process"})

    assert [] == route.release(SLOTS)
    assert route.to_pass is None
    assert "rank 1 cannot read the one copy that rank 0 keeps" in caplog.text
    assert "no such process" in caplog.text
    assert 'one_copy to "off"' in caplog.text


def test_a_reader_attaches_when_the_ticket_comes(owner, reader) -> None:
    """It answers once, however often the ticket comes, and loads from then on; the ticket survives pickling."""
    side, taker = side_of(reader), TicketReader(1)
    taker.take(None, reader.worker)
    assert {} == taker.take_answers()
    for _ in range(2):
        taker.take(pickle.loads(pickle.dumps(owner.worker.ticket())), reader.worker)
    assert {1: ATTACHED} == taker.take_answers()
    assert {} == taker.take_answers()

    load(side, 7, 3, 5)
    side.wait([7])

    assert reader.holds(5, 33)
    assert [(7, 1536)] == [(job.job_id, job.nbytes) for job in side.get_finished()]
    assert () == side.take_published()


def test_a_reader_says_why_it_cannot_attach(owner, reader, caplog) -> None:
    """The engine goes on: a load that should come all the same fails, which has its request computed."""
    side, taker = side_of(reader), TicketReader(1)
    ticket = owner.worker.ticket()
    owner.worker.close(WAIT_S)
    with caplog.at_level(logging.ERROR, "kvmoor"):
        for _ in range(ATTACH_ATTEMPTS):
            assert {} == taker.take_answers()
            taker.take(ticket, reader.worker)

    (answer,) = taker.take_answers().values()
    assert "the owner closed its arena" in answer
    assert answer in caplog.text
    load(side, 7, 3, 5)
    assert [(7, None)] == [(job.job_id, job.nbytes) for job in side.get_finished()]
    (failed,) = side.take_failed()
    assert "before the ticket" in failed.reason


def test_what_is_short_at_one_step_may_be_there_at_the_next(owner, reader, monkeypatch) -> None:
    """A reader that cannot attach tries again, whatever kept it, and says nothing before."""
    attach, errors = reader.worker.attach, [OSError(24, "Too many open files"), MemoryError()]

    def fail_twice(ticket: object) -> None:
        if errors:
            raise errors.pop()
        attach(ticket)

    monkeypatch.setattr(reader.worker, "attach", fail_twice)
    taker = TicketReader(1)
    for _ in range(3):
        assert {} == taker.take_answers()
        taker.take(owner.worker.ticket(), reader.worker)

    assert {1: ATTACHED} == taker.take_answers()


def test_who_keeps_the_copy_answers_no_ticket(owner) -> None:
    """The ticket reaches every rank, also the one that it comes from."""
    taker = TicketReader(0)
    taker.take(owner.worker.ticket(), owner.worker)
    assert {} == taker.take_answers()


def test_a_store_on_a_reader_fails() -> None:
    """None is sent there by vLLM; should it be, then its blocks are not found."""
    with Reader() as reader:
        side = side_of(reader)
        device_side = SimpleNamespace(block_ids=np.array([5], np.int32), group_sizes=[1], block_indices=[0])
        side.submit_store(7, device_side, HostSlots(OrderId(7), (np.array([3], np.int32),)))

        assert [7] == [job.job_id for job in side.get_finished()]
        assert [7] == [failed.job_id for failed in side.take_failed()]


def test_a_load_fails_after_the_owner_is_gone(owner, reader) -> None:
    """What is not READY then is computed; what is, is loaded."""
    side, taker = side_of(reader), TicketReader(1)
    taker.take(owner.worker.ticket(), reader.worker)
    owner.worker.close(WAIT_S)
    load(side, 7, 3, 5)
    load(side, 8, 4, 6)
    side.wait([7, 8])

    assert reader.holds(5, 33)
    assert [None, 1536] == sorted((job.nbytes for job in side.get_finished()), key=bool)
    assert [8] == [failed.job_id for failed in side.take_failed()]


def test_only_ranks_with_slots_of_their_own_are_counted() -> None:
    """Readers limit nothing, and have to lay out blocks as the others do."""
    ranks = [RankSizes(0, (100, 7), ("a",)), RankSizes(1, None, ("a",)), RankSizes(2, (90, 8), ("a",))]

    assert (90, 7) == least_slots(ranks, num_ranks=3)


@pytest.mark.parametrize(
    ("changes", "one_copy", "reason"),
    [
        ({}, "off", 'one_copy is "off"'),
        ({"local_world_size": 2}, "auto", "of 4 ranks 2 are on one host"),
        ({"distributed_executor_backend": "ray"}, "auto", "executor 'mp' only, and this is 'ray'"),
        ({"tensor_parallel_size": 2}, "auto", "tensor parallelism alone"),
        ({"decode_context_parallel_size": 2}, "auto", "tensor parallelism alone"),
        ({}, "auto", "does not say"),
    ],
)
def test_the_log_says_why_each_rank_keeps_a_copy(changes, one_copy, reason) -> None:
    """Each reason has its words."""
    parallel = {
        "world_size": 4,
        "local_world_size": 4,
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 1,
        "distributed_executor_backend": "mp",
    }
    config = SimpleNamespace(parallel_config=SimpleNamespace(**(parallel | changes)))
    assert reason in why_each_rank_keeps_a_copy(config, one_copy=one_copy)
