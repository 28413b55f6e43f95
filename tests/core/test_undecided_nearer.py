"""A far tier that is asked only for much: it decides once the nearer tiers know the request."""

import pytest
from core.terms import MISS, PENDING, RETRY, ks

from kvoffload_async.abc.events import ProbeAnswered
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import AskedIndex, CostGatedIndex, ProbedIndex
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import Locality, Medium, ReqContext

DEFERRAL_S = 10.0


class Chain:
    """A probed tier before a remote one that is asked from four missed blocks on."""

    def __init__(self, near=None, min_blocks=4, keys_per_probe=3):
        self.near = near or TierState(
            "near", ProbedIndex(2, keys_per_probe), 1, EventLog(Medium.STORAGE, enabled=False)
        )
        self.index = CostGatedIndex(ProbedIndex(2), min_blocks)
        self.far = TierState(
            "far",
            self.index,
            1,
            EventLog(Medium.STORAGE, Locality.REMOTE, enabled=False),
        )
        self.told = []
        self.index.watch(self.told.extend)
        primary = Primary(100, LruPolicy(100))
        self.planner = Planner(primary, [self.near, self.far], DEFERRAL_S)
        self.now_s = 0.0

    def begin(self, name="r"):
        ctx = ReqContext(name)
        self.planner.on_new_request(ctx)
        return ctx

    def look_up(self, ctx, names):
        """Ask as a scheduler does, up to the first miss; return the answers."""
        answers = []
        for key in ks(names):
            answers.append(self.planner.lookup(key, ctx))
            if answers[-1] is MISS:
                break
        return answers

    def step(self):
        """End a step; return what each tier is asked by a probe."""
        self.planner.end_step()
        probes = {}
        for tier in (self.near, self.far):
            tier.end_step()
            for probe in tier.take_effects():
                probes[tier.name] = probe
        self.now_s += 1.0
        self.planner.begin_step(self.now_s)
        return probes

    def answer(self, tier, probe, present=""):
        tier.handle(ProbeAnswered(probe.generation, frozenset(ks(present))))


@pytest.fixture
def chain():
    return Chain()


def test_what_the_near_tier_finds_out_in_several_probes_counts_together(chain):
    ctx = chain.begin()
    assert chain.look_up(ctx, "abcde") == [RETRY] * 5
    first = chain.step()["near"]
    assert first.keys == tuple(ks("abc"))
    chain.answer(chain.near, first)
    assert chain.look_up(ctx, "abcde") == [RETRY] * 5
    second = chain.step()
    assert second.keys() == {"near"}, "three of four that are needed"
    assert chain.look_up(ctx, "abcde") == [RETRY] * 5, "two may still be missed"
    assert chain.step() == {}
    chain.answer(chain.near, second["near"])
    assert chain.look_up(ctx, "abcde") == [RETRY] * 5
    assert chain.step()["far"].keys == tuple(ks("abcde"))


def test_what_another_request_has_asked_before_is_no_reason_to_decide_early(chain):
    other, ctx = chain.begin("other"), chain.begin()
    chain.look_up(other, "ab")
    chain.answer(chain.near, chain.step()["near"])
    assert chain.look_up(ctx, "abcd") == [RETRY] * 4
    near = chain.step()["near"]
    assert near.keys == tuple(ks("cd"))
    assert chain.look_up(ctx, "abcd") == [RETRY] * 4
    chain.step()
    chain.answer(chain.near, near)
    assert chain.look_up(ctx, "abcd") == [RETRY] * 4
    assert chain.step()["far"].keys == tuple(ks("abcd"))


def test_who_asks_only_again_for_what_has_changed_is_counted_right_too(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "abc")
    second = chain.step()["near"]
    assert chain.told == []
    chain.look_up(ctx, "a")
    chain.step()
    chain.answer(chain.near, second)
    assert chain.look_up(ctx, "de") == [RETRY] * 2
    assert chain.step()["far"].keys == tuple(ks("abcde"))


