"""What ``kvmoor simulate`` shows of its replays: a table, bars, advice, JSON and a plot."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Generic

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvmoor
from kvmoor.byte_sizes import format_nbytes
from kvmoor.cli.simulated_memory import SimulatedMemory
from kvmoor.simulation.capacities import KNEE_SHARE, find_knee
from kvmoor.simulation.comparison import ComparedReplay, Result
from kvmoor.simulation.cost_model import nbytes_a_day
from kvmoor.simulation.plot import draw_plot
from kvmoor.simulation.replay import ReplayResult
from kvmoor.simulation.trace import Trace

BAR_WIDTH: Final = 50


class Report(ABC, Generic[Result]):
    """Show what came of replays that differ in policy and in host memory."""

    legend: str
    """Says what the bars are made of."""

    def __init__(self, trace: Trace, compared: Sequence[ComparedReplay[Result]], memory: SimulatedMemory) -> None:
        self.trace = trace
        self.compared: Sequence[ComparedReplay[Result]] = compared
        self.memory = memory
        self.slot_nbytes = memory.slot_nbytes(trace.block_size)
        self.policies = list(dict.fromkeys(each.replay.policy for each in compared))

    @abstractmethod
    def cells(self, each: ComparedReplay[Result]) -> dict[str, str]:
        """Return one row by its headings, behind the policy; what is not known, or is the same for all, has none."""

    @abstractmethod
    def parts_of_bar(self, each: ComparedReplay[Result]) -> list[tuple[str, float]]:
        """Return of what the bar of one row is made: a sign with its style, and the hit ratio up to its end."""

    @abstractmethod
    def row_as_json(self, each: ComparedReplay[Result]) -> dict[str, Any]:
        """Return the numbers that not every report has."""

    def knee(self, policy: str) -> int | None:
        """Return the smallest capacity that saves nearly all, in blocks."""
        hits = [(each.replay.capacity_blocks, each.replay.hit_blocks) for each in self.of_policy(policy)]
        return find_knee(hits)

    def advice(self, policy: str) -> str:
        """Say in one sentence how much memory to buy."""
        knee = self.knee(policy)
        largest = self.of_policy(policy)[-1]
        if knee is None:
            return f"With {policy} none of these capacities saves anything: no prompt of this trace comes back in time."
        found = next(each for each in self.of_policy(policy) if each.replay.capacity_blocks == knee)
        if len(self.of_policy(policy)) == 1:
            return (
                f"With {policy} and {self.size(knee)}, {percent(found.hit_ratio)} of the prompt tokens are saved; "
                "where the knee is takes several capacities to see."
            )
        if found is largest:
            return (
                f"With {policy} no knee is in sight: {self.size(knee)}, the largest capacity tried, still saves over "
                f"{100 / KNEE_SHARE - 100:.0f} % more than the next smaller one."
            )
        return (
            f"With {policy} the knee is at {self.size(knee)}: the smallest capacity tried that saves at least "
            f"{100 * KNEE_SHARE:.0f} % of what {self.size(largest.replay.capacity_blocks)}, the largest, saves "
            f"({percent(found.hit_ratio)} against {percent(largest.hit_ratio)} of the prompt tokens)."
        )

    def notes(self) -> list[str]:
        """Return what has to be known before the table."""
        trace = self.trace
        notes = []
        if self.memory.bytes_per_token is not None:
            per_token = format_nbytes(self.memory.bytes_per_token)
            notes.append(f"A token takes {per_token} ({self.memory.explanation}).")
        if trace.num_skipped_lines:
            notes.append(f"{trace.num_skipped_lines:,} lines could not be used and were skipped.")
        if trace.num_out_of_order:
            notes.append(f"{trace.num_out_of_order:,} requests stood behind later ones; they were sorted by time.")
        return notes

    def show(self, console: Console) -> None:
        """Print the table, the bars and the advice."""
        trace = self.trace
        console.print(
            f"{escape(trace.name)}: {len(trace.requests):,} requests, {trace.num_tokens:,} tokens, "
            f"{trace.num_references:,} blocks of {trace.block_size} tokens, {trace.num_unique_blocks:,} of them "
            f"different, in {trace.duration_s / 3600:.1f} h",
            highlight=False,
        )
        for note in self.notes():
            console.print(escape(note), highlight=False)
        console.print(self._table())
        console.print(self.legend, highlight=False)
        width = max(len(self._label(each)) for each in self.compared)
        for each in self.compared:
            label = f"{self._label(each):>{width}}"
            console.print(f"{label} {self._bar(each)} {percent(each.hit_ratio):>7}", highlight=False)
        console.print()
        for policy in self.policies:
            console.print(escape(self.advice(policy)), highlight=False)

    def as_json(self) -> dict[str, Any]:
        """Return everything, with numbers as they are."""
        trace = self.trace
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
            "kv_bytes_per_token": self.memory.bytes_per_token,
            "slot_nbytes": self.slot_nbytes,
            "results": [
                {
                    "policy": each.replay.policy,
                    "capacity_blocks": each.replay.capacity_blocks,
                    "capacity_nbytes": self.nbytes(each.replay.capacity_blocks),
                    "hit_blocks": each.replay.hit_blocks,
                    "hit_tokens": each.replay.hit_tokens,
                    "hit_ratio": each.hit_ratio,
                    "optimum_hit_blocks": each.optimum_hit_blocks,
                    "optimum_hit_ratio": each.optimum_hit_ratio,
                    "share_of_optimum": each.share_of_optimum,
                    **self.row_as_json(each),
                    "seconds": each.replay.seconds,
                }
                for each in self.compared
            ],
            "knee": {policy: {"share": KNEE_SHARE, "capacity_blocks": self.knee(policy)} for policy in self.policies},
            "advice": [self.advice(policy) for policy in self.policies],
        }

    def draw(self, path: Path) -> None:
        """Write the plot; the knee in it is that of the first policy."""
        title = f"{self.trace.name}: {len(self.trace.requests):,} requests"
        draw_plot(
            path,
            title,
            self.compared,
            slot_nbytes=self.slot_nbytes,
            knee_blocks=self.knee(self.policies[0]),
            device_hit_ratio=self.device_hit_ratio(),
        )

    def device_hit_ratio(self) -> float | None:
        """Return what the device finds by itself, if there is one."""
        return None

    def size(self, num_blocks: int) -> str:
        """Write a size, in bytes if what a token takes is known."""
        nbytes = self.nbytes(num_blocks)
        return f"{num_blocks:,} blocks" if nbytes is None else format_nbytes(nbytes)

    def nbytes(self, num_blocks: int) -> int | None:
        """Return what so many blocks take, if that is known."""
        return None if self.slot_nbytes is None else self.slot_nbytes * num_blocks

    def nbytes_a_day(self, num_blocks: int) -> float | None:
        """Return the bytes of keys and values in blocks that were written during the trace, scaled to a day."""
        if self.memory.bytes_per_token is None:
            return None
        nbytes = num_blocks * self.trace.block_size * self.memory.bytes_per_token
        return nbytes_a_day(nbytes, self.trace.duration_s)

    def cell_a_day(self, heading: str, num_blocks: int) -> dict[str, str]:
        """Return the cell of what was written, if that is known."""
        written = self.nbytes_a_day(num_blocks)
        return {} if written is None else {heading: format_nbytes(round(written))}

    def of_policy(self, policy: str) -> list[ComparedReplay[Result]]:
        """Return the replays with one policy, by ascending capacities."""
        return [each for each in self.compared if each.replay.policy == policy]

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        rows = [
            {**({"policy": each.replay.policy} if len(self.policies) > 1 else {}), **self.cells(each)}
            for each in self.compared
        ]
        for heading in rows[0]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row.values())
        return table

    def _bar(self, each: ComparedReplay[Result]) -> str:
        bar, end = "", 0
        for part, ratio in [*self.parts_of_bar(each), ("░", each.optimum_hit_ratio)]:
            start, end = end, max(end, round(ratio * BAR_WIDTH))
            style, _, sign = part.rpartition(" ")
            drawn = sign * (end - start)
            bar += f"[{style}]{drawn}[/]" if style else drawn
        return bar + " " * (BAR_WIDTH - end)

    def _label(self, each: ComparedReplay[Result]) -> str:
        policy = f"{each.replay.policy} " if len(self.policies) > 1 else ""
        return policy + self.size(each.replay.capacity_blocks)


class HostReport(Report[ReplayResult]):
    """Show what host memory alone would have saved."""

    legend = "hit ratio: what was reached ([green]█[/]) and what was possible (░)"

    def notes(self) -> list[str]:
        """Warn of a policy that makes no use of the memory."""
        notes = super().notes()
        if any(each.replay.unreachable_blocks for each in self.compared):
            notes.append("Some blocks were cached without the ones in front of them: see unreachable_blocks in --json.")
        return notes

    def cells(self, each: ComparedReplay[ReplayResult]) -> dict[str, str]:
        """Return what was saved, written and evicted."""
        return {
            "capacity": self.size(each.replay.capacity_blocks),
            "hit ratio": percent(each.hit_ratio),
            "of optimum": percent(each.share_of_optimum),
            "tokens saved": f"{each.replay.hit_tokens:,}",
            **self.cell_a_day("written a day", each.replay.stored_blocks),
            "evictions": f"{each.replay.evicted_blocks:,}",
        }

    def parts_of_bar(self, each: ComparedReplay[ReplayResult]) -> list[tuple[str, float]]:
        """Return what was reached."""
        return [("green █", each.hit_ratio)]

    def row_as_json(self, each: ComparedReplay[ReplayResult]) -> dict[str, Any]:
        """Return what was written, evicted and useless."""
        return {
            "stored_blocks": each.replay.stored_blocks,
            "written_nbytes_a_day": self.nbytes_a_day(each.replay.stored_blocks),
            "evicted_blocks": each.replay.evicted_blocks,
            "unreachable_blocks": each.replay.unreachable_blocks,
        }


def percent(ratio: float) -> str:
    """Write a ratio, rounded down: what is not all is not 100 %. The small number is for 0.29, which is a bit less."""
    return f"{math.floor(ratio * 1000 + 1e-9) / 10:.1f} %"
