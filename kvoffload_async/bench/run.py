"""Runs a benchmark according to a validated plan, and returns its report."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from kvoffload_async.bench.baseline import (
    Baseline,
    NativeBaseline,
    PlainBaseline,
    RecyclingBaseline,
)
from kvoffload_async.bench.contender import WARM_UP, Contender
from kvoffload_async.bench.figures import Report, summarize
from kvoffload_async.bench.plan import Plan
from kvoffload_async.bench.rounds import measure, rehearse
from kvoffload_async.block_io.choice import implementation
from kvoffload_async.runtime.buffer import PAGE_BYTES


def run_bench(
    plan: Plan,
    tiers: Sequence[Mapping[str, Any]],
    others: Sequence[Contender] = (),
    *,
    expect: Callable[[int], None] = lambda _turns: None,
    advance: Callable[[int], None] = lambda _turns: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Measure tiers and the machine's baselines, in temporary directories.

    Args:
        plan: Settings of the benchmark.
        tiers: Configurations of this package's tiers, as for `SecondaryTierFactory`.
        others: Further contenders.
        expect: Called with the number of turns, after every contender has stored and loaded one
            block.
        advance: Called with 1 after each turn.
        should_stop: Called before each turn; if true, only completed rounds are reported.

    Raises:
        InputError: A tier is unknown, or there is no space for the plan.
        ConfigError: A configuration is invalid.
        OffloadError: A contender cannot be measured; the message names it.
    """
    own = [Contender(config) for config in tiers]
    for one in own:
        one.check(plan.stored_bytes, [work.block_bytes for work in plan.works])
    contenders = _named_apart([*own, *others])
    with ExitStack() as stack:
        baselines = _baselines(contenders, plan, stack)
        rehearse(plan, contenders)
        different = list(dict.fromkeys(chain.from_iterable(baselines.values())))
        expect(len(plan.works) * plan.rounds * (1 + len(different) + len(contenders)))
        measured = measure(
            plan, different, contenders, on_turn=lambda: advance(1), should_stop=should_stop
        )
        sizes = tuple(summarize(samples, baselines) for samples in measured)
    is_complete = len(sizes) == len(plan.works) and sizes[-1].rounds == plan.rounds
    return Report(
        interrupted=not is_complete,
        settings={one.name: getattr(plan, one.name) for one in fields(plan) if one.name != "works"},
        machine=_machine(),
        contenders={contender.name: _facts(contender, baselines) for contender in contenders},
        sizes=sizes,
    )


def _named_apart(contenders: Sequence[Contender]) -> Sequence[Contender]:
    """Append numbers to the equal names of contenders, so that each has its own results."""
    names = [contender.name for contender in contenders]
    for index, contender in enumerate(contenders):
        if names.count(names[index]) > 1:
            contender.name = f"{names[index]}#{names[: index + 1].count(names[index])}"
    return contenders


def _baselines(
    contenders: Sequence[Contender], plan: Plan, stack: ExitStack
) -> dict[str, Sequence[Baseline]]:
    """Return each contender's baselines, measured on its filesystem.

    The first is the reference: the native one if this package's tiers use native block I/O.
    """
    by_device: dict[int, Sequence[Baseline]] = {}
    baselines: dict[str, Sequence[Baseline]] = {}
    for contender in contenders:
        place = contender.place
        if place is None:
            baselines[contender.name] = ()
            continue
        stack.enter_context(place)
        capacity_bytes = contender.capacity_bytes(plan.stored_bytes) if plan.steady else None
        place.check_room(max(WARM_UP * plan.stored_bytes, capacity_bytes or 0))
        device = place.path.stat().st_dev
        if device not in by_device:
            by_device[device] = [kind(place) for kind in _baseline_kinds(plan)]
        baselines[contender.name] = by_device[device]
    return baselines


def _baseline_kinds(plan: Plan) -> list[type[Baseline]]:
    kinds: list[type[Baseline]] = [PlainBaseline]
    if implementation().name == "native":
        kinds.insert(0, NativeBaseline)
    if plan.steady:
        kinds.append(RecyclingBaseline)
    return kinds


def _facts(contender: Contender, baselines: dict[str, Sequence[Baseline]]) -> dict[str, Any]:
    beside = baselines[contender.name]
    return {
        "options": dict(contender.options),
        "directory": str(contender.place.path) if contender.place else None,
        "baseline": {"directory": beside[0].directory, "kind": beside[0].kind} if beside else None,
    }


def _machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES,
        "system": platform.platform(),
        "python": platform.python_version(),
        "kvoffload_async": version("kvoffload-async"),
        "block_io": str(implementation()),
        "processor": _processor(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Return the processor's name from the system, or its architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
