"""How the values of a metric are found in the statistics, each with those of its labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from kvoffload_async.statistics import (
    EngineStatistics,
    HistogramStatistics,
    OffloadingStatistics,
    TierStatistics,
)

BREAKER_STATES: Final = ("closed", "open", "half_open")

Value = float | HistogramStatistics
Samples = Iterable[tuple[tuple[str, ...], Value]]


def one(path: str, part: Any) -> Samples:  # noqa: ANN401 - any part of the tree
    """Yield one value; none where the tree has no such part, or does not know."""
    for name in path.split("."):
        part = getattr(part, name, None)
        if part is None:
            return
    yield (), part


def by_name(path: str, names: Mapping[str, str], stats: OffloadingStatistics) -> Samples:
    """Yield several fields of a part, each under a name of its own."""
    for label, field in names.items():
        for _, value in one(f"{path}.{field}", stats):
            yield (label,), value


def by_key(path: str, stats: OffloadingStatistics) -> Samples:
    """Yield the values of a mapping."""
    for _, mapping in one(path, stats):
        assert isinstance(mapping, Mapping)  # noqa: S101 - for the type checker
        for key, value in mapping.items():
            yield (key,), value


def of_tiers(read: Callable[[TierStatistics], Samples], stats: OffloadingStatistics) -> Samples:
    """Yield what is read of each tier, under its name."""
    for tier in stats.tiers:
        for labels, value in read(tier):
            yield (tier.name, *labels), value


def fields_of_tier(names: Mapping[str, str], tier: TierStatistics) -> Samples:
    """Yield several fields of a tier, each under a name of its own."""
    return (((label,), getattr(tier, field)) for label, field in names.items())


def keys_of_tier(field: str, tier: TierStatistics) -> Samples:
    """Yield the values of a mapping of a tier."""
    return (((key,), value) for key, value in getattr(tier, field).items())


def needed_blocks(tier: TierStatistics) -> Samples:
    """Yield how many blocks a request must miss, infinity for "no number is enough"."""
    if tier.payback is not None:
        needed = tier.payback.needed_blocks
        yield (), math.inf if needed is None else needed


def durations(phase: str, tier: TierStatistics) -> Samples:
    """Yield the histograms of one phase of a tier, by direction."""
    yield ("load",), getattr(tier.load_seconds, phase)
    yield ("store",), getattr(tier.store_seconds, phase)


def finished(tier: TierStatistics) -> Samples:
    """Yield a tier's jobs that have their result, by direction."""
    yield ("load",), tier.finished_loads
    yield ("store",), tier.finished_jobs - tier.finished_loads


def failed(tier: TierStatistics) -> Samples:
    """Yield those of which a block failed, by direction."""
    yield ("load",), tier.failed_loads
    yield ("store",), tier.failed_jobs - tier.failed_loads


def in_flight(tier: TierStatistics) -> Samples:
    """Yield those without a result, by direction."""
    yield ("load",), tier.loads_in_flight
    yield ("store",), tier.jobs_in_flight - tier.loads_in_flight


def breakers(tier: TierStatistics) -> Samples:
    """Yield 1 for the state that each breaker of a tier is in, 0 for the others."""
    for direction, now in tier.breakers.items():
        yield from (((direction, state), float(state == now)) for state in BREAKER_STATES)


def events(stats: OffloadingStatistics) -> Samples:
    """Yield the events that nobody has read in time, by tier."""
    yield ("primary",), stats.primary.events_dropped
    yield from (((tier.name,), tier.events_dropped) for tier in stats.tiers)


def info(stats: OffloadingStatistics) -> Samples:
    """Yield 1 under the versions."""
    if stats.runtime is not None:
        yield (stats.runtime.version, stats.runtime.python, stats.runtime.block_io), 1.0


def of_engine(
    read: Callable[[EngineStatistics], Samples], stats: OffloadingStatistics
) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield what only an `OffloadEngine` has."""
    if isinstance(stats, EngineStatistics):
        yield from read(stats)


def waiting(stats: EngineStatistics) -> Samples:
    """Yield the calls that wait for a permit, by direction."""
    yield ("load",), stats.waiting_loads
    yield ("store",), stats.waiting_stores


def copies(stats: EngineStatistics) -> Samples:
    """Yield the histograms of device copies, by direction."""
    yield ("load",), stats.load_copy_seconds
    yield ("store",), stats.store_copy_seconds
