"""What the worker's half of the vLLM plugin promises, on the CPU device with scripted faults. No vLLM is needed."""

from types import SimpleNamespace

import numpy as np
import pytest

from device_blocks import DeviceBlocks
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import BrokenError, TransferTimeoutError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.integrations.vllm.worker_side import LOAD_ATTEMPTS, WorkerSide
from kvmoor.testing import ScriptedCopies
from kvmoor.transfer_messages import OrderId
from kvmoor.worker import TransferWorker

TIMEOUT_S = 10.0


class Rank:
    """One rank with device blocks, and vLLM's jobs in short."""

    def __init__(self, scripted: ScriptedCopies, *, failures_are_told: bool, job_timeout_s: float, **options) -> None:
        self.blocks = DeviceBlocks()
        layout = self.blocks.layout()
        device = CpuDevice(copy_hook=scripted)
        worker = TransferWorker(layout, plan_arena(layout, 2**20), device, job_timeout_s=job_timeout_s)
        self.side = WorkerSide(
            worker,
            device,
            blocks_per_chunk=1,
            failures_are_told=failures_are_told,
            job_timeout_s=job_timeout_s,
            **options,
        )
        assert worker.arena.wait_published(TIMEOUT_S)

    def store(self, job_id: int, blocks: list[int], slots: list[int]) -> None:
        self.side.submit_store(job_id, device_side(blocks), host_side(job_id, slots))

    def load(self, job_id: int, blocks: list[int], slots: list[int]) -> None:
        self.side.submit_load(job_id, host_side(job_id, slots), device_side(blocks), expedited=False)


def device_side(blocks: list[int]) -> SimpleNamespace:
    return SimpleNamespace(block_ids=np.array(blocks, np.int32), group_sizes=[len(blocks)], block_indices=[0])


def host_side(job_id: int, slots: list[int]) -> HostSlots:
    return HostSlots(OrderId(100 + job_id), (np.array(slots, np.int32),))


@pytest.fixture
def scripted():
    return ScriptedCopies()


@pytest.fixture
def make_rank(scripted):
    ranks = []

    def make(*, failures_are_told: bool = True, job_timeout_s: float = TIMEOUT_S, **options) -> Rank:
        ranks.append(Rank(scripted, failures_are_told=failures_are_told, job_timeout_s=job_timeout_s, **options))
        return ranks[-1]

    yield make
    scripted.release_all()
    for rank in ranks:
        rank.side.close(TIMEOUT_S)


def test_what_is_stored_comes_back(make_rank) -> None:
    """A store and a load move the bytes, and each job is reported once, with its figures."""
    rank = make_rank()
    rank.blocks.fill(3, 33)
    rank.store(1, [3], [0])
    rank.side.wait([1])
    rank.blocks.poison()
    rank.load(2, [5], [0])
    rank.side.wait([2, 99])  # ids that were never seen are over

    assert (rank.blocks.content(5) == rank.blocks.pattern(33)).all()
    ended = rank.side.get_finished()
    assert [(1, 1536), (2, 1536)] == [(job.job_id, job.nbytes) for job in ended]
    assert [] == rank.side.get_finished()
    assert [] == rank.side.take_failed()


def test_jobs_share_the_time_of_their_lane(make_rank, scripted) -> None:
    """Jobs that wait for one another count each second of their lane once, by bytes, from where the last ones ended."""
    now = [100.0]
    rank = make_rank(clock=lambda: now[0])
    rank.store(9, [0], [0])
    rank.side.wait([9])
    copies_of_a_block = scripted.num_copies("store")
    rank.side.get_finished()
    gates = [scripted.hang_at(number * copies_of_a_block, queue="store") for number in (1, 2)]
    rank.store(1, [0], [0])
    now[0] = 101.0
    rank.store(2, [1], [1])
    rank.store(3, [2, 3, 4], [2, 3, 4])
    now[0] = 103.0
    gates[0].release()
    rank.side.wait([1])
    now[0] = 107.0
    gates[1].release()
    rank.side.wait([2, 3])
    now[0] = 110.0
    rank.store(4, [5], [5])
    rank.load(5, [6], [0])
    now[0] = 112.0
    rank.side.wait([4, 5])

    found = [(job.job_id, job.seconds) for job in rank.side.get_finished()]
    assert [(1, 3.0), (2, 1.0), (3, 3.0), (4, 2.0), (5, 2.0)] == sorted(found)


def test_a_failed_job_takes_its_own_part_of_the_time(make_rank, scripted) -> None:
    """A job that ends well at the same look is charged for its own bytes, and for no more than its own life."""
    now = [100.0]
    rank = make_rank(clock=lambda: now[0])
    gate = scripted.hold("store")
    scripted.fail_at(0, queue="store")
    rank.store(1, [0], [0])
    rank.store(2, [1], [1])
    now[0] = 104.0
    gate.release()
    rank.side.wait([1, 2])
    assert [(1, None), (2, 2.0)] == [(job.job_id, job.seconds) for job in rank.side.get_finished()]

    gate = scripted.hold("load")
    rank.load(3, [0], [1])
    now[0] = 150.0
    rank.load(4, [1], [1])
    now[0] = 151.0
    gate.release()
    rank.side.wait([3, 4])
    assert [(3, 23.5), (4, 1.0)] == [(job.job_id, job.seconds) for job in rank.side.get_finished()]


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_job_that_fails_is_over_and_told_beside(make_rank, scripted, kind) -> None:
    """The engine hears that it is over, without figures, and the connector hears why it failed."""
    rank = make_rank()
    rank.store(1, [0, 1], [0, 1])
    rank.side.wait([1])
    rank.side.get_finished()
    scripted.fail_at(1 if kind == "load" else 3, queue=kind)

    getattr(rank, kind)(2, [2, 3], [0, 1])
    rank.side.wait([2])

    (ended,) = rank.side.get_finished()
    assert (2, None) == (ended.job_id, ended.nbytes)
    (failed,) = rank.side.take_failed()
    assert (2, 102) == (failed.job_id, failed.order_id)
    assert "scripted failure" in failed.reason


