"""The memory behind an arena's slabs: a range of addresses that is filled slab by slab."""

from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum

from kvmoor.host_memory.arena_plan import SLAB_ALIGNMENT, ArenaPlan, SlabPlan
from kvmoor.host_memory.memfd import MemfdSegments
from kvmoor.host_memory.page_mapping import PageMapping, Residency, SystemCalls, read_residency


class Backing(Enum):
    """Say what an arena is made of."""

    ANONYMOUS = "anonymous"
    """Private memory, with huge pages where the kernel has them: no name, no descriptor, gone with the process."""
    MEMFD = "memfd"
    """Shared memory without a name in any file system, for an arena that other processes read."""


class SlabMemory:
    """Own the address range of one arena and what is mapped in it. No finaliser unmaps: only `close` does."""

    def __init__(self, plan: ArenaPlan, backing: Backing, name: str, calls: SystemCalls) -> None:
        self._pages = PageMapping(calls)
        self._address_nbytes = plan.address_nbytes
        self._segments: MemfdSegments | None = None
        with ExitStack() as opened:
            reservation = self._pages.reserve(plan.address_nbytes, SLAB_ALIGNMENT)
            opened.callback(self._pages.unmap, reservation)
            self._base = reservation.base
            if backing is Backing.MEMFD:
                self._segments = MemfdSegments(name, plan.slabs, calls)
                opened.callback(self._segments.close)
            else:
                self._map_groups(plan)
            self._closing = opened.pop_all()

    def _map_groups(self, plan: ArenaPlan) -> None:
        # One mapping a group, which ends with its last slot: the gap behind it is not writable, so the kernel cannot
        # make a whole huge page of a last slab that is smaller, and small arenas take exactly what was planned.
        for group in plan.groups:
            if group.nbytes:
                address = self._base + group.offset
                self._pages.map_anonymous(address, group.nbytes)
                self._pages.advise_huge_pages(address, group.nbytes)
                self._pages.advise_no_dump(address, group.nbytes)

    @property
    def base(self) -> int:
        """Return the address of the first byte."""
        return self._base

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the segments; none for anonymous memory."""
        return self._segments.descriptors if self._segments else ()

    def map_slab(self, slab: SlabPlan, should_stop: Callable[[], bool]) -> bool:
        """Put memory at the addresses of a slab, ready to be touched; return False if `should_stop` ended it early."""
        if self._segments is None:
            return True
        if not self._segments.allocate(slab, should_stop):
            return False
        address = self._base + slab.offset
        try:
            self._pages.map_file(address, slab.nbytes, *self._segments.location(slab))
            self._pages.advise_huge_pages(address, slab.nbytes)
            self._pages.advise_no_dump(address, slab.nbytes)
        except Exception:
            self._segments.deallocate(slab)
            raise
        return True

    def touch(self, offset: int, nbytes: int, should_stop: Callable[[], bool]) -> bool:
        """Make a mapped range resident; return False if `should_stop` ended it early."""
        return self._pages.touch(self._base + offset, nbytes, should_stop)

    def read_residency(self) -> Residency | None:
        """Return what the kernel says is in memory; None if it does not tell."""
        return read_residency(self._base, self._address_nbytes)

    def close(self) -> None:
        """Unmap everything and close the descriptors. Closes twice without harm.

        Caller: nothing reads or writes the memory any more.
        """
        self._closing.close()
