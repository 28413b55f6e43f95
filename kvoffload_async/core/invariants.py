"""Invariants of the planner's state between any two calls, and their check.

In production they run with `check_invariants`, at the end of every step. Tests check further ones:
see `tests/planner_invariants.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from kvoffload_async.core.planner import Planner
from kvoffload_async.errors import InvariantError
from kvoffload_async.types import (
    ENGINE_REQ_ID,
    JobMetadata,
    OffloadKey,
    block_text,
)

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Invariant(Generic[S]):
    """A condition that always holds.

    Attributes:
        name: Its identifier, P1 to P28.
        statement: The condition.
        violations: Returns a text for each violation.
    """

    name: str
    statement: str
    violations: Callable[[S], Iterable[str]]

    def enforce(self, subject: S) -> None:
        """Raise InvariantError if there are any violations."""
        found = list(self.violations(subject))
        if found:
            raise InvariantError(f"{self.name} ({self.statement}): {'; '.join(found)}")


def tickets_are_true(planner: Planner) -> Iterator[str]:
    """P26: tickets and the queue agree with the requests and with the blocks in the primary."""
    queue = planner.room.queue
    pins = {key: count for key, _, count in planner.primary.resident()}
    for request in {*planner.requests.values(), *queue}:
        name = f"request {request.ctx.req_id!r}"
        if request.is_queued != (request in queue):
            yield f"{name} counts as queued: {request.is_queued}"
        if request.is_queued and request.ticket:
            yield f"{name} is in the queue, but has a ticket"
        absent = request.ticket.keys() - pins.keys()
        if absent:
            yield f"{len(absent)} blocks of the ticket of {name} are absent"
        num_written = sum(pins.get(key, 0) < 0 for key in request.ticket)
        if num_written != request.awaits:
            yield f"{name} awaits {request.awaits} blocks of its ticket, of {num_written}"
        if not request.ticket.keys() <= request.wants.keys():
            yield f"the ticket of {name} names blocks that it does not want"


def jobs_are_counted(planner: Planner) -> Iterator[str]:
    """P1: the counters and the ledgers agree on the number of jobs under way."""
    counters = planner.counters
    under_way = counters.jobs_submitted - counters.job_results
    if under_way != len(planner.jobs):
        yield (
            f"{counters.jobs_submitted} jobs were submitted and {counters.job_results} reported, "
            f"but {len(planner.jobs)} are under way"
        )


def counters_add_up(planner: Planner) -> Iterator[str]:
    """P24: each counter equals the sum of its parts."""
    of_planner, of_primary = planner.counters, planner.primary.counters
    loading = planner.primary.loading
    sums = [
        (
            "lookups of the planner",
            of_planner.lookups,
            of_planner.hits
            + of_planner.pending_hits
            + of_planner.retries
            + sum(of_planner.misses.values()),
        ),
        (
            "lookups of the primary",
            of_primary.lookups,
            of_primary.hits + of_primary.pending_hits + of_primary.misses,
        ),
        ("pins of loads", loading.num_pins, loading.total().total()),
    ]
    for tier in planner.tiers:
        of, name = tier.counters, tier.name
        ended = of.finished_jobs + tier.jobs.unfinished_count
        sums += [
            (f"lookups of {name}", of.lookups, of.hits + of.misses + of.undecided),
            (f"jobs of {name}", of.submitted_jobs, ended),
            (f"failed jobs of {name}", of.failed_jobs, sum(of.failed_jobs_by_error.values())),
            (f"dropped blocks of {name}", of.dropped_blocks, sum(of.dropped.values())),
        ]
    for what, whole, parts in sums:
        if whole != parts:
            yield f"{whole} {what} are counted, but their parts are {parts}"


def half_open_breakers_have_a_try(planner: Planner) -> Iterator[str]:
    """P25: a half-open breaker has a trial under way."""
    for tier in planner.tiers:
        for direction in tier.health.stuck_breakers(list(tier.jobs.unreported())):
            yield f"no try is under way for the {direction} of {tier.name}"


def slots_are_partitioned(planner: Planner) -> Iterator[str]:
    """P3: each slot is free, held, or in use by one block."""
    primary = planner.primary
    free, held = list(primary.pool.unused), list(primary.pool.holds)
    blocks = list(primary.resident())
    uses = Counter(chain(free, held, (slot for _, slot, _ in blocks)))
    for slot in uses.keys() - range(primary.num_slots):
        yield f"slot {slot} does not exist"
    for slot in range(primary.num_slots):
        if uses[slot] != 1:
            yield f"slot {slot} has {uses[slot]} uses"
    true_counts = {
        "free": len(free),
        "writing": sum(refs < 0 for _, _, refs in blocks),
        "idle": sum(refs == 0 for _, _, refs in blocks),
        "pinned": sum(refs > 0 for _, _, refs in blocks),
        "held": len(held),
    }
    if primary.counts != true_counts:
        yield f"the counts are {primary.counts}, but should be {true_counts}"
    for key, slot, _ in blocks:
        if primary.key_of(slot) != key:
            yield f"{block_text(key)} is in slot {slot}, which has another's key"


def every_use_has_its_reason(planner: Planner) -> Iterator[str]:
    """P4: each pin, each write and each job's slot is accounted for."""
    blocks = {key: (slot, refs) for key, slot, refs in planner.primary.resident()}
    yield from _pins(planner, {key: refs for key, (_, refs) in blocks.items() if refs >= 0})
    yield from _writes(planner, {key for key, (_, refs) in blocks.items() if refs < 0})
    yield from _slots_of_jobs(planner, {key: slot for key, (slot, _) in blocks.items()})


