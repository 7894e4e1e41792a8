import ctypes
import errno
import mmap
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import leak_check
from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import KvmoorError, NoRoomError, SettingsError
from kvmoor.host_memory.arena_plan import ArenaPlan, GroupPlan, Placement, plan_arena
from kvmoor.host_memory.huge_pages import HugePages, plan_huge_pages, read_reserved_nbytes
from kvmoor.host_memory.limits import KEPT_FREE_NBYTES, MemoryLimits
from kvmoor.host_memory.numa import NumaMode, NumaPolicy
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.slab_memory import Backing, SlabMemory

KIB, MIB = 2**10, 2**20
MAP_NORESERVE = 0x4000
HUGETLB_FLAGS = os.MFD_HUGETLB | os.MFD_HUGE_2MB
GIVING_BACK = {"munmap", "close", "punch_hole"}
both_backings = pytest.mark.parametrize("backing", list(Backing))
NODE_0 = Placement(NumaPolicy(NumaMode.PREFERRED, (0,), "numa=0"))
RESERVED = Placement(huge_pages=HugePages(reserved_nbytes=2**40))


def never():
    return False


def make_plan(placement, *, ranks_on_host=1):
    """Plan two slabs of one huge page and one of half a page for one group, and a small slab for another."""
    groups = (
        GroupPlan(0, 16, 64 * KIB, 32, 2 * MIB, num_slots=80),
        GroupPlan(1, 16, 4 * KIB, 512, 2 * MIB, num_slots=80, offset=6 * MIB),
    )
    return ArenaPlan(6 * MIB, groups, MemoryLimits(), "refuse", placement=placement, ranks_on_host=ranks_on_host)


def make_layout(page_nbytes):
    return BlockLayout((GroupLayout((TensorPages(2**30, 8, page_nbytes, page_nbytes),), tokens_per_block=16),))


class FakeKernel(SystemCalls):
    """Give ordinary pages for reserved huge ones out of a pool, note all calls, and fail at one of them.

    `fail_at` is the number of a call. `refuse` maps the name of a call to the errno with which all of them fail.
    `num_faulting` pages are given out before the kernel has none left for us, although they were promised.
    """

    def __init__(self, *, pool_nbytes=2**40, num_faulting=2**40, refuse=None, fail_at=None, error=None):
        self.calls = []
        self.pool_nbytes = pool_nbytes
        self.num_faulting = num_faulting
        self.refuse = refuse or {}
        self.fail_at, self.error = fail_at, error
        self.hugetlb = {}  # descriptor -> promised bytes

    def note(self, name, *details):
        self.calls.append((name, *details))
        if len(self.calls) - 1 == self.fail_at:
            raise self.error
        if name in self.refuse:
            raise OSError(self.refuse[name], os.strerror(self.refuse[name]))

    def named(self, name):
        return [details for called, *details in self.calls if called == name]

    def mmap(self, address, nbytes, protection, flags, fd, offset):
        self.note("mmap", address, nbytes, flags)
        if fd in self.hugetlb and not flags & MAP_NORESERVE and not self.hugetlb[fd]:
            if nbytes > self.pool_nbytes:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            self.pool_nbytes -= nbytes
            self.hugetlb[fd] = nbytes
        return super().mmap(address, nbytes, protection, flags, fd, offset)

    def munmap(self, address, nbytes):
        self.note("munmap", address, nbytes)
        super().munmap(address, nbytes)

    def madvise(self, address, nbytes, advice):
        self.note("madvise", address, nbytes, advice)
        super().madvise(address, nbytes, advice)

    def mbind(self, address, nbytes, mode, nodes):
        self.note("mbind", address, nbytes, mode, nodes)

    def memset(self, address, nbytes):
        self.note("memset", address, nbytes)
        super().memset(address, nbytes)

    def memfd_create(self, name, flags):
        self.note("memfd_create", flags)
        fd = super().memfd_create(name, flags & ~HUGETLB_FLAGS)
        if flags & HUGETLB_FLAGS:
            self.hugetlb[fd] = 0
        return fd

    def ftruncate(self, fd, nbytes):
        self.note("ftruncate", nbytes)
        super().ftruncate(fd, nbytes)

    def add_seals(self, fd, seals):
        self.note("add_seals", seals)
        super().add_seals(fd, seals)

    def posix_fallocate(self, fd, offset, nbytes):
        self.note("posix_fallocate", fd, offset, nbytes)
        super().posix_fallocate(fd, offset, nbytes)

    def punch_hole(self, fd, offset, nbytes):
        self.note("punch_hole", offset, nbytes)
        super().punch_hole(fd, offset, nbytes)

    def read_byte(self, fd, offset, address):
        self.note("read_byte", fd, offset, address)
        assert fd in self.hugetlb
        if not self.num_faulting:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        self.num_faulting -= 1
        super().read_byte(fd, offset, address)

    def close(self, fd):
        self.hugetlb.pop(fd, None)
        super().close(fd)
        self.note("close")


