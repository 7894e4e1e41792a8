import ctypes
import errno
import fcntl
import mmap
import os
import re
from pathlib import Path

import pytest

from kvmoor.errors import BrokenError, NoRoomError
from kvmoor.host_memory import page_mapping
from kvmoor.host_memory.arena_plan import SlabPlan
from kvmoor.host_memory.memfd import MAX_SEGMENTS, MemfdSegments
from kvmoor.host_memory.page_mapping import PageMapping, Residency, SystemCalls, read_residency

KIB, MIB = 2**10, 2**20


def never():
    return False


def protection_at(address):
    """Return what /proc/self/maps says of an address: "rw-p", "---p", or None if nothing is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return protection
    return None


def flags_at(address):
    """Return the flags that /proc/self/smaps lists for the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


@pytest.fixture
def pages():
    return PageMapping(SystemCalls())


@pytest.fixture
def reserved(pages):
    """Reserve 6 MiB, aligned to 2 MiB."""
    reservation = pages.reserve(6 * MIB, 2 * MIB)
    yield reservation
    pages.unmap(reservation)


class RefusingCalls(SystemCalls):
    """Fail one kind of call with one errno."""

    def __init__(self, name, number):
        setattr(self, name, self.refuse)
        self.number = number

    def refuse(self, *args):
        raise OSError(self.number, os.strerror(self.number))


def test_reserved_addresses_are_aligned_guarded_and_cannot_be_used_yet(reserved):
    """A reservation takes addresses only, begins on the alignment, and is guarded on both sides."""
    assert 0 == reserved.base % (2 * MIB)
    assert reserved.start < reserved.base
    assert reserved.base + 6 * MIB < reserved.start + reserved.nbytes
    assert ["---p"] * 3 == [
        protection_at(address) for address in (reserved.start, reserved.base, reserved.start + reserved.nbytes - 1)
    ]


def test_mapped_memory_is_writable_and_becomes_resident_when_touched(pages, reserved):
    """Mapping takes no memory; touching does, page by page, and the bytes are zeros that can be written over."""
    pages.map_anonymous(reserved.base, 3 * MIB)
    assert Residency(0, 0) == read_residency(reserved.base, 6 * MIB)
    assert pages.touch(reserved.base, 3 * MIB, never)
    residency = read_residency(reserved.base, 6 * MIB)
    assert 3 * MIB == residency.resident_nbytes
    assert bytes(3 * MIB) == ctypes.string_at(reserved.base, 3 * MIB)
    ctypes.memset(reserved.base, 7, 3 * MIB)
    assert b"\7" == ctypes.string_at(reserved.base + 3 * MIB - 1, 1)
    assert "---p" == protection_at(reserved.base + 3 * MIB)


def test_touching_stops_between_two_calls(reserved):
    """A stop flag is looked at before each 2 MiB, so stopping takes one call at most."""
    touched = []

    class RecordingCalls(SystemCalls):
        def memset(self, address, nbytes):
            touched.append((address - reserved.base, nbytes))

    answers = iter([False, False, True])
    assert not PageMapping(RecordingCalls()).touch(reserved.base, 5 * MIB, lambda: next(answers))
    assert [(0, 2 * MIB), (2 * MIB, 2 * MIB)] == touched
    touched.clear()
    assert PageMapping(RecordingCalls()).touch(reserved.base, 5 * MIB, never)
    assert [(0, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, MIB)] == touched


def test_calls_that_take_long_release_the_interpreter_lock():
    """Touching, mapping and unmapping are called the way that lets other threads run meanwhile."""
    holds_the_lock = 4  # FUNCFLAG_PYTHONAPI
    for function in (ctypes.memset, page_mapping._libc.mmap, page_mapping._libc.munmap):
        assert not function._flags_ & holds_the_lock


