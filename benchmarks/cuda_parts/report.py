"""The tables and targets of one benchmark: printed as Markdown, and kept in files while it still runs."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from print_parts.tables import section


@dataclass(frozen=True)
class Target:
    """What was wanted and what was found."""

    what: str
    found: float
    limit: float
    unit: str
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Say whether the figure is as good as was wanted."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.what}: {self.found:.4g} {self.unit} (wanted {sign} {self.limit:g}): {self.verdict}"

    @property
    def verdict(self) -> str:
        """Return the answer in one word."""
        return "met" if self.is_met else "MISSED"


def parse_options(question: str, arguments: Sequence[str] | None = None, **flags: str) -> argparse.Namespace:
    """Read the options that all benchmarks on a GPU have, and flags with their help."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="folder for the tables (Markdown) and figures (JSON), written as found"
    )
    parser.add_argument("--quick", action="store_true", help="measure next to nothing, to see that all runs")
    for flag, help_text in flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=help_text)
    return parser.parse_args(arguments)


class Report:
    """Collect what a benchmark finds. Everything is in the files as soon as it is added, should the rest fail."""

    def __init__(self, name: str, question: str, setup: str, out: Path | None) -> None:
        self._name = name
        self._question = question.splitlines()[0]
        self._setup = setup
        self._out = out
        self._sections: list[str] = []
        self._tables: list[dict[str, Any]] = []
        self._targets: list[Target] = []
        print(f"# {self._question}\n\n{setup}\n", flush=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> None:
        """Add a table, print it and save it."""
        self._sections.append(section(title, header, rows, note))
        self._tables.append({"title": title, "header": list(header), "rows": [list(map(str, row)) for row in rows]})
        print(self._sections[-1] + "\n", flush=True)
        self._save()

    def target(
        self, what: str, found: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Compare a figure with what was wanted."""
        limit = at_most if at_least is None else at_least
        assert limit is not None
        self._targets.append(Target(what, float(found), limit, unit, at_least is not None))
        print(self._targets[-1], flush=True)
        self._save()

    def _save(self) -> None:
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        parts = [f"# {self._question}", f"{self._setup}; {when} UTC", *self._sections]
        if self._targets:
            parts.append("## Targets\n\n" + "\n".join(f"- {target}" for target in self._targets))
        (self._out / f"{self._name}.md").write_text("\n\n".join(parts) + "\n")
        figures = {
            "question": self._question,
            "setup": self._setup,
            "tables": self._tables,
            "targets": [{**asdict(target), "met": target.is_met} for target in self._targets],
        }
        (self._out / f"{self._name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def nbytes_name(nbytes: int) -> str:
    """Name a size as tables do."""
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 and nbytes % 2**20 == 0 else f"{nbytes / 1024:g} KiB"
