"""`bench` of the laboratory: the package's command, with peers and a plot."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvoffload_async.bench.figures import Passes, Report
from kvoffload_async.bench.plan import Plan
from kvoffload_async.cli.bench import DEFAULT_TIERS, BenchOptions, measure, print_tables
from kvoffload_async.cli.command import finish, flag, running
from kvoffload_async.cli.inputs import parse_tier
from kvoffload_async.cli.output import (
    as_unwritable,
    check_picture,
    check_writable,
    drawing_module,
    publish,
    size_text,
)
from kvoffload_async.config import suitable_threads
from laboratory.peers import PEERS, load_peer

_PLOT: Final = "laboratory.plot"
_RATIOS: Final = {
    "store": ("store", "gib_per_s"),
    "load": ("load", "gib_per_s"),
    "store, one job": ("store_one_job", "gib_per_s"),
    "load, one job": ("load_one_job", "gib_per_s"),
    "owner, store": ("store", "owner_us_per_key"),
    "owner, load": ("load", "owner_us_per_key"),
    "CPU, store": ("store", "cpu_s_per_gib"),
    "CPU, load": ("load", "cpu_s_per_gib"),
}
"""Pass and figure of each column of ratios to a peer."""


@dataclass(frozen=True, kw_only=True)
class PeerOptions(BenchOptions):
    """The options of a benchmark, further settings of its plan, peers, and where to plot."""

    keys_per_job: int = flag(16, "Blocks per job, in passes with many jobs.", metavar="N", min=1)
    one_job: int = flag(
        256,
        "Blocks of a single large job, which is measured separately; limited by --total-bytes. "
        "0: none.",
        metavar="N",
        min=0,
    )
    in_flight: int = flag(16, "Concurrent jobs.", metavar="N", min=1, max=1024)
    threads: int | None = flag(
        None,
        "Threads of the baseline. Default: as many as a tier uses.",
        metavar="N",
        min=1,
        max=64,
    )
    warm_up: bool = flag(
        True,
        "Touch free memory before opening a store: a virtual machine may have returned it to the "
        "host, which makes the first writes up to ten times slower.",
    )

    peer: list[str] | None = flag(
        None,
        f"A tier of another engine to compare with: {', '.join(PEERS)}.",
        metavar="NAME[:key=value,...]",
    )
    plot: Path | None = flag(None, "Plot the figures; needs kvoffload-async[plot].", metavar="PNG")


def bench(given: PeerOptions) -> None:
    """Benchmark tiers as `kvoffload bench` does, next to tiers of other engines."""
    with running(given) as (console, interrupt):
        check_writable("--json", given.json)
        check_picture("--plot", given.plot, _PLOT)
        peers = [load_peer(parse_tier(text, "--peer")) for text in given.peer or ()]
        tiers = given.tier or (() if peers else DEFAULT_TIERS)
        plan = Plan.parse(
            given.block_bytes,
            given.total_bytes,
            keys_per_job=given.keys_per_job,
            one_job=given.one_job,
            in_flight=given.in_flight,
            rounds=given.rounds,
            threads=given.threads or suitable_threads(),
            steady=given.steady,
            warm_up=given.warm_up,
        )
        report = measure(plan, tiers, console, interrupt, peers)
        if report.sizes:
            names = [peer.name for peer in peers]
            publish(given.json, partial(_print_tables, report, names), report.to_json())
            if given.plot is not None:
                with as_unwritable("--plot", str(given.plot)):
                    drawing_module("--plot", _PLOT).draw(report, given.plot)
    finish(report.complaints, interrupted=report.interrupted)


def _print_tables(report: Report, peers: Collection[str], console: Console) -> None:
    print_tables(report, console)
    if peers:
        console.print(relative_table(report, peers))


def relative_table(report: Report, peers: Collection[str]) -> Table:
    """Return the ratios of each contender's medians to those of each peer."""
    title = "Relative to a peer: GiB/s, the owner's time per block, CPU time per GiB"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("block", ""):
        table.add_column(column, no_wrap=True)
    for column in _RATIOS:
        table.add_column(column, justify="right")
    for size in report.sizes:
        table.add_section()
        for name, standing in size.contenders.items():
            for peer in peers:
                if peer != name:
                    theirs = size.contenders[peer].passes
                    ratios = (_ratio(standing.passes, theirs, *each) for each in _RATIOS.values())
                    table.add_row(size_text(size.block_bytes), f"{name} / {peer}", *ratios)
    return table


def _ratio(mine: Passes, theirs: Passes, what: str, figure: str) -> str:
    if what not in mine:
        return ""
    return f"{mine[what][figure].median / theirs[what][figure].median:.3g}"
