"""Does vLLM's server with the plugin answer many clients without growing, and what does it leave at its end?

A server on the CPU with a tiny Llama (11 MB, float32), which is asked over HTTP; each figure stands beside that of a
server without the plugin. Every answer is compared with the one that a server without it gave to a single client.

    soak     clients ask for some minutes: prompts that the host memory holds and the device does not, and by turns
             three times as many, which neither does. Errors, wrong answers, speed; what each process holds.
    sigterm  SIGTERM amid traffic: seconds until the last process has ended, and what is left of the plugin
    sigkill  SIGKILL of one process after the other, with one rank and two: who ends by itself, and what is left

    python benchmarks/vllm_server.py [--out FILE] [--clients 50] [--seconds 180] [--only soak,sigterm] [--quick]

Needs a vLLM for CPUs; without one it says so, measures nothing, and ends well. What it leaves running, it ends.
"""

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # what starts and asks a server is shared with the tests

from print_parts.machine import machine  # noqa: E402
from print_parts.tables import section  # noqa: E402

from server_processes import Holdings, holdings  # noqa: E402 - found by the line above
from server_rig import BLOCK_NBYTES, BLOCK_TOKENS, Server, ServerError, prompt  # noqa: E402
from server_traffic import Tokens, Traffic  # noqa: E402

QUESTION: Final = __doc__.splitlines()[0]
HOST_MEMORY: Final = "32MiB"
DEVICE_BLOCKS: Final = 48
PROMPT_TOKENS: Final = 300
SMALL_SET, LARGE_SET = 20, 60
PHASE_S: Final = 20.0
SAMPLE_S: Final = 2.0
ABORT_EVERY: Final = 25
ANSWER_TIMEOUT_S: Final = 120.0
EXIT_TIMEOUT_S: Final = 60.0
ORPHAN_WAIT_S: Final = 20.0
ENDED: Final = (
    "Seconds until engine core and workers have ended, plus those of the API server: it waits for clients whose "
    "requests its engine has left unanswered, so they hang up when the engine has ended."
)
MIB: Final = 2**20

Known = Mapping[Tokens, Sequence[str]]
Row = Sequence[object]


class Report:
    """Collect sections; each is printed, and written to the file, as soon as it is found."""

    def __init__(self, setup: str, out: Path | None) -> None:
        self._out = out
        self._text = ""
        self.add(f"# {QUESTION}\n\n{setup}")

    def add(self, text: str) -> None:
        """Add a section."""
        print(text + "\n", flush=True)
        self._text += text + "\n\n"
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(self._text.rstrip() + "\n")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Row], note: str = "") -> None:
        """Add a table with the load of the machine at that time."""
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        self.add(f"{section(title, header, rows, note)}\n\nLoad average afterwards: {load}.")


