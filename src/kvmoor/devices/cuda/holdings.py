"""What a device has opened in the driver, all of it given back at the end or none of it.

Nothing is given back earlier, for to free memory blocks behind whatever runs on the device. So what fails half-way
needs no undoing: what it had opened is among the holdings, and goes with the others. Small pieces of memory come from a
reserve that is taken at the beginning, so that nothing has to be allocated while the engine is at work.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from kvmoor.byte_sizes import round_up
from kvmoor.devices.cuda.context import CudaContext
from kvmoor.devices.cuda.freeing import FreeingThread
from kvmoor.errors import DeviceError
from kvmoor.process_end import register

_PAGE_NBYTES: Final = 4096
_DEVICE_ALIGNMENT: Final = 256
_DEVICE_RESERVE_NBYTES: Final = 2**20
_HOST_RESERVE_NBYTES: Final = 512 * 1024
"""Enough for the piece tables of a layout with blocks of 60 MiB and for dozens of queues, beside what a CUDA context
takes anyway (some 500 MiB of device memory)."""


class Holdings:
    """Open streams, memory and code in one context, and keep them. Any thread may call; none of it harms a capture.

    What opens raises `DeviceError` with nothing opened.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._driver = context.driver
        self._freeing = FreeingThread(context.prepare_thread)
        # Single steps of a list and a dictionary need no lock.
        self._held: list[_Held] = []
        self._lent: dict[int, _Held] = {}  # by address
        self._reserve_lock = threading.Lock()  # guards what is left of the two
        self._device_reserve = self._host_reserve = range(0)
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be free in a forked child, where it is of no use."""
        self._reserve_lock = threading.Lock()

    def take_reserve(self) -> None:
        """Allocate memory that small requests are met from."""
        device, host = self.device_memory(_DEVICE_RESERVE_NBYTES), self.host_memory(_HOST_RESERVE_NBYTES)
        with self._reserve_lock:
            self._device_reserve = range(device, device + _DEVICE_RESERVE_NBYTES)
            self._host_reserve = range(host, host + _HOST_RESERVE_NBYTES)

    # What is opened is held within the block: to leave the context may fail as well.

    def open_stream(self) -> int:
        """Return a new stream, which no default stream waits for."""
        with self._context.relaxed():
            stream = self._driver.stream_create()
            self._hold("a stream", self._driver.stream_destroy, stream)
        return stream

    def open_event(self) -> int:
        """Return a new event."""
        with self._context.relaxed():
            event = self._driver.event_create()
            self._hold("an event", self._driver.event_destroy, event)
        return event

    def load_module(self, cubin: bytes) -> int:
        """Return code that was loaded onto the device."""
        with self._context.relaxed():
            module = self._driver.module_load(cubin)
            self._hold("code", self._driver.module_unload, module)
        return module

    def device_memory(self, nbytes: int) -> int:
        """Return the address of new memory on the device; what is in it is not defined."""
        nbytes = round_up(nbytes, _DEVICE_ALIGNMENT)
        with self._reserve_lock:
            if nbytes <= len(self._device_reserve):
                address = self._device_reserve.start
                self._device_reserve = self._device_reserve[nbytes:]
                return address
        with self._context.relaxed():
            address = self._driver.memory_alloc(nbytes)
            self._hold(f"{nbytes} bytes of device memory", self._driver.memory_free, address)
        return address

    def host_memory(self, nbytes: int) -> int:
        """Return the address of new page-locked memory, all zero, which the device reaches at the same address."""
        nbytes = round_up(nbytes, _PAGE_NBYTES)
        with self._reserve_lock:
            if nbytes <= len(self._host_reserve):
                address = self._host_reserve.start
                self._host_reserve = self._host_reserve[nbytes:]
                return address
        return self._allocate_host_memory(nbytes)[0]

    def lend_host_memory(self, nbytes: int) -> int:
        """Return page-locked memory as `host_memory` does, which is not held: its owner has it freed."""
        address, held = self._allocate_host_memory(round_up(nbytes, _PAGE_NBYTES))
        self._lent[address] = held
        self._held.remove(held)
        return address

    def free_host_memory(self, address: int, timeout_s: float) -> bool:
        """Free memory of `lend_host_memory`; return whether that is done. It goes on after the deadline.

        Caller: nothing of kvmoor's runs on the device any more.
        """
        self._freeing.submit(*self._lent.pop(address))
        return self._freeing.wait_idle(timeout_s)

    def give_back(self, timeout_s: float, *, and_then: Callable[[], None] | None = None) -> bool:
        """Give everything back, the newest first; return whether that is done. Call again to learn of a late end.

        `and_then` is called afterwards, on the same thread. Caller: nothing of kvmoor's runs on the device any more,
        and no address of memory from here is used again.
        """
        while self._held:
            self._freeing.submit(*self._held.pop())
        if and_then is not None:
            self._freeing.submit("the context", and_then)
        return self._freeing.wait_idle(timeout_s)

    def _allocate_host_memory(self, nbytes: int) -> tuple[int, "_Held"]:
        with self._context.relaxed():
            # One page more than asked for: the driver cuts what is smaller than 2 MiB from larger pieces, on any line.
            start = self._driver.host_alloc(nbytes + _PAGE_NBYTES)
            held = self._hold(f"{nbytes} bytes of page-locked memory", self._driver.host_free, start)
            seen_at = self._driver.host_device_pointer(start)
        if seen_at != start:
            raise DeviceError(
                f"the driver gave page-locked memory at {start:#x}, which the GPU sees at {seen_at:#x}: copies need "
                "one address for both, so use a platform with unified addressing"
            )
        address = round_up(start, _PAGE_NBYTES)
        ctypes.memset(address, 0, nbytes)
        return address, held

    def _hold(self, what: str, free: Callable[[int], None], handle: int) -> "_Held":
        held = _Held(what, partial(free, handle))
        self._held.append(held)
        return held


class _Held(NamedTuple):
    """One thing that was opened, and the call that gives it back."""

    what: str
    free: Callable[[], None]
