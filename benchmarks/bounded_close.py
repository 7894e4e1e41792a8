"""Does closing end by its deadline, and does it leave anything behind?

1. An `Offloader` is closed beside copies in flight, a copy that never ends, or a registrar that blocks, and a reader of
   a shared arena is closed after its owner was killed: seconds against the deadline, and what is quarantined.
2. Many offloaders are opened, store a block, load it and close: descriptors, mappings and threads before and after.
   The first cycles are not counted, because libc keeps stacks of ended threads for the next ones. It also makes, splits
   and joins heaps of its own, so the mappings may differ by a few; a leak of ours would be at least one a cycle.
"""

import argparse
import json
import multiprocessing
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from print_parts.machine import machine

import kvmoor
from kvmoor import BlockKey, BlockLayout, CpuDevice, Offloader
from kvmoor.host_memory.arena_plan import plan_arena
from kvmoor.host_memory.attached_arena import AttachedArena
from kvmoor.host_memory.slab_memory import Backing
from kvmoor.testing import ScriptedCopies, ScriptedRegistrar
from kvmoor.worker import TransferWorker

WAIT_S = 30.0
MAPPINGS_OF_LIBC = 8
KEY = BlockKey(bytes(32))


def held_resources() -> dict[str, int]:
    """Count what this process holds."""
    return {
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": threading.active_count(),
    }


def open_offloader(tensor: np.ndarray, device: CpuDevice, **options: Any) -> Offloader:
    """Open 64 MiB of host memory for the blocks of a tensor."""
    layout = BlockLayout.from_tensors([tensor], block_axis=0, tokens_per_block=16)
    return Offloader(layout, host_memory="64MiB", device=device, **options)


def timed_close(name: str, owner: Any, deadline_s: float) -> dict[str, Any]:
    """Close and compare with the deadline."""
    started = time.monotonic()
    report = owner.close(deadline_s)
    seconds = time.monotonic() - started
    return {
        "beside": name,
        "deadline_s": deadline_s,
        "seconds": round(seconds, 3),
        "over_s": round(seconds - deadline_s, 3),
        "quarantined_nbytes": 0 if isinstance(report, bool) else report.worker.quarantined_nbytes,
    }


def close_beside_copies_in_flight(deadline_s: float) -> dict[str, Any]:
    """Close beside copies of both directions that take a while each."""
    tensor = np.ones((8, 2**20), np.uint8)
    scripted = ScriptedCopies()
    offloader = open_offloader(tensor, CpuDevice(copy_hook=scripted), mapping="eager")
    offloader.wait([offloader.submit_store([KEY], [0]).job_id], WAIT_S)
    scripted.delay(0.02)
    offloader.submit_store([BlockKey(bytes([number] * 32)) for number in range(1, 5)], range(1, 5))
    offloader.submit_load(offloader.match([KEY]), [6])
    return timed_close("copies in flight both ways", offloader, deadline_s)


def close_beside_endless_copy(deadline_s: float, queue: str) -> dict[str, Any]:
    """Close beside a copy that hangs on one lane."""
    tensor = np.ones((8, 2**20), np.uint8)
    scripted = ScriptedCopies()
    device = CpuDevice(copy_hook=scripted)
    offloader = open_offloader(tensor, device, mapping="eager")
    offloader.wait([offloader.submit_store([KEY], [0]).job_id], WAIT_S)
    gate = scripted.hang_at(0 if queue == "load" else 1, queue=queue)
    if queue == "load":
        offloader.submit_load(offloader.match([KEY]), [1])
    else:
        offloader.submit_store([BlockKey(bytes([1] * 32))], [1])
    assert gate.wait_reached(WAIT_S)
    result = timed_close(f"an endless {queue}", offloader, deadline_s)
    scripted.release_all()
    device.close(WAIT_S)
    return result


