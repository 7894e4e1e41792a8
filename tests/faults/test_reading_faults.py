"""Whatever fails, hangs or goes away while a worker loads from the arena of another: no wrong bytes, and it closes."""

import os
import time
from contextlib import suppress

import pytest

from kvmoor.errors import BrokenError, BusyError, ClosedError, CorruptDataError, KvmoorError, RequestError
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.process_identity import ProcessCalls
from kvmoor.testing.scripted_registrar import ScriptedRegistrar
from kvmoor.transfer_messages import Outcome
from reading_rig import JOB_TIMEOUT_S, NUM_SLOTS, SLOTS_PER_SLAB, WAIT_S, Owner, Reader

CLOSE_S = 0.1
GRACE_S = 0.5
"""What closing may take past its deadline on a machine that others use too."""
NUM_BLOCKS = 4


@pytest.fixture
def owner():
    with Owner() as owner:
        owner.publish()
        owner.keep(1, {slot: 100 + slot for slot in range(NUM_BLOCKS)})
        yield owner


@pytest.fixture
def registrar():
    with ScriptedRegistrar() as registrar:
        yield registrar


@pytest.fixture
def reader(owner):
    with Reader() as reader:
        reader.worker.attach(owner.worker.ticket())
        yield reader


def close_in_time(reader):
    """Close within 0.1 s and return the report, once it is clear that the deadline was kept."""
    started = time.monotonic()
    report = reader.worker.close(CLOSE_S)
    assert time.monotonic() - started < CLOSE_S + GRACE_S
    return report


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("k", range(NUM_BLOCKS))
def test_a_load_that_fails_at_any_copy_says_so(owner, registrar, k, staged) -> None:
    """It is over and FAILED; the next one brings the bytes."""
    with Reader(registrar=registrar if staged else None, pin="off") as reader:
        reader.worker.attach(owner.worker.ticket())
        reader.scripted.fail_at(k)
        reader.load(1, range(NUM_BLOCKS), range(8, 8 + NUM_BLOCKS))
        assert [(1, Outcome.FAILED)] == reader.finish(1)
        reader.load(2, range(NUM_BLOCKS), range(8, 8 + NUM_BLOCKS))
        assert [(2, Outcome.DONE)] == reader.finish(2)
        assert all(reader.holds(8 + number, 100 + number) for number in range(NUM_BLOCKS))
        assert reader.worker.close(WAIT_S).graceful


def test_a_slot_that_changes_under_a_load_fails_it(owner, reader) -> None:
    """An order that nobody should have given does not end with bytes of two blocks that count as one."""
    gate = reader.scripted.hang_at(1)
    reader.load(1, [0, 1, 2], [8, 9, 10])
    assert gate.wait_reached(WAIT_S)
    owner.keep(2, {2: 55})
    gate.release()
    reader.worker.wait([1], WAIT_S)

    (report,) = reader.worker.poll_reports()

    assert (Outcome.FAILED, 0) == (report.outcome, report.nbytes)
    assert "written to while it was read" in report.reason


def test_a_slot_that_is_being_filled_when_a_load_ends_fails_it(owner, reader) -> None:
    """A store that has begun, and not ended, is enough."""
    gate = reader.scripted.hang_at(0)
    reader.load(1, [2], [8])
    assert gate.wait_reached(WAIT_S)
    storing = owner.scripted.hold("store")
    owner.store(2, [2], [0])
    assert storing.wait_reached(WAIT_S)
    gate.release()

    assert [(1, Outcome.FAILED)] == reader.finish(1)


