"""A GPU that runs late, and a device of kvmoor's on it: the fake driver, whose streams advance when they are told.

    gpu = LateGpu(random)
    gpu.enqueue(ENGINE, work)      # what a model runner queues
    gpu.lag()                      # some of what is queued runs: any streams, in any order that their events allow
    gpu.finish(mark)               # the engine waits for what it has queued

Whoever waits for a copy makes it advance too, by no more than it takes; no thread does, so a seed says all.
"""

import random
import threading

from fake_cuda import FakeDriver, bytes_at
from fake_page_kernel import add_page_kernels
from kvmoor.devices.cuda import page_kernels
from kvmoor.devices.cuda.copy_strategy import CopyStrategy
from kvmoor.devices.cuda.device import CudaDevice
from kvmoor.devices.device import Direction
from kvmoor.errors import DeviceError

ENGINE = 0
"""The stream that the engine computes on."""
_SCRIBBLE = 0xEE
_CHANGES, _STARVES = 0.08, 0.4
"""How often it changes which streams do not get on, and how many of them those are."""


class LateGpu(FakeDriver):
    """A GPU whose streams advance in an order that a seed draws."""

    def __init__(self, seed, *, pace=1.0):
        super().__init__()
        self.draw = random.Random(seed)
        self._pace = pace
        self._starved = set()
        add_page_kernels(self)
        page_kernels._compile = lambda *arguments: b"code"

    def run_all(self, random=None):
        return super().run_all(random or self.draw)

    def lag(self):
        """Run a few pieces of work, or none. For a while some streams do not get on at all unless they have to."""
        if self.draw.random() < _CHANGES:
            with self._changed:
                self._starved = {stream for stream in self._all_streams() if self.draw.random() < _STARVES}
        for _ in range(int(self.draw.choice([0, 0, 1, 3, 9]) * self._pace)):
            if not self._step_any(starved=False):
                return

    def finish(self, mark):
        """Run work until `mark` is set, as who waits for an event of the engine's stream sees it."""
        while not mark.is_set():
            ran = self.step_any() or mark.is_set()  # a thread of kvmoor's that waits may have been quicker
            assert ran, f"the engine waits for ever: {self.pending(ENGINE)}"

    def step_any(self):
        """Run one piece of work for somebody who waits; say whether there was one that could run."""
        with self._changed:
            return self._step_any(starved=False) or self._step_any(starved=True)

    def _step_any(self, *, starved):
        with self._changed:
            ready = [each for each in self._all_streams() if each.can_step and (each in self._starved) == starved]
            return bool(ready) and self._step(self.draw.choice(ready))


class LateDevice(CudaDevice):
    """A `CudaDevice` on a late GPU. `fails`: by the name of a lane, which part of its jobs fails, from 0 to 1."""

    def __init__(self, gpu, *, fails=None):
        kernels = CopyStrategy(copy_engine_from_nbytes=None, gather_from_nbytes=None)
        super().__init__(driver=gpu, current_stream=ENGINE, strategy=kernels)
        self._gpu = gpu
        self._fails = fails or {}
        self.queues: dict[str, LateQueue] = {}

    def open_copy_queue(self, name, direction):
        queue = super().open_copy_queue(name, direction)
        self.queues[name] = LateQueue(queue, direction, self._gpu, self._fails.get(name, 0.0))
        return self.queues[name]


class LateQueue:
    """Pass everything on to a queue. Some jobs fail, and leave other bytes where they should have written."""

    def __init__(self, queue, direction, gpu, failing):
        self.queue = queue
        self.num_jobs = 0
        self.num_failed = 0
        self._direction = direction
        self._gpu = gpu
        self._failing = failing
        self._doomed = {}

    def __getattr__(self, name):
        return getattr(self.queue, name)

    def enqueue(self, copies, sequence, wait_for):
        self.num_jobs += 1
        if self._gpu.draw.random() < self._failing:
            self._doomed[sequence] = copies
        self.queue.enqueue(copies, sequence, wait_for)

    def failure(self, sequence):
        copies = self._doomed.pop(sequence, None)
        if copies is None:
            return self.queue.failure(sequence)
        self.num_failed += 1
        for part in copies:
            self._scribble(part)
        return DeviceError("the script has it fail")

    def wait_completed(self, sequence, timeout_s):
        while self.queue.completed() < sequence:
            if not self._gpu.step_any():
                return self.queue.wait_completed(sequence, timeout_s)
        return True

    def _scribble(self, part):
        if self._direction is Direction.DEVICE_TO_HOST:
            for address in part.slot_addresses.tolist():
                bytes_at(address, part.group.block_nbytes)[:] = _SCRIBBLE
            return
        for pages in part.group.tensors:
            for block_id in part.block_ids[part.block_ids >= 0].tolist():
                bytes_at(pages.base + block_id * pages.block_stride, pages.page_nbytes)[:] = _SCRIBBLE


def new_mark():
    """Return what work sets when it has run."""
    return threading.Event()
