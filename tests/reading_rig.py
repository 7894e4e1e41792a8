"""A worker whose arena of four small slabs others read, and workers that read it; in one process or in several."""

import itertools
import sys

import numpy as np

from device_blocks import DeviceBlocks
from kvmoor.devices.cpu import CpuDevice
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.ticket import ArenaTicket
from kvmoor.reading_worker import ReadingWorker
from kvmoor.testing import ScriptedCopies
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart
from kvmoor.worker import TransferWorker

NUM_SLOTS = 32
SLOTS_PER_SLAB = 8
SLOT_NBYTES = 4096
SLAB_NBYTES = SLOTS_PER_SLAB * SLOT_NBYTES
PLAN = ArenaPlan(
    NUM_SLOTS * SLOT_NBYTES,
    (GroupPlan(0, 16, SLOT_NBYTES, SLOTS_PER_SLAB, 2 * 2**20, NUM_SLOTS),),
    MemoryLimits(),
    "refuse",
)
WAIT_S = 20.0
JOB_TIMEOUT_S = 5.0
_numbers = itertools.count()


class _Rank:
    """Device blocks, and a worker with a clock and copies that the test controls."""

    worker: TransferWorker | ReadingWorker

    def __init__(self):
        self.blocks = DeviceBlocks()
        self.scripted = ScriptedCopies()
        self.now = 1000.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.scripted.release_all()
        self.worker.close(WAIT_S)

    def _submit(self, number, kind, slots, blocks, **options):
        order = Order(OrderId(number), kind, (OrderPart(0, tuple(slots)),))
        self.worker.submit(order, {0: np.array(blocks, dtype=np.int64).reshape(-1, 1)}, **options)

    def load(self, number, slots, blocks, **options):
        self._submit(number, OrderKind.SLOT_TO_DEVICE, slots, blocks, **options)

    def store(self, number, slots, blocks):
        self._submit(number, OrderKind.DEVICE_TO_SLOT, slots, blocks)

    def finish(self, *numbers):
        """Wait for orders and return what is known of all that ended."""
        self.worker.wait([OrderId(number) for number in numbers], WAIT_S)
        return self.outcomes()

    def outcomes(self):
        return [(report.order_id, report.outcome) for report in self.worker.poll_reports()]

    def holds(self, block, number):
        """Say whether a device block holds the content `number`."""
        return bool((self.blocks.content(block) == self.blocks.pattern(number)).all())


class Owner(_Rank):
    """Own an arena that others read."""

    def __init__(self, *, mapping="eager", engine_id=""):
        super().__init__()
        self.worker = TransferWorker(
            self.blocks.layout(),
            PLAN,
            CpuDevice(copy_hook=self.scripted),
            backing=Backing.MEMFD,
            engine_id=engine_id or f"reading-{next(_numbers)}",
            mapping=mapping,
            job_timeout_s=JOB_TIMEOUT_S,
            clock=lambda: self.now,
        )

    def publish(self):
        self.worker.take_published()

    def keep(self, number, contents):
        """Store contents, by slot, whole: order `number`."""
        for block, content in enumerate(contents.values()):
            self.blocks.fill(block, content)
        self.store(number, contents, range(len(contents)))
        self.finish(number)


class Reader(_Rank):
    """Read what an owner keeps."""

    def __init__(self, *, registrar=None, pin="background", observer=None, staging_nbytes=8 * SLOT_NBYTES):
        super().__init__()
        self.worker = ReadingWorker(
            self.blocks.layout(),
            CpuDevice(copy_hook=self.scripted, registrar=registrar),
            observer=observer,
            pin=pin,
            staging_nbytes=staging_nbytes,
            job_timeout_s=JOB_TIMEOUT_S,
            clock=lambda: self.now,
        )


def serve_owner(engine_id):
    """Own an arena in a child process: print the ticket, then obey one command a line and answer each.

    ``keep ORDER SLOT CONTENT`` stores whole; ``begin ORDER SLOT`` begins a store that never ends; ``close``.
    """
    with Owner(engine_id=engine_id) as owner:
        owner.publish()
        print(owner.worker.ticket().to_json(), flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "keep":
                order, slot, content = map(int, numbers)
                owner.keep(order, {slot: content})
            elif command == "begin":
                order, slot = map(int, numbers)
                gate = owner.scripted.hold("store")
                owner.store(order, [slot], [0])
                assert gate.wait_reached(WAIT_S)
            else:
                owner.scripted.release_all()
                owner.worker.close(WAIT_S)
            print("done", flush=True)


def serve_reader():
    """Read in a child process: take the ticket from the first line, then load one slot for each line.

    ``ORDER SLOT CONTENT`` is answered with ``right``, ``wrong``, the outcome of a load that was not done, or why it was
    refused.
    """
    ticket = ArenaTicket.from_json(sys.stdin.readline())
    with Reader() as reader:
        reader.worker.attach(ticket)
        print("attached", flush=True)
        for line in sys.stdin:
            order, slot, content = map(int, line.split())
            reader.blocks.poison()
            try:
                reader.load(order, [slot], [3])
            except Exception as error:  # it is the answer
                print(f"{type(error).__name__}: {error}", flush=True)
                continue
            ((_, outcome),) = reader.finish(order)
            if outcome.value == "done":
                print("right" if reader.holds(3, content) else "wrong", flush=True)
            else:
                print(outcome.value, flush=True)
