"""The driver of a planner and its tiers, shared by managers and asynchronous engines.

It polls the tiers, hands the planner's effects over to them, publishes statistics, and shuts
everything down.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.config import WriteBack, one_of, parse_generation
from kvoffload_async.core.counters import Histogram
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import read_primary
from kvoffload_async.core.recorder import RecordingPlanner, RequestRecorder
from kvoffload_async.errors import ClosedError, ConfigError, OffloadError, StateError, text_of
from kvoffload_async.facade.cache import CacheManager, CacheOperation, CacheReport
from kvoffload_async.facade.commands import CacheCommands
from kvoffload_async.facade.generation import Generation
from kvoffload_async.facade.primary import (
    CPUPrimaryTierOffloadingManager,
    create_admission,
    primary_text,
)
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_group import (
    POLL_S,
    LossWarnings,
    TierGroup,
    UnopenedTier,
    tiers_text,
)
from kvoffload_async.hints import read_hints
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.lifetime import Closing, guard_forks, warn_unclosed
from kvoffload_async.statistics import (
    HistogramStatistics,
    OffloadingStatistics,
    RuntimeStatistics,
)
from kvoffload_async.tables.keymap import require_keys
from kvoffload_async.timeline import RequestTimeline, SlowRequest
from kvoffload_async.types import (
    ENGINE_REQ_ID,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    counted,
)
from kvoffload_async.waiting import seconds

logger = logging.getLogger(__name__)

TimelineListener = Callable[[RequestTimeline], None]
"""Called with a request's timeline on the owner's thread; must not block."""

FindParent = Callable[[ReqContext], object | None]


class PlannerDriver:
    """Drives a planner and its tiers, step by step, for a manager or an asynchronous engine.

    The driver's user calls `planner` directly for all that concerns blocks.

    Tiers are polled at most once per phase of a step: for its lookups, at the first one, and for
    its stores, unless lookups have polled before. Submitted jobs are handed over at the end of the
    step.

    Not thread-safe, except `stats` and `slowest_requests`; call only from the owner's thread.

    Attributes:
        planner: Decides on all transfers.
        cache: Deletes, counts, lists and pins cached blocks.
        commands: Commands for `cache` from other threads; None: none are accepted.
        recorder: Records the timelines of the last `explain_requests` requests; None: it is off.
        generation: Creates the blocks' keys. Read it once when a request begins, and use it for
            all keys of that request.
        tenants: The tenants, of whom each has keys of its own; None: the option `tenants` is not
            given.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager | UnopenedTier],
        *,
        bridge: Bridge | None = None,
        write_back: str | None = None,
        deferral_timeout_s: float = 30.0,
        breaker: BreakerSettings | None = None,
        drain_timeout_s: float = 30.0,
        shutdown_timeout_s: float = 30.0,
        check_invariants: bool = False,
        clock: Callable[[], float] = time.monotonic,
        generation: int | str | None = None,
        explain_requests: int = 0,
        reuse_capacities: Sequence[float | None] = (),
    ) -> None:
        """Combine a primary with tiers; the driver owns them.

        Args:
            primary: The primary; only this driver may call it.
            secondary_tiers: The tiers, in lookup order.
            bridge: The bridge that the tiers share, if any; for `wait_for_progress`, and to
                write pending blocks back at shutdown.
            write_back: "wait", "drop", or None: drop only for a request's last store; see
                `OffloadConfig`.
            deferral_timeout_s: Maximum total seconds that a request is deferred.
            breaker: Circuit-breaker settings for failing tiers.
            drain_timeout_s: Seconds per tier that `reset_cache` waits for running jobs.
            shutdown_timeout_s: Seconds per tier that `shutdown` waits.
            check_invariants: Check every invariant at the end of every step; for debugging.
            clock: Monotonic seconds.
            generation: Identifies the weights of the blocks; see `invalidate`.
            explain_requests: Number of requests to record for `explain`.
            reuse_capacities: For each tier with `admission` "reuse" its capacity in blocks, None
                for the others; empty: all tiers store everything.
        """
        self.generation = Generation(generation)
        self.tenants = primary.tenants
        self._primary = primary
        self._bridge = bridge
        self._clock = clock
        self._drain_timeout_s = drain_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._check_invariants = check_invariants
        chosen = None if write_back is None else one_of(WriteBack)(write_back, "write_back")
        primary.core.drops_pending = chosen is WriteBack.DROP
        self._last_drops_pending = chosen is not WriteBack.WAIT
        self._tiers = TierGroup(
            secondary_tiers, breaker or BreakerSettings(), primary.row_bytes, clock
        )
        self.recorder = RequestRecorder(explain_requests) if explain_requests else None
        parts = (primary.core, self._tiers.states, deferral_timeout_s)
        if self.recorder is None:
            self.planner = Planner(*parts)
        else:
            self.planner = RecordingPlanner(*parts, self.recorder, clock)
        if any(capacity is not None for capacity in reuse_capacities):
            self.planner.cascades.admission = create_admission(primary.core, reuse_capacities)
        tiers, planner = self._tiers, self.planner  # no reference to this driver, which is a cycle

        def begin_own_request(ctx: ReqContext) -> None:
            planner.on_new_request(ctx, tiers.begin_request(ctx, planner))

        self.cache = CacheManager(planner, clock, begin_own_request)
        self.commands: CacheCommands | None = None
        self._losses = LossWarnings(self.planner, clock())
        self._step_seconds = Histogram()
        """Seconds per step that `begin_step` and `on_schedule_end` take on the owner's thread."""
        self._step_s = 0.0
        self._publish()
        self._block_io = _block_io()
        self._polled_this_step = self._polled_for_stores = False
        self._listeners: tuple[TimelineListener, ...] = ()
        self._closed = False
        self._closing: Closing[None] = Closing()
        guard_forks(self, _closed=True, _closing=Closing.closed(None))

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._tiers.states:
            warn_unclosed(self, "shutdown()")

    def __repr__(self) -> str:
        state = "closed" if self._closed else planner_text(self.planner)
        return f"<{type(self).__name__}: {state}>"

    @property
    def secondary_tiers(self) -> Sequence[SecondaryTierManager]:
        """The managers of the open tiers, in lookup order."""
        return tuple(self._tiers.managers.values())

    def get_primary_kv_view(self) -> memoryview:
        """See `CPUPrimaryTierOffloadingManager.get_primary_kv_view`."""
        return self._primary.get_primary_kv_view()

    # -- requests -------------------------------------------------------------------------------

    def begin_request(self, ctx: ReqContext) -> bool:
        """Begin a request; return whether any tier wants all its blocks.

        Raises:
            ClosedError: The driver is shut down.
            StateError: The id is the engine's own, or `ctx` is live already.
            ConfigError: Its `hints` are invalid; those of its client are ignored if they are.
        """
        self._ensure_open()
        # Check before any tier is called.
        if ctx.req_id == ENGINE_REQ_ID:
            raise StateError(f"request {ENGINE_REQ_ID!r}: the id is the engine's own; take another")
        if ctx in self.planner.requests:
            raise StateError(f"request {ctx.req_id!r} is known already")
        read_hints(ctx, self._primary.core.counters.hints)
        wanting = self._tiers.begin_request(ctx, self.planner)
        self.planner.on_new_request(ctx, wanting)
        return bool(wanting)

    def tenant_index(self, name: str | None) -> int | None:
        """Return the index of a request's tenant; see `Tenants.index_of`. 0 without tenants.

        Raises:
            ConfigError: A name is given, but the option `tenants` is not.
        """
        if self.tenants is not None:
            return self.tenants.index_of(name)
        if name is None:
            return 0
        raise ConfigError('tenant: there are no tenants; add "tenants" to the configuration')

    def named_tenant(self, name: str | None) -> int:
        """Return the index of a tenant that a person names; None is the default.

        Raises:
            ConfigError: As for `tenant_index`.
            StateError: There is no such tenant.
        """
        return self.tenant_index(name) or 0 if self.tenants is None else self.tenants.named(name)

    def owner_test(self, name: str) -> Callable[[OffloadKey], bool]:
        """Return a function that tests whether a key is a tenant's; errors as `named_tenant`."""
        index, tenants = self.named_tenant(name), self.tenants
        return lambda key: tenants is not None and tenants.owns(key, index)

    def make_keys(
        self, block_hashes: Iterable[bytes], tenant: int = 0, group: int = 0
    ) -> list[OffloadKey]:
        """Return the keys of blocks in the present generation.

        Args:
            block_hashes: Their hashes.
            tenant: Index of the tenant whose blocks they are.
            group: Index of their KV-cache group.

        Raises:
            StateError: A hash is not bytes, is empty, or is too long.
        """
        key = self.generation.key
        try:
            keys = [key(block_hash, group) for block_hash in block_hashes]
        except TypeError as error:
            raise StateError(
                f"block_hashes: {error}; give a sequence of bytes, one hash for each full block"
            ) from None
        require_keys(keys)
        if self.tenants is not None:
            keys = [self.tenants.tagged(each, tenant) for each in keys]
            require_keys(keys)
        return keys

    # -- steps ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Apply the tiers' reports, once per step, before the step's first lookup.

        A manager's lookups do so. Its stores do not begin a step: some schedulers offer a step's
        stores after its end, and then compute for long. The next step's first lookup must see what
        has landed meanwhile.

        Raises:
            ClosedError: The manager is shut down.
        """
        if not self._polled_this_step:
            self._poll_timed()
            self._polled_this_step = True

    def interrupt_step(self) -> None:
        """Make the next call poll the tiers and read the clock again within the current step.

        For steps that last long, and for tiers that have reported since.
        """
        self._polled_this_step = self._polled_for_stores = False

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a step: submit promotions and late cascades, and report used blocks to the tiers."""
        if self._closed:
            return
        began_s = self._clock()
        if not self._polled_this_step:
            self.planner.begin_step(began_s)
            self._tiers.collect(self.planner)
        self._polled_this_step = self._polled_for_stores = False
        if self.commands is not None:
            self.commands.execute()
        if self.cache.running:
            self.cache.end_step()
        self.planner.end_step(() if context is None else context.new_req_ids)
        self._losses.check(self.planner.now_s)
        self._tiers.end_step(self.planner, context)
        self._step_seconds.observe(self._step_s + self._clock() - began_s)
        self._step_s = 0.0
        self._publish()
        if self.commands is not None:
            self.commands.publish()
        if self._listeners:
            self._hand_timelines_over()
        if self._check_invariants:
            check_state(self.planner)

    def take_events(self, max_keys: int | None = None) -> Iterator[OffloadingEvent]:
        """Remove and return events of the primary and of every tier, oldest first for each.

        Those of the primary wait until none of a tier waits, because a block's removal from the
        primary must not precede its store in a tier.

        Args:
            max_keys: Number of keys of the primary, and of each tier, after which further events
                wait for the next call, for which `has_pending_work` then asks; None: return all.
        """
        of_tiers = [e for link in self._tiers.links.values() for e in link.take_events(max_keys)]
        primary = self.planner.primary
        if not primary.event_log.entries:
            return iter(of_tiers)
        waits = any(tier.event_log.is_behind for tier in self.planner.tiers)
        return chain(primary.take_events(0 if waits else max_keys), of_tiers)

    def contents(self) -> Iterator[OffloadingEvent]:
        """Yield events that announce all that is known of the contents, when none is unread.

        For a reader that begins later, or has missed events.
        """
        primary = self.planner.primary
        if primary.event_log.is_enabled:
            yield from primary.event_log.contents(primary.readable())
        for tier in self.planner.tiers:
            if tier.event_log.is_enabled:
                yield from tier.event_log.contents(tier.event_log.announced or ())

    def announce_anew(self) -> None:
        """Emit events for blocks again when they are next stored in a tier, or loaded from it.

        For consumers of events that have lost their state.
        """
        for link in self._tiers.links.values():
            link.announce_anew()

    def has_pending_work(self) -> bool:
        planner, links = self.planner, self._tiers.links.values()
        if planner.has_pending_work or planner.primary.event_log.is_behind or self._manages:
            return True
        return any(link.has_pending_work() for link in links)

    def stats(self) -> OffloadingStatistics:
        """Return counters and gauges, also after shutdown.

        Thread-safe. Other threads than the owner's get the values at the end of the last step.
        """
        if threading.get_ident() == self._owner:
            self._publish()
        published, bridge = self._published, self._bridge
        version, python = _versions()
        return OffloadingStatistics(
            primary=read_primary(published.primary, self._primary.row_bytes),
            tiers=self._tiers.stats(published.tiers),
            planner=self.planner.statistics(published.planner),
            runtime=RuntimeStatistics(
                version=version,
                python=python,
                block_io=self._block_io,
                loop_lag_seconds=HistogramStatistics() if bridge is None else bridge.lag.read(),
                step_seconds=self._step_seconds.read(),
                wake_ups=0 if bridge is None else bridge.wake_ups,
            ),
            cache_operations=self._operations,
        )

    def wait_for_progress(self, timeout_s: float) -> bool:
        """Wait until a tier has a report, at most `timeout_s` seconds.

        For drivers without other work between steps; a scheduler does not need it.

        Returns:
            Whether a report is available.

        Raises:
            StateError: The tiers share no bridge.
        """
        if self._bridge is None:
            raise StateError("the tiers share no bridge: poll them instead")
        for tier in self.planner.tiers:
            if tier.cost_gated is not None and tier.cost_gated.has_decided:
                return True  # repeat lookups that returned RETRY: some answers have changed
        return self._bridge.wait_for_progress(seconds(timeout_s))

    def finish(self, operation: CacheOperation, timeout_s: float) -> CacheReport:
        """Make steps until an operation of `cache` has ended, at most `timeout_s` seconds.

        For use between a scheduler's steps; blocks. At the deadline the operation goes on.

        Raises:
            ClosedError: The driver is shut down.
            StateError: The tiers share no bridge.
        """
        deadline_s = self._clock() + seconds(timeout_s)
        while True:
            self._ensure_open()
            self.on_schedule_end()
            left_s = deadline_s - self._clock()
            if operation.is_done or left_s <= 0:
                return operation.report
            if (pause_s := min(left_s, self.wakes_in_s())) > 0:
                self.wait_for_progress(pause_s)

    def wakes_in_s(self) -> float:
        """Return the seconds until a step is due even without a notification."""
        if self._manages:
            return 0.0
        due_s = self.planner.wakes_in_s()
        for link in self._tiers.external:  # they send no notifications
            if link.state.jobs.orphaned_count or link.has_pending_work():
                due_s = min(due_s, POLL_S)
        return due_s

    def accept_commands(self) -> CacheCommands:
        """Return the object that accepts commands for `cache` from other threads, from now on."""
        if self.commands is None:
            wake = (lambda: None) if self._bridge is None else self._bridge.runner.notify
            self.commands = CacheCommands(self.cache, self._make_key, self.owner_test, wake)
        return self.commands

    def invalidate(self, generation: int | str) -> None:
        """Begin a new key generation after a change of weights, between steps. Non-blocking.

        Blocks of former generations are no longer served from the primary or any tier, transfers
        in flight included. Requests that began before get only misses and store no more blocks.
        Create the keys of later requests with the new `generation.key`. Returning to a former
        label makes its blocks available again: never reuse a label for other weights.

        Raises:
            ConfigError: `generation` is neither an integer nor a valid label.
        """
        self._ensure_open()
        self.generation = Generation(parse_generation(generation, "generation"))
        self.planner.prefetcher.forget_all()

    # -- timelines of requests ------------------------------------------------------------------

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a running or ended request, as a printable object.

        If several requests have the id, the latest is returned.

        Returns:
            None if the request is not recorded.

        Raises:
            StateError: Recording is off: `explain_requests` is 0.
        """
        return self._require_recorder().explain(req_id)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return the timelines of all recorded requests, oldest first.

        Raises:
            StateError: Recording is off: `explain_requests` is 0.
        """
        return self._require_recorder().timelines()

    def slowest_requests(self, count: int = 5) -> tuple[SlowRequest, ...] | None:
        """Return the recent requests with the longest waits; None if recording is off.

        Thread-safe.
        """
        return None if self.recorder is None else self.recorder.slowest(count)

    def watch_timelines(
        self, listener: TimelineListener, find_parent: FindParent | None = None
    ) -> None:
        """Pass each timeline to a listener, once, at the end of the step that completes it.

        A timeline is complete when no copy for its request is running. At shutdown, and when the
        recorder drops a request, the timeline is passed incomplete. The error of a listener is
        logged, and the listener is removed.

        Args:
            listener: Called on the owner's thread; must not block.
            find_parent: Returns the trace context of a new request; by default the request's own.

        Raises:
            StateError: Recording is off: `explain_requests` is 0.
        """
        recorder = self._require_recorder()
        recorder.keep_complete()
        if find_parent is not None:
            recorder.find_parent = find_parent
        self._listeners += (listener,)

    # -- calls that block ----------------------------------------------------------------------

    def reset_cache_now(self) -> None:
        """Empty the primary, between steps; fail running jobs without waiting.

        Their slots stay reserved until the copies end. No promotion starts before
        `Planner.reset_flushed`.
        """
        self._ensure_open()
        for external in self._tiers.external:
            external.abandon()
        self._reset()

    def _reset(self) -> None:
        self._polled_this_step = self._polled_for_stores = False
        self._poll_timed()
        for tier in self.planner.tiers:
            tier.abandon_rest()  # jobs that have not ended within the timeout
        self.planner.collect()
        self.planner.reset_cache()

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut every tier down, then release the primary's memory; idempotent.

        Pending blocks are written back for at most half of the timeout; the remaining ones are
        lost. The memory is not released while a copy may still access it.

        Args:
            timeout: Seconds to wait for running jobs, in total for all tiers.

        Raises:
            OffloadError: A tier failed to close; all others were shut down. After any error,
                another call does what is left.
        """
        timeout_s = self._shutdown_timeout_s if timeout is None else seconds(timeout, "timeout")
        self._closing.run(self._shut_down, timeout_s)

    def _shut_down(self, timeout_s: float) -> None:
        self._closed = True
        self._polled_this_step = self._polled_for_stores = False
        deadline_s = self._clock() + timeout_s
        self.planner.end_tickets()
        try:
            self._tiers.store_pending(self.planner, self._bridge, timeout_s / 2)
        except OffloadError as error:  # such as a closed event loop; the shutdown must continue
            logger.warning("pending blocks could not be stored: %s", error)
        self.planner.close()
        self._losses.check(self._clock(), is_last=True)  # while the tiers' states say why
        unfinished, errors = self._tiers.shutdown(self.planner, deadline_s)
        self._losses.check(self._clock(), is_last=True)
        if self.recorder is not None:  # pass the incomplete timelines, too
            self._hand_timelines_over()
            self.recorder.give_up()
            self._hand_timelines_over()
        self._publish()
        if unfinished:
            logger.warning("copies of %d jobs still run: the primary stays mapped", unfinished)
        else:
            self._primary.shutdown()
        if errors:
            names = ", ".join(map(text_of, errors))
            raise OffloadError(f"tiers did not shut down: {names}") from errors[0]

    # -- internal -------------------------------------------------------------------------------

    def _make_key(self, block_hash: bytes, group: int, tenant: str | None) -> OffloadKey:
        (key,) = self.make_keys([block_hash], self.named_tenant(tenant), group)
        return key

    @property
    def _manages(self) -> bool:
        """Whether a step can continue an operation on the cache, or a command."""
        has_commands = self.commands is not None and self.commands.has_work
        return has_commands or (bool(self.cache.running) and self.cache.has_work)

    def _poll_timed(self) -> None:
        """Apply the tiers' reports; add the time taken to the step's duration."""
        self._ensure_open()
        began_s = self._clock()
        self.planner.begin_step(began_s)
        self._tiers.collect(self.planner)
        self._owner = threading.get_ident()
        self._step_s += self._clock() - began_s

    def _publish(self) -> None:
        """Publish a consistent snapshot of the planner to other threads, by one assignment."""
        self._owner = threading.get_ident()
        self._published = self.planner.snapshot()
        self._operations = self.cache.num_running

    def _require_recorder(self) -> RequestRecorder:
        if self.recorder is None:
            raise StateError(
                "no request is recorded: set explain_requests, the number of requests to keep"
            )
        return self.recorder

    def _hand_timelines_over(self) -> None:
        if self.recorder is None or not self._listeners:
            return
        for timeline in self.recorder.take_complete():
            for listener in self._listeners:
                try:
                    listener(timeline)
                except Exception:
                    self._listeners = tuple(one for one in self._listeners if one != listener)
                    logger.exception(
                        "request %s: a listener for timelines failed and is not called again; "
                        "fix it, and watch again",
                        timeline.req_id,
                    )

    def _ensure_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager was shut down")


def planner_text(planner: Planner) -> str:
    """Return a planner's state as text: primary usage, requests, jobs in flight, tiers."""
    counters = planner.counters
    jobs = counters.jobs_submitted - counters.job_results
    tiers = [
        tier.name
        if tier.health.loads.is_closed and tier.health.stores.is_closed
        else f"{tier.name} (suspended)"
        for tier in planner.tiers
    ]
    requests = counted(len(planner.requests), "request")
    flights = f"{counted(jobs, 'job')} in flight"
    return ", ".join([primary_text(planner.primary), requests, flights, tiers_text(tiers)])


def _block_io() -> str:
    """Return the name of the block I/O implementation; "python" if its setting is invalid."""
    try:
        return implementation().name
    except ConfigError:
        return "python"


@functools.cache
def _versions() -> tuple[str, str]:
    """Return the versions of this package and the interpreter; cached."""
    return importlib.metadata.version("kvoffload-async"), platform.python_version()
