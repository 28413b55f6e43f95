"""Plots of a replay: one file with all panels, or one SVG per panel.

All passes share one time axis, one after the other. Needs matplotlib, and reports with samples.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from kvoffload_async.replay.device import DEVICE, PRIMARY
from kvoffload_async.replay.report import Report, Sample
from kvoffload_async.replay.simulation import Simulation
from kvoffload_async.statistics import BUCKET_BOUNDS_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_NUMBER: Final = "{x:,.9g}"
_RECENT: Final = 20
"""Divisor of a pass's number of samples: 1/20 of them is the window of the moving hit ratio."""
_SLOTS: Final = {"pinned": "C3", "writing": "C1", "held": "0.4", "idle": "C2"}
_SVG_REFERENCE: Final = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, slots=True)
class _Course:
    """One pass on the common time axis, with the times of its samples."""

    at_s: list[float]
    samples: Sequence[Sample]
    names: list[str]
    """Names of the tiers."""
    is_first: bool

    def label(self, text: str) -> str | None:
        """Return the legend label of a plotted line; None after the first pass."""
        return text if self.is_first else None


def check_suffix(path: Path) -> str | None:
    """Return None if a file's suffix is supported, else the supported suffixes."""
    known = sorted(FigureCanvasAgg(Canvas()).get_supported_filetypes())
    return None if path.suffix.lstrip(".").lower() in known else ", ".join(known)


def draw(passes: Sequence[Report], path: Path, title: str, note: str) -> None:
    """Write a plot with all panels to one file; raises OSError if it cannot be written."""
    canvas = Canvas(figsize=(12, 13), layout="constrained")
    cells = canvas.subplot_mosaic([[0, 0], [1, 2], [3, 4]])
    for number, panel in enumerate(PANELS):
        _fill(cells[number], panel, passes)
    canvas.suptitle(_plain(title), fontsize="x-large")
    canvas.supxlabel(_plain(note), fontsize="small", color="0.35")
    canvas.savefig(path, dpi=100)


def draw_simulation(found: Simulation, path: Path) -> None:
    """Draw prefix hit ratios over the capacity; raises OSError if the file cannot be written."""
    canvas = Canvas(figsize=(9, 5.5), layout="constrained")
    axes = canvas.subplots()
    axes.plot(*zip(*found.curve, strict=True), color="C0", label="lru, every capacity")
    for policy in dict.fromkeys(row.policy for row in found.rows):
        points = [(r.capacity, r.prefix_hit_ratio) for r in found.rows if r.policy == policy]
        axes.plot(*zip(*points, strict=True), "o--", label=_plain(policy))
    optima = sorted({row.capacity: row.optimum for row in found.rows}.items())
    if optima:
        axes.plot(*zip(*optima, strict=True), "k^:", label="optimum")
    axes.set_title(
        f"Prefix hits of {found.requests:,} requests, {found.block_refs:,} block references"
    )
    axes.set_xscale("log")
    axes.set_xlabel("blocks in the cache")
    axes.set_ylabel("prefix hits, share of the block references")
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.savefig(path, dpi=100)


def svgs(passes: Sequence[Report]) -> Iterator[str]:
    """Yield each of `PANELS` as an SVG element that can be embedded in a page."""
    for number, panel in enumerate(PANELS):
        canvas = Canvas(figsize=(5.2, 3.9), layout="constrained")
        _fill(canvas.subplots(), panel, passes)
        text = io.StringIO()
        # Text as outlines, independent of the reader's fonts.
        with mpl.rc_context({"svg.fonttype": "path"}):
            canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        _, start, rest = text.getvalue().partition("<svg ")
        yield _SVG_REFERENCE.sub(rf"\g<1>p{number}-", start + rest)


# -- the panels -----------------------------------------------------------------------------------


def _hit_ratio(axes: Axes, courses: Sequence[_Course]) -> None:
    for course in courses:
        sources = list(course.samples[0].hits)
        shares = [
            [sample.hits[source] / max(1, sample.block_refs) for sample in course.samples]
            for source in sources
        ]
        axes.stackplot(
            course.at_s,
            *shares,
            labels=[_plain(source) for source in sources] if course.is_first else (),
            colors=[_colour(source, course.names) for source in sources],
            alpha=0.6,
        )
        axes.plot(
            course.at_s,
            _recent(course.samples),
            color="black",
            linewidth=1,
            label=course.label("recent"),
        )
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("share of the block references")


