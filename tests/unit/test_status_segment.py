import contextlib
import dataclasses
import errno
import fcntl
import gc
import mmap
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmoor.errors import BrokenError, ClosedError, CorruptDataError, KvmoorError, RequestError, SettingsError
from kvmoor.host_memory import status_reader
from kvmoor.host_memory.arena_plan import GroupPlan
from kvmoor.host_memory.process_identity import ProcessCalls
from kvmoor.host_memory.status_format import StatusShape, bit_masks, digest_geometry
from kvmoor.host_memory.status_reader import StatusReader, find_status_segments
from kvmoor.host_memory.status_segment import StatusSegment
from kvmoor.transfer_messages import SlotRange
from shared_arena import LAYOUT, PLAN, sharing_owner

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
NUM_SLOTS = (40, 80, 80)


@pytest.fixture
def segment():
    with StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=3) as segment:
        yield segment


@pytest.fixture
def reader(segment):
    with StatusReader(segment.shared_file.descriptor) as reader:
        yield reader


@contextlib.contextmanager
def memfd_with(content, *, nbytes=None, seals=SEALS):
    fd = os.memfd_create("garbage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, content, 0)
        if nbytes is not None:
            os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def content_of(segment):
    return os.pread(segment.shared_file.descriptor, segment.shared_file.nbytes, 0)


def test_a_new_segment_vouches_for_nothing(segment, reader):
    """Before the owner says something no slot is published, none is filled, and the heartbeat is fresh."""
    assert NUM_SLOTS == reader.num_slots == segment.num_slots
    for group, count in enumerate(NUM_SLOTS):
        slots = np.arange(count)
        assert 0 == reader.num_published(group)
        assert not reader.are_published(group, slots).any()
        assert not reader.order_ids(group, slots).any()
    assert 1 == reader.heartbeat().count
    assert not reader.is_closed_by_owner()


def test_the_header_says_whose_segment_it_is(segment, reader):
    """Nonce, layout fingerprint, geometry and owner reach the reader, and no two segments have one nonce."""
    assert (segment.nonce, LAYOUT.fingerprint) == (reader.header.nonce, reader.header.layout_fingerprint)
    assert digest_geometry(PLAN.groups, LAYOUT.fingerprint) == reader.header.geometry_digest == segment.geometry_digest
    assert (os.getpid(), segment.owner.start_time) == (reader.header.pid, reader.header.start_time)
    with StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=3) as other:
        assert segment.nonce != other.nonce


def test_only_the_owner_can_write(segment):
    """The kernel refuses every other way to change the segment, also to its owner; nothing of it has a name."""
    fd = segment.shared_file.descriptor
    assert "/memfd:kvmoor:engine:3 (deleted)" == str(Path(f"/proc/self/fd/{fd}").readlink())
    assert not os.get_inheritable(fd)
    for change in (
        lambda: os.ftruncate(fd, 4096 * 100),
        lambda: os.ftruncate(fd, 0),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()


class OldKernel(ProcessCalls):
    """Knows the seals of Linux before 5.1 only."""

    def __init__(self):
        self.asked = []

    def add_seals(self, fd, seals):
        self.asked.append(seals)
        if seals & 0x10:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().add_seals(fd, seals)


def test_an_older_kernel_seals_what_it_can():
    """Where the kernel cannot forbid later writes the size is fixed all the same, and readers accept the segment."""
    calls = OldKernel()
    with StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=0, calls=calls) as segment:
        assert [SEALS | 0x10, SEALS] == calls.asked
        fd = segment.shared_file.descriptor
        assert SEALS == fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        with StatusReader(fd) as reader:
            segment.begin_fill(0, [1])
            segment.complete_fill(0, [1], 5)
            assert {1: 5} == filled(reader, 0)
        for nbytes in (0, 4096 * 100):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_a_refused_seal_names_what_helps(number):
    """Without a fixed size there is no segment; the message speaks of seals, and not of open files or memory."""

    class Refusing(ProcessCalls):
        def add_seals(self, fd, seals):
            raise OSError(number, os.strerror(number))

    with pytest.raises(BrokenError, match="F_ADD_SEALS") as raised:
        StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=0, calls=Refusing())
    assert "sealing the status segment kvmoor:engine:0" in str(raised.value)
    assert "ulimit" not in str(raised.value)
    assert number == raised.value.__cause__.errno


