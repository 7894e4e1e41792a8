"""A coordinator and three ranks as real processes, forked from one that is warm, and killed where a test says.

    stdin    {"run": name, "point": where, "victims": [0, 2]}    one JSON object a line; process 0 coordinates
    stdout   {"pids": [...], "codes": [...], "fresh_start": 0}   what became of them, and of a new offloader afterwards

Every process announces that it has come to the marked point and waits there. Then the victims are killed, all at once
as far as the others can tell, the survivors go on, and they have to end by themselves.
"""

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from device_blocks import DeviceBlocks, content_keys
from kvmoor.devices.cpu import CpuDevice
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.offloader import Offloader
from kvmoor.testing import ScriptedCopies
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart, Outcome
from kvmoor.worker import TransferWorker

NUM_RANKS = 3
HOST_NBYTES = 4 << 20
WAIT_S = 20.0
BACKINGS = (Backing.MEMFD, Backing.ANONYMOUS, Backing.MEMFD)
ORDERS = {"store": OrderKind.DEVICE_TO_SLOT, "load": OrderKind.SLOT_TO_DEVICE}


class Marks:
    """Announce the marked point to the parent, and wait there until it says to go on."""

    def __init__(self, marked: str, parent: Connection) -> None:
        self.marked = marked
        self._parent = parent
        self._reached = False

    def reach(self, point: str) -> None:
        """Stop here if this is the marked point; once."""
        if point == self.marked and not self._reached:
            self._reached = True
            self._parent.send(os.getpid())
            if self._parent.poll(WAIT_S):
                self._parent.recv()


