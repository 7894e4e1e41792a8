"""What ``kvmoor simulate`` shows of replays through a device, host memory and a disk."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvmoor.cli.simulate_report import Report, percent
from kvmoor.cli.simulated_memory import SimulatedMemory
from kvmoor.simulation.comparison import ComparedReplay
from kvmoor.simulation.tiered_replay import TierCounts, TieredResult, TierPlan
from kvmoor.simulation.trace import Trace

_TIERS = "device", "host", "disk"


class TierReport(Report[TieredResult]):
    """Show what the tiers would have saved together, and each of them."""

    def __init__(
        self,
        trace: Trace,
        compared: Sequence[ComparedReplay[TieredResult]],
        memory: SimulatedMemory,
        plan: TierPlan,
    ) -> None:
        super().__init__(trace, compared, memory)
        self.plan = plan
        self.legend = (
            f"hit ratio: {'on the device ([cyan]█[/]), ' * (plan.device_blocks > 0)}in host memory ([green]▓[/])"
            f"{', on disk ([yellow]▒[/])' * (plan.disk_blocks > 0)} and what was possible (░)"
        )

    def notes(self) -> list[str]:
        """Say what the tiers are, and what is of little use with them."""
        plan = self.plan
        notes = super().notes()
        if plan.device_blocks:
            stored = "what leaves it" if plan.store_when == "leaving" else "what is computed"
            notes.append(f"The device holds {self.size(plan.device_blocks)}; host memory stores {stored}.")
        if plan.disk_blocks:
            admitted = "all that falls out of host memory"
            if plan.disk_admission == "second-reference":
                admitted = "what falls out of host memory, if it was referred to twice"
            notes.append(f"The disk holds {self.size(plan.disk_blocks)} and takes {admitted}.")
        smallest = min(each.replay.capacity_blocks for each in self.compared)
        if plan.store_when == "computed" and smallest <= plan.device_blocks:
            notes.append(
                "Host memory that stores what is computed, and is no larger than the device, holds little that the "
                "device has not: try --store-when leaving."
            )
        if plan.store_when == "computed" and plan.device_blocks and "device-lru" in self.policies:
            notes.append(
                "The policy device-lru is made for --store-when leaving: with what is computed it finds little more "
                "than lru."
            )
        return notes

    def advice(self, policy: str) -> str:
        """Say how much host memory to buy, and what there is without it."""
        advice = super().advice(policy)
        device = self.device_hit_ratio()
        return advice if device is None else f"{advice} The device alone saves {percent(device)}."

    def device_hit_ratio(self) -> float | None:
        """Return what the device finds: the same whatever is behind it."""
        return self._ratio(self.compared[0].replay.hits.device) if self.plan.device_blocks else None

    def cells(self, each: ComparedReplay[TieredResult]) -> dict[str, str]:
        """Return what was saved in all, by which tier, and what that took."""
        replay = each.replay
        hits = dict(zip(_TIERS, self._ratios(replay.hits), strict=True))
        return {
            "host memory": self.size(replay.capacity_blocks),
            "hit ratio": percent(each.hit_ratio),
            "of optimum": percent(each.share_of_optimum),
            **({"device": percent(hits["device"])} if self.plan.device_blocks else {}),
            "host": percent(hits["host"]),
            **({"disk": percent(hits["disk"])} if self.plan.disk_blocks else {}),
            **self.cell_a_day("to host a day", replay.stored.host),
            **(self._disk_cells(replay) if self.plan.disk_blocks else {}),
        }

    def parts_of_bar(self, each: ComparedReplay[TieredResult]) -> list[tuple[str, float]]:
        """Return what each tier has added."""
        device, host, _ = self._ratios(each.replay.hits)
        return [("cyan █", device), ("green ▓", device + host), ("yellow ▒", each.hit_ratio)]

    def row_as_json(self, each: ComparedReplay[TieredResult]) -> dict[str, Any]:
        """Return the counts of each tier."""
        replay = each.replay
        stored = asdict(replay.stored)
        return {
            "hit_blocks_by_tier": asdict(replay.hits),
            "hit_ratio_by_tier": dict(zip(_TIERS, self._ratios(replay.hits), strict=True)),
            "stored_blocks_by_tier": stored,
            "written_nbytes_a_day_by_tier": {tier: self.nbytes_a_day(blocks) for tier, blocks in stored.items()},
            "evicted_blocks_by_tier": asdict(replay.evicted),
            "saved_disk_writes_blocks": replay.saved_writes,
            "saved_disk_writes_nbytes_a_day": self.nbytes_a_day(replay.saved_writes),
        }

    def as_json(self) -> dict[str, Any]:
        """Add what the tiers are."""
        plan = self.plan
        return {
            **super().as_json(),
            "tiers": {
                "device_blocks": plan.device_blocks,
                "device_nbytes": self.nbytes(plan.device_blocks),
                "disk_blocks": plan.disk_blocks,
                "disk_nbytes": self.nbytes(plan.disk_blocks),
                "store_when": plan.store_when,
                "disk_admission": plan.disk_admission,
            },
        }

    def _disk_cells(self, replay: TieredResult) -> dict[str, str]:
        cells = self.cell_a_day("to disk a day", replay.stored.disk)
        if self.plan.disk_admission == "second-reference":
            cells |= self.cell_a_day("not written", replay.saved_writes)
        return cells

    def _ratios(self, counts: TierCounts) -> tuple[float, float, float]:
        return self._ratio(counts.device), self._ratio(counts.host), self._ratio(counts.disk)

    def _ratio(self, num_blocks: int) -> float:
        return num_blocks * self.trace.block_size / max(1, self.trace.num_tokens)