@pytest.mark.parametrize("group", range(len(PLAN.groups)))
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GroupPlan)])
def test_the_digest_of_the_geometry_tells_every_number(group, name):
    """A plan that differs in one number of one group has another digest, and so has one for another layout."""
    groups = list(PLAN.groups)
    groups[group] = replace(groups[group], **{name: getattr(groups[group], name) + 1})
    digest = digest_geometry(PLAN.groups, LAYOUT.fingerprint)
    assert digest == digest_geometry(tuple(PLAN.groups), LAYOUT.fingerprint)
    assert len({digest, digest_geometry(groups, LAYOUT.fingerprint), digest_geometry(PLAN.groups, bytes(32))}) == 3


def test_words_are_aligned_and_whole(segment, reader):
    """Each word is 8 bytes on an 8-byte boundary, so that one store writes it."""
    view = reader._mapping.view()
    assert (8, 0, False) == (view.itemsize, view.ctypes.data % 8, view.flags.writeable)
    segment.begin_fill(1, [5])
    segment.complete_fill(1, [5], 2**64 - 1)
    assert [2**64 - 1] == reader.order_ids(1, [5]).tolist()


def test_a_slot_vouches_only_between_completion_and_the_next_copy(segment, reader):
    """An order id appears with completion and goes before the next copy, and no other slot changes (decision 6)."""
    segment.begin_fill(0, np.array([3, 7]))
    assert [0, 0] == reader.order_ids(0, [3, 7]).tolist()
    segment.complete_fill(0, (3, 7), 41)
    assert {3: 41, 7: 41} == filled(reader, 0)
    segment.begin_fill(0, [7])
    assert {3: 41} == filled(reader, 0)
    segment.complete_fill(0, [7], 42)
    assert {3: 41, 7: 42} == filled(reader, 0)
    assert {} == filled(reader, 1)


def filled(reader, group):
    ids = reader.order_ids(group, np.arange(reader.num_slots[group]))
    return {int(slot): int(ids[slot]) for slot in np.flatnonzero(ids)}


def test_a_slot_is_not_completed_over_another_order(segment, reader):
    """Completing a slot that still vouches for an older order is refused: its copy was never announced."""
    segment.begin_fill(0, [1, 2])
    segment.complete_fill(0, [1], 5)
    with pytest.raises(RequestError, match="slot 1 of group 0 vouches for another order"):
        segment.complete_fill(0, [2, 1], 6)
    assert {1: 5} == filled(reader, 0)


@pytest.mark.parametrize("order_id", [0, -1, 2**64])
def test_an_order_id_is_never_zero(segment, order_id):
    """0 says that nothing is there, so no order may have that id; ids fit a word."""
    segment.begin_fill(0, [1])
    with pytest.raises(RequestError, match="order id"):
        segment.complete_fill(0, [1], order_id)


@pytest.mark.parametrize(
    ("group", "slots"), [(3, [0]), (-1, [0]), (0, [40]), (0, [-1]), (1, [[0, 80]]), (0, [0.5]), (0, [2**70])]
)
def test_what_does_not_exist_is_refused(segment, reader, group, slots):
    """A group or a slot outside of the arena is the caller's mistake, on either side, and changes nothing."""
    before = content_of(segment)
    for call in (
        lambda: segment.begin_fill(group, slots),
        lambda: segment.complete_fill(group, slots, 1),
        lambda: reader.order_ids(group, slots),
        lambda: reader.are_published(group, slots),
    ):
        with pytest.raises(RequestError):
            call()
    assert before == content_of(segment)


