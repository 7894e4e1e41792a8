"""How fast the link is on this host, in this session: large pinned copies by torch. On a CPU: one memcpy."""

import json
import statistics
import time
from pathlib import Path

import numpy as np

NBYTES = 512 * 2**20
_REPEATS = 10


def measure_link(found: Path, device: str) -> None:
    """Write GB/s (1e9 bytes) of both directions, the best and the median of some copies."""
    speeds: dict[str, float | str] = dict(_of_gpu() if device == "cuda" else _of_memory())
    found.write_text(json.dumps(speeds))
    print("LINK", speeds, flush=True)


def _of_gpu() -> dict[str, float | str]:
    import torch  # noqa: PLC0415 - nobody needs it for --help

    on_host = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    on_host.random_()
    on_device = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    speeds: dict[str, float | str] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, target, source in (("h2d", on_device, on_host), ("d2h", on_host, on_device)):
        times = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        speeds |= {name: NBYTES / statistics.median(times) / 1e9, f"{name}_best": NBYTES / min(times) / 1e9}
    free, total = torch.cuda.mem_get_info()
    return speeds | {"gpu_free_gb": free / 1e9, "gpu_total_gb": total / 1e9}


def _of_memory() -> dict[str, float | str]:
    source = np.ones(NBYTES // 8, np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)
    speed = source.size / statistics.median(times) / 1e9
    return {"gpu": "no GPU: one memcpy", "h2d": speed, "d2h": speed}
