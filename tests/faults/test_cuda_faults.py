"""A CUDA device whose driver fails at every call in turn, hangs, or faults: it ends, and leaves what it must only."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from cuda_rig import ENGINE, LOAD, STORE, WAIT_S, CudaRig
from kvmoor.devices.cuda import gathering
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.cuda_error import ILLEGAL_ADDRESS, LAUNCH_FAILED, NOT_SUPPORTED, OUT_OF_MEMORY
from kvmoor.errors import ClosedError, KvmoorError
from kvmoor.registration import RegistrationError

RING_NBYTES = 2**16
"""Small, because each life has two rings, and those of a device that was not proven idle stay."""
STRATEGY = CopyStrategy(copy_engine_from_nbytes=4096, gather_ring_nbytes=RING_NBYTES)
FREEING = {"stream_destroy", "event_destroy", "module_unload", "memory_free", "host_free", "host_unregister"}
FREEING |= {"primary_context_release"}
PREPARING = {"exchange_capture_mode", "context_current", "context_set"}


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch):
    monkeypatch.setattr(gathering, "_SMALLEST_RING_NBYTES", RING_NBYTES)


class Life:
    """All that happens to a device, from its opening to its end, with whatever goes wrong on the way."""

    def __init__(self, rig):
        self.rig = rig
        self.whole = []  # jobs that were said to be whole: their queue's name and what they copied
        self.errors = []
        self.unregisters = []
        self.staging = []
        self.num_kept = 0
        self.blocks = [rig.blocks(page_nbytes=(4096, 512)), rig.blocks(page_nbytes=(128,), blocks_per_chunk=2)]
        self.blocks.append(rig.blocks(page_nbytes=(8192,), seed=2))
        self.device = None

    def live(self):
        """Do everything once; what is refused is left out."""
        self._try(self._open)
        if self.device is None:
            return
        self._try(self._use)

    def end(self):
        """Close and give back, as a worker does; return whether all was proven."""
        if self.device is None:
            return True
        self.rig.fake.run_all()
        proven = self.device.close(WAIT_S)
        assert proven == self.device.close(0.0)
        for address in self.staging:
            self.device.free_staging(address)
        for unregister in self.unregisters:
            try:
                unregister()
            except KvmoorError:  # which an arena takes for a range that may still be registered, and keeps
                self.num_kept += 1
        assert self.device._holdings._freeing.wait_idle(WAIT_S)
        return proven

    def _open(self):
        self.device = self.rig.open(strategy=STRATEGY, ordinal=0)

    def _use(self):
        device = self.device
        for blocks in self.blocks:
            self._register(blocks)
        for blocks in self.blocks:
            self._try(lambda blocks=blocks: device.check_layout(blocks.layout()))
        self._try(lambda: self.staging.append(device.allocate_staging(8192)))
        queues = []
        for name, direction in (("store", STORE), ("load", LOAD)):
            self._try(lambda name=name, direction=direction: queues.append(device.open_copy_queue(name, direction)))
        for queue in queues:
            jobs = [
                [*self.blocks[0].copies(1, 2), *self.blocks[1].copies(3)],
                self.blocks[2].copies(4, 5),
                [],
            ]
            self._try(lambda queue=queue, jobs=jobs: self._copy(queue, jobs))

    def _register(self, blocks):
        registrar = self.device.registrar
        try:
            blocks.register(registrar)
        except RegistrationError:
            return  # nothing is registered: that is its promise
        except KvmoorError as error:
            self.errors.append(repr(error))  # an arena would take the range for registered and keep it
            if not self.rig.fake.memory.overlapping(blocks.address, blocks.slots.nbytes):
                return
        blocks.is_registered = True
        self.unregisters.append(lambda: registrar.unregister(blocks.address, blocks.slots.nbytes))

    def _copy(self, queue, jobs):
        self.rig.fake.enqueue(ENGINE)
        for sequence, job in enumerate(jobs, start=1):
            if all(getattr(blocks, "is_registered", False) for blocks in self.blocks):
                queue.enqueue(job, sequence, self.device.record_event())
        self.rig.fake.run_all()
        for sequence in range(1, len(jobs) + 1):
            if queue.wait_completed(sequence, 0.01) and queue.failure(sequence) is None:
                self.whole.append((queue.name, sequence))

    def _try(self, work):
        try:
            work()
        except KvmoorError as error:
            self.errors.append(repr(error))  # without its frames, which hold events

    def assert_right(self):
        """What was said to be stored is stored."""
        stored = {1: [(self.blocks[0], 1), (self.blocks[0], 2), (self.blocks[1], 3)], 2: [(self.blocks[2], 4)]}
        for name, sequence in self.whole:
            for blocks, number in stored.get(sequence, ()):
                if name == "store":
                    np.testing.assert_array_equal(blocks.content(number), blocks.slot(number))


def count_calls():
    """Return how many calls a life makes in which nothing goes wrong."""
    with CudaRig() as rig:
        life = Life(rig)
        life.live()
        assert life.end()
        assert [] == life.errors
        assert 6 == len(life.whole)
        life.assert_right()
        rig.assert_clean()
        return len(rig.fake.calls)


NUM_CALLS = count_calls()


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, NOT_SUPPORTED])
def test_any_call_may_fail(code):
    """Whichever call fails once, the device closes, gives everything back, and no wrong bytes count as right."""
    for at in range(NUM_CALLS):
        with CudaRig() as rig:
            rig.fake.fail(None, at=at, code=code)
            life = Life(rig)
            life.live()
            assert life.end(), f"call {at}"
            life.assert_right()
            if at >= len(rig.fake.calls):
                continue  # it depends on the threads how many calls there are
            name, is_freeing = rig.fake.calls[at].name, rig.fake.calls[at].thread == "kvmoor-cuda-free"
            rig.fake.check()
            leaks = rig.fake.leaks()
            if is_freeing and name in PREPARING:
                continue  # a thread that could break captures frees nothing
            assert len(leaks) <= life.num_kept + (name in FREEING - {"host_unregister"}), (
                f"call {at}, {name}: {leaks}, {life.errors}"
            )
            assert rig.fake.context_stack() == (rig.fake.context_stack()[0],)
            assert "global" == rig.fake.capture_mode or name == "exchange_capture_mode"


@pytest.mark.parametrize("code", [LAUNCH_FAILED, ILLEGAL_ADDRESS])
def test_any_call_may_find_the_device_dead(code):
    """Whichever call meets a fault of the GPU, closing ends at once, all jobs are over, and no call could block."""
    for at in range(NUM_CALLS):
        with CudaRig() as rig:
            rig.fake.fail(None, at=at, code=code)
            life = Life(rig)
            started = time.monotonic()
            life.live()
            assert life.end(), f"call {at}"
            assert time.monotonic() - started < WAIT_S
            life.assert_right()
            rig.fake.check()
            for queue in life.device._queues if life.device else ():
                assert queue.completed() == queue._last_sequence, f"call {at}"


def test_any_call_may_meet_a_hanging_stream():
    """From whichever call on a stream hangs, closing ends by its deadline and makes no call that would block."""
    for at in range(0, NUM_CALLS, 5):
        with CudaRig() as rig:
            hung = []

            def hang(call, rig=rig, hung=hung, at=at):
                if not hung and rig.fake.num_calls() >= at and call.name == "launch":
                    hung.append(call.arguments[4])
                    rig.fake.hang(hung[0])

            rig.fake.before_call = hang
            life = Life(rig)
            life.live()
            if not hung:
                continue
            rig.fake.run_all()
            started = time.monotonic()
            assert not life.device.close(0.02)
            assert time.monotonic() - started < WAIT_S
            rig.fake.check()
            rig.fake.before_call = None
            rig.fake.release(hung[0])

            assert life.end()
            life.assert_right()
            rig.assert_clean()


@pytest.mark.parametrize("seed", range(20))
def test_closing_meets_jobs_on_their_way(seed):
    """Whenever another thread closes the device while jobs are queued and run, all jobs end and nothing is left."""
    random = np.random.default_rng(seed)
    with CudaRig() as rig:
        device = rig.open(strategy=STRATEGY)
        blocks = rig.blocks(page_nbytes=(4096, 512))
        unregister = blocks.register(device.registrar)
        queue = device.open_copy_queue("store", STORE)
        rig.run()
        close_at = int(random.integers(1, 60))
        closers = []
        queued = 0
        with suppress(ClosedError):
            for sequence in range(1, 100):
                if sequence == close_at:
                    closers.append(threading.Thread(target=device.close, args=(WAIT_S,)))
                    closers[0].start()
                queue.enqueue(blocks.copies(*random.permutation(16)[:4].tolist()), sequence, device.record_event())
                queued = sequence
        closers[0].join(WAIT_S)

        assert device.close(WAIT_S)
        assert queue.completed() == queued
        assert all(queue.failure(sequence) is None for sequence in range(1, queued + 1))
        unregister()
        assert device._holdings._freeing.wait_idle(WAIT_S)
        rig.assert_clean()
