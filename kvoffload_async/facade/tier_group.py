"""The tiers of a `TieringOffloadingManager`: one `TierState` each, driven through a link.

An optional tier that cannot be opened is retried in the background.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.core.counters import Figures
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.core.index import ProbedIndex
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import TierTimeoutError, Trouble, drop_tracebacks, remedy_of, text_of
from kvoffload_async.facade.external import ExternalLink, closed, is_external
from kvoffload_async.facade.secondary import SecondaryTierManager, owner_name
from kvoffload_async.facade.tier_factory import EngineTierOptions, SecondaryTierFactory
from kvoffload_async.runtime.bridge import Bridge, TierLink
from kvoffload_async.statistics import TierStatistics, UnopenedStatistics
from kvoffload_async.types import (
    JobId,
    Medium,
    ReqContext,
    ScheduleEndContext,
)

logger = logging.getLogger(__name__)

POLL_S: Final = 0.05
"""Interval, in seconds, of polling external managers, which send no notifications."""


_SECONDS_BETWEEN: Final = 60.0
"""Minimum seconds between two warnings about a tier's lost blocks."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


def create_tier(
    tier_config: Mapping[str, Any], primary_kv_view: memoryview, offloading_spec: object
) -> SecondaryTierManager | UnopenedTier:
    """Create and open a tier; return an `UnopenedTier` if an optional one cannot be opened.

    For a required tier it raises the errors of `SecondaryTierFactory.create_secondary_tier`.
    """
    create = partial(
        SecondaryTierFactory.create_secondary_tier, tier_config, primary_kv_view, offloading_spec
    )
    try:
        return create()
    except Exception as error:
        if tier_config.get("required", EngineTierOptions.required):
            raise
        drop_tracebacks(error)  # before it is logged, as logs may be kept
        name = tier_config["type"]
        bridge: Bridge | None = getattr(offloading_spec, "runtime", None)
        hangs = partial(bridge.opening_hangs, name) if bridge is not None else bool
        return UnopenedTier(name, create, error, hangs)


