"""The pictures of a replay, and the page with them: what they are of, and where they go."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Final, Self

from kvoffload_async.cli.output import as_unwritable
from kvoffload_async.cli.pictures import drawing_module
from kvoffload_async.cli.replay_tables import figure_rows, pass_name, size_text
from kvoffload_async.cli.settings import STDIN
from kvoffload_async.replay.passes import PassReports

PLOT: Final = "kvoffload_async.replay.plot"

_MAX_NAME: Final = 60
"""Letters of a trace's name in a picture."""
_TIER_FIGURES: Final = {
    "stored_bytes": "stored",
    "loaded_bytes": "loaded",
    "stored_blocks": "blocks stored",
    "loaded_blocks": "blocks loaded",
    "failed_jobs": "failed jobs",
    "dropped_blocks": "dropped blocks",
}
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
"""A browser loads nothing for the page, and runs nothing in it."""


@dataclass(frozen=True, slots=True)
class Headline:
    """What a picture is of.

    Attributes:
        trace: What was replayed, as its file is called; anything may be in it.
        sizes: The policy, and the sizes of the primary and the tiers.
        origin: When, where and with what.
    """

    trace: str
    sizes: str
    origin: str

    @classmethod
    def of(cls, trace: Path | None, reports: PassReports) -> Self:
        """Return that of a replay that has just ended."""
        name = "the built-in chat workload" if trace is None else trace.name
        if str(trace) == STDIN:
            name = "standard input"
        # A file's name may have bytes that are no text.
        name = name.encode(errors="backslashreplace").decode()
        now = datetime.now(UTC)
        return cls(name, _sizes(reports), f"{now:%Y-%m-%d %H:%M} UTC, {_machine()}")


def publish_pictures(
    reports: PassReports, trace: Path | None, plot: Path | None, page: Path | None
) -> None:
    """Write a picture, and a page, of a replay that has just ended and that has samples.

    Raises:
        InputError: One of them cannot be written.
    """
    headline = Headline.of(trace, reports)
    if plot is not None:
        _draw_picture(reports, headline, plot)
    if page is not None:
        _write_page(reports, headline, page)


def _draw_picture(reports: PassReports, headline: Headline, path: Path) -> None:
    name = headline.trace
    if len(name) > _MAX_NAME:
        name = f"{name[: _MAX_NAME // 2]}...{name[-_MAX_NAME // 2 :]}"
    title = f"Replay of {name}\n{headline.sizes}"
    with as_unwritable("--plot", str(path)):
        drawing_module("--plot", PLOT).draw(reports.passes, path, title, headline.origin)


def _write_page(reports: PassReports, headline: Headline, path: Path) -> None:
    text = "\n".join(_page(reports, headline))
    with as_unwritable("--report", str(path)):
        path.write_text(text + "\n", encoding="utf-8")


def _sizes(reports: PassReports) -> str:
    report = reports.passes[0]
    primary = f"{report.primary_blocks:,} blocks of {size_text(report.row_bytes)}"
    parts = [f"policy {report.policy}, primary of {primary}"]
    for name, tier in zip(report.tiers, report.samples[-1].stats.tiers, strict=True):
        capacity = "" if not tier.capacity_bytes else f" of {size_text(int(tier.capacity_bytes))}"
        parts.append(f"{name}{capacity}")
    return " + ".join(parts)


def _machine() -> str:
    return (
        f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, kvoffload-async {version('kvoffload-async')}"
    )


# -- the page -------------------------------------------------------------------------------------


def _page(reports: PassReports, headline: Headline) -> Iterable[str]:
    plot = drawing_module("--report", PLOT)
    title = f"Replay of {headline.trace}"
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(title)}</h1>\n<p>{escape(headline.sizes)}</p>"
    if reports.interrupted:
        yield '<p class="complaint">Interrupted: this is what there was until then.</p>'
    yield from (f'<p class="complaint">{escape(text)}</p>' for text in reports.complaints)
    yield '<h2>How it went</h2>\n<div class="panels">'
    for (name, explanation, _), svg in zip(plot.PANELS, plot.svgs(reports.passes), strict=True):
        named = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
        yield f"<figure>{named}<figcaption>{escape(explanation)}</figcaption></figure>"
    yield "</div>\n<h2>Figures</h2>"
    passes = reports.passes
    names = [pass_name(number) for number in range(1, len(passes) + 1)]
    rows = [
        (each[0][0], *(value for _, value in each))
        for each in zip(*map(figure_rows, passes), strict=True)
    ]
    yield from _table(("", *names), rows)
    if passes[0].tiers:
        yield "<h2>Secondary tiers</h2>"
        yield from _table(("tier", "pass", *_TIER_FIGURES.values()), _tier_rows(reports, names))
    yield f'<p class="note">{escape(headline.origin)}</p>\n</body>\n</html>'


def _tier_rows(reports: PassReports, names: Sequence[str]) -> Iterable[Sequence[str]]:
    for report, name in zip(reports.passes, names, strict=True):
        for tier, figures in report.tiers.items():
            yield (
                tier,
                name,
                *(
                    size_text(figures[figure]) if "bytes" in figure else f"{figures[figure]:,}"
                    for figure in _TIER_FIGURES
                ),
            )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield '<div class="wide"><table>'
    yield f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
    yield "</table></div>"