def test_an_owner_that_closes_leaves_what_is_ready(owner, reader) -> None:
    """READY slots are loaded all the same, also by a load that was under way; others are refused, with the reason."""
    gate = reader.scripted.hang_at(0)
    reader.load(1, [0, 1], [8, 9])
    assert gate.wait_reached(WAIT_S)
    owner.worker.close(WAIT_S)
    gate.release()
    assert [(1, Outcome.DONE)] == reader.finish(1)
    reader.load(2, [3], [10])
    assert [(2, Outcome.DONE)] == reader.finish(2)
    assert [True] * 3 == [reader.holds(8, 100), reader.holds(9, 101), reader.holds(10, 103)]
    with pytest.raises(RequestError, match="closed its arena before the slot was READY"):
        reader.load(3, [NUM_BLOCKS], [8])


def test_a_load_that_hangs_is_given_up_and_its_memory_kept(owner, expects_quarantine) -> None:
    """Past its deadline it is ABANDONED, its device blocks are withheld; closing keeps the deadline and the slots."""
    reader = Reader()
    reader.worker.attach(owner.worker.ticket())
    gate = reader.scripted.hang_at(0)
    reader.load(1, [0], [8])
    assert gate.wait_reached(WAIT_S)
    reader.now += 2 * JOB_TIMEOUT_S
    assert [(1, Outcome.ABANDONED)] == reader.outcomes()
    with pytest.raises(BusyError, match="may still write"):
        reader.load(2, [1], [8])
    reader.load(3, [1], [9], expedited=True)
    assert [(3, Outcome.DONE)] == reader.finish(3)

    report = close_in_time(reader)

    assert (1,) == report.unproven_jobs
    assert report.quarantined_nbytes >= reader.worker.attached.nbytes
    assert "load lane" in report.reason
    assert not reader.worker.attached.closed
    gate.release()
    reader.worker.wait([1], WAIT_S)
    assert [(1, Outcome.SETTLED)] == reader.outcomes()


def test_a_late_load_is_settled(owner, reader) -> None:
    """Its blocks may be used again, and closing gives everything back."""
    gate = reader.scripted.hang_at(0)
    reader.load(1, [0], [8])
    assert gate.wait_reached(WAIT_S)
    reader.now += 2 * JOB_TIMEOUT_S
    assert [(1, Outcome.ABANDONED)] == reader.outcomes()
    gate.release()
    assert [(1, Outcome.SETTLED)] == reader.finish(1)
    reader.load(2, [1], [8])
    assert [(2, Outcome.DONE)] == reader.finish(2)
    assert reader.worker.close(WAIT_S).graceful


@pytest.mark.parametrize("operation", ["register", "unregister", "prepare_thread"])
def test_a_registrar_that_hangs_does_not_hold_up_loads_nor_closing(owner, operation, expects_quarantine) -> None:
    """Loads are right meanwhile; closing ends by its deadline and keeps what may still be registered."""
    registrar = ScriptedRegistrar()
    gate = registrar.hold_at(0, operation=operation)
    reader = Reader(registrar=registrar)
    reader.worker.attach(owner.worker.ticket())
    if operation == "unregister":
        assert reader.worker.wait_registered(WAIT_S)
    else:
        assert gate.wait_reached(WAIT_S)
    reader.load(1, [0], [8])
    assert [(1, Outcome.DONE)] == reader.finish(1)
    assert reader.holds(8, 100)

    report = close_in_time(reader)

    assert "page-locking" in report.reason
    assert "did not end in time" in report.reason
    assert not reader.worker.attached.closed
    gate.release()
    assert report is reader.worker.close(WAIT_S)


def test_a_range_that_cannot_be_undone_keeps_its_memory(owner, registrar, expects_quarantine) -> None:
    """A device that may still map pages keeps them; the others are undone."""
    registrar.fail_at(1, operation="unregister")
    reader = Reader(registrar=registrar)
    reader.worker.attach(owner.worker.ticket())
    assert reader.worker.wait_registered(WAIT_S)

    report = reader.worker.close(WAIT_S)

    assert "could not be unregistered" in report.reason
    assert report.quarantined_nbytes
    assert NUM_SLOTS // SLOTS_PER_SLAB == registrar.num_calls("unregister")


