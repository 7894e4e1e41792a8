"""Replay a trace through a device with a cache of its own, host memory behind it, and a disk behind that.

Each tier is an index as `Offloader` uses it, told of the device by the same calls. A request is atomic, and all caches
start empty:

- Hits: it finds the longest prefix of which each block is in some tier, and takes each from the first that has it.
- Device: all its blocks are there afterwards, or as many leading ones as fit: those found elsewhere are loaded, those
  found nowhere computed. What gives way for them, least recently used first, *leaves* the device; so does at once what
  did not fit. An engine's own cache does the same.
- Host: a block is stored there when it was computed, or when it leaves the device (`StoreWhen`). Blocks that are loaded
  cannot give way until the request has them.
- Disk: what falls out of host memory is written to it, if the disk lacks it and its admission lets it in. A block found
  on disk is stored in host memory too, and stays on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from time import perf_counter
from typing import Final, Literal, TypeAlias

import numpy as np

from kvmoor.block_key import BlockKeys
from kvmoor.errors import SettingsError
from kvmoor.index.admission import Admission, AdmitAll, SecondReference
from kvmoor.index.eviction.lru import TailFirstLru
from kvmoor.index.eviction.policies import PolicyFactory
from kvmoor.index.lease import LoadLease
from kvmoor.simulation.replay import new_index, policy_named
from kvmoor.simulation.trace import Blocks, Trace
from kvmoor.simulation.trace_keys import TraceKeys, numbers_of, of_digests

StoreWhen: TypeAlias = Literal["computed", "leaving"]
"""When a block is stored in host memory: as soon as it is computed, or when the device is about to drop it.

