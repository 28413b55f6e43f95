"""The managers of a composing manager's tiers, and the states that its planner drives for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.readings import Figures
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.facade.external import ExternalTier, TierGuard, is_external
from kvoffload_async.facade.reopening import ReopeningTierManager
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.types import JobId

logger = logging.getLogger(__name__)


class BreakerLog:
    """Logs each opening and closing of a tier's breakers once; a try that fails is none.

    Thread: owner.
    """

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._suspended: set[tuple[int, str]] = set()

    def update(self, now_s: float) -> None:
        """Look at every breaker."""
        for index, tier in enumerate(self._tiers):
            health = tier.health
            for direction, breaker in (("loads", health.loads), ("stores", health.stores)):
                is_known = (index, direction) in self._suspended
                if (breaker.state is BreakerState.CLOSED) is not is_known:
                    continue
                if is_known:
                    self._suspended.remove((index, direction))
                    open_s = now_s - breaker.opened_at_s
                    logger.warning("tier %s: %s resumed after %.1f s", tier.name, direction, open_s)
                    continue
                self._suspended.add((index, direction))
                logger.warning(
                    "tier %s: %s are suspended, and tried again after %s s: %s; the engine does "
                    "without them until then: fix the named cause",
                    tier.name,
                    direction,
                    breaker.settings.retry_after_s,
                    breaker.reason,
                )


_POLL_S: Final = 0.05
"""How often tiers are polled that do not say when they have something to report."""


class TierGroup:
    """Polls the tiers, tells external ones what they are to do, and keeps their errors in.

    Thread: owner.

    Attributes:
        states: What the planner drives, one a tier.
        guards: Through which the managers are called.
    """

    def __init__(
        self,
        managers: Sequence[SecondaryTierManager],
        breaker: BreakerSettings,
        clock: Callable[[], float],
    ) -> None:
        """Make what joins the managers to a planner; nothing is called yet."""
        self.guards: list[TierGuard] = []
        self._managers = managers
        self._clock = clock
        self._sources: list[SecondaryTierManager | ExternalTier] = []
        self._external: dict[int, ExternalTier] = {}
        self.states = [self._join(index, breaker) for index in range(len(managers))]
        self._breaker_log = BreakerLog(self.states)

    def poll(self, planner: Planner) -> None:
        """Take in what the tiers have to report, and say which of them are suspended now."""
        self.collect(planner)
        self._breaker_log.update(self._clock())

    def collect(self, planner: Planner) -> None:
        """Take in what the tiers have to report."""
        for source in self._sources:
            source.poll_tier()
        planner.collect()

    def hand_over(self, planner: Planner) -> None:
        """Tell external tiers now what they are to do; the others wait for the end of the step."""
        for index, external in self._external.items():
            external.hand_over()
            planner.collect_from(index)

    def polls_in_s(self) -> float:
        """Return in how many seconds external tiers, which announce nothing, are to be polled."""
        if not self._external:
            return math.inf
        has_work = any(
            jobs.unfinished_count or jobs.orphaned_count or external.guard.has_pending_work()
            for external in self._external.values()
            for jobs in (external.state.jobs,)
        )
        return _POLL_S if has_work else math.inf

    def abandon_unreported(self) -> None:
        """Give up the jobs that external managers have given up without saying so."""
        for external in self._external.values():
            external.state.abandon_rest()

    def store_pending(self, planner: Planner, bridge: Bridge | None, timeout_s: float) -> None:
        """Send the tiers their pending blocks; waits. Without a bridge nothing is waited for."""
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
            self.hand_over(planner)
            bridge.flush()
            if left_s <= 0 or not planner.has_pending_work:
                return
            # Not the bridge's own wait: others, whose events nobody here takes, may share it.
            wait_s = min(left_s, _POLL_S)
            has_news = bridge.runner.wait_until(has_results, wait_s)
            left_s -= max(self._clock() - began_s, 0.0 if has_news else wait_s)

    def shutdown(self, planner: Planner, deadline_s: float) -> tuple[int, list[Exception]]:
        """Shut every tier down; return how many copies still run, and what has failed."""
        self.hand_over(planner)
        errors: list[Exception] = []
        running: list[set[JobId]] = []
        for state, guard in zip(self.states, self.guards, strict=True):
            state.health.close()
            report = guard.shutdown(max(0.0, deadline_s - self._clock()))
            running.append(set(report.unfinished_jobs))
            if report.error is not None and not report.unfinished_jobs:
                errors.append(report.error)
        self.collect(planner)
        for state, jobs in zip(self.states, running, strict=True):
            # Only a tier whose own shutdown failed, or that says nothing of it, leaves jobs behind.
            jobs.update(state.abandon_rest())
        planner.collect()
        return sum(map(len, running)), errors

    def stats(self, taken: Sequence[Figures]) -> tuple[TierStatistics, ...]:
        """Return how each tier is, of what the planner knows of them. Thread: any."""
        return tuple(map(_stats_of, self._managers, taken))

    def _join(self, index: int, breaker: BreakerSettings) -> TierState:
        """Return the state of a tier that the planner is to drive."""
        manager = self._managers[index]
        if is_external(manager):
            external = self._external[index] = ExternalTier(manager, breaker, self._clock)
            self._sources.append(external)
            self.guards.append(external.guard)
            if isinstance(manager, ReopeningTierManager):
                manager.attach(external.state)
            return external.state
        self._sources.append(manager)
        state = manager.tier_state
        state.health = TierHealth(breaker)
        state.backpressure = manager.backpressure_detector
        state.medium, state.locality = manager.medium, manager.locality
        self.guards.append(TierGuard(manager, state, self._clock))
        return state


def _stats_of(manager: SecondaryTierManager, taken: Figures) -> TierStatistics:
    if isinstance(manager, ReopeningTierManager):
        return manager.stats(taken)
    return SecondaryTierManager.stats(manager, taken)  # its own may be a third party's
