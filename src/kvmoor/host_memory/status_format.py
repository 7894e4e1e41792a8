"""How the words of a status segment are laid out, and how bytes from elsewhere are checked before they are mapped.

    word  0      magic                              |
          1      format version                     |
          2      bytes of the whole segment         |
          3      number of groups                   |  never change, and lie under the checksum
          4-5    nonce                              |
          6-9    layout fingerprint                 |
          10-13  digest of where the slots are      |
          14     process id of the owner            |
          15     its start time                     |
          16     xxh3_64 of the words above and of the slots of each group
          24     1: open, 2: closed by its owner    |  a cache line that changes
          25     heartbeats so far                  |
          26     CLOCK_MONOTONIC ns of the last one |
          32     slots of each group                   (never change)
          then   published slots of each group
          then   for each group a bit a slot: published
          then   for each group a word a slot: the order that last filled it whole, 0: none

All words are 64 bits in the byte order of the host.
"""

import ctypes
import dataclasses
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from kvmoor.block_key import digest_fields
from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.errors import CorruptDataError, RequestError
from kvmoor.host_memory.arena_plan import GroupPlan
from kvmoor.host_memory.owner_process import check_fixed_size
from kvmoor.host_memory.page_mapping import PageMapping, translate_os_error
from kvmoor.host_memory.process_identity import ProcessCalls

FORMAT_VERSION: Final = 1
NONCE_NBYTES: Final = 16
FINGERPRINT_NBYTES: Final = 32
GEOMETRY_DIGEST_NBYTES: Final = 32
STATE_WORD: Final = 24
HEARTBEATS_WORD: Final = 25
HEARTBEAT_NS_WORD: Final = 26
STATE_OPEN: Final = 1
STATE_CLOSED: Final = 2

_MAGIC: Final = b"kvmoorST"
_FIXED: Final = struct.Struct("=8sQQQ16s32s32sQQ")
_CHECKSUM: Final = struct.Struct("=Q")
_TABLE_WORD: Final = 32
_WORD_NBYTES: Final = 8
_BITS: Final = 64
_MAX_GROUPS: Final = 4096
"""Guessed: models have fewer than ten; it bounds what garbage can make us read."""


@dataclass(frozen=True)
class StatusShape:
    """Say where the words of a segment are, from the number of slots of each group alone."""

    num_slots: tuple[int, ...]

    @property
    def published_word(self) -> int:
        """Return the word with the published slots of group 0; those of the others follow."""
        return _TABLE_WORD + len(self.num_slots)

    @cached_property
    def bitmap_words(self) -> tuple[int, ...]:
        """Return where the bits of each group begin, and where the last ones end."""
        sizes = (-(-count // _BITS) for count in self.num_slots)
        return tuple(accumulate(sizes, initial=self.published_word + len(self.num_slots)))

    @cached_property
    def order_words(self) -> tuple[int, ...]:
        """Return where the words of the slots of each group begin, and where the last ones end."""
        return tuple(accumulate(self.num_slots, initial=self.bitmap_words[-1]))

    @property
    def nbytes(self) -> int:
        """Return the size of the segment: whole pages."""
        return round_up(self.order_words[-1] * _WORD_NBYTES, mmap.PAGESIZE)

    def check_group(self, group: int) -> None:
        """Raise `RequestError` for a group that does not exist."""
        if not 0 <= group < len(self.num_slots):
            raise RequestError(f"group {group} does not exist: the arena has groups 0 to {len(self.num_slots) - 1}")

    def check_slots(self, group: int, slots: ArrayLike) -> NDArray[np.int64]:
        """Return slot numbers as an array. Raises `RequestError` for what is no slot of the group."""
        self.check_group(group)
        numbers = np.asarray(slots)
        if not numbers.size:
            return np.zeros(numbers.shape, np.int64)
        if numbers.dtype.kind not in "iu":
            raise RequestError(f"slots have the type {numbers.dtype}: give whole numbers")
        outside = (numbers < 0) | (numbers >= self.num_slots[group])
        if outside.any():
            raise RequestError(
                f"slot {numbers[outside].flat[0]} of group {group} does not exist: it has slots 0 to "
                f"{self.num_slots[group] - 1}"
            )
        return numbers.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class StatusHeader:
    """Hold what never changes in a segment."""

    nonce: bytes
    layout_fingerprint: bytes
    geometry_digest: bytes
    pid: int
    start_time: int
    shape: StatusShape

    def to_bytes(self) -> bytes:
        """Return the beginning of a new segment."""
        assert len(self.nonce) == NONCE_NBYTES, self.nonce
        assert len(self.layout_fingerprint) == FINGERPRINT_NBYTES, self.layout_fingerprint
        assert len(self.geometry_digest) == GEOMETRY_DIGEST_NBYTES, self.geometry_digest
        fixed = _FIXED.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.shape.nbytes,
            len(self.shape.num_slots),
            self.nonce,
            self.layout_fingerprint,
            self.geometry_digest,
            self.pid,
            self.start_time,
        )
        table = _pack_words(self.shape.num_slots)
        checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fixed + table))
        return (fixed + checksum).ljust(_TABLE_WORD * _WORD_NBYTES, b"\0") + table


