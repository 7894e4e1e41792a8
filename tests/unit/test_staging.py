"""Slots that a device cannot reach are copied through a small ring: byte for byte, in order, within its bytes."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from contracts.test_device_contract import CpuEngine
from device_blocks import DeviceBlocks, content_keys
from kvmoor.block_layout import BlockLayout
from kvmoor.devices.cpu import CpuCopyQueue, CpuDevice
from kvmoor.devices.cpu_stream import CpuStream
from kvmoor.devices.device import BlockCopies, CopyQueue, Device, DeviceEvent, Direction
from kvmoor.errors import ClosedError, DeviceError, NoRoomError, RequestError, UnsupportedError
from kvmoor.host_memory import arena_plan
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.observation import Event, RegistrationDegraded
from kvmoor.offloader import Offloader
from kvmoor.testing import DeviceContract, ScriptedCopies
from kvmoor.testing.device_contract import EngineStream
from kvmoor.testing.scripted_registrar import ScriptedRegistrar
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.transfers.staged_piece import cut_job
from kvmoor.transfers.staged_queue import StagedQueue
from kvmoor.transfers.staging_ring import StagingRing
from kvmoor.worker import TransferWorker
from staging_rig import GUARD, WAIT_S, Blocks, Geometry, StagingRig, finish

SMALL = Geometry((512, 512, 512))


# ---- the ring


@given(
    nbytes=st.integers(1, 40),
    steps=st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60),
)
def test_parts_of_a_ring_never_overlap(nbytes: int, steps: list[int | None]) -> None:
    """Whatever is taken and released in turn, parts in use are disjoint and inside; an empty ring fits all of it."""
    device = CpuDevice()
    with StagingRing(device, nbytes) as ring:
        taken: deque[tuple[int, int]] = deque()
        for step in steps:
            if step is None:
                if taken:
                    ring.release_oldest()
                    taken.popleft()
                continue
            wanted = min(step, nbytes)
            address = ring.take(wanted)
            if address is None:
                assert taken
                continue
            taken.append((address, address + wanted))
            ordered = sorted(taken)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
            assert ordered[-1][1] - ring._base <= nbytes
            assert ordered[0][0] >= ring._base
        assert 0 <= ring.free_nbytes <= nbytes - sum(end - start for start, end in taken)
        while taken:
            ring.release_oldest()
            taken.popleft()
        assert nbytes == ring.free_nbytes
        assert ring.take(nbytes) is not None
    assert 0 == device.staging_nbytes


def test_a_ring_costs_nothing_before_it_is_used() -> None:
    """Memory is allocated with the first part, once, on a 4 KiB boundary, and freed by close, once."""
    device = CpuDevice()
    ring = StagingRing(device, 8192)
    assert (0, 0, 8192) == (device.staging_nbytes, ring.allocated_nbytes, ring.nbytes)

    first, second = ring.take(4096), ring.take(4096)
    assert first is not None
    assert (0, first + 4096) == (first % 4096, second)
    assert (8192, 8192, 0) == (device.staging_nbytes, ring.allocated_nbytes, ring.free_nbytes)

    ring.close()
    ring.close()
    assert (0, 0, True) == (device.staging_nbytes, ring.allocated_nbytes, ring.closed)
    with pytest.raises(ClosedError, match="staging ring is closed"):
        ring.take(1)


def test_a_ring_that_was_never_closed_warns() -> None:
    """Forgetting a ring keeps its memory, because a copy may touch it, and says so."""
    device = CpuDevice()
    ring = StagingRing(device, 4096)
    address = ring.take(4096)
    assert address is not None

    with pytest.warns(ResourceWarning, match="4096 bytes was never closed"):
        del ring

    assert 4096 == device.staging_nbytes
    device.free_staging(address)


def test_staging_memory_that_cannot_be_had_is_refused() -> None:
    """More staging memory than there are addresses is refused with the number, and a closed device gives none."""
    device = CpuDevice()
    with pytest.raises(NoRoomError, match="bytes of staging memory"):
        device.allocate_staging(2**60)
    assert 0 == device.staging_nbytes

    device.close(0.0)
    with pytest.raises(ClosedError):
        device.allocate_staging(4096)


# ---- a job is cut


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=30),
    largest_slots=st.integers(1, 7),
    chunk=st.integers(1, 3),
)
def test_every_block_is_in_exactly_one_piece(mask: list[bool], largest_slots: int, chunk: int) -> None:
    """Reachable blocks form the first piece, all others are in staged pieces of the size allowed, in their order."""
    with StagingRig([Geometry((4096,), chunk)], num_slots=len(mask), num_device_blocks=chunk * len(mask)) as rig:
        rig.reachable[0][:] = mask
        device_blocks = np.arange(chunk * len(mask)).reshape(-1, chunk).tolist()
        copies = rig.copies(Blocks(0, range(len(mask)), device_blocks))
        slot_nbytes = rig.groups[0].slot_nbytes

        pieces = cut_job(copies, largest_slots * slot_nbytes)

        direct = [piece for piece in pieces if not piece.ring_nbytes]
        staged = [piece for piece in pieces if piece.ring_nbytes]
        assert [*direct, *staged] == list(pieces)
        assert any(mask) == len(direct)
        assert all(part.reachable is None for piece in pieces for part in piece.copies)
        assert all(
            piece.ring_nbytes == slot_nbytes * len(piece.copies[0].slot_addresses) <= largest_slots * slot_nbytes
            for piece in staged
        )
        wanted = [*np.flatnonzero(mask).tolist(), *np.flatnonzero(~np.array(mask)).tolist()]
        parts = [part for piece in pieces for part in piece.copies]
        np.testing.assert_array_equal(
            copies[0].slot_addresses[wanted], np.concatenate([part.slot_addresses for part in parts])
        )
        np.testing.assert_array_equal(
            np.array(device_blocks)[wanted].reshape(-1), np.concatenate([part.block_ids for part in parts])
        )


def test_adjacent_slots_are_copied_at_once() -> None:
    """Slots without padding that lie side by side are one host copy, others one each."""
    with StagingRig([Geometry((4096,)), Geometry((4000,))]) as rig:
        (whole,) = cut_job(rig.copies(Blocks(0, (0, 1, 2, 5, 4, 3), [[i] for i in range(6)])), 2**30)
        (padded,) = cut_job(rig.copies(Blocks(1, (0, 1, 2), [[i] for i in range(3)])), 2**30)

        assert [3 * 4096, 4096, 4096, 4096] == [run.nbytes for run in whole.host_runs()]
        assert [0, 12288, 16384, 20480] == [run.ring_offset for run in whole.host_runs()]
        assert [4000] * 3 == [run.nbytes for run in padded.host_runs()]


# ---- a staged queue copies exactly the bytes


@st.composite
def jobs_over_layouts(draw: st.DrawFn) -> tuple[list[Geometry], int, int, list[list[Blocks]], list[list[bool]]]:
    """Draw geometries, ring slots, slots, jobs that use no slot twice within one, and which slots are reachable."""
    pages = st.lists(st.integers(1, 9000), min_size=1, max_size=3).map(tuple)
    geometries = draw(st.lists(st.builds(Geometry, pages, st.integers(1, 4)), min_size=1, max_size=3))
    num_slots = 6
    jobs = []
    for _ in range(draw(st.integers(1, 4))):
        parts = []
        for group, geometry in enumerate(geometries):
            slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=num_slots))
            chunk = geometry.blocks_per_chunk
            ids = draw(st.permutations(range(num_slots * 4)))[: chunk * len(slots)]
            parts.append(Blocks(group, slots, [ids[i * chunk : (i + 1) * chunk] for i in range(len(slots))]))
        jobs.append(parts)
    reachable = [draw(st.lists(st.booleans(), min_size=num_slots, max_size=num_slots)) for _ in geometries]
    return geometries, draw(st.integers(1, 5)), num_slots, jobs, reachable


@given(case=jobs_over_layouts())
def test_stores_fill_exactly_their_slots(
    case: tuple[list[Geometry], int, int, list[list[Blocks]], list[list[bool]]],
) -> None:
    """Jobs of staged and reachable blocks store what a plain copy stores, and no other byte, padding included."""
    geometries, ring_slots, num_slots, jobs, reachable = case
    with StagingRig(geometries, ring_slots=ring_slots, num_slots=num_slots, num_device_blocks=24) as rig:
        for marks, row in zip(rig.reachable, reachable, strict=True):
            marks[:] = row
        expected = [rows.copy() for rows in rig.slots]
        for sequence, parts in enumerate(jobs, start=1):
            rig.store.enqueue(rig.copies(*parts), sequence, None)
            for part in parts:
                for position, slot in enumerate(part.slots):
                    content = rig.page_bytes(part, position)
                    expected[part.group][slot, : content.size] = content
        finish(rig.store, len(jobs))

        for rows, found in zip(expected, rig.slots, strict=True):
            np.testing.assert_array_equal(rows, found)
        rig.assert_device_got_only_what_it_reaches()
        ring = rig.rings[Direction.DEVICE_TO_HOST]
        assert (ring.nbytes, True) == (ring.free_nbytes, ring.allocated_nbytes in (0, ring.nbytes))
        num_staged, nbytes = count_staged(rig, jobs)
        assert (num_staged, nbytes) == (rig.store.staged_jobs, rig.store.staged_nbytes)


@given(case=jobs_over_layouts())
def test_loads_fill_exactly_their_blocks(
    case: tuple[list[Geometry], int, int, list[list[Blocks]], list[list[bool]]],
) -> None:
    """Jobs of staged and reachable blocks load what a plain copy loads, and no other byte of the device changes."""
    geometries, ring_slots, num_slots, jobs, reachable = case
    with StagingRig(geometries, ring_slots=ring_slots, num_slots=num_slots, num_device_blocks=24) as rig:
        rig.fill_slots()
        for marks, row in zip(rig.reachable, reachable, strict=True):
            marks[:] = row
        expected = [[tensor.copy() for tensor in tensors] for tensors in rig.tensors]
        for sequence, parts in enumerate(jobs, start=1):
            rig.load.enqueue(rig.copies(*parts), sequence, None)
            for part in parts:
                offsets = rig.groups[part.group].page_offsets
                for slot, ids in zip(part.slots, part.device_blocks, strict=True):
                    for tensor, offset in zip(expected[part.group], offsets, strict=True):
                        nbytes = len(ids) * tensor.shape[1]
                        tensor[list(ids)] = rig.slots[part.group][slot, offset : offset + nbytes].reshape(len(ids), -1)
        finish(rig.load, len(jobs))

        for tensors, found in zip(expected, rig.tensors, strict=True):
            for tensor, other in zip(tensors, found, strict=True):
                np.testing.assert_array_equal(tensor, other)
        rig.assert_device_got_only_what_it_reaches()
        assert rig.rings[Direction.HOST_TO_DEVICE].nbytes == rig.rings[Direction.HOST_TO_DEVICE].free_nbytes
        assert count_staged(rig, jobs) == (rig.load.staged_jobs, rig.load.staged_nbytes)


def count_staged(rig: StagingRig, jobs: Sequence[Sequence[Blocks]]) -> tuple[int, int]:
    """Return how many jobs have a slot that is not reachable, and the bytes of all blocks in such slots."""
    counts = []
    for job in jobs:
        num_blocks = [int((~rig.reachable[part.group][list(part.slots)]).sum()) for part in job]
        counts.append(sum(rig.groups[part.group].block_nbytes * num for part, num in zip(job, num_blocks, strict=True)))
    return sum(count > 0 for count in counts), sum(counts)


# ---- order and routes


def test_reachable_jobs_need_no_ring_and_no_thread() -> None:
    """With all slots reachable nothing is staged: no memory, no thread, one device job for each job."""
    with StagingRig([SMALL]) as rig:
        rig.reachable[0][:] = True
        for sequence in range(1, 4):
            rig.store.enqueue(rig.copies(Blocks(0, (0, 1, 2), [[0], [1], [2]])), sequence, None)
        finish(rig.store, 3)

        assert 3 == len(rig.watched[Direction.DEVICE_TO_HOST].given)
        assert ([], 0, 0) == (rig.prepared, rig.device.staging_nbytes, rig.store.staged_jobs)
        assert not [thread for thread in threading.enumerate() if thread.name.endswith("-staging")]


def test_a_queue_without_jobs_is_idle_at_once() -> None:
    """Waiting for a job that was never queued ends at the deadline, and an idle queue closes at once, twice."""
    with StagingRig([SMALL]) as rig:
        assert not rig.store.wait_completed(1, 0.0)
        assert rig.store.close(0.0)
        assert rig.store.close(0.0)
        with pytest.raises(ClosedError, match="takes no more jobs"):
            rig.store.enqueue(rig.copies(Blocks(0, (0,), [[0]])), 1, None)


def test_a_device_is_asked_through_the_staged_queue() -> None:
    """Whether the device lives is asked of the device queue, whatever is staged."""
    with StagingRig([SMALL]) as rig:
        rig.store.probe()
        assert (1, 0) == (rig.watched[Direction.DEVICE_TO_HOST].probes, rig.watched[Direction.HOST_TO_DEVICE].probes)


@pytest.mark.parametrize("direction", Direction)
def test_a_stream_is_ordered_after_a_job_by_its_number_on_the_device(direction: Direction) -> None:
    """Behind staged jobs, whose pieces have numbers of their own, a stream waits for the right job."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], copy_hook=scripted) as rig:
        stream = rig.device.open_stream("engine")
        queue, watched = rig.queues[direction], rig.watched[direction]
        queue.enqueue(rig.copies(Blocks(0, (0, 1, 2), [[0], [1], [2]])), 1, None)
        finish(queue, 1)
        assert len(watched.given) > 1
        rig.reachable[0][4:] = True
        gate = scripted.hang_at(3)
        queue.enqueue(rig.copies(Blocks(0, (5,), [[3]])), 2, None)
        queue.enqueue(rig.copies(Blocks(0, (6,), [[4]])), 3, None)
        assert gate.wait_reached(WAIT_S)

        queue.order_after(stream, 1)
        early = stream.record_event()
        queue.order_after(stream, 2)
        found: list[int] = []
        stream.submit(lambda: found.append(queue.completed()))
        late = stream.record_event()
        assert early.wait(WAIT_S)
        assert not late.wait(0.02)
        gate.release()
        assert late.wait(WAIT_S)

        assert found[0] >= 2
        with pytest.raises(RequestError, match="job 4 was not queued on"):
            queue.order_after(stream, 4)
        finish(queue, 3)
        queue.order_after(object(), 3)  # over, so nothing is asked of it


