"""What holds of an engine between any two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kvoffload_async.core.engine import Engine
from kvoffload_async.types import JobMetadata, OffloadKey


def jobs_are_counted(engine: Engine) -> Iterator[str]:
    """P1."""
    counters = engine.counters
    under_way = counters.jobs_submitted - counters.job_results
    if under_way != len(engine.jobs):
        yield (
            f"{counters.jobs_submitted} jobs were submitted and {counters.job_results} reported, "
            f"but {len(engine.jobs)} are under way"
        )


def slots_are_partitioned(engine: Engine) -> Iterator[str]:
    """P3."""
    primary = engine.primary
    free, held = primary.pool.free_slots(), primary.pool.held_slots()
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
            yield f"block {key.hex()} is in slot {slot}, which has another's key"


def every_use_has_its_reason(engine: Engine) -> Iterator[str]:
    """P4."""
    blocks = {key: (slot, refs) for key, slot, refs in engine.primary.resident()}
    yield from _pins(engine, {key: max(refs, 0) for key, (_, refs) in blocks.items()})
    yield from _writes(engine, {key for key, (_, refs) in blocks.items() if refs < 0})
    yield from _slots_of_jobs(engine, {key: slot for key, (slot, _) in blocks.items()})
    for index, tier in enumerate(engine.tiers):
        late = ((copy.tier, copy.job) for copy in engine.disowned.values())
        cascading = sum(
            len(job.keys)
            for at, job in chain(engine.jobs.values(), late)
            if at == index and not job.is_promotion
        )
        if tier.cascading_blocks != cascading:
            yield f"tier {tier.name!r} counts {tier.cascading_blocks} blocks, not {cascading}"


def promotions_are_single_and_capped(engine: Engine) -> Iterator[str]:
    """P7."""
    under_way = Counter(_promoted_keys(engine))
    for key, count in under_way.items():
        if count > 1:
            yield f"block {key.hex()} has {count} promotions under way"
    outstanding = under_way.total() + sum(len(r.held) for r in engine.requests.values())
    counted = engine.promotions.outstanding_slots
    if counted != outstanding:
        yield f"{counted} promotion slots are counted, {outstanding} are outstanding"
    if counted > engine.limits.promotion_slots:
        yield f"{counted} promotion slots exceed the cap of {engine.limits.promotion_slots}"
    for req_id, request in engine.requests.items():
        if request.is_finished and request.held:
            yield f"blocks are kept for request {req_id!r}, which has finished"


def finished_requests_wait_for_something(engine: Engine) -> Iterator[str]:
    """P10."""
    for req_id, request in engine.requests.items():
        if request.can_end:
            yield f"the tiers were not told that request {req_id!r} has finished"


def policy_ranks_what_is_resident(engine: Engine) -> Iterator[str]:
    """P13."""
    primary = engine.primary
    ranked = list(primary.policy.resident())
    resident = {slot: key for key, slot, _ in primary.resident()}
    for slot, count in Counter(ranked).items():
        if count > 1:
            yield f"slot {slot} is ranked {count} times"
    yield from (f"slot {slot} is ranked, but free" for slot in set(ranked) - resident.keys())
    yield from (
        f"block {resident[slot].hex()} is resident, but not ranked"
        for slot in resident.keys() - set(ranked)
    )
    yield from primary.policy.violations()


def pending_work_is_known(engine: Engine) -> Iterator[str]:
    """P16."""
    parked = [req_id for req_id, request in engine.requests.items() if request.parked]
    if engine.has_pending_work != bool(engine.jobs or parked):
        yield (
            f"has_pending_work is {engine.has_pending_work} with {len(engine.jobs)} jobs "
            f"and parked keys of {parked}"
        )


# -- reasons ------------------------------------------------------------------------------------


def _pins(engine: Engine, pins: dict[OffloadKey, int]) -> Iterator[str]:
    reasons = engine.primary.loads()
    for job in _readers(engine):
        reasons.update(job.keys)
    for request in engine.requests.values():
        reasons.update(request.held.keys())
    for key in pins.keys() | reasons.keys():
        if pins.get(key, 0) != reasons[key]:
            yield f"block {key.hex()} has {pins.get(key, 0)} pins for {reasons[key]} reasons"


def _writes(engine: Engine, writing: set[OffloadKey]) -> Iterator[str]:
    reasons = Counter(_promoted_keys(engine))
    for request in engine.requests.values():
        reasons.update(request.writing)
    for key in writing | reasons.keys():
        if reasons[key] != (key in writing):
            state = "is" if key in writing else "is not"
            yield f"block {key.hex()} {state} being written, for {reasons[key]} reasons"


def _slots_of_jobs(engine: Engine, slots: dict[OffloadKey, int]) -> Iterator[str]:
    """The slots that jobs name, against those that their keys occupy and those that are held."""
    held = {
        slot
        for late in engine.disowned.values()
        if late.holds_slots
        for slot in late.job.block_ids.tolist()
    }
    if held != set(engine.primary.pool.held_slots()):
        yield f"slots {engine.primary.pool.held_slots()} are held, but copies touch {sorted(held)}"
    named = [
        (f"job {job.job_id}", key, slot)
        for job in chain(_readers(engine), _writers(engine))
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True)
    ]
    named += [("a reservation", key, slot) for key, slot in engine.promotions.unflushed()]
    for who, key, slot in named:
        if slots.get(key) != slot:
            yield f"{who} names slot {slot}, but block {key.hex()} is in {slots.get(key)}"


def _readers(engine: Engine) -> Iterator[JobMetadata]:
    """The cascades whose copies may still run, under a pin each."""
    yield from (job for _, job in engine.jobs.values() if not job.is_promotion)
    yield from (late.job for late in engine.disowned.values() if not late.holds_slots)


def _writers(engine: Engine) -> Iterator[JobMetadata]:
    return (job for _, job in engine.jobs.values() if job.is_promotion)


def _promoted_keys(engine: Engine) -> Iterator[OffloadKey]:
    yield from chain.from_iterable(job.keys for job in _writers(engine))
    yield from (key for key, _ in engine.promotions.unflushed())
