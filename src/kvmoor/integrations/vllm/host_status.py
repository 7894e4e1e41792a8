"""What the ranks' status segments say, for a scheduler that hears nothing from its workers.

vLLM's own connector carries nothing back from a worker but ids of jobs, all of them successful. The segments of the
same host fill the gap: which slots are ready, and which order last filled a slot whole.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvmoor.errors import CorruptDataError, KvmoorError
from kvmoor.host_memory.status_reader import FoundStatusSegment, StatusReader, find_status_segments
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.integrations.vllm.slot_tally import slot_runs
from kvmoor.transfer_messages import SlotRange

_log = logging.getLogger("kvmoor")

_SEARCH_INTERVAL_S: Final = 0.5
"""To look for segments takes some ms: it walks through the descriptors of all processes. Guessed."""


class HostStatus:
    """Read the status segments of one engine's ranks once they are there. One thread at a time."""

    def __init__(self, engine_id: str, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_id = engine_id
        self._num_ranks = num_ranks
        self._clock = clock
        self._readers: dict[int, StatusReader] = {}
        self._seen: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
        self._damaged: set[int] = set()
        self._warnings: set[str] = set()
        self._next_search_s = 0.0

    @property
    def num_slots(self) -> tuple[int, ...] | None:
        """Return how many slots each group has on all ranks in the end; None before all ranks were found."""
        if len(self._readers) < self._num_ranks:
            return None
        return tuple(map(min, zip(*(reader.num_slots for reader in self._readers.values()), strict=True)))

    def take_published(self) -> list[SlotRange]:
        """Return the slots that ranks made ready since the last call, each rank's for itself, in runs."""
        self._search()
        found = []
        for rank, reader in self._readers.items():
            try:
                for group in range(len(reader.num_slots)):
                    found += self._new_slots(rank, group, reader)
            except CorruptDataError as error:
                self._damaged.add(rank)
                self._warn(f"rank {rank} stores nothing any more: {error}")
        return found

    def vouches_for(self, host: HostSlots) -> bool:
        """Say whether every rank filled these slots whole, and by this very order."""
        return (
            len(self._readers) == self._num_ranks
            and not self._damaged
            and all(
                bool((reader.order_ids(group, slots[slots >= 0]) == host.order_id).all())
                for reader in self._readers.values()
                for group, slots in enumerate(host.slots)
            )
        )

    def close(self) -> None:
        """Unmap everything."""
        for reader in self._readers.values():
            reader.close()

    def _search(self) -> None:
        if len(self._readers) == self._num_ranks or self._clock() < self._next_search_s:
            return
        self._next_search_s = self._clock() + _SEARCH_INTERVAL_S
        for segment in self._choose(find_status_segments(self._engine_id)):
            if segment.rank not in self._readers:
                try:
                    self._readers[segment.rank] = segment.open()
                except CorruptDataError as error:
                    self._warn(f"{error}: it is left out")
                except KvmoorError:  # it went away; it is looked for again
                    pass

    def _choose(self, segments: Iterable[FoundStatusSegment]) -> list[FoundStatusSegment]:
        """Return one segment a rank: those of this engine, not of another of the same id or of one that is ending.

        vLLM's executors start workers from the scheduler's process, or run them in it, before there is a scheduler;
        only ray has another process start them. Then a segment counts if it is the only one of its rank.
        """
        segments = [segment for segment in segments if segment.rank < self._num_ranks]
        segments = [segment for segment in segments if segment.descends_from(os.getpid())] or segments
        by_rank: dict[int, list[FoundStatusSegment]] = {}
        for segment in segments:
            by_rank.setdefault(segment.rank, []).append(segment)
        for rank, found in by_rank.items():
            if len(found) > 1 and rank not in self._readers:
                self._warn(
                    f"processes {', '.join(str(each.pid) for each in found)} all say that they are rank {rank} of "
                    f"engine {self._engine_id!r}, so nothing is stored until all but one have ended: give each engine "
                    "its own engine_id"
                )
        return [found[0] for found in by_rank.values() if len(found) == 1]

    def _new_slots(self, rank: int, group: int, reader: StatusReader) -> list[SlotRange]:
        num_slots = reader.num_slots[group]
        seen = self._seen.setdefault((rank, group), np.zeros(num_slots, np.bool_))
        if reader.num_published(group) == np.count_nonzero(seen):
            return []
        published = reader.are_published(group, np.arange(num_slots))
        new = slot_runs(group, 0, published & ~seen)
        seen |= published
        return new

    def _warn(self, message: str) -> None:
        if message not in self._warnings:  # it is looked for again and again
            self._warnings.add(message)
            _log.warning("%s", message)
