"""Page-locking memory for a device: what the arena asks of whoever can do it.

A *registrar* registers whole ranges (one slab a call) so that the device can reach them at the speed of the link. It
belongs to a device; a device that reaches plain memory just as well has none.
"""

from typing import Protocol

from kvmoor.errors import BrokenError


class RegistrationError(BrokenError):
    """Report that a range could not be registered; nothing is registered there.

    `code` is the driver's own (0: none), `remedy` what an operator can do, `permanent` whether trying other ranges is
    of no use (the platform does not support it).
    """

    def __init__(self, message: str, *, code: int = 0, remedy: str = "", permanent: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy
        self.permanent = permanent


class Registrar(Protocol):
    """Register ranges of mapped memory with a device.

    Caller: registers only what is mapped, cut so that no copy spans two ranges; unregisters each range exactly once,
    before it is unmapped, and only when no copy touches it; calls from one thread at a time. Implementer: takes no lock
    that the engine's launches need for longer than one call, and may block: the caller bounds how long it waits.
    """

    @property
    def name(self) -> str:
        """Return what registers, for people: ``"CUDA driver"``."""

    def prepare_thread(self) -> None:
        """Make the calling thread harmless to whoever captures a graph. Called once a thread, before all else."""

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Register one range. Raises `RegistrationError`, with nothing registered and no error left pending."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`. Raises `RegistrationError` if the range may still be registered."""
