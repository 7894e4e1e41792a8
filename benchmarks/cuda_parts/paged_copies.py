"""Jobs of random blocks between GPU tensors and a real, registered arena; both directions can be checked at once."""

from types import TracebackType
from typing import Any, Self

import numpy as np
from cuda_parts.bench_gpu import WAIT_S, BenchGpu
from numpy.typing import NDArray

from kvmoor.block_layout import BlockLayout, GroupLayout, TensorPages
from kvmoor.devices.device import BlockCopies, Direction
from kvmoor.host_memory.arena import Arena
from kvmoor.host_memory.arena_plan import plan_arena

KIB, MIB, GIB = 2**10, 2**20, 2**30
POISON = 0xEE
HOW_SLOTS_LIE = (
    "The blocks of a job are random; their slots fill the whole arena in random order, so that sorted they form long "
    "runs. With slots that are scattered (runs shorter than `gather_from_nbytes`) the page kernel copies: see "
    "`cuda_copies_sweep`."
)


class PagedCopies:
    """`nbytes` of blocks, each a page in every tensor: stored from one set of tensors, loaded into another.

    The tensors hold twice as many blocks. Which blocks, and which slots for them, is random.
    """

    def __init__(
        self, gpu: BenchGpu, device: Any, page_nbytes: int, *, nbytes: int = GIB, num_tensors: int | None = None
    ) -> None:
        torch = gpu.torch
        self._torch = torch
        self.page_nbytes = page_nbytes
        self.num_tensors = num_tensors or (32 if page_nbytes < MIB else 8)
        self.num_blocks = max(1, nbytes // (page_nbytes * self.num_tensors))
        self.nbytes = self.num_blocks * page_nbytes * self.num_tensors
        pool = 2 * self.num_blocks
        shape = (self.num_tensors, pool, page_nbytes)
        self.source = torch.empty(shape, dtype=torch.uint8, device="cuda")
        self.source.view(torch.int32).random_()
        self.target = torch.full(shape, POISON, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        random = np.random.default_rng(page_nbytes)
        self._stored = random.permutation(pool)[: self.num_blocks]
        self._loaded = random.permutation(pool)[: self.num_blocks]
        source_group, target_group = self._describe(self.source), self._describe(self.target)
        self._opened_arena = self._open_arena(device, source_group)
        addresses = self._opened_arena.slot_addresses(0, random.permutation(self.num_blocks))
        self.copies = {
            Direction.DEVICE_TO_HOST: (BlockCopies(source_group, self._stored, addresses),),
            Direction.HOST_TO_DEVICE: (BlockCopies(target_group, self._loaded, addresses),),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened_arena.close(WAIT_S)
        self.copies.clear()
        del self.source, self.target
        self._torch.cuda.empty_cache()

    def page_addresses(self, direction: Direction) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return destination, source and size of each page, int64 ``[num_blocks * num_tensors]``, block by block."""
        (part,) = self.copies[direction]
        group = part.group
        bases = np.array([tensor.base for tensor in group.tensors])
        strides = np.array([tensor.block_stride for tensor in group.tensors])
        on_device = (bases + part.block_ids[:, None] * strides).ravel()
        in_slots = (part.slot_addresses[:, None] + np.array(group.page_offsets)).ravel()
        sizes = np.full(on_device.size, self.page_nbytes, np.int64)
        if direction is Direction.DEVICE_TO_HOST:
            return in_slots, on_device, sizes
        return on_device, in_slots, sizes

    def poison_target(self) -> None:
        """Overwrite what loads write to."""
        self.target.fill_(POISON)
        self._torch.cuda.synchronize()

    def assert_right(self) -> None:
        """Compare every byte that went to host memory and back, and see that a load wrote nowhere else."""
        torch = self._torch
        stored, loaded = (torch.from_numpy(ids).cuda() for ids in (self._stored, self._loaded))
        rest = torch.ones(2 * self.num_blocks, dtype=torch.bool, device="cuda")
        rest[loaded] = False
        for number in range(self.num_tensors):
            if not torch.equal(self.source[number, stored], self.target[number, loaded]):
                raise SystemExit(f"pages of {self.page_nbytes} bytes came back changed in tensor {number}")
            if not bool((self.target[number, rest] == POISON).all()):
                raise SystemExit(f"a load of pages of {self.page_nbytes} bytes wrote to blocks it was not given")

    def _describe(self, tensor: Any) -> GroupLayout:
        stride = self.page_nbytes
        num_blocks = 2 * self.num_blocks
        pages = (
            TensorPages(tensor.data_ptr() + number * num_blocks * stride, num_blocks, stride, self.page_nbytes)
            for number in range(self.num_tensors)
        )
        return GroupLayout(tuple(pages), tokens_per_block=16, tensor_owners=(tensor,))

    def _open_arena(self, device: Any, group: GroupLayout) -> Arena:
        layout = BlockLayout((group,), on_host=False)
        nbytes = self.num_blocks * group.slot_nbytes + 128 * MIB  # whole slabs waste a little
        plan = plan_arena(layout, nbytes, memory_check="warn")
        return Arena(plan, mapping="eager", pin="eager", registrar=device.registrar, name="bench")