class Sampler:
    """Note what each process of a server holds, every few seconds, between entering and leaving the with block."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: dict[str, list[tuple[float, Holdings]]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        processes = {pid: role for pid, role in self._server.processes().items() if role != "helper"}
        while not self._stop.wait(SAMPLE_S):
            for pid, role in processes.items():
                with suppress(OSError):
                    self.samples.setdefault(role, []).append((time.monotonic() - started, holdings(pid)))


@dataclass
class Soak:
    """What a soak found."""

    counts: Counter[str]
    examples: list[str]
    seconds: float
    samples: dict[str, list[tuple[float, Holdings]]]
    metrics: dict[str, float] = field(default_factory=dict)


def soak(model: Path, log: Path, known: Known, *, host_memory: str | None, clients: int, seconds: float) -> Soak:
    """Let clients ask, small set and large set by turns; a first round that nobody counts warms up."""
    small = tuple(known)[:SMALL_SET]
    with Server(model, log, host_memory=host_memory, device_blocks=DEVICE_BLOCKS).wait_ready() as server:
        with Traffic(server.port, known, num_clients=clients, abort_every=ABORT_EVERY) as traffic:
            traffic.wait_for("answered", 4 * len(known), 4 * ANSWER_TIMEOUT_S)
            before = Counter(traffic.counts)
            started = time.monotonic()
            with Sampler(server) as sampler:
                while (passed := time.monotonic() - started) < seconds:
                    traffic.ask_only(tuple(known) if passed // PHASE_S % 2 else small)
                    threading.Event().wait(min(PHASE_S - passed % PHASE_S, seconds - passed) + 0.001)
                counts = traffic.counts - before
                took_s = time.monotonic() - started
        names = {} if host_memory is None else SERIES
        metrics = {title: server.metric(name) for title, name in names.items()}
        return Soak(counts, traffic.examples, took_s, sampler.samples, metrics)


SERIES: Final = {
    "MB loaded": "vllm:kv_offload_load_bytes_total",
    "MB stored": "vllm:kv_offload_store_bytes_total",
    "evicted blocks": "vllm:kvmoor_evicted_blocks_total",
    "declined chunks": "vllm:kvmoor_declined_stores_total",
    "failed loads": "vllm:kvmoor_failed_loads_total",
    "failed stores": "vllm:kvmoor_failed_stores_total",
}


def report_soak(report: Report, found: Mapping[str, Soak], clients: int) -> None:
    """Write what clients saw, and what the processes held."""
    kinds = ("answered", "wrong", "error", "cut short", "dropped")
    rows = []
    for name, each in found.items():
        cached = each.counts["cached tokens"] / max(1, each.counts["answered"])
        speed = each.counts["answered"] / each.seconds
        rows.append([name, *(each.counts[kind] for kind in kinds), f"{speed:.1f}", f"{cached:.0f}"])
    figures = "; ".join(
        f"{title} {value / 1e6 if title.startswith('MB') else value:,.0f}"
        for title, value in found["on"].metrics.items()
    )
    examples = [example for each in found.values() for example in each.examples]
    report.table(
        f"{clients} clients for {found['on'].seconds:.0f} s",
        ["plugin", *kinds, "answered a second", f"cached tokens an answer, of {PROMPT_TOKENS}"],
        rows,
        note=f"The plugin over its whole life: {figures}." + "".join(f"\n- {example}" for example in examples),
    )
    rows = [
        [f"{role}, {name}", *_course(samples)] for name, each in found.items() for role, samples in each.samples.items()
    ]
    report.table(
        "What the processes hold: in the first, middle and last tenth",
        [
            "process, plugin",
            "RSS MiB",
            "RSS growth in the second half, MiB a minute",
            "descriptors",
            "threads",
            "mappings",
        ],
        rows,
    )


def _course(samples: Sequence[tuple[float, Holdings]]) -> list[str]:
    """Say how a process went along: medians of three parts, and a straight line through the second half."""
    part = max(1, len(samples) // 10)
    middle = len(samples) // 2
    parts = [samples[:part], samples[middle : middle + part], samples[-part:]]

    def three(read: Callable[[Holdings], float], form: str) -> str:
        return " / ".join(
            format(statistics.median(read(sample) for _, sample in samples_of), form) for samples_of in parts
        )

    half = samples[middle:]
    slope = 0.0
    if len(half) > 1:
        slope = statistics.linear_regression([at for at, _ in half], [each.rss_nbytes / MIB for _, each in half]).slope
    return [
        three(lambda each: each.rss_nbytes / MIB, ".1f"),
        f"{60 * slope:+.2f}",
        three(lambda each: each.descriptors, ".0f"),
        three(lambda each: each.threads, ".0f"),
        three(lambda each: each.mappings, ".0f"),
    ]


@dataclass(frozen=True)
class Ending:
    """How a server ended: the seconds until its engine core and workers had, and those until its API server had too.

    Infinite where they did not. Clients wait for their answers until the engine has ended, and then hang up.
    """

    engine_s: float
    api_server_s: float
    outlived: list[str]
    wrong: int
    left: list[str]

    def __str__(self) -> str:
        return "never" if self.engine_s == float("inf") else f"{self.engine_s:.2f} + {self.api_server_s:.2f}"


def end_amid_traffic(model: Path, log: Path, known: Known, *, clients: int, kill: str = "", **options: Any) -> Ending:
    """Send SIGTERM to the API server, or SIGKILL to the process of a role, while clients ask."""
    with (
        Server(model, log, device_blocks=DEVICE_BLOCKS, **options).wait_ready() as server,
        Traffic(server.port, known, num_clients=clients) as traffic,
    ):
        traffic.wait_for("answered", 2 * clients, ANSWER_TIMEOUT_S)
        if kill:
            os.kill(server.pid_of(kill), signal.SIGKILL)
        else:
            traffic.stop_asking()
            server.terminate()
        engine_s = api_server_s = float("inf")
        outlived = []
        try:
            engine_s = server.wait_engine_ended(ORPHAN_WAIT_S if kill == "API server" else EXIT_TIMEOUT_S)
            traffic.hang_up()
            api_server_s = server.wait_ended(EXIT_TIMEOUT_S)
        except ServerError:
            outlived = sorted(role for role in server.processes().values() if role != "helper")
            server.kill()
        return Ending(engine_s, api_server_s, outlived, traffic.counts["wrong"], server.leftovers())


def measure_sigterm(report: Report, model: Path, log: Path, known: Known, *, clients: int, runs: int) -> None:
    """Stop servers with and without the plugin by turns."""
    cases = [(timeout_s, host_memory) for timeout_s in (0, 20) for host_memory in (None, HOST_MEMORY)]
    found: dict[tuple[int, str | None], list[Ending]] = {case: [] for case in cases}
    for _ in range(runs):
        for timeout_s, host_memory in cases:
            options = {"host_memory": host_memory, "shutdown_timeout_s": timeout_s}
            found[timeout_s, host_memory].append(end_amid_traffic(model, log, known, clients=clients, **options))
    rows = [
        [
            f"--shutdown-timeout {timeout_s}" if timeout_s else "default",
            "on" if host_memory else "off",
            ", ".join(map(str, endings)),
            sum(each.wrong for each in endings),
            sum(len(each.left) for each in endings),
        ]
        for (timeout_s, host_memory), endings in found.items()
    ]
    report.table(
        f"SIGTERM amid the traffic of {clients} clients",
        ["SIGTERM", "plugin", "seconds until they have ended", "wrong answers", "left of the plugin"],
        rows,
        note=ENDED,
    )


def measure_sigkill(report: Report, model: Path, log: Path, known: Known, *, clients: int, quick: bool) -> None:
    """Kill each process in turn."""
    roles = ["API server", "engine core", "worker 0", "worker 1"]
    rows = []
    for ranks in (1,) if quick else (1, 2):
        for role in roles[2:3] if quick else roles[: 2 + ranks]:
            for host_memory in (None, HOST_MEMORY):
                options = {"host_memory": host_memory, "ranks": ranks}
                ending = end_amid_traffic(model, log, known, clients=clients, kill=role, **options)
                plugin = "on" if host_memory else "off"
                lived = ", ".join(ending.outlived)
                rows.append([ranks, role, plugin, ending, lived, ending.wrong, len(ending.left)])
    report.table(
        f"SIGKILL amid the traffic of {clients} clients",
        [
            "ranks",
            "killed",
            "plugin",
            "seconds until they have ended",
            "live on",
            "wrong answers",
            "left of the plugin",
        ],
        rows,
        note=f"{ENDED} Live on: after {ORPHAN_WAIT_S:.0f} s, when they are killed too; what is left of the plugin is "
        "looked for after that.",
    )


def write_model(folder: Path) -> Path:
    """Write the tiny model."""
    script = ROOT / "tests/vllm/scripts/write_models.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "full"


def reference_answers(model: Path, log: Path, num_prompts: int) -> Known:
    """Ask a server without the plugin each prompt alone."""
    prompts = [tuple(prompt(seed, PROMPT_TOKENS)) for seed in range(num_prompts)]
    with Server(model, log, host_memory=None, device_blocks=DEVICE_BLOCKS).wait_ready() as server:
        return {tokens: server.ask(tokens).tokens for tokens in prompts}


def setup() -> str:
    """Describe machine and set-up."""
    import torch  # noqa: PLC0415 - there is one where vLLM is

    import kvmoor  # noqa: PLC0415 - as above
    import vllm  # noqa: PLC0415 - as above

    prompt_blocks = PROMPT_TOKENS // BLOCK_TOKENS
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return (
        f"{machine(kvmoor, torch, vllm)}; {today}\n\n"
        f"Prompts of {PROMPT_TOKENS} tokens, {prompt_blocks} blocks of {BLOCK_NBYTES // 1024} KiB, 8 tokens asked "
        f"for; device cache {DEVICE_BLOCKS - 1} blocks, host memory {HOST_MEMORY} (256 blocks), at most 8 requests "
        f"at a time. The soak asks {SMALL_SET} prompts ({SMALL_SET * prompt_blocks} blocks) and {LARGE_SET} "
        f"({LARGE_SET * prompt_blocks} blocks) by turns of {PHASE_S:.0f} s; each client drops one request in "
        f"{ABORT_EVERY}. `{' '.join(['benchmarks/vllm_server.py', *sys.argv[1:]])}`"
    )


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the tables (Markdown), written as found")
    parser.add_argument("--clients", type=int, default=50, help="how many ask at once (default: 50)")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long the soak takes, twice (default: 180)")
    parser.add_argument("--runs", type=int, default=3, help="how often each SIGTERM is sent (default: 3)")
    parser.add_argument("--only", default="soak,sigterm,sigkill", help="some of soak,sigterm,sigkill (default: all)")
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it runs")
    options = parser.parse_args()
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is among the tests
        print(f"{QUESTION}\nvLLM is not installed: nothing was measured.")
        return
    if options.quick:
        options.clients, options.seconds, options.runs = 8, 10.0, 1
    parts = set(options.only.split(","))
    with tempfile.TemporaryDirectory(prefix="vllm-server-") as folder:
        model, log = write_model(Path(folder)), Path(folder) / "server.log"
        report = Report(setup(), options.out)
        known = reference_answers(model, log, LARGE_SET)
        if "soak" in parts:
            soaks = {
                name: soak(model, log, known, host_memory=host_memory, clients=options.clients, seconds=options.seconds)
                for name, host_memory in (("off", None), ("on", HOST_MEMORY))
            }
            report_soak(report, soaks, options.clients)
        few = min(12, options.clients)
        if "sigterm" in parts:
            measure_sigterm(report, model, log, known, clients=few, runs=options.runs)
        if "sigkill" in parts:
            measure_sigkill(report, model, log, known, clients=few, quick=options.quick)


if __name__ == "__main__":
    main()
