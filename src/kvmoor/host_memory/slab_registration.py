"""Page-locking of an arena's slabs: when it may happen, what a refusal means, and how it is undone.

    "registered"  every mapped slab is registered before it is published; one that is refused is published as it is
    "staging"     the registrar is not called any more, or never was: what is not registered is copied through a ring
    "direct"      there is no registrar: the device reaches plain memory

A range whose registration failed is not registered, so it is never unregistered; each of the others is, exactly once,
before its memory is unmapped. Where that cannot be proven the arena has to be quarantined: a device that still maps
pages which are gone reads wrong bytes and says nothing.
"""

import logging
import math
import resource
import threading
from typing import Final, Literal

from kvmoor.byte_sizes import format_nbytes
from kvmoor.host_memory.arena_plan import ArenaPlan, SlabPlan
from kvmoor.host_memory.pacing import StepPacer
from kvmoor.observation import Observer, RegistrationDegraded, notify
from kvmoor.registration import Registrar, RegistrationError

_log = logging.getLogger("kvmoor")

Pin = Literal["background", "eager", "off"]
RegistrationMode = Literal["direct", "registered", "staging"]

MAX_FAILURES_IN_A_ROW: Final = 3
"""After so many refused slabs no more are tried. One may be an accident of the moment, three are a limit. Guessed."""
NOT_SUPPORTED: Final = 801
"""What the CUDA driver answers where host memory cannot be registered at all, as under confidential computing."""
_NUM_REASONS_SHOWN: Final = 3
_PAGE_NBYTES: Final = 4096


