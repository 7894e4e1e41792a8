"""Which leases and waiters are open, whose they are, and when their time is up."""

import math
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from kvmoor.errors import RequestError
from kvmoor.index.lease import Lease
from kvmoor.index.waiting import Waiter

Claim: TypeAlias = Lease | Waiter
"""What somebody holds and has to give back."""


def check_hashable(holder: object) -> None:
    """Raise `RequestError` for what cannot stand for a request."""
    try:
        hash(holder)
    except TypeError as error:
        raise RequestError(
            f"the holder is a {type(holder).__name__}: give what can be hashed, a request id say"
        ) from error


def check_deadline(deadline_s: object) -> None:
    """Raise `RequestError` for what is no moment: NaN in a heap would hide all deadlines behind it."""
    if deadline_s is None:
        return
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not math.isfinite(deadline_s):
        raise RequestError(f"the deadline is {deadline_s!r}: give seconds on the clock that `expire` is told")


class LeaseBook:
    """Keep the open claims of one index. Not thread-safe: called under the lock of the index."""

    def __init__(self) -> None:
        self._open: dict[Claim, None] = {}
        self._by_holder: dict[Hashable, dict[Claim, None]] = {}
        self._deadlines: list[tuple[float, int, Claim]] = []  # a heap; claims that are over are skipped
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, claim: Claim) -> None:
        """Note a claim that is open now."""
        self._open[claim] = None
        if claim.holder is not None:
            self._by_holder.setdefault(claim.holder, {})[claim] = None
        if claim.deadline_s is not None:
            heappush(self._deadlines, (claim.deadline_s, next(self._numbers), claim))
            if len(self._deadlines) > 2 * len(self._open) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[2] in self._open]
                heapify(self._deadlines)

    def remove(self, claim: Claim) -> None:
        """Note that a claim is over; does nothing for one that was never added."""
        self._open.pop(claim, None)
        claims = self._by_holder.get(claim.holder)
        if claims is not None:
            claims.pop(claim, None)
            if not claims:
                del self._by_holder[claim.holder]

    def of_holder(self, holder: Hashable) -> list[Claim]:
        """Return the open claims of a holder, oldest first."""
        return list(self._by_holder.get(holder, ()))

    def take_due(self, now_s: float) -> list[Claim]:
        """Return the open claims whose deadline has passed, each once."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            claim = heappop(self._deadlines)[2]
            if claim in self._open:
                due.append(claim)
        return due

    def leases(self) -> list[Lease]:
        """Return the open leases, oldest first."""
        return [claim for claim in self._open if isinstance(claim, Lease)]

    def waiters(self) -> list[Waiter]:
        """Return those who wait, oldest first."""
        return [claim for claim in self._open if isinstance(claim, Waiter)]
