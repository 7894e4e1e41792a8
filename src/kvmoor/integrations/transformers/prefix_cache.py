"""A prefix cache for causal language models of transformers: what a prompt shares with earlier ones is not recomputed.

    restore:  device pool  ->  (host memory -> device pool)  ->  cache object     the longest prefix that is known
    store:    cache object ->   device pool -> host memory                        full blocks that are new

The device pool plays the paged cache of a larger engine: it is small, and what falls out of it comes back from host
memory.
"""

import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvmoor.block_key import BlockKey
from kvmoor.deadlines import checked_timeout
from kvmoor.devices.cpu import CpuDevice
from kvmoor.devices.device import Device
from kvmoor.errors import (
    BrokenError,
    BusyError,
    ClosedError,
    RequestError,
    SettingsError,
    TransferTimeoutError,
    UnsupportedError,
)
from kvmoor.host_memory.arena_plan import ArenaPlan
from kvmoor.index.block_group import SlotUsage
from kvmoor.index.lease import LoadLease, StoreLease
from kvmoor.integrations.transformers.block_pool import BlockPool
from kvmoor.integrations.transformers.cache_objects import (
    StateGeometry,
    cached_tokens,
    capacity,
    fill,
    read_states,
    refuse_mismatch,
    refuse_unsupported,
)
from kvmoor.integrations.transformers.model_identity import measure_geometry, model_namespace, refuse_unsupported_model
from kvmoor.key_builder import KeyBuilder
from kvmoor.observation import Observer
from kvmoor.offloader import Offloader
from kvmoor.offloader_results import OffloaderCloseReport, OffloaderStatistics
from kvmoor.process_end import register
from kvmoor.transfer_messages import OrderId, Outcome

_log = logging.getLogger("kvmoor")