def pauses_s() -> Iterator[float]:
    """Yield the pauses, in seconds, before successive attempts to open a tier."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield min(pause_s, _LONGEST_PAUSE_S)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class UnopenedTier:
    """Retries opening a tier on a background thread; only `shutdown` waits for the thread.

    Not thread-safe, except the attributes; call only from the owner's thread.

    Attributes:
        tier_type: The name under which the tier was configured.
        failing: The failed attempts; None once the tier is open.
    """

    def __init__(
        self,
        tier_type: str,
        create: Callable[[], SecondaryTierManager],
        error: Exception,
        hangs: Callable[[], bool] = bool,
    ) -> None:
        """Start the background thread.

        Args:
            tier_type: The name under which the tier was configured.
            create: Creates and opens the tier; blocks, on the background thread.
            error: Error of the first attempt.
            hangs: Returns whether a thread of the last attempt hangs; if so, none is started.
        """
        self.tier_type = tier_type
        self._create = create
        self._hangs = hangs
        self._opened: deque[SecondaryTierManager] = deque()
        self._stop = threading.Event()
        self._failed_at_s = time.monotonic()
        why = text_of(error)
        logger.warning(
            "tier %s cannot be opened, and is tried again: %s; the engine runs without this tier; "
            "fix the cause above",
            tier_type,
            why,
        )
        now_s = time.time()
        failing = UnopenedStatistics(since_s=now_s, attempts=1, reason=why, next_attempt_s=now_s)
        self.failing: UnopenedStatistics | None = failing
        self._thread = threading.Thread(
            target=self._reopen, args=(failing,), name=f"kvoffload-reopen:{tier_type}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier_type}>"

    def take_opened(self) -> SecondaryTierManager | None:
        """Return the manager of the opened tier, once; None before and afterwards."""
        if not self._opened:
            return None
        seconds = time.monotonic() - self._failed_at_s
        logger.warning("tier %s was opened after %.1f s", self.tier_type, seconds)
        return self._opened.popleft()

    def shutdown(self, timeout: float) -> CloseReport:
        """Stop retrying, and close the tier if it was opened but not taken.

        Waits for a running attempt, at most `timeout` seconds.
        """
        self._stop.set()
        begun_s = time.monotonic()
        self._thread.join(timeout)
        with contextlib.suppress(IndexError):
            left_s = max(0.0, timeout - (time.monotonic() - begun_s))
            return closed(self._opened.popleft(), left_s)
        if self._thread.is_alive():  # it will close the tier; until then it may access the primary
            return CloseReport(error=TierTimeoutError(f"{self.tier_type} is still being opened"))
        return CloseReport()

    def _reopen(self, failing: UnopenedStatistics) -> None:
        """Retry until the tier opens. Runs on the background thread."""
        for pause_s in pauses_s():
            failing = self.failing = replace(failing, next_attempt_s=time.time() + pause_s)
            if self._stop.wait(pause_s):
                return
            if self._hangs():
                continue
            try:
                tier = self._create()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is tried again
                drop_tracebacks(error)
                why = text_of(error)
                logger.debug("tier %s cannot be opened: %s", self.tier_type, why)
                failing = replace(failing, attempts=failing.attempts + 1, reason=why)
                continue
            self._opened.append(tier)
            self.failing = None
            if self._stop.is_set():
                with contextlib.suppress(IndexError):  # unless `shutdown` has taken it
                    close_unused(self._opened.popleft())
            return


def close_unused(tier: SecondaryTierManager | UnopenedTier, timeout_s: float | None = None) -> None:
    """Close a tier that no engine has taken over; an error is logged.

    Args:
        tier: The tier.
        timeout_s: Seconds for closing; None: the tier's own.
    """
    if isinstance(tier, UnopenedTier):
        report = tier.shutdown(timeout_s or 0.0)
    else:
        report = closed(tier, timeout_s)
    if report.error is not None:
        logger.error("tier %s was not closed: %s", tier.tier_type, text_of(report.error))


class BreakerLog:
    """Logs when a tier's circuit breaker opens or closes, but not each failed trial.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._suspended: set[tuple[int, str]] = set()

    def update(self, now_s: float) -> None:
        """Log each breaker that has opened or closed since the last call."""
        for index, tier in enumerate(self._tiers):
            health = tier.health
            for direction, breaker in (("loads", health.loads), ("stores", health.stores)):
                is_open = breaker.state is not BreakerState.CLOSED
                if is_open is ((index, direction) in self._suspended):
                    continue
                self._suspended ^= {(index, direction)}
                if not is_open:
                    open_s = now_s - breaker.opened_at_s
                    logger.warning(
                        "tier %s: %s resumed after %.1f s", tier.label, direction, open_s
                    )
                    continue
                logger.warning(
                    "tier %s: %s are suspended, and tried again after %s s: %s; the engine runs "
                    "without this tier's %s; fix the cause above",
                    tier.label,
                    direction,
                    breaker.settings.retry_after_s,
                    breaker.reason,
                    direction,
                )


class LossWarnings:
    """Logs a warning when blocks were not stored in a tier, at most once a minute per tier.

    Blocks dropped by a reset or a deletion do not count: the caller asked for it.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self, planner: Planner, now_s: float) -> None:
        """Count lost blocks from the time `now_s` on."""
        self._planner = planner
        self._reported = [Counter[str]() for _ in planner.tiers]
        self._reported_s = [now_s for _ in planner.tiers]
        self._next_s = [now_s for _ in planner.tiers]

    def check(self, now_s: float, *, is_last: bool = False) -> None:
        """Log the blocks that each tier has lost since its last warning, if a warning is due."""
        for index, tier in enumerate(self._planner.tiers):
            counters, reported = tier.counters, self._reported[index]
            lost = counters.dropped_blocks - counters.dropped["reset"] - counters.dropped["deleted"]
            lost += counters.failed_store_blocks
            if lost > reported.total() and (is_last or now_s >= self._next_s[index]):
                self._warn(index, tier, now_s)
                self._reported_s[index], self._next_s[index] = now_s, now_s + _SECONDS_BETWEEN

    def _warn(self, index: int, tier: TierState, now_s: float) -> None:
        """Log a tier's lost blocks by reason, each with its remedy."""
        dropped, reported = tier.counters.dropped, self._reported[index]
        since = {
            reason: count - reported[reason]
            for reason, count in (
                ("evicted", dropped["evicted"]),
                ("failed", tier.counters.failed_store_blocks),
                ("closed", dropped["closed"]),
            )
            if count > reported[reason]
        }
        reported.update(since)
        logger.warning(
            "tier %s: %d blocks have been lost in the last %.0f s: %s; %d more wait for room",
            tier.label,
            sum(since.values()),
            now_s - self._reported_s[index],
            "; ".join(
                f"{count} {_LOSSES[reason]} ({remedy_of(_cause_of(reason, tier), tier.remedies)})"
                for reason, count in since.items()
            ),
            self._planner.cascades.queues[index].count,
        )


