"""How a command ends: with one clear line instead of a traceback, and a code that scripts can rely on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from kvmoor.errors import KvmoorError

DIFFERENT: Final = 1
"""The command ran, and what it compared differs."""
UNUSABLE: Final = 2
"""The command could not run: bad input, something missing, something broken."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells report it; `kvmoor.cli.signals` ends a whole process that way, and with 143 after SIGTERM."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn kvmoor's errors and Ctrl-C into one line on stderr and an exit code; other errors stay tracebacks."""
    try:
        yield
    except KvmoorError as error:
        typer.echo(f"kvmoor: {error}", err=True)
        raise typer.Exit(UNUSABLE) from error
    except KeyboardInterrupt as interrupt:
        typer.echo("kvmoor: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from interrupt