def test_unmapping_gives_everything_back(pages):
    """After unmap nothing is left at any address of the reservation."""
    reservation = pages.reserve(4 * MIB, 2 * MIB)
    pages.map_anonymous(reservation.base, 2 * MIB)
    pages.unmap(reservation)
    addresses = (reservation.start, reservation.base, reservation.start + reservation.nbytes - 1)
    assert [None] * 3 == [protection_at(address) for address in addresses]


def test_advice_that_a_kernel_does_not_know_is_survived():
    """EINVAL means that the kernel has an older list of advice: it goes on without."""
    pages = PageMapping(RefusingCalls("madvise", errno.EINVAL))
    pages.advise_no_dump(4096, 4096)
    pages.advise_no_fork(4096, 4096)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_every_refusal_of_a_page_size_is_an_answer(number):
    """Memory in other pages is as good, so no refusal is an error; the kernel's words are returned."""
    pages = PageMapping(RefusingCalls("madvise", number))
    assert os.strerror(number) == pages.advise_huge_pages(4096, 4096)
    assert os.strerror(number) == pages.refuse_huge_pages(4096, 4096)


def test_advice_that_is_taken_has_no_answer_and_shows_in_the_kernel_s_list(pages, reserved):
    """Huge pages or small ones, no dump, no fork: the real calls succeed and are in force."""
    pages.map_anonymous(reserved.base, 2 * MIB)
    pages.map_anonymous(reserved.base + 2 * MIB, 2 * MIB)
    refusals = {
        pages.advise_huge_pages(reserved.base, 2 * MIB),
        pages.refuse_huge_pages(reserved.base + 2 * MIB, 2 * MIB),
    }
    if refusals != {""}:
        pytest.skip("this kernel is built without transparent huge pages")
    pages.advise_no_dump(reserved.base, 4 * MIB)
    pages.advise_no_fork(reserved.base, 4 * MIB)
    assert {"hg", "dd", "dc"} <= flags_at(reserved.base)
    assert {"nh", "dd", "dc"} <= flags_at(reserved.base + 2 * MIB)


@pytest.mark.parametrize("call", ["reserve", "map_anonymous", "map_file", "unmap", "advise_no_dump", "advise_no_fork"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOMEM, NoRoomError), (errno.EACCES, BrokenError)])
def test_errors_of_the_system_are_translated_with_their_cause(reserved, call, number, kind):
    """No room and broken are told apart; the message has the kernel's words and the cause is kept."""
    name = {"unmap": "munmap", "advise_no_dump": "madvise", "advise_no_fork": "madvise"}.get(call, "mmap")
    pages = PageMapping(RefusingCalls(name, number))
    arguments = {"reserve": (MIB, MIB), "unmap": (reserved,), "map_file": (reserved.base, MIB, 0, 0)}
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        getattr(pages, call)(*arguments.get(call, (reserved.base, MIB)))
    assert number == caught.value.__cause__.errno


def test_the_kernel_s_own_refusal_arrives_as_an_error(pages):
    """A mapping that cannot exist fails with the errno of the kernel, through the real call."""
    with pytest.raises(NoRoomError, match="Cannot allocate memory"):
        pages.reserve(2**50, 2 * MIB)


def test_residency_adds_up_only_what_lies_within(tmp_path):
    """Resident and huge-page bytes are taken from the mappings inside the range and from no other."""
    smaps = tmp_path / "smaps"
    entry = "{:x}-{:x} rw-p 00000000 00:00 0 \nRss: {} kB\nAnonHugePages: {} kB\nShmemPmdMapped: 1 kB\nVmFlags: rd wr\n"
    smaps.write_text(
        entry.format(0x1000, 0x2000, 900, 900)
        + entry.format(0x2000, 0x3000, 10, 4)
        + entry.format(0x3000, 0x5000, 20, 6)
        + entry.format(0x5000, 0x7000, 900, 900)
    )
    assert Residency(30 * KIB, 12 * KIB) == read_residency(0x2000, 0x4000, smaps)


