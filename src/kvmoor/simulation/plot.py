"""Draw hit ratio against memory into a file, with matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvmoor.errors import MissingDependencyError, RequestError, SettingsError
from kvmoor.simulation.comparison import ComparedReplay, Result

SUFFIXES: Final = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse what `draw_plot` could not write, before hours of replay.

    Raises `SettingsError` for another suffix or a folder that does not exist, and `MissingDependencyError`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"the plot {path} has the suffix {path.suffix!r}: give one of {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"the plot {path} has no folder to be in: make it first")
    _import_figure()


def draw_plot(
    path: Path,
    title: str,
    compared: Sequence[ComparedReplay[Result]],
    *,
    slot_nbytes: int | None,
    knee_blocks: int | None,
    device_hit_ratio: float | None = None,
) -> None:
    """Write the plot, over a file that is there; memory is in GB if the bytes of a slot are known, else in blocks.

    With a device in front, what it finds alone is a line too.
    """
    unit = slot_nbytes / 1e9 if slot_nbytes else 1.0
    figure = _import_figure()(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(each.replay.policy for each in compared):
        points = [each for each in compared if each.replay.policy == policy]
        memory = [each.replay.capacity_blocks * unit for each in points]
        axes.plot(memory, [100 * each.hit_ratio for each in points], marker="o", label=policy)
    memory = [each.replay.capacity_blocks * unit for each in points]
    axes.plot(memory, [100 * each.optimum_hit_ratio for each in points], "k--", label="offline optimum")
    if device_hit_ratio is not None:
        axes.axhline(100 * device_hit_ratio, color="tab:cyan", linestyle=":", label="device alone")
    if knee_blocks is not None:
        axes.axvline(knee_blocks * unit, color="grey", linewidth=0.8, label="knee")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(
        title=title, xlabel="host memory, GB" if slot_nbytes else "host memory, blocks", ylabel="hit ratio, % of tokens"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RequestError(f"the plot {path} cannot be written: {error.strerror or error}") from error


def _import_figure() -> Any:
    """Return the class of figures. It draws into files by itself: no window, no state of the process."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MissingDependencyError('--plot needs matplotlib: pip install "kvmoor[plot]"') from error
