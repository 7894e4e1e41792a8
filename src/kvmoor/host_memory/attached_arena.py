"""The arena of another process of this host, for reading.

A joiner creates nothing and waits for nobody. Everything in the ticket is checked against the kernel and against the
status segment before a byte is mapped, and the owner is proven to live behind all of it.
"""

import logging
import mmap
import threading
import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvmoor.block_layout import BlockLayout
from kvmoor.byte_sizes import format_nbytes, round_up
from kvmoor.errors import BrokenError, ClosedError, CorruptDataError, KvmoorError, RequestError, SettingsError
from kvmoor.host_memory.arena import CLOSE_TIMEOUT_S
from kvmoor.host_memory.arena_plan import SLAB_ALIGNMENT, ArenaPlan
from kvmoor.host_memory.arena_state import ArenaState
from kvmoor.host_memory.owner_process import OwnerProcess, close_descriptor
from kvmoor.host_memory.page_mapping import PageMapping, translate_os_error
from kvmoor.host_memory.process_identity import ProcessCalls
from kvmoor.host_memory.quarantine import QuarantinedArena, keep_until_exit
from kvmoor.host_memory.status_format import digest_geometry
from kvmoor.host_memory.status_reader import StatusReader
from kvmoor.host_memory.ticket import ArenaTicket, SlabPlace, place_slabs
from kvmoor.observation import ArenaQuarantined, Observer, SilentObserver, notify
from kvmoor.process_end import register

_log = logging.getLogger("kvmoor")

_MAP_FIXED: Final = 0x10  # as in page_mapping.py


