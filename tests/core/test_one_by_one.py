"""A scheduler that asks key by key: the keys that it repeats are asked for in one call."""

import sys

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, ks
from core.world import World

LETTERS = "abcdefghijklmnopqrstuvwx"


class Heard:
    """The calls in which a world's tiers are asked for keys."""

    def __init__(self, world):
        self.calls = []
        for index, tier in enumerate(world.planner.tiers):
            tier.lookup_many = self.observed(index, tier.lookup_many)

    def observed(self, index, lookup_many):
        def ask(keys, req_context, *, stop_at_miss):
            self.calls.append((index, list(keys)))
            return lookup_many(keys, req_context, stop_at_miss=stop_at_miss)

        return ask

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


def asked(world, ctx, names):
    return [world.lookup(ctx, name) for name in names]


def waiting(names, **options):
    """A request that has asked for keys of which the tier's answers are outstanding."""
    world = World(num_slots=40, kinds={0: "probed"}, **options)
    world.fill(0, ks(names))
    world.tiers[0].is_probing = True
    ctx = world.begin()
    assert asked(world, ctx, names) == [RETRY] * len(names)
    world.step()
    return world, ctx


def test_keys_that_are_repeated_are_asked_for_in_one_call():
    world, ctx = waiting("abc")
    heard = Heard(world)
    assert asked(world, ctx, "abc") == [RETRY] * 3
    assert heard.taken() == [(0, ks("abc"))]
    assert world.tiers[0].state.counters.undecided == 6
    assert world.planner.counters.retries == 6
    world.tiers[0].is_probing = False
    world.step()
    assert asked(world, ctx, "abcd") == [PENDING] * 3 + [RETRY], "d is new"
    assert heard.taken() == [(0, ks("abc")), (0, ks("d"))]
    world.step()
    assert asked(world, ctx, "abcd") == [PENDING] * 3 + [MISS]
    world.step()
    assert asked(world, ctx, "abc") == [PENDING] * 3, "it has its ticket: no tier is asked"
    assert heard.taken() == [(0, ks("abcd"))]
    world.finish_all()
    assert asked(world, ctx, "abc") == [HIT] * 3
    world.step()
    world.wind_down()


def test_only_what_is_asked_for_counts_and_is_waited_for():
    world, ctx = waiting("ab")
    before = world.planner.counters.lookups
    world.tiers[0].is_probing = False
    world.step()
    assert asked(world, ctx, "a") == [PENDING]
    assert world.planner.counters.lookups == before + 1
    world.step()
    ((_, job),) = world.running.values()
    assert job.keys == tuple(ks("a"))
    world.finish_all()
    world.wind_down()


def test_a_key_of_which_no_answer_is_outstanding_any_more_keeps_nobody_waiting():
    world, ctx = waiting("a")
    assert asked(world, ctx, "ab") == [RETRY, RETRY]
    world.tiers[0].is_probing = False
    world.step()
    world.tiers[0].is_probing = True
    assert asked(world, ctx, "abc") == [PENDING, MISS, RETRY]
    world.step()
    assert not world.running
    assert asked(world, ctx, "a") == [PENDING], "c is not asked for any more"
    world.step()
    ((_, job),) = world.running.values()
    assert job.keys == tuple(ks("a"))
    world.tiers[0].is_probing = False
    world.finish_all()
    world.wind_down()


def test_a_block_that_is_stored_after_the_tiers_were_asked_is_found():
    world, ctx = waiting("a")
    assert asked(world, ctx, "ab") == [RETRY, RETRY]
    world.tiers[0].is_probing = False
    world.step()
    other = world.begin("other")
    assert asked(world, ctx, "a") == [PENDING]
    world.store(other, "b")
    assert asked(world, ctx, "b") == [HIT]
    world.step()
    world.finish_all()
    world.wind_down()


def test_a_request_that_has_proceeded_repeats_nothing():
    world, ctx = waiting("abc")
    assert asked(world, ctx, "abc") == [RETRY] * 3
    world.planner.end_step([ctx.req_id])
    heard = Heard(world)
    assert asked(world, ctx, "d") == [RETRY]
    assert heard.taken() == [(0, ks("d"))]
    world.tiers[0].is_probing = False
    world.step()
    world.wind_down()


def test_requests_that_take_turns_ask_once_in_advance():
    world, ctx = waiting("ab")
    other = world.begin("other")
    heard = Heard(world)
    for name in "ab":
        assert asked(world, ctx, name) == [RETRY]
        assert asked(world, other, name) == [RETRY]
    own = [keys for _, keys in heard.taken() if len(keys) > 1]
    assert own == [ks("ab")]
    world.tiers[0].is_probing = False
    world.step()
    world.wind_down()


def calls_of(function):
    """Return how many functions of the package a call enters."""
    count = 0

    def profile(frame, event, _arg):
        nonlocal count
        count += event == "call" and "/kvoffload_async/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("is_stored", [True, False], ids=["promoted", "missing"])
def test_a_further_key_costs_few_calls_over_all_rounds(is_stored):
    def rounds(names):
        world = World(num_slots=60, tiers=2, kinds={0: "probed", 1: "cost_gated"}, remote=[1])
        if is_stored:
            world.fill(0, ks(names))
        ctx = world.begin()
        keys = ks(names)
        for _ in range(6):
            answers = {world.planner.lookup(key, ctx) for key in keys}
            if not answers & {PENDING, RETRY}:
                return
            world.planner.end_step()
            for tier in world.tiers:
                tier.state.end_step()
            world._absorb()
            for tier in world.tiers:
                tier.answer_probes()
            while world.running:
                world.finish_job()
            world.planner.collect()
            world.now_s += 1.0
            world.planner.begin_step(world.now_s)
        raise AssertionError("the answers are still outstanding")

    few, many = LETTERS[:4], LETTERS
    more = calls_of(lambda: rounds(many)) - calls_of(lambda: rounds(few))
    assert more / (len(many) - len(few)) <= 25
