"""Does closing end by its deadline when the GPU does not: a stream that hangs, a broken context, work still queued?

Each case runs in a process of its own with torch loaded and 4 GiB page-locked, closes with a deadline of 2 s, and ends
by `abandon_process`. A watchdog kills what does not end.

    python benchmarks/cuda_bounded_end.py [--out FOLDER] [--quick]
"""

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cuda_parts.bench_gpu import WAIT_S, BenchGpu, describe_machine, open_gpu
from cuda_parts.report import Report, parse_options

from kvmoor.block_key import BlockKeys
from kvmoor.block_layout import BlockLayout
from kvmoor.errors import KvmoorError
from kvmoor.offloader import Offloader

CASES = {
    "idle": "nothing wrong",
    "engine": "the engine's stream hangs, nothing queued",
    "store": "a store behind a stream that hangs",
    "load": "a load behind a stream that hangs",
    "queued": "400 jobs behind a stream that hangs",
    "trap": "a kernel broke the context",
}
DEADLINE_S = 2.0
SLACK_S = 0.3
WATCHDOG_S = 60.0
HELD_S = 100.0
NUM_BLOCKS = 64


def run_case(case: str, host_memory: str) -> None:
    """Be the process of one case."""
    gpu = open_gpu()
    torch = gpu.torch
    cache = torch.zeros((8, NUM_BLOCKS, 64 * 1024), dtype=torch.uint8, device="cuda")
    layout = BlockLayout.from_tensors([cache], block_axis=1, tokens_per_block=16)
    offloader = Offloader(layout, host_memory=host_memory, device=gpu.open_device(), pin="eager", memory_check="warn")
    keys = BlockKeys(number.to_bytes(32, "little") for number in range(1000))
    offloader.wait([offloader.submit_store(keys[:32], range(32)).job_id], WAIT_S)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if case in ("engine", "store", "load", "queued"):
            flag = gpu.driver.host_alloc(4096)
            ctypes.memset(flag, 0, 4096)
            gpu.hold(stream, flag, HELD_S)
        if case == "trap":
            break_context(gpu, stream)
        submit(offloader, case, keys)
    begin = time.monotonic()
    report = offloader.close(DEADLINE_S).worker
    seconds = time.monotonic() - begin
    result = {
        "seconds": seconds,
        "quarantined_nbytes": report.quarantined_nbytes,
        "unproven": len(report.unproven_jobs),
        "reason": report.reason,
        "printed_at": time.time(),
    }
    print(json.dumps(result), flush=True)
    from kvmoor.process_end import abandon_process  # noqa: PLC0415 - where it is used, last

    abandon_process(0)


def submit(offloader: Offloader, case: str, keys: BlockKeys) -> None:
    """Queue the jobs of a case on the stream that is current."""
    if case in ("store", "trap"):
        try:
            offloader.submit_store(keys[100:101], [40])
        except KvmoorError as error:
            print(f"the store was refused: {error}")
    if case == "load":
        offloader.submit_load(offloader.match(keys[:8]), range(40, 48))
    for number in range(200) if case == "queued" else ():
        offloader.submit_store(keys[100 + number : 101 + number], [40])
        offloader.submit_load(offloader.match(keys[:8]), range(48, 56))


def break_context(gpu: BenchGpu, stream: Any) -> None:
    """Launch a kernel that traps, and wait until the driver knows."""
    gpu.trap(stream)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            stream.query()
        except RuntimeError:
            return


def start_case(case: str, host_memory: str) -> dict[str, Any]:
    """Run a case in a process of its own and return what it says; killed by the watchdog if it does not end."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", case, host_memory]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=WATCHDOG_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as late:
        return {"error": f"killed after {WATCHDOG_S:g} s", "output": f"{late.stdout!r}\n{late.stderr!r}"}
    ended_at = time.time()
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": f"exit code {ended.returncode}", "output": ended.stdout[-2000:] + ended.stderr[-2000:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return {**found, "exit_s": ended_at - found["printed_at"], "exit_code": ended.returncode}


def main() -> int:
    """Print the question, the set-up and the figures."""
    if sys.argv[1:2] == ["--child"]:
        run_case(*sys.argv[2:4])
        return 1
    question = __doc__ or ""
    options = parse_options(question)
    host_memory = "256MiB" if options.quick else "4GiB"
    gpu = open_gpu()
    report = Report("cuda_bounded_end", question, f"{describe_machine(gpu)}; {host_memory} page-locked", options.out)
    rows, seconds = [], []
    for case in ("store", "trap") if options.quick else CASES:
        found = start_case(case, host_memory)
        if "error" in found:
            print(f"{case}: {found['error']}\n{found['output']}")
            rows.append((CASES[case], found["error"], "-", "-", "-", "-"))
            seconds.append(WATCHDOG_S)
            continue
        seconds.append(max(found["seconds"], found["exit_s"]))
        rows.append(
            (
                CASES[case],
                f"{found['seconds']:.3f}",
                f"{found['quarantined_nbytes']:,}",
                found["unproven"],
                f"{found['exit_s']:.2f} (code {found['exit_code']})",
                found["reason"][:160],
            )
        )
    report.table(
        f"Closing with a deadline of {DEADLINE_S:g} s",
        ("beside", "close, s", "bytes quarantined", "jobs unproven", "exit after it, s", "reason"),
        rows,
    )
    report.target("slowest close, or exit after it", max(seconds), "s", at_most=DEADLINE_S + SLACK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
