"""Slots in the order of their last use, in two arrays.

Each use writes the slot behind the latest entry of a ring, and `_place` says at which entry of the ring a slot was used
last. All other entries of that slot are stale, and skipped when the oldest are looked for. So a whole prompt is used
with a few array operations, and nothing is linked, moved or freed for a single block.

    ring   | stale  b  a  stale  stale  f  e  d |       place:  a 2   b 1   d 7   e 6   f 5   c none
             ^ head                              ^ tail

Stale entries are squeezed out while slots are used: each use of n slots looks at 2 n entries, so no call pays for all.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.index.slot_arrays import NO_SLOTS, Slots, grown

_NO_ENTRY: Final = 0
_ENTRIES_PER_SLOT: Final = 4
"""Squeezing begins at 2 entries for each slot held and ends before there are 4: it looks at two for each new one."""
_SPARE_ENTRIES: Final = 1024
_WINDOW: Final = 256
"""Entries looked at together when the oldest are sought. Guessed: array operations on fewer cost the same."""


class UseOrder:
    """Keep slots in the order of their last use. Not thread-safe. All costs are amortised."""

    def __init__(self) -> None:
        # By slot: one more than the entry of its last use, 0 if it is not held.
        self._place: NDArray[np.int32] = np.zeros(1, np.int32)
        self._ring: NDArray[np.int32] = np.zeros(_SPARE_ENTRIES, np.int32)
        # Positions count on without end; the entry of a position is its remainder by the length of the ring.
        self._head = self._tail = 0
        # While stale entries are squeezed out: what lies in front of `_squeezed` is, what lies behind `_unseen` is not
        # yet, and all between is stale.
        self._squeezing = False
        self._squeezed = self._unseen = 0
        self._num_held = 0

    def __len__(self) -> int:
        return self._num_held

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int | np.integer) and bool(0 <= slot < len(self._place) and self._place[slot] > 0)

    def resize(self, slot_limit: int) -> None:
        """Make room for slots ``0 .. slot_limit - 1``."""
        self._place = grown(self._place, slot_limit)

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which of `slots` are held."""
        held: NDArray[np.bool_] = self._place.take(slots) > 0
        return held

    def use(self, slots: Slots) -> None:
        """Hold `slots` as the most recently used ones, the last of them as the very most recent."""
        count = len(slots)
        if not count:
            return
        if self._tail - self._head + count > len(self._ring):
            self._squeeze(self._tail - self._head)
            self._enlarge_ring(count)
        self._num_held += count - int((self._place.take(slots) > 0).sum())
        self._write(self._tail, slots)
        self._tail += count
        self._squeeze(2 * count)

    def discard(self, slots: Slots) -> None:
        """Hold `slots` no longer, whether they were held or not."""
        self._num_held -= int((self._place.take(slots) > 0).sum())
        self._place[slots] = _NO_ENTRY

    def take_oldest(self, count: int, spared: Slots = NO_SLOTS) -> Slots:
        """Stop to hold the `count` slots used longest ago and return them, oldest first; fewer if there are fewer.

        Those of `spared` are passed over.
        """
        hidden = self._place[spared]
        self._place[spared] = _NO_ENTRY  # they look stale for the moment
        taken: list[Slots] = []
        position = start = self._head
        while count and position < self._tail:
            first, slots = self._read(position, min(position + max(_WINDOW, 2 * count), self._tail))
            found = self._live(first, slots).nonzero()[0][:count]
            position += int(found[-1]) + 1 if len(found) == count else len(slots)
            count -= len(found)
            victims = slots[found]
            self._place[victims] = _NO_ENTRY
            self._num_held -= len(victims)
            taken.append(victims)
        self._place[spared] = hidden
        held = hidden[hidden > 0]
        if len(held):
            position = min(position, start + int(((held - 1 - start) % len(self._ring)).min()))
        self._head = position
        if self._squeezing:
            self._squeezed = max(self._squeezed, position)
            self._unseen = max(self._unseen, position)
        if len(taken) > 1:
            return np.concatenate(taken)
        return taken[0] if taken else NO_SLOTS

    def check_invariants(self) -> None:
        """Raise AssertionError if ring and places disagree; for tests."""
        assert self._tail - self._head <= len(self._ring)
        held = self.oldest_first().tolist()
        assert len(held) == len(set(held)) == self._num_held, "a slot that is held has no entry, or two"
        assert np.count_nonzero(self._place > 0) == self._num_held

    def oldest_first(self) -> Slots:
        """Return all slots that are held; for tests and for showing."""
        pieces = [NO_SLOTS]
        position = self._head
        while position < self._tail:
            first, slots = self._read(position, self._tail)
            pieces.append(slots[self._live(first, slots)])
            position += len(slots)
        return np.concatenate(pieces)

    def _read(self, position: int, end: int) -> tuple[int, Slots]:
        """Return entries from a position on, up to `end` or to the end of the ring, and where the first one stands."""
        first = position % len(self._ring)
        return first, self._ring[first : first + end - position]

    def _live(self, first: int, slots: Slots) -> NDArray[np.bool_]:
        """Return which of these entries are the last use of their slot."""
        live: NDArray[np.bool_] = self._place.take(slots) == np.arange(first + 1, first + 1 + len(slots))
        return live

    def _write(self, position: int, slots: Slots) -> None:
        first = position % len(self._ring)
        room = len(self._ring) - first
        if len(slots) > room:
            self._write(position + room, slots[room:])
            slots = slots[:room]
        self._ring[first : first + len(slots)] = slots
        self._place[slots] = np.arange(first + 1, first + 1 + len(slots))

    def _squeeze(self, num_entries: int) -> None:
        """Look at some more entries and move those that are not stale together, if that is worth it."""
        if not self._squeezing:
            if self._tail - self._head <= 2 * self._num_held + _SPARE_ENTRIES:
                return
            self._squeezing = True
            self._squeezed = self._unseen = self._head
        end = min(self._unseen + num_entries, self._tail)
        while self._unseen < end:
            first, slots = self._read(self._unseen, end)
            live = slots[self._live(first, slots)]
            self._write(self._squeezed, live)
            self._squeezed += len(live)
            self._unseen += len(slots)
        if end == self._tail:
            self._tail = self._squeezed
            self._squeezing = False

    def _enlarge_ring(self, num_more: int) -> None:
        """Make room for more entries, unless squeezing did."""
        if self._tail - self._head + num_more <= len(self._ring):
            return
        live = self.oldest_first()
        wanted = _ENTRIES_PER_SLOT * (len(live) + num_more) + 2 * _SPARE_ENTRIES
        self._ring = np.zeros(max(wanted, len(self._ring)), np.int32)
        self._head, self._tail, self._squeezing = 0, len(live), False
        self._write(0, live)