def promotions_are_single_and_bounded(planner: Planner) -> Iterator[str]:
    """P7: a key has at most one promotion under way; promotions and tickets fit the budget."""
    for key, count in Counter(_promoted_keys(planner)).items():
        if count > 1:
            yield f"{block_text(key)} has {count} promotions under way"
    room = planner.room
    in_flight = set(_promoted_keys(planner))
    if in_flight != set(room.in_flight):
        yield f"{len(room.in_flight)} promotions are counted, but {len(in_flight)} are under way"
    tickets = {key for request in planner.requests.values() for key in request.ticket}
    if len(tickets) != room.named_blocks or room.named != len(tickets | in_flight):
        yield f"{room.named} slots are named, not {len(tickets | in_flight)}"
    if len(planner.pins) > planner.pins.most or planner.primary.num_kept != len(planner.pins):
        yield f"{len(planner.pins)} blocks are pinned, at most {planner.pins.most} may be"
    for share, own in planner.primary.keys_by_share(list(tickets | in_flight)):
        if not room.named_in(share) == len(own) <= share.most - room.reserved_in(share):
            yield f"{len(own)} slots are named, not {room.named_in(share)} of {share.most}"


def tenants_keep_to_their_slots(planner: Planner) -> Iterator[str]:
    """P28: a tenant has no more slots than its quota, and its blocks are counted correctly."""
    primary = planner.primary
    resident = list(primary.resident())
    kept = dict.fromkeys(primary.shares, 0)
    for share, those in primary.keys_by_share([key for key, _, _ in resident]):
        kept[share] = sum(key in planner.pins for key in those)
    debts = primary.debts()
    used = dict(primary.by_share([slot for _, slot, _ in resident]))
    held = {share: list(own) for share, own in primary.by_share(primary.pool.holds)}
    refs = {slot: count for _, slot, count in resident}
    for number, share in enumerate(primary.shares):
        own = list(used.get(share, ()))
        idle = [slot for slot in own if not refs[slot]]
        num_held = len(held.get(share, ()))
        counted = (share.free, share.held, share.idle, share.protected, share.kept)
        protected = sum(slot in debts for slot in idle)
        found = (share.most - len(own) - num_held, num_held, len(idle) - protected, protected)
        if counted != (*found, kept[share]):
            yield f"tenant {number} counts {counted}, but has {(*found, kept[share])}"
        if share.free < 0:
            yield f"tenant {number} has {-share.free} slots more than its {share.most}"


def copies_are_true_and_bounded(planner: Planner) -> Iterator[str]:
    """P21: each tier's slots are counted correctly; its stores stay within their bound."""
    for tier in planner.tiers:
        loads, stores = 0, 0
        for job in chain(tier.jobs.unreported(), (late.job for late in tier.jobs.orphaned())):
            loads += len(job.keys) if job.is_promotion else 0
            stores += 0 if job.is_promotion else len(job.keys)
        counted = (tier.promotion_slots, tier.cascading_blocks)
        if counted != (loads, stores):
            yield f"tier {tier.name!r} counts {counted} slots, but occupies {(loads, stores)}"
        if stores > planner.room.copies_each:
            yield f"{stores} blocks are stored in {tier.name!r}, not {planner.room.copies_each}"


def who_has_a_right_to_room_waits(planner: Planner) -> Iterator[str]:
    """P22: only a request that waits, or loads in this step, has a ticket or is in the queue.

    Or one whose blocks were promoted ahead, while nobody waits in the queue.
    """
    room = planner.room
    if {each.share for each in room.queue} & {each.share for each in room.early}:
        yield f"{len(room.early)} early tickets beside a queue"
    for request in {*planner.requests.values(), *room.queue}:
        loads = not request.is_finished and room.is_used(request)
        is_early = request in room.early
        if is_early and (request.waits or not request.ticket):
            yield f"request {request.ctx.req_id!r} has been looked up, or has no early ticket"
        if (request.ticket or request.is_queued) and not (request.waits or loads or is_early):
            yield f"request {request.ctx.req_id!r} has a ticket or is in the queue, but waits not"


