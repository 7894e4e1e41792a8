"""The slots of one group as numbers: which are free, which are not, and runs of adjacent ones.

Adjacent slots are one copy, so a pool keeps its free slots as runs and hands out whole runs where it can. Adjacent
numbers are a good sign for adjacent memory, not a promise: whoever copies looks at the addresses.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvmoor.index.slot_arrays import NO_SLOTS, Slots

# What becomes of a slot number; one byte each.
_UNPUBLISHED: Final = 0
_FREE: Final = 1
_USED: Final = 2
_HELD: Final = 3


class SlotPool:
    """Hand out the slots of one group and take them back.

        not published -> free <-> used -> held -> free

    Not thread-safe: called under the coordinator's lock. Giving back what is not out is our own bug, so it is asserted.
    No run of free slots touches another one. A call costs O(log runs) for each run it hands out, takes back or joins.
    """

    def __init__(self) -> None:
        self._uses = bytearray()
        self._num_published = 0
        self._num_free = 0
        self._num_held = 0
        # The free runs: by first slot, by the slot behind the last one, and by length. There are few lengths:
        # k different ones need k * (k + 1) / 2 slots.
        self._length_at: dict[int, int] = {}
        self._first_before: dict[int, int] = {}
        self._firsts_by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []

    def __repr__(self) -> str:
        return f"<SlotPool: {self._num_published} published, {self._num_free} free, {self._num_held} held>"

    @property
    def num_published(self) -> int:
        """Return how many slots there are."""
        return self._num_published

    @property
    def num_free(self) -> int:
        """Return how many slots can be handed out."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Return how many slots are neither free nor used, because a copy may still write to them."""
        return self._num_held

    def publish(self, first: int, num_slots: int) -> None:
        """Take slots ``first .. first + num_slots - 1`` into use; no slot is published twice."""
        assert first >= 0, first
        assert num_slots >= 0, num_slots
        end = first + num_slots
        self._uses.extend(bytes(max(0, end - len(self._uses))))
        self._mark(first, num_slots, _UNPUBLISHED, _FREE)
        self._num_published += num_slots
        self._num_free += num_slots
        if num_slots:
            self._join_run(first, num_slots)

    def allocate(self, num_slots: int) -> Slots | None:
        """Hand out `num_slots` slots, or None and nothing if fewer are free.

        They come from the shortest run that is long enough; if none is, from the longest ones, and the last piece again
        from the shortest that is long enough. Slots ascend inside a run.
        """
        assert num_slots >= 0, num_slots
        if num_slots > self._num_free:
            return None
        pieces = []
        wanted = num_slots
        while wanted:
            fitting = bisect_left(self._lengths, wanted)
            length = self._lengths[min(fitting, len(self._lengths) - 1)]
            first = next(reversed(self._firsts_by_length[length]))
            taken = min(length, wanted)
            self._remove_run(first, length)
            if taken < length:
                self._add_run(first + taken, length - taken)
            self._mark(first, taken, _FREE, _USED)
            pieces.append(np.arange(first, first + taken, dtype=np.int32))
            wanted -= taken
        self._num_free -= num_slots
        if len(pieces) > 1:
            return np.concatenate(pieces)
        return pieces[0] if pieces else NO_SLOTS

    def release(self, slots: Slots) -> None:
        """Take used slots back; they are free at once."""
        self._free(slots, _USED)

    def hold(self, slots: Slots) -> None:
        """Set used slots aside until `release_held`: a copy that was given up may still write to them."""
        for first, length in _runs(slots):
            self._mark(first, length, _USED, _HELD)
            self._num_held += length

    def release_held(self, slots: Slots) -> None:
        """Take held slots back, once nothing touches them any more; they are free at once."""
        self._num_held -= self._free(slots, _HELD)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance; for tests."""
        assert self._num_free == self._uses.count(_FREE)
        assert self._num_held == self._uses.count(_HELD)
        assert self._num_published == len(self._uses) - self._uses.count(_UNPUBLISHED)
        runs = sorted(self._length_at.items())
        free = np.flatnonzero(np.frombuffer(self._uses, np.uint8) == _FREE).astype(np.int32)
        assert runs == list(_runs(free))
        assert {first + length: first for first, length in runs} == self._first_before
        by_length = [(first, length) for length, firsts in self._firsts_by_length.items() for first in firsts]
        assert runs == sorted(by_length)
        assert sorted(self._firsts_by_length) == self._lengths

    def _free(self, slots: Slots, use: int) -> int:
        num_slots = 0
        for first, length in _runs(slots):
            self._mark(first, length, use, _FREE)
            self._join_run(first, length)
            num_slots += length
        self._num_free += num_slots
        return num_slots

    def _mark(self, first: int, num_slots: int, expected: int, use: int) -> None:
        end = first + num_slots
        found = bytes(self._uses[first:end])
        assert found == bytes([expected]) * num_slots, f"slots {first} to {end - 1} should all be {expected}: {found!r}"
        self._uses[first:end] = bytes([use]) * num_slots

    def _join_run(self, first: int, length: int) -> None:
        """Add a run, joined with the free runs before and behind it."""
        before = self._first_before.get(first)
        if before is not None:
            self._remove_run(before, first - before)
            first, length = before, first - before + length
        behind = self._length_at.get(first + length)
        if behind is not None:
            self._remove_run(first + length, behind)
            length += behind
        self._add_run(first, length)

    def _add_run(self, first: int, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        firsts = self._firsts_by_length.get(length)
        if firsts is None:
            self._firsts_by_length[length] = {first: None}
            insort(self._lengths, length)
        else:
            firsts[first] = None

    def _remove_run(self, first: int, length: int) -> None:
        del self._length_at[first]
        del self._first_before[first + length]
        firsts = self._firsts_by_length[length]
        del firsts[first]
        if not firsts:
            del self._firsts_by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]


def _runs(slots: Slots) -> Iterator[tuple[int, int]]:
    """Return first slot and length of each run of adjacent slots, ascending. A slot named twice begins a run again."""
    if not len(slots):
        return iter(())
    ordered = np.sort(slots)
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ordered))
    return zip(ordered[starts].tolist(), lengths.tolist(), strict=True)