def close_beside_blocked_registrar(deadline_s: float, operation: str) -> dict[str, Any]:
    """Close while a registrar does not return from registering, or will not from unregistering."""
    tensor = np.ones((8, 2**20), np.uint8)
    registrar = ScriptedRegistrar()
    gate = registrar.hold_at(0, operation=operation)
    offloader = open_offloader(tensor, CpuDevice(registrar=registrar))
    if operation == "register":
        assert gate.wait_reached(WAIT_S)
    else:
        offloader.wait([offloader.submit_store([KEY], [0]).job_id], WAIT_S)
    result = timed_close(f"a registrar that blocks in {operation}()", offloader, deadline_s)
    registrar.release_all()
    return result


def close_after_dead_owner(deadline_s: float) -> dict[str, Any]:
    """Close what is attached to the arena of a process that was killed."""
    tensor = np.ones((8, 2**20), np.uint8)
    layout = BlockLayout.from_tensors([tensor], block_axis=0, tokens_per_block=16)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    owner = multiprocessing.get_context("fork").Process(target=own_arena, args=(layout, sending))
    owner.start()
    attached = AttachedArena(receiving.recv(), layout)
    owner.kill()
    owner.join()
    assert not attached.owner_alive()
    return timed_close("an owner that was killed (reader)", attached, deadline_s)


def own_arena(layout: BlockLayout, sending: Connection) -> None:
    """Be the owner of a shared arena until killed."""
    plan = plan_arena(layout, 64 * 2**20)
    with TransferWorker(layout, plan, CpuDevice(), backing=Backing.MEMFD, mapping="eager") as worker:
        worker.take_published()
        sending.send(worker.ticket())
        signal.pause()


def open_and_close(num_cycles: int) -> dict[str, Any]:
    """Open, store, load and close again and again, and compare what is held."""
    tensor = np.ones((4, 4096), np.uint8)
    layout = BlockLayout.from_tensors([tensor], block_axis=0, tokens_per_block=16)

    def cycle() -> None:
        with Offloader(layout, host_memory="64KiB", device=CpuDevice()) as offloader:
            job = offloader.submit_store([KEY], [0]).job_id
            assert job is not None
            offloader.wait([job], WAIT_S)
            offloader.wait([offloader.submit_load(offloader.match([KEY]), [1])], WAIT_S)

    for _ in range(num_cycles // 2):
        cycle()
    before = held_resources()
    started = time.monotonic()
    for _ in range(num_cycles):
        cycle()
    seconds = time.monotonic() - started
    return {
        "cycles": num_cycles,
        "ms_per_cycle": round(seconds / num_cycles * 1e3, 2),
        "before": before,
        "after": held_resources(),
    }


def main() -> int:
    """Print what was measured; exit 1 if a close was late or something was left behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one deadline, few cycles")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    cycles = open_and_close(20 if options.quick else 1000)
    closes = [close_after_dead_owner(0.2)]
    for deadline_s in [0.2] if options.quick else [0.2, 2.0]:
        closes.append(close_beside_copies_in_flight(deadline_s))
        closes += [close_beside_endless_copy(deadline_s, queue) for queue in ("store", "load")]
        closes += [close_beside_blocked_registrar(deadline_s, each) for each in ("register", "unregister")]
    setup = machine(kvmoor, np)
    if options.json:
        print(json.dumps({"machine": setup, "closes": closes, "cycles": cycles}))
    else:
        print("Does closing end by its deadline, and does it leave anything behind?")
        print(setup)
        print(f"{'closing beside':42}{'deadline s':>12}{'took s':>8}  quarantined bytes")
        for close in closes:
            print(
                f"{close['beside']:42}{close['deadline_s']:12.1f}{close['seconds']:8.3f}"
                f"  {close['quarantined_nbytes']:,}"
            )
        print(f"{cycles['cycles']} cycles of open, store, load, close: {cycles['ms_per_cycle']} ms each")
        for name, count in cycles["before"].items():
            print(f"  {name}: {count} before, {cycles['after'][name]} after")
    late = any(close["over_s"] > 0.2 for close in closes)
    before, after = cycles["before"], cycles["after"]
    before["mappings"] += MAPPINGS_OF_LIBC
    left = any(after[name] > count for name, count in before.items())
    return int(late or left)


if __name__ == "__main__":
    sys.exit(main())
