"""Close an offloader beside a stream that hangs, a context that is broken, or nothing wrong; say how long it took.

bounded_end.py idle | hang-store | hang-load | hang-many | hang-engine | trap | trap-queued
"""

import sys
import time
from typing import Any

from device_blocks import content_keys
from gpu_child import end_with_parent, report
from gpu_rig import WAIT_S, Gpu, Latch
from kvmoor.block_layout import BlockLayout
from kvmoor.errors import KvmoorError
from kvmoor.offloader import Offloader
from kvmoor.process_end import abandon_process

DEADLINE_S = 2.0
NUM_BLOCKS = 64
HELD_S = 120.0  # far longer than the watchdog waits


def main(case: str) -> None:
    gpu = Gpu(host_nbytes=2**20)
    torch = gpu.torch
    cache = torch.randint(0, 256, (8, NUM_BLOCKS, 64 * 1024), dtype=torch.uint8, device="cuda")
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    device = gpu.open_device()
    offloader = Offloader(layout, host_memory="512MiB", device=device, pin="eager")
    keys = content_keys(*range(NUM_BLOCKS // 2))
    offloader.wait([offloader.submit_store(keys, range(len(keys))).job_id], WAIT_S)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    latch = Latch(gpu.host_memory(4096))
    with torch.cuda.stream(stream):
        if case.startswith("hang") or case == "trap-queued":
            gpu.launch_hold(stream.cuda_stream, latch.address, limit_s=HELD_S)
        if case == "trap-queued":  # what is queued next waits for it and can never begin
            gpu.launch_trap(stream)
        submitted = []
        if case in ("hang-store", "trap-queued"):
            submitted.append(offloader.submit_store(content_keys(1000), [40]).job_id)
        if case == "hang-load":
            submitted.append(offloader.submit_load(offloader.match(keys[:8]), range(32, 40)))
        if case == "hang-many":
            for number in range(200):
                submitted.append(offloader.submit_store(content_keys(1000 + number), [40]).job_id)
                submitted.append(offloader.submit_load(offloader.match(keys[:8]), range(48, 56)))
        if case == "trap-queued":
            latch.release()
            _wait_for_fault(stream)
        if case == "trap":
            gpu.launch_trap(stream)
            _wait_for_fault(stream)
            try:
                submitted.append(offloader.submit_store(content_keys(1000), [40]).job_id)
            except KvmoorError as error:
                print("refused:", error)
    begin = time.monotonic()
    closed = offloader.close(DEADLINE_S)
    seconds = time.monotonic() - begin
    begin = time.monotonic()
    again = offloader.close(DEADLINE_S)
    outcomes = [result.outcome.value for result in offloader.poll_results()]
    report(
        seconds=seconds,
        seconds_again=time.monotonic() - begin,
        same_report=again.worker == closed.worker,
        quarantined_nbytes=closed.worker.quarantined_nbytes,
        unproven_jobs=list(closed.worker.unproven_jobs),
        reason=closed.worker.reason,
        graceful=closed.worker.graceful,
        steps={step.name: [step.proven, step.error] for step in closed.worker.steps},
        submitted=[int(job) for job in submitted if job is not None],
        outcomes=outcomes,
        broken=device.broken,
    )
    abandon_process(0)


def _wait_for_fault(stream: Any) -> None:
    """Wait until the driver knows that the context is broken, as a busy engine soon would."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            if stream.query():
                break
        except RuntimeError:
            return
    raise SystemExit("the trap broke nothing")


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1])
