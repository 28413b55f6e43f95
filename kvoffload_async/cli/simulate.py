"""`kvoffload simulate`: hit ratios of a trace under policies and capacities."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from kvoffload_async.cli.command import CommandOptions, argument, finish, flag, running
from kvoffload_async.cli.output import (
    as_unwritable,
    check_picture,
    check_writable,
    drawing_module,
    figures_table,
    publish,
)
from kvoffload_async.cli.replay_report import PLOT
from kvoffload_async.cli.settings import MAX_BLOCKS_PER_CHUNK, MAX_CONCURRENT, PER_CHUNK
from kvoffload_async.config import one_of
from kvoffload_async.config import shown as abbreviated
from kvoffload_async.errors import InputError
from kvoffload_async.facade.tier_factory import TierAdmission
from kvoffload_async.replay import simulation
from kvoffload_async.replay.simulation import LRU, Row, Simulation, Traffic
from kvoffload_async.replay.source import TraceFile

_MOST_BLOCKS: Final = 100_000_000
_INTEGER: Final = re.compile(r"\s*\d{1,32}\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(CommandOptions):
    """The options of `kvoffload simulate`."""

    trace: Path = argument("Trace file of JSON lines with hash_ids; - reads standard input.")
    policy: str = flag(LRU, "Eviction policies, separated by commas.", metavar="lru,arc,hd")
    capacity: str | None = flag(
        None,
        "Capacities in blocks, separated by commas. Default: several from 1,000 to the number of "
        "distinct blocks.",
        metavar="N,...",
    )
    blocks_per_chunk: int = flag(1, PER_CHUNK, metavar="N", min=1, max=MAX_BLOCKS_PER_CHUNK)
    tier_blocks: int | None = flag(
        None,
        "Add an LRU tier of N blocks below the primary; the column `writes` then counts blocks "
        "written to the tier.",
        metavar="N",
        min=1,
        max=_MOST_BLOCKS,
    )
    admission: str = flag(
        "all",
        "The tier's admission: all stored blocks, or only those likely to be reused.",
        metavar="all|reuse",
    )
    arrivals: int | None = flag(
        None,
        "Requests arrive by the trace's timestamps, SPEED times as fast, and wait while K run. "
        "Each policy is simulated without prefetch and with it; needs --tier-blocks.",
        metavar="SPEED",
        min=1,
    )
    concurrency: int = flag(
        16, "With --arrivals: requests that run at once.", metavar="K", min=1, max=MAX_CONCURRENT
    )
    warm_half: bool = flag(
        False,
        "Count only the second half of the requests; the first warms the cache.",
        "--warm-half",
    )
    json: str | None = flag(
        None, "Write the figures as JSON; - is standard output.", metavar="PATH|-"
    )
    plot: Path | None = flag(
        None,
        "Plot the hit ratios over the capacity; needs kvoffload-async[plot].",
        metavar="PNG",
    )


def simulate(given: SimulateOptions) -> None:
    """Simulate eviction policies on a trace, without moving data.

    LRU is simulated at every capacity in one pass. Other policies run in the engine's own block
    accounting, one request after the other. The optimum knows the whole trace.
    """
    with running(given) as (_console, interrupt):
        check_writable("--json", given.json)
        check_picture("--plot", given.plot, PLOT)
        policies = [name.strip() for name in given.policy.split(",")]
        capacities = _capacities(given.capacity)
        only_reuse = one_of(TierAdmission)(given.admission, "--admission") is TierAdmission.REUSE
        if given.arrivals is not None and given.tier_blocks is None:
            raise InputError("--arrivals: nothing can be prefetched; give --tier-blocks, too")
        traffic: Traffic | None = None
        with closing(TraceFile(given.trace, None, given.blocks_per_chunk)) as trace:
            requests: Iterable[Sequence[int]] = trace
            if given.arrivals is not None:
                traffic = Traffic(list(trace.arrivals()), given.arrivals, given.concurrency)
                requests = [arrival.block_ids for arrival in traffic.arrivals]
            found = simulation.simulate(
                requests,
                policies,
                capacities,
                warm_half=given.warm_half,
                tier_blocks=given.tier_blocks or 0,
                only_reuse=only_reuse,
                traffic=traffic,
                should_stop=lambda: interrupt.is_requested,
            )
        publish(given.json, partial(_print_table, found), found.to_json())
        if given.plot:
            with as_unwritable("--plot", str(given.plot)):
                drawing_module("--plot", PLOT).draw_simulation(found, given.plot)
    finish((), interrupted=found.interrupted)


def _capacities(text: str | None) -> list[int]:
    values = [] if text is None else text.split(",")
    if not all(_INTEGER.fullmatch(value) and 0 < int(value) <= _MOST_BLOCKS for value in values):
        raise InputError(
            f"--capacity {abbreviated(text)} is not valid; give numbers of blocks from 1 to "
            f"{_MOST_BLOCKS}, separated by commas"
        )
    return list(map(int, values))


def _print_table(found: Simulation, console: Console) -> None:
    title = f"{found.requests:,} requests, {found.block_refs:,} block references"
    has_queue = any(row.waited_s is not None for row in found.rows)
    middle = ("waited", "prefetched", "in vain")
    if not has_queue:
        middle = ("hits", "optimum", "gap closed")
    head = ("policy", "capacity", "prefix hits", *middle, "writes")
    rows = (
        (
            row.policy,
            f"{row.capacity:,}",
            f"{row.prefix_hit_ratio:.4f}",
            *(_queue_figures(row) if has_queue else _other_figures(row)),
            f"{row.writes:,}",
        )
        for row in found.rows
    )
    console.print(figures_table(title, head, rows))
    console.print(
        f"An endless cache finds {found.endless_hit_ratio:.4f}; LRU finds 90 % of that from "
        f"{found.blocks_for_90_percent:,} blocks on, of {found.distinct_blocks:,}.",
        highlight=False,
    )


def _other_figures(row: Row) -> tuple[str, str, str]:
    gap_closed = "" if row.gap_closed is None else f"{row.gap_closed:.1%}"
    return f"{row.hit_ratio:.4f}", f"{row.optimum:.4f}", gap_closed


def _queue_figures(row: Row) -> tuple[str, str, str]:
    prefetched, in_vain = (
        "" if count is None else f"{count:,}" for count in (row.prefetched, row.in_vain)
    )
    return f"{row.waited_s or 0.0:.1f} s", prefetched, in_vain
