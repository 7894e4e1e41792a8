"""The commands of ``kvmoor``, each in a module of its own."""

import typer

import kvmoor
from kvmoor.cli.bench_command import bench
from kvmoor.cli.demo_command import demo
from kvmoor.cli.signals import exit_on_signals
from kvmoor.cli.simulate_command import simulate

app = typer.Typer(
    help="Keep the KV-cache blocks of an LLM engine in host memory and bring them back when a prompt returns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(simulate)
app.add_typer(bench, name="bench")


@app.command()
def version() -> None:
    """Print the version of kvmoor."""
    typer.echo(f"kvmoor {kvmoor.__version__}")


def main() -> None:
    """Run the command line; the entry point of the package. Ends the process with the exit code of the command."""
    with exit_on_signals():
        app(prog_name="kvmoor")
