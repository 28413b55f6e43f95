"""Replays, from a checked configuration to their reports: one, or several over the same tiers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvoffload_async.async_engine import EngineBounds, OffloadEngine
from kvoffload_async.errors import InputError, OffloadError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.replay.device import FramePool
from kvoffload_async.replay.drivers.asynchronous import AsyncDriver
from kvoffload_async.replay.drivers.stepwise import StepwiseDriver
from kvoffload_async.replay.drivers.workers import Workers
from kvoffload_async.replay.report import (
    DEVICE,
    PRIMARY,
    Report,
    Sample,
    Tally,
    Timeline,
    build_report,
)
from kvoffload_async.replay.source import RequestSource
from kvoffload_async.runtime.loop import new_event_loop
from kvoffload_async.timeline import RequestTimeline

if TYPE_CHECKING:
    from kvoffload_async.transport.paged import PagedMemory


SYNC: Final = "sync"
ASYNC: Final = "async"
ENGINES: Final = (SYNC, ASYNC)
DEVICES: Final = ("cpu", "cuda")

_DEFAULT_IO_TIMEOUT_S = 30.0
_STALL_MARGIN_S = 30.0
_INTERRUPTED_TIMEOUT_S = 5.0
_UNKNOWN_REQUEST_BLOCKS = 1024
"""What a request gets room for where nobody can tell how large they are: in a pipe."""
_BLOCKS_PER_STEP = 16
"""What a step computes of a request on a device that may run out of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How requests are replayed; see `Report`, and `StepwiseDriver`.

    Attributes:
        device: `"cpu"` or `"cuda"`: where the device's memory lies.
        device_blocks: What the device has room for, and keeps; None: enough, and it keeps nothing.
        on_timeline: Takes the timelines of requests; needs a configuration with `explain_requests`.
        on_ready: With the engine `"sync"`, called before the first request, with what returns the
            figures so far, from then on whenever everything is at rest.
        has_samples: Whether the report has samples of the statistics, for pictures.
    """

    engine: str = SYNC
    device: str = "cpu"
    device_blocks: int | None = None
    layers: int = 2
    concurrency: int = 1
    verify: bool = True
    has_samples: bool = False
    should_stop: Callable[[], bool] = lambda: False
    on_step: Callable[[], None] = lambda: None
    on_timeline: Callable[[RequestTimeline], None] | None = None
    on_ready: Callable[[Callable[[], Report]], None] = lambda _report: None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a driver has left behind."""

    manager: TieringOffloadingManager
    tier_names: Sequence[str]
    tally: Tally
    wall_s: float
    interrupted: bool
    samples: tuple[Sample, ...]


def replay(spec: TieringOffloadingSpec, source: RequestSource, options: ReplayOptions) -> Report:
    """Start an engine, replay every request, bring it to rest, shut it down.

    Raises:
        InputError: The trace, or a tier's option, turns out to be unusable.
        ConfigError: The device cannot be had.
        StalledError: The engine makes no progress.
        OffloadError: A tier did not shut down.
    """
    num_frames = options.device_blocks
    if num_frames is None:
        most = source.most_blocks()
        size = _UNKNOWN_REQUEST_BLOCKS if most is None else max(1, most)
        num_frames = options.concurrency * size
    pool = FramePool(num_frames, keeps_contents=options.device_blocks is not None)
    if options.engine == SYNC:
        outcome = _replay_stepwise(spec, source, options, pool)
    else:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            outcome = runner.run(_replay_awaited(spec, source, options, pool))
    return _report(spec, options, pool, outcome)