def map_all(memory, plan):
    """Map and touch each slab as an arena does; return what was lost and why."""
    lost = {}
    for slab in plan.slabs:
        try:
            assert memory.map_slab(slab, never)
            assert memory.touch(slab.offset, slab.nbytes, never)
        except KvmoorError as error:
            lost[slab.number] = error
    return lost


def write_and_read_back(memory, plan):
    """Fill every slab with bytes of its own, then check them all."""
    for slab in plan.slabs:
        ctypes.memset(memory.base + slab.offset, slab.number + 1, slab.nbytes)
    for slab in plan.slabs:
        assert bytes([slab.number + 1]) * slab.nbytes == ctypes.string_at(memory.base + slab.offset, slab.nbytes)


def open_memory(placement, backing, kernel):
    plan = make_plan(placement)
    return plan, SlabMemory(plan, backing, "test", kernel)


@both_backings
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EIO, errno.ENOMEM])
@pytest.mark.parametrize("call", ["mbind", "madvise of the page size"])
def test_whatever_refuses_a_placement_the_memory_is_all_there_and_it_is_said_once(backing, number, call):
    """A container that forbids mbind, a kernel without huge pages: all slabs are mapped, with one note (B14)."""

    class RefusingKernel(FakeKernel):
        def madvise(self, address, nbytes, advice):
            if call != "mbind" and advice == mmap.MADV_HUGEPAGE:
                raise OSError(number, os.strerror(number))
            super().madvise(address, nbytes, advice)

        def mbind(self, *args):
            if call == "mbind":
                raise OSError(number, os.strerror(number))

    plan, memory = open_memory(NODE_0, backing, RefusingKernel())
    try:
        assert {} == map_all(memory, plan)
        write_and_read_back(memory, plan)
        (note,) = memory.placement_notes
        expected = "NUMA: node 0 preferred (numa=0) was refused" if call == "mbind" else "the advice to use huge pages"
        assert note.startswith(expected)
        assert f"({os.strerror(number)})" in note
    finally:
        memory.close()


@both_backings
def test_nothing_refused_is_nothing_noted(backing):
    """Where the kernel takes everything there are no notes."""
    plan, memory = open_memory(NODE_0, backing, FakeKernel())
    try:
        assert {} == map_all(memory, plan)
        assert () == memory.placement_notes
    finally:
        memory.close()


