"""Output of `kvoffload replay`: tables, progress bar, plots, HTML report and timelines."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Final

from rich.console import Console

from kvoffload_async.cli.output import (
    STDOUT,
    as_unwritable,
    check_writable,
    drawing_module,
    figures_table,
    progress_bar,
    shown,
    size_text,
    write_text,
)
from kvoffload_async.errors import InputError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.observe.trace_events import TraceEventFile
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import PassReports
from kvoffload_async.replay.source import STDIN, RequestSource
from kvoffload_async.timeline import RequestTimeline


def bar_of_pass(
    console: Console, num_passes: int, source: RequestSource, number: int
) -> AbstractContextManager[object]:
    """Return the progress bar of a replay pass; it is shown if the console is a terminal."""
    title = "replay" if num_passes == 1 else f"replay {number}/{num_passes}"
    return progress_bar(console, lambda: source.fraction_done, title)


def print_table(reports: PassReports, console: Console) -> None:
    """Print the figures of a replay as tables, with one column per pass."""
    for title, head, rows in _tables(reports, _PRINTED):
        console.print(figures_table(title, head, rows))


def _tables(
    reports: PassReports, tier_figures: Collection[str]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield each table's title, header and rows; the header of a single pass is empty."""
    passes = reports.passes
    later = (f"pass {number}" for number in range(3, len(passes) + 1))
    names = ["first pass", "warm pass", *later][: len(passes)] if len(passes) > 1 else [""]
    title = "Replay, interrupted" if reports.interrupted else "Replay"
    figures = zip(*map(_figure_rows, passes), strict=True)
    yield title, ["", *names], [[each[0][0], *(value for _, value in each)] for each in figures]
    if passes[0].tiers:
        head = ["tier", "pass", *(_TIER_FIGURES[one] for one in tier_figures)]
        rows = [
            [tier, name, *(_value(one, counts[one]) for one in tier_figures)]
            for name, report in zip(names, passes, strict=True)
            for tier, counts in report.tiers.items()
        ]
        if len(passes) == 1:
            for row in (head, *rows):
                del row[1]
        yield "Secondary tiers", head, rows


def _figure_rows(report: Report) -> list[tuple[str, str]]:
    """Return the name and the formatted value of each figure of a pass."""
    jobs = (report.jobs_submitted, report.job_results, report.job_failures)
    refused = (report.stores_refused, report.promotions_refused)
    moved = (size_text(report.bytes_stored), size_text(report.bytes_loaded))
    copied = (size_text(report.bytes_from_device), size_text(report.bytes_to_device))
    owner_us = (f"{name} {value:,.0f} us" for name, value in report.owner_us_per_step.items())
    queue: list[tuple[str, str]] = []
    if report.queued_s is not None:
        queued_s = (f"{name} {value:.3g} s" for name, value in report.queued_s.items())
        counts = report.prefetch_counts
        queue = [("in the queue", ", ".join(queued_s))]
        queue += [("prefetched / used / in vain", _joined(counts))] if report.prefetch else []
    return [
        ("requests", f"{report.requests:,}"),
        ("block references", f"{report.block_refs:,}"),
        ("hit ratio", f"{report.hit_ratio:.4f}"),
        ("block hits", f"{report.block_hits:,}"),
        *((f"hits in {name}", f"{count:,}") for name, count in report.hits.items()),
        ("verified blocks", f"{report.verified_blocks:,}"),
        ("corrupt blocks", f"{report.corrupt_blocks:,}"),
        ("jobs / results / failed", _joined(jobs)),
        ("leaked pins", f"{report.leaked_pins:,}"),
        ("stored / loaded", " / ".join(moved)),
        ("from / to the device", " / ".join(copied)),
        *queue,
        ("preemptions", f"{report.preemptions:,}"),
        ("evictions", f"{report.evictions:,}"),
        ("stores / promotions refused", _joined(refused)),
        ("device blocks / layers", _joined((report.device_blocks, report.layers))),
        ("primary blocks", f"{report.primary_blocks:,} of {size_text(report.row_bytes)}"),
        ("eviction policy", report.policy),
        ("engine", report.engine),
        ("wall time", f"{report.wall_s:.2f} s"),
        ("block references per second", f"{report.block_refs_per_s:,.0f}"),
        ("steps", f"{report.steps:,}"),
        ("owner's time per step", ", ".join(owner_us)),
    ]


