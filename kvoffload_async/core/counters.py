"""Counters of the primary tier and of the planner; `kvoffload_async.statistics` explains them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrimaryCounters:
    """What the primary has done so far."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    refused_stores: int = 0


@dataclass(slots=True)
class PlannerCounters:
    """What the planner has done so far."""

    jobs_submitted: int = 0
    job_results: int = 0
    job_failures: int = 0
    promotions_refused: int = 0
    deferrals_expired: int = 0