@pytest.mark.parametrize("reserved", [False, True], ids=["ordinary pages", "reserved pages"])
@both_backings
def test_the_node_is_said_before_the_first_touch_of_every_byte(backing, reserved):
    """Each page is placed before it is allocated or touched: by address, or through its file (B14)."""
    placement = Placement(NODE_0.numa, RESERVED.huge_pages if reserved else HugePages())

    class OrderingKernel(FakeKernel):
        """Keep which ranges of files were mapped where, and which bytes were placed before they were taken."""

        def __init__(self):
            super().__init__()
            self.files = []  # (address, nbytes, descriptor, offset)
            self.placed = []  # (descriptor or None, start, end)
            self.unplaced = []

        def mmap(self, address, nbytes, protection, flags, fd, offset):
            mapped = super().mmap(address, nbytes, protection, flags, fd, offset)
            if fd >= 0:
                self.files.append((mapped, nbytes, fd, offset))
            return mapped

        def mbind(self, address, nbytes, mode, nodes):
            assert (NumaMode.PREFERRED.value, (0,)) == (mode, nodes)
            self.placed.append((None, address, address + nbytes))
            for mapped, length, fd, offset in self.files:
                if mapped == address and length == nbytes:
                    self.placed.append((fd, offset, offset + nbytes))

        def check(self, owner, start, nbytes):
            if not any(owner == who and first <= start and start + nbytes <= end for who, first, end in self.placed):
                self.unplaced.append((owner, start, nbytes))

        def memset(self, address, nbytes):
            if backing is Backing.ANONYMOUS:
                self.check(None, address, nbytes)
            super().memset(address, nbytes)

        def posix_fallocate(self, fd, offset, nbytes):
            self.check(fd, offset, nbytes)
            super().posix_fallocate(fd, offset, nbytes)

        def read_byte(self, fd, offset, address):
            self.check(None, address, 1)  # reserved pages are placed by mapping
            super().read_byte(fd, offset, address)

    kernel = OrderingKernel()
    plan, memory = open_memory(placement, backing, kernel)
    try:
        assert {} == map_all(memory, plan)
        assert [] == kernel.unplaced
        assert reserved == bool(kernel.named("read_byte"))
        assert kernel.placed
    finally:
        memory.close()


@both_backings
def test_without_a_policy_the_kernel_is_told_nothing(backing):
    """With the default of one node, no call about nodes is made: numactl around the engine stays in force."""
    kernel = FakeKernel()
    plan, memory = open_memory(Placement(), backing, kernel)
    try:
        map_all(memory, plan)
        assert [] == kernel.named("mbind")
        mappings = len(plan.groups) if backing is Backing.ANONYMOUS else len(plan.slabs)
        assert 1 + mappings == len(kernel.named("mmap"))  # and no mapping is made only to say it
    finally:
        memory.close()


@both_backings
def test_the_placement_can_be_read_back_from_the_kernel(backing):
    """Memory preferred on node 0 lies there to the last byte, by the kernel's own account of each mapping (B14)."""
    plan, memory = open_memory(NODE_0, backing, SystemCalls())
    try:
        assert {} == map_all(memory, plan)
        found = memory.read_nodes()
        if memory.placement_notes or found is None:
            pytest.skip("this kernel or container has no NUMA calls")
        assert frozenset({"prefer:0"}) == found.policies
        assert plan.nbytes == sum(found.nbytes_by_node.values())
        assert 0 in found.nbytes_by_node
    finally:
        memory.close()


def test_a_node_that_does_not_exist_is_refused_before_anything_is_allocated():
    """Planning fails on a number that is no node, so no arena is ever opened for it."""
    with pytest.raises(SettingsError, match="numa is 4096"):
        plan_arena(make_layout(4 * KIB), MIB, numa=4096)


@both_backings
def test_reserved_huge_pages_hold_the_slabs_that_fill_them_and_no_others(backing):
    """Two slabs of 2 MiB take a reserved page each; the smaller ones stay ordinary, so not a byte more is taken."""
    kernel = FakeKernel()
    plan, memory = open_memory(RESERVED, backing, kernel)
    try:
        assert {} == map_all(memory, plan)
        assert 2 == len(kernel.named("read_byte"))
        assert 4 * MIB == 2**40 - kernel.pool_nbytes
        assert plan.nbytes == memory.read_residency().resident_nbytes
        assert () == memory.placement_notes
        write_and_read_back(memory, plan)
    finally:
        memory.close()


