"""Tables as Markdown."""

from collections.abc import Sequence


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
