"""``kvmoor demo``: run the demo, follow it with progress bars, and show what came of it as a table or as JSON."""

import json
import platform
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvmoor
from kvmoor.byte_sizes import format_nbytes
from kvmoor.cli.exit_codes import DIFFERENT, one_line_errors
from kvmoor.demo.documents import built_in_documents, read_own_document
from kvmoor.demo.model import MODEL_NAME, find_model_package, load_model
from kvmoor.demo.rounds import DEVICE_BLOCKS, TOKENS_PER_BLOCK, AskedTwice, DemoResult, ProgressListener, run_rounds


def demo(
    prompt: Annotated[
        Path | None,
        typer.Option(help="A text file of your own, with a question at its end; it takes the place of one document."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens to generate for each answer.")] = 32,
    host_memory: Annotated[str, typer.Option(help="Host memory for blocks, such as 512MiB.")] = "512MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of bars and a table.")] = False,
) -> None:
    """Ask a small language model about three documents twice: computed first, then restored from host memory.

    Ends with code 0 if every answer is the same in both rounds, 1 if one differs, and 2 if the demo cannot run.
    """
    with one_line_errors():
        documents = built_in_documents()
        if prompt is not None:
            documents[0] = read_own_document(prompt)
        package = find_model_package()
        with _Bars(shown=not as_json) as bars:
            loaded = load_model(package, on_step=bars.begin)
            result = run_rounds(
                loaded, documents, max_new_tokens=max_new_tokens, host_memory=host_memory, progress=bars
            )
        if as_json:
            typer.echo(json.dumps(_as_json(result), indent=2))
        else:
            _show(result)
        if not result.all_identical:
            raise typer.Exit(DIFFERENT)


class _Bars(ProgressListener):
    """Show each step as a line with a spinner or a bar, on stderr."""

    def __init__(self, *, shown: bool) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self._finish()
        self._progress.stop()

    def begin(self, step: str, num_tokens: int | None = None) -> None:
        """Finish the line of the step before and begin one; without a number of tokens the bar pulses."""
        self._finish()
        self._task = self._progress.add_task(escape(step), total=num_tokens)

    def advance(self) -> None:
        """Move the bar on by one token."""
        if self._task is not None:
            self._progress.advance(self._task)

    def _finish(self) -> None:
        if self._task is not None:
            # An answer may end before its limit, and a step without tokens has no total until now.
            self._progress.update(self._task, total=1, completed=1)


def _show(result: DemoResult) -> None:
    console = Console()
    table = Table(
        title=f"{MODEL_NAME} in float32 on {platform.machine()}",
        caption="prompt, restored: tokens; cold, warm: time to the first token",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("document")
    for heading in ("prompt", "restored", "cold", "warm", "speed-up", "same text"):
        table.add_column(heading, justify="right")
    for asked in result.questions:
        table.add_row(
            escape(asked.document.title),
            f"{asked.prompt_tokens:,}",
            f"{asked.warm.restored.num_tokens:,}",
            f"{asked.cold.seconds_to_first_token:.2f} s",
            f"{asked.warm.seconds_to_first_token:.2f} s",
            f"{asked.speed_up:.1f} x",
            "yes" if asked.identical else "[red]NO",
        )
    console.print(table)
    for asked in result.questions:
        question = asked.document.question or f"your text, {asked.document.title}"
        console.print(f"{escape(question)} [bold]{escape(asked.warm.text)}[/]", highlight=False)
        if not asked.identical:
            console.print(f"[red]in round 1 it was:[/] {escape(asked.cold.text)}", highlight=False)
    moved = format_nbytes(result.host.transfers.loaded_nbytes)
    console.print(
        f"\n{moved} came back from host memory: {_where(result)}. The device pool holds "
        f"{DEVICE_BLOCKS * TOKENS_PER_BLOCK:,} tokens, one document at a time.",
        highlight=False,
    )


def _where(result: DemoResult) -> str:
    arena = result.host.transfers.arena
    return (
        f"{arena.backing.value} memory of this process, {format_nbytes(arena.mapped_nbytes)} mapped, "
        f"{result.plan.groups[0].num_slots:,} slots of {format_nbytes(result.plan.groups[0].slot_nbytes)}"
    )


def _as_json(result: DemoResult) -> dict[str, Any]:
    transfers = result.host.transfers
    return {
        "kvmoor": kvmoor.__version__,
        "model": MODEL_NAME,
        "device_pool": {"blocks": DEVICE_BLOCKS, "tokens_per_block": TOKENS_PER_BLOCK},
        "host_memory": {
            "backing": transfers.arena.backing.value,
            "nbytes": transfers.arena.nbytes,
            "mapped_nbytes": transfers.arena.mapped_nbytes,
            "stored_nbytes": transfers.stored_nbytes,
            "loaded_nbytes": transfers.loaded_nbytes,
        },
        "questions": [_question_as_json(asked) for asked in result.questions],
        "all_identical": result.all_identical,
    }


def _question_as_json(asked: AskedTwice) -> dict[str, Any]:
    return {
        "title": asked.document.title,
        "author": asked.document.author,
        "year": asked.document.year,
        "question": asked.document.question,
        "prompt_tokens": asked.prompt_tokens,
        "restored_tokens_cold": asked.cold.restored.num_tokens,
        "restored_tokens": asked.warm.restored.num_tokens,
        "restored_tokens_from_device": asked.warm.restored.num_tokens_from_device,
        "restored_tokens_from_host": asked.warm.restored.num_tokens_from_host,
        "seconds_to_first_token_cold": round(asked.cold.seconds_to_first_token, 4),
        "seconds_to_first_token_warm": round(asked.warm.seconds_to_first_token, 4),
        "speed_up": round(asked.speed_up, 2),
        "identical": asked.identical,
        "text_cold": asked.cold.text,
        "text_warm": asked.warm.text,
    }