def _bytes(axes: Axes, courses: Sequence[_Course]) -> None:
    last = [tier for course in courses for tier in course.samples[-1].stats.tiers]
    most = max((max(tier.stored_bytes, tier.loaded_bytes) for tier in last), default=0)
    unit, unit_name = next((each for each in _UNITS if most >= each[0]), _UNITS[-1])
    _tier_lines(axes, courses, {"stored_bytes": "--", "loaded_bytes": "-"}, unit)
    axes.set_ylabel(unit_name)
    blocks = unit / max(1, courses[0].samples[0].stats.primary.row_bytes)
    there, back = partial(np.multiply, blocks), partial(np.multiply, 1 / blocks)
    right = axes.secondary_yaxis("right", functions=(there, back))
    right.set_ylabel("blocks")
    right.yaxis.set_major_formatter(_NUMBER)


def _latency(axes: Axes, courses: Sequence[_Course]) -> None:
    names = courses[0].names
    loads = np.sum(
        [
            [tier.load_seconds.total.counts for tier in course.samples[-1].stats.tiers]
            for course in courses
        ],
        axis=0,
    )
    used = loads.nonzero()[-1].tolist()
    first, last = min(used, default=0), max(used, default=0)
    width = 0.8 / max(1, len(names))
    for number, (name, counts) in enumerate(zip(names, loads.tolist(), strict=True)):
        total = sum(counts)
        label = f"{_plain(name)}: {total:,} loads"
        if total:
            half, most = np.searchsorted(np.cumsum(counts), [0.5 * total, 0.99 * total]).tolist()
            label += f", half {_bound_text(half)}, 99 % {_bound_text(most)}"
        axes.bar(
            [bucket - 0.4 + width * (number + 0.5) for bucket in range(first, last + 1)],
            [100 * n / max(1, total) for n in counts[first : last + 1]],
            width,
            color=_colour(name, names),
            label=label,
        )
    axes.set_xticks(
        range(first, last + 1),
        [_bound_text(bucket) for bucket in range(first, last + 1)],
        rotation=45,
        ha="right",
    )
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_ylabel("% of the loads")


def _occupancy(axes: Axes, courses: Sequence[_Course]) -> None:
    slots = [[sample.stats.primary.slots for sample in course.samples] for course in courses]
    kinds = [
        kind
        for kind in _SLOTS
        if kind != "held" or any(each.held for course in slots for each in course)
    ]
    for course, each in zip(courses, slots, strict=True):
        axes.stackplot(
            course.at_s,
            *([getattr(slot, kind) for slot in each] for kind in kinds),
            labels=kinds if course.is_first else (),
            colors=[_SLOTS[kind] for kind in kinds],
            alpha=0.7,
        )
    capacity = courses[0].samples[0].stats.primary.num_slots
    axes.axhline(capacity, color="black", linewidth=1, label=f"capacity, {capacity:,}")
    axes.set_ylim(0, capacity * 1.15)
    axes.set_ylabel("blocks")


def _evictions(axes: Axes, courses: Sequence[_Course]) -> None:
    for course in courses:
        axes.plot(
            course.at_s,
            [sample.stats.primary.evicted_blocks for sample in course.samples],
            color=_colour(PRIMARY, course.names),
            label=course.label(PRIMARY),
        )
    _tier_lines(axes, courses, {"evicted_blocks": "-", "dropped_blocks": ":"})
    axes.set_ylabel("blocks")


_Draw = Callable[["Axes", Sequence[_Course]], None]