def digest_geometry(groups: Sequence[GroupPlan], layout_fingerprint: bytes) -> bytes:
    """Return 32 bytes that change with every number from which the address of a slot is computed.

    Sizes alone do not tell two geometries apart: one slot a slab less may round up to the same files.
    """
    numbers = {
        f"{place}.{field.name}": getattr(group, field.name)
        for place, group in enumerate(groups)
        for field in dataclasses.fields(group)
    }
    return digest_fields({"layout": layout_fingerprint, **numbers})


def read_status_header(fd: int, what: str, calls: ProcessCalls) -> StatusHeader:
    """Read and check what has to hold before a segment is mapped.

    `what` names the segment in messages. Raises `CorruptDataError` for anything but a whole segment of this format,
    and `BrokenError` or `NoRoomError` if it cannot be read.
    """
    try:
        found = calls.fstat(fd)
        check_fixed_size(fd, found, what, calls)
        head = calls.pread(fd, _TABLE_WORD * _WORD_NBYTES, 0)
        if len(head) < _TABLE_WORD * _WORD_NBYTES or not head.startswith(_MAGIC):
            raise CorruptDataError(f"{what} is not a status segment ({found.st_size} bytes): use a new ticket")
        _, version, nbytes, num_groups, nonce, fingerprint, geometry, pid, start_time = _FIXED.unpack_from(head)
        if version != FORMAT_VERSION:
            raise CorruptDataError(
                f"{what} has format {version}, this is format {FORMAT_VERSION}: run one version of kvmoor on this host"
            )
        if not 0 < num_groups <= _MAX_GROUPS:
            raise CorruptDataError(f"{what} claims {num_groups} groups: it is damaged, start its owner again")
        table = calls.pread(fd, num_groups * _WORD_NBYTES, _TABLE_WORD * _WORD_NBYTES)
    except OSError as error:
        raise translate_os_error(error, f"reading {what}", "start its owner again") from error
    (checksum,) = _CHECKSUM.unpack_from(head, _FIXED.size)
    if len(table) < num_groups * _WORD_NBYTES or checksum != xxhash.xxh3_64_intdigest(head[: _FIXED.size] + table):
        raise CorruptDataError(f"{what} does not match its checksum: it is damaged, start its owner again")
    shape = StatusShape(struct.unpack(f"={num_groups}Q", table))
    if not nbytes == shape.nbytes == found.st_size:
        raise CorruptDataError(
            f"{what} has {found.st_size} bytes, its header says {nbytes} and its slots need {shape.nbytes}: "
            "it is damaged, start its owner again"
        )
    return StatusHeader(nonce, fingerprint, geometry, pid, start_time, shape)


class MappedWords:
    """Own the mapping of a segment, as 64-bit words. No finaliser unmaps: only `close` does."""

    def __init__(self, fd: int, nbytes: int, protection: int, calls: ProcessCalls) -> None:
        self._nbytes = nbytes
        self._calls = calls
        doing = f"mapping {format_nbytes(nbytes)} of a status segment"
        try:
            self._address = calls.mmap(0, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        except OSError as error:
            raise translate_os_error(error, doing, "raise vm.max_map_count or the address-space limit") from error
        try:
            pages = PageMapping(calls)
            pages.advise_no_dump(self._address, nbytes)
            pages.advise_no_fork(self._address, nbytes)
        except BaseException:
            self.close()
            raise

    def view(self, *, writable: bool = False) -> NDArray[np.uint64]:
        """Return the words; valid until `close`."""
        pages = (ctypes.c_uint8 * self._nbytes).from_address(self._address)
        words = np.frombuffer(memoryview(pages), np.uint64)
        words.flags.writeable = writable
        return words

    def forget(self) -> None:
        """Give up a mapping that a forked child did not inherit: something else may lie at its address."""
        self._address = 0

    def close(self) -> None:
        """Unmap. Closes twice without harm."""
        if self._address:
            try:
                self._calls.munmap(self._address, self._nbytes)
            except OSError as error:
                raise translate_os_error(error, "unmapping a status segment", "raise vm.max_map_count") from error
            self._address = 0


def _pack_words(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"={len(numbers)}Q", *numbers)


def bit_masks(first: int, num_slots: int) -> tuple[int, NDArray[np.uint64]]:
    """Return the word of a bitmap where a range of slots begins, and a mask for each word of it."""
    masks = np.zeros(-(-(first % _BITS + num_slots) // _BITS), np.uint64)
    masks[:] = ~np.uint64(0)
    if masks.size:
        masks[0] &= ~np.uint64(0) << np.uint64(first % _BITS)
        masks[-1] &= ~np.uint64(0) >> np.uint64(-(first + num_slots) % _BITS)
    return first // _BITS, masks