def test_no_stream_is_ordered_after_a_job_on_its_way_through_the_ring() -> None:
    """While pieces of a job were not given to the device a stream cannot wait for it, which is said; later it can."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], ring_slots=1, copy_hook=scripted) as rig:
        stream = rig.device.open_stream("engine")
        gate, last = scripted.hang_at(0), scripted.hang_at(2)
        rig.load.enqueue(rig.copies(Blocks(0, (0, 1, 2), [[0], [1], [2]])), 1, None)
        assert gate.wait_reached(WAIT_S)
        with pytest.raises(UnsupportedError, match=r"piece by piece through a ring.*wait for it instead"):
            rig.load.order_after(stream, 1)
        gate.release()
        assert last.wait_reached(WAIT_S)
        while rig.load._waiting:  # in a moment: the piece is with the device
            time.sleep(0)

        rig.load.order_after(stream, 1)
        found: list[bool] = []
        stream.submit(lambda: found.append(rig.watched[Direction.HOST_TO_DEVICE].completed() >= 3))
        event = stream.record_event()
        assert not event.wait(0.02)
        last.release()
        assert event.wait(WAIT_S)
        assert [True] == found
        finish(rig.load, 1)


def test_a_direct_job_that_is_refused_breaks_nothing() -> None:
    """An event of another device is refused to the caller, and the queue takes the next job."""
    with StagingRig([SMALL]) as rig:
        rig.reachable[0][:] = True
        watched = rig.watched[Direction.DEVICE_TO_HOST]
        watched.refuse_at = {0: RequestError("a foreign event")}
        with pytest.raises(RequestError, match="a foreign event"):
            rig.store.enqueue(rig.copies(Blocks(0, (0,), [[0]])), 1, None)
        watched.refuse_at = {}

        rig.store.enqueue(rig.copies(Blocks(0, (0,), [[0]])), 2, None)
        finish(rig.store, 2)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("has_reachable", [True, False])
def test_a_staged_job_that_is_refused_fails_alone(direction: Direction, has_reachable: bool) -> None:
    """A staged job whose event the device does not know fails with the reason; its part of the ring is free again."""
    with StagingRig([SMALL], ring_slots=1) as rig:
        rig.fill_slots()
        rig.reachable[0][0] = has_reachable
        queue, watched, ring = rig.queues[direction], rig.watched[direction], rig.rings[direction]
        before = rig.slots[0].copy(), rig.tensors[0][0].copy()
        watched.refuse_at = {0: RequestError("a foreign event")}
        queue.enqueue(rig.copies(Blocks(0, (0, 1, 2), [[0], [1], [2]])), 1, None)
        assert queue.wait_completed(1, WAIT_S)
        failure = queue.failure(1)
        assert isinstance(failure, DeviceError)
        assert "a foreign event" in str(failure)
        np.testing.assert_array_equal(before[0], rig.slots[0])
        np.testing.assert_array_equal(before[1], rig.tensors[0][0])
        assert ring.nbytes == ring.free_nbytes
        watched.refuse_at = {}

        for sequence in (2, 3):
            queue.enqueue(rig.copies(Blocks(0, (1, 2), [[1], [2]])), sequence, None)
        finish(queue, 3)
        np.testing.assert_array_equal(rig.page_bytes(Blocks(0, (1,), [[1]]), 0), rig.slots[0][1, :1536])


def test_the_thread_is_prepared_once_before_it_allocates() -> None:
    """The thread that stages makes itself harmless to graph captures before its first call to the device."""
    order: list[str] = []
    with StagingRig([SMALL]) as rig:
        allocate = rig.device.allocate_staging
        rig.device.allocate_staging = lambda nbytes: order.append(threading.current_thread().name) or allocate(nbytes)  # type: ignore[method-assign]
        rig.load._prepare_thread = lambda: order.append("prepared")
        for sequence in (1, 2):
            rig.load.enqueue(rig.copies(Blocks(0, (0,), [[0]])), sequence, None)
        finish(rig.load, 2)

    assert ["prepared", "kvmoor-load-staging"] == order


@pytest.mark.parametrize("direction", Direction)
def test_a_reachable_job_stays_behind_a_staged_one(direction: Direction) -> None:
    """A job that needs no staging is over only after the staged job in front, and its bytes win."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], copy_hook=scripted) as rig:
        rig.fill_slots()
        rig.reachable[0][4:] = True
        queue = rig.queues[direction]
        gate = scripted.hang_at(0)
        # Both write the same place: slot 5 in a store, device block 3 in a load.
        if direction is Direction.DEVICE_TO_HOST:
            first, second = Blocks(0, (0, 1), [[0], [1]]), Blocks(0, (5,), [[3]])
        else:
            first, second = Blocks(0, (0, 1), [[2], [3]]), Blocks(0, (5,), [[3]])
        queue.enqueue(rig.copies(first), 1, None)
        queue.enqueue(rig.copies(second), 2, None)
        assert gate.wait_reached(WAIT_S)
        assert (False, 0) == (queue.wait_completed(2, 0.01), queue.completed())

        gate.release()
        finish(queue, 2)

        np.testing.assert_array_equal(rig.page_bytes(second, 0), rig.slots[0][5, :1536])