class AttachedArena:
    """Read the slots of an arena that another process owns.

    While the owner lives, its published slots may be read, as orders say. Once it has ended or closed its arena, only
    the READY ones may: what they hold is whole and stays until this object is closed. Nothing here can be written to.

    Any thread may call any method. Raises `SettingsError` for another layout, pid namespace or host, `BrokenError` for
    an owner that is absent, replaced or of another user, `CorruptDataError` for a ticket or a status segment that no
    owner wrote. A constructor that fails leaves nothing behind.
    """

    def __init__(
        self,
        ticket: ArenaTicket,
        layout: BlockLayout,
        *,
        observer: Observer | None = None,
        calls: ProcessCalls | None = None,
    ) -> None:
        ticket.check()
        _check_layout(ticket, layout)
        self._plan = ticket.plan
        self._places, _ = place_slabs(self._plan.slabs)
        self._observer: Observer = observer or SilentObserver()
        self._calls = calls or ProcessCalls()
        # Held by the one thread that closes or quarantines. Guards `_state` once the arena is open.
        self._close_lock = threading.Lock()
        self._state = ArenaState.OPENING
        with ExitStack() as opened, ExitStack() as files:
            self._owner = OwnerProcess(ticket.owner, self._calls)
            opened.callback(self._owner.close)
            # A mapping keeps its file, so descriptors are needed only here.
            status_fd = self._owner.open_file(ticket.status, "the status segment")
            files.callback(close_descriptor, status_fd, self._calls)
            segment_fds = []
            for number, segment in enumerate(ticket.segments):
                segment_fds.append(self._owner.open_file(segment, f"segment {number} of the arena"))
                files.callback(close_descriptor, segment_fds[-1], self._calls)
            self._status = StatusReader(status_fd, what=f"the status segment of {self._owner.name}", calls=self._calls)
            opened.callback(self._status.close)
            _check_status(ticket, self._status)
            # What was opened belongs to the process of the ticket, because that one still runs.
            self._owner.check_alive()
            pages = PageMapping(self._calls)
            self._reservation = pages.reserve(self._plan.address_nbytes, SLAB_ALIGNMENT)
            opened.callback(pages.unmap, self._reservation)
            for place in self._places:
                self._map_slab(pages, place, segment_fds[place.segment])
            self._state = ArenaState.OPEN
            register(self, forked=self.forked)
            # Of these, the pages go first: if they cannot be unmapped, the rest is closed all the same.
            self._closing = opened.pop_all()

    def _map_slab(self, pages: PageMapping, place: SlabPlace, fd: int) -> None:
        address = self._reservation.base + place.slab.offset
        # Whole huge pages, should the segment be made of them; the file and the reservation both have the room.
        nbytes = round_up(place.slab.nbytes, SLAB_ALIGNMENT)
        try:
            self._calls.mmap(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, place.file_offset)
        except OSError as error:
            raise translate_os_error(
                error, f"mapping {format_nbytes(nbytes)} of another process's host memory", "raise vm.max_map_count"
            ) from error
        pages.advise_huge_pages(address, nbytes)
        pages.advise_no_dump(address, nbytes)
        pages.advise_no_fork(address, nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, _open: ArenaState = ArenaState.OPEN) -> None:  # an interpreter that ends has lost the name
        # Only a warning: a copy may still be reading, so the memory stays.
        if getattr(self, "_state", None) is _open:
            message = f"{self!r} was never closed: its memory stays mapped"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<AttachedArena of {self._owner.name} {self._state.value}, {format_nbytes(self.nbytes)}>"

    @property
    def plan(self) -> ArenaPlan:
        """Return where the slots are; its limits and its request say nothing."""
        return self._plan

    @property
    def base(self) -> int:
        """Return the address that the offsets of the plan count from."""
        return self._reservation.base

    @property
    def state(self) -> ArenaState:
        """Return where in its life the attachment is."""
        return self._state

    @property
    def closed(self) -> bool:
        """Say whether everything was given back."""
        return self._state is ArenaState.CLOSED

    @property
    def nbytes(self) -> int:
        """Return how many bytes all slots take."""
        return self._plan.nbytes

    @property
    def status(self) -> StatusReader:
        """Return what the owner says about its slots; closed with the attachment."""
        return self._status

    def owner_alive(self) -> bool:
        """Say whether the owner has not ended, by its pidfd. Never blocks; a stopped or slow owner lives."""
        return self._owner.is_alive()

    def slot_addresses(self, group: int, slots: ArrayLike) -> NDArray[np.int64]:
        """Return where slots begin, int64 in the shape of `slots`; 0 for slots of a group without tensors.

        They may be read until `close`. Without an order of the owner's engine, compare `status.order_ids` before and
        after the copy. Raises `RequestError` for slots that do not exist, that the owner has not published, or, once
        it has ended or closed its arena, that are not READY; `ClosedError` once this object is closed or quarantined.
        """
        if self._state is not ArenaState.OPEN:
            raise ClosedError(f"{self!r} is {self._state.value}: its slots cannot be read any more")
        # Asked first: the words of an owner that has ended do not change any more.
        if not self._owner.is_alive():
            self._check_ready(group, slots, "has ended")
        elif self._status.is_closed_by_owner():
            self._check_ready(group, slots, "closed its arena")
        elif not (published := self._status.are_published(group, slots)).all():
            raise RequestError(
                f"slot {np.asarray(slots)[~published].flat[0]} of group {group} cannot be read: the owner published "
                f"{self._status.num_published(group)} of {self._status.num_slots[group]} slots"
            )
        numbers = np.asarray(slots)
        plan = self._plan.groups[group]
        if not numbers.size or not plan.slot_nbytes:
            return np.zeros(numbers.shape, np.int64)
        slabs, places = np.divmod(numbers.astype(np.int64, copy=False), plan.slots_per_slab)
        first = self._reservation.base + plan.offset
        addresses: NDArray[np.int64] = first + slabs * plan.slab_pitch + places * plan.slot_nbytes
        return addresses

    def published_ranges(self) -> list[tuple[int, int]]:
        """Return the address and the bytes of each slab that is published: what a registrar may register for reading.

        Memory that is not published may not exist, so a reader must not make the kernel look for it.
        """
        if self._state is not ArenaState.OPEN:
            raise ClosedError(f"{self!r} is {self._state.value}: its slots cannot be read any more")
        return [
            (self._reservation.base + slab.offset, slab.nbytes)
            for slab in self._plan.slabs
            if self._status.are_published(slab.group, slab.first_slot + np.arange(slab.num_slots)).all()
        ]

    def _check_ready(self, group: int, slots: ArrayLike, what_happened: str) -> None:
        ready = self._status.order_ids(group, slots) != 0
        if not ready.all():
            raise RequestError(
                f"slot {np.asarray(slots)[~ready].flat[0]} of group {group} cannot be read: {self._owner.name} "
                f"{what_happened} before the slot was READY; recompute the block"
            )

    def forked(self) -> None:
        """Let go in a forked child: the pidfd is a copy, and the mappings were not inherited."""
        self._close_lock = threading.Lock()  # another thread of the parent may have held it
        self._state = ArenaState.CLOSED
        self._closing.pop_all()
        self._owner.forked()
        self._status.forked()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Give everything back and return True; what cannot be unmapped is kept until the process ends: False.

        Caller: no copy reads a slot any more; otherwise call `quarantine`. Closes twice without harm, and waits at most
        `timeout_s` for another thread that closes.
        """
        if not self._close_lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        event = None
        try:
            if self._state is ArenaState.OPEN:
                self._state = ArenaState.CLOSING
                try:
                    self._closing.close()
                    self._state = ArenaState.CLOSED
                except (KvmoorError, OSError) as error:
                    _log.warning("%r is kept until the process ends: %s", self, error)
                    event = self._keep(str(error), ())
        finally:
            self._close_lock.release()
        if event is not None:
            notify(self._observer, event)
        return self.closed

    def quarantine(self, reason: str, *, keep_alive: tuple[object, ...] = ()) -> None:
        """Keep the slots mapped until the process ends, because a copy may still read them; let the owner go.

        `keep_alive` is kept as long. May be called again to keep more. Raises `ClosedError` if the memory was given
        back already.
        """
        with self._close_lock:  # another holder is in `close`, which waits for nothing
            if self.closed:
                raise ClosedError(f"{self!r} is unmapped already: quarantine an arena instead of closing it")
            event = self._keep(reason, keep_alive)
        if event is not None:
            notify(self._observer, event)

    def _keep(self, reason: str, keep_alive: tuple[object, ...]) -> ArenaQuarantined | None:
        """Move to QUARANTINED; return what to report, or nothing if it was quarantined before."""
        if self._state is ArenaState.QUARANTINED:
            if keep_alive:
                keep_until_exit(QuarantinedArena(self, reason, 0, keep_alive))
            return None
        self._state = ArenaState.QUARANTINED
        self._closing.pop_all()  # without closing it: nothing unmaps the pages any more
        self._owner.close()
        keep_until_exit(QuarantinedArena(self, reason, self.nbytes, keep_alive))
        try:
            self._status.close()
        except KvmoorError as error:
            _log.warning("%r: %s", self, error)
        return ArenaQuarantined(self.nbytes, reason)


def _check_layout(ticket: ArenaTicket, layout: BlockLayout) -> None:
    ours = [(group.slot_nbytes, group.tokens_per_block) for group in layout.groups]
    theirs = [(group.slot_nbytes, group.tokens_per_block) for group in ticket.groups]
    if layout.fingerprint != ticket.layout_fingerprint or ours != theirs:
        raise SettingsError(
            f"the owner, process {ticket.owner.pid}, holds blocks of another layout (fingerprint "
            f"{ticket.layout_fingerprint.hex()[:16]}, here {layout.fingerprint.hex()[:16]}; slot bytes and tokens a "
            f"block {theirs}, here {ours}): run every rank with the same model, dtype and block size"
        )


def _check_status(ticket: ArenaTicket, status: StatusReader) -> None:
    header = status.header
    if header.nonce != ticket.nonce:
        raise BrokenError(
            f"the status segment has the nonce {header.nonce.hex()}, the ticket {ticket.nonce.hex()}: the owner was "
            "replaced, use its new ticket"
        )
    if header.layout_fingerprint != ticket.layout_fingerprint:
        raise SettingsError("the status segment belongs to an arena of another layout: use the ticket of this arena")
    if (header.pid, header.start_time) != (ticket.owner.pid, ticket.owner.start_time):
        raise BrokenError(
            f"the status segment belongs to process {header.pid}, started at tick {header.start_time}, the ticket "
            f"names process {ticket.owner.pid}, started at tick {ticket.owner.start_time}: use the ticket of the "
            "process that owns the arena"
        )
    slots = tuple(group.num_slots for group in ticket.groups)
    if status.num_slots != slots:
        raise BrokenError(f"the status segment has {status.num_slots} slots, the ticket {slots}: use one of this arena")
    geometry_digest = digest_geometry(ticket.groups, ticket.layout_fingerprint)
    if header.geometry_digest != geometry_digest:
        raise CorruptDataError(
            f"the owner, process {ticket.owner.pid}, keeps its slots elsewhere than the ticket says (digest of the "
            f"geometry {header.geometry_digest.hex()[:16]}, in the ticket {geometry_digest.hex()[:16]}): "
            "pass the ticket on unchanged"
        )
