"""``kvmoor bench``: measure this machine, with results that kvmoor itself uses afterwards."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvmoor
from kvmoor.cli.exit_codes import one_line_errors
from kvmoor.settings import cache_directory

if TYPE_CHECKING:
    from kvmoor.devices.cuda.calibration import Measurement

_TIMEOUT_S: Final = 60.0
"""How long measuring may take: a hundred times what it takes on an idle GPU."""

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _bench() -> None:
    """Measure this machine."""  # makes the one command below a command of its own, not the whole of `bench`


@bench.command()
def copies(
    ordinal: Annotated[int, typer.Option(min=0, help="Which GPU, counted as CUDA_VISIBLE_DEVICES leaves them.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure each way to copy between a GPU and host memory, and choose among them for later runs.

    Takes a second on an idle GPU. Ends with code 2 if there is no GPU, or if it cannot be used.
    """
    with one_line_errors():
        # Here, so that no other command loads GPU code.
        from kvmoor.devices.cuda.calibration import PAGE_NBYTES, choose_strategy  # noqa: PLC0415
        from kvmoor.devices.cuda.device import CudaDevice  # noqa: PLC0415

        with CudaDevice(ordinal=ordinal, cache_dir=cache_directory()) as device:
            measurements = device.measure_copies(_TIMEOUT_S)
            name = device.name
        strategies = {page_nbytes: choose_strategy(measurements, page_nbytes) for page_nbytes in PAGE_NBYTES}
        if as_json:
            report = {
                "kvmoor": kvmoor.__version__,
                "gpu": name,
                "measurements": [{**asdict(each), "gb_per_s": each.gb_per_s} for each in measurements],
                "strategies": {str(page_nbytes): asdict(each) for page_nbytes, each in strategies.items()},
            }
            typer.echo(json.dumps(report, indent=2))
            return
        console = Console()
        console.print(f"{escape(name)}: GB/s of scattered pages, from the call until the copy is seen", highlight=False)
        for direction in dict.fromkeys(each.direction for each in measurements):
            console.print(_table(direction, [each for each in measurements if each.direction == direction]))
        for page_nbytes, strategy in strategies.items():
            engine = strategy.copy_engine_from_nbytes
            console.print(
                f"pages of {_size(page_nbytes)}: {strategy.store_thread_blocks} thread blocks for stores, "
                f"{strategy.load_thread_blocks} for loads, copy engine "
                + ("never" if engine is None else f"for runs of {_size(engine)} and more"),
                highlight=False,
            )


def _table(direction: str, measurements: "list[Measurement]") -> Table:
    """Return one row for each size of pages and of the whole copy, and one column for each way to copy."""
    table = Table(title=direction.replace("_", " "), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    ways = sorted({each.thread_blocks for each in measurements}, key=lambda blocks: (blocks == 0, blocks))
    for heading in ("page", "bytes", *(f"{blocks} thread blocks" if blocks else "copy engine" for blocks in ways)):
        table.add_column(heading, justify="right")
    speeds = {(each.page_nbytes, each.total_nbytes, each.thread_blocks): each.gb_per_s for each in measurements}
    for page_nbytes, total_nbytes in dict.fromkeys((each.page_nbytes, each.total_nbytes) for each in measurements):
        row = [speeds.get((page_nbytes, total_nbytes, blocks)) for blocks in ways]
        numbers = ("" if speed is None else f"{speed:.1f}" for speed in row)
        table.add_row(_size(page_nbytes), _size(total_nbytes), *numbers)
    return table


def _size(nbytes: int) -> str:
    """Write a power of two as people call it: pages and runs are that."""
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"
