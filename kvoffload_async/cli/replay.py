"""One replay, from a checked configuration to its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffload_async.cli.content import BlockContent
from kvoffload_async.cli.driver import Driver
from kvoffload_async.cli.errors import InputError
from kvoffload_async.cli.report import Report, build_report
from kvoffload_async.cli.source import RequestSource
from kvoffload_async.cli.tally import PRIMARY
from kvoffload_async.errors import OffloadError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager

_DEFAULT_IO_TIMEOUT_S = 30.0
_STALL_MARGIN_S = 30.0
_INTERRUPTED_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How requests are replayed; see `Driver`."""

    concurrency: int = 1
    verify: bool = True
    should_stop: Callable[[], bool] = lambda: False
    on_step: Callable[[], None] = lambda: None


def replay(spec: TieringOffloadingSpec, source: RequestSource, manner: Manner) -> Report:
    """Start an engine, replay every request, bring it to rest, shut it down.

    Raises:
        InputError: The trace, or a tier's option, turns out to be unusable.
        StalledError: The engine makes no progress.
        OffloadError: A tier did not shut down.
    """
    manager = _start(spec)
    tier_names = unique_names([tier.tier_type for tier in manager.secondary_tiers])
    content = BlockContent(manager.get_primary_kv_view())
    driver = Driver(
        manager,
        tier_names,
        content,
        concurrency=manner.concurrency,
        verify=manner.verify,
        stall_timeout_s=stall_timeout_s(spec),
        should_stop=manner.should_stop,
        on_step=manner.on_step,
    )
    start_s = time.perf_counter()
    try:
        driver.run(source)
        interrupted = manner.should_stop()
        driver.drain(_bounded(spec, manner))
        wall_s = time.perf_counter() - start_s
    finally:
        content.close()
        spec.shutdown(_bounded(spec, manner))
    return build_report(
        spec,
        manager,
        tier_names,
        driver.tally,
        wall_s=wall_s,
        concurrency=manner.concurrency,
        interrupted=interrupted,
    )


def stall_timeout_s(spec: TieringOffloadingSpec) -> float:
    """Return the seconds after which an engine without progress is stuck.

    Longer than every deadline that the engine has itself: a deferral's and a job's.
    """
    timeouts_s = [
        float(tier.get("io_timeout_s", _DEFAULT_IO_TIMEOUT_S))
        for tier in spec.config.secondary_tiers
    ]
    return max(spec.config.deferral_timeout_s, *timeouts_s, 0.0) + _STALL_MARGIN_S


def unique_names(tier_types: Sequence[str]) -> list[str]:
    """Return a name for each tier: its type, with a number where that is taken."""
    names: list[str] = []
    for tier_type in tier_types:
        name, number = tier_type, 2
        while name in (PRIMARY, *names):
            name, number = f"{tier_type}#{number}", number + 1
        names.append(name)
    return names


def _start(spec: TieringOffloadingSpec) -> TieringOffloadingManager:
    try:
        return spec.get_manager()
    except (OffloadError, OSError, TypeError, ValueError) as error:
        # Options are a tier's own: only its constructor and its opening know what they may be.
        raise InputError(f"the engine does not start: {error}") from error


def _bounded(spec: TieringOffloadingSpec, manner: Manner) -> float:
    return _INTERRUPTED_TIMEOUT_S if manner.should_stop() else spec.config.shutdown_timeout_s
