"""A tier that is asked only for requests that miss enough blocks."""

import pytest
from core.machines import AS_THE_PROFILE
from core.terms import HIT, MISS, RETRY, k, ks
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload_async.core.index import CostGatedIndex, ExactIndex, ProbedIndex


def cost_gated(min_blocks=3, index=None):
    return CostGatedIndex(ProbedIndex(2) if index is None else index, min_blocks)


def answers(index, names, request="r"):
    return [index.lookup(key, request) for key in ks(names)]


def probed(index):
    probe = index.next_probe()
    return None if probe is None else probe.keys


def test_a_request_that_misses_too_little_costs_no_question():
    index = cost_gated()
    assert answers(index, "ab") == [RETRY, RETRY]
    assert index.is_waiting
    assert probed(index) is None
    assert not index.is_waiting
    assert answers(index, "ab") == [MISS, MISS]
    assert probed(index) is None


def test_a_key_that_is_asked_for_again_counts_once():
    index = cost_gated()
    assert answers(index, "ababab") == [RETRY] * 6
    assert probed(index) is None


def test_a_request_that_misses_enough_asks_for_all_of_it():
    index = cost_gated()
    assert answers(index, "abcd") == [RETRY] * 4
    assert probed(index) == tuple(ks("abcd"))
    assert index.probes_outstanding == 1
    index.answered(1, frozenset(ks("ab")))
    assert answers(index, "abcd") == [HIT, HIT, MISS, MISS]


def test_a_request_that_turns_out_to_miss_more_is_answered_after_all():
    index = cost_gated()
    answers(index, "ab")
    index.next_probe()
    assert answers(index, "ab") == [MISS, MISS]
    assert answers(index, "c") == [RETRY]
    assert probed(index) == tuple(ks("abc"))


def test_a_short_request_takes_nothing_from_a_long_one_that_shares_its_blocks():
    index = cost_gated()
    answers(index, "a", "short")
    answers(index, "abc", "long")
    assert probed(index) == tuple(ks("abc"))
    index.answered(1, frozenset(ks("abc")))
    assert answers(index, "a", "short") == [MISS]
    assert answers(index, "abc", "long") == [HIT] * 3


def test_who_was_told_to_wait_is_told_that_the_answer_is_there():
    index, told = cost_gated(), []
    index.watch(told.append)
    index.watch(told.append)
    answers(index, "ab")
    index.next_probe()
    index.next_probe()
    assert told == [tuple(ks("ab"))]


def test_who_waits_for_few_blocks_is_told_where_no_probe_may_be_started():
    index, told = cost_gated(), []
    index.watch(told.append)
    answers(index, "a", "short")
    answers(index, "xyz", "long")
    index.tier_suspended()
    assert told == [tuple(ks("axy")), tuple(ks("xyz"))]
    assert answers(index, "a", "short") == [MISS]


def test_a_request_that_ended_begins_anew():
    index = cost_gated()
    answers(index, "abc")
    index.forget_request("r")
    assert probed(index) is None
    assert answers(index, "ab") == [RETRY, RETRY]
    index.forget_request("r")
    assert answers(index, "ab") == [RETRY, RETRY]


def test_what_is_known_of_blocks_reaches_the_index_behind_it():
    index = cost_gated(min_blocks=2, index=ExactIndex())
    assert index.is_exact
    assert not cost_gated().is_exact
    index.appeared(ks("abc"))
    index.vanished(ks("c"), surely=True)
    assert index.lacks(ks("abc")) == ks("c")
    assert answers(index, "abc") == [RETRY, HIT, MISS]
    assert index.is_waiting, "the first has to be asked for again"
    assert index.next_probe() is None
    assert answers(index, "a") == [HIT]


NAMES = st.sampled_from("abcdef")
REQUESTS = st.sampled_from("rst")


class CostGatedMachine(RuleBasedStateMachine):
    """Beside an index that is asked what the cost_gated one ought to ask."""

    @initialize(min_blocks=st.integers(2, 4))
    def build(self, min_blocks):
        self.min_blocks = min_blocks
        self.index = CostGatedIndex(ProbedIndex(2, 4), min_blocks)
        self.plain = ProbedIndex(2, 4)
        self.missed = {}
        self.decided = set()
        self.generations = []

    def is_worthwhile(self, request):
        return len(self.missed.get(request, ())) >= self.min_blocks

    @rule(request=REQUESTS, names=st.lists(NAMES, min_size=1, max_size=4))
    def look_up(self, request, names):
        for key in ks(names):
            before = self.is_worthwhile(request)
            self.missed.setdefault(request, {})[key] = None
            if not self.is_worthwhile(request):
                expected = MISS if request in self.decided else RETRY
            else:
                for earlier in () if before else self.missed[request]:
                    self.plain.lookup(earlier, request)
                expected = self.plain.lookup(key, request)
            assert self.index.lookup(key, request) is expected

    @rule(
        request=REQUESTS,
        names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
        stop=st.booleans(),
    )
    def look_up_at_once(self, request, names, stop):
        keys = ks(names)
        earlier = dict(self.missed.get(request, {}))
        was_worthwhile = self.is_worthwhile(request)
        self.missed.setdefault(request, {}).update(dict.fromkeys(keys))
        if self.is_worthwhile(request):
            if not was_worthwhile:
                self.plain.lookup_many(tuple(earlier), request)
            expected = self.plain.lookup_many(keys, request, stop_at_miss=stop)
        elif request in self.decided:
            expected = [MISS] if stop else [MISS] * len(keys)
        else:
            expected = [RETRY] * len(keys)
        assert self.index.lookup_many(keys, request, stop_at_miss=stop) == expected

    @rule()
    def end_the_step(self):
        self.decided |= self.missed.keys()
        probe = self.index.next_probe()
        assert probe == self.plain.next_probe()
        if probe is not None:
            self.generations.append(probe.generation)

    @precondition(lambda self: self.generations)
    @rule(present=st.frozensets(NAMES.map(k)))
    def answer(self, present):
        generation = self.generations.pop(0)
        self.index.answered(generation, present)
        self.plain.answered(generation, present)

    @rule(request=REQUESTS)
    def forget(self, request):
        self.missed.pop(request, None)
        self.decided.discard(request)
        self.index.forget_request(request)
        self.plain.forget_request(request)

    @rule(names=st.frozensets(NAMES), present=st.booleans())
    def change(self, names, present):
        for index in self.index, self.plain:
            if present:
                index.appeared(ks(names))
            else:
                index.vanished(ks(names), surely=True)

    @invariant()
    def little_is_remembered(self):
        if hasattr(self, "index"):
            few = self.index._missed
            assert all(len(keys) < self.min_blocks for keys in few.values())
            assert few.keys() | self.index._worthwhile <= self.missed.keys()
            assert self.index.probes_outstanding == self.plain.probes_outstanding


@pytest.mark.stateful
class TestCostGated(CostGatedMachine.TestCase):
    settings = AS_THE_PROFILE