@both_backings
def test_real_reserved_pages_hold_an_arena(backing):
    """On a machine with reserved pages the kernel's own account shows two slabs in them, and all is given back."""
    before = read_reserved_nbytes()
    if not before or before < 8 * MIB:
        pytest.skip("this machine has no reserved huge pages")
    plan, memory = open_memory(Placement(huge_pages=plan_huge_pages("auto")), backing, SystemCalls())
    try:
        assert {} == map_all(memory, plan)
        assert () == memory.placement_notes
        residency = memory.read_residency()
        assert plan.nbytes == residency.resident_nbytes
        assert residency.huge_page_nbytes >= 4 * MIB == before - read_reserved_nbytes()
        write_and_read_back(memory, plan)
    finally:
        memory.close()
    assert before == read_reserved_nbytes()


def test_anonymous_memory_keeps_no_descriptor_of_its_reserved_pages():
    """The file of a slab's reserved pages is closed once it is mapped: nothing can be opened through /proc."""
    kernel = FakeKernel()
    plan, memory = open_memory(RESERVED, Backing.ANONYMOUS, kernel)
    try:
        map_all(memory, plan)
        assert () == memory.descriptors
        assert 2 == len(kernel.named("close"))
        assert {} == kernel.hugetlb
    finally:
        memory.close()


@both_backings
@pytest.mark.parametrize("pool_nbytes", [0, 2 * MIB])
def test_a_reserve_that_is_used_up_is_survived(backing, pool_nbytes):
    """With no page left, or one of two, the rest is ordinary memory, all of it works; the note says what to raise."""
    kernel = FakeKernel(pool_nbytes=pool_nbytes)
    plan, memory = open_memory(RESERVED, backing, kernel)
    try:
        assert {} == map_all(memory, plan)
        assert 0 == kernel.pool_nbytes
        num_given = pool_nbytes // (2 * MIB)
        assert num_given == len(kernel.named("read_byte"))
        # After the first refusal it is not tried again.
        assert num_given + 1 == sum(bool(flags & os.MFD_HUGETLB) for (flags,) in kernel.named("memfd_create"))
        (note,) = memory.placement_notes
        assert re.match(r"reserved huge pages were refused \(Cannot allocate memory\): raise vm.nr_hugepages", note)
        write_and_read_back(memory, plan)
    finally:
        memory.close()


def test_promised_pages_that_are_not_given_leave_anonymous_memory_as_it_was():
    """A cgroup's hugetlb limit shows at the first touch only: the slab keeps its ordinary memory, with a note."""
    kernel = FakeKernel(num_faulting=1)
    plan, memory = open_memory(RESERVED, Backing.ANONYMOUS, kernel)
    try:
        assert {} == map_all(memory, plan)
        (note,) = memory.placement_notes
        assert "none is left for this process" in note
        write_and_read_back(memory, plan)
    finally:
        memory.close()


def test_promised_pages_that_are_not_given_lose_a_slab_of_shared_memory_by_name():
    """A segment cannot change what it is made of: the slab is lost with a reason and a remedy, and the others work."""
    kernel = FakeKernel(num_faulting=1)
    plan, memory = open_memory(RESERVED, Backing.MEMFD, kernel)
    try:
        lost = map_all(memory, plan)
        (error,) = lost.values()
        assert isinstance(error, NoRoomError)
        assert re.search(r'none is left for this process.*pass huge_pages="off" to do without', str(error))
        assert plan.nbytes - 2 * MIB == memory.read_residency().resident_nbytes
    finally:
        memory.close()


@both_backings
def test_taking_reserved_pages_ends_when_the_arena_closes(backing):
    """A stop flag that is set ends the slab before its next page, and everything can be closed."""
    kernel = FakeKernel()
    plan, memory = open_memory(RESERVED, backing, kernel)
    assert not memory.map_slab(plan.slabs[0], lambda: True)
    assert [] == kernel.named("read_byte")
    memory.close()


