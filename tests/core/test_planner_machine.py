"""The planner alone, under whatever hypothesis can think of; see `world`."""

import itertools

import pytest
from core.machines import AS_THE_PROFILE
from core.memory import Write
from core.terms import HIT, MISS, PENDING, RETRY, k, ranked
from core.world import World
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planner_invariants import (
    History,
    RequestDecided,
    RequestDeferred,
    RunEnded,
    check_history,
)

from kvoffload_async.core.deletions import MOST_DELETIONS
from kvoffload_async.core.health import BreakerSettings, BreakerState
from kvoffload_async.core.planner import Planner
from kvoffload_async.errors import BlockMissingError, TierFullError, TierUnavailableError
from kvoffload_async.types import ALL_TIERS, NO_HINTS, Hints, Locality, Priority, TierMatcher

pytestmark = pytest.mark.stateful

CHAINS = ("abcdef", "abxyz", "cadb")
CHAIN = st.builds(
    lambda chain, start, length: [k(name) for name in chain[start : start + length]],
    st.sampled_from(CHAINS),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.integers(1, 5),
)
ALL_KEYS = [k(name) for name in sorted(set("".join(CHAINS)))]
FILTERS = st.sampled_from(
    [ALL_TIERS, ALL_TIERS, frozenset(), frozenset({TierMatcher(locality=Locality.REMOTE)})]
)
HINTS = st.sampled_from(
    [
        NO_HINTS,
        NO_HINTS,
        Hints(Priority.LOW),
        Hints(retain_s=3),
        Hints(Priority.HIGH, max_offload_tokens=2),
    ]
)
HOW = st.sampled_from(["as a prefix", "at once", "one by one"])
ERRORS = st.sampled_from([BlockMissingError, TierFullError, TierUnavailableError])
KINDS = st.sampled_from(["exact", "probed", "cost_gated", "external"])
DEFERRAL_S = 8.0
HEALTHY_STEP_S = 0.4
SETUPS = st.fixed_dictionaries(
    {
        "num_slots": st.integers(1, 8),
        "tiers": st.sampled_from([2, 1, 3, 0]),
        "policy": st.sampled_from(["lru", "arc", "hd"]),
        "faults": st.sampled_from([1_000, 2, 1]),
        "accept_prefix": st.booleans(),
        "drops_pending": st.booleans(),
        "request_level": st.sets(st.integers(0, 2), max_size=2),
        "remote": st.sets(st.integers(0, 2)),
        "kinds": st.fixed_dictionaries(dict.fromkeys(range(3), KINDS)),
    }
)


class _Nearest:
    """Sees that a remote tier is not asked for what a tier before it is not sure of."""

    def __init__(self, lookup_many, *, is_remote, unsure):
        self.lookup_many, self.is_remote, self.unsure = lookup_many, is_remote, unsure

    def __call__(self, keys, req_context, *, stop_at_miss):
        assert not (self.is_remote and self.unsure.intersection(keys))
        assert len(set(keys)) == len(keys) > 0
        answers = self.lookup_many(keys, req_context, stop_at_miss=stop_at_miss)
        assert len(answers) == len(keys) or (stop_at_miss and answers[-1] is MISS)
        self.unsure.update(key for key, a in zip(keys, answers, strict=False) if a is RETRY)
        return answers


def _clearing(unsure, begin_round):
    def begin(*args, **options):
        unsure.clear()
        begin_round(*args, **options)

    return begin


