"""The figures of a replay as tables, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.replay.passes import Follow, PassReports
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.source import RequestSource

_MIB = 1024 * 1024
_GIB = 1024 * _MIB


def bar_per_pass(console: Console, num_passes: int) -> Follow:
    """Return what shows a progress bar for each pass, if the console is a terminal."""

    @contextmanager
    def follow(source: RequestSource, number: int) -> Iterator[Callable[[], None]]:
        title = "replay" if num_passes == 1 else f"replay {number}/{num_passes}"
        with progress_bar(console, lambda: source.fraction_done, title) as on_step:
            yield on_step

    return follow


def print_table(console: Console, reports: PassReports) -> None:
    """Print the figures for people, a column a pass."""
    passes = reports.passes
    names = [pass_name(number) for number in range(1, len(passes) + 1)]
    table = Table(
        title="Replay, interrupted" if reports.interrupted else "Replay",
        show_header=len(passes) > 1,
        title_justify="left",
    )
    table.add_column(style="bold")
    for name in names:
        table.add_column(name, justify="right")
    for rows in zip(*map(figure_rows, passes), strict=True):
        table.add_row(rows[0][0], *(value for _, value in rows))
    console.print(table)
    if passes[0].tiers:
        console.print(_tier_table(passes, names))


def pass_name(number: int) -> str:
    """Return what a pass is called, from 1 on."""
    return {1: "first pass", 2: "warm pass"}.get(number, f"pass {number}")


def figure_rows(report: Report) -> list[tuple[str, str]]:
    """Return what each figure is called, and the figure as a text."""
    jobs = (report.jobs_submitted, report.job_results, report.job_failures)
    refused = (report.stores_refused, report.promotions_refused)
    moved = (size_text(report.bytes_stored), size_text(report.bytes_loaded))
    copied = (size_text(report.bytes_from_device), size_text(report.bytes_to_device))
    owner_us = (f"{name} {value:,.0f} us" for name, value in report.owner_us_per_step.items())
    return [
        ("requests", f"{report.requests:,}"),
        ("block references", f"{report.block_refs:,}"),
        ("hit ratio", f"{report.hit_ratio:.4f}"),
        *((f"hits in {name}", f"{count:,}") for name, count in report.hits.items()),
        ("verified blocks", f"{report.verified_blocks:,}"),
        ("corrupt blocks", f"{report.corrupt_blocks:,}"),
        ("jobs / results / failed", _joined(jobs)),
        ("leaked pins", f"{report.leaked_pins:,}"),
        ("stored / loaded", " / ".join(moved)),
        ("from / to the device", " / ".join(copied)),
        ("preemptions", f"{report.preemptions:,}"),
        ("evictions", f"{report.evictions:,}"),
        ("stores / promotions refused", _joined(refused)),
        ("device blocks / layers", _joined((report.device_blocks, report.layers))),
        ("primary blocks", f"{report.primary_blocks:,} of {size_text(report.row_bytes)}"),
        ("eviction policy", report.policy),
        ("engine", report.engine),
        ("wall time", f"{report.wall_s:.2f} s"),
        ("block references a second", f"{report.block_refs_per_s:,.0f}"),
        ("steps", f"{report.steps:,}"),
        ("owner's time a step", ", ".join(owner_us)),
    ]


def _tier_table(passes: Sequence[Report], names: Sequence[str]) -> Table:
    table = Table("tier", title="Secondary tiers", title_justify="left")
    if len(passes) > 1:
        table.add_column("pass")
    for name in ("stored", "loaded", "failed jobs", "dropped blocks"):
        table.add_column(name, justify="right")
    for report, pass_name in zip(passes, names, strict=True):
        for name, tier in report.tiers.items():
            table.add_row(
                name,
                *([pass_name] if len(passes) > 1 else []),
                size_text(tier["stored_bytes"]),
                size_text(tier["loaded_bytes"]),
                f"{tier['failed_jobs']:,}",
                f"{tier['dropped_blocks']:,}",
            )
    return table


def _joined(counts: Sequence[int]) -> str:
    return " / ".join(f"{count:,}" for count in counts)


def size_text(num_bytes: int) -> str:
    """Return a size for people."""
    if num_bytes < _MIB:
        return f"{num_bytes / 1024:,.0f} KiB"
    return f"{num_bytes / _MIB:,.1f} MiB" if num_bytes < _GIB else f"{num_bytes / _GIB:,.2f} GiB"
