"""A world around the bare planner: memory that can be wrong, tiers that do as they are told.

A copy reads and writes only when it finishes, so that a slot handed out too early shows up as the
wrong string on some later hit. Every copy waits, parked, until somebody says how it ends.
"""

from collections.abc import Collection
from functools import partial

from core.memory import Memory, Read, Write, content
from core.states import POLICIES, whole_state
from core.terms import HIT, k, ks
from core.tiers import ExternalTier, NativeTier
from planner_invariants import (
    AllQuiet,
    BlocksTouched,
    ContentWritten,
    CopyEnded,
    EventsEmitted,
    FinishRequest,
    History,
    JobAccepted,
    RequestOpened,
    ResidentSeen,
    ResultTaken,
    RoomAsked,
    StaleCompletionSeen,
    StepClosed,
    check_history,
    check_quiescent,
    fact_of,
)

from kvoffload_async.abc.events import CallEnded
from kvoffload_async.core.backpressure import LOCAL_BACKPRESSURE, Backpressure
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.index import ProbedIndex
from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.ledger import CallTier, StartJob, StartProbe, TouchBlocks
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import BlockMissingError, TierTimeoutError, TierUnavailableError
from kvoffload_async.policies.tenants import TenantPolicies
from kvoffload_async.types import (
    ENGINE_REQ_ID,
    JobMetadata,
    Locality,
    OffloadKey,
    ReqContext,
)

NEVER_OPENS = BreakerSettings(fault_threshold=1_000)
DOWN = TierUnavailableError("scripted")


class WatchedPrimary(Primary):
    """Records what it is asked for, and what it evicts for that."""

    def __init__(self, history, *args, **options):
        super().__init__(*args, **options)
        self.history = history

    def prepare_store(self, ctx, keys, allowed=None):
        in_use = frozenset(key for key, _, refs in self.resident() if refs)
        protected = set(self.keys_of(tuple(self.debts())))
        ordinary = {key for key, _, refs in self.resident() if not refs} - protected
        ordinary -= {*keys, *self._recency.used_by(ctx)}
        before = whole_state(self)
        output = super().prepare_store(ctx, keys, allowed)
        if output is not None and protected.intersection(output.evicted_keys):
            assert self.drops_pending, "a store that waits has dropped what is pending for a tier"
            assert ordinary <= set(output.evicted_keys), "it went before what nobody is pending"
        evicted = () if output is None else tuple(output.evicted_keys)
        granted = output is not None
        fact = RoomAsked(tuple(keys), in_use, granted, evicted, before, whole_state(self))
        self.history.record(fact)
        return output


