"""What the ranks' status segments say, for a scheduler that hears nothing from its workers.

vLLM's own connector carries nothing back from a worker but ids of jobs, all of them successful. The segments of the
same host fill the gap: which slots are ready, and which order last filled a slot whole.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvmoor.errors import CorruptDataError, KvmoorError
from kvmoor.host_memory.status_reader import StatusReader, find_status_segments
from kvmoor.integrations.vllm.messages import HostSlots
from kvmoor.transfer_messages import SlotRange

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
        self._next_search_s = 0.0

    @property
    def num_slots(self) -> tuple[int, ...] | None:
        """Return how many slots each group has on all ranks in the end; None before all ranks were found."""
        if len(self._readers) < self._num_ranks:
            return None
        return tuple(map(min, zip(*(reader.num_slots for reader in self._readers.values()), strict=True)))

    def take_published(self) -> list[SlotRange]:
        """Return the slots that ranks made ready since the last call, each rank's for itself."""
        self._search()
        found = []
        for rank, reader in self._readers.items():
            for group, num_slots in enumerate(reader.num_slots):
                seen = self._seen.setdefault((rank, group), np.zeros(num_slots, np.bool_))
                if reader.num_published(group) == np.count_nonzero(seen):
                    continue
                published = reader.are_published(group, np.arange(num_slots))
                found += [SlotRange(group, int(slot), 1) for slot in np.flatnonzero(published & ~seen)]
                seen |= published
        return found

    def vouches_for(self, host: HostSlots) -> bool:
        """Say whether every rank filled these slots whole, and by this very order."""
        return len(self._readers) == self._num_ranks and all(
            bool((reader.order_ids(group, slots[slots >= 0]) == host.order_id).all())
            for reader in self._readers.values()
            for group, slots in enumerate(host.slots)
        )

    def close(self) -> None:
        """Unmap everything."""
        for reader in self._readers.values():
            reader.close()

    def _search(self) -> None:
        if len(self._readers) == self._num_ranks or self._clock() < self._next_search_s:
            return
        self._next_search_s = self._clock() + _SEARCH_INTERVAL_S
        for segment in find_status_segments(self._engine_id):
            if segment.rank not in self._readers:
                try:
                    self._readers[segment.rank] = segment.open()
                except KvmoorError as error:  # it went away, or is being written; it is looked for again
                    if isinstance(error, CorruptDataError):
                        raise
