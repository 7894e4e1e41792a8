"""The memory behind an arena's slabs: a range of addresses that is filled slab by slab."""

import contextlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum

from kvmoor.host_memory.arena_plan import SLAB_ALIGNMENT, ArenaPlan, SlabPlan, find_slab_shortage
from kvmoor.host_memory.huge_pages import describe_hugetlb_refusal, fill_hugetlb, open_hugetlb
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.memfd import SEALS, MemfdSegments
from kvmoor.host_memory.numa import MemoryNodes, NumaMode, read_memory_nodes
from kvmoor.host_memory.page_mapping import PageMapping, Residency, SystemCalls, read_residency
from kvmoor.process_end import close_in_forked_child

_log = logging.getLogger("kvmoor")


class Backing(Enum):
    """Say what an arena is made of."""

    ANONYMOUS = "anonymous"
    """Private memory, with huge pages where the kernel has them: no name, no descriptor, gone with the process."""
    MEMFD = "memfd"
    """Shared memory without a name in any file system, for an arena that other processes read."""


class SlabMemory:
    """Own the address range of one arena and what is mapped in it. No finaliser unmaps: only `close` does."""

    def __init__(self, plan: ArenaPlan, backing: Backing, name: str, calls: SystemCalls) -> None:
        self._calls = calls
        self._name = name
        self._pages = PageMapping(calls)
        self._plan = plan
        self._placement = plan.placement
        # What was refused, each once. Replaced by the one thread that maps, never changed, so any thread may read it.
        self._notes: tuple[str, ...] = ()
        self._may_use_hugetlb = True
        self._segments: MemfdSegments | None = None
        with ExitStack() as opened:
            reservation = self._pages.reserve(plan.address_nbytes, SLAB_ALIGNMENT)
            opened.callback(self._pages.unmap, reservation)
            self._pages.advise_no_fork(reservation.start, reservation.nbytes)
            self._base = reservation.base
            if backing is Backing.MEMFD:
                self._segments = MemfdSegments(
                    name, plan.slabs, calls, placement=plan.placement, place=self._place, note=self._note
                )
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
                self._advise_page_size(address, group.nbytes)
                self._keep_private(address, group.nbytes)
                self._place(address, group.nbytes)

    def _advise_page_size(self, address: int, nbytes: int) -> None:
        if self._placement.huge_pages.choice == "off":
            advice, refusal = "small pages", self._pages.refuse_huge_pages(address, nbytes)
        else:
            advice, refusal = "huge pages", self._pages.advise_huge_pages(address, nbytes)
        if refusal:
            self._note(f"the advice to use {advice} was refused ({refusal}): the kernel decides")

    def _keep_private(self, address: int, nbytes: int) -> None:
        self._pages.advise_no_dump(address, nbytes)
        self._pages.advise_no_fork(address, nbytes)

    def _place(self, address: int, nbytes: int) -> None:
        """Say on which NUMA node pages are to lie that are not there yet."""
        numa = self._placement.numa
        if numa.mode is NumaMode.DEFAULT:
            return
        if refusal := self._pages.place(address, nbytes, numa.mode.value, numa.nodes):
            self._note(
                f"NUMA: {numa.describe()} was refused ({refusal}): the kernel decides; a container must allow mbind "
                "(seccomp, CAP_SYS_NICE) and the node (cpuset.mems)"
            )

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes = (*self._notes, text)
            _log.warning("host memory is not placed as asked: %s", text)

    @property
    def base(self) -> int:
        """Return the address of the first byte."""
        return self._base

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the segments; none for anonymous memory."""
        return self._segments.descriptors if self._segments else ()

    @property
    def placement_notes(self) -> tuple[str, ...]:
        """Return what the kernel refused of the plan's placement so far, each refusal once; the arena works without."""
        return self._notes

    def find_shortage(self, slab: SlabPlan, limits: MemoryLimits) -> str:
        """Return why there is no room to map a slab within `limits`, which were read just now; empty if there is."""
        if self._segments is not None:
            reserved = self._segments.is_hugetlb(slab)
        else:
            reserved = self._may_take_reserved(slab) and (limits.hugetlb_nbytes or 0) >= slab.resident_nbytes
        return "" if reserved else find_slab_shortage(self._plan, slab, limits)

    def map_slab(self, slab: SlabPlan, should_stop: Callable[[], bool]) -> bool:
        """Put memory at the addresses of a slab, ready to be touched; return False if `should_stop` ended it early."""
        if self._segments is None:
            return self._map_private(slab, should_stop)
        if not self._segments.allocate(slab, should_stop):
            return False
        address = self._base + slab.offset
        reserved = self._segments.is_hugetlb(slab)
        nbytes = slab.resident_nbytes if reserved else slab.nbytes  # a reserved huge page is mapped whole
        try:
            self._pages.map_file(address, nbytes, *self._segments.location(slab))
            if not reserved:
                self._advise_page_size(address, nbytes)
            self._keep_private(address, nbytes)
        except Exception:
            self._segments.deallocate(slab)
            raise
        return True

    def _map_private(self, slab: SlabPlan, should_stop: Callable[[], bool]) -> bool:
        """Replace the memory of a slab by reserved huge pages if there are some; without them it stays as it is."""
        if not self._may_take_reserved(slab):
            return True
        nbytes = slab.resident_nbytes
        with ExitStack() as opened:
            try:
                fd = open_hugetlb(f"kvmoor:{self._name}:0", nbytes, SEALS, self._calls)
                opened.callback(close_in_forked_child(fd).release)
                opened.callback(self._close_descriptor, fd)
                if not fill_hugetlb(fd, 0, nbytes, self._calls, place=self._place, should_stop=should_stop):
                    return False
            except OSError as error:
                self._may_use_hugetlb = False
                self._note(describe_hugetlb_refusal(error))
                return True
            # The pages are there and the file owns them, so this does not fail for want of them. It must not: a fixed
            # mapping that fails can leave a hole in the reservation, where another thread's mapping may land.
            address = self._base + slab.offset
            self._pages.map_file(address, nbytes, fd, 0)
            self._keep_private(address, nbytes)
        return True

    def _may_take_reserved(self, slab: SlabPlan) -> bool:
        return self._may_use_hugetlb and self._placement.huge_pages.may_reserve(slab.resident_nbytes)

    def _close_descriptor(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # Linux has released it even then
            self._calls.close(fd)

    def touch(self, offset: int, nbytes: int, should_stop: Callable[[], bool]) -> bool:
        """Make a mapped range resident; return False if `should_stop` ended it early."""
        return self._pages.touch(self._base + offset, nbytes, should_stop)

    def read_residency(self) -> Residency | None:
        """Return what the kernel says is in memory; None if it does not tell."""
        return read_residency(self._base, self._plan.address_nbytes)

    def read_nodes(self) -> MemoryNodes | None:
        """Return on which NUMA nodes the kernel says the memory lies; None if it does not tell. Takes milliseconds."""
        return read_memory_nodes(self._base, self._plan.address_nbytes)

    def forked(self) -> None:
        """Forget everything in a forked child: nothing is mapped there, and the descriptors are closed."""
        self._closing.pop_all()
        if self._segments is not None:
            self._segments.forked()

    def close(self) -> None:
        """Unmap everything and close the descriptors. Closes twice without harm.

        Caller: nothing reads or writes the memory any more.
        """
        self._closing.close()