def test_a_direct_store_does_not_overtake_the_host_copies_in_front() -> None:
    """Of a staged store and a direct one behind it that fill one slot, the later one wins."""
    with StagingRig([SMALL], ring_slots=1) as rig:
        for sequence in range(1, 60, 2):
            rig.reachable[0][:] = False
            rig.store.enqueue(rig.copies(Blocks(0, (1, 2, 0), [[3], [4], [0]])), sequence, None)
            rig.reachable[0][:] = True
            later = Blocks(0, (0,), [[sequence % 16]])
            rig.store.enqueue(rig.copies(later), sequence + 1, None)
            finish(rig.store, sequence + 1)
            np.testing.assert_array_equal(rig.page_bytes(later, 0), rig.slots[0][0, :1536])


def test_a_staged_store_waits_for_its_event() -> None:
    """No byte is stored before the event, by none of the pieces, and what was written before it is stored (B25)."""
    with StagingRig([SMALL], ring_slots=2) as rig, CpuStream("kvmoor-engine") as engine, engine.latch() as latch:
        late = Blocks(0, (0, 1, 2, 3), [[0], [1], [2], [3]])
        engine.submit(lambda: rig.tensors[0][0].__setitem__(slice(None), 7))
        rig.store.enqueue(rig.copies(late), 1, engine.record_event())
        assert not rig.store.wait_completed(1, 0.05)
        assert all((rows == GUARD).all() for rows in rig.slots)

        latch.release()
        finish(rig.store, 1)

        for slot in range(4):
            np.testing.assert_array_equal(rig.page_bytes(late, slot), rig.slots[0][slot, :1536])
        assert (rig.slots[0][:4, :512] == 7).all()