@both_backings
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EPERM])
def test_each_system_call_of_a_placed_arena_may_fail_once(backing, number):
    """Whichever call fails, it is survived, or a slab is lost, or the constructor raises and leaves nothing."""
    placement = Placement(NODE_0.numa, RESERVED.huge_pages)
    kernel = FakeKernel()
    plan, memory = open_memory(placement, backing, kernel)
    map_all(memory, plan)
    names = [name for name, *_ in kernel.calls]
    memory.close()
    assert {"mbind", "read_byte", "memfd_create"} < set(names)
    before = leak_check.snapshot()
    refusals = set()
    for fail_at, name in enumerate(names):
        if name in GIVING_BACK:
            continue
        memory = None
        kernel = FakeKernel(fail_at=fail_at, error=OSError(number, os.strerror(number)))
        try:
            plan, memory = open_memory(placement, backing, kernel)
            lost = map_all(memory, plan)
        except (KvmoorError, OSError) as error:
            refusals.add(str(error))
        else:
            assert len(lost) <= 1, name
            if name in {"mbind", "read_byte"} and backing is Backing.ANONYMOUS:
                assert {} == lost, name
                assert 1 == len(memory.placement_notes)
        finally:
            if memory is not None:
                memory.close()
        assert [] == leak_check.find_leaks(before), f"{name} failed as call {fail_at}"
    assert refusals
    assert all(os.strerror(number) in refusal for refusal in refusals)


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
@both_backings
def test_the_advice_on_huge_pages_is_a_choice(backing, huge_pages):
    """With "off" the kernel is asked for small pages and never for huge ones: memory fills without compaction (B08)."""
    kernel = FakeKernel()
    plan, memory = open_memory(Placement(huge_pages=HugePages(huge_pages)), backing, kernel)
    try:
        map_all(memory, plan)
        asked = {advice for _, _, advice in kernel.named("madvise")} & {mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE}
        assert {mmap.MADV_HUGEPAGE if huge_pages == "auto" else mmap.MADV_NOHUGEPAGE} == asked
        if huge_pages == "off":
            assert 0 == memory.read_residency().huge_page_nbytes
    finally:
        memory.close()


@pytest.mark.parametrize("placement", [Placement(), NODE_0, RESERVED], ids=["default", "numa", "reserved"])
@both_backings
def test_no_advice_is_needed_that_an_older_kernel_lacks(backing, placement):
    """Memory is filled by touching: no MADV_POPULATE is ever called, so kernels before 5.14 do as well (B09)."""
    kernel = FakeKernel()
    plan, memory = open_memory(placement, backing, kernel)
    try:
        map_all(memory, plan)
        known_since_3_4 = {mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK}
        assert known_since_3_4 == {advice for _, _, advice in kernel.named("madvise")}
    finally:
        memory.close()


@both_backings
def test_memory_is_kept_out_of_forked_processes_and_core_dumps(backing):
    """Every mapping with bytes is marked so in the kernel's own list: a child never keeps the memory alive."""
    plan, memory = open_memory(Placement(), backing, SystemCalls())
    try:
        map_all(memory, plan)
        marked = []
        span = range(memory.base, memory.base + plan.address_nbytes)
        start, rss = 0, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if match := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
                start = int(match[1], 16)
            elif line.startswith("Rss:"):
                rss = int(line.split()[1])
            elif line.startswith("VmFlags:") and start in span and rss:
                marked.append({"dc", "dd"} <= set(line.split()))
        assert marked
        assert all(marked)
    finally:
        memory.close()


def resident_nbytes_of_this_process():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no resident size")