class PlannerMachine(RuleBasedStateMachine):
    """Few rules with much in each: then hypothesis spends its steps on what interacts."""

    create_planner = Planner
    create_world = World

    @initialize(setup=SETUPS, stored_before=st.sets(st.sampled_from(ALL_KEYS)))
    def build(self, setup, stored_before):
        tiers = setup["tiers"]
        self.world = self.create_world(
            setup["num_slots"],
            tiers,
            policy=setup["policy"],
            deferral_s=DEFERRAL_S,
            copies_each=None,
            breaker=BreakerSettings(setup["faults"], retry_after_s=3.0),
            request_level=sorted(setup["request_level"] & set(range(tiers))),
            pressed_tier=1,
            create_planner=self.create_planner,
            remote=setup["remote"],
            kinds=setup["kinds"],
            accept_prefix=setup["accept_prefix"],
        )
        self.world.primary.drops_pending = setup["drops_pending"]
        self.unsure = set()
        for index, tier in enumerate(self.world.planner.tiers):
            tier.lookup_many = _Nearest(
                tier.lookup_many, is_remote=index in setup["remote"], unsure=self.unsure
            )
        search = self.world.planner.search
        search.begin_round = _clearing(self.unsure, search.begin_round)
        if tiers:
            self.world.fill(tiers - 1, sorted(self.in_all_forms(stored_before)))
        self.serve_in_order()
        self.ids = itertools.count()
        self.deferred = set()
        for _ in range(2):
            self.begin(ALL_TIERS, CHAINS[0])

    def in_all_forms(self, keys):
        """Return the keys that requests may turn these into."""
        return keys

    def serve_in_order(self):
        """See that only the head of the queue gets a ticket, for all that it wants or its head.

        Or, while there is none, a request that is promoted ahead.
        """
        room = self.world.planner.room
        grant = room._grant

        def watched(request, run, absent, *, is_early=False):
            others = [each for each in room.queue if each.share is request.share]
            assert not others if is_early else room.is_head(request)
            assert not request.ticket
            assert list(run) == list(request.wants)[: len(run)]
            return grant(request, run, absent, is_early=is_early)

        room._grant = watched

    def request(self, data):
        live = self.world.live
        return live[data.draw(st.sampled_from(sorted(live)))]

    # -- the scheduler --------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.live) < 4)
    @rule(
        load_tier_filter=FILTERS,
        chain=st.sampled_from(CHAINS),
        is_queued=st.booleans(),
        hints=HINTS,
    )
    def begin(self, load_tier_filter, chain, is_queued=False, hints=NO_HINTS):
        where = {k(name): i for i, name in enumerate(chain)}
        ctx = self.world.begin(
            f"r{next(self.ids)}",
            load_tier_filter=load_tier_filter,
            key_positions=where,
            hints=hints,
        )
        if is_queued:
            self.world.planner.prefetch(list(ctx.key_positions), ctx)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), keys=CHAIN, loads=st.booleans(), how=HOW)
    def look_up_and_load_the_head(self, data, keys, loads, how):
        ctx = self.request(data)
        self.unsure.clear()
        if how == "one by one":
            answers = [self.world.lookup(ctx, key) for key in keys]
        else:
            is_prefix = how == "as a prefix"
            answers = self.world.lookups(ctx, keys, stop_at_miss=is_prefix)
            last = answers.index(MISS) if is_prefix and MISS in answers else len(keys) - 1
            assert len(answers) == last + 1
        if {PENDING, RETRY} & set(answers):
            self.deferred.add(ctx.req_id)
            return
        self.deferred.discard(ctx.req_id)
        pairs = zip(keys, answers, strict=False)
        head = [key for key, _ in itertools.takewhile(lambda pair: pair[1] is HIT, pairs)]
        if head and loads:
            self.world.load(ctx, head)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), keys=CHAIN, again=st.booleans(), ends=st.booleans())
    def offer(self, data, keys, again, ends):
        before = len(self.world.writes)
        self.world.offer(self.request(data), keys + keys[:1] if again else keys)
        if ends and len(self.world.writes) > before:
            self.world.written(self.world.writes[-1])

    @precondition(lambda self: any(not copy.stale for copy in self.world.copies))
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def end_a_device_copy(self, data, success):
        copies = [copy for copy in self.world.copies if not copy.stale]
        copy = copies[data.draw(st.integers(0, len(copies) - 1))]
        if isinstance(copy, Write):
            self.world.written(copy, success=success)
        else:
            self.world.loaded(copy)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), keys=CHAIN)
    def touch_and_finish(self, data, keys):
        ctx = self.request(data)
        self.world.planner.touch(keys, ctx)
        self.deferred.discard(ctx.req_id)
        self.world.finish(ctx)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def compute_without_loading(self, data):
        ctx = self.request(data)
        self.deferred.discard(ctx.req_id)
        self.world.planner.on_request_scheduled(ctx)

    @rule(seconds=st.sampled_from([0.5, 0.0, 4.0]), finishes=st.booleans())
    def step(self, seconds, finishes):
        self.world.step(seconds)
        if finishes:
            self.world.finish_all()

    # -- the tiers ------------------------------------------------------------------------------

    @precondition(lambda self: self.world.running)
    @rule(
        data=st.data(),
        how=st.sampled_from(["ok", "orphan", "part", "none", "ok", "fail"]),
        error=ERRORS,
        seconds=st.sampled_from([0.0, 0.001, 1.0]),
    )
    def finish_job(self, data, how, error, seconds):
        job_id = data.draw(st.sampled_from(sorted(self.world.running)))
        if how == "orphan":
            self.world.orphan(job_id)
            return
        if how == "fail":
            self.world.fail(job_id, error=error("scripted"), seconds=seconds)
            return
        indices = range(len(self.world.running[job_id][1].keys))
        failed = {"ok": (), "none": indices}.get(how)
        if failed is None:
            failed = data.draw(st.sets(st.sampled_from(indices), min_size=1))
        fault = error("scripted") if failed else None
        self.world.finish_job(job_id, failed=failed, error=fault, seconds=seconds)

    @precondition(lambda self: self.world.late)
    @rule(data=st.data(), fails=st.booleans())
    def release(self, data, fails):
        job_id = data.draw(st.sampled_from(sorted(self.world.late)))
        keys = self.world.late[job_id][1].keys
        self.world.release(job_id, failed=range(len(keys)) if fails else ())

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def hang(self, data):
        """All that a tier has under way is overdue, and may never end."""
        tier = data.draw(st.sampled_from(sorted({tier for tier, _ in self.world.running.values()})))
        for job_id in [i for i, (at, _) in self.world.running.items() if at == tier]:
            self.world.orphan(job_id)

    # -- deletion -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.planner.deletions.running) < MOST_DELETIONS)
    @rule(keys=CHAIN, where=st.sampled_from(["everywhere", "everywhere", "one tier", "primary"]))
    def delete(self, keys, where):
        if where == "everywhere":
            self.world.delete(keys)
        elif where == "primary":
            self.world.delete(keys, [])
        elif self.world.tiers:
            self.world.delete(keys, [0], in_primary=False)

    @rule(keys=CHAIN, seconds=st.sampled_from([0.0, 1.0, 100.0]))
    def pin_for_a_time(self, keys, seconds):
        pins = self.world.planner.pins
        if not seconds:
            pins.unpin(keys)
            return
        count = pins.pin(keys, self.world.now_s + seconds)
        assert count <= len(pins) <= self.world.primary.num_slots // 4

    @precondition(lambda self: hasattr(self, "world") and self.world.endable_calls())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_a_call(self, data, fails):
        call = data.draw(st.sampled_from(sorted(self.world.endable_calls())))
        count = len(self.world.calls[call].keys)
        failed = data.draw(st.sets(st.integers(0, count - 1), min_size=1)) if fails else ()
        self.world.end_call(call, failed=failed)

    # -- what is rare ---------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["lose", "lose unnoticed", "probe", "refuse", "reset"]),
        tier=st.integers(0, 2),
        key=st.sampled_from(ALL_KEYS),
    )
    def disturb(self, what, tier, key):
        if self.world.planner.promotions_paused:
            self.world.flush_reset()
        elif what == "reset":
            self.world.reset()
        elif tier < len(self.world.tiers):
            if what.startswith("lose"):
                self.world.lose(tier, key, announced=what == "lose")
            elif what == "probe":
                self.world.tiers[tier].is_probing ^= True
            else:
                self.world.refusing ^= {tier}

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def copies_leave_slots_to_stores(self):
        if hasattr(self, "world"):
            copies = (*self.world.running.values(), *self.world.late.values())
            loading = {s for _, job in copies if job.is_promotion for s in job.block_ids.tolist()}
            room = self.world.planner.room
            most = [share.most - room.reserved_in(share) for share in self.world.primary.shares]
            assert len(loading) <= sum(most)

    @invariant()
    def one_is_tried(self):
        if not hasattr(self, "world"):
            return
        planner = self.world.planner
        for tier in planner.tiers:
            for breaker, is_promotion in (tier.health.loads, True), (tier.health.stores, False):
                if breaker.state is BreakerState.HALF_OPEN:
                    tries = 0
                    for job in tier.jobs.unreported():
                        is_new = job.submit_time >= breaker._tried_at_s
                        tries += job.is_promotion is is_promotion and is_new
                    probes = tier.health._probes_begun_s.values() if is_promotion else ()
                    tries += sum(begun_s >= breaker._tried_at_s for begun_s in probes)
                    assert tries == 1

    def teardown(self):
        if hasattr(self, "world"):
            self.decide_what_is_deferred()
            self.nobody_waits_to_the_limit_on_healthy_tiers()
            self.world.wind_down()

    def decide_what_is_deferred(self):
        """P14: with every copy ending each step, and probes that never answer."""
        world = self.world
        steps = int(DEFERRAL_S) + 2
        world.history.record(*(RequestDeferred(req_id, steps) for req_id in sorted(self.deferred)))
        for _ in range(steps):
            for write in [write for write in world.writes if not write.stale]:
                world.written(write)
            for req_id in sorted(self.deferred):
                self.unsure.clear()
                answers = {world.lookup(world.live[req_id], key) for key in ALL_KEYS}
                if answers <= {HIT, MISS}:
                    self.deferred.discard(req_id)
                    world.history.record(RequestDecided(req_id))
            world.step(1.0)
            world.finish_all()
        assert not self.deferred

    def nobody_waits_to_the_limit_on_healthy_tiers(self):
        """Requests that come now are decided before their limit, whatever the others do.

        The tiers are healthy: no probe and no copy takes longer than a step, which is shorter than
        a turn. The other requests ask in each step, and are never scheduled: each has its turn
        before them, twice if a tier has lost a block unnoticed.
        """
        world, fresh = self.world, {}
        world._work_again()
        if world.planner.promotions_paused:
            world.flush_reset()
        for number, chain in enumerate(CHAINS):
            where = {k(name): i for i, name in enumerate(chain)}
            fresh[world.begin(f"fresh{number}", key_positions=where)] = list(where)
        others = [ctx for ctx in world.live.values() if ctx not in fresh]
        for _ in range(int(3 * DEFERRAL_S / HEALTHY_STEP_S)):
            if not fresh:
                break
            for ctx in others:
                self.unsure.clear()
                world.lookups(ctx, ALL_KEYS)
            for ctx, keys in list(fresh.items()):
                self.unsure.clear()
                answers = world.lookups(ctx, keys, stop_at_miss=True)
                assert not world.planner.requests[ctx].is_expired, "expired on healthy tiers"
                if {*answers} <= {HIT, MISS}:
                    del fresh[ctx]
                    if answers[0] is HIT:
                        world.load(ctx, keys[: answers.count(HIT)])
            self.step_with_all_ending()
        assert not fresh, "undecided on healthy tiers"

    def step_with_all_ending(self):
        self.world.step(HEALTHY_STEP_S)
        for write in list(self.world.writes):
            self.world.written(write)
        for read in list(self.world.reads):
            self.world.loaded(read)
        while self.world.late:
            self.world.release()
        self.world.finish_all()


class TestPlanner(PlannerMachine.TestCase):
    settings = AS_THE_PROFILE


@given(
    orders=st.lists(st.permutations(range(6)), min_size=2, max_size=3),
    policy=st.sampled_from(["lru", "arc", "hd"]),
)
def test_completion_order_does_not_change_the_outcome(orders, policy):
    history = History()
    for order in orders:
        world = World(16, 2, policy=policy)
        for req_id, names in ("r", "abc"), ("s", "bcd"), ("t", "efg"):
            ctx = world.begin(req_id, key_positions={k(n): i for i, n in enumerate(names)})
            world.offer(ctx, names)
        for turn in order:
            if turn < 3:
                world.written(next(w for w in world.writes if w.ctx.req_id == "rst"[turn]))
            elif world.running:
                world.finish_job(sorted(world.running)[turn % len(world.running)])
        world.finish_all()
        for ctx in list(world.live.values()):
            world.finish(ctx)
        world.wind_down()
        tiers = tuple(tuple(sorted(tier.contents.items())) for tier in world.tiers)
        order_of_victims = tuple(ranked(world.primary))
        history.record(RunEnded("three requests", str(order), (order_of_victims, tiers)))
    check_history(history)
