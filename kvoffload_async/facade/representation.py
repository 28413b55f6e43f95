"""What the objects of this package say of themselves in a debugger or a log line."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def primary_text(primary: Primary) -> str:
    """Return how full a primary is."""
    return f"{primary.num_slots - primary.pool.free_count:,} of {primary.num_slots:,} slots used"


def planner_text(planner: Planner) -> str:
    """Return how full the primary is, what is under way, and which tiers are left alone."""
    counters = planner.counters
    jobs = counters.jobs_submitted - counters.job_results
    tiers = [
        tier.name
        if tier.health.loads.is_closed and tier.health.stores.is_closed
        else f"{tier.name} (suspended)"
        for tier in planner.tiers
    ]
    parts = [
        primary_text(planner.primary),
        counted(len(planner.requests), "request"),
        f"{counted(jobs, 'job')} in flight",
        tiers_text(tiers),
    ]
    return ", ".join(parts)


def tiers_text(names: Sequence[str]) -> str:
    """Return the names of the tiers."""
    return f"tiers: {', '.join(names)}" if names else "no tiers"
