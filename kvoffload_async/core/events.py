"""What happened around the engine: past tense, with the time in the field that needs it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.types import JobId, JobResult


@dataclass(frozen=True, slots=True)
class StepBegan:
    """The scheduler touched the engine for the first time in a step."""

    now_s: float


@dataclass(frozen=True, slots=True)
class JobReported:
    """A tier reported one of the engine's jobs."""

    tier: int
    result: JobResult


@dataclass(frozen=True, slots=True)
class JobReleased:
    """The copy of a disowned job has ended."""

    tier: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The scheduler's step is over."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The primary is to be emptied; every tier has been drained."""


@dataclass(frozen=True, slots=True)
class ResetFlushed:
    """No copy from before the reset touches the primary any more."""


EngineEvent = StepBegan | JobReported | JobReleased | StepEnded | CacheReset | ResetFlushed