def test_no_slots_are_fine(segment, reader):
    """An empty list of slots is an answer on both sides, also a published range without slots."""
    segment.begin_fill(0, [])
    segment.complete_fill(0, (), 1)
    segment.publish_slots(SlotRange(0, 5, 0))
    assert (0, 0) == (reader.order_ids(0, []).size, reader.num_published(0))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 79), st.integers(0, 80)), max_size=12))
def test_published_slots_are_those_that_were_published(ranges):
    """Whatever ranges are published, in any order, the reader sees these slots and their number; none twice."""
    expected = [np.zeros(count, bool) for count in NUM_SLOTS]
    with (
        StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=0) as segment,
        StatusReader(segment.shared_file.descriptor) as reader,
    ):
        for group, first, count in ranges:
            if first + count > NUM_SLOTS[group] or first >= NUM_SLOTS[group] or expected[group][first:][:count].any():
                with pytest.raises(RequestError):
                    segment.publish_slots(SlotRange(group, first, count))
            else:
                segment.publish_slots(SlotRange(group, first, count))
                expected[group][first : first + count] = True
        for group, bits in enumerate(expected):
            assert bits.tolist() == reader.are_published(group, np.arange(bits.size)).tolist()
            assert bits.sum() == reader.num_published(group)


@given(st.integers(0, 300), st.integers(0, 300))
def test_masks_cover_exactly_their_slots(first, num_slots):
    """The bits of a range of slots are set wherever it begins and ends within its words."""
    word, masks = bit_masks(first, num_slots)
    value = sum(int(mask) << 64 * (word + number) for number, mask in enumerate(masks))
    assert ((1 << num_slots) - 1) << first == value


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=9))
def test_the_parts_of_a_segment_do_not_overlap(num_slots):
    """Counts, bits and order ids of any number of groups lie one behind the other, within the size."""
    shape = StatusShape(tuple(num_slots))
    ends = [shape.published_word + len(num_slots), *shape.bitmap_words, *shape.order_words]
    assert sorted(ends) == ends
    assert all(
        64 * (b - a) >= n for a, b, n in zip(shape.bitmap_words, shape.bitmap_words[1:], num_slots, strict=False)
    )
    assert num_slots == [b - a for a, b in zip(shape.order_words, shape.order_words[1:], strict=False)]
    assert 8 * shape.order_words[-1] <= shape.nbytes < 8 * shape.order_words[-1] + 4096


def test_a_heartbeat_grows_old(segment, reader, monkeypatch):
    """The age of the last heartbeat decides what is stale, and a new one makes it fresh."""
    now = time.monotonic_ns()
    monkeypatch.setattr(status_reader.time, "monotonic_ns", lambda: now + 9_000_000_000)
    assert 8 < reader.heartbeat().age_s < 10
    assert (True, False) == (reader.is_stale(5.0), reader.is_stale(11.0))
    segment.beat()  # under the same clock
    assert (2, 0.0) == (reader.heartbeat().count, reader.heartbeat().age_s)
    assert not reader.is_stale(5.0)


