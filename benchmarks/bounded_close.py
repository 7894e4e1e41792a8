"""Does closing end by its deadline, and does it leave anything behind?

1. An `Offloader` is closed while one of its copies never ends: seconds against the deadline, and what is quarantined.
2. Many offloaders are opened, store a block, load it and close: descriptors, mappings and threads before and after.
   The first cycles are not counted, because libc keeps stacks of ended threads for the next ones. It also makes, splits
   and joins heaps of its own, so the mappings may differ by a few; a leak of ours would be at least one a cycle.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvmoor import BlockKey, BlockLayout, CpuDevice, Offloader
from kvmoor.testing import ScriptedCopies

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


def close_with_endless_copy(deadline_s: float, queue: str) -> dict[str, Any]:
    """Close beside a copy that hangs on one lane."""
    tensor = np.ones((8, 2**20), np.uint8)
    scripted = ScriptedCopies()
    device = CpuDevice(copy_hook=scripted)
    layout = BlockLayout.from_tensors([tensor], block_axis=0, tokens_per_block=16)
    offloader = Offloader(layout, host_memory="64MiB", device=device, mapping="eager")
    job = offloader.submit_store([KEY], [0]).job_id
    assert job is not None
    offloader.wait([job], WAIT_S)
    gate = scripted.hang_at(0 if queue == "load" else 1, queue=queue)
    if queue == "load":
        offloader.submit_load(offloader.match([KEY]), [1])
    else:
        offloader.submit_store([BlockKey(bytes([1] * 32))], [1])
    assert gate.wait_reached(WAIT_S)
    started = time.monotonic()
    report = offloader.close(deadline_s).worker
    seconds = time.monotonic() - started
    scripted.release_all()
    device.close(WAIT_S)
    return {
        "endless": queue,
        "deadline_s": deadline_s,
        "seconds": round(seconds, 3),
        "over_s": round(seconds - deadline_s, 3),
        "quarantined_nbytes": report.quarantined_nbytes,
    }


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
    deadlines = [0.2] if options.quick else [0.0, 0.5, 2.0]
    cycles = open_and_close(20 if options.quick else 1000)
    closes = [close_with_endless_copy(deadline_s, queue) for queue in ("store", "load") for deadline_s in deadlines]
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {sys.version.split()[0]}"
    )
    if options.json:
        print(json.dumps({"machine": machine, "closes": closes, "cycles": cycles}))
    else:
        print(machine)
        for close in closes:
            print(
                f"close({close['deadline_s']} s) beside an endless {close['endless']}: {close['seconds']:.3f} s, "
                f"{close['quarantined_nbytes']:,} bytes quarantined"
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
