"""What a worker tells readers of its arena about the orders it runs."""

import ctypes
import itertools
import pickle

import numpy as np
import pytest

from child_processes import children
from device_blocks import DeviceBlocks
from kvmoor.devices.cpu import CpuDevice
from kvmoor.errors import RequestError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.host_memory.status_reader import find_status_segments
from kvmoor.testing.scripted_copies import ScriptedCopies
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.worker import TransferWorker

NUM_SLOTS = 32
WAIT_S = 20.0
JOB_TIMEOUT_S = 5.0
READER = """
    import ctypes, pickle, sys
    from device_blocks import DeviceBlocks
    from kvmoor.host_memory.attached_arena import AttachedArena

    ticket = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    layout = DeviceBlocks().layout()
    with AttachedArena(ticket, layout) as attached:
        for line in sys.stdin:
            slot = int(line)
            (order_id,) = attached.status.order_ids(0, [slot])
            (address,) = attached.slot_addresses(0, [slot])
            print(order_id, ctypes.string_at(int(address), layout.groups[0].block_nbytes).hex(), flush=True)
"""
_rig_numbers = itertools.count()


class SharingWorker:
    """A worker whose arena others read, with a clock and copies that the test controls; its own slots 0, 1, ..."""

    def __init__(self):
        self.blocks = DeviceBlocks()
        for number in range(len(self.blocks.tensors[0])):
            self.blocks.fill(number, number)
        self.layout = self.blocks.layout()
        self.scripted = ScriptedCopies()
        self.now = 1000.0
        self.engine_id = f"sharing-worker-{next(_rig_numbers)}"
        self.worker = TransferWorker(
            self.layout,
            plan_arena(self.layout, NUM_SLOTS * 4096),
            CpuDevice(copy_hook=self.scripted),
            backing=Backing.MEMFD,
            engine_id=self.engine_id,
            mapping="eager",
            job_timeout_s=JOB_TIMEOUT_S,
            clock=lambda: self.now,
        )

    def submit(self, number, kind, slots, blocks):
        order = Order(OrderId(number), kind, (OrderPart(0, tuple(slots)),))
        self.worker.submit(order, {0: np.array(blocks, dtype=np.int64).reshape(-1, 1)})

    def store(self, number, slots, blocks):
        """Begin to copy device blocks, which hold contents of the same numbers, into slots."""
        self.submit(number, OrderKind.DEVICE_TO_SLOT, slots, blocks)

    def load(self, number, slots, blocks):
        self.submit(number, OrderKind.SLOT_TO_DEVICE, slots, blocks)

    def finish(self, number):
        """Return how an order ended."""
        self.worker.wait([OrderId(number)], WAIT_S)
        return self.outcomes()

    def outcomes(self):
        return [(report.order_id, report.outcome) for report in self.worker.poll_reports()]


@pytest.fixture
def sharing():
    sharing = SharingWorker()
    with sharing.worker, sharing.scripted:
        yield sharing


@pytest.fixture
def attached(sharing):
    with AttachedArena(sharing.worker.ticket(), sharing.layout) as attached:
        yield attached


def order_ids(attached, *slots):
    return attached.status.order_ids(0, slots).tolist()


def content(attached, slot):
    nbytes = attached.plan.groups[0].slot_nbytes
    return ctypes.string_at(int(attached.slot_addresses(0, [slot])[0]), nbytes)


def test_a_slot_vouches_once_the_done_report_was_taken(sharing, attached):
    """While a store runs its slots vouch for nothing; once its DONE report was taken they name it, all at once."""
    gate = sharing.scripted.hang_at(1)
    sharing.store(7, [3, 5], [0, 1])
    assert gate.wait_reached(WAIT_S)
    assert [] == sharing.outcomes()
    assert [0, 0] == order_ids(attached, 3, 5)
    gate.release()
    sharing.worker.wait([OrderId(7)], WAIT_S)
    assert [0, 0] == order_ids(attached, 3, 5)
    assert [(7, Outcome.DONE)] == sharing.outcomes()
    assert [7, 0, 7] == order_ids(attached, 3, 4, 5)
    assert [] == sharing.outcomes()
    assert 2 == np.count_nonzero(attached.status.order_ids(0, np.arange(NUM_SLOTS)))


def test_readers_find_the_bytes_that_were_stored(sharing, attached):
    """What lies at the address of a slot is what the device held, block for block."""
    sharing.worker.take_published()
    sharing.store(1, [9, 0, 31], [4, 5, 6])
    assert [(1, Outcome.DONE)] == sharing.finish(1)
    for slot, number in ((9, 4), (0, 5), (31, 6)):
        expected = sharing.blocks.pattern(number).tobytes()
        assert expected == content(attached, slot)[: len(expected)]


def test_another_process_reads_what_was_stored(sharing):
    """Order ids and bytes reach a process that has nothing but the pickled ticket, also those of a later store."""
    sharing.worker.take_published()
    with children() as start:
        child = start(READER)
        child.stdin.write(pickle.dumps(sharing.worker.ticket()).hex() + "\n")
        for order_id, slot, number in ((1, 2, 8), (2, 30, 9), (3, 2, 10)):
            sharing.store(order_id, [slot], [number])
            assert [(order_id, Outcome.DONE)] == sharing.finish(order_id)
            child.stdin.write(f"{slot}\n")
            child.stdin.flush()
            assert f"{order_id} {sharing.blocks.pattern(number).tobytes().hex()}\n" == child.stdout.readline()
        child.stdin.close()
        assert 0 == child.wait(WAIT_S)