def test_failures_that_nobody_asks_for_are_not_kept(make_rank, scripted) -> None:
    """Where they cannot be told they would only add up, one for each store of a broken lane."""
    rank = make_rank(failures_are_told=False)
    scripted.fail_at(0, queue="store")
    rank.store(1, [0], [0])
    rank.side.wait([1])

    assert [(1, None)] == [(job.job_id, job.nbytes) for job in rank.side.get_finished()]
    assert [] == rank.side.take_failed()


def test_a_job_that_cannot_be_queued_fails_too(make_rank) -> None:
    """Blocks that do not exist fail their job; nothing is raised into the engine's step."""
    rank = make_rank()
    rank.load(1, [999], [0])

    assert [1] == [job.job_id for job in rank.side.get_finished()]
    assert "does not exist" in rank.side.take_failed()[0].reason


def test_waiting_for_a_copy_that_hangs_raises(make_rank, scripted) -> None:
    """To return would let vLLM reuse blocks that are still read."""
    rank = make_rank(job_timeout_s=0.05)
    scripted.hang_at(0)
    rank.store(1, [0], [0])

    with pytest.raises(TransferTimeoutError, match="must not be reused"):
        rank.side.wait([1])
    assert [] == rank.side.get_finished()


def test_a_copy_that_is_late_is_reported_when_it_is_over(make_rank, scripted) -> None:
    """Past its deadline a store is not over: vLLM hears of it when the copy has ended, as failed."""
    rank = make_rank(job_timeout_s=0.02)
    hanging = scripted.hang_at(0)
    rank.store(1, [0], [0])
    assert hanging.wait_reached(TIMEOUT_S)
    while not rank.side.worker.statistics().given_up:
        assert [] == rank.side.get_finished()
    hanging.release()

    ended: list = []
    while not ended:
        ended = rank.side.get_finished()

    assert [(1, None)] == [(job.job_id, job.nbytes) for job in ended]
    assert 1 == len(rank.side.take_failed())


def test_a_load_that_never_ends_is_not_waited_for_for_ever(make_rank, scripted) -> None:
    """Its request would hang, so the engine is told in time."""
    rank = make_rank(job_timeout_s=0.02)
    scripted.hang_at(0)
    rank.load(1, [0], [0])

    def poll_for_ever() -> None:
        while True:
            rank.side.get_finished()

    with pytest.raises(TransferTimeoutError, match="its request would wait for ever"):
        poll_for_ever()


def test_a_failure_that_cannot_be_told_is_tried_again(make_rank, scripted) -> None:
    """Under vLLM's own connector a load that failed once still brings its bytes."""
    rank = make_rank(failures_are_told=False)
    rank.blocks.fill(3, 33)
    rank.store(1, [3], [0])
    rank.side.wait([1])
    scripted.fail_at(0, queue="load")
    rank.load(2, [5], [0])
    rank.side.wait([2])

    assert (rank.blocks.content(5) == rank.blocks.pattern(33)).all()
    assert [1, 2] == [job.job_id for job in rank.side.get_finished()]


def test_a_failure_that_stays_and_cannot_be_told_raises(make_rank, scripted) -> None:
    """Then nothing is left but to end the engine, with what would have helped."""
    rank = make_rank(failures_are_told=False)
    for index in range(LOAD_ATTEMPTS):
        scripted.fail_at(index, queue="load")
    rank.load(1, [5], [0])

    with pytest.raises(BrokenError, match="use KvmoorConnector"):
        rank.side.wait([1])


def test_a_load_from_before_a_reset_counts_as_failed(make_rank, scripted) -> None:
    """What it brings back was to be forgotten, so its request is computed; stores and later loads are as they were."""
    rank = make_rank()
    held = scripted.hold("load")
    rank.load(1, [5], [0])
    rank.side.note_reset(1)
    rank.load(2, [6], [1])
    held.release()
    rank.side.wait([1, 2])

    assert [1, 2] == [job.job_id for job in rank.side.get_finished()]
    assert [1] == [failed.job_id for failed in rank.side.take_failed()]


def test_stores_held_back_over_a_sleep_fail(make_rank) -> None:
    """The device's memory held other bytes, or none, in between."""
    rank = make_rank()
    rank.store(1, [0], [0])
    rank.side.give_up_device_memory([2])

    rank.store(2, [1], [1])
    rank.side.wait([2])

    assert [1, 2] == [job.job_id for job in rank.side.get_finished()]
    assert [2] == [failed.job_id for failed in rank.side.take_failed()]


def test_new_slots_are_told_once(make_rank) -> None:
    """Slots that were noted at a step and those since come out together, each once."""
    rank = make_rank()
    rank.side.get_finished()

    (published,) = rank.side.take_published()

    assert published.num_slots > 0
    assert () == rank.side.take_published()
