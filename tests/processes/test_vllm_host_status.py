"""Which status segments a scheduler reads when there are several of one engine id on its host."""

import os
import subprocess
import sys
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvmoor.errors import CorruptDataError
from kvmoor.host_memory.process_identity import ProcessCalls, descends_from
from kvmoor.host_memory.status_reader import FoundStatusSegment
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.integrations.vllm.host_status import HostStatus
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.transfer_messages import OrderId, SlotRange
from shared_arena import LAYOUT, PLAN

# An orphan was started by nobody who is left, like a worker that ray started or one of another engine.
WORKER = """
import os, sys
if {is_orphan} and os.fork():
    os._exit(0)
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.transfer_messages import SlotRange
from shared_arena import LAYOUT, PLAN
with StatusSegment(PLAN, LAYOUT, engine_id={engine_id!r}, rank={rank}) as segment:
    segment.publish_slots(SlotRange(0, 0, {num_ready}))
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
NOTHING = HostSlots(OrderId(1), (np.zeros(0, np.int32),) * 3)


@contextmanager
def worker(engine_id, *, num_ready, rank=0, is_orphan=False):
    """Run a process with a status segment; yield its id."""
    code = WORKER.format(engine_id=engine_id, rank=rank, num_ready=num_ready, is_orphan=is_orphan)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            if is_orphan:
                process.wait(30)
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.stdout.read()  # until it has ended, an orphan too


def host_status(engine_id, num_ranks=1):
    """Return a reader that searches each time it is asked."""
    ticks = iter(range(1000))
    return closing(HostStatus(engine_id, num_ranks, clock=lambda: float(next(ticks))))


def test_a_process_descends_from_those_that_started_it() -> None:
    """Parents of parents count, the process itself too; an orphan and a process that is gone do not."""
    calls = ProcessCalls()
    with worker("descent", num_ready=1) as child, worker("descent", num_ready=1, is_orphan=True) as orphan:
        assert descends_from(child, os.getpid(), calls)
        assert descends_from(child, os.getppid(), calls)
        assert descends_from(child, child, calls)
        assert not descends_from(os.getpid(), child, calls)
        assert not descends_from(orphan, os.getpid(), calls)
    assert not descends_from(child, os.getpid(), calls)


def test_only_segments_of_our_own_workers_count() -> None:
    """Beside an engine of the same id, this one's workers are read and no other, however many of them there are."""
    with (
        worker("twin", num_ready=7, is_orphan=True),
        worker("twin", num_ready=8, is_orphan=True, rank=1),
        worker("twin", num_ready=9, rank=5),
        worker("twin", num_ready=3),
        host_status("twin", 2) as host,
    ):
        assert [SlotRange(0, 0, 3)] == host.take_published()
        assert host.num_slots is None  # rank 1 of the other engine is not ours
        assert not host.vouches_for(NOTHING)


def test_nobody_guesses_between_segments_of_others(caplog) -> None:
    """Where others start workers, two segments of a rank are left alone, with one warning, until one is left."""
    with worker("others", num_ready=3, is_orphan=True), host_status("others") as host:
        with worker("others", num_ready=7, is_orphan=True):
            assert [] == host.take_published()
            assert [] == host.take_published()
            assert not host.vouches_for(NOTHING)
            assert 1 == caplog.text.count("rank 0 of engine 'others'")
        assert [SlotRange(0, 0, 3)] == host.take_published()
        assert host.vouches_for(NOTHING)


def test_two_workers_of_one_process_are_told_apart_by_nobody(caplog) -> None:
    """Two engines of one id within the scheduler's process are left alone too."""
    with (
        StatusSegment(PLAN, LAYOUT, engine_id="same", rank=0) as first,
        StatusSegment(PLAN, LAYOUT, engine_id="same", rank=0),
        host_status("same") as host,
    ):
        first.publish_slots(SlotRange(0, 0, 3))
        assert [] == host.take_published()
        assert "give each engine its own engine_id" in caplog.text


def test_ready_slots_are_told_in_runs() -> None:
    """What is new comes as one range a run, so that half a million slots are not half a million messages."""
    with StatusSegment(PLAN, LAYOUT, engine_id="runs", rank=0) as segment, host_status("runs") as host:
        segment.publish_slots(SlotRange(0, 2, 10))
        segment.publish_slots(SlotRange(1, 0, 80))
        assert [SlotRange(0, 2, 10), SlotRange(1, 0, 80)] == host.take_published()
        segment.publish_slots(SlotRange(0, 0, 2))
        segment.publish_slots(SlotRange(0, 12, 4))
        assert [SlotRange(0, 0, 2), SlotRange(0, 12, 4)] == host.take_published()


def test_a_segment_that_cannot_be_read_is_left_out(caplog, monkeypatch) -> None:
    """A damaged segment costs what its rank would store, and not the engine."""

    def fail(segment):
        raise CorruptDataError("the status segment is damaged")

    with StatusSegment(PLAN, LAYOUT, engine_id="damaged", rank=0) as segment, host_status("damaged") as host:
        found = [FoundStatusSegment("damaged", 0, os.getpid(), segment.shared_file.descriptor)]
        monkeypatch.setattr("kvmoor.integrations.vllm.host_status.find_status_segments", lambda engine_id: found)
        with monkeypatch.context() as patch:
            patch.setattr(FoundStatusSegment, "open", fail)
            assert [] == host.take_published()
        assert "is damaged: it is left out" in caplog.text
        segment.publish_slots(SlotRange(0, 0, 3))
        assert [SlotRange(0, 0, 3)] == host.take_published()


def test_a_segment_that_is_damaged_later_vouches_for_nothing(caplog) -> None:
    """A count that cannot be is warned of once, and its rank's stores are never found."""
    with StatusSegment(PLAN, LAYOUT, engine_id="broken", rank=0) as segment, host_status("broken") as host:
        assert [] == host.take_published()
        assert host.vouches_for(NOTHING)
        segment._view[segment._shape.published_word] = 10**6
        assert [] == host.take_published()
        assert [] == host.take_published()
        assert 1 == caplog.text.count("rank 0 stores nothing any more")
        assert not host.vouches_for(NOTHING)


@pytest.mark.parametrize("line", ["", "12 (name) S", "12 (name) S x 1"])
def test_a_strange_kernel_line_names_no_ancestor(line) -> None:
    """What cannot be read is no proof of descent."""

    class Strange(ProcessCalls):
        def read_text(self, path):
            return line

    assert not descends_from(12, 1, Strange())
