"""Where the blocks of an engine's device tensors are, and how one block is laid out in its slot.

    device tensor:   base + i * block_stride  ->  page of device block i   (page_nbytes, contiguous)
    slot:            | tensor 0: page of device block 0 .. c-1 | tensor 1: ... | padding to 4 KiB |

c is `blocks_per_chunk`: how many device blocks make up one block (one key). Pages are opaque bytes: padding and side
tables (scales, indices) travel with them, as long as the description covers them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Final

from kvmoor.block_key import digest_fields
from kvmoor.byte_sizes import round_up
from kvmoor.dlpack import TensorView, read_tensor
from kvmoor.errors import LayoutError
from kvmoor.page_overlap import find_overlap

SLOT_ALIGNMENT: Final = 4096
"""A slot begins and ends on a 4 KiB boundary, so that direct I/O and page-locking take it as it is."""
_FORMAT: Final = 1
_MAX_ADDRESS: Final = 2**57
"""Above what a process can address, on every architecture."""


@dataclass(frozen=True, slots=True)
class TensorPages:
    """Describe the pages of one device tensor: the page of device block i is at ``base + i * block_stride``.

    `content` says what the bytes of a page mean (dtype, head order, packing): it goes into the fingerprint, because
    pages of one size can hold different things.
    """

    base: int
    num_blocks: int
    block_stride: int
    page_nbytes: int
    content: str = "opaque"

    def __post_init__(self) -> None:
        check_whole_numbers(
            base=self.base, num_blocks=self.num_blocks, block_stride=self.block_stride, page_nbytes=self.page_nbytes
        )
        if self.base <= 0:
            raise LayoutError(f"the base address of a tensor is {self.base}: give the address of its first page")
        if self.num_blocks < 1 or self.page_nbytes < 1:
            raise LayoutError(
                f"a tensor has {self.num_blocks} blocks of {self.page_nbytes} bytes: give at least one of each"
            )
        if self.block_stride < 0:
            raise LayoutError(
                f"the block stride of a tensor is {self.block_stride}: describe it from its lowest address upwards"
            )
        if self.base + (self.num_blocks - 1) * self.block_stride + self.page_nbytes >= _MAX_ADDRESS:
            raise LayoutError(
                f"{self.num_blocks} blocks from address {self.base:#x}, {self.block_stride} bytes apart, reach beyond "
                "what can be addressed: check base, number of blocks and stride"
            )
        if self.num_blocks > 1 and self.block_stride < self.page_nbytes:
            raise LayoutError(
                f"pages of {self.page_nbytes} bytes lie {self.block_stride} bytes apart, so they overlap: "
                "the block stride has to be at least the page size"
            )


@dataclass(frozen=True)
class GroupLayout:
    """Describe the tensors of one group, whose blocks have one geometry.

    `tokens_per_block` counts the tokens of a whole block (all its `blocks_per_chunk` device blocks). A group may have
    no tensors on this rank: its blocks then have no bytes. Pages of one group may not overlap; raises `LayoutError`.
    """

    tensors: tuple[TensorPages, ...]
    tokens_per_block: int
    blocks_per_chunk: int = 1
    tensor_owners: tuple[object, ...] = field(default=(), repr=False, compare=False)
    """What keeps the tensors alive: as long as a copy of this group is queued or running, so are they."""

    def __post_init__(self) -> None:
        check_whole_numbers(tokens_per_block=self.tokens_per_block, blocks_per_chunk=self.blocks_per_chunk)
        if not isinstance(self.tensors, tuple):
            raise LayoutError(
                f"the tensors of a group are a {type(self.tensors).__name__}: give a tuple of TensorPages"
            )
        if self.blocks_per_chunk < 1:
            raise LayoutError(f"blocks_per_chunk is {self.blocks_per_chunk}: give 1 or more")
        if self.tokens_per_block < 1 or self.tokens_per_block % self.blocks_per_chunk:
            raise LayoutError(
                f"tokens_per_block is {self.tokens_per_block} with {self.blocks_per_chunk} device blocks in a block: "
                "give the tokens of a whole block, a multiple of blocks_per_chunk"
            )
        counts = {tensor.num_blocks for tensor in self.tensors}
        if len(counts) > 1:
            raise LayoutError(
                f"the tensors of one group have {sorted(counts)} blocks: an id has to name one block in all of them"
            )
        ranges = [(t.base, t.num_blocks, t.block_stride, t.page_nbytes) for t in self.tensors]
        if (pair := find_overlap(ranges)) is not None:
            first, second = pair
            raise LayoutError(
                f"pages of tensor {first} and tensor {second} of one group overlap in memory: "
                "pass aliased tensors once, or put them into different groups"
            )

    @property
    def num_device_blocks(self) -> int:
        """Return how many device blocks there are; 0 for a group without tensors."""
        return self.tensors[0].num_blocks if self.tensors else 0

    @cached_property
    def page_offsets(self) -> tuple[int, ...]:
        """Return where in a slot the pages of each tensor begin, in bytes."""
        offsets = []
        end = 0
        for tensor in self.tensors:
            offsets.append(end)
            end += tensor.page_nbytes * self.blocks_per_chunk
        return tuple(offsets)

    @cached_property
    def block_nbytes(self) -> int:
        """Return how many bytes one block holds."""
        return self.blocks_per_chunk * sum(tensor.page_nbytes for tensor in self.tensors)

    @cached_property
    def slot_nbytes(self) -> int:
        """Return the distance between neighbouring slots: `block_nbytes` rounded up to 4 KiB."""
        return round_up(self.block_nbytes, SLOT_ALIGNMENT)


@dataclass(frozen=True)
class BlockLayout:
    """Describe all groups of an engine's device tensors.

    Build it with `from_tensors`, which keeps the tensors alive, or from explicit `GroupLayout` records, whose
    `tensor_owners` do. Immutable; any thread may read it.
    """

    groups: tuple[GroupLayout, ...]
    on_host: bool = True
    """Whether the tensors lie in memory that the CPU reads and writes itself."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a layout has no groups: describe at least one")
        if not any(group.tensors for group in self.groups):
            raise LayoutError("no group of the layout has a tensor: there is nothing to keep")

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Any],
        *,
        block_axis: int,
        tokens_per_block: int,
        blocks_per_chunk: int = 1,
        content: str = "",
    ) -> "BlockLayout":
        """Describe one group of DLPack tensors whose axis `block_axis` counts device blocks.

        The axis is stated, never inferred: shapes cannot tell blocks from heads. Behind it a page has to be contiguous;
        axes before it become separate pages, one each (``[2, num_blocks, ...]``: one of keys, one of values).
        `content` names what dtype and shape do not tell (head order, packing, quantisation).
        Raises `LayoutError` for what cannot be described so.
        """
        if hasattr(tensors, "__dlpack__"):
            raise LayoutError("one tensor was given: pass a list of tensors, also for a single one")
        check_whole_numbers(block_axis=block_axis)
        owners = tuple(tensors)
        views = [read_tensor(tensor) for tensor in owners]
        if not views:
            raise LayoutError("no tensors were given: pass at least one")
        if len({view.on_cpu for view in views}) > 1:
            raise LayoutError("some tensors lie in host memory and some on a GPU: describe them with one layout each")
        pages = [page for view in views for page in _pages_of(view, block_axis, content)]
        group = GroupLayout(tuple(pages), tokens_per_block, blocks_per_chunk, tensor_owners=owners)
        return cls((group,), on_host=views[0].on_cpu)

    @cached_property
    def fingerprint(self) -> bytes:
        """Return 32 bytes that change with everything that shapes the bytes of a block.

        Addresses, strides and the number of device blocks are left out: they say where a block is, not what it holds.
        """
        fields: dict[str, str | int | bytes] = {"format": _FORMAT, "num_groups": len(self.groups)}
        for index, group in enumerate(self.groups):
            fields[f"{index}.tokens_per_block"] = group.tokens_per_block
            fields[f"{index}.blocks_per_chunk"] = group.blocks_per_chunk
            fields[f"{index}.num_tensors"] = len(group.tensors)
            for number, tensor in enumerate(group.tensors):
                fields[f"{index}.{number}.page_nbytes"] = tensor.page_nbytes
                fields[f"{index}.{number}.content"] = tensor.content
        return digest_fields(fields)