def finished_requests_wait_for_something(planner: Planner) -> Iterator[str]:
    """P10: the tiers were notified of each request that can submit no more jobs."""
    for ctx, request in planner.requests.items():
        if request.can_end:
            yield f"the tiers were not told that request {ctx.req_id!r} has finished"
    for job in _writers(planner):
        if job.req_context.req_id == ENGINE_REQ_ID:
            yield f"promotion {job.job_id} is of the engine's own request"


def policy_ranks_what_is_resident(planner: Planner) -> Iterator[str]:
    """P13: the eviction policy ranks exactly the resident blocks."""
    primary = planner.primary
    ranked = list(primary.policy.resident())
    resident = {slot: key for key, slot, _ in primary.resident()}
    for slot, count in Counter(ranked).items():
        if count > 1:
            yield f"slot {slot} is ranked {count} times"
    yield from (f"slot {slot} is ranked, but free" for slot in set(ranked) - resident.keys())
    yield from (
        f"{block_text(resident[slot])} is resident, but not ranked"
        for slot in resident.keys() - set(ranked)
    )
    yield from (f"{block_text(key)} may go, but the policy skips it" for key in primary.forgotten())
    yield from primary.policy.violations()
    for hinted in [share.hinted for share in primary.shares if share.hinted is not None]:
        yield from hinted.violations()
        marked = {slot for slot in range(primary.num_slots) if hinted.is_marked(slot)}
        yield from (f"slot {slot} is marked by a hint, but free" for slot in marked - set(resident))


def pending_work_is_known(planner: Planner) -> Iterator[str]:
    """P16: work is pending exactly while a job has no result, or a block can cascade."""
    parked = [ctx.req_id for ctx, request in planner.requests.items() if request.parked]
    cascades = planner.cascades
    takers = [
        tier.name
        for i, tier in enumerate(planner.tiers)
        if cascades.queues[i].count
        and planner.room.room_to_store(i)
        and not cascades.queues[i].is_shut
    ]
    deletes = planner.deletions.has_work
    if planner.has_pending_work != bool(planner.jobs or parked or takers or deletes):
        yield (
            f"has_pending_work is {planner.has_pending_work} with {len(planner.jobs)} jobs, "
            f"parked keys of {parked}, blocks pending for {takers}, blocks to delete: {deletes}"
        )


def deleted_blocks_are_barred(planner: Planner) -> Iterator[str]:
    """P27: exactly the keys of the deletions under way are barred."""
    running = planner.deletions.running
    barred = [("the primary", planner.primary.barred, [each.in_primary for each in running])]
    for index, tier in enumerate(planner.tiers):
        barred.append((tier.name, tier.barred, [index in each.left for each in running]))
    for name, keys, is_named in barred:
        named = [each.keys for each, there in zip(running, is_named, strict=True) if there]
        if Counter(map(id, named)) != Counter(map(id, keys.sets)):
            yield f"{len(keys.sets)} deletions bar keys of {name}, not {len(named)}"


def what_is_pending_is_readable(planner: Planner) -> Iterator[str]:
    """P23: pending blocks are readable, and are protected while their tier works."""
    readable = {slot for _, slot, refs in planner.primary.resident() if refs >= 0}
    for index, (tier, queue) in enumerate(zip(planner.tiers, planner.cascades.queues, strict=True)):
        for slot in set(queue.slots()) - readable:
            yield f"tier {tier.name!r} has the pending block in slot {slot}, which is not readable"
        under_way = {
            slot
            for at, job in _reading_jobs(planner)
            if at == index
            for slot in job.block_ids.tolist()
        }
        yield from (f"tier {tier.name!r}: {text}" for text in queue.violations(under_way))
    queues, primary = planner.cascades.queues, planner.primary
    protected = dict(Counter(chain.from_iterable(queue.protected() for queue in queues)))
    if primary.debts() != protected:
        yield f"slots are protected {primary.debts()} times, but should be {protected} times"
    unpinned = sum(slot in protected and not refs for _, slot, refs in primary.resident())
    if primary.protected_blocks != unpinned:
        yield f"{primary.protected_blocks} protected blocks are counted, not {unpinned}"
    is_pending = any(queue.count for queue in planner.cascades.queues)
    if is_pending != (planner.primary.on_evicted is not None):
        yield "evictions are watched although nothing is pending, or not although something is"


# -- parts of P4 and P23 ------------------------------------------------------------------------


def _pins(planner: Planner, pins: dict[OffloadKey, int]) -> Iterator[str]:
    reasons = planner.primary.loading.total()
    for job in _readers(planner):
        reasons.update(job.keys)
    reasons.update(
        {key for request in planner.requests.values() for key in request.ticket if key in pins}
    )
    reasons.update(planner.room.guarded)
    reasons.update(key for key in pins if key in planner.pins)
    for key in pins.keys() | reasons.keys():
        if pins.get(key, 0) != reasons[key]:
            yield f"{block_text(key)} has {pins.get(key, 0)} pins for {reasons[key]} reasons"


