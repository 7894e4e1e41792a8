"""Page-locking of an arena that another process owns: slab after slab, as the owner publishes them.

    published by the owner?  ->  register, for reading only  ->  copies go directly
            |                            `- refused -> copies from it are staged
            `-- looked at again, until all are published or the owner has gone

Nothing waits for this: a slab that is not registered, or not yet, is read by way of a ring.
"""

import logging
import threading
import time
from collections import deque
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import KvmoorError
from kvmoor.host_memory.arena_plan import SlabPlan
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.pacing import StepPacer
from kvmoor.host_memory.slab_registration import RegistrationMode, SlabRegistration
from kvmoor.observation import Observer
from kvmoor.process_end import register
from kvmoor.registration import Registrar

_log = logging.getLogger("kvmoor")

LOOK_AGAIN_S: Final = 0.05
"""How often the owner's words are looked at for new slabs: nothing can announce them across processes. The owner needs
about as long for a slab of 64 MiB. Guessed."""
_LONGEST_WAIT_S: Final = 60.0
"""The thread looks again after this, though whatever it waits for is announced."""


class AttachedRegistration:
    """Register the slabs of an attached arena for reading, on a thread of its own, and unregister them.

    Without a `registrar` the device reaches all slots itself; with `pin` "off" nothing is registered. Any thread may
    call any method. `attached` is borrowed: it has to stay open until `close` has returned True.
    """

    def __init__(
        self,
        attached: AttachedArena,
        registrar: Registrar | None,
        *,
        pin: Literal["background", "off"],
        pacer: StepPacer,
        observer: Observer,
        name: str,
    ) -> None:
        self._attached = attached
        self._plan = attached.plan
        self._pacer = pacer
        # Guards all fields below but `_direct`. Notified when a slab was tried, when what may be called changes, and at
        # the end.
        self._changed = threading.Condition()
        # Whether copies may go directly to each slab of a group. Elements only go from False to True, so readers need
        # no lock.
        self._direct = [np.zeros(group.num_slabs, dtype=np.bool_) for group in self._plan.groups]
        self._untried = deque(self._plan.slabs)
        self._registered_nbytes = 0
        self._num_published_seen = -1  # slots, when none of the untried slabs was found to be published
        self._stopping = self._over = False
        self._registration = SlabRegistration(
            registrar,
            self._plan,
            attached.base,
            pin=pin,
            pacer=pacer,
            changed=self._changed,
            observer=observer,
            name=name,
            read_only=True,
        )
        self._thread: threading.Thread | None = None
        register(self, forked=self._forked)
        if self.mode != "registered":
            self._over = True
            return
        thread = threading.Thread(target=self._run, name=f"kvmoor-reader-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("no thread to page-lock with could start, so what is read is staged: %s", error)
            self._registration.cancel()
            self._over = True
        else:
            self._thread = thread

    @property
    def mode(self) -> RegistrationMode:
        """Return how the device gets at slabs that are tried from now on."""
        return self._registration.mode

    @property
    def reason(self) -> str:
        """Return why slabs are staged; empty if none is for good."""
        return self._registration.reason

    @property
    def num_failures(self) -> int:
        """Return how many slabs the registrar refused."""
        return self._registration.num_failures

    @property
    def registered_nbytes(self) -> int:
        """Return how much is page-locked."""
        with self._changed:
            return self._registered_nbytes

    def are_registered(self, group: int, slots: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return for each slot whether copies may go there directly, bool in the shape of `slots`.

        True stays true until `close`. Those of a group without tensors, and all without a registrar, can.
        """
        plan = self._plan.groups[group]
        if self.mode == "direct" or not plan.slot_nbytes:
            return np.ones(slots.shape, np.bool_)
        return plan.look_up(self._direct[group], slots)

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until copies may go directly to every slab of the arena.

        False at the deadline, and at once where that cannot come true: a slab was refused, nothing is registered any
        more, or the owner has gone before it published all.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._some_are_refused(), max(0.0, timeout_s))
            return self.mode == "direct" or all(bool(direct.all()) for direct in self._direct)

    def pause(self, timeout_s: float) -> bool:
        """Let no call of the registrar begin before `resume`; return whether none is running at the deadline."""
        return self._registration.pause(timeout_s)

    def resume(self) -> None:
        """End one pause; harmless without one."""
        self._registration.resume()

    def close(self, timeout_s: float) -> str:
        """Stop and undo every registration; return why that is not proven at the deadline, or nothing.

        Caller: no copy reads the memory any more, and the registrar still works. Blocks behind a call that hangs, until
        the deadline. May be called again.
        """
        deadline = time.monotonic() + timeout_s
        self.stop()
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
            if self._thread.is_alive():
                return f"{self._registration.current_call or 'the thread that page-locks'} did not end in time"
        if reason := self._registration.unregister_all(max(0.0, deadline - time.monotonic())):
            return reason
        with self._changed:
            self._registered_nbytes = 0
        return ""

    def stop(self) -> None:
        """Begin no registration any more. Never blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _forked(self) -> None:
        """Begin nothing in a forked child, where the thread does not exist; what is registered is the parent's."""
        self._changed = threading.Condition()
        self._registration.forked(self._changed)
        self._thread = None
        self._stopping = self._over = True
        self._registered_nbytes = 0

    def _some_are_refused(self) -> bool:
        return self._registration.num_failures > 0 or self.mode == "staging"

    # From here on: what the thread does.

    def _run(self) -> None:
        try:
            while (slab := self._wait_for_turn()) is not None:
                registered = self._registration.register(slab)
                with self._changed:
                    if registered:
                        self._direct[slab.group][slab.first_slot // self._plan.groups[slab.group].slots_per_slab] = True
                        self._registered_nbytes += slab.nbytes
                    self._changed.notify_all()
        except KvmoorError as error:  # the words of the owner cannot be read, or not any more
            _log.warning("what is not page-locked by now is staged: %s", error)
        except Exception:  # a bug, but loads go on by way of the ring
            _log.exception("page-locking the memory of another process ended early; the rest is staged")
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _wait_for_turn(self) -> SlabPlan | None:
        """Wait for a slab that is published and whose turn has come, and claim it; None if there is nothing left."""
        slab = None
        while self._untried or slab is not None:
            # Asked first: an owner that has gone publishes no more.
            owner_has_gone = not self._attached.owner_alive() or self._attached.status.is_closed_by_owner()
            slab = slab or self._take_published()
            if slab is None and owner_has_gone:
                return None
            with self._changed:
                if self._stopping or self.mode != "registered":
                    return None
                delay_s = LOOK_AGAIN_S if slab is None else self._registration.delay_s()
                if slab is not None and delay_s <= 0:
                    return slab if self._registration.claim_turn(slab) else None
                # While paused the turn never comes by itself, and the end of a pause is announced.
                self._changed.wait(min(delay_s, _LONGEST_WAIT_S))
        return None

    def _take_published(self) -> SlabPlan | None:
        """Return a slab that its owner has published and that was not tried yet, or None."""
        status = self._attached.status
        num_published = sum(status.num_published(group.group) for group in self._plan.groups)
        if num_published == self._num_published_seen:
            return None
        for slab in self._untried:  # owners publish about in this order, so the first is the one, as a rule
            if status.are_published(slab.group, slab.first_slot + np.arange(slab.num_slots)).all():
                self._untried.remove(slab)
                return slab
        self._num_published_seen = num_published
        return None
