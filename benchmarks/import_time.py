"""How long does `import kvmoor` take, beyond starting Python?

Times fresh interpreters, one after the other, `python -c pass` and the imports in turn, and prints medians.

    python benchmarks/import_time.py [--runs 10]
"""

import argparse
import statistics
import subprocess
import sys
import time

from print_parts.machine import machine

import kvmoor

STATEMENTS = (
    "pass",
    "import kvmoor",
    "from kvmoor import Offloader, CpuDevice, BlockLayout",
    "import kvmoor.cli.main",
)
TARGET_MS = 100


def time_ms(statement: str) -> float:
    """Return how long a fresh interpreter takes from its start to its end, in milliseconds."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - begin) * 1000


def main(arguments: list[str] | None = None) -> None:
    """Print the question, the set-up and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="fresh interpreters for each line (default 10)")
    options = parser.parse_args(arguments)

    print("How long does `import kvmoor` take, beyond starting Python?")
    print(f"{machine(kvmoor)}; median of {options.runs} fresh interpreters each")
    for statement in STATEMENTS:
        time_ms(statement)  # writes the byte code and fills the page cache
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(options.runs):
        for statement in STATEMENTS:  # in turn, so that a slow moment of the machine hits all of them
            times[statement].append(time_ms(statement))
    base = statistics.median(times["pass"])
    print(f"{'statement':55} {'total ms':>9} {'beyond Python ms':>17}")
    for statement in STATEMENTS:
        median = statistics.median(times[statement])
        print(f"{statement:55} {median:9.1f} {median - base:17.1f}")
    print(f"target: `import kvmoor` takes less than {TARGET_MS} ms")


if __name__ == "__main__":
    main()
