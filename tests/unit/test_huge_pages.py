import ctypes
import errno
import mmap
import os
import re

import pytest

from kvmoor.errors import SettingsError
from kvmoor.host_memory.huge_pages import (
    HUGE_PAGE_NBYTES,
    HugePages,
    describe_hugetlb_refusal,
    fill_hugetlb,
    open_hugetlb,
    plan_huge_pages,
    read_reserved_nbytes,
)
from kvmoor.host_memory.page_mapping import SystemCalls

MIB, TIB = 2**20, 2**40
MAP_NORESERVE = 0x4000


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes a machine from what its kernel says of huge pages, and returns its root."""

    def make(*, enabled=None, shmem_enabled=None, free=None, promised=None):
        mm = tmp_path / "sys/kernel/mm"
        for path, text in {
            "transparent_hugepage/enabled": enabled,
            "transparent_hugepage/shmem_enabled": shmem_enabled,
            "hugepages/hugepages-2048kB/free_hugepages": free,
            "hugepages/hugepages-2048kB/resv_hugepages": promised,
        }.items():
            if text is not None:
                (mm / path).parent.mkdir(parents=True, exist_ok=True)
                (mm / path).write_text(f"{text}\n")
        return tmp_path

    return make


def test_what_the_kernel_offers_is_read(machine):
    """The words in brackets count, and of the reserve what is neither used nor promised to somebody."""
    root = machine(
        enabled="always [madvise] never", shmem_enabled="always within_size advise [never] deny", free=10, promised=4
    )
    offered = plan_huge_pages("auto", root=root)
    assert HugePages("auto", "madvise", "never", 12 * MIB) == offered
    assert "12.6 MB reserved, transparent ones madvise (in shared memory never)" == offered.describe()


def test_a_kernel_without_huge_pages_is_described_as_unknown(machine):
    """Files that are missing, or hold no choice, promise nothing and break nothing."""
    for root in (machine(), machine(enabled="", shmem_enabled="advise")):
        offered = plan_huge_pages("auto", root=root)
        assert HugePages() == offered
        assert "none reserved, transparent ones unknown (in shared memory unknown)" == offered.describe()


def test_huge_pages_can_be_turned_off(machine):
    """With "off" no reserve is used, whatever there is; the description says whose choice it was (B08)."""
    offered = plan_huge_pages("off", root=machine(enabled="[always]", free=10, promised=0))
    assert not offered.may_reserve(2 * MIB)
    assert 'none (huge_pages="off")' == offered.describe()


@pytest.mark.parametrize("choice", ["on", "", None, True])
def test_another_word_is_refused(machine, choice):
    """The two words are named in the error."""
    with pytest.raises(SettingsError, match='give "auto" or "off"'):
        plan_huge_pages(choice, root=machine())


@pytest.mark.parametrize(
    ("free", "promised", "nbytes"),
    [(8, 8, 0), (8, 9, 0), (8, 0, 16 * MIB), (None, 0, None), (8, None, None), ("many", 0, None)],
)
def test_the_reserve_is_what_is_free_and_not_promised(machine, free, promised, nbytes):
    """Never negative, and unknown if one of the two numbers cannot be read."""
    assert nbytes == read_reserved_nbytes(machine(free=free, promised=promised))


def test_only_whole_huge_pages_may_be_reserved():
    """A slab that does not fill its last huge page would take more than was planned: it goes without (B14)."""
    offered = HugePages(reserved_nbytes=64 * MIB)
    assert [True, True, False, False] == [offered.may_reserve(nbytes) for nbytes in (2 * MIB, 64 * MIB, 3 * MIB, 4096)]
    assert not HugePages(reserved_nbytes=0).may_reserve(2 * MIB)
    with pytest.raises(AssertionError, match="whole huge pages"):
        open_hugetlb("kvmoor:test:0", 3 * MIB, 0, SystemCalls())


def test_a_reserve_that_is_too_small_is_an_errno_and_not_a_signal():
    """The real kernel refuses a terabyte when it is mapped, before a byte of it is touched, and no file is left."""
    with pytest.raises(OSError, match=r"."):
        open_hugetlb("kvmoor:test:0", TIB, 0, SystemCalls())


def test_a_byte_that_the_kernel_writes_fails_where_ours_would_be_a_signal():
    """Behind the end of a file a write is a SIGBUS; through the kernel it is an EFAULT, and elsewhere it succeeds."""
    calls = SystemCalls()
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        os.pwrite(fd, b"\7", 1)
        address = calls.mmap(0, 2 * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        try:
            calls.read_byte(fd, 1, address)
            assert b"\7" == ctypes.string_at(address, 1)
            with pytest.raises(OSError, match="Bad address") as caught:
                calls.read_byte(fd, 0, address + mmap.PAGESIZE)
            assert errno.EFAULT == caught.value.errno
        finally:
            calls.munmap(address, 2 * mmap.PAGESIZE)
    finally:
        os.close(fd)


class OrdinaryPages(SystemCalls):
    """Give ordinary pages for reserved huge ones, and note what is done; raise at one kind of call."""

    def __init__(self, fail_at="", error=None):
        self.log = []
        self.fail_at, self.error = fail_at, error

    def note(self, name, detail):
        self.log.append((name, detail))
        if name == self.fail_at:
            raise self.error

    def memfd_create(self, name, flags):
        self.note("create", flags)
        return super().memfd_create(name, flags & ~(os.MFD_HUGETLB | os.MFD_HUGE_2MB))

    def ftruncate(self, fd, nbytes):
        self.note("truncate", nbytes)
        super().ftruncate(fd, nbytes)

    def add_seals(self, fd, seals):
        self.note("seal", seals)
        super().add_seals(fd, seals)

    def mmap(self, address, nbytes, protection, flags, fd, offset):
        self.note("mmap", (nbytes, flags, offset))
        return super().mmap(address, nbytes, protection, flags, fd, offset)

    def munmap(self, address, nbytes):
        self.log.append(("munmap", nbytes))
        super().munmap(address, nbytes)

    def read_byte(self, fd, offset, address):
        self.note("read", offset)
        super().read_byte(fd, offset, address)


def never():
    return False


def ignore(address, nbytes):
    pass


def test_pages_are_promised_before_they_are_taken():
    """The file has huge pages of 2 MiB and is mapped once without NORESERVE, which makes the kernel promise them."""
    calls = OrdinaryPages()
    os.close(open_hugetlb("kvmoor:test:0", 4 * MIB, 0, calls))
    (_, flags), _, _, (_, (nbytes, mapping_flags, _)), _ = calls.log
    assert flags & os.MFD_HUGETLB
    assert os.MFD_HUGE_2MB == flags & (0x3F << 26)
    assert (4 * MIB, 0) == (nbytes, mapping_flags & MAP_NORESERVE)


@pytest.mark.parametrize("fail_at", ["create", "truncate", "seal", "mmap"])
def test_a_file_that_cannot_be_made_leaves_nothing(fail_at):
    """Whichever step is refused, the error arrives and the descriptor is closed."""
    error = OSError(errno.ENOMEM, "refused")
    with pytest.raises(OSError, match="refused") as caught:
        open_hugetlb("kvmoor:test:0", 4 * MIB, 0, OrdinaryPages(fail_at, error))
    assert error is caught.value


@pytest.fixture
def file_of_8_mib():
    """Open a file of 8 MiB that stands for 4 huge pages."""
    fd = open_hugetlb("kvmoor:test:0", 8 * MIB, 0, OrdinaryPages())
    yield fd
    os.close(fd)


def test_pages_are_placed_and_then_taken_one_by_one(file_of_8_mib):
    """The node is said before the first page of the range is taken; each page of the range is taken once."""
    calls = OrdinaryPages()
    arguments = {"place": lambda address, nbytes: calls.log.append(("place", nbytes)), "should_stop": never}
    assert fill_hugetlb(file_of_8_mib, 2 * MIB, 4 * MIB, calls, **arguments)
    assert ["mmap", "place", "read", "read", "munmap"] == [name for name, _ in calls.log]
    assert [2 * MIB, 4 * MIB] == [offset for name, offset in calls.log if name == "read"]


def test_taking_pages_stops_between_two_of_them(file_of_8_mib):
    """A stop flag is looked at before each page, and the mapping goes."""
    calls = OrdinaryPages()
    answers = iter([False, True])
    assert not fill_hugetlb(file_of_8_mib, 0, 8 * MIB, calls, place=ignore, should_stop=lambda: next(answers))
    assert ["mmap", "read", "munmap"] == [name for name, _ in calls.log]


def test_a_page_that_is_refused_leaves_no_mapping(file_of_8_mib):
    """An EFAULT of the kernel arrives as an error after the mapping is gone, in words that are not about addresses."""
    calls = OrdinaryPages("read", OSError(errno.EFAULT, "Bad address"))
    with pytest.raises(OSError, match="Bad address") as caught:
        fill_hugetlb(file_of_8_mib, 0, 8 * MIB, calls, place=ignore, should_stop=never)
    assert ("munmap", 8 * MIB) == calls.log[-1]
    assert re.match(
        r"reserved huge pages were refused \(none is left for this process\): raise vm.nr_hugepages",
        describe_hugetlb_refusal(caught.value),
    )


def test_real_reserved_pages_are_taken_and_given_back():
    """On a machine with reserved pages, pages are promised, taken, and given back as the file is closed."""
    before = read_reserved_nbytes()
    if not before or before < 2 * HUGE_PAGE_NBYTES:
        pytest.skip("this machine has no reserved huge pages")
    calls = SystemCalls()
    fd = open_hugetlb("kvmoor:test:0", 2 * HUGE_PAGE_NBYTES, 0, calls)
    try:
        assert 2 * HUGE_PAGE_NBYTES == before - read_reserved_nbytes()
        assert fill_hugetlb(fd, 0, 2 * HUGE_PAGE_NBYTES, calls, place=ignore, should_stop=never)
        assert 2 * HUGE_PAGE_NBYTES == before - read_reserved_nbytes()
    finally:
        os.close(fd)
    assert before == read_reserved_nbytes()