class World:
    """A planner, `tiers` scripted tiers, and everything that moves.

    `kinds` says by number what is known of a tier: "exact", unless it is "probed", "cost_gated", or
    "external".
    """

    def __init__(
        self,
        num_slots=4,
        tiers=1,
        *,
        policy="lru",
        deferral_s=1_000.0,
        copies_each=1_000,
        request_level=(),
        breaker=NEVER_OPENS,
        pressed_tier=None,
        create_planner=Planner,
        remote=(),
        kinds=None,
        tenancy=None,
        **primary_options,
    ):
        self.tiers = []
        for i in range(tiers):
            kind = (kinds or {}).get(i, "exact")
            options = {
                "breaker": breaker,
                "locality": Locality.REMOTE if i in remote else Locality.LOCAL,
                "backpressure": Backpressure(LOCAL_BACKPRESSURE) if i == pressed_tier else None,
            }
            tier = ExternalTier if kind == "external" else partial(NativeTier, kind=kind)
            self.tiers.append(tier(f"tier{i}", **options))
        self.history = History()
        ranking = POLICIES[policy](num_slots)
        if tenancy is not None:
            own = [POLICIES[policy](quota) for quota in tenancy.quotas]
            ranking = TenantPolicies(num_slots, own, tenancy.tenant_of)
        self.primary = WatchedPrimary(
            self.history,
            num_slots,
            ranking,
            enable_events=True,
            tenancy=tenancy,
            **primary_options,
        )
        self.planner = create_planner(self.primary, [tier.state for tier in self.tiers], deferral_s)
        if copies_each is not None:
            self.planner.room.copies_each = copies_each
        self.request_level = tuple(request_level)
        self.running: dict[int, tuple[int, JobMetadata]] = {}
        self.late: dict[int, tuple[int, JobMetadata]] = {}
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.live: dict[str, ReqContext] = {}
        self.ended: list[tuple[int, str]] = []
        self.kept: set[OffloadKey] = set()
        self.unnoticed: set[tuple[int, OffloadKey]] = set()
        """Blocks that a tier has ever lost without an announcement."""
        self.waiting: list[set[OffloadKey]] = [set() for _ in self.tiers]
        self.lost: list[set[OffloadKey]] = [set() for _ in self.tiers]
        self.touched: list[tuple[int, tuple[OffloadKey, ...]]] = []
        self.refusing: set[int] = set()
        self.own_request_in: set[int] = set()
        self.calls: dict[tuple[int, int], CallTier] = {}
        """Management calls under way, by tier and id."""
        self.deleted: set[OffloadKey] = set()
        """Keys that were deleted everywhere and not stored since."""
        self.memory = Memory(num_slots, self.history)
        self.now_s = 0.0

    # -- the scheduler's calls ------------------------------------------------------------------

    def begin(self, req_id="r", **fields):
        ctx = ReqContext(req_id, **fields)
        self.planner.on_new_request(ctx, self.request_level)
        self.live[req_id] = ctx
        self.history.record(*(RequestOpened(i, req_id) for i in range(len(self.tiers))))
        return ctx

    def lookup(self, ctx, name):
        key = name if isinstance(name, bytes) else k(name)
        answer = self.planner.lookup(key, ctx)
        self._expect_deleted_is_gone([key], [answer])
        self._absorb()
        return answer

    def lookups(self, ctx, names, *, stop_at_miss=False):
        keys = [name if isinstance(name, bytes) else k(name) for name in names]
        answers = self.planner.lookup_many(keys, ctx, stop_at_miss=stop_at_miss)
        self._expect_deleted_is_gone(keys, answers)
        self._absorb()
        return answers

    def offer(self, ctx, names):
        """prepare_store; the copy from the device then waits in `writes`."""
        keys = [name if isinstance(name, bytes) else k(name) for name in names]
        output = self.planner.prepare_store(keys, ctx)
        if output is not None and output.keys_to_store:
            slots = output.store_spec.block_ids.tolist()
            self._expect_untouched(slots)
            generation = output.store_spec.generation
            self.writes.append(Write(ctx, list(output.keys_to_store), slots, generation))
            self.memory.soil(slots)
        self._absorb()
        return output

    def written(self, write=None, *, success=True):
        """complete_store of a waiting copy."""
        write = self.writes[0] if write is None else write
        self.writes.remove(write)
        if success:
            self.land_stale_writes()
            self.memory.write(write.keys, write.slots)
            stored = {key for key in write.keys if key not in self.primary.barred}
            self.deleted -= stored
            self.kept |= {
                key for key in stored if not any(key in t.barred for t in self.planner.tiers)
            }
        self.planner.complete_store(write.keys, write.ctx, success=success)
        self._absorb()

    def store(self, ctx, names):
        """Offer and write at once; returns what `prepare_store` granted."""
        output = self.offer(ctx, names)
        assert output is not None
        if output.keys_to_store:
            self.written(self.writes[-1])
        return output

    def load(self, ctx, names):
        """prepare_load; the copy to the device then waits in `reads`."""
        keys = [name if isinstance(name, bytes) else k(name) for name in names]
        slots = self.planner.prepare_load(keys, ctx)
        self.reads.append(Read(ctx, keys, slots, self.primary.generation))
        self.memory.read(keys, slots)
        self._absorb()
        return slots

    def loaded(self, read=None):
        """complete_load of a waiting copy, which read until now."""
        read = self.reads[0] if read is None else read
        self.reads.remove(read)
        self.memory.read(read.keys, read.slots)
        self.planner.complete_load(read.keys, read.ctx)
        self._absorb()

    def finish(self, ctx):
        self.planner.on_request_finished(ctx)
        del self.live[ctx.req_id]
        self._absorb()

    def step(self, seconds=1.0):
        """End the step and begin the next one."""
        self.end_step()
        events = list(self.primary.take_events())
        self.history.record(
            *(EventsEmitted("CPU", tuple(e.keys), e.removed) for e in events if not e.metadata_only)
        )
        readable = frozenset(key for key, _, refs in self.primary.resident() if refs >= 0)
        self.history.record(ResidentSeen("CPU", readable))
        self.now_s += seconds
        self.planner.begin_step(self.now_s)

    def end_step(self, scheduled=()):
        self.history.record(StepClosed())
        self.planner.end_step(scheduled)
        for tier in self.tiers:
            tier.state.end_step()
        self._absorb()
        for index, tier in enumerate(self.tiers):
            tier.answer_probes(DOWN if index in self.refusing else None)

    # -- what the tiers do ----------------------------------------------------------------------

    def finish_job(self, job_id=None, *, failed: Collection[int] = (), error=None, seconds=0.0):
        """End a parked copy; blocks in `failed` (indices) did not make it, nor missing ones."""
        tier, job = self._unpark(job_id)
        failed = self.tiers[tier].copy(job, self.memory, failed)
        error = error or (BlockMissingError("scripted") if failed else None)
        self.history.record(ResultTaken(tier, job.job_id))
        self.tiers[tier].finish_job(job, failed, error, seconds)
        self._collect()

    def fail(self, job_id=None, *, error=DOWN, seconds=0.0):
        """End a parked copy with an error of the whole job: nothing was moved."""
        tier, job = self._unpark(job_id)
        everything = self.tiers[tier].copy(job, self.memory, range(len(job.keys)))
        self.history.record(ResultTaken(tier, job.job_id))
        self.tiers[tier].finish_job(job, everything, error, seconds, whole=True)
        self._collect()

    def finish_all(self):
        while self.running:
            self.finish_job()

    def orphan(self, job_id=None, **what):
        """Report a parked copy as failed while it goes on."""
        tier, job = self._unpark(job_id)
        self.late[job.job_id] = tier, job
        self.history.record(ResultTaken(tier, job.job_id, orphaned=True))
        self.tiers[tier].orphan(job, TierTimeoutError("scripted"), **what)
        self._collect()

    def release(self, job_id=None, *, failed: Collection[int] = ()):
        """End an orphaned copy; its bytes moved until now, but for blocks in `failed`."""
        job_id = min(self.late) if job_id is None else job_id
        tier, job = self.late.pop(job_id)
        failed = self.tiers[tier].copy(job, self.memory, failed)
        self.history.record(CopyEnded(tier, job_id))
        # If the index still lists blocks that the tier has lost unnoticed, nobody can count them.
        self.kept.difference_update(key for key in job.keys if (tier, key) in self.unnoticed)
        self.tiers[tier].release(job, failed)
        self._collect()

    def fill(self, tier, keys):
        """A tier has blocks from an earlier run."""
        self.tiers[tier].fill(keys)
        self.history.record(*(ContentWritten(key, content(key)) for key in keys))

    def lose(self, tier, key, *, announced=True):
        """A tier drops a block, and says so, or does not know."""
        self.tiers[tier].lose(key, announced=announced)
        self.kept.discard(key)
        if not announced:
            self.unnoticed.add((tier, key))

    # -- deletion -------------------------------------------------------------------------------

    def delete(self, names, tiers=None, *, in_primary=True):
        keys = {name if isinstance(name, bytes) else k(name) for name in names}
        tiers = range(len(self.tiers)) if tiers is None else tiers
        deletion = self.planner.delete(keys, tiers, in_primary=in_primary)
        self.kept -= keys
        for index in range(len(self.tiers)) if in_primary else tiers:
            self.waiting[index] -= keys
        if in_primary and len(tiers) == len(self.tiers):
            self.deleted |= keys
        return deletion

    def endable_calls(self):
        """The calls that the actor has begun: no job on their keys runs in the tier."""
        jobs = [*self.running.values(), *self.late.values()]
        return [
            call
            for call, effect in self.calls.items()
            if all(tier != call[0] or not {*job.keys} & {*effect.keys} for tier, job in jobs)
        ]

    def end_call(self, call=None, *, failed=(), error=DOWN):
        """End a call; the tier keeps blocks in `failed` (indices)."""
        tier, call_id = call or self.endable_calls()[0]
        effect = self.calls.pop((tier, call_id))
        failed = set(failed)
        gone = frozenset(key for i, key in enumerate(effect.keys) if i not in failed)
        for key in gone:
            self.tiers[tier].contents.pop(key, None)
        event = CallEnded(call_id, effect.operation, gone, error=error if failed else None)
        self.tiers[tier].state.handle(event)

    def _expect_deleted_is_gone(self, keys, answers):
        for key, answer in zip(keys, answers, strict=False):
            assert not (answer is HIT and key in self.deleted), f"{key.hex()} was deleted"

    # -- reset ----------------------------------------------------------------------------------

    def reset(self):
        """Drain and reset; copies between device and slots go on, and are stale now."""
        while self.running:
            self.orphan() if len(self.running) % 2 else self.finish_job()
        self.planner.reset_cache()
        self._absorb()
        for copy in (*self.writes, *self.reads):
            copy.stale = True

    def land_stale_writes(self):
        """The device's stream is a queue: what was copied before the reset lands first."""
        for write in self.writes:
            if write.stale and not write.landed:
                write.landed = True
                self.memory.soil(write.slots)

    def flush_reset(self):
        """All copies from before the reset have landed."""
        self.land_stale_writes()
        for copies in (self.writes, self.reads):
            for copy in [copy for copy in copies if copy.stale]:
                copies.remove(copy)
                self._complete_stale(copy)
        self.planner.reset_flushed()

    def _complete_stale(self, copy):
        # Whatever the request has granted since: its generation tells what is meant.
        before = whole_state(self.primary)
        if isinstance(copy, Write):
            generation = copy.generation
            self.planner.complete_store(copy.keys, copy.ctx, success=True, generation=generation)
        else:
            self.planner.complete_load(copy.keys, copy.ctx, copy.generation)
        self._absorb()
        self.history.record(StaleCompletionSeen(0, before, whole_state(self.primary)))

    # -- the end --------------------------------------------------------------------------------

    def wind_down(self):
        """Bring everything to rest and check every invariant."""
        self._work_again()
        if self.planner.promotions_paused:
            self.flush_reset()
        for write in list(self.writes):
            self.written(write)
        for read in list(self.reads):
            self.loaded(read)
        for ctx in list(self.live.values()):
            self.finish(ctx)
        self.planner.pins.unpin([key for key, _, _ in self.primary.resident()])
        self.step()
        for _ in range(100):
            if not (self.planner.has_pending_work or self.late or self.planner.deletions.running):
                break
            self._end_all()
            self.step()
        assert not self.planner.deletions.running
        assert not self.planner.has_pending_work
        for _ in range(100):  # at most a few pauses, and the tiers' decay
            if not any(queue.count for queue in self.planner.cascades.queues):
                break
            self.step(10.0)
            self.finish_all()
        assert self.planner.requests == {}
        self._check_indexes()
        self.planner.close()
        self._absorb()
        self.history.record(AllQuiet())
        contents = [tier.contents for tier in self.tiers]
        check_quiescent(self.planner, kept=self.kept, tier_contents=contents, counted=self.lost)
        check_history(self.history)

    def check(self):
        check_state(self.planner)

    # -- inside ---------------------------------------------------------------------------------

    def _end_all(self):
        self.finish_all()
        while self.late:
            self.release()
        while self.calls:
            self.end_call()

    def _work_again(self):
        self.refusing.clear()
        for tier in self.tiers:
            tier.is_probing = False

    def _check_indexes(self):
        for state in self.planner.tiers:
            assert not state.index.is_waiting
            assert not (isinstance(state.index, ProbedIndex) and len(state.index)), "nobody asks"

    @property
    def copies(self):
        """The copies between device and slots that have not ended."""
        return [*self.writes, *self.reads]

    def touched_slots(self):
        """Slots that some copy may read or write now."""
        jobs = [job for _, job in (*self.running.values(), *self.late.values())]
        copies = [copy for copy in (*self.writes, *self.reads) if not copy.stale]
        return {s for job in jobs for s in job.block_ids.tolist()} | {
            s for copy in copies for s in copy.slots
        }

    def _expect_untouched(self, slots):
        assert not self.touched_slots() & set(slots), "a slot in use was handed out"
        assert len(set(slots)) == len(slots)

    def _absorb(self):
        """Tell and park what the planner wants done."""
        for tier, state in enumerate(self.planner.tiers):
            for effect in state.take_effects():
                fact = fact_of(tier, effect)
                self._open_own_request(tier, fact)
                self.history.record(fact)
                match effect:
                    case FinishRequest(ctx):
                        self.ended.append((tier, ctx.req_id))
                    case TouchBlocks(keys):
                        self.touched.append((tier, keys))
                    case StartJob(job):
                        self._start(tier, job)
                    case StartProbe():
                        self.tiers[tier].ask(effect)
                    case CallTier():
                        self.calls[tier, effect.call_id] = effect
        self._account()

    def _open_own_request(self, tier, fact):
        """Begin the engine's own request in a tier where it is used, as a link does."""
        match fact:
            case JobAccepted(req_id=str(req_id)) | BlocksTouched(req_id=str(req_id)):
                if req_id == ENGINE_REQ_ID and tier not in self.own_request_in:
                    self.own_request_in.add(tier)
                    self.history.record(RequestOpened(tier, req_id))

    def _start(self, tier, job):
        if job.is_promotion:
            self._expect_untouched(job.block_ids.tolist())
            self.memory.soil(job.block_ids.tolist())
        if tier in self.refusing:
            self.history.record(ResultTaken(tier, job.job_id))
            self.tiers[tier].refuse(job, DOWN)
            self._collect()
        else:
            self.running[job.job_id] = tier, job

    def _account(self):
        """Note which blocks were to go to a tier, and are not to any more, without being there."""
        for index, tier in enumerate(self.tiers):
            slots = tuple(self.planner.cascades.queues[index].slots())
            waiting = set(self.primary.keys_of(slots))
            jobs = self.planner.tiers[index].jobs
            late = (record.job for record in jobs.orphaned() if not record.holds_slots)
            for job in (*jobs.unreported(), *late):
                if not job.is_promotion:
                    waiting.update(job.keys)
            barred = self.planner.tiers[index].barred
            waiting = {key for key in waiting if key not in barred}
            self.lost[index] |= self.waiting[index] - waiting - tier.contents.keys()
            self.waiting[index] = waiting

    def _unpark(self, job_id):
        return self.running.pop(min(self.running) if job_id is None else job_id)

    def _collect(self):
        self.planner.collect()
        self._account()


def stored_below(num_slots=4, tiers=1, names="ab", **options):
    """Blocks that lie in the last tier only, and a live request."""
    world = World(num_slots, tiers, **options)
    world.fill(tiers - 1, ks(names))
    return world, world.begin()
