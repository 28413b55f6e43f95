"""What holds of a history; one that has forgotten its beginning proves less, but nothing false."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator

from kvoffload_async.testing.invariants.history import (
    AllQuiet,
    BlocksTouched,
    CallReturned,
    ContentRead,
    ContentWritten,
    CopyEnded,
    DeviceBlockOverwritten,
    DeviceReadBegan,
    DeviceReadEnded,
    EventsEmitted,
    FileFound,
    FileKind,
    History,
    JobAccepted,
    RequestClosed,
    RequestDecided,
    RequestDeferred,
    RequestOpened,
    ResidentSeen,
    ResultTaken,
    RoomAsked,
    RunEnded,
    StaleCompletionSeen,
    StepClosed,
    TierPolled,
)
from kvoffload_async.types import ENGINE_REQ_ID, JobId, OffloadKey


def one_result_a_job(history: History) -> Iterator[str]:
    """P1: at most one at any time, exactly one when all is quiet."""
    yield from _one_answer_a_job(history)
    yield from _one_release_a_disowned_job(history)


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
                    if count > 1:
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
    owed: set[tuple[int, JobId]] = set()
    for fact in history:
        match fact:
            case JobAccepted(tier, job_id):
                if (tier, job_id) in owed:
                    yield f"tier {tier} accepted job {job_id} twice"
                owed.add((tier, job_id))
            case ResultTaken(tier, job_id):
                if (tier, job_id) not in owed and history.is_complete:
                    yield f"tier {tier} answered job {job_id}, which it did not owe"
                owed.discard((tier, job_id))
            case AllQuiet():
                yield from (f"tier {tier} never answered job {job}" for tier, job in sorted(owed))
            case _:
                pass


def _one_release_a_disowned_job(history: History) -> Iterator[str]:
    late: set[tuple[int, JobId]] = set()
    for fact in history:
        match fact:
            case ResultTaken(tier, job_id, disowned=True):
                late.add((tier, job_id))
            case CopyEnded(tier, job_id):
                if (tier, job_id) not in late and history.is_complete:
                    yield f"tier {tier} released job {job_id}, which was not disowned"
                late.discard((tier, job_id))
            case AllQuiet():
                yield from (f"tier {tier} never released job {job}" for tier, job in sorted(late))
            case _:
                pass
