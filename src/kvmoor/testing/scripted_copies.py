"""Faults on demand: delays, errors and endless copies of a `CpuDevice`, at exactly the copy a test wants.

    scripted = ScriptedCopies()
    with CpuDevice(copy_hook=scripted) as device, scripted:
        scripted.fail_at(2)                  # the third copy of all
        scripted.fail_at(0, queue="load")    # the first one of the queue "load"
        endless = scripted.hang_at(5)        # the sixth does not end before endless.release()
        held = scripted.hold("store")        # every copy of the queue "store" waits, so that "load" overtakes it
        ...
        held.release()

With a hook every block is a copy of its own (see `CopyHook`), so copy k is block k, counted from 0 over all jobs.
Leaving the ``with`` block of the script lets go of all that still waits, so that the device, closed next, can end its
threads.
"""

import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvmoor.devices.cpu import HostCopy
from kvmoor.errors import DeviceError


class ScriptedCopies:
    """Decide what happens to the copies of a `CpuDevice`; pass it as its `copy_hook`. Any thread may call anything.

    Where several faults meet in one copy, it is delayed first, then waits at its gates, then fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the three below; nobody waits while holding it
        self._faults: list[_Fault] = []
        self._num_copies: Counter[str | None] = Counter()  # by queue; None: all together
        self._num_failed = 0
        self._released = threading.Event()

    def fail_at(self, index: int, *, queue: str | None = None, error: BaseException | None = None) -> None:
        """Let one copy raise `error`, by default a `DeviceError`, before a byte of it is moved."""
        self._add(_Fault(queue, index, error=error or DeviceError(f"scripted failure of copy {index}")))

    def delay(self, seconds: float, *, queue: str | None = None) -> None:
        """Let every copy begin that much later."""
        self._add(_Fault(queue, None, delay_s=seconds))

    def hang_at(self, index: int, *, queue: str | None = None) -> "CopyGate":
        """Let one copy not end before the gate that is returned is released."""
        return self._add_gate(queue, index)

    def hold(self, queue: str) -> "CopyGate":
        """Let every copy of a queue wait for the gate that is returned, so that the other queues overtake it."""
        return self._add_gate(queue, None)

    def release_all(self) -> None:
        """Open all gates and end all delays, also those still to be asked for: for the end of a test."""
        self._released.set()
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate is not None]
        for gate in gates:
            gate.release()

    def num_copies(self, queue: str | None = None) -> int:
        """Return how many copies have begun, of one queue or of all."""
        with self._lock:
            return self._num_copies[queue]

    @property
    def num_failed(self) -> int:
        """Return how many copies were made to fail."""
        with self._lock:
            return self._num_failed

    def __call__(self, copy: HostCopy) -> None:
        """Let a copy suffer its faults: the `CopyHook`."""
        with self._lock:
            indices = {queue: self._num_copies[queue] for queue in (None, copy.queue)}
            self._num_copies.update(indices.keys())
            faults = [fault for fault in self._faults if fault.hits(indices)]
        for fault in faults:
            if fault.delay_s:
                self._released.wait(fault.delay_s)
        for fault in faults:
            if fault.gate is not None:
                fault.gate.pass_through()
        for fault in faults:
            if fault.error is not None:
                with self._lock:
                    self._num_failed += 1
                raise fault.error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release_all()

    def _add(self, fault: "_Fault") -> None:
        with self._lock:
            self._faults.append(fault)

    def _add_gate(self, queue: str | None, index: int | None) -> "CopyGate":
        gate = CopyGate()
        self._add(_Fault(queue, index, gate=gate))
        if self._released.is_set():
            gate.release()
        return gate


class CopyGate:
    """A place where copies wait until a test lets them go on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the two below and announces their changes
        self._num_arrived = 0
        self._released = False

    def wait_reached(self, timeout_s: float, *, num_copies: int = 1) -> bool:
        """Block until so many copies have come to the gate or the time has passed; say whether they have come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_arrived >= num_copies, timeout_s)

    def release(self) -> None:
        """Let all copies pass, now and later. May be called again."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def pass_through(self) -> None:
        """Wait for the release. Called for the copy, and without a deadline, because that is the fault."""
        with self._changed:
            self._num_arrived += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._released)


@dataclass(frozen=True, slots=True)
class _Fault:
    """What happens to copy `index` (None: every one) of `queue` (None: of all together)."""

    queue: str | None
    index: int | None
    delay_s: float = 0.0
    gate: CopyGate | None = None
    error: BaseException | None = None

    def hits(self, indices: dict[str | None, int]) -> bool:
        """Say whether a copy with these indices, by queue, is meant."""
        return self.queue in indices and self.index in (None, indices[self.queue])