PANELS: Final[tuple[tuple[str, str, _Draw], ...]] = (
    (
        "Hit ratio",
        (
            "References to blocks that were found, by where the blocks came from, since the pass "
            f"began. The line is the ratio over the last {_RECENT}th of its samples."
        ),
        _hit_ratio,
    ),
    (
        "Bytes and blocks of the tiers",
        "What has been stored in each tier and loaded from it, since the pass began.",
        _bytes,
    ),
    (
        "Promotion latency",
        "Load jobs of all passes by duration, from the tier's queue until their bytes were there.",
        _latency,
    ),
    (
        "Primary occupancy",
        (
            "Blocks of the primary tier by use: idle ones may be evicted, pinned ones are in use, "
            "writing ones are being filled."
        ),
        _occupancy,
    ),
    (
        "Evictions",
        "Blocks that left a tier to make room, and those dropped before a tier had room for them.",
        _evictions,
    ),
)
"""Title, explanation and drawing function of each panel."""


# -- shared by the panels ---------------------------------------------------------------------


def _fill(axes: Axes, panel: tuple[str, str, _Draw], passes: Sequence[Report]) -> None:
    title, _, draw_panel = panel
    courses = list(_courses(passes))
    draw_panel(axes, courses)
    if draw_panel is not _latency:
        axes.set_xlim(0, max(courses[-1].at_s[-1], 1e-6))
        axes.set_xlabel("seconds")
        for number, course in enumerate(courses[1:], 2):
            axes.axvline(course.at_s[0], color="0.3", linestyle="--", linewidth=1)
            axes.annotate(
                f"pass {number}",
                (course.at_s[0], 1),
                (3, -11),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize="small",
            )
    axes.set_title(title, fontweight="bold")
    axes.yaxis.set_major_formatter(_NUMBER)
    axes.grid(visible=True, alpha=0.3)
    labelled, _ = axes.get_legend_handles_labels()
    if not labelled:
        axes.text(0.5, 0.5, "no secondary tier", transform=axes.transAxes, ha="center")
        return
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.22 if draw_panel is _latency else -0.17),
        ncols=1 if draw_panel is _latency else min(4, len(labelled)),
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
        fontsize="small",
    )


def _tier_lines(
    axes: Axes, courses: Sequence[_Course], styles: Mapping[str, str], unit: int = 1
) -> None:
    """Draw counters of each tier, divided by `unit`; `styles` has each counter's line style."""
    for course in courses:
        for number, name in enumerate(course.names):
            tiers = [sample.stats.tiers[number] for sample in course.samples]
            for counter, style in styles.items():
                axes.plot(
                    course.at_s,
                    [getattr(tier, counter) / unit for tier in tiers],
                    style,
                    color=_colour(name, course.names),
                    label=course.label(f"{_plain(name)}, {counter.partition('_')[0]}"),
                )
    axes.set_ylim(bottom=0)


def _courses(passes: Sequence[Report]) -> Iterator[_Course]:
    begin_s = 0.0
    for number, report in enumerate(passes):
        at_s = [begin_s + sample.at_s for sample in report.samples]
        yield _Course(at_s, report.samples, list(report.tiers), is_first=not number)
        begin_s = at_s[-1]


def _recent(samples: Sequence[Sample]) -> list[float]:
    """Return the moving hit ratio at each sample."""
    distance = max(1, len(samples) // _RECENT)
    before = (*(samples[0],) * distance, *samples)
    ratios = []
    for then, now in zip(before, samples, strict=False):
        refs = now.block_refs - then.block_refs
        hits = sum(now.hits.values()) - sum(then.hits.values())
        ratios.append(hits / max(1, refs))
    return ratios


def _colour(source: str, names: Sequence[str]) -> str:
    if source == DEVICE:
        return "0.6"
    return "C0" if source == PRIMARY else f"C{1 + names.index(source)}"


def _bound_text(bucket: int) -> str:
    if bucket == len(BUCKET_BOUNDS_S):
        return f"> {BUCKET_BOUNDS_S[-1]:g} s"
    bound_s = BUCKET_BOUNDS_S[bucket]
    return f"≤ {bound_s:g} s" if bound_s >= 1 else f"≤ {bound_s * 1000:g} ms"


def _plain(text: str) -> str:
    """Escape a text for matplotlib: no formulas, and no characters that the font lacks.

    matplotlib would omit a label that begins with an underscore.
    """
    known = "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
    known = known.encode("latin-1", "backslashreplace").decode("latin-1").replace("$", r"\$")
    return f" {known}" if known.startswith("_") else known
