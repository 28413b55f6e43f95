"""`kvoffload top`: a live view of a running engine, for terminals of at least 80 x 24."""

from __future__ import annotations

import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvoffload_async.cli.command import EXIT_INTERRUPTED, errors_as_one_line
from kvoffload_async.cli.output import shown, size_text
from kvoffload_async.errors import InputError
from kvoffload_async.statistics import (
    EngineStatistics,
    OffloadingStatistics,
    PrimaryStatistics,
    TierStatistics,
)
from kvoffload_async.status.changes import Readings
from kvoffload_async.status.client import NoAnswerError, ask, parse_report
from kvoffload_async.status.server import SOCKET_VARIABLE

WIDE: Final = 110
"""Terminal width from which the tier table shows its additional columns."""
WIDEST: Final = 132
"""Terminal width from which it shows the payload in flight, too, and its limit."""
MAX_TIERS: Final = 8
MAX_SLOWEST: Final = 5
_BAR_CHARS: Final = 24
_LETTERS: Final = ("", "K", "M", "G", "T", "P")
_NARROW_NAME, _WIDE_NAME = 12, 24
_LEAST_LATENCIES: Final = 4


def picture(
    readings: Readings, *, width: int, height: int, path: str, complaint: str = ""
) -> RenderableType:
    """Return the contents of the screen, from the latest readings.

    Args:
        readings: The readings so far, at least one.
        width: Columns of the screen.
        height: Lines of the screen.
        path: Path of the engine's socket.
        complaint: Why the last reading failed; empty if it did not.
    """
    stats = readings.last.statistics
    parts: list[RenderableType] = [
        _title(readings, path, width),
        Text(shown(complaint), style="bold red", no_wrap=True, overflow="ellipsis"),
        *_primary(stats.primary),
        *_requests(readings, stats),
    ]
    if isinstance(stats, EngineStatistics):
        parts.append(_device(stats))
    if (managed := _managed(stats)) is not None:
        parts.append(managed)
    room = height - len(parts) - 2
    remarks: list[str] = []
    if stats.tiers:
        tiers = _tiers(readings, stats.tiers, width)
        parts += [Text(), tiers]
        room -= 2 + tiers.row_count
        for remark in _remarks(stats.tiers, readings.last.time_s):
            remarks += textwrap.wrap(remark, width, subsequent_indent="  ")
    slowest = _slowest(readings)
    if slowest is not None:
        room -= 2 + slowest.row_count
    remarks = remarks[: max(1, room - _LEAST_LATENCIES)]
    parts += [Text(line, style="red") for line in remarks]
    if slowest is not None:
        parts += [Text(), slowest]
    room = max(_LEAST_LATENCIES, room - len(remarks))
    return Group(*parts, Text(), _latencies(readings, room))


def _title(readings: Readings, path: str, width: int) -> Text:
    report = readings.last
    since = timedelta(seconds=int(report.uptime_s))
    name = report.model or "engine"
    parts = [f"pid {report.pid}", f"up {since}", path]
    if (runtime := report.statistics.runtime) is not None and width >= WIDE:
        parts.append(f"kvoffload {runtime.version}, Python {runtime.python}")
    line = Text.assemble((shown(name), "bold"), (shown("  " + "  ".join(parts)), "dim"))
    line.truncate(width, overflow="ellipsis")
    return line


def _primary(primary: PrimaryStatistics) -> Iterator[Text]:
    slots = primary.slots
    taken = primary.num_slots - slots.free
    full = min(1.0, max(0.0, taken / primary.num_slots)) if primary.num_slots else 0.0
    filled = round(full * _BAR_CHARS)
    size = f" of {size_text(primary.capacity_bytes)}" if primary.row_bytes else ""
    yield Text.assemble(
        ("primary   ", "bold"),
        ("█" * filled, "green" if full < 1 else "yellow"),
        ("░" * (_BAR_CHARS - filled), "dim"),
        f" {full:4.0%}{size}, {primary.num_slots:,} blocks",
    )
    uses = [f"{name} {getattr(slots, name):,}" for name in ("idle", "pinned", "writing", "held")]
    yield Text(f"          {'  '.join(uses)}  free {slots.free:,}")


def _requests(readings: Readings, stats: OffloadingStatistics) -> Iterator[Text]:
    evicted = readings.rate(attrgetter("primary.evicted_blocks"))
    stored = readings.rate(attrgetter("primary.stored_blocks"))
    loaded = readings.rate(attrgetter("primary.loaded_blocks"))
    deleted = readings.rate(attrgetter("primary.deleted_blocks"))
    yield Text.assemble(
        ("blocks    ", "bold"),
        f"stored {_count(stored)}/s  loaded {_count(loaded)}/s  evicted {_count(evicted)}/s",
        f"  deleted {_count(deleted)}/s" if deleted else "",
    )
    planner = stats.planner
    if planner is None:
        return
    storing = sum(tier.cascading_blocks for tier in stats.tiers)
    ratio = readings.share(attrgetter("planner.block_hits"), _asked_blocks)
    refused = readings.grown(attrgetter("planner.promotions_refused"))
    expired = readings.grown(attrgetter("planner.deferrals_expired"))
    yield Text.assemble(
        ("requests  ", "bold"),
        f"{planner.requests:,} now  hit ratio ",
        (_percent(ratio), "bold"),
        f"  pins: stores {storing:,}, loads {stats.primary.load_pins:,}, "
        f"waiting {planner.retained_blocks:,}",
        (f"  no slot {refused:,.0f}" if refused else "", "yellow"),
        (f"  too late {expired:,.0f}" if expired else "", "yellow"),
    )