def test_the_ring_bounds_what_is_on_its_way() -> None:
    """However long a job is, the device has at most the ring's pieces of it at once, all of them."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], ring_slots=4, copy_hook=scripted) as rig:
        gate = scripted.hold("load")
        rig.load.enqueue(rig.copies(Blocks(0, range(8), [[i] for i in range(8)])), 1, None)
        assert gate.wait_reached(WAIT_S)
        assert rig.watched[Direction.HOST_TO_DEVICE].wait_given(4, WAIT_S)
        assert 0 == rig.rings[Direction.HOST_TO_DEVICE].free_nbytes
        assert not rig.load.wait_completed(1, 0.05)
        assert 4 == len(rig.watched[Direction.HOST_TO_DEVICE].given)

        gate.release()
        finish(rig.load, 1)
        assert 8 == len(rig.watched[Direction.HOST_TO_DEVICE].given)


def test_the_device_and_the_thread_work_at_the_same_time() -> None:
    """A piece that the device still reads does not keep the thread from filling the next parts, of other jobs too."""
    with ScriptedCopies() as scripted, StagingRig([SMALL], ring_slots=4, copy_hook=scripted) as rig:
        gate = scripted.hang_at(0)
        for sequence in (1, 2, 3):
            rig.load.enqueue(rig.copies(Blocks(0, (sequence,), [[sequence]])), sequence, None)
        assert gate.wait_reached(WAIT_S)
        assert rig.watched[Direction.HOST_TO_DEVICE].wait_given(3, WAIT_S)
        assert 0 == rig.load.completed()

        gate.release()
        finish(rig.load, 3)


# ---- a device whose queues stage is as good as any


class _MarkingQueue(StagedQueue):
    """Marks some slots as out of reach, as an arena would."""

    choose: Callable[[NDArray[np.int64]], NDArray[np.bool_]]

    def enqueue(self, copies: Sequence[BlockCopies], sequence: int, wait_for: DeviceEvent | None) -> None:
        marked = [
            BlockCopies(part.group, part.block_ids, part.slot_addresses, self.choose(part.slot_addresses))
            for part in copies
        ]
        super().enqueue(marked, sequence, wait_for)


class StagingDevice(CpuDevice):
    """A CPU device all of whose queues stage the slots that `choose` does not choose."""

    def __init__(
        self,
        choose: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
        ring_nbytes: int,
        copy_hook: ScriptedCopies | None = None,
    ) -> None:
        super().__init__(copy_hook=copy_hook)
        self._choose = choose
        self._ring_nbytes = ring_nbytes
        self._rings: list[StagingRing] = []

    def open_copy_queue(self, name: str, direction: Direction) -> CopyQueue:  # type: ignore[override]
        self._rings.append(StagingRing(self, self._ring_nbytes))
        device_queue = super().open_copy_queue(name, direction)
        queue = _MarkingQueue(name, direction, device_queue, self._rings[-1], prepare_thread=lambda: None)
        queue.choose = self._choose
        return queue

    def close(self, timeout_s: float) -> bool:
        proven = super().close(timeout_s)
        if proven:
            for ring in self._rings:
                ring.close()
        return proven


def none_reachable(slot_addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.zeros(len(slot_addresses), np.bool_)


def odd_reachable(slot_addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
    return slot_addresses // 4096 % 2 == 1


ONE_SLOT = 4 * 5 * 16 * 1024
"""The largest slot of the contract's geometries."""


