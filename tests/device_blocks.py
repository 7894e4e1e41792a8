"""Device tensors for tests: numpy arrays whose blocks can be filled with a pattern and compared."""

import numpy as np
from numpy.typing import NDArray

from kvmoor.block_key import BlockKey, digest_fields
from kvmoor.block_layout import BlockLayout


class DeviceBlocks:
    """`num_tensors` arrays ``[num_blocks, page_nbytes]`` in host memory, as an engine would hold them."""

    def __init__(self, num_blocks: int = 16, page_nbytes: int = 512, num_tensors: int = 3, seed: int = 0) -> None:
        self.tensors = [np.zeros((num_blocks, page_nbytes), dtype=np.uint8) for _ in range(num_tensors)]
        self._seed = seed

    def layout(self, *, tokens_per_block: int = 16, blocks_per_chunk: int = 1) -> BlockLayout:
        """Describe the arrays as one group."""
        return BlockLayout.from_tensors(
            self.tensors, block_axis=0, tokens_per_block=tokens_per_block, blocks_per_chunk=blocks_per_chunk
        )

    def pattern(self, number: int) -> NDArray[np.uint8]:
        """Return the content of block content `number`: ``[num_tensors, page_nbytes]``, different for every number."""
        shape = (len(self.tensors), self.tensors[0].shape[1])
        return np.random.default_rng((self._seed, number)).integers(0, 256, shape, dtype=np.uint8)

    def fill(self, block_id: int, number: int) -> None:
        """Write the content `number` into a device block."""
        for tensor, page in zip(self.tensors, self.pattern(number), strict=True):
            tensor[block_id] = page

    def poison(self) -> None:
        """Overwrite every device block with 0xEE."""
        for tensor in self.tensors:
            tensor[:] = 0xEE

    def content(self, block_id: int) -> NDArray[np.uint8]:
        """Return what a device block holds now: ``[num_tensors, page_nbytes]``."""
        return np.stack([tensor[block_id] for tensor in self.tensors])


def content_key(number: int, group: int = 0) -> BlockKey:
    """Return the key of block content `number`."""
    return BlockKey(digest_fields({"content": number, "group": group}), group)


def content_keys(*numbers: int) -> list[BlockKey]:
    """Return the keys of several block contents."""
    return [content_key(number) for number in numbers]