def test_a_failed_store_vouches_for_nothing(sharing, attached):
    """After FAILED the words are 0, also those of the slots that were copied, and of one that was whole before."""
    sharing.store(1, [2], [0])
    assert [(1, Outcome.DONE)] == sharing.finish(1)
    sharing.scripted.fail_at(2)
    sharing.store(2, [1, 2], [1, 2])
    assert [(2, Outcome.FAILED)] == sharing.finish(2)
    assert [0, 0] == order_ids(attached, 1, 2)


def test_an_abandoned_store_never_vouches(sharing, attached):
    """Neither giving a store up nor seeing its late end makes its slots READY."""
    gate = sharing.scripted.hang_at(0)
    sharing.store(1, [4, 6], [0, 1])
    assert gate.wait_reached(WAIT_S)
    sharing.now += 2 * JOB_TIMEOUT_S
    assert [(1, Outcome.ABANDONED)] == sharing.outcomes()
    assert [0, 0] == order_ids(attached, 4, 6)
    gate.release()
    assert [(1, Outcome.SETTLED)] == sharing.finish(1)
    assert [0, 0] == order_ids(attached, 4, 6)


def test_a_slot_that_is_refilled_vouches_for_nothing(sharing, attached):
    """From the submission of the next store on a slot is not READY, before a byte of it changes; others stay."""
    sharing.store(1, [3, 4], [0, 1])
    assert [(1, Outcome.DONE)] == sharing.finish(1)
    gate = sharing.scripted.hold("store")
    sharing.store(2, [4], [2])
    assert [1, 0] == order_ids(attached, 3, 4)
    assert gate.wait_reached(WAIT_S)
    assert [] == sharing.outcomes()
    assert [1, 0] == order_ids(attached, 3, 4)
    gate.release()
    assert [(2, Outcome.DONE)] == sharing.finish(2)
    assert [1, 2] == order_ids(attached, 3, 4)


def test_a_load_changes_no_word(sharing, attached):
    """Reading slots into the device leaves what they vouch for as it is, while it runs and after."""
    sharing.store(1, [3, 4], [0, 1])
    assert [(1, Outcome.DONE)] == sharing.finish(1)
    gate = sharing.scripted.hold("load")
    sharing.load(2, [3, 4], [10, 11])
    assert [1, 1] == order_ids(attached, 3, 4)
    gate.release()
    assert [(2, Outcome.DONE)] == sharing.finish(2)
    assert [1, 1] == order_ids(attached, 3, 4)


def test_a_refused_store_changes_no_word(sharing, attached):
    """An order that was never queued, because its block does not exist, takes nothing from readers."""
    sharing.store(1, [3], [0])
    assert [(1, Outcome.DONE)] == sharing.finish(1)
    with pytest.raises(RequestError):
        sharing.store(2, [3], [10**6])
    assert [1] == order_ids(attached, 3)


def test_slots_are_published_when_the_worker_takes_them(sharing, attached):
    """Readers may use the slots that `take_published` returned, and none before."""
    assert 0 == attached.status.num_published(0)
    with pytest.raises(RequestError, match="the owner published 0 of"):
        attached.slot_addresses(0, [0])
    published = [number for r in sharing.worker.take_published() for number in range(r.first, r.first + r.num_slots)]
    assert list(range(NUM_SLOTS)) == published
    assert attached.status.are_published(0, published).all()
    assert NUM_SLOTS == attached.status.num_published(0)
    assert [] == sharing.worker.take_published()
    assert NUM_SLOTS == attached.status.num_published(0)


def test_the_heartbeat_advances_with_every_poll(sharing, attached):
    """Each look at the reports is a sign of life, also when there is none."""
    beats = attached.status.heartbeat().count
    for number in (1, 2, 3):
        assert [] == sharing.worker.poll_reports()
        assert beats + number == attached.status.heartbeat().count


def test_closing_tells_readers_and_keeps_what_is_ready(sharing, attached):
    """After close readers know; READY slots keep id and bytes, and an end nobody had seen makes nothing READY."""
    sharing.worker.take_published()
    sharing.store(1, [3], [0])
    assert [(1, Outcome.DONE)] == sharing.finish(1)
    sharing.store(2, [4], [1])
    sharing.worker.wait([OrderId(2)], WAIT_S)
    assert not attached.status.is_closed_by_owner()
    assert sharing.worker.close().quarantined_nbytes == 0
    assert attached.status.is_closed_by_owner()
    assert [(2, Outcome.DONE)] == sharing.outcomes()
    assert [1, 0] == order_ids(attached, 3, 4)
    expected = sharing.blocks.pattern(0).tobytes()
    assert expected == content(attached, 3)[: len(expected)]
    with pytest.raises(RequestError, match="closed its arena before the slot was READY"):
        attached.slot_addresses(0, [4])


def test_a_worker_is_found_by_its_engine_while_it_is_open(sharing):
    """The finder lists the status segment of an open worker, and not that of a closed one."""
    (found,) = find_status_segments(sharing.engine_id)
    with found.open() as reader:
        assert sharing.worker.ticket().nonce == reader.header.nonce
    sharing.worker.close()
    assert [] == find_status_segments(sharing.engine_id)