class StagedContract(DeviceContract):
    choose = staticmethod(none_reachable)
    ring_nbytes = ONE_SLOT

    def open_device(self) -> Device:
        return StagingDevice(self.choose, self.ring_nbytes)

    def open_engine(self, device: Device) -> EngineStream:
        assert isinstance(device, CpuDevice)
        return CpuEngine(device, self)

    def open_failing_device(self, index: int) -> Device:
        scripted = ScriptedCopies()
        scripted.fail_at(index)
        return StagingDevice(self.choose, self.ring_nbytes, copy_hook=scripted)


class TestAllStagedThroughOneSlot(StagedContract):
    pass


class TestAllStagedThroughALargeRing(StagedContract):
    ring_nbytes = 32 * 2**20


class TestSomeStaged(StagedContract):
    choose = staticmethod(odd_reachable)


# ---- an offloader whose memory is registered in part, or not at all


class Recorder:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


class DirectCopies:
    """Notes which slots a CPU device copies directly to and from, by the address of the slot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: set[int] = set()
        enqueue = CpuCopyQueue.enqueue

        def noting(queue: CpuCopyQueue, copies: Sequence[BlockCopies], *args: Any) -> None:
            self.addresses.update(address for part in copies for address in part.slot_addresses.tolist())
            enqueue(queue, copies, *args)

        monkeypatch.setattr(CpuCopyQueue, "enqueue", noting)


def round_trip(offloader: Offloader, device_blocks: DeviceBlocks, num_blocks: int) -> None:
    """Store device blocks 0, 1, ... in one job, load them into the next ones in one job, and compare all bytes."""
    for number in range(num_blocks):
        device_blocks.fill(number, number)
    keys = content_keys(*range(num_blocks))
    offloader.wait([offloader.submit_store(keys, range(num_blocks)).job_id], WAIT_S)
    match = offloader.match(keys)
    assert num_blocks == match.num_blocks
    offloader.wait([offloader.submit_load(match, range(num_blocks, 2 * num_blocks))], WAIT_S)
    assert [Outcome.DONE] * 2 == [result.outcome for result in offloader.poll_results()]
    for number in range(num_blocks):
        np.testing.assert_array_equal(device_blocks.pattern(number), device_blocks.content(num_blocks + number))


def test_the_rings_stay_within_what_was_asked_for() -> None:
    """Where everything is staged, all rings together take less than a fiftieth of host memory."""
    registrar, blocks = ScriptedRegistrar(), DeviceBlocks()
    registrar.fail_permanently(801)
    host_nbytes = 16 * 2**20
    with Offloader(
        blocks.layout(), host_memory=host_nbytes, device=CpuDevice(registrar=registrar), pin="eager"
    ) as offloader:
        round_trip(offloader, blocks, 8)
        offloader.wait([offloader.submit_load(offloader.match(content_keys(0)), [9], expedited=True)], WAIT_S)

        numbers = offloader.statistics().transfers
        assert 0 < numbers.staging_ring_nbytes <= host_nbytes // 50


@pytest.mark.parametrize("pin", ["background", "eager"])
def test_a_platform_that_registers_nothing_gets_a_staged_pool(
    pin: Literal["background", "eager"], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where every registration is "not supported" the pool comes up, copies right, says so, and warns once (B04)."""
    registrar, recorder, blocks = ScriptedRegistrar(), Recorder(), DeviceBlocks()
    registrar.fail_permanently(801, remedy="turn confidential computing off")
    direct = DirectCopies(monkeypatch)
    device = CpuDevice(registrar=registrar)
    with Offloader(blocks.layout(), host_memory=8 * 4096, device=device, observer=recorder, pin=pin) as offloader:
        assert offloader._worker.arena.wait_mapped(WAIT_S)
        assert not offloader._worker.wait_registered(WAIT_S)
        slots = set(offloader._worker.arena.slot_addresses(0, np.arange(8)).tolist())

        round_trip(offloader, blocks, 8)

        numbers = offloader.statistics().transfers
        assert (0, 8 * 4096) == (numbers.arena.registered_nbytes, numbers.arena.staged_nbytes)
        assert "staging" == numbers.arena.registration_mode
        assert (2, 2 * 8 * 1536, 2 * 4096) == (  # one slot each way, beside so small a pool
            numbers.staged_jobs,
            numbers.staged_nbytes,
            numbers.staging_ring_nbytes,
        )
        assert direct.addresses
        assert not slots & direct.addresses
        assert offloader.close().worker.graceful
        assert (0, 0) == (device.staging_nbytes, offloader.statistics().transfers.staging_ring_nbytes)

    (degraded,) = (event for event in recorder.events if isinstance(event, RegistrationDegraded))
    assert "confidential computing" in degraded.remedy
    assert 1 == sum("page-lock" in record.message for record in caplog.records if record.levelname == "WARNING")
    registrar.check()