@dataclass(frozen=True, slots=True)
class RestoredPrefix:
    """Say how much of a prompt was put into the cache object; `num_tokens` is the sum of the other two."""

    num_tokens: int
    num_tokens_from_device: int
    num_tokens_from_host: int


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Say how much of a sequence is kept now: its first `num_tokens` tokens are in the device pool.

    `num_tokens_to_device` and `num_tokens_to_host` of them are new there; `reason` says why host memory took none of
    what it lacks, if so.
    """

    num_tokens: int
    num_tokens_to_device: int
    num_tokens_to_host: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PrefixCacheStatistics:
    """The numbers of the device pool and of host memory."""

    device_pool: SlotUsage
    host: OffloaderStatistics


class PrefixCache:
    """Keep the keys and values of prompts, in blocks, on the device and in host memory.

        with PrefixCache(model, host_memory="2GiB") as prefix_cache:
            cache = DynamicCache(config=model.config)
            prefix_cache.restore(input_ids, cache)
            output = model.generate(input_ids, cache=cache)
            prefix_cache.store(output, cache)

    For one sequence at a time, without padding, and a model whose weights stay as they are (`reset` after a change).
    One thread at a time may use it; a second one gets a `BusyError`. A sequence longer than the device pool, or than
    host memory, is kept there as far as it fits.
    """

    def __init__(
        self,
        model: Any,
        *,
        host_memory: int | str,
        device_blocks: int = 128,
        tokens_per_block: int = 16,
        device: Device | None = None,
        transfer_timeout_s: float = 10.0,
        observer: Observer | None = None,
    ) -> None:
        """Look at the model, then open the device pool and host memory.

        Runs one token through the model to see what it caches. `device` (by default a `CpuDevice`) is taken over and
        closed, also when the constructor fails. A copy that takes longer than `transfer_timeout_s` is given up: a miss.
        Raises `UnsupportedError` for a model whose prefixes cannot be kept, `SettingsError` or `NoRoomError` for sizes.
        """
        self._closed = True  # until everything is open
        with ExitStack() as opened:
            if device is not None:
                opened.callback(device.close, 0.0)
            if device_blocks < 1 or tokens_per_block < 1:
                raise SettingsError(
                    f"device_blocks is {device_blocks} and tokens_per_block {tokens_per_block}: give 1 or more of each"
                )
            checked_timeout(transfer_timeout_s, option="transfer_timeout_s", at_least=0.001, error=SettingsError)
            refuse_unsupported_model(model)
            self._geometry = measure_geometry(model)
            if device is None:
                device = _default_device(self._geometry)
                opened.callback(device.close, 0.0)
            self._pool = BlockPool(self._geometry, num_blocks=device_blocks, tokens_per_block=tokens_per_block)
            namespace = model_namespace(model, layout_fingerprint=self._pool.layout.fingerprint)
            self._key_builder = KeyBuilder(namespace, tokens_per_block=tokens_per_block)
            opened.pop_all()  # from here on the offloader closes the device
        self._offloader = Offloader(
            self._pool.layout,
            host_memory=host_memory,
            device=device,
            job_timeout_s=transfer_timeout_s,
            observer=observer,
        )
        self._tokens_per_block = tokens_per_block
        self._transfer_timeout_s = transfer_timeout_s
        # Held while a call works on the pool; nobody waits for it.
        self._in_use = threading.Lock()
        # Rows of the pool that a copy may still touch, by its job: they wait for the result that proves it over.
        self._withheld: dict[OrderId, StoreLease | LoadLease] = {}
        self._closed = False
        register(self, forked=self._forked)

    def _forked(self) -> None:
        """Be closed in a forked child, as the offloader is."""
        self._closed = True

    def restore(self, token_ids: Any, cache: Any) -> RestoredPrefix:
        """Fill an empty cache object with the longest known prefix of a prompt, and say how long it is.

        `token_ids`: the whole prompt, as a list or a tensor ``[tokens]`` or ``[1, tokens]``. At least its last token is
        left to compute. A block that cannot be loaded ends the prefix. Raises `UnsupportedError` for other kinds of
        caches, and `RequestError` for one that holds something already or is too short for the prompt.
        """
        tokens = _one_sequence(token_ids)
        with self._exclusive_use():
            self._check_cache(cache)
            if num_cached := cached_tokens(cache):
                raise RequestError(f"the cache holds {num_cached} tokens already: restore into a new cache")
            limit = capacity(cache)
            if limit is not None and len(tokens) > limit:
                raise RequestError(
                    f"the prompt has {len(tokens)} tokens and the cache holds {limit}: raise its max_cache_len"
                )
            keys = self._key_builder.prompt_keys(tokens)[: (len(tokens) - 1) // self._tokens_per_block]
            with ExitStack() as leases:
                rows, num_from_host = self._lease_prefix(keys, leases)
                if rows:
                    fill(cache, self._pool.read(rows))
        num_tokens = len(rows) * self._tokens_per_block
        num_tokens_from_host = num_from_host * self._tokens_per_block
        return RestoredPrefix(num_tokens, num_tokens - num_tokens_from_host, num_tokens_from_host)

    def store(self, token_ids: Any, cache: Any) -> StoredPrefix:
        """Keep the full blocks of a sequence whose keys and values are in a cache object; returns once they are copied.

        `token_ids`: the prompt and what was generated, in a form that `restore` takes. Tokens without keys and values
        (the last one, usually) are left out, and blocks that are known are not copied again. Raises as `restore` does.
        """
        tokens = _one_sequence(token_ids)
        with self._exclusive_use():
            self._check_cache(cache)
            num_cached = cached_tokens(cache)
            if num_cached > len(tokens):
                raise RequestError(
                    f"the cache holds {num_cached} tokens and {len(tokens)} token ids were given: "
                    "pass the ids of all tokens in the cache, prompt included"
                )
            keys = self._key_builder.prompt_keys(tokens[:num_cached])[: self._pool.room]
            if not keys:
                return StoredPrefix(0, 0, 0)
            num_to_device = self._copy_into_pool(keys, cache)
            num_to_host, reason = self._copy_to_host(keys)
        size = self._tokens_per_block
        return StoredPrefix(len(keys) * size, num_to_device * size, num_to_host * size, reason)

    def reset(self) -> None:
        """Forget every block, on the device and in host memory: call it after the weights have changed."""
        with self._exclusive_use():
            self._pool.index.reset()
            self._offloader.reset()

    def statistics(self) -> PrefixCacheStatistics:
        """Return how full the device pool is, and the numbers of host memory."""
        return PrefixCacheStatistics(self._pool.index.slot_usage(0), self._offloader.statistics())

    @property
    def plan(self) -> ArenaPlan:
        """Return how host memory is divided into slots for blocks."""
        return self._offloader.plan

    @property
    def closed(self) -> bool:
        """Say whether `close` has begun."""
        return self._closed

    def close(self, timeout_s: float | None = None) -> OffloaderCloseReport:
        """End all copies by the deadline, give host memory back, and report what could not be given back.

        Closing twice does no harm. Cache objects that were filled are the caller's and stay as they are.
        """
        self._closed = True
        return self._offloader.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        usage = self._pool.index.slot_usage(0)
        return (
            f"<PrefixCache: {usage.ready} of {usage.published} device blocks, {'closed' if self._closed else 'open'}>"
        )

    def _lease_prefix(self, keys: Sequence[BlockKey], leases: ExitStack) -> tuple[list[int], int]:
        """Return the pool rows of the longest known prefix, held by `leases`, and how many came from host memory.

        Runs of blocks in the pool alternate with runs that are loaded. Each run is leased before the next is loaded, so
        that the end of a prompt cannot push out its beginning.
        """
        rows: list[int] = []
        num_from_host = 0
        while True:
            lease = self._pool.index.match(keys[len(rows) :])
            leases.callback(self._pool.index.complete, lease)
            rows += lease.slots
            num_loaded = self._load_from_host(keys[len(rows) :])
            if not num_loaded:
                return rows, num_from_host
            num_from_host += num_loaded

    def _load_from_host(self, keys: Sequence[BlockKey]) -> int:
        """Bring the first of `keys` into the pool, up to one that is there or not in host memory; return how many."""
        index = self._pool.index
        lacking = list(takewhile(lambda key: not index.contains(key), keys))[: self._pool.room]
        if not lacking:
            return 0
        with self._offloader.match(lacking) as match:
            if not match.num_blocks:
                return 0
            lease = index.prepare_store(match.keys)
            assert lease is not None, "no more was matched than there is room for"
            job_id = None
            outcome = None
            try:
                job_id = self._offloader.submit_load(match, lease.slots)
                outcome = self._wait_for(job_id)
            except BrokenError as error:
                outcome = Outcome.FAILED  # nothing was submitted
                _log.warning("%d blocks were not loaded and are computed: %s", match.num_blocks, error)
            finally:
                if outcome is Outcome.DONE:
                    index.complete(lease)
                elif outcome in (Outcome.FAILED, Outcome.SETTLED):
                    index.abort(lease)
                else:  # the copy may still write to these rows
                    index.hold(lease)
                    if job_id is not None:
                        self._withheld[job_id] = lease
        return match.num_blocks if outcome is Outcome.DONE else 0

    def _copy_into_pool(self, keys: Sequence[BlockKey], cache: Any) -> int:
        """Copy those blocks of the cache object that the pool lacks; return how many."""
        index = self._pool.index
        lease = index.prepare_store(keys)
        assert lease is not None, "there are no more keys than there is room for"
        position = {key: number for number, key in enumerate(keys)}
        try:
            states = read_states(cache, len(keys) * self._tokens_per_block)
            self._pool.write(lease.slots, states, [position[key] for key in lease.keys])
        except BaseException:
            index.abort(lease)
            raise
        index.complete(lease)
        return len(lease.keys)

    def _copy_to_host(self, keys: Sequence[BlockKey]) -> tuple[int, str]:
        """Copy those blocks of the pool that host memory lacks; return how many, and why it took less if it did."""
        index = self._pool.index
        num_host_blocks = self.plan.groups[0].num_slots
        lease = index.match(keys[:num_host_blocks])  # leased, so that no row is filled anew while it is copied
        job_id = None
        outcome = None
        try:
            submission = self._offloader.submit_store(lease.keys, lease.slots)
            job_id = submission.job_id
            if job_id is None:
                outcome = Outcome.DONE
                return 0, submission.declined
            outcome = self._wait_for(job_id)
        except BrokenError as error:
            outcome = Outcome.FAILED  # nothing was submitted
            return 0, str(error)
        finally:
            if outcome in (Outcome.DONE, Outcome.FAILED, Outcome.SETTLED):
                index.complete(lease)
            elif job_id is not None:  # the copy may still read these rows
                self._withheld[job_id] = lease
            # else it is unknown whether a copy began: the lease stays open, which is always safe
        if outcome is Outcome.DONE:
            return submission.num_submitted, ""
        return 0, "the copy failed" if outcome is Outcome.FAILED else "the copy was given up"

    def _wait_for(self, job_id: OrderId) -> Outcome | None:
        """Wait until a job is over and return how it ended; None or ABANDONED if that is not known in time."""
        with suppress(TransferTimeoutError):
            self._offloader.wait([job_id], self._transfer_timeout_s)
        return self._take_results().get(job_id)

    def _take_results(self) -> dict[OrderId, Outcome]:
        """Return what became of jobs since the last call, and free the rows of those that were withheld."""
        outcomes = {result.job_id: result.outcome for result in self._offloader.poll_results()}
        for job_id, outcome in outcomes.items():
            if outcome is Outcome.ABANDONED or job_id not in self._withheld:
                continue
            lease = self._withheld.pop(job_id)
            if isinstance(lease, StoreLease):
                self._pool.index.release_held(lease)
            else:
                self._pool.index.complete(lease)
        return outcomes

    @contextmanager
    def _exclusive_use(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise BusyError("another thread is using this prefix cache: give each thread one of its own, or take turns")
        try:
            if self._closed:
                raise ClosedError("the prefix cache is closed: use it inside its `with` block")
            self._take_results()
            yield
        finally:
            self._in_use.release()

    def _check_cache(self, cache: Any) -> None:
        refuse_unsupported(cache)
        refuse_mismatch(cache, self._geometry)


def _default_device(geometry: StateGeometry) -> Device:
    if geometry.device.type != "cpu":
        raise UnsupportedError(
            f"the model keeps its states on {geometry.device}: pass a `device` that copies from there, or move it"
        )
    return CpuDevice()


def _one_sequence(token_ids: Any) -> list[int]:
    """Read the ids of one sequence from a list, an array or a tensor; a batch axis of 1 is dropped."""
    ids = np.asarray(token_ids.cpu() if hasattr(token_ids, "cpu") else token_ids)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise UnsupportedError(
            f"{ids.shape[0]} sequences were given: kvmoor handles one at a time, so call it for each"
        )
    ids = ids.reshape(-1) if ids.ndim == 2 else ids
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise RequestError(
            f"token_ids has shape {ids.shape} and type {ids.dtype}: give one sequence of at least one token id"
        )
    return [int(token) for token in ids]