_LOSSES: Final = {
    "evicted": "evicted from the primary before the tier had room for them",
    "failed": "given up after failed stores",
    "closed": "not stored before the shutdown",
}
_TROUBLES: Final = {"evicted": Trouble.TOO_SLOW, "closed": Trouble.CLOSED_TOO_SOON}


def _cause_of(reason: str, tier: TierState) -> Trouble:
    """Return the underlying cause of a tier's losses with a given reason."""
    if reason == "failed":
        return Trouble.STORES_FAILED
    if not tier.is_available:
        return Trouble.NOT_OPEN
    if tier.health.stores.state is not BreakerState.CLOSED:
        return Trouble.SUSPENDED
    return Trouble.HANGING if tier.jobs.orphaned_count else _TROUBLES[reason]


class TierGroup:
    """Collects the tiers' events, and hands effects over to the tiers.

    A tier that is not open has an unavailable state and no link.

    Not thread-safe, except `stats`; call only from the owner's thread.

    Attributes:
        managers: The managers of the open tiers, by tier index.
        states: The states that the planner drives, one per tier.
        links: The links of the open tiers, by tier index.
        external: The links to external managers among them.
    """

    def __init__(
        self,
        managers: Sequence[SecondaryTierManager | UnopenedTier],
        breaker: BreakerSettings,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Create a link to each manager; calls no method of an external manager."""
        self.managers: dict[int, SecondaryTierManager] = {}
        self.links: dict[int, TierLink | ExternalLink] = {}
        self.external: list[ExternalLink] = []
        self._bridges: list[Bridge] = []
        self.states: list[TierState] = []
        self._slot_bytes = slot_bytes
        self._clock = clock
        seen: Counter[str] = Counter()
        self._names = [owner_name(manager.tier_type, seen) for manager in managers]
        self._unopened: dict[int, UnopenedTier] = {}
        self._running: dict[int, set[JobId]] = {}
        """Index of a tier that was shut down -> its jobs whose copies still run."""
        for index, manager in enumerate(managers):
            if isinstance(manager, UnopenedTier):
                self._unopened[index] = manager
                state = _unopened_state(manager.tier_type, self._names[index], slot_bytes)
            else:
                state = self._link(index, manager).state
            state.health = TierHealth(breaker)
            self.states.append(state)
        self._breaker_log = BreakerLog(self.states)

    # -- steps ----------------------------------------------------------------------------------

    def begin_request(self, ctx: ReqContext, planner: Planner) -> list[int]:
        """Announce a request to the tiers; return the indices of tiers that want all its blocks.

        An external manager first gets the queued jobs of ended requests, and may refuse them.
        """
        wanting = [index for index, link in self.links.items() if link.begin_request(ctx)]
        planner.collect()
        return wanting

    def collect(self, planner: Planner) -> None:
        """Apply the tiers' events."""
        if self._unopened:
            self._take_opened(planner)
        for link in self.links.values():
            if link.inbox:
                link.pump()
        planner.collect()
        self._breaker_log.update(planner.now_s)

    def end_step(
        self, planner: Planner, context: ScheduleEndContext | None = None, *, probes: bool = True
    ) -> None:
        """Hand all effects over to the tiers; an external manager may refuse jobs at once.

        Args:
            planner: The planner, which collects what was refused.
            context: The scheduler's, for external managers.
            probes: Whether to begin probes for the keys that were looked up in the step.
        """
        for link in self.links.values():
            if probes and link.state.may_probe:
                link.end_step(context)
        for bridge in self._bridges:
            bridge.flush()
        for external in self.external:
            external.flush()
            planner.collect()

    def stats(self, taken: Sequence[Figures]) -> tuple[TierStatistics, ...]:
        """Return each tier's statistics, from the planner's figures. Thread-safe."""
        return tuple(self._stats_of(index, figures) for index, figures in enumerate(taken))

    # -- calls that block ----------------------------------------------------------------------

    def store_pending(self, planner: Planner, bridge: Bridge | None, timeout_s: float) -> None:
        """Write pending blocks back to the tiers, for at most `timeout_s`; needs a bridge."""
        left_s = timeout_s

        def has_results() -> bool:
            before = planner.counters.job_results
            self.collect(planner)
            return planner.counters.job_results != before

        while bridge is not None and planner.cascades.has_pending:
            began_s = self._clock()
            planner.begin_step(began_s)
            self.collect(planner)
            planner.cascades.send_pending(planner.now_s)
            self.end_step(planner, probes=False)
            if left_s <= 0 or not planner.has_pending_work:
                return
            # Bounded, because a tier of another engine may use the bridge and wake this thread.
            wait_s = min(left_s, POLL_S)
            has_news = bridge.runner.wait_until(has_results, wait_s)
            left_s -= max(self._clock() - began_s, 0.0 if has_news else wait_s)

    def shutdown(self, planner: Planner, deadline_s: float) -> tuple[int, list[Exception]]:
        """Shut every tier down; return the number of copies that still run, and the errors."""
        errors: list[Exception] = []
        for index, state in enumerate(self.states):
            if index in self._running:  # an earlier attempt has shut it down
                continue
            state.health.close()
            left_s = max(0.0, deadline_s - self._clock())
            if index in self.links:
                report = self.links[index].close(left_s)
            else:
                report = self._unopened[index].shutdown(left_s)
            self._running[index] = set(report.unfinished_jobs)
            if report.error is not None and not report.unfinished_jobs:
                errors.append(report.error)
        for link in self.links.values():
            link.pump()
        for index, state in enumerate(self.states):
            # Jobs are left only if an external manager's shutdown failed or returned no report.
            self._running[index].update(state.abandon_rest())
        planner.collect()
        return sum(map(len, self._running.values())), errors

    # -- internal -------------------------------------------------------------------------------

    def _stats_of(self, index: int, figures: Figures) -> TierStatistics:
        if (link := self.links.get(index)) is not None:
            return link.stats(figures)
        read = self.states[index].statistics(figures)
        if (tier := self._unopened.get(index)) is None:
            return read
        failing = tier.failing
        return replace(read, is_open=failing is None, unopened=failing)

    def _link(self, index: int, manager: SecondaryTierManager) -> TierLink | ExternalLink:
        """Add and return the link through which the planner drives a manager's tier."""
        name = self._names[index]
        link: TierLink | ExternalLink
        if is_external(manager):
            link = ExternalLink(manager, name, self._slot_bytes, self._clock)
        else:
            link, state = manager.link, manager.link.state
            state.event_log.ownership = name
            state.backpressure = manager.backpressure_detector
            state.medium, state.locality = manager.medium, manager.locality
        self.managers = dict(sorted({**self.managers, index: manager}.items()))
        self.links = dict(sorted({**self.links, index: link}.items()))
        links = self.links.values()
        self.external = [link for link in links if isinstance(link, ExternalLink)]
        self._bridges = list(dict.fromkeys(li.bridge for li in links if isinstance(li, TierLink)))
        return link

    def _take_opened(self, planner: Planner) -> None:
        """Link the tiers that were opened since the last call."""
        for index, tier in list(self._unopened.items()):
            manager = tier.take_opened()
            if manager is None:
                continue
            del self._unopened[index]
            link = self._link(index, manager)
            self.states[index].take_over(link.state)
            link.state = self.states[index]
            for ctx in planner.requests:
                link.begin_request(ctx)


def _unopened_state(tier_type: str, name: str, slot_bytes: int) -> TierState:
    """Return the state of an unavailable tier with unknown contents."""
    log = EventLog(Medium.STORAGE, enabled=False, ownership=name)
    state = TierState(tier_type, ProbedIndex(1), slot_bytes, log)
    state.is_available = False
    state.deletes = True  # a deletion waits for it, since its blocks would be served again
    return state


def tiers_text(names: Sequence[str]) -> str:
    """Return the tiers' names as text."""
    return f"tiers: {', '.join(names)}" if names else "no tiers"
