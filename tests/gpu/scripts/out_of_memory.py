"""Take all GPU memory, then use kvmoor: it works, or says what is missing; with memory back it works.

out_of_memory.py device | staging | host
"""

import sys
from contextlib import suppress
from typing import Any

from device_blocks import content_keys
from gpu_child import end_with_parent, report
from gpu_rig import WAIT_S, Gpu
from kvmoor.block_layout import BlockLayout
from kvmoor.errors import KvmoorError, NoRoomError
from kvmoor.offloader import Offloader
from kvmoor.process_end import abandon_process

NUM_BLOCKS = 64


def main(case: str) -> None:
    gpu = Gpu(host_nbytes=2**20)
    torch = gpu.torch
    cache = torch.randint(0, 256, (8, NUM_BLOCKS, 64 * 1024), dtype=torch.uint8, device="cuda")
    original = cache.clone()
    scratch = original.clone()
    int(scratch.ne_(original).sum())  # loads the kernels while there is room for them
    torch.cuda.synchronize()
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    if case == "staging":
        device = gpu.open_device()
        try:
            device.allocate_staging(2**47)  # more than can be addressed, so that nothing is tried
        except KvmoorError as error:
            found = type(error).__name__
        else:
            found = "it was given"
        report(error=found, closed=device.close(WAIT_S), broken=device.broken)
        abandon_process(0)
    taken = take_all(gpu)
    small = "" if case == "host" else try_to_copy(gpu, layout, cache, original, scratch, 256 * 2**20)
    # So much that its page tables find no room on the GPU: what is refused has to be staged.
    large = try_to_copy(gpu, layout, cache, original, scratch, 8 * 2**30) if case == "host" else ""
    for address in taken:
        gpu.driver.memory_free(address)
    after = try_to_copy(gpu, layout, cache, original, scratch, 256 * 2**20)
    report(small=small, large=large, after=after, taken_gb=len(taken))
    abandon_process(0)


def take_all(gpu: Gpu) -> list[int]:
    """Allocate in ever smaller pieces until nothing is left."""
    taken: list[int] = []
    nbytes = 2**34
    while nbytes >= 2**16:
        try:
            taken.append(gpu.driver.memory_alloc(nbytes))
        except KvmoorError:
            nbytes //= 2
    return taken


def try_to_copy(gpu: Gpu, layout: BlockLayout, cache: Any, original: Any, scratch: Any, nbytes: int) -> str:
    """Store and load everything; return "right", or the error in one line."""
    scratch.copy_(cache)
    keys = content_keys(*range(NUM_BLOCKS))
    try:
        device = gpu.open_device()
        with Offloader(
            layout, host_memory=nbytes, device=device, memory_check="warn", close_timeout_s=20.0
        ) as offloader:
            offloader.wait_registered(WAIT_S)
            offloader.wait([offloader.submit_store(keys, range(NUM_BLOCKS)).job_id], WAIT_S)
            cache.fill_(0xEE)
            offloader.wait([offloader.submit_load(offloader.match(keys), range(NUM_BLOCKS))], WAIT_S)
            arena = offloader.statistics().transfers.arena
            print(arena.registration_mode, arena.registration_reason, arena.registered_nbytes)
            outcomes = {result.outcome.value for result in offloader.poll_results()}
    except (KvmoorError, NoRoomError) as error:
        with suppress(RuntimeError):
            cache.copy_(scratch)
        return f"{type(error).__name__}: {error}"
    gpu.torch.cuda.current_stream().synchronize()
    difference = cache.ne_(original).sum() if outcomes == {"done"} else None  # in place: there is no memory left
    wrong = None if difference is None else int(difference)
    cache.copy_(original)
    return "right" if wrong == 0 else f"outcomes {sorted(outcomes)}, {wrong} bytes differ"


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1])
