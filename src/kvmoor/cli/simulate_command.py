"""``kvmoor simulate``: replay a trace, and show what each amount of memory would have saved."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvmoor.cli.exit_codes import one_line_errors
from kvmoor.cli.simulate_report import HostReport
from kvmoor.cli.simulated_memory import SimulatedMemory
from kvmoor.cli.tier_report import TierReport
from kvmoor.errors import SettingsError
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.simulation.capacities import capacity_ladder
from kvmoor.simulation.comparison import compare, compare_tiers
from kvmoor.simulation.plot import check_plot
from kvmoor.simulation.tiered_replay import DISK_ADMISSIONS, STORE_WHEN, DiskAdmission, StoreWhen, TierPlan
from kvmoor.simulation.trace_files import FORMATS, ReaderOptions, read_trace

_WIDTH_OF_FILES: Final = 160


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace, plain or gzipped.")],
    trace_format: Annotated[str, typer.Option("--format", help=f"auto, {', '.join(FORMATS)}.")] = "auto",
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Host memory, such as 64GiB, or '5000 blocks'; repeat it. Default: a ladder."
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the device's own cache of blocks holds, in front.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Disk space behind, for what falls out of host memory.")
    ] = None,
    store_when: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help=f"When a block goes to host memory: {' or '.join(STORE_WHEN)}.  [default: computed]"
        ),
    ] = None,
    disk_admission: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help=f"Which blocks are written to disk: {' or '.join(DISK_ADMISSIONS)}.  [default: all]"
        ),
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(help="Bytes of keys and values of a token, all layers and ranks.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The config.json of a Hugging Face model, to compute these bytes.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(POLICIES)}; repeat it.  [default: lru]")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block, where the trace leaves it open.")] = 16,
    concurrency: Annotated[float, typer.Option(help="For claude traces: sessions at once on average.")] = 40.0,
    seed: Annotated[int, typer.Option(help="For claude traces: seed of the sessions' start times.")] = 1,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count lines that cannot be used instead of refusing them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A PNG or SVG file to draw the hit ratio into.")] = None,
) -> None:
    """Replay a recorded trace through kvmoor's index and say how much memory is worth buying.

    Nothing is copied and no device is needed. Ends with code 2 if the trace or an option cannot be used.
    """
    with one_line_errors():
        policies = list(dict.fromkeys(policy or ["lru"]))
        for name in policies:
            if name not in POLICIES:
                raise SettingsError(f"there is no policy {name!r}: choose from {', '.join(POLICIES)}")
        memory = SimulatedMemory.of_options(kv_bytes_per_token, model_config)
        tiers = _Tiers.of_options(device_memory, disk, store_when, disk_admission)
        for option, size in (*(("--capacity", each) for each in capacity or []), *tiers.sizes):
            memory.check(size, option=option)
        if plot is not None:
            check_plot(plot)
        options = ReaderOptions(skip_bad_lines, block_size, concurrency, seed)
        with _progress() as progress:
            task = progress.add_task("reading", total=None)
            read = read_trace(trace, trace_format, options)
            sizes = [memory.blocks_of(each, read.block_size, option="--capacity") for each in capacity or []]
            capacities = sorted(set(sizes)) or capacity_ladder(read.num_unique_blocks)
            progress.update(task, description="replaying", total=read.num_references * len(capacities) * len(policies))

            def on_progress(num_blocks: int) -> None:
                progress.update(task, advance=num_blocks)

            plan = tiers.plan(memory, read.block_size)
            report: HostReport | TierReport
            if plan is None:
                alone = compare(read, capacities, policies, on_progress=on_progress)
                report = HostReport(read, alone, memory)
            else:
                tiered = compare_tiers(read, capacities, plan, policies, on_progress=on_progress)
                report = TierReport(read, tiered, memory, plan)
        if plot is not None:
            report.draw(plot)
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            # A file or a pipe has no width, and a table that is cut has no numbers.
            report.show(Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES))


@dataclass(frozen=True, slots=True)
class _Tiers:
    """What the options say of the tiers around host memory."""

    device_memory: str | None
    disk: str | None
    store_when: StoreWhen
    disk_admission: DiskAdmission

    @classmethod
    def of_options(
        cls, device_memory: str | None, disk: str | None, store_when: str | None, disk_admission: str | None
    ) -> Self:
        when = next((each for each in STORE_WHEN if each == (store_when or "computed")), None)
        admission = next((each for each in DISK_ADMISSIONS if each == (disk_admission or "all")), None)
        if when is None:
            raise SettingsError(f"--store-when is {store_when!r}: choose from {', '.join(STORE_WHEN)}")
        if admission is None:
            raise SettingsError(f"--disk-admission is {disk_admission!r}: choose from {', '.join(DISK_ADMISSIONS)}")
        if store_when is not None and device_memory is None:
            raise SettingsError(f"--store-when {store_when} is about a device in front: give its --device-memory too")
        if disk_admission is not None and disk is None:
            raise SettingsError(f"--disk-admission {disk_admission} is about a disk: give its size with --disk too")
        return cls(device_memory, disk, when, admission)

    @property
    def sizes(self) -> list[tuple[str, str]]:
        """Return the sizes that were given, with their options."""
        given = ("--device-memory", self.device_memory), ("--disk", self.disk)
        return [(option, size) for option, size in given if size is not None]

    def plan(self, memory: SimulatedMemory, block_size: int) -> TierPlan | None:
        """Return the plan in blocks; None if there is host memory only."""
        if not self.sizes:
            return None
        blocks = {option: memory.blocks_of(size, block_size, option=option) for option, size in self.sizes}
        return TierPlan(
            device_blocks=blocks.get("--device-memory", 0),
            disk_blocks=blocks.get("--disk", 0),
            store_when=self.store_when,
            disk_admission=self.disk_admission,
        )


def _progress() -> Progress:
    """Return a bar on stderr that vanishes at its end, and is not shown where nobody can see it move."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
