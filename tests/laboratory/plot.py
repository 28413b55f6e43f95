"""Plots of a benchmark's results; needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure as Canvas

from kvoffload_async.bench.figures import Figure, Report
from kvoffload_async.bench.plan import GIB
from kvoffload_async.bench.rounds import MEMCPY
from kvoffload_async.cli.output import size_text
from kvoffload_async.replay.plot import check_suffix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_suffix", "draw"]

_PANELS: Final = (
    ("store", "gib_per_s", "Store", "GiB/s"),
    ("load", "gib_per_s", "Load", "GiB/s"),
    ("store", "owner_us_per_key", "Store, the owner's thread", "us per block"),
    ("load", "owner_us_per_key", "Load, the owner's thread", "us per block"),
)
_LEGEND_COLUMNS: Final = 4
_MEMCPY_STYLE: Final = {"color": "grey", "fmt": ":"}
_BASELINE_STYLES: Final = {
    "native": {"color": "black", "fmt": "--"},
    "plain": {"color": "dimgrey", "fmt": "-."},
    "recycling": {"color": "darkgrey", "fmt": ":"},
}


def draw(report: Report, path: Path) -> None:
    """Write the plot; raises OSError if the file cannot be written."""
    canvas = Canvas(figsize=(11, 8.6), layout="constrained")
    shown: dict[str, Any] = {}
    for axes, (what, name, title, unit) in zip(canvas.subplots(2, 2).flat, _PANELS, strict=True):
        _draw_panel(axes, report, what, name, unit)
        axes.set_title(title)
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    # Outside the panels, where it hides no point.
    canvas.legend(shown.values(), shown, loc="outside lower center", ncols=_LEGEND_COLUMNS)
    machine, rounds = report.machine, report.sizes[0].rounds
    canvas.suptitle(
        f"{machine['date'][:10]}, {machine['processors']} x {machine['processor']}, "
        f"{machine['memory_bytes'] / GIB:.0f} GiB, {machine['system']}\n"
        f"kvoffload-async {machine['kvoffload_async']}, blocks are moved by: "
        f"{machine['block_io'].split()[0]}; medians of {rounds} rounds{_with_extremes(report)}",
        fontsize="small",
    )
    canvas.savefig(path, dpi=120)


def _with_extremes(report: Report) -> str:
    """Return a text that explains the bars of the extremes, if there are any."""
    figures = (
        figure
        for what, name, *_ in _PANELS
        for _, _, line in _lines(report, what, name)
        for figure in line
        if figure is not None
    )
    return ", with extremes" if any(figure.low < figure.high for figure in figures) else ""


def _draw_panel(axes: Axes, report: Report, what: str, name: str, unit: str) -> None:
    for label, style, figures in _lines(report, what, name):
        known = [(x, figure) for x, figure in enumerate(figures) if figure is not None]
        middle = [figure.median for _, figure in known]
        spread = [
            [figure.median - figure.low for _, figure in known],
            [figure.high - figure.median for _, figure in known],
        ]
        if known:
            axes.errorbar(
                [x for x, _ in known], middle, yerr=spread, capsize=3, label=label, **style
            )
    labels = [size_text(size.block_bytes) for size in report.sizes]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("bytes of a block")
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(_minor_label)
    axes.grid(visible=True, alpha=0.3)


def _lines(
    report: Report, what: str, name: str
) -> Iterator[tuple[str, dict[str, Any], list[Figure | None]]]:
    """Yield (label, style, one figure per block size) for every line."""
    sizes = report.sizes
    yield MEMCPY, _MEMCPY_STYLE, [size.memcpy.get(name) for size in sizes]
    for directory, kinds in sizes[0].baselines.items():
        for kind in kinds:
            figures = [size.baselines[directory][kind][what].get(name) for size in sizes]
            label = f"{kind} baseline"
            if len(sizes[0].baselines) > 1:
                label = f"{label} {directory}"
            yield label, _BASELINE_STYLES[kind], figures
    for number, contender in enumerate(sizes[0].contenders):
        passes = [size.contenders[contender].passes for size in sizes]
        # The number gives a contender the same colour in every panel.
        style = {"color": f"C{number}", "fmt": "o-"}
        yield contender, style, [each.get(what, {}).get(name) for each in passes]


def _minor_label(value: float, _position: float) -> str:
    """Return a label for 2 and 5 times a power of ten only, to avoid overlaps."""
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""