def _device(stats: EngineStatistics) -> Text:
    waiting = stats.waiting_loads + stats.waiting_stores
    failed = f"  failed {stats.failed_copies:,}" if stats.failed_copies else ""
    return Text.assemble(
        ("device    ", "bold"),
        f"{stats.copies:,} copies now  {waiting:,} calls waiting",
        (failed, "red"),
    )


def _managed(stats: OffloadingStatistics) -> Text | None:
    """Return the line on operations of `cache` and pinned blocks; None if there are none."""
    parts = [f"{shown(name)} {count:,}" for name, count in stats.cache_operations.items() if count]
    primary, planner = stats.primary, stats.planner
    if planner is not None and planner.deleting_blocks:
        parts.append(f"deleting {planner.deleting_blocks:,} blocks")
    if planner is not None and (pinned := planner.pinned_blocks):
        size = f", {size_text(pinned * primary.row_bytes)}" if primary.row_bytes else ""
        parts.append(f"kept {pinned:,} blocks{size}, {_percent(pinned / primary.num_slots)}")
    return Text.assemble(("cache     ", "bold"), "  ".join(parts)) if parts else None


def _tiers(readings: Readings, tiers: Sequence[TierStatistics], width: int) -> Table:
    table, is_wide = _table(), width >= WIDE
    widest = ("in flight",) if width >= WIDEST else ()
    table.add_column("tier", no_wrap=True, max_width=_WIDE_NAME if is_wide else _NARROW_NAME)
    wide = (*widest, "overdue", "pending", "corrupt") if is_wide else ()
    for name in ("used", "hits", "load/s", "store/s", "queue", "jobs", *wide, "fail", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for index, tier in enumerate(tiers[:MAX_TIERS]):
        table.add_row(*_tier(readings, index, tier, width))
    if len(tiers) > MAX_TIERS:
        table.add_row(Text(f"{len(tiers) - MAX_TIERS} more", style="dim"))
    return table


def _tier(readings: Readings, index: int, tier: TierStatistics, width: int) -> Iterator[str | Text]:
    def of(count: Callable[[TierStatistics], float]) -> float:
        return readings.grown(lambda stats: count(stats.tiers[index]))

    def per_second(name: str) -> str:
        return _short(readings.rate(lambda stats: getattr(stats.tiers[index], name)), 1024)

    asked = of(lambda tier: tier.hits + tier.misses)
    yield Text(shown(tier.name))
    yield _part(tier.used_bytes, tier.capacity_bytes)
    yield f"{of(attrgetter('hits')) / asked:.0%}" if asked else "-"
    yield per_second("loaded_bytes")
    yield per_second("stored_bytes")
    yield _short(tier.queued_jobs)
    yield _short(tier.jobs_in_flight)
    if width >= WIDEST:
        yield _part(tier.bytes_in_flight, tier.bytes_in_flight_limit)
    if width >= WIDE:
        yield _alarming(tier.overdue_jobs)
        yield _short(tier.pending_blocks)
        yield _alarming(of(attrgetter("corrupt_blocks")))
    yield _alarming(of(attrgetter("failed_jobs")))
    yield _alarming(of(_lost_blocks), "yellow")
    yield _state(tier)


def _remarks(tiers: Sequence[TierStatistics], now_s: float) -> Iterator[str]:
    """Yield a text for each tier that is suspended or not open, with the reason."""
    for tier in tiers:
        for direction, reason in tier.breaker_reasons.items():
            yield shown(f"{tier.name}: {direction}s are suspended: {reason}")
        if (failing := tier.unopened) is None:
            continue
        left_s = failing.next_attempt_s - now_s
        following = f"next try in {left_s:.0f} s" if left_s > 0 else "being tried again"
        since = timedelta(seconds=max(0, int(now_s - failing.since_s)))
        yield shown(f"{tier.name}: not open for {since}, {following}: {failing.reason}")


def _slowest(readings: Readings) -> Table | None:
    """Return the table of the slowest requests; None if the engine has reported none."""
    if not readings.last.slowest:
        return None
    table = _table()
    table.add_column("slowest requests", no_wrap=True, overflow="ellipsis")
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("longest phase", no_wrap=True, overflow="ellipsis")
    for request in readings.last.slowest[:MAX_SLOWEST]:
        phase = Text(shown(request.longest_phase))
        table.add_row(Text(shown(request.req_id)), _seconds(request.seconds), phase)
    return table


def _latencies(readings: Readings, room: int) -> Table:
    table = _table()
    table.add_column("slowest phases of the last minute", no_wrap=True, min_width=38)
    for name in ("ended", "p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)
    for latency in readings.latencies()[: room - 1]:
        times = (_seconds(latency.p50_s), _seconds(latency.p99_s))
        table.add_row(Text(shown(latency.phase)), f"{latency.count:,}", *times)
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")


# -- figures --------------------------------------------------------------------------------------


def _asked_blocks(stats: OffloadingStatistics) -> float:
    planner = stats.planner
    return planner.block_hits + planner.block_misses if planner is not None else 0


def _lost_blocks(tier: TierStatistics) -> int:
    """Return the number of blocks that the tier failed to store, apart from resets."""
    return tier.dropped.get("evicted", 0) + tier.failed_store_blocks


def _part(num_bytes: float | None, most_bytes: float | None) -> str:
    """Return bytes and their part of a bound, as far as they are known."""
    if num_bytes is None:
        return "-"
    if not most_bytes:
        return _short(num_bytes, 1024)
    return f"{_short(num_bytes, 1024)} {num_bytes / most_bytes:.0%}"


def _state(tier: TierStatistics) -> Text:
    if not tier.is_open:
        return Text("closed" if tier.unopened is None else "not open", style="bold red")
    stopped = [direction for direction, state in tier.breakers.items() if state != "closed"]
    if not stopped:
        return Text("ok", style="green")
    return Text(f"no {shown(stopped[0])}" if len(stopped) == 1 else "stopped", style="bold red")


def _alarming(count: float, style: str = "red") -> Text:
    return Text(_short(count), style=style if count else "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}" if share < 1 else "100%"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or not number else f"{number:.1f}"  # noqa: PLR2004 - two digits


def _short(number: float, factor: int = 1000) -> str:
    """Format a number in at most four characters; for bytes, pass a factor of 1024."""
    unit = 0
    while number >= 999.5 and unit < len(_LETTERS) - 1:  # noqa: PLR2004 - else it is 1000
        number /= factor
        unit += 1
    digits = 1 if unit and number < 9.95 else 0  # noqa: PLR2004 - else it is 10
    return f"{number:.{digits}f}{_LETTERS[unit]}"


def _seconds(seconds: float) -> str:
    """Format a duration with about three digits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1.0, "s")):
        value = seconds * factor
        if value < 999.5 or unit == "s":  # noqa: PLR2004 - else it is 1000
            return f"{value:.{0 if value >= 99.5 else 1}f} {unit}"  # noqa: PLR2004 - three digits
    raise AssertionError("seconds are the last unit")


def top(
    socket: Annotated[
        Path,
        typer.Argument(
            envvar=SOCKET_VARIABLE, help="The engine's status_socket.", show_default=False
        ),
    ],
    *,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Refresh interval in seconds."),
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one reading as JSON and exit.")
    ] = False,
) -> None:
    """Show the live statistics of a running engine.

    The screen shows tiers, rates, hit ratios, latencies and breakers. Rates cover the time since
    the last reading, other counts the last minute. The first reading covers the time since the
    engine's start. The view waits for an engine that has not started yet. If the output is not a
    terminal, one reading is printed. Press Ctrl-C to exit.
    """
    path = str(socket)
    console = Console()
    try:
        with errors_as_one_line():
            if console.is_terminal and not as_json:
                _watch(console, path, interval)
            line = ask(path)
            readings = Readings()
            readings.add(parse_report(line, path))
            if as_json:
                sys.stdout.write(json.dumps(json.loads(line), indent=2) + "\n")
                return
            console.print(picture(readings, width=console.width, height=console.height, path=path))
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def _watch(console: Console, path: str, interval_s: float) -> NoReturn:
    """Refresh the screen until Ctrl-C; keep trying while the engine does not answer."""
    readings = Readings()
    pause = threading.Event()
    complaint = _read_again(readings, path, is_first=True)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            live.update(
                Text(shown(f"waiting for an engine; {complaint}"))
                if readings.is_empty
                else picture(readings, width=width, height=height, path=path, complaint=complaint),
                refresh=True,
            )
            pause.wait(interval_s)
            complaint = _read_again(readings, path)


def _read_again(readings: Readings, path: str, *, is_first: bool = False) -> str:
    """Read the engine's statistics again; return why the reading failed, or an empty text.

    Raises:
        InputError: The first answer is not an engine's.
    """
    try:
        readings.add(parse_report(ask(path), path))
    except NoAnswerError as error:
        return f"no reading: {error}"
    except InputError as error:
        if is_first:
            raise
        return f"no reading: {error}"
    return ""
