"""A registrar without a device: it takes notes, fails on demand, and checks what it was asked.

    registrar = ScriptedRegistrar()
    registrar.fail_at(2)                      # the third registration of all
    registrar.refuse_above(2**20)             # ranges of more than 1 MiB
    gate = registrar.hold_at(5)               # the sixth does not end before gate.release()
    with registrar, Arena(plan, registrar=registrar) as arena:
        with registrar.capture_window():      # a call from a thread that was not prepared is a violation
            ...
    registrar.check()                         # nothing overlapped, and each range was unregistered exactly once

Leaving the ``with`` block of the script lets go of all that still waits. Close the arena inside of it, as above, unless
the test is about what an arena does while a call never ends.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self
from weakref import WeakSet

from kvmoor.registration import RegistrationError
from kvmoor.testing.scripted_copies import CopyGate

Operation = Literal["prepare_thread", "register", "unregister"]

OUT_OF_MEMORY: Final = 2
"""What the CUDA driver answers where a limit of its own is reached."""


@dataclass(frozen=True, slots=True)
class RegistrarCall:
    """One call, noted when it begins; in a capture window or not."""

    operation: Operation
    thread: str
    address: int = 0
    nbytes: int = 0
    read_only: bool = False
    in_capture: bool = False


class RegistrationBudget:
    """A limit on all bytes registered at one time by the registrars that share it."""

    def __init__(self, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._left_nbytes = nbytes

    @property
    def left_nbytes(self) -> int:
        """Return how many bytes can still be registered."""
        with self._lock:
            return self._left_nbytes

    def take(self, nbytes: int) -> bool:
        """Take bytes from the budget; False if it does not hold so many, and then none are taken."""
        with self._lock:
            if nbytes > self._left_nbytes:
                return False
            self._left_nbytes -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes that are not registered any more."""
        with self._lock:
            self._left_nbytes += nbytes


