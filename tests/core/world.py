"""A world around the bare engine: memory that can be wrong, tiers that do as they are told.

Bytes are modelled as strings. A copy reads and writes only when it is settled, so that a slot
handed out too early shows up as the wrong string on some later hit. Every copy waits, parked, until
somebody says how it ends.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hypothesis import Phase, settings

from kvoffload_async.core.backpressure import LOCAL_BACKPRESSURE, Backpressure
from kvoffload_async.core.breaker import Breaker, BreakerSettings
from kvoffload_async.core.effects import SubmitJob
from kvoffload_async.core.engine import Engine, EngineLimits
from kvoffload_async.core.events import (
    CacheReset,
    JobReleased,
    JobReported,
    ResetFlushed,
    StepBegan,
    StepEnded,
)
from kvoffload_async.core.laws import check_quiescent, check_state, check_story
from kvoffload_async.core.ledger import refused
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.story import (
    AllQuiet,
    ContentRead,
    ContentWritten,
    EventsEmitted,
    RequestOpened,
    ResidentSeen,
    RoomAsked,
    StaleCompletionSeen,
    Story,
    fact_of,
    fingerprint,
)
from kvoffload_async.core.tierslot import TierSlot
from kvoffload_async.errors import BlockMissingError, TierTimeoutError, TierUnavailableError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import (
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    ReqContext,
    as_block_ids,
    make_offload_key,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
NO_LIMITS = EngineLimits(promotion_slots=1_000, cascade_blocks=1_000, deferral_s=1_000.0)
NEVER_OPENS = BreakerSettings(fault_threshold=1_000)
MIB = 1 << 20
# Explaining a failure retraces every line of every attempt: minutes, and a test that times out.
THOROUGH = settings(
    max_examples=max(250, settings().max_examples),
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


def k(name: int | str) -> OffloadKey:
    return make_offload_key(str(name).encode())


def ks(names: Iterable[int | str]) -> list[OffloadKey]:
    return [k(name) for name in names]


def content(key: OffloadKey) -> str:
    return f"bytes of {key.hex()}"


def job(job_id=0, names="a", *, promotion=False, slots=None, ctx=None):
    keys = tuple(ks(names))
    slots = range(len(keys)) if slots is None else slots
    return JobMetadata(job_id, keys, as_block_ids(slots), promotion, ctx or ReqContext("r"))


POLICIES = {"lru": LruPolicy, "arc": ArcPolicy}


def policy_state(policy):
    if isinstance(policy, ArcPolicy):
        return (*(tuple(x) for x in (policy.t1, policy.t2, policy.b1, policy.b2)), policy.p)
    return tuple(policy.resident())


def whole_state(primary):
    return fingerprint(primary), policy_state(primary.policy)


class ScriptedTier:
    """Knows its blocks exactly, or answers RETRY while `is_probing`."""

    def __init__(self):
        self.contents: dict[OffloadKey, str] = {}
        self.is_probing = False
        self.stray: LookupResult | None = None

    def lookup(self, key, req_context):
        if self.stray is not None:
            return self.stray
        if self.is_probing:
            return RETRY
        return HIT if key in self.contents else MISS


@dataclass
class Write:
    """A copy from the device into slots, which ends with `complete_store`."""

    ctx: ReqContext
    keys: list[OffloadKey]
    slots: list[int]
    stale: bool = False
    landed: bool = False


@dataclass
class Read:
    """A copy from slots to the device, which ends with `complete_load`."""

    ctx: ReqContext
    keys: list[OffloadKey]
    slots: list[int]
    stale: bool = False


class World:
    """An engine, `tiers` scripted tiers, and everything that moves."""

    def __init__(
        self,
        num_slots=4,
        tiers=1,
        *,
        policy="lru",
        limits=NO_LIMITS,
        request_level=(),
        breaker=NEVER_OPENS,
        pressed_tier=None,
        **primary_options,
    ):
        self.tiers = [ScriptedTier() for _ in range(tiers)]
        self.primary = Primary(
            num_slots, POLICIES[policy](num_slots), enable_events=True, **primary_options
        )
        slots = [
            TierSlot(
                f"tier{i}",
                tier,
                Breaker(breaker),
                backpressure=Backpressure(LOCAL_BACKPRESSURE) if i == pressed_tier else None,
            )
            for i, tier in enumerate(self.tiers)
        ]
        self.engine = Engine(self.primary, slots, limits)
        self.request_level = tuple(request_level)
        self.memory = ["never written"] * num_slots
        self.running: dict[int, tuple[int, JobMetadata]] = {}
        self.late: dict[int, tuple[int, JobMetadata]] = {}
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.live: dict[str, ReqContext] = {}
        self.ended: list[tuple[int, str]] = []
        self.kept: set[OffloadKey] = set()
        self.refusing: set[int] = set()
        self.story = Story()
        self.now_s = 0.0
        self.garbage = 0

    # -- the scheduler's calls ------------------------------------------------------------------

    def begin(self, req_id="r", **fields):
        ctx = ReqContext(req_id, **fields)
        self.engine.on_new_request(ctx, self.request_level)
        self.live[req_id] = ctx
        self.story.tell(*(RequestOpened(i, req_id) for i in range(len(self.tiers))))
        return ctx

    def lookup(self, ctx, name):
        answer = self.engine.lookup(name if isinstance(name, bytes) else k(name), ctx)
        self._absorb()
        return answer

    def offer(self, ctx, names):
        """prepare_store; the copy from the device then waits in `writes`."""
        keys = [name if isinstance(name, bytes) else k(name) for name in names]
        blocks = list(self.primary.resident())
        before = whole_state(self.primary)
        output = self.engine.prepare_store(keys, ctx)
        self.story.tell(
            RoomAsked(
                tuple(keys),
                frozenset(key for key, _, refs in blocks if refs),
                output is not None,
                () if output is None else tuple(output.evicted_keys),
                before,
                whole_state(self.primary),
            )
        )
        if output is not None and output.keys_to_store:
            slots = output.store_spec.block_ids.tolist()
            self._expect_untouched(slots)
            self.writes.append(Write(ctx, list(output.keys_to_store), slots))
            self._soil(slots)
        self._absorb()
        return output

    def written(self, write=None, *, success=True):
        """complete_store of a waiting copy."""
        write = self.writes[0] if write is None else write
        self.writes.remove(write)
        if success:
            self.land_stale_writes()
            for key, slot in zip(write.keys, write.slots, strict=True):
                self.memory[slot] = content(key)
                self.story.tell(ContentWritten(key, content(key)))
            self.kept.update(write.keys)
        self.engine.complete_store(write.keys, write.ctx, success=success)
        cascaded = self._absorb()
        if success:
            for tier in range(len(self.tiers)):
                sent = {key for at, job in cascaded if at == tier for key in job.keys}
                self.kept.difference_update(set(write.keys) - sent)

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
        slots = self.engine.prepare_load(keys, ctx)
        self.reads.append(Read(ctx, keys, slots))
        self._read(keys, slots)
        self._absorb()
        return slots

    def loaded(self, read=None):
        """complete_load of a waiting copy, which read until now."""
        read = self.reads[0] if read is None else read
        self.reads.remove(read)
        self._read(read.keys, read.slots)
        self.engine.complete_load(read.keys, read.ctx)
        self._absorb()

    def finish(self, ctx):
        self.engine.on_request_finished(ctx)
        del self.live[ctx.req_id]
        self._absorb()

    def step(self, seconds=1.0):
        """End the step and begin the next one."""
        self._handle(StepEnded())
        events = list(self.primary.take_events())
        self.story.tell(
            *(EventsEmitted("CPU", tuple(e.keys), e.removed) for e in events if not e.metadata_only)
        )
        readable = frozenset(key for key, _, refs in self.primary.resident() if refs >= 0)
        self.story.tell(ResidentSeen("CPU", readable))
        self.now_s += seconds
        self._handle(StepBegan(self.now_s))

    # -- what the tiers do ----------------------------------------------------------------------

    def settle(self, job_id=None, *, failed: Collection[int] = (), error=None, seconds=0.0):
        """End a parked copy; blocks in `failed` (indices) did not make it, nor missing ones."""
        job_id = min(self.running) if job_id is None else job_id
        tier, job = self.running.pop(job_id)
        failed = self._copy(tier, job, failed)
        error = error or (BlockMissingError("scripted") if failed else None)
        landed = frozenset(key for i, key in enumerate(job.keys) if i not in failed)
        self._note_failures(job, failed)
        self._report(
            tier,
            JobResult(
                job_id,
                success=not failed,
                successful_keys=landed if failed and job.is_promotion else None,
                transfer_time=seconds,
                transfer_bytes=len(landed) * MIB,
                error=error,
            ),
        )

    def settle_all(self):
        while self.running:
            self.settle()

    def disown(self, job_id=None, *, result=None):
        """Report a parked copy as failed while it goes on."""
        job_id = min(self.running) if job_id is None else job_id
        tier, job = self.running.pop(job_id)
        self.late[job_id] = tier, job
        self._note_failures(job, range(len(job.keys)))
        late = TierTimeoutError("scripted")
        self._report(tier, result or JobResult(job_id, success=False, error=late, disowned=True))

    def release(self, job_id=None):
        """End a disowned copy; its bytes moved until now."""
        job_id = min(self.late) if job_id is None else job_id
        tier, job = self.late.pop(job_id)
        self._copy(tier, job, ())
        self._handle(JobReleased(tier, job_id))

    def fill(self, tier, keys):
        """A tier has blocks from an earlier run."""
        for key in keys:
            self.tiers[tier].contents[key] = content(key)
            self.story.tell(ContentWritten(key, content(key)))

    def lose(self, tier, key):
        """A tier drops a block."""
        self.tiers[tier].contents.pop(key, None)
        self.kept.discard(key)

    # -- reset ----------------------------------------------------------------------------------

    def reset(self):
        """Drain and reset; copies between device and slots go on, and are stale now."""
        while self.running:
            self.disown() if len(self.running) % 2 else self.settle()
        self._handle(CacheReset())
        for copy in (*self.writes, *self.reads):
            copy.stale = True

    def land_stale_writes(self):
        """The device's stream is a queue: what was copied before the reset lands first."""
        for write in self.writes:
            if write.stale and not write.landed:
                write.landed = True
                self._soil(write.slots)

    def flush_reset(self):
        """All copies from before the reset have landed."""
        self.land_stale_writes()
        for copies in (self.writes, self.reads):
            for copy in [copy for copy in copies if copy.stale]:
                copies.remove(copy)
                self._complete_stale(copy)
        self._handle(ResetFlushed())

    def _complete_stale(self, copy):
        # The adapter drops stale completions; without a newer copy of the same keys the engine
        # must not mind them either.
        newer = [c for c in (*self.writes, *self.reads) if c.ctx.req_id == copy.ctx.req_id]
        if newer:
            return
        before = whole_state(self.primary)
        if isinstance(copy, Write):
            self.engine.complete_store(copy.keys, copy.ctx, success=True)
        else:
            self.engine.complete_load(copy.keys, copy.ctx)
        self._absorb()
        self.story.tell(StaleCompletionSeen(0, before, whole_state(self.primary)))

    # -- the end --------------------------------------------------------------------------------

    def wind_down(self):
        """Bring everything to rest and check every law."""
        self.refusing.clear()
        if self.engine.promotions_held:
            self.flush_reset()
        for write in list(self.writes):
            self.written(write)
        for read in list(self.reads):
            self.loaded(read)
        for ctx in list(self.live.values()):
            self.finish(ctx)
        self.step()
        while self.engine.has_pending_work or self.late:
            self.settle_all()
            while self.late:
                self.release()
            self.step()
        assert self.engine.requests == {}
        self.story.tell(AllQuiet())
        contents = [tier.contents for tier in self.tiers]
        check_quiescent(self.engine, kept=self.kept, tier_contents=contents)
        check_story(self.story)

    def check(self):
        check_state(self.engine)

    # -- inside ---------------------------------------------------------------------------------

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

    def _handle(self, event):
        fact = fact_of(event)
        if fact is not None:
            self.story.tell(fact)
        return self._absorb(self.engine.handle(event))

    def _absorb(self, effects=()):
        """Tell and park what the engine wants done; return the new cascades."""
        cascades = []
        for effect in (*effects, *self.engine.take_effects()):
            self.story.tell(fact_of(effect))
            if isinstance(effect, SubmitJob):
                tier, job = effect.tier, effect.job
                if job.is_promotion:
                    self._expect_untouched(job.block_ids.tolist())
                    self._soil(job.block_ids.tolist())
                else:
                    cascades.append((tier, job))
                if tier in self.refusing:
                    self._note_failures(job, range(len(job.keys)))
                    self._report(tier, refused(job, TierUnavailableError("scripted")))
                else:
                    self.running[job.job_id] = tier, job
            else:
                self.ended.append((effect.tier, effect.ctx.req_id))
        return cascades

    def _report(self, tier, result):
        self._handle(JobReported(tier, result))

    def _copy(self, tier, job, failed):
        contents = self.tiers[tier].contents
        failed = set(failed)
        for i, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            if not job.is_promotion:
                if i not in failed:
                    contents[key] = self.memory[slot]
            elif i in failed or key not in contents:
                failed.add(i)
                self._soil([slot])
            else:
                self.memory[slot] = contents[key]
        return failed

    def _note_failures(self, job, failed):
        if not job.is_promotion:
            self.kept.difference_update(job.keys[i] for i in failed)

    def _read(self, keys: Sequence[OffloadKey], slots: Sequence[int]):
        for key, slot in zip(keys, slots, strict=True):
            self.story.tell(ContentRead(key, self.memory[slot]))
            assert self.memory[slot] == content(key), f"slot {slot} does not hold {key.hex()}"

    def _soil(self, slots):
        for slot in slots:
            self.garbage += 1
            self.memory[slot] = f"garbage {self.garbage}"


def stored_below(num_slots=4, tiers=1, names="ab", **options):
    """Blocks that lie in the last tier only, and a live request."""
    world = World(num_slots, tiers, **options)
    world.fill(tiers - 1, ks(names))
    return world, world.begin()
