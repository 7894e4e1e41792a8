"""The device cache: a fixed number of blocks in torch tensors, and which block of which prompt each of them holds."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from kvmoor.block_layout import BlockLayout
from kvmoor.index.block_index import BlockIndex
from kvmoor.integrations.transformers.cache_objects import StateGeometry
from kvmoor.transfer_messages import SlotRange

_CONTENT: Final = "[kv_heads, tokens_per_block, head_dim], keys and values of each layer in turn"


class BlockPool:
    """Keep blocks of keys and values on the model's device.

    There is one tensor ``[num_blocks, kv_heads, tokens_per_block, head_dim]`` a state (see `cache_objects`), and row i
    of all of them is one block. `index` says which key is in which row: the index that serves host memory as well, with
    rows for slots. Not thread-safe.
    """

    def __init__(self, geometry: StateGeometry, *, num_blocks: int, tokens_per_block: int) -> None:
        """Allocate the tensors, with nothing in them."""
        self._tokens_per_block = tokens_per_block
        shapes = [(num_blocks, kv_heads, tokens_per_block, dim) for kv_heads, dim in geometry.heads_and_dims]
        if len(set(shapes)) == 1:
            # Cut from one allocation, tensors lie at equal distances, and the pages of a block are cheap to address.
            whole = torch.empty((len(shapes), *shapes[0]), dtype=geometry.dtype, device=geometry.device)
            self._states = list(whole.unbind(0))
        else:
            self._states = [torch.empty(shape, dtype=geometry.dtype, device=geometry.device) for shape in shapes]
        self.layout = BlockLayout.from_tensors(
            self._states, block_axis=0, tokens_per_block=tokens_per_block, content=_CONTENT
        )
        self.index = BlockIndex(num_groups=1)
        self.index.publish(SlotRange(group=0, first=0, num_slots=num_blocks))

    @property
    def room(self) -> int:
        """Return how many blocks a prompt can have here now, if all that nobody holds give way."""
        usage = self.index.slot_usage(0)
        return usage.free + usage.ready + usage.outdated + usage.draining - usage.leased  # draining ones are leased

    def write(self, rows: Sequence[int], states: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
        """Copy blocks of a prompt into rows: of the whole blocks in `states`, those at `positions`."""
        with torch.no_grad():
            for mine, state in zip(self._states, states, strict=True):
                blocks = state.unflatten(
                    1, (-1, self._tokens_per_block)
                )  # [kv_heads, blocks, tokens_per_block, head_dim]
                mine[list(rows)] = blocks[:, list(positions)].transpose(0, 1)

    def read(self, rows: Sequence[int]) -> Iterator[torch.Tensor]:
        """Copy rows out, one state after the other: ``[kv_heads, len(rows) * tokens_per_block, head_dim]`` each."""
        chosen = torch.tensor(rows, device=self._states[0].device)
        for mine in self._states:
            yield mine.transpose(0, 1).index_select(1, chosen).flatten(1, 2)