class MarkedCalls(SystemCalls):
    """The system calls of an arena, with a mark behind its reservation and one before its first touch."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def mmap(self, address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
        mapped = super().mmap(address, nbytes, protection, flags, fd, offset)
        self._marks.reach("after reserve")
        return mapped

    def memset(self, address: int, nbytes: int) -> None:
        self._marks.reach("while mapping")
        super().memset(address, nbytes)


class MarkedDevice(CpuDevice):
    """A device whose worker is closing, with its lanes closed and its arena still mapped, when it is closed."""

    def __init__(self, marks: Marks, scripted: ScriptedCopies) -> None:
        super().__init__(copy_threads=1, copy_hook=scripted)
        self._marks = marks

    def close(self, timeout_s: float) -> bool:
        self._marks.reach("closing")
        return super().close(timeout_s)


def be_rank(run: str, number: int, coordinator: Connection, marks: Marks) -> None:
    """Open an arena and a worker, carry out orders until told to close or left alone, then close."""
    marks.reach("before open")
    blocks, scripted = DeviceBlocks(), ScriptedCopies()
    blocks.fill(0, number)
    plan = plan_arena(blocks.layout(), HOST_NBYTES)
    with ExitStack() as opened:
        name = f"{run}-{number}"
        arena = opened.enter_context(Arena(plan, backing=BACKINGS[number], name=name, calls=MarkedCalls(marks)))
        worker = TransferWorker(blocks.layout(), plan, MarkedDevice(marks, scripted))
        opened.callback(worker.close, WAIT_S)
        assert arena.wait_published(WAIT_S)
        assert worker.arena.wait_published(WAIT_S)
        marks.reach("first slot published")
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the coordinator is gone: close all the same
            coordinator.send("opened")
            while (order := coordinator.recv()) != "close":
                carry_out(order, worker, scripted, marks)
                if order == "load":
                    assert (blocks.content(1) == blocks.pattern(number)).all()
                coordinator.send("done")
        scripted.release_all()
        assert worker.close(WAIT_S).graceful
        assert arena.close(WAIT_S)
    marks.reach("after close")
    with suppress(BrokenPipeError, ConnectionResetError):
        coordinator.send("closed")


def carry_out(order: str, worker: TransferWorker, scripted: ScriptedCopies, marks: Marks) -> None:
    """Store block 0 or load it into block 1, with a stop while the copy is held in the middle."""
    order_id, device_block = (OrderId(1), 0) if order == "store" else (OrderId(2), 1)
    gate = None
    if marks.marked == f"{order} in flight":
        gate = scripted.hold(order)
    worker.submit(Order(order_id, ORDERS[order], (OrderPart(0, (0,)),)), {0: np.array([[device_block]])})
    if gate is not None:
        assert gate.wait_reached(WAIT_S)
        marks.reach(f"{order} in flight")
        gate.release()
    worker.wait([order_id], WAIT_S)
    assert [Outcome.DONE] == [report.outcome for report in worker.poll_reports()]


def coordinate(ranks: list[Connection], marks: Marks) -> None:
    """Open, store, load and close together with the ranks; when one is lost, tell the others to close."""
    phases = {
        "": ("before open", "after reserve", "while mapping", "first slot published"),
        "store": ("store in flight",),
        "load": ("load in flight",),
        "close": ("closing", "after close"),
    }
    try:
        for order, points in phases.items():
            if order:
                for rank in ranks:
                    rank.send(order)
            for point in points:
                marks.reach(point)
            for rank in ranks:
                assert rank.poll(WAIT_S)
                rank.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        for rank in ranks:
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.send("close")


def start_anew() -> None:
    """Open an offloader as the next start of the engine would, use it and close it."""
    blocks = DeviceBlocks()
    blocks.fill(0, 7)
    with Offloader(blocks.layout(), host_memory=HOST_NBYTES, device=CpuDevice(), mapping="eager") as offloader:
        offloader.wait([offloader.submit_store(content_keys(7), [0]).job_id], WAIT_S)
        offloader.wait([offloader.submit_load(offloader.match(content_keys(7)), [1])], WAIT_S)
    assert (blocks.content(1) == blocks.pattern(7)).all()
    assert offloader.close().worker.graceful


def fork(work: Callable[[], None], keep: tuple[Connection, ...] = (), inherited: tuple[Connection, ...] = ()) -> int:
    """Run `work` in a child that has only the connections in `keep`; return its process id."""
    assert 1 == len(list(Path("/proc/self/task").iterdir())), "only a process without threads is forked here"
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for connection in inherited:
            if connection not in keep:
                connection.close()
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_ended(pid: int) -> int | str:
    """Return the exit code of a child, minus the signal that killed it, or that it hung and had to be killed."""
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], WAIT_S)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung"
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(descriptor)


def run_group(run: str, point: str, victims: list[int]) -> dict[str, Any]:
    """Start a group, kill the victims at the point, let the others end, and start anew."""
    to_members, at_members = zip(*(Pipe() for _ in range(NUM_RANKS + 1)), strict=True)
    to_ranks, at_ranks = zip(*(Pipe() for _ in range(NUM_RANKS)), strict=True)
    inherited = (*to_members, *at_members, *to_ranks, *at_ranks)
    marks = [Marks(point, connection) for connection in at_members]
    pids = [fork(lambda: coordinate(list(to_ranks), marks[0]), (at_members[0], *to_ranks), inherited)]
    for rank in range(NUM_RANKS):
        keep = (at_members[rank + 1], at_ranks[rank])
        pids.append(fork(lambda rank=rank: be_rank(run, rank, at_ranks[rank], marks[rank + 1]), keep, inherited))
    for connection in (*at_members, *to_ranks, *at_ranks):
        connection.close()
    lost = [number for number, member in enumerate(to_members) if not member.poll(WAIT_S) or not _received(member)]
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    codes = {victim: wait_ended(pids[victim]) for victim in victims}
    for member in to_members:
        with suppress(BrokenPipeError, ConnectionResetError):
            member.send("go on")
    for number, pid in enumerate(pids):
        if number not in codes:
            codes[number] = wait_ended(pid)
    for member in to_members:
        member.close()
    fresh_start = wait_ended(fork(start_anew))
    return {
        "pids": pids,
        "lost": lost,
        "codes": [codes[number] for number in sorted(codes)],
        "fresh_start": fresh_start,
    }


def _received(member: Connection) -> bool:
    try:
        member.recv()
    except EOFError:
        return False
    return True


def main() -> None:
    """Answer one request after the other until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(run_group(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
