"""What the owner of an arena tells other processes of its host: a small memfd that only it can write.

Protocol. One process writes, any number read. A word is written in one 64-bit store, so a reader sees the old or the
new value, never a mixture; two words are two stores.

- A slot's word is 0 before the first byte of a copy into the slot is written, and becomes the id of the order only
  after every byte is proven to be there. Yesterday's order never vouches for what today's is writing.
- A reader that copies without an order of the owner's engine reads the words, copies, and reads them again: the bytes
  are whole if a word is not 0 and has not changed. The words of an ended owner do not change any more.
- A slot is published before it is counted, and never taken back.
- A heartbeat that stopped means slow, not dead: no new orders, and what is READY stays readable.

On CPUs that reorder stores, the lock taken here for every write, and the one that hands the copy to its thread, put the
stores of words and of bytes into this order.
"""

import errno
import mmap
import os
import secrets
import threading
import time
import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvmoor.block_layout import BlockLayout
from kvmoor.byte_sizes import format_nbytes
from kvmoor.errors import ClosedError, RequestError, SettingsError
from kvmoor.host_memory.arena_plan import ArenaPlan
from kvmoor.host_memory.owner_process import FIXED_SIZE_SEALS, SharedFile, close_descriptor, describe_shared_file
from kvmoor.host_memory.page_mapping import translate_os_error
from kvmoor.host_memory.process_identity import ProcessCalls, ProcessIdentity, identify_this_process
from kvmoor.host_memory.status_format import (
    HEARTBEAT_NS_WORD,
    HEARTBEATS_WORD,
    NONCE_NBYTES,
    STATE_CLOSED,
    STATE_OPEN,
    STATE_WORD,
    MappedWords,
    StatusHeader,
    StatusShape,
    bit_masks,
    digest_geometry,
)
from kvmoor.process_end import register
from kvmoor.transfer_messages import OrderId, SlotRange

NAME_PREFIX: Final = "kvmoor:"
_MAX_NAME_NBYTES: Final = 249
"""What the kernel takes for a memfd."""
_SEAL_FUTURE_WRITE: Final = 0x10  # fcntl has it from Python 3.13 on, and the kernel from 5.1 on
_MAX_ORDER_ID: Final = 2**64 - 1