@both_backings
@pytest.mark.parametrize("num_units", [33, 65])
def test_what_becomes_resident_is_what_was_asked_for(backing, num_units):
    """A pool of 33 or 65 units grows the process by at most 1.02 times the request, its mappings by all of it (B11)."""
    requested = num_units * MIB
    plan = plan_arena(make_layout(MIB), requested, limits=MemoryLimits())
    assert num_units == plan.groups[0].num_slots
    before = resident_nbytes_of_this_process()
    memory = SlabMemory(plan, backing, "test", SystemCalls())
    try:
        assert {} == map_all(memory, plan)
        grown = resident_nbytes_of_this_process() - before
        assert requested == memory.read_residency().resident_nbytes
        assert 0.98 * requested < grown <= 1.02 * requested
    finally:
        memory.close()


def run_python(code, *, before=()):
    """Run code in a process of its own and return what it printed."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])
    result = subprocess.run(
        [*before, sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert 0 == result.returncode, result.stderr
    return result.stdout


PREAMBLE = """
import os, resource
from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.errors import NoRoomError
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.limits import MemoryLimits
from kvmoor.host_memory.page_mapping import SystemCalls
from kvmoor.host_memory.slab_memory import Backing, SlabMemory

layout = BlockLayout((GroupLayout((TensorPages(2**30, 8, 65536, 65536),), tokens_per_block=16),))

def fill(plan, backing):
    memory = SlabMemory(plan, backing, "test", SystemCalls())
    for slab in plan.slabs:
        assert memory.map_slab(slab, lambda: False) and memory.touch(slab.offset, slab.nbytes, lambda: False)
    return memory
