"""Runs replays from a validated configuration: one pass, or several over the same tiers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import ConfigError, InputError, OffloadError
from kvoffload_async.facade.driver import PlannerDriver
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.device import DEVICE, PRIMARY, FramePool
from kvoffload_async.replay.drivers import SYNC, Arrivals, ReplayOptions
from kvoffload_async.replay.drivers.asynchronous import AsyncDriver
from kvoffload_async.replay.drivers.stepwise import StepwiseDriver
from kvoffload_async.replay.drivers.workers import Workers
from kvoffload_async.replay.report import Report, Sample, Tally, Timeline
from kvoffload_async.replay.source import RequestSource
from kvoffload_async.runtime.loop import new_event_loop
from kvoffload_async.runtime.machine import memory_limit
from kvoffload_async.timeline import RequestTimeline

if TYPE_CHECKING:
    from kvoffload_async.transport.paged import PagedMemory


_DEFAULT_IO_TIMEOUT_S = 30.0
_STALL_MARGIN_S = 30.0
_INTERRUPTED_TIMEOUT_S = 5.0
_FRAME_BYTES: Final = 128
"""Bytes of memory to account for one device block."""
_UNKNOWN_REQUEST_BLOCKS = 1024
"""Blocks reserved per request if the maximum is unknown, as in a pipe."""
_BLOCKS_PER_STEP = 16
"""Blocks of a request computed per step on a device with limited blocks."""
_TIER_FIGURES: Final = (
    *("stored_blocks", "loaded_blocks", "stored_bytes", "loaded_bytes"),
    *("failed_jobs", "failed_loads", "failed_blocks"),
    *("dropped_blocks", "declined_blocks", "late_blocks", "failed_store_blocks"),
    *("prefetched_blocks", "unused_prefetched_blocks"),
)
"""Figures of a tier that depend only on the requests, not on the number of lookups."""


def replay(spec: TieringOffloadingSpec, source: RequestSource, options: ReplayOptions) -> Report:
    """Start an engine, replay all requests, wait until it is idle, shut it down.

    Raises:
        InputError: The trace or a tier's option is invalid.
        ConfigError: The device lacks the memory for the blocks.
        StalledError: The engine makes no progress.
        OffloadError: A tier failed to shut down.
    """
    num_frames = options.device_blocks
    if num_frames is None:
        most = source.most_blocks()
        size = _UNKNOWN_REQUEST_BLOCKS if most is None else max(1, most)
        num_frames = options.concurrency * size
    if options.engine != SYNC and spec.config.num_workers > 1:
        raise InputError("--engine async: it has one worker; give num_workers 1, or --engine sync")
    memories = _open_memories(spec, options, num_frames)
    pool = FramePool(num_frames, keeps_contents=options.device_blocks is not None)
    if options.engine == SYNC:
        return _replay_stepwise(spec, source, options, pool, memories)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_replay_awaited(spec, source, options, pool, *memories))


def stall_timeout_s(spec: TieringOffloadingSpec) -> float:
    """Return the seconds without progress after which the engine counts as stalled.

    It exceeds the engine's own deadlines of a deferral and a job.
    """
    timeouts_s = [
        float(tier.get("io_timeout_s", _DEFAULT_IO_TIMEOUT_S))
        for tier in spec.config.secondary_tiers
    ]
    return max(spec.config.deferral_timeout_s, *timeouts_s, 0.0) + _STALL_MARGIN_S


def unique_names(tier_types: Sequence[str]) -> list[str]:
    """Return a unique name for each tier: its type, numbered if repeated."""
    names: list[str] = []
    for tier_type in tier_types:
        name, number = tier_type, 2
        while name in (DEVICE, PRIMARY, *names):
            name, number = f"{tier_type}#{number}", number + 1
        names.append(name)
    return names


# -- the two drivers ----------------------------------------------------------------------------


class _Run:
    """The state of a replay outside its driver: the tally, the clock and the samples.

    Attributes:
        tally: Counts of the replay.
        options: Settings of the driver, which takes the samples with its steps.
    """

    def __init__(
        self,
        spec: TieringOffloadingSpec,
        options: ReplayOptions,
        pool: FramePool,
        manager: PlannerDriver,
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._manager = manager
        if options.on_timeline is not None:
            manager.watch_timelines(options.on_timeline)
        names = unique_names([tier.name for tier in manager.planner.tiers])
        self.tally = Tally.of_tiers(names, device_keeps=options.device_blocks is not None)
        self._timeline = Timeline(manager.stats, self.tally) if options.has_samples else None
        self._on_step = options.on_step
        self.options = replace(options, on_step=self._note_step)
        self._start_s = time.perf_counter()
        self._wall_s: float | None = None
        self._interrupted = False
        self._samples: tuple[Sample, ...] = ()

    def begin(self) -> None:
        """Start the clock."""
        self._start_s = time.perf_counter()

    def end(self, *, interrupted: bool) -> None:
        """Stop the clock, and take the last sample."""
        self._interrupted = interrupted
        self._wall_s = time.perf_counter() - self._start_s
        if self._timeline is not None:
            self._samples = self._timeline.finish()

    def _note_step(self) -> None:
        if self._timeline is not None:
            self._timeline.note_step()
        self._on_step()

    def report(self) -> Report:
        """Return the results so far; the engine must be idle."""
        spec, options, tally = self._spec, self.options, self.tally
        core = self._manager.planner
        slots, counters = core.primary.counts, core.counters
        wall_s = time.perf_counter() - self._start_s if self._wall_s is None else self._wall_s
        copied_bytes = spec.config.block_bytes * spec.config.num_workers
        tiers = zip(tally.tier_names, core.tiers, self._manager.stats().tiers, strict=True)
        return Report(
            interrupted=self._interrupted,
            requests=tally.requests,
            block_refs=tally.block_refs,
            hits=dict(tally.hits),
            hit_ratio=tally.hits.total() / max(1, tally.block_refs),
            block_hits=core.primary.counters.found_blocks,
            jobs_submitted=counters.jobs_submitted,
            job_results=counters.job_results,
            job_failures=counters.job_failures,
            verified_blocks=tally.verified_blocks,
            corrupt_blocks=tally.corrupt_blocks,
            bytes_stored=tally.stored_blocks * spec.stride_bytes,
            bytes_loaded=tally.loaded_blocks * spec.stride_bytes,
            bytes_to_device=tally.loaded_blocks * copied_bytes,
            bytes_from_device=tally.stored_blocks * copied_bytes,
            preemptions=tally.preemptions,
            wall_s=wall_s,
            block_refs_per_s=tally.block_refs / max(wall_s, 1e-9),
            owner_us_per_step=tally.owner_us_per_step,
            leaked_pins=slots["pinned"] + slots["writing"] + slots["held"],
            steps=len(tally.owner_ns),
            evictions=core.primary.counters.evicted_blocks,
            stores_refused=tally.stores_refused,
            promotions_refused=counters.promotions_refused,
            deferrals_expired=counters.deferrals_expired,
            policy=spec.config.eviction_policy,
            primary_blocks=spec.num_blocks,
            block_bytes=spec.config.block_bytes,
            row_bytes=spec.stride_bytes,
            concurrency=options.concurrency,
            arrivals=options.arrivals,
            prefetch=options.prefetch,
            queued_s=None if options.arrivals is None else tally.queued_s,
            engine=options.engine,
            device_blocks=self._pool.num_frames,
            layers=options.layers,
            tiers={
                name: {figure: getattr(tier.counters, figure) for figure in _TIER_FIGURES}
                | {"requests": int(read.gauges.get("requests", 0))}
                for name, tier, read in tiers
            },
            samples=self._samples,
        )


def _replay_stepwise(
    spec: TieringOffloadingSpec,
    source: RequestSource,
    options: ReplayOptions,
    pool: FramePool,
    memories: Sequence[PagedMemory],
) -> Report:
    with _start_errors():
        manager = spec.get_manager()
    workers: Workers | None = None
    try:
        run = _Run(spec, options, pool, manager)
        workers = Workers(spec, memories, run.tally)
        driver = StepwiseDriver(
            manager,
            workers,
            pool,
            run.tally,
            run.options,
            stall_timeout_s=stall_timeout_s(spec),
            blocks_per_step=None if options.device_blocks is None else _BLOCKS_PER_STEP,
        )
        run.begin()
        options.on_ready(run.report)
        driver.run(Arrivals.of(source, options.arrivals))
        interrupted = options.should_stop()
        driver.drain(_bounded(spec, options))
        run.end(interrupted=interrupted)
    finally:
        if workers is not None:
            workers.shutdown(_bounded(spec, options))
        spec.shutdown(_bounded(spec, options))
    return run.report()


async def _replay_awaited(
    spec: TieringOffloadingSpec,
    source: RequestSource,
    options: ReplayOptions,
    pool: FramePool,
    memory: PagedMemory,
) -> Report:
    bounds = EngineBounds(waiting_calls=options.concurrency)
    create_transport = spec.transport_maker(memory.kv_caches, runtime=memory.runtime)
    engine = OffloadEngine(spec.config, create_transport, bounds)
    with _start_errors():
        await engine.__aenter__()
    try:
        run = _Run(spec, options, pool, engine.driver)
        patience_s = stall_timeout_s(spec)
        driver = AsyncDriver(
            engine, memory, pool, run.tally, run.options, stall_timeout_s=patience_s
        )
        run.begin()
        await driver.run(Arrivals.of(source, options.arrivals))
        interrupted = options.should_stop()
        await driver.rest(_bounded(spec, options))
        run.end(interrupted=interrupted)
    finally:
        await engine.close(_bounded(spec, options))
    return run.report()


def _open_memories(
    spec: TieringOffloadingSpec, options: ReplayOptions, num_frames: int
) -> Sequence[PagedMemory]:
    """Return the device memory of each worker.

    Raises:
        ConfigError: The device lacks the memory; none is allocated then.
    """
    from kvoffload_async.transport.paged import (  # noqa: PLC0415 - loads torch
        PagedMemory,
        pages_bytes,
        require_pages,
    )

    config, layers, runtime = spec.config, options.layers, options.runtime
    require_pages(config.block_bytes, layers, config.blocks_per_chunk)
    free_bytes = _host_bytes() if runtime is None else runtime.free_bytes()
    needed = num_frames * _FRAME_BYTES + config.num_workers * pages_bytes(
        num_frames, config.block_bytes, layers, config.blocks_per_chunk
    )
    if free_bytes is not None and needed > free_bytes:
        given = "--concurrency" if options.device_blocks is None else "--device-blocks"
        raise ConfigError(
            f"{given}: {num_frames} blocks of {config.block_bytes} bytes for "
            f"{config.num_workers} workers do not fit into the device's memory: they need {needed} "
            f"bytes, and it has {free_bytes}; give less"
        )
    return [
        PagedMemory(
            num_frames,
            config.block_bytes,
            layers=layers,
            blocks_per_chunk=config.blocks_per_chunk,
            runtime=runtime,
            salt=worker,
        )
        for worker in range(config.num_workers)
    ]


def _host_bytes() -> int | None:
    limit = memory_limit()
    return None if limit is None else limit.size_bytes


@contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except (OffloadError, OSError, TypeError, ValueError) as error:
        # Only a tier's constructor and `open` can validate its options.
        raise InputError(f"the engine does not start: {error}") from error


def _bounded(spec: TieringOffloadingSpec, options: ReplayOptions) -> float:
    return _INTERRUPTED_TIMEOUT_S if options.should_stop() else spec.config.shutdown_timeout_s


Follow = Callable[[RequestSource, int], AbstractContextManager[object]]
"""Called with a pass's requests and number, from 1; returns the context that the pass runs in."""


