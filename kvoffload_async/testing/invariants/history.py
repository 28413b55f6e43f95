"""A history: a bounded list of facts, for invariants that no single state can show.

Whoever sees a fact records it: the planner's effects through `fact_of`, everything else (results, a
facade's calls, a device's blocks, a directory's files) by an observer at that place.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvoffload_async.core.effects import (
    BeginRequest,
    FinishRequest,
    StartJob,
    TierEffect,
    TouchBlocks,
)
from kvoffload_async.core.primary import Primary
from kvoffload_async.types import JobId, OffloadKey

# -- jobs and requests --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """A tier took a job on."""

    tier: int
    job_id: JobId
    req_id: str
    is_promotion: bool
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ResultTaken:
    """The result of a job was taken in."""

    tier: int
    job_id: JobId
    disowned: bool = False


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The copy of a disowned job has ended."""

    tier: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class StepClosed:
    """A scheduler step is over."""


@dataclass(frozen=True, slots=True)
class AllQuiet:
    """Everything has ended: no job, copy or request is left."""


@dataclass(frozen=True, slots=True)
class TierPolled:
    """A tier's results were polled through the gate of the step."""

    tier: int


@dataclass(frozen=True, slots=True)
class RequestOpened:
    """A tier was told that a request began."""

    tier: int
    req_id: str


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """A tier was told that nothing more will be submitted for a request."""

    tier: int
    req_id: str


@dataclass(frozen=True, slots=True)
class BlocksTouched:
    """A tier was told which blocks were used, within a request if it has a say in its jobs."""

    tier: int
    req_id: str | None


@dataclass(frozen=True, slots=True)
class RequestDeferred:
    """A request's lookups ended undecided; they must be decided within so many steps."""

    req_id: str
    within_steps: int


@dataclass(frozen=True, slots=True)
class RequestDecided:
    """A request's lookups ended with an answer, or the request was given up."""

    req_id: str


@dataclass(frozen=True, slots=True)
class CallReturned:
    """A call of the facade came back."""

    call: str
    seconds: float
    budget_s: float


# -- blocks -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoomAsked:
    """The primary was asked for slots.

    Attributes:
        offered: The keys that were offered.
        busy: Keys that were pinned or being written before the call.
        granted: Whether the answer was not None.
        evicted: Keys that made room.
        before: `fingerprint` of the primary before the call.
        after: The same afterwards.
    """

    offered: tuple[OffloadKey, ...]
    busy: frozenset[OffloadKey]
    granted: bool
    evicted: tuple[OffloadKey, ...]
    before: Hashable
    after: Hashable


@dataclass(frozen=True, slots=True)
class ContentWritten:
    """Bytes were given away under a key; `content` is a digest of them."""

    key: OffloadKey
    content: Hashable


@dataclass(frozen=True, slots=True)
class ContentRead:
    """Bytes were read on a hit; `content` is a digest of them."""

    key: OffloadKey
    content: Hashable


@dataclass(frozen=True, slots=True)
class EventsEmitted:
    """The owner of a medium announced a change; metadata-only removals are left out."""

    owner: str
    keys: tuple[OffloadKey, ...]
    removed: bool


@dataclass(frozen=True, slots=True)
class ResidentSeen:
    """What a medium really held when all of its events so far had been recorded."""

    owner: str
    keys: frozenset[OffloadKey]


@dataclass(frozen=True, slots=True)
class StaleCompletionSeen:
    """A completion from before a reset arrived; `fingerprint`s around it."""

    job_id: JobId
    before: Hashable
    after: Hashable


# -- device, directory, runs --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceReadBegan:
    """A store began to depend on device blocks."""

    job_id: JobId
    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class DeviceReadEnded:
    """The store has read its device blocks."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class DeviceBlockOverwritten:
    """Somebody else's bytes were put into a device block."""

    block: int


class FileKind(enum.Enum):
    """What a file in a tier's directory claims to be."""

    BLOCK = enum.auto()
    TEMPORARY = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class FileFound:
    """A file lay in a tier's directory, after a crash or at any other time."""

    path: str
    kind: FileKind
    size_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """One run of a scenario ended in a state; runs differ in completion order or threads."""

    scenario: str
    run: str
    outcome: Hashable


Fact = (
    JobAccepted
    | ResultTaken
    | CopyEnded
    | StepClosed
    | AllQuiet
    | TierPolled
    | RequestOpened
    | RequestClosed
    | BlocksTouched
    | RequestDeferred
    | RequestDecided
    | CallReturned
    | RoomAsked
    | ContentWritten
    | ContentRead
    | EventsEmitted
    | ResidentSeen
    | StaleCompletionSeen
    | DeviceReadBegan
    | DeviceReadEnded
    | DeviceBlockOverwritten
    | FileFound
    | RunEnded
)

F = TypeVar("F")


class History:
    """Facts, oldest first; the oldest are forgotten when there are more than `bound`."""

    def __init__(self, bound: int = 100_000) -> None:
        self._facts: deque[Fact] = deque(maxlen=bound)
        self.recorded = 0

    def record(self, *facts: Fact) -> None:
        """Append facts."""
        self._facts.extend(facts)
        self.recorded += len(facts)

    @property
    def is_complete(self) -> bool:
        """Whether nothing has been forgotten; without its beginning, a history proves less."""
        return self.recorded == len(self._facts)

    def of(self, kind: type[F]) -> Iterator[F]:
        """Iterate over the facts of one kind, oldest first."""
        return (fact for fact in self._facts if isinstance(fact, kind))

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)


def fact_of(tier: int, effect: TierEffect) -> Fact | None:
    """Return the fact in an effect that the planner left for a tier; None if there is none."""
    match effect:
        case StartJob(job):
            req_id = job.req_context.req_id
            return JobAccepted(tier, job.job_id, req_id, job.is_promotion, len(job.keys))
        case TouchBlocks(ctx=ctx):
            return BlocksTouched(tier, None if ctx is None else ctx.req_id)
        case BeginRequest(ctx):
            return RequestOpened(tier, ctx.req_id)
        case FinishRequest(ctx):
            return RequestClosed(tier, ctx.req_id)
        case _:
            return None


def fingerprint(primary: Primary) -> Hashable:
    """Return a value that differs whenever two states of a primary differ in what is observable."""
    return (
        tuple(sorted(primary.resident())),
        tuple(primary.ranked()),
        tuple(primary.pool.free_slots()),
        frozenset(primary.pool.retained_slots()),
        frozenset(primary.loads().items()),
    )