def test_what_is_found_out_counts_although_the_request_does_not_ask_in_that_step(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    assert chain.step()["far"].keys == tuple(ks("abcde"))


def test_what_the_near_tier_turns_out_to_have_does_not_count(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"], "de")
    assert chain.index.is_waiting
    assert chain.step() == {}
    assert not chain.index.is_waiting
    assert chain.told == ks("abc")
    assert chain.look_up(ctx, "abcde") == [MISS]


def test_a_request_whose_missing_blocks_were_few_is_not_held_up_by_what_it_asks_later(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abc")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "abc")
    chain.step()
    assert chain.look_up(ctx, "abc") == [MISS]
    assert [chain.planner.lookup(key, ctx) for key in ks("dabc")] == [RETRY, MISS, MISS, MISS]
    assert chain.index.unknown == {}


def test_a_near_tier_that_is_not_asked_any_more_is_not_waited_for(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "abcde")
    chain.near.is_available = False
    assert chain.step()["far"].keys == tuple(ks("abcde"))
    assert chain.told == ks("abcde")


def test_a_request_waits_no_longer_than_it_may_be_deferred(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    while chain.look_up(ctx, "abcde") != [MISS]:
        chain.step()
    assert chain.now_s == DEFERRAL_S


def test_a_request_that_ends_while_the_near_tier_is_asked_leaves_nothing_behind(chain):
    ctx = chain.begin()
    chain.look_up(ctx, "abcde")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "abcde")
    chain.step()
    chain.planner.on_request_finished(ctx)
    assert [chain.index.unknown, chain.index._missed, chain.index._deferred] == [{}, {}, {}]
    assert not chain.index.is_waiting


def test_of_a_third_partys_tier_only_what_it_says_at_a_lookup_is_known():
    undecided = frozenset(ks("de"))
    index = AskedIndex(lambda key, _ctx: RETRY if key in undecided else MISS, lambda _ctx: None)
    chain = Chain(TierState("near", index, 1, EventLog(Medium.STORAGE, enabled=False)))
    ctx = chain.begin()
    assert chain.look_up(ctx, "abcde") == [RETRY] * 5
    assert chain.step() == {}
    assert chain.look_up(ctx, "abcde") == [MISS]


def test_lookups_that_are_declined_are_counted_as_skipped():
    chain = Chain(min_blocks=2)
    ctx = chain.begin()
    chain.look_up(ctx, "a")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "a")
    chain.step()
    assert chain.look_up(ctx, "a") == [MISS]
    counters = chain.far.counters
    assert (counters.lookups, counters.undecided, counters.misses) == (1, 1, 0)
    assert counters.skipped_lookups["too_few"] == 1
    assert chain.planner.counters.misses["skipped"] == 1
    assert chain.planner.counters.misses["absent"] == 0


def test_lookups_that_are_answered_are_not():
    chain = Chain(min_blocks=2)
    ctx = chain.begin()
    chain.look_up(ctx, "ab")
    chain.answer(chain.near, chain.step()["near"])
    chain.look_up(ctx, "ab")
    chain.answer(chain.far, chain.step()["far"], "a")
    assert chain.look_up(ctx, "ab") == [PENDING, MISS]
    counters = chain.far.counters
    assert (counters.hits, counters.misses) == (1, 1)
    assert counters.skipped_lookups["too_few"] == 0
    assert chain.planner.counters.misses["absent"] == 1


def test_a_step_asks_the_near_tier_for_one_block_of_a_request_until_it_is_resolved(chain):
    requests = [chain.begin(f"r{number}") for number in range(20)]
    for number, ctx in enumerate(requests):
        chain.planner.lookup_many(ks([f"{number}.{block}" for block in range(3)]), ctx)
    first = chain.step()["near"]
    peeked = []
    peek = chain.near.index.peek
    chain.near.index.peek = lambda keys: peeked.extend(keys) or peek(keys)
    firsts = ks([f"{number}.0" for number in range(20)])
    chain.step()
    assert peeked == firsts
    peeked.clear()
    chain.answer(chain.near, first)
    chain.step()
    assert peeked == [firsts[0], *ks(["0.0", "0.1", "0.2"]), *firsts[1:]]


def test_of_two_requests_that_wait_for_a_block_one_may_end(chain):
    first, second = chain.begin("r"), chain.begin("s")
    for ctx in first, second:
        chain.look_up(ctx, "abcd")
    probe = chain.step()["near"]
    chain.planner.on_request_finished(first)
    chain.answer(chain.near, probe)
    rest = chain.step()["near"]
    chain.answer(chain.near, rest)
    assert chain.look_up(second, "abcd") == [RETRY] * 4
    assert chain.step()["far"].keys == tuple(ks("abcd"))


def test_a_request_without_unresolved_blocks_waits_for_none(chain):
    chain.index.expect((), chain.begin())
    assert chain.index.unknown == {}