def _writes(planner: Planner, writing: set[OffloadKey]) -> Iterator[str]:
    reasons = Counter(_promoted_keys(planner))
    for request in planner.requests.values():
        reasons.update(request.writing)
    for key in writing | reasons.keys():
        if reasons[key] != (key in writing):
            state = "is" if key in writing else "is not"
            yield f"{block_text(key)} {state} being written, for {reasons[key]} reasons"


def _slots_of_jobs(planner: Planner, slots: dict[OffloadKey, int]) -> Iterator[str]:
    """Check the jobs' slots against the slots of their keys and the held slots."""
    held = {
        slot
        for late in planner.orphaned.values()
        if late.holds_slots
        for slot in late.job.block_ids.tolist()
    }
    holds = planner.primary.pool.holds
    if held != holds.keys():
        yield f"slots {list(holds)} are held, but copies touch {sorted(held)}"
    named = [
        (f"job {job.job_id}", key, slot)
        for job in chain(_readers(planner), _writers(planner))
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True)
    ]
    for who, key, slot in named:
        if slots.get(key) != slot:
            yield f"{who} names slot {slot}, but {block_text(key)} is in {slots.get(key)}"


def _readers(planner: Planner) -> Iterator[JobMetadata]:
    """Return the cascades whose copies may still run; each pins its blocks."""
    return (job for _, job in _reading_jobs(planner))


def _reading_jobs(planner: Planner) -> Iterator[tuple[int, JobMetadata]]:
    """Return (tier index, cascade) for the cascades whose copies may still run."""
    for index, tier in enumerate(planner.tiers):
        yield from ((index, job) for job in tier.jobs.unreported() if not job.is_promotion)
        yield from ((index, r.job) for r in tier.jobs.orphaned() if not r.holds_slots)


def _writers(planner: Planner) -> Iterator[JobMetadata]:
    return (job for _, job in planner.jobs.values() if job.is_promotion)


def _promoted_keys(planner: Planner) -> Iterator[OffloadKey]:
    return chain.from_iterable(job.keys for job in _writers(planner))


STATE_INVARIANTS: tuple[Invariant[Planner], ...] = (
    Invariant("P1", "every accepted job gets exactly one result", jobs_are_counted),
    Invariant(
        "P3", "free, writing, idle, pinned and held partition the slots", slots_are_partitioned
    ),
    Invariant(
        "P4",
        "no slot is free while a job may touch it, and every pin and write has its reason",
        every_use_has_its_reason,
    ),
    Invariant(
        "P7",
        "at most one promotion per key is in flight; with tickets they leave slots to stores",
        promotions_are_single_and_bounded,
    ),
    Invariant(
        "P10",
        "each tier hears once of a request's begin and end, the engine's own for late cascades "
        "included, and of no job outside of them",
        finished_requests_wait_for_something,
    ),
    Invariant(
        "P13",
        "the policy ranks exactly the resident keys, and skips none that may go; hints mark no "
        "others",
        policy_ranks_what_is_resident,
    ),
    Invariant(
        "P16",
        "work is pending if and only if a job has no result, or a block waits to cascade and can",
        pending_work_is_known,
    ),
    Invariant(
        "P21",
        "each tier occupies what it counts, and no more than its part for stores",
        copies_are_true_and_bounded,
    ),
    Invariant(
        "P22",
        "only a request that waits, loads in this step or is promoted ahead has a ticket, and only "
        "one that waits a position in the queue",
        who_has_a_right_to_room_waits,
    ),
    Invariant(
        "P23",
        "what is pending for a tier is readable and watched, is protected while the tier is in "
        "order, and goes to it as soon as there is room",
        what_is_pending_is_readable,
    ),
    Invariant("P27", "exactly what deletions under way name is barred", deleted_blocks_are_barred),
    Invariant(
        "P28", "a tenant's slots are counted, and within its quota", tenants_keep_to_their_slots
    ),
    Invariant("P24", "counters of parts add up to that of the whole", counters_add_up),
    Invariant(
        "P25",
        "a half-open breaker waits for a try that is under way",
        half_open_breakers_have_a_try,
    ),
    Invariant(
        "P26",
        "a ticket names blocks that are there or on their way, and who waits for one holds nothing",
        tickets_are_true,
    ),
)


def check_state(planner: Planner) -> None:
    """Check all state invariants; the cost grows with the slots of the primary.

    Raises:
        InvariantError: An invariant is violated; the message names it.
    """
    for invariant in STATE_INVARIANTS:
        invariant.enforce(planner)