def test_closing_tells_readers(segment, reader):
    """After the owner closed, readers know, still see what was whole, and the owner can write nothing."""
    segment.begin_fill(0, [1])
    segment.complete_fill(0, [1], 5)
    segment.close()
    segment.close()
    assert reader.is_closed_by_owner()
    assert {1: 5} == filled(reader, 0)
    for call in (
        lambda: segment.begin_fill(0, [1]),
        lambda: segment.complete_fill(0, [1], 6),
        lambda: segment.publish_slots(SlotRange(0, 0, 1)),
        segment.beat,
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_closed_reader_answers_nothing(reader):
    """No question reaches memory that is not mapped any more."""
    reader.close()
    reader.close()
    for call in (
        lambda: reader.num_published(0),
        lambda: reader.are_published(0, [1]),
        lambda: reader.order_ids(0, [1]),
        reader.heartbeat,
        reader.is_closed_by_owner,
    ):
        with pytest.raises(ClosedError):
            call()


def test_what_nobody_closed_is_reported():
    """A forgotten segment or reader is a warning, not silence."""
    segment = StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=0)
    reader = StatusReader(segment.shared_file.descriptor)
    mapping, closing = reader._mapping, segment._closing
    with warnings.catch_warnings(record=True, action="always") as warned:
        del reader, segment
        gc.collect()
    assert ["StatusReader", "StatusSegment"] == sorted(str(warning.message).split()[0][1:] for warning in warned)
    mapping.close()
    closing.close()


@pytest.mark.parametrize(("engine_id", "rank"), [("", 0), ("a\0b", 0), ("x" * 250, 0), ("engine", -1)])
def test_a_name_that_cannot_be_used_is_refused(engine_id, rank):
    """The engine's id and the rank become the name of the memfd, so they have to fit one."""
    with pytest.raises(SettingsError, match="engine_id"):
        StatusSegment(PLAN, LAYOUT, engine_id=engine_id, rank=rank)


@given(st.binary(max_size=400), st.integers(0, 3 * 4096))
def test_garbage_is_refused(content, nbytes):
    """Random bytes of any length are corrupt data: no crash, no mapping, no SIGBUS."""
    with memfd_with(content, nbytes=nbytes) as fd, pytest.raises(CorruptDataError):
        StatusReader(fd)


def test_every_truncation_is_refused(segment):
    """A segment that ends early is corrupt data, wherever it ends, and so is one that goes on."""
    content = content_of(segment)
    for nbytes in (0, 1, 8, 255, 256, 257, 279, 280, 4095, len(content) - 4096, len(content) - 1, len(content) + 4096):
        with memfd_with(content[:nbytes], nbytes=nbytes) as fd, pytest.raises(CorruptDataError):
            StatusReader(fd)


