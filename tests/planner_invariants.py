"""The invariants P1 to P28 that no single state can show, and their checks.

Some hold when everything has come to rest, some only of a whole history; those that hold of any
state are `core.invariants`.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvoffload_async.core.invariants import STATE_INVARIANTS, Invariant, check_state
from kvoffload_async.core.ledger import StartJob, TierEffect, TouchBlocks
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.types import ENGINE_REQ_ID, JobId, LookupResult, OffloadKey, ReqContext

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
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The copy of an orphaned job has ended."""

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


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Stands among the effects of a tier where the tier was told of the end of a request."""

    ctx: ReqContext


def fact_of(tier: int, effect: TierEffect | FinishRequest) -> Fact | None:
    """Return the fact in an effect that the planner left for a tier; None if there is none."""
    match effect:
        case StartJob(job):
            req_id = job.req_context.req_id
            return JobAccepted(tier, job.job_id, req_id, job.is_promotion, len(job.keys))
        case TouchBlocks(ctx=ctx):
            return BlocksTouched(tier, None if ctx is None else ctx.req_id)
        case FinishRequest(ctx):
            return RequestClosed(tier, ctx.req_id)
        case _:
            return None


def fingerprint(primary: Primary) -> Hashable:
    """Return a value that differs whenever two states of a primary differ in what is observable."""
    return (
        tuple(sorted(primary.resident())),
        tuple(primary.keys_of(tuple(primary.policy.resident()))),
        tuple(primary.pool.unused),
        frozenset(primary.pool.holds),
        frozenset(primary.loading.total().items()),
    )


def one_result_a_job(history: History) -> Iterator[str]:
    """P1: at most one at any time, exactly one when all is quiet."""
    yield from _one_answer_a_job(history)
    yield from _one_release_an_orphaned_job(history)


def only_idle_blocks_are_evicted(history: History) -> Iterator[str]:
    """P5."""
    for fact in history.of(RoomAsked):
        for key in fact.evicted:
            if key in fact.busy:
                yield f"block {key.hex()} was evicted while in use"
            if key in fact.offered:
                yield f"block {key.hex()} was evicted by its own offer"


def refusals_change_nothing(history: History) -> Iterator[str]:
    """P6."""
    for fact in history.of(RoomAsked):
        if not fact.granted and (fact.evicted or fact.before != fact.after):
            offered = ", ".join(key.hex() for key in fact.offered)
            yield f"refusing {offered} changed {fact.before} into {fact.after}"


def reads_see_what_was_written(history: History) -> Iterator[str]:
    """P8."""
    written: dict[OffloadKey, Hashable] = {}
    for fact in history:
        match fact:
            case ContentWritten(key, content):
                if written.setdefault(key, content) != content:
                    yield f"block {key.hex()} was written with two contents"
            case ContentRead(key, content) if key in written:
                if written[key] != content:
                    yield f"block {key.hex()} read as {content}, not {written[key]}"
            case ContentRead(key) if history.is_complete:
                yield f"block {key.hex()} was read, but never written"
            case _:
                pass


def requests_are_framed(history: History) -> Iterator[str]:
    """P10."""
    is_open: dict[tuple[int, str], bool] = {}
    # What began before the history did is taken to be open.
    by_default = not history.is_complete
    for fact in history:
        match fact:
            case RequestOpened(tier, req_id):
                if is_open.get((tier, req_id)):
                    yield f"tier {tier} was told twice that request {req_id!r} began"
                is_open[tier, req_id] = True
            case RequestClosed(tier, req_id):
                if not is_open.get((tier, req_id), by_default):
                    yield f"tier {tier} was told the end of request {req_id!r}, which was not open"
                is_open[tier, req_id] = False
            case BlocksTouched(tier, str(req_id)) if not is_open.get((tier, req_id), by_default):
                yield f"tier {tier} was told of a use within request {req_id!r}, which was not open"
            case JobAccepted(tier, job_id, req_id, is_promotion):
                if is_promotion and req_id == ENGINE_REQ_ID:
                    yield f"tier {tier} got promotion {job_id} for the engine's own request"
                if not is_open.get((tier, req_id), by_default):
                    yield f"tier {tier} got job {job_id} for request {req_id!r}, which was not open"
            case _:
                pass


def steps_are_batched(history: History) -> Iterator[str]:
    """P11."""
    seen: Counter[tuple[int, str]] = Counter()
    for fact in history:
        match fact:
            case TierPolled(tier):
                seen[tier, "polls"] += 1
            case JobAccepted(tier, req_id=req_id, is_promotion=True):
                seen[tier, f"promotions for request {req_id!r}"] += 1
            case BlocksTouched(tier):
                seen[tier, "touches"] += 1
            case StepClosed():
                for (tier, what), count in seen.items():
                    if count > (2 if what == "polls" else 1):  # one each for lookups and for stores
                        yield f"a step had {count} {what} at tier {tier}"
                seen.clear()
            case _:
                pass


def events_tell_all(history: History) -> Iterator[str]:
    """P12."""
    if not history.is_complete:
        return
    replayed: defaultdict[str, set[OffloadKey]] = defaultdict(set)
    for fact in history:
        match fact:
            case EventsEmitted(owner, keys, removed=True):
                replayed[owner].difference_update(keys)
            case EventsEmitted(owner, keys):
                replayed[owner].update(keys)
            case ResidentSeen(owner, resident):
                for key in replayed[owner] ^ resident:
                    truth = "resident" if key in resident else "gone"
                    yield f"block {key.hex()} of {owner} is {truth}, but its events say otherwise"
            case _:
                pass


def deferrals_end(history: History) -> Iterator[str]:
    """P14."""
    left: dict[str, int] = {}
    for fact in history:
        match fact:
            case RequestDeferred(req_id, within_steps):
                left.setdefault(req_id, within_steps)
            case RequestDecided(req_id):
                left.pop(req_id, None)
            case StepClosed():
                left = {req_id: steps - 1 for req_id, steps in left.items()}
                for req_id in [req_id for req_id, steps in left.items() if steps < 0]:
                    yield f"request {req_id!r} is still deferred after its last step"
                    del left[req_id]
            case _:
                pass


def stale_completions_change_nothing(history: History) -> Iterator[str]:
    """P15."""
    for fact in history.of(StaleCompletionSeen):
        if fact.before != fact.after:
            yield f"job {fact.job_id}, from before the reset, made {fact.after} of {fact.before}"


def calls_keep_their_budget(history: History) -> Iterator[str]:
    """P17."""
    for fact in history.of(CallReturned):
        if fact.seconds > fact.budget_s:
            yield f"{fact.call} took {fact.seconds:.6f} s of {fact.budget_s:.6f}"


def device_reads_are_fenced(history: History) -> Iterator[str]:
    """P18."""
    reading: dict[JobId, frozenset[int]] = {}
    for fact in history:
        match fact:
            case DeviceReadBegan(job_id, blocks):
                reading[job_id] = blocks
            case DeviceReadEnded(job_id):
                reading.pop(job_id, None)
            case DeviceBlockOverwritten(block):
                for job_id in [job_id for job_id, blocks in reading.items() if block in blocks]:
                    yield f"device block {block} was overwritten while store {job_id} read it"
            case _:
                pass


def files_are_whole(history: History) -> Iterator[str]:
    """P19."""
    for fact in history.of(FileFound):
        if fact.kind is FileKind.BLOCK and fact.size_bytes != fact.block_bytes:
            yield f"{fact.path} has {fact.size_bytes} of {fact.block_bytes} bytes"
        if fact.kind is FileKind.OTHER:
            yield f"{fact.path} is neither a block nor temporary"


def outcomes_agree(history: History) -> Iterator[str]:
    """P20."""
    first: dict[str, RunEnded] = {}
    for fact in history.of(RunEnded):
        other = first.setdefault(fact.scenario, fact)
        if fact.outcome != other.outcome:
            yield (
                f"{fact.scenario}: run {fact.run} ended in {fact.outcome}, "
                f"run {other.run} in {other.outcome}"
            )


# -- parts of P1 --------------------------------------------------------------------------------


def _one_answer_a_job(history: History) -> Iterator[str]:
    pending: set[tuple[int, JobId]] = set()
    for fact in history:
        match fact:
            case JobAccepted(tier, job_id):
                if (tier, job_id) in pending:
                    yield f"tier {tier} accepted job {job_id} twice"
                pending.add((tier, job_id))
            case ResultTaken(tier, job_id):
                if (tier, job_id) not in pending and history.is_complete:
                    yield f"tier {tier} answered job {job_id}, which it did not owe"
                pending.discard((tier, job_id))
            case AllQuiet():
                yield from (
                    f"tier {tier} never answered job {job}" for tier, job in sorted(pending)
                )
            case _:
                pass


def _one_release_an_orphaned_job(history: History) -> Iterator[str]:
    late: set[tuple[int, JobId]] = set()
    for fact in history:
        match fact:
            case ResultTaken(tier, job_id, orphaned=True):
                late.add((tier, job_id))
            case CopyEnded(tier, job_id):
                if (tier, job_id) not in late and history.is_complete:
                    yield f"tier {tier} released job {job_id}, which was not orphaned"
                late.discard((tier, job_id))
            case AllQuiet():
                yield from (f"tier {tier} never released job {job}" for tier, job in sorted(late))
            case _:
                pass


@dataclass(frozen=True, slots=True)
class Rest:
    """A planner at rest, and what is known about its surroundings.

    Attributes:
        planner: The planner.
        kept: Keys that were stored, and that no tier has lost since.
        tier_contents: What each tier has.
        counted: For each tier, the keys that were counted as dropped or failed; None: nobody
            knows, and then a key may also be in the primary alone.
    """

    planner: Planner
    kept: Collection[OffloadKey]
    tier_contents: Sequence[Collection[OffloadKey]]
    counted: Sequence[Collection[OffloadKey]] | None = None


def no_job_is_left(rest: Rest) -> Iterator[str]:
    """P1."""
    planner = rest.planner
    if planner.jobs:
        yield f"jobs {sorted(planner.jobs)} have no result"
    if planner.orphaned:
        yield f"the copies of jobs {sorted(planner.orphaned)} have not ended"


def nothing_is_in_use(rest: Rest) -> Iterator[str]:
    """P2."""
    primary = rest.planner.primary
    for key, _slot, refs in primary.resident():
        if refs:
            yield f"block {key.hex()} is {'pinned' if refs > 0 else 'being written'}"
    if primary.counts["held"]:
        yield f"slots {list(primary.pool.holds)} are held"
    if rest.planner.room.named:
        yield f"{rest.planner.room.named} slots are named by tickets and promotions"


def nothing_is_lost(rest: Rest) -> Iterator[str]:
    """P9."""
    if rest.counted is None:
        for key in rest.kept:
            in_primary = rest.planner.primary.lookup(key) is LookupResult.HIT
            if not in_primary and not all(key in contents for contents in rest.tier_contents):
                yield f"block {key.hex()} is lost"
        return
    planner = rest.planner
    for index, contents in enumerate(rest.tier_contents):
        pending = set(planner.primary.keys_of(tuple(planner.cascades.queues[index].slots())))
        counters, counted = planner.tiers[index].counters, rest.counted[index]
        for key in rest.kept:
            if key not in contents and key not in pending and key not in counted:
                yield f"block {key.hex()} is neither in tier {index} nor pending, and not counted"
        if len(counted) > counters.dropped_blocks + counters.failed_store_blocks:
            yield f"tier {index} has lost {len(counted)} blocks, but counted fewer"


def nothing_is_pending(rest: Rest) -> Iterator[str]:
    """P23: with room for it, and a tier in order."""
    for index, queue in enumerate(rest.planner.cascades.queues):
        if queue.count and not queue.is_shut and rest.planner.room.room_to_store(index):
            yield f"tier {index} has pending {queue.count} blocks, and has room"


def no_request_waits(rest: Rest) -> Iterator[str]:
    """P10."""
    for ctx, request in rest.planner.requests.items():
        if request.is_finished:
            yield f"the tiers were not told that request {ctx.req_id!r} has finished"


_STATEMENTS = {invariant.name: invariant.statement for invariant in STATE_INVARIANTS}

REST_INVARIANTS: tuple[Invariant[Rest], ...] = (
    Invariant("P1", _STATEMENTS["P1"], no_job_is_left),
    Invariant("P2", "at rest nothing is pinned, written or held", nothing_is_in_use),
    Invariant(
        "P9",
        "what was stored is in every tier, or pending for it and resident, or counted as lost",
        nothing_is_lost,
    ),
    Invariant("P10", _STATEMENTS["P10"], no_request_waits),
    Invariant("P23", _STATEMENTS["P23"], nothing_is_pending),
)

HISTORY_INVARIANTS: tuple[Invariant[History], ...] = (
    Invariant("P1", _STATEMENTS["P1"], one_result_a_job),
    Invariant(
        "P5",
        "neither a block in use nor one just offered is evicted",
        only_idle_blocks_are_evicted,
    ),
    Invariant("P6", "a refusal changes nothing", refusals_change_nothing),
    Invariant(
        "P8",
        "a hit reads the bytes that were stored under its key",
        reads_see_what_was_written,
    ),
    Invariant("P10", _STATEMENTS["P10"], requests_are_framed),
    Invariant(
        "P11",
        "a step submits one promotion a tier and request, and polls and touches a tier once",
        steps_are_batched,
    ),
    Invariant("P12", "events, replayed, give what is resident", events_tell_all),
    Invariant(
        "P14",
        "every deferred request is decided within a bounded number of steps",
        deferrals_end,
    ),
    Invariant(
        "P15",
        "a completion from before a reset changes nothing",
        stale_completions_change_nothing,
    ),
    Invariant("P17", "no call of the facade exceeds its budget", calls_keep_their_budget),
    Invariant(
        "P18",
        "no device block is overwritten while an unfinished store reads it",
        device_reads_are_fenced,
    ),
    Invariant(
        "P19",
        "a published file has its full length, and anything else is temporary",
        files_are_whole,
    ),
    Invariant(
        "P20",
        "completion order and thread count do not change the outcome",
        outcomes_agree,
    ),
)


def check_quiescent(
    planner: Planner,
    *,
    kept: Collection[OffloadKey] = (),
    tier_contents: Sequence[Collection[OffloadKey]] = (),
    counted: Sequence[Collection[OffloadKey]] | None = None,
) -> None:
    """Check a planner at rest: all jobs, copies, loads, stores and requests have ended.

    Args:
        planner: The planner.
        kept: Keys that were stored, and that no tier has lost since.
        tier_contents: What each tier has; needed for `kept`.
        counted: See `Rest`.

    Raises:
        InvariantError: One does not hold; the message names it.
    """
    check_state(planner)
    rest = Rest(planner, kept, tier_contents, counted)
    for invariant in REST_INVARIANTS:
        invariant.enforce(rest)


def check_history(history: History) -> None:
    """Check a history, finished or not.

    Raises:
        InvariantError: One does not hold; the message names it.
    """
    for invariant in HISTORY_INVARIANTS:
        invariant.enforce(history)