class SlabRegistration:
    """Register the slabs of one arena and unregister them.

    Any thread may call any method, except that only one registers: the mapping thread, or for an arena of another
    process the thread that follows its owner. `changed` is theirs: it guards all fields and is notified when a call of
    the registrar ends and when what may be called changes.
    """

    def __init__(
        self,
        registrar: Registrar | None,
        plan: ArenaPlan,
        base: int,
        *,
        pin: Pin,
        pacer: StepPacer,
        changed: threading.Condition,
        observer: Observer,
        name: str,
        read_only: bool = False,
    ) -> None:
        _check_slabs(plan.slabs, base)
        self._read_only = read_only  # whether the pages are mapped for reading only
        self._registrar = registrar
        self._base = base
        self._pacer = pacer
        self._changed = changed
        self._observer = observer
        self._name = name
        self._active = registrar is not None and pin != "off"
        self._reason = "page-locking is switched off" if pin == "off" and registrar is not None else ""
        self._thread_is_prepared = False  # of the one thread that registers
        self._call = ""  # what the registrar is doing for the mapping thread just now, for messages
        self._num_pauses = 0
        self._num_failures = self._num_failures_in_a_row = 0
        self._registered: dict[int, SlabPlan] = {}  # by the number of the slab; what is to be unregistered
        self._unproven: list[str] = []  # what may be registered although no range of it is in the dictionary
        self._unregistering: threading.Thread | None = None
        self._given_up = False

    @property
    def mode(self) -> RegistrationMode:
        """Return how the device gets at slabs that are published from now on."""
        if self._registrar is None:
            return "direct"
        return "registered" if self._active else "staging"

    @property
    def reason(self) -> str:
        """Return why slabs are staged: the last refusal, or what the user wanted; empty if none is."""
        return self._reason

    @property
    def num_failures(self) -> int:
        """Return how many slabs were refused."""
        return self._num_failures

    @property
    def current_call(self) -> str:
        """Return what the registrar was asked by the mapping thread and has not answered; empty if nothing."""
        with self._changed:
            return self._call

    def delay_s(self) -> float:
        """Return how long a mapped slab has to wait for its turn, infinite while paused. Called under the lock."""
        if not self._active:
            return 0.0
        return math.inf if self._num_pauses else self._pacer.delay_s()

    def claim_turn(self, slab: SlabPlan) -> bool:
        """Begin a turn without delay; return whether `register` has to follow. Called under the lock."""
        if self._active:
            self._call = f"registering {_describe_slab(slab)}"
        return self._active

    def register(self, slab: SlabPlan) -> bool:
        """Register a mapped slab in the turn that was claimed; return whether it is registered. May block."""
        assert self._registrar is not None
        assert slab.number not in self._registered, "a slab is registered once"
        error: Exception | None = None
        is_clean = True
        try:
            if not self._thread_is_prepared:
                self._registrar.prepare_thread()
                self._thread_is_prepared = True
            is_clean = False
            self._registrar.register(self._base + slab.offset, slab.nbytes, read_only=self._read_only)
        except RegistrationError as refusal:  # nothing is registered: that is its promise
            error, is_clean = refusal, True
        except Exception as surprise:  # a thread that cannot be prepared must not register, and a bug proves nothing
            error = surprise
        self._pacer.note_registration()
        with self._changed:
            self._call = ""
            if error is None:
                self._registered[slab.number] = slab
                self._num_failures_in_a_row = 0
            elif not is_clean:
                self._unproven.append(f"{_describe_slab(slab)} may be registered ({_describe_error(error)})")
            degraded = self._count_failure(error) if error is not None else None
            self._changed.notify_all()
        if degraded is not None:
            _log.warning("%s; %s. What is not page-locked by now is staged", degraded.reason, degraded.remedy)
            notify(self._observer, degraded)
        return error is None

    def pause(self, timeout_s: float) -> bool:
        """Let no call begin before `resume`; return whether none is running, waiting for one until the deadline."""
        with self._changed:
            self._num_pauses += 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._call, max(0.0, timeout_s))

    def resume(self) -> None:
        """End one pause; without one, do nothing."""
        with self._changed:
            self._num_pauses = max(0, self._num_pauses - 1)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Register nothing any more, except for the slab whose turn it is; what is registered stays so."""
        with self._changed:
            if self._active:
                self._active = False
                self._reason = "page-locking was cancelled"
                self._changed.notify_all()

    def unregister_all(self, timeout_s: float) -> str:
        """Undo every registration; return why that is not proven at the deadline, or nothing.

        Caller: the mapping thread has ended and no copy touches the memory. A pause does not delay it. It runs on a
        thread of its own, because it blocks behind a hung stream; after the deadline that thread begins no other call.
        """
        with self._changed:
            if self._registered and self._unregistering is None:
                self._unregistering = threading.Thread(
                    target=self._unregister, name=f"kvmoor-unregister-{self._name}", daemon=True
                )
                try:
                    self._unregistering.start()
                except RuntimeError as error:
                    self._unregistering = None
                    self._unproven.append(f"no thread to unregister with could start ({error})")
            thread = self._unregistering
        if thread is not None:
            thread.join(max(0.0, timeout_s))
        with self._changed:
            if thread is not None and thread.is_alive():
                self._given_up = True
                return f"{self._call or 'unregistering host memory'} did not end in time"
            return _describe_unproven(self._unproven)

    def forked(self, changed: threading.Condition) -> None:
        """Begin no call in a forked child: what is registered is the parent's. `changed` takes the old one's place."""
        self._changed = changed
        self._active = False
        self._given_up = True
        self._call = ""
        self._registered = {}
        self._unregistering = None

    def _count_failure(self, error: Exception) -> RegistrationDegraded | None:
        """Take note of a refusal; return what to report if it was one too many."""
        self._num_failures += 1
        self._num_failures_in_a_row += 1
        if not self._active:  # cancelled meanwhile: that is the reason why slabs are staged
            return None
        self._reason = _describe_error(error)
        permanent = not isinstance(error, RegistrationError) or error.permanent or error.code == NOT_SUPPORTED
        if not permanent and self._num_failures_in_a_row < MAX_FAILURES_IN_A_ROW:
            return None
        self._active = False
        assert self._registrar is not None
        count = "" if permanent else f"{self._num_failures_in_a_row} times in a row, last "
        self._reason = (
            f"{self._registrar.name} refused to page-lock host memory: {count}{self._reason} "
            f"(for information: {_describe_memlock_limit()})"
        )
        return RegistrationDegraded(self._reason, _find_remedy(error))

    def _unregister(self) -> None:
        assert self._registrar is not None
        with self._changed:
            self._call = "preparing the thread that unregisters"
        try:
            self._registrar.prepare_thread()
        except Exception as error:
            with self._changed:
                self._call = ""
                self._unproven.append(f"the thread that unregisters could not be prepared ({_describe_error(error)})")
                self._changed.notify_all()
            return
        while True:
            with self._changed:
                if self._given_up or not self._registered:
                    return
                _, slab = self._registered.popitem()
                self._call = f"unregistering {_describe_slab(slab)}"
            failure = ""
            try:
                self._registrar.unregister(self._base + slab.offset, slab.nbytes)
            except Exception as error:  # the others are undone all the same
                failure = f"{_describe_slab(slab)} could not be unregistered ({_describe_error(error)})"
            with self._changed:
                self._call = ""
                if failure:
                    self._unproven.append(failure)


def _check_slabs(slabs: tuple[SlabPlan, ...], base: int) -> None:
    """Assert that slabs are whole pages and disjoint: overlapping registrations would be refused or undone twice."""
    end = 0
    for slab in sorted(slabs, key=lambda slab: slab.offset):
        assert slab.offset >= end, f"slab {slab.number} begins inside another one"
        assert not (base + slab.offset) % _PAGE_NBYTES, f"slab {slab.number} begins inside a page"
        assert slab.nbytes > 0, f"slab {slab.number} is empty"
        assert not slab.nbytes % _PAGE_NBYTES, f"slab {slab.number} ends inside a page"
        end = slab.offset + slab.nbytes


def _describe_unproven(reasons: list[str]) -> str:
    """Return a few of many reasons: after a fault of the device each slab has the same one, at length."""
    shown = "; ".join(reasons[:_NUM_REASONS_SHOWN])
    return shown + (f"; and {len(reasons) - _NUM_REASONS_SHOWN} more" if len(reasons) > _NUM_REASONS_SHOWN else "")


def _describe_slab(slab: SlabPlan) -> str:
    return f"slab {slab.number} ({format_nbytes(slab.nbytes)})"


def _describe_error(error: Exception) -> str:
    if not isinstance(error, RegistrationError):
        return f"{type(error).__name__}: {error}"
    if error.code == NOT_SUPPORTED:
        return f"{error} (driver code {error.code}: not supported on this platform, as under confidential computing)"
    return f"{error} (driver code {error.code})" if error.code else str(error)


def _find_remedy(error: Exception) -> str:
    if isinstance(error, RegistrationError) and error.remedy:
        return error.remedy
    if isinstance(error, RegistrationError) and error.code == NOT_SUPPORTED:
        return "run without confidential computing if copies are too slow: nothing else makes host memory page-lockable"
    return 'lower host_memory if it is more than the platform can page-lock, or pass pin="off" to stage from the start'


def _describe_memlock_limit() -> str:
    """Return the limit of locked memory, which people suspect first. Drivers do not look at it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_nbytes(soft)
    return f"the limit of locked memory, ulimit -l, is {limit}, and page-locking for a device does not depend on it"
