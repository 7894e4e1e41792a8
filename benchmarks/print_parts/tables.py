"""Tables as Markdown, and where reports go."""

from collections.abc import Sequence
from pathlib import Path


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Write rows with the same columns as a table, aligned to the right from the second column on."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first = next(iter(widths))
    lines = [
        widths.keys(),
        ["-" * width if name == first else "-" * (width - 1) + ":" for name, width in widths.items()],
    ]
    lines += [row.values() for row in rows]
    return "\n".join(
        "| "
        + " | ".join(
            f"{cell:{'<' if name == first else '>'}{width}}"
            for cell, (name, width) in zip(line, widths.items(), strict=True)
        )
        + " |"
        for line in lines
    )


def section(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> str:
    """Write a title, a table, and what is to be said about it."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join([*lines, *(["", note] if note else [])])


def cell(value: object) -> str:
    """Write one value, a number with three digits; what is not there is "-"."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def print_and_keep(lines: Sequence[str], out: Path | None) -> None:
    """Print a report, and write it to a file if there is to be one."""
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