class StatusSegment:
    """Own the status segment of one arena: create it, keep its words true, close it.

    It belongs to the process that owns the arena, whether the arena itself is shared or not. The memfd is called
    ``kvmoor:<engine_id>:<rank>``, has a fixed size, and cannot be written through any other mapping or descriptor.
    Kernels before Linux 5.1 cannot forbid that last thing: there a process of the same user that opens the memfd for
    writing can make it lie. Readers of ours never do, and no reader can crash on it, because its size is fixed anyway.

    Any thread may call any method. Raises `SettingsError` for a name that cannot be used, `NoRoomError` and
    `BrokenError` for what the system refuses; a constructor that fails leaves nothing behind.
    """

    def __init__(
        self, plan: ArenaPlan, layout: BlockLayout, *, engine_id: str, rank: int, calls: ProcessCalls | None = None
    ) -> None:
        self._name = f"{NAME_PREFIX}{engine_id}:{rank}"
        if not engine_id or "\0" in engine_id or rank < 0 or len(self._name.encode()) > _MAX_NAME_NBYTES:
            raise SettingsError(
                f"engine_id is {engine_id!r} and rank {rank}: give text of 1 to 200 bytes, and a rank from 0"
            )
        self._calls = calls or ProcessCalls()
        self._identity = identify_this_process(self._calls)
        self._shape = StatusShape(tuple(group.num_slots for group in plan.groups))
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._layout_fingerprint = layout.fingerprint
        self._geometry_digest = digest_geometry(plan.groups, layout.fingerprint)
        # Guards `_view`: nobody may store to a word that is being unmapped.
        self._lock = threading.Lock()
        self._view: NDArray[np.uint64] | None = None
        header = StatusHeader(
            self._nonce,
            self._layout_fingerprint,
            self._geometry_digest,
            self._identity.pid,
            self._identity.start_time,
            self._shape,
        )
        with ExitStack() as opened:
            self._fd = self._create(opened, header.to_bytes())
            self._file = describe_shared_file(self._fd, self._calls)
            register(self, forked=self.forked)
            self._closing = opened.pop_all()

    def _create(self, opened: ExitStack, head: bytes) -> int:
        nbytes = self._shape.nbytes
        try:
            fd = self._calls.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.callback(close_descriptor, fd, self._calls)
            self._calls.ftruncate(fd, nbytes)
            self._calls.posix_fallocate(fd, 0, nbytes)
            # Whoever finds a sealed segment finds all of it: the seals come last.
            self._calls.pwrite(fd, head, 0)
            self._mapping = MappedWords(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, self._calls)
            opened.callback(self._mapping.close)
            self._view = self._mapping.view(writable=True)
            self._view[STATE_WORD] = STATE_OPEN
            self._store_heartbeat(self._view)
            self._seal(fd)
        except OSError as error:
            raise translate_os_error(
                error,
                f"creating the status segment {self._name} of {format_nbytes(nbytes)}",
                "raise the limit of open files (ulimit -n), or free memory",
            ) from error
        return fd

    def _seal(self, fd: int) -> None:
        """Forbid that the size changes, and where the kernel knows how, that anybody else writes."""
        try:
            try:
                self._calls.add_seals(fd, FIXED_SIZE_SEALS | _SEAL_FUTURE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._calls.add_seals(fd, FIXED_SIZE_SEALS)
        except OSError as error:
            raise translate_os_error(
                error,
                f"sealing the status segment {self._name}",
                "let the sandbox or the seccomp profile of the container allow fcntl with F_ADD_SEALS",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closing", None) is not None and not self.closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<StatusSegment {self._name!r}{' closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Say whether the segment was closed."""
        return self._view is None

    @property
    def name(self) -> str:
        """Return the name of the memfd."""
        return self._name

    @property
    def nonce(self) -> bytes:
        """Return the random bytes that tell this segment from every other."""
        return self._nonce

    @property
    def layout_fingerprint(self) -> bytes:
        """Return the fingerprint of the layout whose blocks the arena holds."""
        return self._layout_fingerprint

    @property
    def geometry_digest(self) -> bytes:
        """Return the digest of where the slots of the arena are (`digest_geometry`)."""
        return self._geometry_digest

    @property
    def owner(self) -> ProcessIdentity:
        """Return who created the segment."""
        return self._identity

    @property
    def num_slots(self) -> tuple[int, ...]:
        """Return the planned slots of each group."""
        return self._shape.num_slots

    @property
    def shared_file(self) -> SharedFile:
        """Return how other processes find the segment."""
        return self._file

    def publish_slots(self, slots: SlotRange) -> None:
        """Tell that slots became usable. Raises `RequestError` for slots that do not exist or are published already."""
        self._shape.check_slots(slots.group, [slots.first, slots.first + max(1, slots.num_slots) - 1])
        word, masks = bit_masks(slots.first, slots.num_slots)
        begin = self._shape.bitmap_words[slots.group] + word
        with self._lock:
            view = self._open_view()
            bits = view[begin : begin + masks.size]
            if (bits & masks).any():
                raise RequestError(f"{slots} is published already, all or in part: publish each slot once")
            bits |= masks
            view[self._shape.published_word + slots.group] += np.uint64(slots.num_slots)

    def begin_fill(self, group: int, slots: ArrayLike) -> None:
        """Withdraw what slots hold. Call it before anything may write into them."""
        words = self._shape.check_slots(group, slots) + self._shape.order_words[group]
        with self._lock:
            self._open_view()[words] = 0

    def complete_fill(self, group: int, slots: ArrayLike, order_id: OrderId) -> None:
        """Tell that an order filled slots whole. Call it only once that is proven.

        Raises `RequestError` for an id that is not positive, and for slots of which `begin_fill` was not told.
        """
        if not 0 < order_id <= _MAX_ORDER_ID:
            raise RequestError(f"an order id is {order_id}: give 1 to 2**64 - 1, because 0 says that nothing is there")
        numbers = self._shape.check_slots(group, slots)
        words = numbers + self._shape.order_words[group]
        with self._lock:
            view = self._open_view()
            if (held := view[words] != 0).any():
                raise RequestError(
                    f"slot {numbers[held].flat[0]} of group {group} vouches for another order: call begin_fill first"
                )
            view[words] = order_id

    def beat(self) -> None:
        """Tell that the owner makes progress."""
        with self._lock:
            self._store_heartbeat(self._open_view())

    def forked(self) -> None:
        """Let go in a forked child: the segment is its parent's. The mapping was not inherited."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._view = None
        self._mapping.forget()
        self._closing.close()

    def close(self) -> bool:
        """Tell readers that no more comes, unmap, close, and return True. Closes twice without harm."""
        with self._lock:
            if self._view is not None:
                self._view[STATE_WORD] = STATE_CLOSED
                self._view = None
            self._closing.close()
        return True

    def _open_view(self) -> NDArray[np.uint64]:
        if self._view is None:
            raise ClosedError(f"{self!r}: it cannot be written any more")
        return self._view

    @staticmethod
    def _store_heartbeat(view: NDArray[np.uint64]) -> None:
        view[HEARTBEAT_NS_WORD] = time.monotonic_ns()
        view[HEARTBEATS_WORD] += np.uint64(1)
