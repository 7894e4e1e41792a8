"""Long jobs by way of the ring in device memory, on a GPU that does only what the test lets it do."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cuda_rig import ENGINE, LOAD, SHORT_S, STORE, WAIT_S, CudaRig
from kvmoor.devices.cuda import backlog, gathering
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.cuda_error import OUT_OF_MEMORY
from kvmoor.devices.device import BlockCopies
from kvmoor.errors import DeviceError, SettingsError

RING_NBYTES = 4 * 2**20
"""More than the reserve of a device, so that it is an allocation of its own."""
GATHER = CopyStrategy(copy_engine_from_nbytes=None, gather_from_nbytes=1, gather_ring_nbytes=RING_NBYTES)
PAGES = {"pages": (512, 512), "padding": (700, 36, 1300), "one": (4096,), "large": (300_000,)}


@pytest.fixture(autouse=True)
def _small_jobs_count(monkeypatch):
    monkeypatch.setattr(gathering, "SHORTEST_JOB_NBYTES", 2 * 4096)
    monkeypatch.setattr(gathering, "_SMALLEST_RING_NBYTES", RING_NBYTES)


@pytest.fixture
def rig():
    with CudaRig() as rig:
        yield rig


class Opened:
    """A queue and blocks on a rig; leaving it asserts that everything was given back."""

    def __init__(self, rig, direction, *, strategy=GATHER, **options):
        self.rig = rig
        self.blocks = rig.blocks(**options)
        rig.fake.host_register(self.blocks.address, self.blocks.slots.nbytes, False)
        self.device = rig.open(strategy=strategy)
        self.queue = self.device.open_copy_queue("queue", direction)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.rig.fake.run_all()
        if kind is None:
            assert self.device.close(WAIT_S)
        self.rig.fake.memory.remove("registered", self.blocks.address)

    @property
    def gathers(self):
        return bool(self.queue._submission._halves)


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("chunk", [1, 3])
def test_stored_blocks_are_whole_whatever_the_order(rig, pages, chunk):
    """Through a ring that the pieces of a job share every byte of a store arrives, and padding stays as it was."""
    options = {"page_nbytes": PAGES[pages], "blocks_per_chunk": chunk, "num_blocks": 48, "num_slots": 16}
    with Opened(rig, STORE, **options) as opened:
        blocks = opened.blocks
        blocks.slots[:] = 0xEE
        chosen = random.Random(pages).sample(range(16), 16)
        places = random.Random(chunk).sample(range(16), 16)

        opened.queue.enqueue(blocks.copies(*chosen, slots=places), 1, None)
        rig.fake.run_all(random.Random(1))

        assert (1, True) == (opened.queue.completed(), opened.gathers)
        for block_id, place in zip(chosen, places, strict=True):
            content = blocks.content(block_id)
            np.testing.assert_array_equal(content, blocks.slots[place][: content.size])
            assert (blocks.slots[place][content.size :] == 0xEE).all()


@pytest.mark.parametrize("pages", PAGES)
def test_loaded_blocks_are_whole_whatever_the_order(rig, pages):
    """In the other direction every byte arrives in the blocks it is for, and in no other."""
    with Opened(rig, LOAD, page_nbytes=PAGES[pages], num_blocks=32) as opened:
        blocks = opened.blocks
        blocks.slots[:] = np.random.default_rng(7).integers(0, 256, blocks.slots.shape, np.uint8)
        untouched = [blocks.content(number).copy() for number in range(16, 32)]
        places = random.Random(3).sample(range(16), 16)

        opened.queue.enqueue(blocks.copies(*range(16), slots=places), 1, None)
        rig.fake.run_all(random.Random(2))

        assert (1, True) == (opened.queue.completed(), opened.gathers)
        for block_id, place in enumerate(places):
            content = blocks.content(block_id)
            np.testing.assert_array_equal(blocks.slots[place][: content.size], content)
        for number, content in enumerate(untouched, 16):
            np.testing.assert_array_equal(content, blocks.content(number))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_jobs_are_over_in_order_whichever_way_they_go(rig, direction, seed):
    """Long and short jobs behind one another: a number is never seen before the bytes of all jobs up to it."""
    with Opened(rig, direction, page_nbytes=(512, 512), num_blocks=64, num_slots=64) as opened:
        blocks, queue = opened.blocks, opened.queue
        blocks.slots[:] = np.random.default_rng(5).integers(0, 256, blocks.slots.shape, np.uint8)
        jobs = [list(range(20)), [20], list(range(21, 41)), [41], [42], list(range(43, 63))]
        queue.prepare(blocks.group)
        rig.fake.run_all()
        for sequence, chosen in enumerate(jobs, 1):
            queue.enqueue(blocks.copies(*chosen), sequence, None)

        order = random.Random(seed)
        streams = list(queue._submission.streams)
        num_steps = sum(len(rig.fake.pending(stream)) for stream in streams)
        last = 0
        for _ in range(20 * num_steps):
            rig.fake.step(order.choice(streams))
            assert last <= queue._submission._completion._words[0], "the number went back"
            last = queue._submission._completion._words[0]
            for chosen in jobs[: queue.completed()]:
                for number in chosen:
                    content = blocks.content(number)
                    assert np.array_equal(content, blocks.slots[number][: content.size]), f"block {number}"
        assert len(jobs) == queue.completed()


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_the_device_side_waits_for_the_event(rig, direction):
    """Neither a store reads blocks nor a load writes them before the event that the job waits for."""
    with Opened(rig, direction, num_blocks=16) as opened:
        blocks = opened.blocks
        before = [blocks.content(number).copy() for number in range(16)], blocks.slots.copy()
        rig.fake.enqueue(ENGINE, lambda: None, "engine's work")
        event = opened.device.record_event()

        opened.queue.enqueue(blocks.copies(*range(16)), 1, event)
        for stream in 2 * opened.queue._submission.streams:
            rig.fake.run(stream)

        assert 0 == opened.queue.completed()
        if direction is LOAD:
            for number, content in enumerate(before[0]):
                np.testing.assert_array_equal(content, blocks.content(number))
        else:
            np.testing.assert_array_equal(before[1], blocks.slots)


def test_blocks_with_pages_left_out_go_directly(rig):
    """A slot keeps what it has of a page that is left out: such jobs do not pass through the ring."""
    with Opened(rig, STORE, blocks_per_chunk=2, num_blocks=32) as opened:
        blocks = opened.blocks
        blocks.slots[:] = 0xEE
        (copies,) = blocks.copies(*range(16))
        ids = copies.block_ids.copy()
        ids[0] = -1

        opened.queue.enqueue([BlockCopies(copies.group, ids, copies.slot_addresses)], 1, None)
        rig.fake.run_all()

        assert not opened.gathers
        assert (blocks.slots[0][:512] == 0xEE).all()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(CopyStrategy(gather_from_nbytes=None), id="switched off"),
        pytest.param(CopyStrategy(gather_from_nbytes=2**30), id="short runs"),
        pytest.param(CopyStrategy(gather_from_nbytes=1, copy_engine_from_nbytes=512), id="long pages"),
    ],
)
def test_what_gains_nothing_takes_no_memory(rig, strategy):
    """Where the direct way is the better one, there is no ring."""
    with Opened(rig, STORE, strategy=strategy) as opened:
        opened.queue.enqueue(opened.blocks.copies(*range(16)), 1, None)
        rig.fake.run_all()

        assert 1 == opened.queue.completed()
        assert not getattr(opened.queue._submission, "_halves", None)


def test_without_memory_for_the_ring_jobs_go_directly(rig):
    """If the GPU has no memory left, long jobs are whole all the same, and it is not asked again."""
    with Opened(rig, STORE) as opened:
        num_calls = rig.fake.num_calls("memory_alloc")
        rig.fake.fail("memory_alloc", 1, OUT_OF_MEMORY)
        for sequence in (1, 2):
            opened.queue.enqueue(opened.blocks.copies(*range(16)), sequence, None)
            rig.fake.run_all()

        assert (2, False) == (opened.queue.completed(), opened.gathers)
        assert num_calls + 1 == rig.fake.num_calls("memory_alloc")
        opened.blocks.assert_stored(*range(16))


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_the_ring_of_a_checked_layout_is_taken_before_any_job(rig, direction):
    """After a layout with short pages the first queue of a direction has its ring, and a long job allocates nothing."""
    blocks = rig.blocks()
    rig.fake.host_register(blocks.address, blocks.slots.nbytes, False)
    device = rig.open(strategy=GATHER)
    device.check_layout(blocks.layout())
    first, second = (device.open_copy_queue(name, direction) for name in ("first", "second"))
    before = rig.fake.num_calls("memory_alloc")

    first.enqueue(blocks.copies(*range(16)), 1, None)
    rig.fake.run_all()

    assert first._submission._halves
    assert second._submission._halves is None, "who may never have a long job takes no memory"
    assert before == rig.fake.num_calls("memory_alloc")
    assert device.close(WAIT_S)
    rig.fake.memory.remove("registered", blocks.address)
    rig.assert_clean()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(CopyStrategy(gather_from_nbytes=None), id="switched off"),
        pytest.param(CopyStrategy(copy_engine_from_nbytes=512), id="long pages"),
    ],
)
def test_no_ring_is_taken_beforehand_where_no_job_would_use_it(rig, strategy):
    """A layout whose pages the copy engine takes as they are costs no device memory."""
    device = rig.open(strategy=strategy)
    before = rig.fake.num_calls("memory_alloc")
    device.check_layout(rig.blocks().layout())
    queue = device.open_copy_queue("queue", STORE)

    assert not getattr(queue._submission, "_halves", None)
    assert before == rig.fake.num_calls("memory_alloc")


@pytest.mark.parametrize(
    ("most", "expected"), [(None, CopyStrategy().gather_ring_nbytes), (2**22, 2**22), (2**40, None)]
)
def test_a_ring_is_no_larger_than_allowed(rig, most, expected):
    """Whoever shares the GPU can lower the size of the rings without choosing how copies are made."""
    device = rig.open(strategy=None, most_ring_nbytes=most)
    device.check_layout(rig.blocks().layout())

    assert replace(CopyStrategy(), gather_ring_nbytes=expected or CopyStrategy().gather_ring_nbytes) == device.strategy


@pytest.mark.parametrize("which", [0, 1])
def test_a_stream_that_hangs_keeps_the_queue(rig, which):
    """If either stream does not end the queue is not proven, closing ends by its deadline, and nothing blocks."""
    with Opened(rig, STORE) as opened:
        opened.queue.enqueue(opened.blocks.copies(*range(16)), 1, None)
        rig.fake.hang(opened.queue._submission.streams[which])
        rig.fake.run_all()

        assert not opened.queue.close(SHORT_S)
        rig.fake.check()
        rig.fake.release(opened.queue._submission.streams[which])
        rig.fake.run_all()

        assert opened.queue.close(WAIT_S)
        assert opened.queue.failure(1) is None


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_stream_of_the_engine_waits_for_both(rig, direction):
    """What is ordered after a long job runs once its bytes are there."""
    with Opened(rig, direction) as opened:
        seen = []
        opened.queue.enqueue(opened.blocks.copies(*range(16)), 1, None)

        opened.queue.order_after(ENGINE, 1)
        rig.fake.enqueue(ENGINE, lambda: seen.append(opened.queue.completed()), "engine's work")
        rig.fake.run_all(random.Random(4))

        assert [1] == seen


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_job_that_fails_at_any_call_is_never_called_whole(rig, direction):
    """Whichever call of a long job fails, the queue is broken, its job ends as failed, and nothing is left open."""
    with Opened(rig, direction) as opened:
        before = rig.fake.num_calls()
        opened.queue.enqueue(opened.blocks.copies(*range(16)), 1, None)
        num_calls = rig.fake.num_calls() - before
    assert num_calls > 10
    for at in range(num_calls):
        with CudaRig() as each, Opened(each, direction) as opened:
            each.fake.fail(None, each.fake.num_calls() + at, 999)
            try:
                opened.queue.enqueue(opened.blocks.copies(*range(16)), 1, None)
            except DeviceError:
                each.fake.run_all()
                assert opened.queue.close(WAIT_S)
                assert opened.queue.completed() >= 1
            else:
                each.fake.run_all()
                assert 1 == opened.queue.completed()  # without the ring


def test_a_number_is_stored_before_the_next_job_may_store_its_own(rig):
    """A short job behind a long one waits for the number of the long one, not only for its bytes."""
    with Opened(rig, STORE, num_blocks=32, num_slots=32) as opened:
        queue = opened.queue
        main, copying = queue._submission.streams
        queue.prepare(opened.blocks.group)
        rig.fake.run_all()
        queue.enqueue(opened.blocks.copies(*range(16)), 1, None)
        queue.enqueue(opened.blocks.copies(20), 2, None)
        rig.fake.run(main)
        while len(rig.fake.pending(copying)) > 2:  # all but the number and what is recorded behind it
            assert rig.fake.step(copying)
            rig.fake.run(main)

        assert 0 == queue.completed()
        rig.fake.run_all()
        assert 2 == queue.completed()


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("waits", [False, True])
def test_no_stream_is_filled_beyond_what_it_takes(rig, direction, which, waits, monkeypatch):
    """Behind a stream that hangs a job is refused in the end; no call of the driver waits for room."""
    monkeypatch.setattr(backlog, "STALL_TIMEOUT_S", 0.01)
    with Opened(rig, direction, page_nbytes=(2048, 2048), num_blocks=16) as opened:
        queue = opened.queue
        queue.prepare(opened.blocks.group)
        rig.fake.run_all()
        event = opened.device.record_event() if waits else None
        rig.fake.hang(queue._submission.streams[which])

        def fill() -> None:
            for sequence in range(1, 2000):
                queue.enqueue(opened.blocks.copies(*range(16)), sequence, event)

        with pytest.raises(DeviceError, match="did not get on"):
            fill()
        rig.fake.check()
        rig.fake.release(queue._submission.streams[which])


@pytest.mark.parametrize("nbytes", [RING_NBYTES + 2, RING_NBYTES + 5_000])
def test_a_ring_of_any_size_is_cut_where_slots_may_begin(rig, nbytes):
    """The halves lie on whole pages, whatever number of bytes was asked for."""
    strategy = CopyStrategy(copy_engine_from_nbytes=None, gather_from_nbytes=1, gather_ring_nbytes=nbytes)
    with Opened(rig, STORE, strategy=strategy, page_nbytes=(300_000,)) as opened:
        opened.queue.enqueue(opened.blocks.copies(*range(16)), 1, None)
        rig.fake.run_all(random.Random(6))

        assert (1, True) == (opened.queue.completed(), opened.gathers)
        opened.blocks.assert_stored(*range(16))
        assert all(half.address % 4096 == 0 for half in opened.queue._submission._halves)


@pytest.mark.parametrize("field", ["gather_from_nbytes", "gather_ring_nbytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_bad_sizes_are_refused(field, value):
    """What cannot be a size is refused by name."""
    with pytest.raises(SettingsError, match=field):
        CopyStrategy(**{field: value})