def _value(figure: str, value: int) -> str:
    return size_text(value) if figure.endswith("bytes") else f"{value:,}"


def _joined(counts: Sequence[int]) -> str:
    return " / ".join(f"{count:,}" for count in counts)


PLOT: Final = "kvoffload_async.replay.plot"

_MAX_NAME: Final = 60
"""Maximum length of a trace's name in a plot."""
_TIER_FIGURES: Final = {
    "stored_bytes": "stored",
    "loaded_bytes": "loaded",
    "stored_blocks": "blocks stored",
    "loaded_blocks": "blocks loaded",
    "failed_jobs": "failed jobs",
    "dropped_blocks": "dropped blocks",
    "prefetched_blocks": "blocks prefetched",
    "unused_prefetched_blocks": "in vain",
}
_PRINTED: Final = ("stored_bytes", "loaded_bytes", "failed_jobs", "dropped_blocks")
"""The figures of tiers that fit on a terminal; the HTML page shows all."""
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 84rem; margin: 0 auto;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 1.75rem 0 .5rem; }
.note, figcaption { color: #555; font-size: .875rem; }
.complaint { background: #fde8e8; border-left: 4px solid #b00; padding: .5rem .75rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.5rem; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: right; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid #ddd;
  vertical-align: top; }
tr > :first-child { text-align: left; font-weight: 600; }
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the browser loads nothing for the page and runs no script."""


def publish_pictures(
    reports: PassReports, trace: Path | None, plot: Path | None, page: Path | None
) -> None:
    """Write the plot and the HTML page of a replay that has recorded samples.

    Raises:
        InputError: A file cannot be written.
    """
    name = "the built-in chat workload" if trace is None else trace.name
    if str(trace) == STDIN:
        name = "standard input"
    # A file name may contain bytes that cannot be decoded.
    name = name.encode(errors="backslashreplace").decode()
    sizes = _sizes(reports)
    origin = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {_machine()}"
    if page is not None:
        text = "\n".join(_page(reports, f"Replay of {name}", sizes, origin))
        write_text("--report", str(page), text)
    if plot is not None:
        if len(name) > _MAX_NAME:
            name = f"{name[: _MAX_NAME // 2]}...{name[-_MAX_NAME // 2 :]}"
        title = f"Replay of {name}\n{sizes}"
        with as_unwritable("--plot", str(plot)):
            drawing_module("--plot", PLOT).draw(reports.passes, plot, title, origin)


def _sizes(reports: PassReports) -> str:
    report = reports.passes[0]
    primary = f"{report.primary_blocks:,} blocks of {size_text(report.row_bytes)}"
    parts = [f"policy {report.policy}, primary of {primary}"]
    for name, tier in zip(report.tiers, report.samples[-1].stats.tiers, strict=True):
        capacity = "" if not tier.capacity_bytes else f" of {size_text(tier.capacity_bytes)}"
        parts.append(f"{name}{capacity}")
    return " + ".join(parts)


def _machine() -> str:
    return (
        f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, kvoffload-async {version('kvoffload-async')}"
    )


# -- the page -------------------------------------------------------------------------------------


def _page(reports: PassReports, title: str, sizes: str, origin: str) -> Iterable[str]:
    plot = drawing_module("--report", PLOT)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(title)}</h1>\n<p>{escape(sizes)}</p>"
    if reports.interrupted:
        yield '<p class="complaint">Interrupted: figures up to the interruption.</p>'
    yield from (f'<p class="complaint">{escape(text)}</p>' for text in reports.complaints)
    yield '<h2>Over time</h2>\n<div class="panels">'
    for (name, explanation, _), svg in zip(plot.PANELS, plot.svgs(reports.passes), strict=True):
        named = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
        yield f"<figure>{named}<figcaption>{escape(explanation)}</figcaption></figure>"
    yield "</div>"
    for heading, head, rows in _tables(reports, _TIER_FIGURES):
        yield f"<h2>{escape(heading)}</h2>"
        yield from _table(head, rows)
    yield f'<p class="note">{escape(origin)}</p>\n</body>\n</html>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield '<div class="wide"><table>'
    yield f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
    yield "</table></div>"


_MORE_REQUESTS: Final = 64
"""Timelines kept beyond those of requests in flight, for ended requests with unfinished copies."""


def check_explained(number: int, open_source: Callable[[], RequestSource]) -> None:
    """Check before a replay that its trace has request `number`, counted from 0.

    Raises:
        InputError: It has not.
    """
    with closing(open_source()) as source:
        count = sum(1 for _ in islice(source, number + 1))
    if 0 < count <= number:
        raise InputError(
            f"--explain {number}: the replay has {count} requests; give a number from 0 to "
            f"{count - 1}"
        )


class TimelineOutput:
    """Prints the timeline of one request of a replay, and writes all timelines to a file."""

    def __init__(self, explained: int | None, trace_out: str | None) -> None:
        """Print the timeline of request `explained`; write all timelines to the file `trace_out`.

        Raises:
            InputError: The file cannot be written.
        """
        if trace_out == STDOUT:
            raise InputError("--trace-out -: expected a file")
        check_writable("--trace-out", trace_out)
        self._explained = explained
        self._name = trace_out
        self._file: TraceEventFile | None = None
        self._error: OSError | None = None
        self._texts: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the replay must record timelines."""
        return self._explained is not None or self._name is not None

    def close(self) -> None:
        """Close the file of timelines.

        Raises:
            InputError: The file cannot be written.
        """
        if self._file is not None:
            with as_unwritable("--trace-out", str(self._name)):
                self._file.close()

    def recording(self, spec: TieringOffloadingSpec, concurrency: int) -> TieringOffloadingSpec:
        """Return the spec, changed to record enough timelines, and create the file of timelines.

        Raises:
            InputError: The file cannot be written.
        """
        if not self.is_wanted:
            return spec
        if self._name is not None:
            with as_unwritable("--trace-out", self._name):
                self._file = TraceEventFile(Path(self._name))
        needed = 2 * concurrency + _MORE_REQUESTS
        kept = max(spec.config.explain_requests, needed)
        return TieringOffloadingSpec(replace(spec.config, explain_requests=kept))

    def watch(self, number: int, timeline: RequestTimeline) -> None:
        """Write a finished timeline of pass `number`; keep the explained one for printing."""
        name, _, _ = timeline.req_id.partition("/")
        if name == f"request-{self._explained}":
            self._texts.append(f"pass {number}, {timeline}")
        if self._file is not None and self._error is None:
            try:
                self._file.add(timeline, f"pass {number}")
            except OSError as error:  # the replay continues; `publish` raises the error
                self._error = error

    def publish(self, console: Console) -> None:
        """Print the timelines of the explained request.

        Raises:
            InputError: There was no such request, or the file could not be written.
        """
        for text in self._texts:  # they may contain error texts with any characters
            lines = "\n".join(map(shown, text.split("\n")))
            console.print(f"\n{lines}", markup=False, highlight=False, soft_wrap=True)
        if self._explained is not None and not self._texts:
            raise InputError(f"--explain {self._explained}: the replay had no such request")
        if self._error is not None:
            with as_unwritable("--trace-out", str(self._name)):
                raise self._error