class ScriptedRegistrar:
    """Stand in for a driver as `Registrar`. Any thread may call anything.

    A call is noted, checked, then sleeps, waits at its gates, and fails, in this order. What an arena must not do is a
    *violation*: it is noted and the call refused, so that `violations` and `check` tell the test.
    """

    def __init__(self, *, name: str = "scripted registrar", budget: RegistrationBudget | None = None) -> None:
        self._name = name
        self._budget = budget
        self._lock = threading.Lock()  # guards all below; nobody waits while holding it
        self._calls: list[RegistrarCall] = []
        self._violations: list[str] = []
        self._prepared: WeakSet[threading.Thread] = WeakSet()  # not their idents: those are used again
        self._running: threading.Thread | None = None  # the one that registers or unregisters just now
        self._registered: dict[int, int] = {}  # address -> bytes
        self._registrations: list[tuple[int, int]] = []  # all that succeeded, in order
        self._faults: list[_Fault] = []
        self._num_begun: dict[Operation, int] = {"prepare_thread": 0, "register": 0, "unregister": 0}
        self._seconds_per_mb = 0.0
        self._largest_nbytes: int | None = None
        self._num_captures = 0
        self._released = threading.Event()

    @property
    def name(self) -> str:
        """Return what it is called in messages."""
        return self._name

    def fail_at(self, index: int, error: Exception | None = None, *, operation: Operation = "register") -> None:
        """Let one call raise `error`, by default a `RegistrationError`; nothing is registered or undone then."""
        self._add(_Fault(operation, index, error=error or self._refusal(f"scripted failure of {operation} {index}")))

    def fail_from(self, index: int, error: Exception | None = None, *, operation: Operation = "register") -> None:
        """Let one call and all after it raise `error`."""
        error = error or self._refusal(f"scripted failure of every {operation} from {index}")
        self._add(_Fault(operation, index, and_later=True, error=error))

    def fail_permanently(self, code: int, message: str = "operation not supported", *, remedy: str = "") -> None:
        """Let every registration fail as on a platform that has none: 801 is what CUDA answers then."""
        self.fail_from(0, RegistrationError(message, code=code, remedy=remedy, permanent=True))

    def refuse_above(self, nbytes: int) -> None:
        """Refuse single ranges of more bytes."""
        with self._lock:
            self._largest_nbytes = nbytes

    def sleep_per_mb(self, seconds: float) -> None:
        """Let every registration take so long for each 10**6 bytes."""
        with self._lock:
            self._seconds_per_mb = seconds

    def hold_at(self, index: int, *, operation: Operation = "register") -> CopyGate:
        """Let one call wait for the gate that is returned."""
        gate = CopyGate()
        self._add(_Fault(operation, index, gate=gate))
        if self._released.is_set():
            gate.release()
        return gate

    def release_all(self) -> None:
        """Open all gates and end all sleeps, also those still to come: for the end of a test."""
        self._released.set()
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate is not None]
        for gate in gates:
            gate.release()

    @contextmanager
    def capture_window(self) -> Iterator[None]:
        """Pretend that somebody captures a graph: a call from a thread that was not prepared breaks it."""
        with self._lock:
            self._num_captures += 1
            if self._running is not None and self._running not in self._prepared:
                self._violations.append(f"a call of thread {self._running.name}, not prepared, ran into a capture")
        try:
            yield
        finally:
            with self._lock:
                self._num_captures -= 1

    @property
    def calls(self) -> tuple[RegistrarCall, ...]:
        """Return every call so far, in the order in which they began."""
        with self._lock:
            return tuple(self._calls)

    def num_calls(self, operation: Operation | None = None) -> int:
        """Return how many calls have begun, of one operation or of all."""
        with self._lock:
            return sum(self._num_begun.values()) if operation is None else self._num_begun[operation]

    @property
    def violations(self) -> tuple[str, ...]:
        """Return what should not have been asked."""
        with self._lock:
            return tuple(self._violations)

    @property
    def registered(self) -> dict[int, int]:
        """Return what is registered now: bytes by address."""
        with self._lock:
            return dict(self._registered)

    def check(self, *, allow_registered: bool = False) -> None:
        """Raise `AssertionError` for a violation, or for a range that is still registered unless that is allowed.

        With both checked, each range that was registered was unregistered exactly once.
        """
        with self._lock:
            violations = list(self._violations)
            if self._registered and not allow_registered:
                violations.append(f"still registered: {_describe(sorted(self._registered.items()))}")
        if violations:
            raise AssertionError("; ".join(violations))

    def prepare_thread(self) -> None:
        """Take note that the calling thread is harmless from now on."""
        with self._call("prepare_thread", 0, 0, read_only=False), self._lock:
            self._prepared.add(threading.current_thread())

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Register a range, unless the script or the range is against it."""
        with self._call("register", address, nbytes, read_only=read_only), self._lock:
            overlapping = [
                (other, length)
                for other, length in self._registered.items()
                if other < address + nbytes and address < other + length
            ]
            if overlapping or nbytes <= 0:
                self._violations.append(f"{_describe([(address, nbytes)])} overlaps {_describe(overlapping)}")
                raise self._refusal("already registered")
            if self._largest_nbytes is not None and nbytes > self._largest_nbytes:
                raise self._refusal(f"{nbytes} bytes are more than {self._largest_nbytes} in one range")
            if self._budget is not None and not self._budget.take(nbytes):
                raise self._refusal(f"{nbytes} bytes are more than the budget leaves")
            self._registered[address] = nbytes
            self._registrations.append((address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo a registration of exactly this range."""
        with self._call("unregister", address, nbytes, read_only=False), self._lock:
            if self._registered.get(address) != nbytes:
                before = " any more" if (address, nbytes) in self._registrations else ""
                self._violations.append(f"{_describe([(address, nbytes)])} is not registered{before}")
                raise self._refusal("not registered")
            del self._registered[address]
            if self._budget is not None:
                self._budget.give_back(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release_all()

    def _add(self, fault: "_Fault") -> None:
        with self._lock:
            self._faults.append(fault)

    @contextmanager
    def _call(self, operation: Operation, address: int, nbytes: int, *, read_only: bool) -> Iterator[None]:
        """Note a call, let it suffer its faults, then let it do its work."""
        thread = threading.current_thread()
        with self._lock:
            self._calls.append(
                RegistrarCall(operation, thread.name, address, nbytes, read_only, in_capture=self._num_captures > 0)
            )
            index = self._num_begun[operation]
            self._num_begun[operation] += 1
            if operation != "prepare_thread" and thread not in self._prepared:
                where = " during a capture" if self._num_captures else ""
                self._violations.append(f"{operation} {index} came from thread {thread.name}, not prepared{where}")
            if self._running is not None:
                self._violations.append(f"{operation} {index} began while another call was running")
            self._running = thread if operation != "prepare_thread" else None
            faults = [fault for fault in self._faults if fault.hits(operation, index)]
            sleep_s = self._seconds_per_mb * nbytes / 1e6 if operation == "register" else 0.0
        try:
            if sleep_s:
                self._released.wait(sleep_s)
            for fault in faults:
                if fault.gate is not None:
                    fault.gate.pass_through()
            for fault in faults:
                if fault.error is not None:
                    raise fault.error
            yield
        finally:
            with self._lock:
                self._running = None

    def _refusal(self, message: str) -> RegistrationError:
        return RegistrationError(message, code=OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class _Fault:
    """What happens to call `index` of an operation, or to all from there on."""

    operation: Operation
    index: int
    and_later: bool = False
    gate: CopyGate | None = None
    error: Exception | None = None

    def hits(self, operation: Operation, index: int) -> bool:
        """Say whether a call with this index is meant."""
        return operation == self.operation and (index == self.index or (self.and_later and index > self.index))


def _describe(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{nbytes} bytes at {address:#x}" for address, nbytes in ranges)
