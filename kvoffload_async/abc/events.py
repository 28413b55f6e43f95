"""Events of a tier: named in the past tense, posted by its actor, handled by its owner.

Thread: created on the loop thread, consumed on the owner's; thread-safe because immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvoffload_async.errors import TierError
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import JobId, OffloadKey

BlockFailures = Mapping[int, TierError]
"""Maps an index in the job to the block's error. Absent blocks succeeded; empty means all did."""


@dataclass(frozen=True, slots=True)
class JobFinished:
    """No byte of a job moves any more; the owner may reuse the job's memory."""

    job_id: JobId
    failures: Mapping[int, Exception] = field(default_factory=dict)
    """Index in the job -> error of that block; from an external manager, of any class."""
    job_error: Exception | None = None
    """Why the job failed as a whole; then no block succeeded."""
    seconds: float = 0.0
    """Time from the actor's acceptance of the job to its end."""
    outdated: frozenset[OffloadKey] = frozenset()
    """Blocks with an announcement newer than the job's start; it overrides the job's result."""
    queue_s: float | None = field(default=None, compare=False)
    """The part of `seconds` spent queued before the tier started; None: not started, or unknown."""


@dataclass(frozen=True, slots=True)
class JobOverdue:
    """A job's deadline passed while its copy was running; the copy still uses its memory."""

    job_id: JobId
    error: Exception | None


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """An existence probe ended; keys not in `present` are absent."""

    generation: int
    present: frozenset[OffloadKey]
    error: TierError | None = field(default=None, compare=False)
    """Set if the probe failed; then `present` is empty."""
    seconds: float = field(default=0.0, compare=False)
    """Time from the actor's acceptance of the probe to its end."""


@dataclass(frozen=True, slots=True)
class BlocksAppeared:
    """A tier announces blocks that it has, at its start or later."""

    keys: tuple[OffloadKey, ...] | KeyMap
    """Ownership of a `KeyMap` passes to the index; its integer values are ignored."""


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """A tier dropped blocks to make room, or because they were corrupt."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementRefused:
    """A tier announced a malformed key; a valid key is a block hash followed by 4 bytes."""

    num_keys: int


TierOperation = Literal["contains", "delete", "list"]
"""The method of a tier that a management call uses."""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A management call of a tier has ended, successfully or not."""

    call_id: int
    operation: TierOperation
    keys: frozenset[OffloadKey] = frozenset()
    """The blocks that are present, or that are gone for good."""
    cursor: str | None = None
    """Where a listing continues; None at its end."""
    error: TierError | None = field(default=None, compare=False)
    """Why the others are unknown or may still be there; None: there are none."""


TierEvent = (
    JobFinished
    | JobOverdue
    | ProbeAnswered
    | BlocksAppeared
    | BlocksEvicted
    | AnnouncementRefused
    | CallEnded
)