def test_a_registrar_with_a_bug_leads_to_staging(owner, registrar, expects_quarantine) -> None:
    """What it raised proves nothing about its range, so that is kept; loads go through the ring."""
    registrar.fail_at(0, ZeroDivisionError("a bug"))
    reader = Reader(registrar=registrar)
    reader.worker.attach(owner.worker.ticket())
    assert not reader.worker.wait_registered(WAIT_S)
    reader.load(1, [0], [8])
    assert [(1, Outcome.DONE)] == reader.finish(1)
    assert reader.holds(8, 100)
    assert "may be registered" in reader.worker.close(WAIT_S).reason


class ClosingCalls(ProcessCalls):
    """System calls beside which the worker that attaches is closed, at the first mapping."""

    reader: Reader

    def mmap(self, *arguments):
        self.reader.worker.close(WAIT_S)
        return super().mmap(*arguments)


def test_closing_while_attaching_leaves_nothing(owner) -> None:
    """Who attaches hears that it is closed, and what was mapped by then is given back."""
    reader, calls = Reader(), ClosingCalls()
    calls.reader = reader
    with pytest.raises(ClosedError):
        reader.worker.attach(owner.worker.ticket(), calls=calls)
    assert reader.worker.attached is None


class FailingCalls(ProcessCalls):
    """System calls of which one fails: the `index`-th that opens, maps or looks at something."""

    def __init__(self, index):
        self.left = index

    def _fail(self):
        self.left -= 1
        if self.left == -1:
            raise OSError(5, "scripted failure")

    def open_read_only(self, path):
        self._fail()
        return super().open_read_only(path)

    def pidfd_open(self, pid):
        self._fail()
        return super().pidfd_open(pid)

    def mmap(self, *arguments):
        self._fail()
        return super().mmap(*arguments)


def test_attaching_that_fails_at_any_call_may_be_tried_again(owner) -> None:
    """Nothing is held then, and nothing can be loaded; the next try finds everything."""
    failed = 0
    for index in range(100):
        with Reader() as reader:
            with suppress(BrokenError, CorruptDataError):
                reader.worker.attach(owner.worker.ticket(), calls=FailingCalls(index))
            if reader.worker.attached is not None:
                break
            failed += 1
            with pytest.raises(RequestError, match="before the ticket"):
                reader.load(1, [0], [8])
            reader.worker.attach(owner.worker.ticket())
            reader.load(1, [0], [8])
            assert [(1, Outcome.DONE)] == reader.finish(1)
    assert 4 < failed < 99


def test_an_end_that_is_seen_after_closing_is_not_trusted(owner, reader) -> None:
    """The owner's words cannot be compared any more, so a load whose report was not taken in time has failed."""
    reader.load(1, [0], [8])
    reader.worker.wait([1], WAIT_S)
    reader.worker.close(WAIT_S)

    ((number, outcome),) = reader.outcomes()

    assert (1, Outcome.FAILED) == (number, outcome)


def test_a_child_that_is_forked_has_a_closed_worker(owner, registrar) -> None:
    """It has no memory of the owner's, calls no registrar, and its exit closes nothing of the parent's."""
    gate = registrar.hold_at(1)
    with Reader(registrar=registrar) as reader:
        reader.worker.attach(owner.worker.ticket())
        assert gate.wait_reached(WAIT_S)
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                refused = 0
                try:
                    reader.load(1, [0], [8])
                except KvmoorError:
                    refused = 1
                right = refused and reader.worker.closed and isinstance(reader.worker.attached, AttachedArena)
                right = right and reader.worker.attached.closed and reader.worker.close(CLOSE_S).graceful
                reader.worker.statistics()
                code = 0 if right and registrar.num_calls("unregister") == 0 else 1
            os._exit(code)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        gate.release()
        assert reader.worker.wait_registered(WAIT_S)
        reader.load(1, [0], [8])
        assert [(1, Outcome.DONE)] == reader.finish(1)
