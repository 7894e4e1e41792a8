"""What others read in a status segment, and how they find segments on this host."""

import mmap
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvmoor.errors import BrokenError, ClosedError, CorruptDataError, KvmoorError
from kvmoor.host_memory.owner_process import close_descriptor
from kvmoor.host_memory.process_identity import ProcessCalls, descends_from, read_start_time
from kvmoor.host_memory.status_format import (
    HEARTBEAT_NS_WORD,
    HEARTBEATS_WORD,
    STATE_CLOSED,
    STATE_WORD,
    MappedWords,
    StatusHeader,
    read_status_header,
)
from kvmoor.host_memory.status_segment import NAME_PREFIX
from kvmoor.process_end import register

_BITS = np.uint64(64)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Tell how often the owner reported progress, and how long ago it last did."""

    count: int
    age_s: float


class StatusReader:
    """Read the status segment of another process: map it read-only, answer questions, unmap it.

    `borrowed_fd` is needed by the constructor only, and `what` names the segment in messages. Any thread may call any
    method. Raises `CorruptDataError` for what is not a whole status segment; nothing is mapped before that is checked.
    """

    def __init__(
        self, borrowed_fd: int, *, what: str = "the status segment", calls: ProcessCalls | None = None
    ) -> None:
        self._what = what
        # Guards `_view`: nobody may read a word that is being unmapped.
        self._lock = threading.Lock()
        self._view: NDArray[np.uint64] | None = None
        calls = calls or ProcessCalls()
        self._header = read_status_header(borrowed_fd, what, calls)
        self._shape = self._header.shape
        self._mapping = MappedWords(borrowed_fd, self._shape.nbytes, mmap.PROT_READ, calls)
        self._view = self._mapping.view()
        register(self, forked=self.forked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_view", None) is not None:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<StatusReader of {self._what}{' closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Say whether the reader was closed."""
        return self._view is None

    @property
    def header(self) -> StatusHeader:
        """Return what never changes: nonce, layout fingerprint, geometry, owner."""
        return self._header

    @property
    def num_slots(self) -> tuple[int, ...]:
        """Return the planned slots of each group."""
        return self._shape.num_slots

    def num_published(self, group: int) -> int:
        """Return how many slots of a group can be used. Raises `CorruptDataError` for a count that cannot be."""
        self._shape.check_group(group)
        with self._lock:
            published = int(self._open_view()[self._shape.published_word + group])
        if published > self.num_slots[group]:
            raise CorruptDataError(
                f"{self._what} says {published} of {self.num_slots[group]} slots of group {group} are published: "
                "it is damaged, start its owner again"
            )
        return published

    def are_published(self, group: int, slots: ArrayLike) -> NDArray[np.bool_]:
        """Say which slots can be used, in the shape of `slots`."""
        numbers = self._shape.check_slots(group, slots).astype(np.uint64)
        places = (numbers // _BITS).astype(np.int64) + self._shape.bitmap_words[group]
        with self._lock:
            words = self._open_view()[places]
        published: NDArray[np.bool_] = (words >> (numbers % _BITS)) & np.uint64(1) != 0
        return published

    def order_ids(self, group: int, slots: ArrayLike) -> NDArray[np.uint64]:
        """Return for each slot the order that last filled it whole, uint64 in the shape of `slots`; 0: none."""
        words = self._shape.check_slots(group, slots) + self._shape.order_words[group]
        with self._lock:
            return self._open_view()[words]

    def heartbeat(self) -> Heartbeat:
        """Return how often the owner reported progress, and how long ago it last did."""
        with self._lock:
            view = self._open_view()
            count, beat_ns = int(view[HEARTBEATS_WORD]), int(view[HEARTBEAT_NS_WORD])
        return Heartbeat(count, max(0, time.monotonic_ns() - beat_ns) / 1e9)

    def is_stale(self, timeout_s: float) -> bool:
        """Say whether the last heartbeat is older than this. That means slow, not dead: only a pidfd proves death."""
        return self.heartbeat().age_s > timeout_s

    def is_closed_by_owner(self) -> bool:
        """Say whether the owner closed its arena: nothing more comes."""
        with self._lock:
            return int(self._open_view()[STATE_WORD]) == STATE_CLOSED

    def forked(self) -> None:
        """Let go in a forked child, which did not inherit the mapping."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._view = None
        self._mapping.forget()

    def close(self) -> None:
        """Unmap. Closes twice without harm."""
        with self._lock:
            self._view = None
            self._mapping.close()

    def _open_view(self) -> NDArray[np.uint64]:
        if self._view is None:
            raise ClosedError(f"{self!r}: it cannot be read any more")
        return self._view


@dataclass(frozen=True, slots=True)
class FoundStatusSegment:
    """Name a status segment of a living process on this host."""

    engine_id: str
    rank: int
    pid: int
    descriptor: int

    def descends_from(self, pid: int, calls: ProcessCalls | None = None) -> bool:
        """Say whether its process is `pid` or was started by that one, directly or not."""
        return descends_from(self.pid, pid, calls or ProcessCalls())

    def open(self, calls: ProcessCalls | None = None) -> StatusReader:
        """Read it. Raises `BrokenError` if its owner is gone, and what `StatusReader` raises."""
        what = f"the status segment {NAME_PREFIX}{self.engine_id}:{self.rank} of process {self.pid}"
        calls = calls or ProcessCalls()
        with ExitStack() as opened:
            try:
                fd = calls.open_read_only(f"/proc/{self.pid}/fd/{self.descriptor}")
                opened.callback(close_descriptor, fd, calls)
                start_time = read_start_time(self.pid, calls)
            except OSError as error:
                raise BrokenError(f"{what} is gone ({error.strerror or error}): look for it again") from error
            reader = StatusReader(fd, what=what, calls=calls)
            # A forked child holds a copy of the descriptor and is not the owner.
            if (reader.header.pid, reader.header.start_time) != (self.pid, start_time):
                reader.close()
                raise BrokenError(f"{what} belongs to process {reader.header.pid}: look for it again")
            return reader


def find_status_segments(engine_id: str | None = None, calls: ProcessCalls | None = None) -> list[FoundStatusSegment]:
    """Return the status segments of every living process of this user, or those of one engine.

    Looks at each descriptor of each process, so it is for reports, not for a loop. Processes may come and go meanwhile.
    """
    calls = calls or ProcessCalls()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if calls.stat(str(process)).st_uid != os.geteuid():
                continue
            candidates = [
                FoundStatusSegment(engine, rank, int(process.name), int(descriptor.name))
                for descriptor in (process / "fd").iterdir()
                for engine, rank in _read_name(str(descriptor), calls)
                if engine_id in (None, engine)
            ]
        except OSError:  # it ended, or the kernel does not let us look
            continue
        found += [candidate for candidate in candidates if _is_status_segment(candidate, calls)]
    return sorted(found, key=lambda segment: (segment.engine_id, segment.rank, segment.pid))


def _read_name(path: str, calls: ProcessCalls) -> Iterator[tuple[str, int]]:
    try:
        target = calls.read_link(path)
    except OSError:  # closed meanwhile
        return
    prefix, suffix = f"/memfd:{NAME_PREFIX}", " (deleted)"
    if target.startswith(prefix) and target.endswith(suffix):
        engine, _, rank = target[len(prefix) : -len(suffix)].rpartition(":")
        if engine and rank.isdecimal():
            yield engine, int(rank)


def _is_status_segment(candidate: FoundStatusSegment, calls: ProcessCalls) -> bool:
    # The memfds of an arena have names of the same form; only what lies in them tells.
    try:
        candidate.open(calls).close()
    except KvmoorError:
        return False
    return True