@dataclass(frozen=True, slots=True)
class PassReports:
    """Reports of the passes, at least one; the first pass starts cold."""

    passes: tuple[Report, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the last pass ended before its requests did."""
        return self.passes[-1].interrupted

    @property
    def complaints(self) -> list[str]:
        """Errors found; those of later passes are prefixed with the pass number."""
        return [
            complaint if number == 1 else f"pass {number}: {complaint}"
            for number, report in enumerate(self.passes, 1)
            for complaint in report.complaints
        ]

    def to_json(self) -> str:
        """Return one JSON object with the first pass's results; others are nested in it.

        The second pass is under `warm`, later ones are in the list `later_passes`.
        """
        figures, *others = (report.to_dict() for report in self.passes)
        if others:
            figures["warm"] = others[0]
        if others[1:]:
            figures["later_passes"] = others[1:]
        return json.dumps(figures, indent=2)


def replay_passes(
    spec: TieringOffloadingSpec,
    open_source: Callable[[], RequestSource],
    options: ReplayOptions,
    num_passes: int,
    *,
    follow: Follow = lambda _source, _number: nullcontext(),
    watch: Callable[[int, RequestTimeline], None] | None = None,
) -> PassReports:
    """Replay the same requests several times, each time on a new engine over the same tiers.

    Args:
        spec: Spec of the first pass's engine; later passes use its configuration.
        open_source: Returns a new source of the requests.
        options: Settings of the replay.
        num_passes: Maximum number of passes; an interrupted pass is the last.
        follow: Context manager entered for each pass.
        watch: Receives the number of a pass and the timeline of a request; needs
            `explain_requests`.

    Raises:
        OffloadError: See `replay`.
    """
    reports: list[Report] = []
    for number in range(1, num_passes + 1):
        if reports:
            spec = TieringOffloadingSpec(spec.config)
        with closing(open_source()) as source, follow(source, number):
            on_timeline = None if watch is None else partial(watch, number)
            reports.append(replay(spec, source, replace(options, on_timeline=on_timeline)))
        if reports[-1].interrupted:
            break
    return PassReports(tuple(reports))
