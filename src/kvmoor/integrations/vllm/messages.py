"""What crosses from the scheduler's half of the plugin to a worker's inside vLLM's own jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmoor.errors import RequestError
from kvmoor.transfer_messages import Order, OrderId, OrderKind, OrderPart
from kvmoor.transfers.copy_plan import DeviceBlocks

NOT_COPIED: Final = -1
"""In place of a slot: this block of a chunk is stored already."""


@dataclass(frozen=True, slots=True, eq=False)
class HostSlots:
    """Say which slots one order fills or reads: for each group int32 ``[chunks * blocks_per_chunk]``.

    vLLM carries it to every rank as the host's side of a job, pickled if it has to.
    """

    order_id: OrderId
    slots: tuple[NDArray[np.int32], ...]


def pair_with_device(
    kind: OrderKind,
    host: HostSlots,
    *,
    block_ids: NDArray[np.int32],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    blocks_per_chunk: int,
) -> tuple[Order, DeviceBlocks]:
    """Pair slots with vLLM's device blocks: an order, and the blocks it needs beside it.

    vLLM lists for each group the device blocks of successive chunks. The first chunk may lack its head, which is then
    ``block_indices[group] % blocks_per_chunk`` blocks long, and the last one its tail. A load leaves out what is not
    asked for; a store that does not cover a chunk would leave it with a hole, and is refused. Raises `RequestError`.
    """
    parts, blocks = [], {}
    begin = 0
    for group, (size, index) in enumerate(zip(group_sizes, block_indices, strict=True)):
        ids = block_ids[begin : begin + size].astype(np.int64)
        begin += size
        slots = host.slots[group]
        head = index % blocks_per_chunk if size else 0
        num_chunks = -(-(head + size) // blocks_per_chunk)
        if num_chunks * blocks_per_chunk != len(slots):
            raise RequestError(
                f"group {group} of order {host.order_id} has {len(slots)} slots for {size} device blocks behind "
                f"{head} that are left out: vLLM left out some in between, so it is not known which"
            )
        covered = slots[head : head + size]
        if kind is OrderKind.DEVICE_TO_SLOT and np.count_nonzero(covered >= 0) != np.count_nonzero(slots >= 0):
            raise RequestError(f"order {host.order_id} stores chunks of group {group} without some of their blocks")
        is_copied = covered >= 0
        if is_copied.any():
            parts.append(OrderPart(group, tuple(covered[is_copied].tolist())))
            blocks[group] = ids[is_copied, None]
    return Order(host.order_id, kind, tuple(parts)), blocks