@given(st.integers(0, 8 * 280 - 1))
def test_one_flipped_bit_does_no_harm(bit):
    """A flipped bit in the header is corrupt data; one in a word that changes anyway is read as it is or refused."""
    with StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=0) as segment:
        content = bytearray(content_of(segment))
    content[bit // 8] ^= 1 << bit % 8
    fixed = bit // 8 < 17 * 8 or bit // 8 >= 32 * 8
    with memfd_with(bytes(content)) as fd:
        if fixed:
            with pytest.raises(CorruptDataError):
                StatusReader(fd)
        else:
            with StatusReader(fd) as reader:
                ask_everything(reader)


@given(st.binary(min_size=200, max_size=200), st.integers(280, 4096 - 200))
def test_wild_words_do_no_harm(garbage, offset):
    """Behind a whole header any bytes may stand: every question gets an answer or corrupt data."""
    with StatusSegment(PLAN, LAYOUT, engine_id="engine", rank=0) as segment:
        content = bytearray(content_of(segment))
    content[offset : offset + len(garbage)] = garbage
    with memfd_with(bytes(content)) as fd, StatusReader(fd) as reader:
        ask_everything(reader)


def ask_everything(reader):
    reader.heartbeat()
    reader.is_stale(1.0)
    reader.is_closed_by_owner()
    for group, count in enumerate(reader.num_slots):
        assert count == reader.order_ids(group, np.arange(count)).size
        assert count == reader.are_published(group, np.arange(count)).size
        with contextlib.suppress(CorruptDataError):
            assert 0 <= reader.num_published(group) <= count


def test_a_count_that_cannot_be_is_corrupt(segment):
    """More published slots than slots are damage, and said so."""
    content = bytearray(content_of(segment))
    content[35 * 8] = 41
    with (
        memfd_with(bytes(content)) as fd,
        StatusReader(fd) as reader,
        pytest.raises(CorruptDataError, match="41 of 40 slots of group 0"),
    ):
        reader.num_published(0)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_a_segment_that_could_change_its_size_is_refused(segment, seals):
    """A file that may shrink under a mapping would kill the reader, so it is never mapped."""
    with (
        memfd_with(content_of(segment), seals=seals) as fd,
        pytest.raises(CorruptDataError, match="not sealed against shrinking and growing"),
    ):
        StatusReader(fd)


def test_a_foreign_format_is_named(segment):
    """A segment of a later format is refused with its number."""
    content = bytearray(content_of(segment))
    content[8] = 2
    with memfd_with(bytes(content)) as fd, pytest.raises(CorruptDataError, match="has format 2, this is format 1"):
        StatusReader(fd)


def test_what_is_no_memfd_is_refused(tmp_path):
    """Pipes, devices, folders and files on disk are not status segments."""
    (tmp_path / "file").write_bytes(b"kvmoorST" * 1000)
    read_end, write_end = os.pipe()
    descriptors = [read_end, write_end, os.open(tmp_path, os.O_RDONLY)]
    descriptors += [os.open(path, os.O_RDONLY) for path in (tmp_path / "file", "/dev/null", "/dev/zero")]
    try:
        for fd in descriptors:
            with pytest.raises(CorruptDataError):
                StatusReader(fd)
    finally:
        for fd in descriptors:
            os.close(fd)


def test_segments_are_found_by_name_and_content():
    """The finder lists the segments of an engine; files with such a name that are none are not listed."""
    with sharing_owner("first") as owner, StatusSegment(PLAN, LAYOUT, engine_id="a:b", rank=11) as second:
        decoy = os.memfd_create("kvmoor:first:7", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            (found,) = find_status_segments("first")
            assert ("first", 0, os.getpid()) == (found.engine_id, found.rank, found.pid)
            assert owner.status.shared_file.descriptor == found.descriptor
            (found,) = find_status_segments("a:b")
            assert 11 == found.rank
            with found.open() as reader:
                assert second.nonce == reader.header.nonce
            names = {(segment.engine_id, segment.rank) for segment in find_status_segments()}
            assert {("first", 0), ("a:b", 11)} <= names
            assert not any(engine == "shared" for engine, _ in names)  # the arena's own files
            assert [] == find_status_segments("third")
        finally:
            os.close(decoy)


@pytest.mark.parametrize("kind", ["stat", "read_link", "open_read_only", "read_text", "fstat", "get_seals", "pread"])
def test_processes_may_vanish_while_segments_are_looked_for(segment, kind):
    """Whatever cannot be looked at any more is not listed; the search itself does not fail."""

    class Vanishing(ProcessCalls):
        pass

    def fail(self, *args):
        raise ProcessLookupError(3, "No such process")

    setattr(Vanishing, kind, fail)
    assert [] == find_status_segments("engine", Vanishing())


def test_a_found_segment_may_be_gone_when_it_is_opened(segment):
    """Opening what was found a moment ago says that it is gone, or that it is another process's."""
    (found,) = find_status_segments("engine")
    with pytest.raises(BrokenError, match="look for it again"):
        replace(found, descriptor=10**6).open()
    with pytest.raises(KvmoorError):
        replace(found, descriptor=0).open()


def test_a_forked_child_lets_go_of_its_parents_segment(segment, reader):
    """In a child the objects are closed, nothing of the parent changes, and the mapping is not there."""
    address = segment._mapping._address
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            segment.forked()
            reader.forked()
            inherited = any(
                int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
                for line in Path("/proc/self/maps").read_text().splitlines()
            )
            segment.close()
            reader.close()
            if segment.closed and reader.closed and not inherited:
                code = 0
        os._exit(code)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not reader.is_closed_by_owner()
    segment.beat()