"""


def test_the_size_of_dev_shm_does_not_matter():
    """Shared memory of 8 MiB fits beside a /dev/shm of 64 KiB, because it never had a name there (B10, B18)."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"]
    alone = ["unshare", "--mount", "--", "sh", "-c"]
    probe = subprocess.run([*alone, " ".join(mount)], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this user may not mount")
    printed = run_python(
        """
        free = os.statvfs("/dev/shm").f_bfree
        memory = fill(plan_arena(layout, 8 * 2**20), Backing.MEMFD)
        print(memory.read_residency().resident_nbytes, os.listdir("/dev/shm"), free - os.statvfs("/dev/shm").f_bfree)
        """,
        before=[*alone, f'{" ".join(mount)} && exec "$@"', "sh"],
    )
    assert f"{8 * MIB} [] 0\n" == printed


def test_shared_memory_leaves_dev_shm_as_it_was():
    """No name appears in /dev/shm and none of its blocks are used while shared memory is open (B10)."""

    def names():
        return {entry.name for entry in Path("/dev/shm").iterdir() if "kvmoor" in entry.name}

    before = names()
    plan, memory = open_memory(Placement(), Backing.MEMFD, SystemCalls())
    try:
        map_all(memory, plan)
        assert before == names()
    finally:
        memory.close()


def test_an_address_space_limit_is_named_before_and_after_planning():
    """Under RLIMIT_AS the plan is refused with what is left; an arena planned without looking fails as clearly."""
    printed = run_python(
        """
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        for limits in (None, MemoryLimits()):
            try:
                SlabMemory(plan_arena(layout, 2**31, limits=limits), Backing.ANONYMOUS, "test", SystemCalls())
            except NoRoomError as error:
                print(error)
        """
    )
    planned, opened = printed.splitlines()
    assert re.match(
        r"host memory needs 2.15 GB \(of 2.15 GB requested\), the address-space limit of the process leaves \d.*: "
        r"lower host_memory, raise the limit \(ulimit -v; RLIMIT_AS\)",
        planned,
    )
    assert re.match(
        r"reserving 2.15 GB of addresses for host memory failed \(Cannot allocate memory\): lower host_memory, or "
        r"raise the address-space limit \(ulimit -v; RLIMIT_AS\)",
        opened,
    )


@both_backings
def test_a_memlock_limit_is_shown_and_changes_nothing(backing):
    """With 64 KiB of lockable memory the arena works, and the plan shows the limit for whoever locks pages (B13)."""
    printed = run_python(
        f"""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        plan = plan_arena(layout, 4 * 2**20)
        print(fill(plan, Backing.{backing.name}).read_residency().resident_nbytes)
        print(plan.limits.describe())
        """
    )
    resident, limits = printed.splitlines()
    assert 4 * MIB == int(resident)
    assert limits.endswith("ulimit -l is 65.5 kB")


def test_a_machine_that_promises_no_more_than_it_has_says_so():
    """With vm.overcommit_memory=2 a mapping is refused as it is made: the error names the setting."""

    class StrictKernel(FakeKernel):
        def mmap(self, address, nbytes, protection, flags, fd, offset):
            if protection & mmap.PROT_WRITE:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return super().mmap(address, nbytes, protection, flags, fd, offset)

    with pytest.raises(NoRoomError, match=r"set vm\.overcommit_memory to 0 or 1 .* data limit \(ulimit -d\)"):
        open_memory(Placement(), Backing.ANONYMOUS, StrictKernel())


def room(nbytes, **others):
    return MemoryLimits(available_nbytes=KEPT_FREE_NBYTES + nbytes, **others)


@both_backings
def test_the_room_for_a_slab_is_looked_at_again(backing):
    """The last byte is allowed; one less is refused with what was needed, what is left, and both remedies."""
    plan, memory = open_memory(Placement(), backing, FakeKernel())
    try:
        slab = plan.slabs[0]
        assert "" == memory.find_shortage(slab, room(2 * MIB))
        assert "" == memory.find_shortage(slab, MemoryLimits())
        shortage = memory.find_shortage(slab, room(2 * MIB - 1))
        assert shortage.startswith("2.1 MB of host memory were to be mapped, 2.1 MB are left within the free memory")
        assert 'lower host_memory, make room, or pass memory_check="warn"' in shortage
    finally:
        memory.close()


def test_a_slab_in_reserved_pages_needs_no_other_room():
    """Reserved pages are not free memory: a slab that gets them is let through, one that cannot is not."""
    plan, memory = open_memory(RESERVED, Backing.ANONYMOUS, FakeKernel(pool_nbytes=0))
    try:
        whole, small = plan.slabs[0], plan.slabs[-1]
        assert small.resident_nbytes == MIB
        assert "" == memory.find_shortage(whole, room(0, hugetlb_nbytes=2 * MIB))
        assert memory.find_shortage(whole, room(0, hugetlb_nbytes=0))
        assert memory.find_shortage(small, room(0, hugetlb_nbytes=2 * MIB))
        assert memory.map_slab(whole, never)  # the pool refuses after all
        assert memory.find_shortage(whole, room(0, hugetlb_nbytes=2 * MIB))
    finally:
        memory.close()


def test_a_segment_of_reserved_pages_has_its_room_already():
    """Shared memory was promised its pages as it was opened; only ordinary segments look for room."""
    plan, memory = open_memory(RESERVED, Backing.MEMFD, FakeKernel(pool_nbytes=2 * MIB))
    try:
        wants = [bool(memory.find_shortage(slab, room(0, hugetlb_nbytes=64 * MIB))) for slab in plan.slabs]
        assert [False, True, True, True] == wants
    finally:
        memory.close()


def test_a_slab_leaves_room_for_the_slabs_of_the_other_ranks():
    """Four ranks may look at one moment: each needs room for four slabs, not for the whole shares of the others."""
    plan = make_plan(Placement(), ranks_on_host=4)
    memory = SlabMemory(plan, Backing.ANONYMOUS, "test", FakeKernel())
    try:
        assert "" == memory.find_shortage(plan.slabs[0], room(8 * MIB))
        shortage = memory.find_shortage(plan.slabs[0], room(8 * MIB - 1))
        assert "were to be mapped beside 3 other ranks that may take as much, 8.39 MB are left" in shortage
    finally:
        memory.close()
