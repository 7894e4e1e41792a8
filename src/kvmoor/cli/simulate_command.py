"""``kvmoor simulate``: replay a trace, and show what each amount of memory would have saved."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import kvmoor
from kvmoor.byte_sizes import format_nbytes, parse_nbytes, round_up
from kvmoor.cli.exit_codes import one_line_errors
from kvmoor.errors import SettingsError
from kvmoor.index.eviction.policies import POLICIES
from kvmoor.simulation.capacities import KNEE_SHARE, capacity_ladder, find_knee
from kvmoor.simulation.comparison import ComparedReplay, compare
from kvmoor.simulation.cost_model import check_bytes_per_token, kv_size_of_config, nbytes_a_day
from kvmoor.simulation.plot import check_plot, draw_plot
from kvmoor.simulation.trace import Trace
from kvmoor.simulation.trace_files import FORMATS, ReaderOptions, read_trace

_SLOT_ALIGNMENT: Final = 4096
"""Slots are whole memory pages, so this is what a block takes in host memory."""
_BAR_WIDTH: Final = 50


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace, plain or gzipped.")],
    trace_format: Annotated[str, typer.Option("--format", help=f"auto, {', '.join(FORMATS)}.")] = "auto",
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Memory for blocks, such as 64GiB, or '5000 blocks'; repeat it. Default: a ladder."
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
        memory = _Memory.of_options(kv_bytes_per_token, model_config)
        _check_capacities(capacity or [], memory)
        if plot is not None:
            check_plot(plot)
        options = ReaderOptions(skip_bad_lines, block_size, concurrency, seed)
        with _progress() as progress:
            task = progress.add_task("reading", total=None)
            read = read_trace(trace, trace_format, options)
            sizes = [memory.blocks_of(each, read.block_size) for each in capacity or []]
            capacities = sorted(set(sizes)) or capacity_ladder(read.num_unique_blocks)
            progress.update(task, description="replaying", total=read.num_references * len(capacities) * len(policies))
            compared = compare(
                read, capacities, policies, on_progress=lambda blocks: progress.update(task, advance=blocks)
            )
        report = _Report(read, compared, memory)
        if plot is not None:
            title = f"{read.name}: {len(read.requests):,} requests"
            draw_plot(plot, title, compared, slot_nbytes=report.slot_nbytes, knee_blocks=report.knee(policies[0]))
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            report.show(Console())


@dataclass(frozen=True, slots=True)
class _Memory:
    """Know what blocks take, if the model is known."""

    bytes_per_token: int | None
    explanation: str

    @classmethod
    def of_options(cls, kv_bytes_per_token: int | None, model_config: Path | None) -> "_Memory":
        if kv_bytes_per_token is not None and model_config is not None:
            raise SettingsError("--kv-bytes-per-token and --model-config say the same thing: give one of them")
        if model_config is not None:
            size = kv_size_of_config(model_config)
            return cls(size.bytes_per_token, size.explanation)
        if kv_bytes_per_token is not None:
            return cls(check_bytes_per_token(kv_bytes_per_token), "given")
        return cls(None, "")

    def slot_nbytes(self, block_size: int) -> int | None:
        return None if self.bytes_per_token is None else round_up(self.bytes_per_token * block_size, _SLOT_ALIGNMENT)

    def blocks_of(self, capacity: str, block_size: int) -> int:
        """Return how many blocks fit."""
        number, _, unit = capacity.strip().partition("blocks")
        if number != capacity.strip() and not unit and number.strip().isdecimal() and int(number) > 0:
            return int(number)
        nbytes = parse_nbytes(capacity, option="--capacity")
        slot_nbytes = self.slot_nbytes(block_size)
        if slot_nbytes is None:
            raise SettingsError(
                f"--capacity {capacity!r} is in bytes, and what a token takes is not known: "
                "give --kv-bytes-per-token or --model-config, or a capacity such as '5000 blocks'"
            )
        if nbytes < slot_nbytes:
            raise SettingsError(
                f"--capacity {capacity!r} holds no block: one of {block_size} tokens takes {format_nbytes(slot_nbytes)}"
            )
        return nbytes // slot_nbytes


def _check_capacities(capacities: Sequence[str], memory: _Memory) -> None:
    """Refuse what no block size makes usable, before the trace is read."""
    for each in capacities:
        if memory.bytes_per_token is None or "blocks" in each:
            memory.blocks_of(each, 1)
        else:
            parse_nbytes(each, option="--capacity")


def _progress() -> Progress:
    """Return a bar on stderr that vanishes at its end, and is not shown where nobody can see it move."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class _Report:
    """Show what came of it."""

    def __init__(self, trace: Trace, compared: Sequence[ComparedReplay], memory: _Memory) -> None:
        self._trace = trace
        self._compared = compared
        self._memory = memory
        self.slot_nbytes = memory.slot_nbytes(trace.block_size)
        self._policies = list(dict.fromkeys(each.replay.policy for each in compared))

    def knee(self, policy: str) -> int | None:
        """Return the smallest capacity that saves nearly all, in blocks."""
        hits = [(each.replay.capacity_blocks, each.replay.hit_blocks) for each in self._of_policy(policy)]
        return find_knee(hits)

    def advice(self, policy: str) -> str:
        """Say in one sentence how much memory to buy."""
        knee = self.knee(policy)
        largest = self._of_policy(policy)[-1]
        if knee is None:
            return f"With {policy} none of these capacities saves anything: no prompt of this trace comes back in time."
        found = next(each for each in self._of_policy(policy) if each.replay.capacity_blocks == knee)
        if len(self._of_policy(policy)) == 1:
            return (
                f"With {policy} and {self._size(knee)}, {_percent(found.hit_ratio)} of the prompt tokens are saved; "
                "where the knee is takes several capacities to see."
            )
        if found is largest:
            return (
                f"With {policy} no knee is in sight: {self._size(knee)}, the largest capacity tried, still saves over "
                f"{100 / KNEE_SHARE - 100:.0f} % more than the next smaller one."
            )
        return (
            f"With {policy} the knee is at {self._size(knee)}: the smallest capacity tried that saves at least "
            f"{100 * KNEE_SHARE:.0f} % of what {self._size(largest.replay.capacity_blocks)}, the largest, saves "
            f"({_percent(found.hit_ratio)} against {_percent(largest.hit_ratio)} of the prompt tokens)."
        )

    def show(self, console: Console) -> None:
        """Print the table, the bars and the advice."""
        trace = self._trace
        console.print(
            f"{escape(trace.name)}: {len(trace.requests):,} requests, {trace.num_tokens:,} tokens, "
            f"{trace.num_references:,} blocks of {trace.block_size} tokens, {trace.num_unique_blocks:,} of them "
            f"different, in {trace.duration_s / 3600:.1f} h",
            highlight=False,
        )
        for note in self._notes():
            console.print(escape(note), highlight=False)
        console.print(self._table())
        console.print("hit ratio: what was reached ([green]█[/]) and what was possible (░)", highlight=False)
        width = max(len(self._label(each)) for each in self._compared)
        for each in self._compared:
            label = f"{self._label(each):>{width}}"
            console.print(f"{label} {self._bar(each)} {_percent(each.hit_ratio):>7}", highlight=False)
        console.print()
        for policy in self._policies:
            console.print(escape(self.advice(policy)), highlight=False)

    def as_json(self) -> dict[str, Any]:
        """Return everything, with numbers as they are."""
        trace = self._trace
        return {
            "kvmoor": kvmoor.__version__,
            "trace": {
                "name": trace.name,
                "requests": len(trace.requests),
                "tokens": trace.num_tokens,
                "block_size": trace.block_size,
                "references": trace.num_references,
                "unique_blocks": trace.num_unique_blocks,
                "duration_s": trace.duration_s,
                "skipped_lines": trace.num_skipped_lines,
                "out_of_order": trace.num_out_of_order,
            },
            "kv_bytes_per_token": self._memory.bytes_per_token,
            "slot_nbytes": self.slot_nbytes,
            "results": [self._row_as_json(each) for each in self._compared],
            "knee": {policy: {"share": KNEE_SHARE, "capacity_blocks": self.knee(policy)} for policy in self._policies},
            "advice": [self.advice(policy) for policy in self._policies],
        }

    def _row_as_json(self, each: ComparedReplay) -> dict[str, Any]:
        replay = each.replay
        return {
            "policy": replay.policy,
            "capacity_blocks": replay.capacity_blocks,
            "capacity_nbytes": self.slot_nbytes and self.slot_nbytes * replay.capacity_blocks,
            "hit_blocks": replay.hit_blocks,
            "hit_tokens": replay.hit_tokens,
            "hit_ratio": each.hit_ratio,
            "optimum_hit_blocks": each.optimum_hit_blocks,
            "optimum_hit_ratio": each.optimum_hit_ratio,
            "share_of_optimum": each.share_of_optimum,
            "stored_blocks": replay.stored_blocks,
            "written_nbytes_a_day": self._written_a_day(each),
            "evicted_blocks": replay.evicted_blocks,
            "unreachable_blocks": replay.unreachable_blocks,
            "seconds": replay.seconds,
        }

    def _notes(self) -> list[str]:
        trace = self._trace
        notes = []
        if self._memory.bytes_per_token is not None:
            per_token = format_nbytes(self._memory.bytes_per_token)
            notes.append(f"A token takes {per_token} ({self._memory.explanation}).")
        if trace.num_skipped_lines:
            notes.append(f"{trace.num_skipped_lines:,} lines could not be used and were skipped.")
        if trace.num_out_of_order:
            notes.append(f"{trace.num_out_of_order:,} requests stood behind later ones; they were sorted by time.")
        if any(each.replay.unreachable_blocks for each in self._compared):
            notes.append("Some blocks were cached without the ones in front of them: see unreachable_blocks in --json.")
        return notes

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        rows = [self._cells(each) for each in self._compared]
        for heading in rows[0]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row.values())
        return table

    def _cells(self, each: ComparedReplay) -> dict[str, str]:
        """Return one row by its headings; what is not known, or is the same for all, has none."""
        written = self._written_a_day(each)
        return {
            **({"policy": each.replay.policy} if len(self._policies) > 1 else {}),
            "capacity": self._size(each.replay.capacity_blocks),
            "hit ratio": _percent(each.hit_ratio),
            "of optimum": _percent(each.share_of_optimum),
            "tokens saved": f"{each.replay.hit_tokens:,}",
            **({} if written is None else {"written a day": format_nbytes(round(written))}),
            "evictions": f"{each.replay.evicted_blocks:,}",
        }

    def _bar(self, each: ComparedReplay) -> str:
        reached = round(each.hit_ratio * _BAR_WIDTH)
        possible = max(reached, round(each.optimum_hit_ratio * _BAR_WIDTH))
        return f"[green]{'█' * reached}[/]{'░' * (possible - reached)}{' ' * (_BAR_WIDTH - possible)}"

    def _label(self, each: ComparedReplay) -> str:
        policy = f"{each.replay.policy} " if len(self._policies) > 1 else ""
        return policy + self._size(each.replay.capacity_blocks)

    def _size(self, capacity_blocks: int) -> str:
        if self.slot_nbytes is None:
            return f"{capacity_blocks:,} blocks"
        return format_nbytes(capacity_blocks * self.slot_nbytes)

    def _written_a_day(self, each: ComparedReplay) -> float | None:
        if self._memory.bytes_per_token is None:
            return None
        nbytes = each.replay.stored_blocks * self._trace.block_size * self._memory.bytes_per_token
        return nbytes_a_day(nbytes, self._trace.duration_s)

    def _of_policy(self, policy: str) -> list[ComparedReplay]:
        return [each for each in self._compared if each.replay.policy == policy]


def _percent(ratio: float) -> str:
    """Write a ratio, rounded down: what is not all is not 100 %. The small number is for 0.29, which is a bit less."""
    return f"{math.floor(ratio * 1000 + 1e-9) / 10:.1f} %"