def _report(
    spec: TieringOffloadingSpec, options: ReplayOptions, pool: FramePool, outcome: _Outcome
) -> Report:
    return build_report(
        spec,
        outcome.manager,
        outcome.tier_names,
        outcome.tally,
        wall_s=outcome.wall_s,
        concurrency=options.concurrency,
        interrupted=outcome.interrupted,
        engine=options.engine,
        device_blocks=pool.num_frames,
        layers=options.layers,
        samples=outcome.samples,
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
        while name in (DEVICE, PRIMARY, *names):
            name, number = f"{tier_type}#{number}", number + 1
        names.append(name)
    return names


# -- the two drivers ----------------------------------------------------------------------------


def _replay_stepwise(
    spec: TieringOffloadingSpec, source: RequestSource, options: ReplayOptions, pool: FramePool
) -> _Outcome:
    memories = [
        _open_memory(spec, options, pool, worker) for worker in range(spec.config.num_workers)
    ]
    with _start_errors():
        manager = spec.get_manager()
    _watch(manager, options)
    workers: Workers | None = None
    try:
        tier_names = unique_names([tier.name for tier in manager.planner.tiers])
        tally = Tally.of_tiers(tier_names, device_keeps=options.device_blocks is not None)
        workers = Workers(spec, memories, tally)
        timeline = Timeline(manager.stats, tally) if options.has_samples else None
        driver = StepwiseDriver(
            manager,
            workers,
            pool,
            tally,
            tier_names=tier_names,
            blocks_per_chunk=spec.config.blocks_per_chunk,
            num_workers=spec.config.num_workers,
            blocks_per_step=None if options.device_blocks is None else _BLOCKS_PER_STEP,
            concurrency=options.concurrency,
            verify=options.verify,
            stall_timeout_s=stall_timeout_s(spec),
            should_stop=options.should_stop,
            on_step=_each_step(timeline, options),
        )
        start_s = time.perf_counter()

        def report_so_far() -> Report:
            wall_s = time.perf_counter() - start_s
            so_far = _Outcome(manager, tier_names, tally, wall_s, interrupted=False, samples=())
            return _report(spec, options, pool, so_far)

        options.on_ready(report_so_far)
        driver.run(source)
        interrupted = options.should_stop()
        driver.drain(_bounded(spec, options))
        wall_s = time.perf_counter() - start_s
        samples = () if timeline is None else timeline.finish()
    finally:
        if workers is not None:
            workers.shutdown(_bounded(spec, options))
        spec.shutdown(_bounded(spec, options))
    return _Outcome(manager, tier_names, tally, wall_s, interrupted, samples)


async def _replay_awaited(
    spec: TieringOffloadingSpec, source: RequestSource, options: ReplayOptions, pool: FramePool
) -> _Outcome:
    if spec.config.num_workers > 1:
        raise InputError("--engine async: it has one worker; give num_workers 1, or --engine sync")
    memory = _open_memory(spec, options, pool, 0)
    bounds = EngineBounds(waiting_calls=options.concurrency)
    engine = OffloadEngine(spec.config, bounds=bounds, kv_caches=memory.kv_caches)
    with _start_errors():
        await engine.__aenter__()
    try:
        manager = engine.manager
        _watch(manager, options)
        tier_names = unique_names([tier.name for tier in manager.planner.tiers])
        tally = Tally.of_tiers(tier_names, device_keeps=options.device_blocks is not None)
        timeline = Timeline(manager.stats, tally) if options.has_samples else None
        driver = AsyncDriver(
            engine,
            memory,
            pool,
            tally,
            tier_names=tier_names,
            concurrency=options.concurrency,
            verify=options.verify,
            stall_timeout_s=stall_timeout_s(spec),
            should_stop=options.should_stop,
            on_step=_each_step(timeline, options),
        )
        start_s = time.perf_counter()
        await driver.run(iter(source))
        interrupted = options.should_stop()
        await driver.rest(_bounded(spec, options))
        wall_s = time.perf_counter() - start_s
        samples = () if timeline is None else timeline.finish()
    finally:
        await engine.close(_bounded(spec, options))
    return _Outcome(manager, tier_names, tally, wall_s, interrupted, samples)


def _each_step(timeline: Timeline | None, options: ReplayOptions) -> Callable[[], None]:
    if timeline is None:
        return options.on_step

    def on_step() -> None:
        timeline.note_step()
        options.on_step()

    return on_step


def _watch(manager: TieringOffloadingManager, options: ReplayOptions) -> None:
    if options.on_timeline is not None:
        manager.watch_timelines(options.on_timeline)


def _open_memory(
    spec: TieringOffloadingSpec, options: ReplayOptions, pool: FramePool, worker: int
) -> PagedMemory:
    from kvoffload_async.transport.paged import PagedMemory  # noqa: PLC0415 - loads torch

    return PagedMemory(
        pool.num_frames,
        spec.config.block_bytes,
        layers=options.layers,
        blocks_per_chunk=spec.config.blocks_per_chunk,
        device=options.device,
        salt=worker,
    )


@contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except (OffloadError, OSError, TypeError, ValueError) as error:
        # Options are a tier's own: only its constructor and its opening know what they may be.
        raise InputError(f"the engine does not start: {error}") from error


def _bounded(spec: TieringOffloadingSpec, options: ReplayOptions) -> float:
    return _INTERRUPTED_TIMEOUT_S if options.should_stop() else spec.config.shutdown_timeout_s


Follow = Callable[[RequestSource, int], AbstractContextManager[Callable[[], None]]]
"""Given a pass's requests and its number, from 1 on: yields what to call after each step."""


Watch = Callable[[int, RequestTimeline], None]
"""Given a pass's number, and the timeline of one of its requests."""


@dataclass(frozen=True, slots=True)
class PassReports:
    """The reports of the passes, the first one cold; at least one."""

    passes: tuple[Report, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the last one ended before its requests did."""
        return self.passes[-1].interrupted

    @property
    def complaints(self) -> list[str]:
        """What must never happen, and did; behind the first pass with the pass's number."""
        return [
            complaint if number == 1 else f"pass {number}: {complaint}"
            for number, report in enumerate(self.passes, 1)
            for complaint in report.complaints
        ]

    def to_json(self) -> str:
        """Return one JSON object: the first pass's figures, with those of the others in it.

        The second pass is under `warm`, those behind it are a list under `later_passes`.
        """
        figures, *others = (report.to_dict() for report in self.passes)
        if others:
            figures["warm"] = others[0]
        if others[1:]:
            figures["later_passes"] = others[1:]
        return json.dumps(figures, indent=2)


@contextmanager
def _unseen(_source: RequestSource, _number: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def replay_passes(
    spec: TieringOffloadingSpec,
    open_source: Callable[[], RequestSource],
    options: ReplayOptions,
    num_passes: int,
    *,
    follow: Follow = _unseen,
    watch: Watch | None = None,
) -> PassReports:
    """Replay the same requests several times, each time on a new engine over the same tiers.

    Args:
        spec: The engine's; the first pass uses it, the others its configuration.
        open_source: Returns the requests, from the first on.
        options: How to replay.
        num_passes: How often, at most: an interrupted pass is the last.
        follow: Entered for each pass.
        watch: Takes the timelines of requests; needs a configuration with `explain_requests`.

    Raises:
        OffloadError: See `replay`.
    """
    reports: list[Report] = []
    for number in range(1, num_passes + 1):
        if reports:
            spec = TieringOffloadingSpec(spec.config)
        with closing(open_source()) as source, follow(source, number) as on_step:
            on_timeline = None if watch is None else partial(watch, number)
            run = replace(options, on_step=on_step, on_timeline=on_timeline)
            reports.append(replay(spec, source, run))
        if reports[-1].interrupted:
            break
    return PassReports(tuple(reports))