An engine that stores what it computed names all blocks of the prompt, also those that it found on the device: what host
memory has counts as used, and what it has no more is stored again.
"""
STORE_WHEN: Final[tuple[StoreWhen, ...]] = ("computed", "leaving")

DiskAdmission: TypeAlias = Literal["all", "second-reference"]
"""Which blocks are written to disk when they fall out of host memory: see `kvmoor.index.admission`."""
DISK_ADMISSIONS: Final[tuple[DiskAdmission, ...]] = ("all", "second-reference")

REMEMBERED_PER_DISK_BLOCK: Final = 2
"""How many blocks `second-reference` remembers for each one that the disk holds. Guessed."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Say what is around host memory, and who moves when. Raises `SettingsError` for what cannot be."""

    device_blocks: int = 0
    """What the device's own cache holds; 0 if nothing is known of it."""
    disk_blocks: int = 0
    """What the disk holds; 0 if there is none."""
    store_when: StoreWhen = "computed"
    disk_admission: DiskAdmission = "all"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("store_when", self.store_when, STORE_WHEN),
            ("disk_admission", self.disk_admission, DISK_ADMISSIONS),
        ):
            if value not in allowed:
                raise SettingsError(f"{name} is {value!r}: choose from {', '.join(allowed)}")
        for name, num_blocks in (("device", self.device_blocks), ("disk", self.disk_blocks)):
            if num_blocks < 0:
                raise SettingsError(f"the {name} holds {num_blocks} blocks: give 0 or more")
        if self.store_when == "leaving" and not self.device_blocks:
            raise SettingsError("nothing ever leaves a device without memory: give its size, or store what is computed")


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Count blocks by tier."""

    device: int
    host: int
    disk: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class TieredResult:
    """Say what came of one replay through tiers."""

    policy: str
    """That of host memory. The device and the disk evict what was used least recently."""
    capacity_blocks: int
    """That of host memory; the plan has the others."""
    plan: TierPlan
    hits: TierCounts
    hit_tokens: int
    """In all tiers."""
    stored: TierCounts
    """Blocks written into each tier; those of the device were computed or loaded."""
    evicted: TierCounts
    saved_writes: int
    """Blocks that fell out of host memory and never came to the disk, because they were not admitted."""
    seconds: float
    """How long the replay took."""

    @property
    def hit_blocks(self) -> int:
        """Return how many blocks of all prompts did not have to be computed."""
        return self.hits.total

    @property
    def total_blocks(self) -> int:
        """Return how many blocks all tiers hold together."""
        return self.plan.device_blocks + self.capacity_blocks + self.plan.disk_blocks


class TieredReplayer:
    """Replay one trace with any number of policies, capacities and plans."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._keys = TraceKeys(trace)

    def replay(
        self,
        capacity_blocks: int,
        plan: TierPlan,
        *,
        policy: str = "lru",
        on_progress: Callable[[int], None] | None = None,
    ) -> TieredResult:
        """Replay the trace with `capacity_blocks` blocks of host memory.

        `on_progress` is told after each request how many blocks it referred to.
        """
        started = perf_counter()
        tiers = _Tiers(self._trace.num_unique_blocks, capacity_blocks, plan, policy_named(policy))
        for request in self._trace.requests:
            keys = self._keys.of_blocks(request.blocks)
            tiers.serve(request.blocks, keys)
            if on_progress is not None:
                on_progress(len(keys))
        return TieredResult(
            policy=policy,
            capacity_blocks=capacity_blocks,
            plan=plan,
            hits=tiers.count(lambda tier: tier.num_hits),
            hit_tokens=tiers.count(lambda tier: tier.num_hits).total * self._trace.block_size,
            stored=tiers.count(lambda tier: tier.num_stored),
            evicted=tiers.count(lambda tier: tier.index.num_evicted),
            saved_writes=tiers.num_saved_writes,
            seconds=perf_counter() - started,
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """Say what a store has changed, in digests."""

    new: tuple[bytes, ...]
    unfit: tuple[bytes, ...]
    """Those at the end that did not fit."""
    gone: tuple[bytes, ...]
    """What gave way, the last one first: in the order of prompts."""

    @property
    def left_over(self) -> tuple[bytes, ...]:
        """Return what the next tier may have, the most recently used first, each once."""
        return tuple(dict.fromkeys(self.unfit + self.gone)) if self.unfit else self.gone


class _Tier:
    """One index, and what was found and stored in it."""

    def __init__(self, num_blocks: int, policy: PolicyFactory) -> None:
        self.index = new_index(num_blocks, policy)
        self.num_blocks = num_blocks
        self.num_hits = self.num_stored = 0

    def store(self, keys: BlockKeys) -> _Stored:
        """Store the leading blocks, as many as fit beside what is leased."""
        num_fitting = min(len(keys), self.num_blocks)
        lease = self.index.prepare_store(keys[:num_fitting])
        if lease is None:
            usage = self.index.slot_usage(0)
            num_fitting = usage.free + usage.evictable
            lease = self.index.prepare_store(keys[:num_fitting])
            assert lease is not None, "no more than can be free was asked for"
        self.num_stored += self.index.complete(lease)
        return _Stored(
            new=tuple(lease.parts[0].digests) if lease.parts else (),
            unfit=keys.digests[num_fitting:],
            gone=tuple(reversed(lease.evicted[0][1])) if lease.evicted else (),
        )


class _Disk(_Tier):
    """The tier whose writes are worth a thought."""

    def __init__(self, num_unique_blocks: int, plan: TierPlan) -> None:
        super().__init__(plan.disk_blocks, TailFirstLru)
        self._admission: Admission = AdmitAll()
        if plan.disk_admission == "second-reference":
            num_remembered = min(num_unique_blocks, REMEMBERED_PER_DISK_BLOCK * plan.disk_blocks)
            self._admission = SecondReference(max(1, num_remembered))
        # By block.
        self._is_here = np.zeros(num_unique_blocks, np.bool_)
        self._is_admitted = np.zeros(num_unique_blocks, np.bool_)
        self._was_declined = np.zeros(num_unique_blocks, np.bool_)

    @property
    def num_saved_writes(self) -> int:
        return int(np.count_nonzero(self._was_declined))

    def note_reference(self, blocks: Blocks, keys: BlockKeys) -> None:
        """Ask which blocks of a prompt should be written, if they ever fall out of host memory."""
        if not self.num_blocks:
            return
        is_missing = ~self._is_here[blocks]
        missing = list(compress(keys.digests, is_missing.tolist()))
        self._is_admitted[blocks[is_missing]] = self._admission.admit(missing)

    def take(self, digests: tuple[bytes, ...]) -> None:
        """Write what has fallen out of host memory, if it is admitted; what is here already counts as used."""
        blocks = numbers_of(digests)
        is_wanted = self._is_admitted[blocks]  # those that are here were, and are not asked about any more
        self._was_declined[blocks[~is_wanted]] = True
        stored = self.store(of_digests(tuple(compress(digests, is_wanted.tolist()))))
        self._is_here[numbers_of(stored.gone)] = False
        self._is_here[numbers_of(stored.new)] = True
        self._was_declined[numbers_of(stored.new)] = False


class _Tiers:
    """Serve requests from three tiers."""

    def __init__(self, num_unique_blocks: int, host_blocks: int, plan: TierPlan, policy: PolicyFactory) -> None:
        # More slots than there are blocks change nothing but the memory that the replay takes.
        most = max(1, num_unique_blocks)
        host_blocks = min(host_blocks, most)
        plan = replace(
            plan,
            device_blocks=min(plan.device_blocks, most),
            disk_blocks=min(plan.disk_blocks, most),
        )
        self._device = _Tier(plan.device_blocks, TailFirstLru)
        self._host = _Tier(host_blocks, policy)
        self._disk = _Disk(num_unique_blocks, plan)
        self._tiers = [tier for tier in (self._device, self._host, self._disk) if tier.num_blocks]
        self._stores_what_leaves = plan.store_when == "leaving"
        self._is_on_device = np.zeros(num_unique_blocks, np.bool_)  # by block

    @property
    def num_saved_writes(self) -> int:
        return self._disk.num_saved_writes

    def count(self, what: Callable[[_Tier], int]) -> TierCounts:
        """Ask each tier for a number."""
        return TierCounts(what(self._device), what(self._host), what(self._disk))

    def serve(self, blocks: Blocks, keys: BlockKeys) -> None:
        """Find a prompt, and have it on the device."""
        self._disk.note_reference(blocks, keys)
        num_on_device, loads = self._find(keys)
        promoted = [of_digests(tuple(lease.parts[0].digests)) for tier, lease in loads if tier is self._disk]
        for some in promoted:
            self._put_into_host(some)
            loads.append((self._host, self._host.index.match(some)))  # the device loads it from there
        self._put_on_device(blocks, keys)
        for tier, lease in reversed(loads):  # the beginning of the prompt counts as used last
            tier.index.complete(lease)
        if not self._stores_what_leaves:
            self._put_into_host(keys)
            num_on_device = 0  # what was on the device already may be stored here just now
        if self._device.num_blocks:
            self._host.index.enter_device(keys[num_on_device : self._device.num_blocks])

    def _find(self, keys: BlockKeys) -> tuple[int, list[tuple[_Tier, LoadLease]]]:
        """Count the hits; return how many blocks the device has at the beginning, and leases on what others have."""
        loads: list[tuple[_Tier, LoadLease]] = []
        num_on_device = position = 0
        while position < len(keys):
            for tier in self._tiers:
                lease = tier.index.match(keys[position:])
                if len(lease):
                    break
            else:
                break
            tier.num_hits += len(lease)
            position += len(lease)
            if tier is self._device:  # it needs no load
                tier.index.complete(lease)
                num_on_device = num_on_device or (0 if loads else position)
            else:
                loads.append((tier, lease))
        return num_on_device, loads

    def _put_on_device(self, blocks: Blocks, keys: BlockKeys) -> None:
        device = self._device
        if not device.num_blocks:
            return
        left_over = device.store(keys).left_over
        self._is_on_device[blocks] = True
        self._is_on_device[numbers_of(left_over)] = False
        leaving = of_digests(left_over)
        self._host.index.leave_device(leaving)
        if self._stores_what_leaves:
            self._put_into_host(leaving)

    def _put_into_host(self, keys: BlockKeys) -> None:
        gone = self._host.store(keys).left_over
        if not self._disk.num_blocks or not gone:
            return
        if self._stores_what_leaves:
            # What is on the device still comes back to host memory when it leaves: it is not lost.
            is_lost = ~self._is_on_device[numbers_of(gone)]
            gone = tuple(compress(gone, is_lost.tolist()))
        self._disk.take(gone)
