"""The engine alone, under whatever hypothesis can think of; see `world`."""

import itertools

import pytest
from core.world import HIT, MISS, PENDING, RETRY, World, k
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvoffload_async.core.breaker import BreakerSettings
from kvoffload_async.core.engine import EngineLimits
from kvoffload_async.core.laws import check_story
from kvoffload_async.core.story import RequestDecided, RequestDeferred, RunEnded, Story
from kvoffload_async.errors import BlockMissingError, TierFullError, TierUnavailableError
from kvoffload_async.types import ALL_TIERS, Locality, TierMatcher

pytestmark = pytest.mark.stateful

NAMES = st.sampled_from([k(name) for name in "abcdefghij"])
FILTERS = st.sampled_from(
    [ALL_TIERS, ALL_TIERS, frozenset(), frozenset({TierMatcher(locality=Locality.REMOTE)})]
)
ERRORS = st.sampled_from([BlockMissingError, TierFullError, TierUnavailableError])
DEFERRAL_S = 8.0


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(1, 8),
        tiers=st.integers(0, 3),
        policy=st.sampled_from(["lru", "arc"]),
        cap=st.integers(0, 8),
        cascade_blocks=st.sampled_from([1, 4, 1_000]),
        faults=st.sampled_from([1, 2, 1_000]),
        accept_prefix=st.booleans(),
        request_level=st.sets(st.integers(0, 2), max_size=2),
    )
    def build(
        self,
        num_slots,
        tiers,
        policy,
        cap,
        cascade_blocks,
        faults,
        accept_prefix,
        request_level,
    ):
        self.world = World(
            num_slots,
            tiers,
            policy=policy,
            limits=EngineLimits(cap, cascade_blocks, DEFERRAL_S),
            breaker=BreakerSettings(fault_threshold=faults, retry_after_s=3.0),
            request_level=sorted(request_level & set(range(tiers))),
            pressed_tier=1,
            accept_prefix=accept_prefix,
        )
        self.ids = itertools.count()
        self.deferred = set()

    def request(self, data):
        return data.draw(st.sampled_from(sorted(self.world.live.items())))[1]

    # -- the scheduler --------------------------------------------------------------------------

    @rule(load_tier_filter=FILTERS, positions=st.permutations("abcdefghij"))
    def begin(self, load_tier_filter, positions):
        where = {k(name): i for i, name in enumerate(positions[:6])}
        req_id = f"r{next(self.ids)}"
        self.world.begin(req_id, load_tier_filter=load_tier_filter, key_positions=where)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), keys=st.lists(NAMES, min_size=1, max_size=5, unique=True))
    def look_up_and_load_the_head(self, data, keys):
        ctx = self.request(data)
        answers = [self.world.lookup(ctx, key) for key in keys]
        head = list(itertools.takewhile(lambda pair: pair[1] is HIT, zip(keys, answers, strict=True)))
        if {PENDING, RETRY} & set(answers):
            self.deferred.add(ctx.req_id)
            return
        self.deferred.discard(ctx.req_id)
        if head and data.draw(st.booleans()):
            self.world.load(ctx, [key for key, _ in head])

    @precondition(lambda self: self.world.reads)
    @rule(data=st.data())
    def end_a_load(self, data):
        reads = [read for read in self.world.reads if not read.stale]
        if reads:
            self.world.loaded(data.draw(st.sampled_from(reads)))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), keys=st.lists(NAMES, max_size=6))
    def offer(self, data, keys):
        self.world.offer(self.request(data), keys)

    @precondition(lambda self: self.world.writes)
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def end_a_store(self, data, success):
        writes = [write for write in self.world.writes if not write.stale]
        if writes:
            self.world.written(data.draw(st.sampled_from(writes)), success=success)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), keys=st.lists(NAMES, max_size=4))
    def touch(self, data, keys):
        self.world.engine.touch(keys, self.request(data))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def finish(self, data):
        ctx = self.request(data)
        self.deferred.discard(ctx.req_id)
        self.world.finish(ctx)

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0]))
    def step(self, seconds):
        self.world.step(seconds)

    # -- the tiers ------------------------------------------------------------------------------

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), how=st.sampled_from(["ok", "ok", "ok", "part", "none"]), error=ERRORS)
    def settle(self, data, how, error):
        job_id = data.draw(st.sampled_from(sorted(self.world.running)))
        indices = range(len(self.world.running[job_id][1].keys))
        failed = {"ok": (), "none": indices}.get(how)
        if failed is None:
            failed = data.draw(st.sets(st.sampled_from(indices), min_size=1))
        seconds = data.draw(st.sampled_from([0.0, 0.001, 1.0]))
        fault = error("scripted") if failed else None
        self.world.settle(job_id, failed=failed, error=fault, seconds=seconds)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def disown(self, data):
        self.world.disown(data.draw(st.sampled_from(sorted(self.world.running))))

    @precondition(lambda self: self.world.late)
    @rule(data=st.data())
    def release(self, data):
        self.world.release(data.draw(st.sampled_from(sorted(self.world.late))))

    @precondition(lambda self: self.world.tiers)
    @rule(data=st.data(), key=NAMES)
    def change_a_tier(self, data, key):
        index = data.draw(st.integers(0, len(self.world.tiers) - 1))
        tier = self.world.tiers[index]
        match data.draw(st.sampled_from(["lose", "probe", "refuse"])):
            case "lose":
                self.world.lose(index, key)
            case "probe":
                tier.is_probing = not tier.is_probing
            case _:
                self.world.refusing ^= {index}

    # -- reset ----------------------------------------------------------------------------------

    @rule(really=st.sampled_from([False, False, False, True]))
    def reset(self, really):
        if really:
            self.world.reset()

    @precondition(lambda self: self.world.engine.promotions_held)
    @rule()
    def flush_reset(self):
        self.world.flush_reset()

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def laws_hold(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.decide_what_is_deferred()
        self.world.wind_down()

    def decide_what_is_deferred(self):
        """P14: with every copy ending each step, and probes that never answer."""
        world = self.world
        steps = int(DEFERRAL_S) + 2
        keys = [k(name) for name in "abcdefghij"]
        world.story.tell(*(RequestDeferred(req_id, steps) for req_id in sorted(self.deferred)))
        for _ in range(steps):
            for write in [write for write in world.writes if not write.stale]:
                world.written(write)
            for req_id in sorted(self.deferred):
                answers = {world.lookup(world.live[req_id], key) for key in keys}
                if answers <= {HIT, MISS}:
                    self.deferred.discard(req_id)
                    world.story.tell(RequestDecided(req_id))
            world.step(1.0)
            world.settle_all()
        assert not self.deferred


TestEngine = EngineMachine.TestCase


@given(
    orders=st.lists(st.permutations(range(6)), min_size=2, max_size=3),
    policy=st.sampled_from(["lru", "arc"]),
)
def test_completion_order_does_not_change_the_outcome(orders, policy):
    story = Story()
    for order in orders:
        world = World(8, 2, policy=policy)
        for req_id, names in ("r", "abc"), ("s", "bcd"), ("t", "efg"):
            ctx = world.begin(req_id, key_positions={k(n): i for i, n in enumerate(names)})
            world.offer(ctx, names)
        for turn in order:
            if turn < 3:
                world.written(next(w for w in world.writes if w.ctx.req_id == "rst"[turn]))
            elif world.running:
                world.settle(sorted(world.running)[turn % len(world.running)])
        world.settle_all()
        for ctx in list(world.live.values()):
            world.finish(ctx)
        world.wind_down()
        tiers = tuple(tuple(sorted(tier.contents.items())) for tier in world.tiers)
        ranked = tuple(world.primary.policy.resident())
        story.tell(RunEnded("three requests", str(order), (ranked, tiers)))
    check_story(story)