def test_a_pool_that_is_registered_whole_stages_nothing() -> None:
    """With every slab registered no ring is ever allocated."""
    registrar, blocks = ScriptedRegistrar(), DeviceBlocks()
    with Offloader(
        blocks.layout(), host_memory=8 * 4096, device=CpuDevice(registrar=registrar), pin="eager"
    ) as offloader:
        assert offloader._worker.wait_registered(WAIT_S)
        round_trip(offloader, blocks, 8)

        numbers = offloader.statistics().transfers
        assert (0, 0, 0) == (numbers.staged_jobs, numbers.staged_nbytes, numbers.staging_ring_nbytes)
    registrar.check()


def test_pinning_can_be_switched_off() -> None:
    """With `pin` "off" the registrar is never called and everything is staged; without a registrar, nothing is."""
    registrar, blocks = ScriptedRegistrar(), DeviceBlocks()
    for device, staged_jobs in ((CpuDevice(registrar=registrar), 2), (CpuDevice(), 0)):
        with Offloader(blocks.layout(), host_memory=8 * 4096, device=device, pin="off") as offloader:
            round_trip(offloader, blocks, 8)
            assert staged_jobs == offloader.statistics().transfers.staged_jobs
    assert 0 == registrar.num_calls()


@pytest.mark.parametrize("k", range(3))
def test_one_refused_slab_is_staged_and_the_others_are_not(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If slab k of 3 is refused, one job over all of them copies right, its blocks of that slab through the ring."""
    for name in ("_SLAB_TARGET_NBYTES", "_SLAB_MIN_NBYTES", "_SLAB_MAX_NBYTES"):
        monkeypatch.setattr(arena_plan, name, 2 * 2**20)
    registrar, blocks = ScriptedRegistrar(), DeviceBlocks(num_blocks=24, page_nbytes=128 * 1024, num_tensors=4)
    registrar.fail_at(k)
    direct = DirectCopies(monkeypatch)
    with Offloader(
        blocks.layout(), host_memory="6MiB", device=CpuDevice(registrar=registrar), pin="eager"
    ) as offloader:
        arena = offloader._worker.arena
        assert (3, 12) == (len(offloader.plan.slabs), offloader.plan.groups[0].num_slots)
        registered = arena.are_registered(0, np.arange(12))
        assert [slot // 4 != k for slot in range(12)] == registered.tolist()
        addresses = arena.slot_addresses(0, np.arange(12))

        round_trip(offloader, blocks, 12)

        numbers = offloader.statistics().transfers
        assert (2, 2 * 2 * 2**20) == (numbers.staged_jobs, numbers.staged_nbytes)
        assert set(addresses[registered].tolist()) <= direct.addresses
        assert not set(addresses[~registered].tolist()) & direct.addresses
    registrar.check()


@settings(max_examples=25)
@given(
    geometries=st.lists(
        st.builds(Geometry, st.lists(st.integers(1, 9000), min_size=1, max_size=3).map(tuple), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    refused=st.sets(st.integers(0, 2)),
    staging_nbytes=st.sampled_from([1, 2 * 40960, 2**20]),
    expedited=st.booleans(),
)
def test_any_layout_comes_back_whole(
    geometries: list[Geometry], refused: set[int], staging_nbytes: int, expedited: bool
) -> None:
    """Blocks of all groups, of which some are staged, are loaded back as they were stored, whatever the layout."""
    num_blocks = 5
    with StagingRig(geometries, num_device_blocks=2 * num_blocks * 4) as rig:  # for its tensors
        layout = BlockLayout(tuple(rig.groups))
        plan = plan_arena(layout, 2**21)
        registrar = ScriptedRegistrar()
        for index in refused:
            registrar.fail_at(index)
        with TransferWorker(
            layout, plan, CpuDevice(registrar=registrar), pin="eager", staging_nbytes=staging_nbytes
        ) as worker:
            parts = tuple(OrderPart(group, tuple(range(num_blocks))) for group in range(len(rig.groups)))
            first = [np.arange(num_blocks * group.blocks_per_chunk).reshape(num_blocks, -1) for group in rig.groups]
            second = [ids + ids.size for ids in first]
            worker.submit(Order(OrderId(1), OrderKind.DEVICE_TO_SLOT, parts), dict(enumerate(first)))
            worker.wait([OrderId(1)], WAIT_S)
            load = Order(OrderId(2), OrderKind.SLOT_TO_DEVICE, parts)
            worker.submit(load, dict(enumerate(second)), expedited=expedited)
            worker.wait([OrderId(2)], WAIT_S)

            assert [Outcome.DONE] * 2 == [report.outcome for report in worker.poll_reports()]
            any_refused = any(index < len(geometries) for index in refused)
            assert 2 * any_refused == worker.statistics().staged_jobs
        for tensors, old, new in zip(rig.tensors, first, second, strict=True):
            for tensor in tensors:
                np.testing.assert_array_equal(tensor[old.ravel()], tensor[new.ravel()])
    registrar.check()


def test_steps_and_pauses_reach_the_registration() -> None:
    """A worker's pause lets the call under way end and no other begin; steps are passed on."""
    registrar = ScriptedRegistrar()
    gate = registrar.hold_at(0)
    with StagingRig([SMALL, SMALL]) as rig, registrar:
        layout = BlockLayout(tuple(rig.groups))
        with TransferWorker(layout, plan_arena(layout, 16 * 4096), CpuDevice(registrar=registrar)) as worker:
            assert gate.wait_reached(WAIT_S)
            assert not worker.pause_registration(0.0)
            gate.release()
            assert worker.pause_registration(WAIT_S)
            assert not worker.wait_registered(0.05)
            assert 1 == registrar.num_calls("register")

            worker.note_step()
            assert worker.arena._pacer._last_step is not None
            worker.resume_registration()
            worker.resume_registration()
            assert worker.wait_registered(WAIT_S)
            assert 2 == registrar.num_calls("register")
    registrar.check()


def test_an_offloader_holds_up_page_locking() -> None:
    """While an engine has paused it no page-locking begins; afterwards it does, and the engine can wait for it."""
    registrar = ScriptedRegistrar()
    gate = registrar.hold_at(0)
    blocks = DeviceBlocks(num_blocks=2, page_nbytes=1 << 20)
    with Offloader(
        blocks.layout(), host_memory="128MiB", device=CpuDevice(registrar=registrar), memory_check="warn"
    ) as offloader:
        assert gate.wait_reached(WAIT_S)
        assert not offloader.pause_registration(0.01)  # one call is under way
        gate.release()
        assert offloader.pause_registration(WAIT_S)
        num_calls = registrar.num_calls("register")
        assert not offloader.wait_registered(0.05)
        assert num_calls == registrar.num_calls("register")

        offloader.resume_registration()
        offloader.resume_registration()
        assert offloader.wait_registered(WAIT_S)
        offloader.cancel_registration()
    registrar.check()


def test_an_offloader_passes_on_the_steps() -> None:
    """`Offloader.note_step` is the engine's way to say that it steps."""
    with Offloader(DeviceBlocks().layout(), host_memory="64KiB", device=CpuDevice()) as offloader:
        offloader.note_step()
        assert offloader._worker.arena._pacer._last_step is not None