def check_whole_numbers(**values: object) -> None:
    """Raise `LayoutError` for a value that is not a whole number, by its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise LayoutError(f"{name} is {value!r}: give a whole number")


def _pages_of(view: TensorView, block_axis: int, content: str) -> Iterable[TensorPages]:
    rank = len(view.shape)
    if not 0 <= block_axis < rank:
        raise LayoutError(
            f"block_axis is {block_axis} for a tensor of shape {view.shape}: give an axis from 0 to {rank - 1}"
        )
    if 0 in view.shape:
        raise LayoutError(f"a tensor has shape {view.shape} and no bytes: pass tensors with at least one block")
    page_shape = view.shape[block_axis + 1 :]
    page_nbytes = view.item_nbytes
    for size, stride in zip(reversed(page_shape), reversed(view.strides[block_axis + 1 :]), strict=True):
        if size != 1 and stride != page_nbytes:
            raise LayoutError(
                f"the pages of a tensor of shape {view.shape} with byte strides {view.strides} are not contiguous "
                f"behind axis {block_axis}: pass the tensor the engine allocated, not a transposed view of it"
            )
        page_nbytes *= size
    bases = [view.address]
    for size, stride in zip(view.shape[:block_axis], view.strides[:block_axis], strict=True):
        bases = [base + index * stride for base in bases for index in range(size)]
    meaning = f"{view.dtype}{list(page_shape)}" + (f" {content}" if content else "")
    return [TensorPages(base, view.shape[block_axis], view.strides[block_axis], page_nbytes, meaning) for base in bases]
