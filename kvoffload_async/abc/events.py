"""What happened in a tier: past tense, posted by its actor, handled by its owner.

Thread: created on the loop thread, consumed on the owner's; immutable, so that is safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload_async.errors import TierError
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import JobId, OffloadKey

BlockFailures = Mapping[int, TierError]
"""Index in the job -> why that block failed. Blocks that are absent succeeded; empty: all did."""


@dataclass(frozen=True, slots=True)
class JobSettled:
    """The bytes of a job have stopped moving; its memory is the owner's again."""

    job_id: JobId
    failures: Mapping[int, Exception] = field(default_factory=dict)
    """Index in the job -> why that block failed; for an external manager of any class."""
    job_error: Exception | None = None
    """Why the job failed as a whole; then no block succeeded."""
    seconds: float = 0.0
    """From the actor's acceptance to the end."""
    outdated: frozenset[OffloadKey] = frozenset()
    """Blocks of which something was said since the job began: what the job's end says is older."""
    queue_s: float | None = field(default=None, compare=False)
    """Of the seconds, until the tier began with it; None: it never did, or nobody can tell."""


@dataclass(frozen=True, slots=True)
class JobOverdue:
    """A job's deadline passed while its copy was running; the copy still owns its memory."""

    job_id: JobId
    error: Exception | None


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """An existence probe ended; keys that are not in `present` are absent."""

    generation: int
    present: frozenset[OffloadKey]
    error: TierError | None = field(default=None, compare=False)
    """Why the tier did not answer; then nothing is in `present`."""
    seconds: float = field(default=0.0, compare=False)
    """From the actor's acceptance to the end."""


@dataclass(frozen=True, slots=True)
class BlocksAppeared:
    """A tier found blocks that it holds, at its start or later."""

    keys: tuple[OffloadKey, ...] | KeyMap
    """A `KeyMap`, whatever its integers, is the index's from now on."""


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """A tier dropped blocks to make room, or because they were bad."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementRefused:
    """A tier announced what is no key: a block hash and 4 bytes behind it."""

    num_keys: int


TierEvent = (
    JobSettled | JobOverdue | ProbeAnswered | BlocksAppeared | BlocksEvicted | AnnouncementRefused
)