def test_reserved_huge_pages_are_resident_too(tmp_path):
    """The kernel lists them beside the resident size and not in it: both kinds count as resident and as huge."""
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "2000-3000 rw-s 00000000 00:00 0 \nRss: 0 kB\nShared_Hugetlb: 2048 kB\nPrivate_Hugetlb: 4096 kB\n"
        "3000-4000 rw-s 00000000 00:00 0 \nRss: 8 kB\nShared_Hugetlb: 0 kB\nPrivate_Hugetlb: 0 kB\n"
    )
    assert Residency(6 * MIB + 8 * KIB, 6 * MIB) == read_residency(0x2000, 0x4000, smaps)


@pytest.mark.parametrize("text", [None, "2000-3000 rw-p 0 0 0\nRss: many kB\n", "2000-3000 rw-p 0 0 0\nRss:\n"])
def test_residency_that_cannot_be_read_is_unknown(tmp_path, text):
    """A missing file or a line that makes no sense gives None, not zero."""
    smaps = tmp_path / "smaps"
    if text is not None:
        smaps.write_text(text)
    assert read_residency(0x2000, 0x4000, smaps) is None


def make_slabs(count, nbytes=64 * KIB):
    return [SlabPlan(k, 0, k, 1, k * 2 * MIB, nbytes, nbytes) for k in range(count)]


def test_memfd_segments_share_the_slabs_in_turn():
    """Slab k lies in segment k mod n, behind the earlier slabs of its segment, on a 2 MiB offset."""
    slabs = make_slabs(MAX_SEGMENTS + 2)
    segments = MemfdSegments("test", slabs, SystemCalls())
    try:
        descriptors = segments.descriptors
        assert MAX_SEGMENTS == len(descriptors)
        assert (descriptors[1], 0) == segments.location(slabs[1])
        assert (descriptors[1], 2 * MIB) == segments.location(slabs[MAX_SEGMENTS + 1])
    finally:
        segments.close()
    assert () == segments.descriptors


def test_memfd_segments_are_sealed_named_and_not_inherited():
    """A file can neither shrink nor grow, carries its name in /proc, and is closed on exec."""
    segments = MemfdSegments("engine-7", make_slabs(1), SystemCalls())
    try:
        (fd,) = segments.descriptors
        for nbytes in (0, 8 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        assert "/memfd:kvmoor:engine-7:0 (deleted)" == str(Path(f"/proc/self/fd/{fd}").readlink())
        assert not os.get_inheritable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    finally:
        segments.close()


def test_memfd_memory_is_allocated_slab_by_slab_before_it_is_mapped():
    """Creating a segment takes no memory; allocating a slab takes exactly its bytes; a mapping shares them."""
    slabs = make_slabs(1, 3 * MIB)
    segments = MemfdSegments("test", slabs, SystemCalls())
    try:
        fd, offset = segments.location(slabs[0])
        assert 0 == os.fstat(fd).st_blocks
        assert segments.allocate(slabs[0], never)
        assert 3 * MIB == os.fstat(fd).st_blocks * 512
        with mmap.mmap(fd, 3 * MIB, offset=offset) as view:
            view[-1] = 1
        assert b"\1" == os.pread(fd, 1, 3 * MIB - 1)
    finally:
        segments.close()


def test_an_allocation_that_fails_half_way_holds_no_memory():
    """When the second 2 MiB of a slab find no room, the first are given back."""

    class TightCalls(SystemCalls):
        def posix_fallocate(self, fd, offset, nbytes):
            if offset:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().posix_fallocate(fd, offset, nbytes)

    slabs = make_slabs(1, 3 * MIB)
    segments = MemfdSegments("test", slabs, TightCalls())
    try:
        with pytest.raises(NoRoomError, match=r"allocating 3\.15 MB of shared host memory failed \(No space left"):
            segments.allocate(slabs[0], never)
        assert 0 == os.fstat(segments.location(slabs[0])[0]).st_blocks
    finally:
        segments.close()
