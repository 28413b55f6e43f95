"""A tier that is asked only for as many blocks as loading pays for, as measured."""

import math

from core.terms import HIT, MISS, RETRY, figures_of, job, k, ks

from kvoffload_async.abc.events import JobFinished, ProbeAnswered
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import (
    FRESH_S,
    BreakEven,
    CostGatedIndex,
    ExactIndex,
    ProbedIndex,
    _Line,
)
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import BlockMissingError, TierTimeoutError, TierUnavailableError
from kvoffload_async.statistics import BreakEvenStatistics
from kvoffload_async.types import Medium, ReqContext

SLOW = [(10, 10.0), (100, 100.0)]
"""A second a block: no number of blocks is enough at `RATE`."""
RATE = 10.0


def measured(jobs=SLOW, probe_s=0.0, min_blocks=2):
    break_even = BreakEven(RATE)
    break_even.probe_ended(probe_s, worked=True)
    for num_blocks, seconds in jobs:
        break_even.load_ended(num_blocks, seconds)
    index = CostGatedIndex(ProbedIndex(2), min_blocks, break_even)
    index.next_probe()
    return index, break_even


def answers(index, names, request="r"):
    return [index.lookup(key, request) for key in ks(names)]


def probed(index):
    probe = index.next_probe()
    return None if probe is None else probe.keys


def test_before_anything_is_measured_the_configured_number_decides():
    index = CostGatedIndex(ProbedIndex(2), 2, BreakEven(RATE))
    assert answers(index, "a") == [RETRY]
    assert probed(index) is None
    assert answers(index, "ab") == [MISS, RETRY]
    assert probed(index) == tuple(ks("ab"))


def test_with_one_block_as_the_least_the_first_is_asked_for_at_once():
    index = CostGatedIndex(ExactIndex(), 1, BreakEven(RATE))
    index.appeared(ks("a"))
    assert answers(index, "ab") == [HIT, MISS]


def test_what_was_measured_may_ask_for_more_than_was_configured():
    index, _ = measured([(10, 0.0)], probe_s=0.35)
    assert index.needed_blocks == 4
    assert answers(index, "abc") == [RETRY] * 3
    assert probed(index) is None
    assert answers(index, "abc") == [MISS] * 3
    assert answers(index, "abcd", "long") == [RETRY] * 4
    assert probed(index) == tuple(ks("abcd"))


def test_never_for_less_than_was_configured():
    index, _ = measured([(10, 0.0)], probe_s=0.35, min_blocks=6)
    assert index.needed_blocks == 6


def test_where_no_number_is_enough_nobody_is_asked():
    index, _ = measured()
    assert index.needed_blocks == math.inf
    assert answers(index, range(50)) == [RETRY] * 50
    assert probed(index) is None
    assert answers(index, range(50)) == [MISS] * 50


def test_what_is_measured_during_a_step_counts_from_its_end_on():
    index, break_even = measured([(10, 0.0)], probe_s=0.35)
    assert answers(index, "abc") == [RETRY] * 3
    for _ in range(100):
        break_even.probe_ended(0.15, worked=True)
    assert index.needed_blocks == 4
    assert probed(index) == tuple(ks("abc")), "decided with what is known now"
    assert index.needed_blocks == 2


def test_a_request_that_was_found_worthwhile_stays_so():
    index, break_even = measured([(10, 0.0)], probe_s=0.15)
    assert answers(index, "ab") == [RETRY] * 2
    for _ in range(100):
        break_even.probe_ended(5.0, worked=True)
    assert probed(index) == tuple(ks("ab"))
    assert index.needed_blocks > 40
    assert answers(index, "abc") == [RETRY] * 3
    assert probed(index) == tuple(ks("c"))


def test_when_it_is_old_one_request_at_a_time_measures_anew_the_largest():
    index, break_even = measured()
    break_even.advance(FRESH_S)
    for name, keys in ("short", "ab"), ("long", "cdef"), ("middle", "ghi"):
        answers(index, keys, name)
    assert probed(index) == tuple(ks("cdef"))
    assert answers(index, "ab", "short") == [MISS] * 2
    index.answered(1, frozenset(ks("c")))
    assert answers(index, "cd", "long") == [HIT, MISS]
    break_even.advance(FRESH_S + 10)
    answers(index, "xyz", "later")
    assert probed(index) is None, "the explorer is still there"
    assert break_even.explorations == 1


def test_the_end_of_the_explorer_and_of_no_other_lets_the_next_one_through():
    index, break_even = measured()
    break_even.advance(FRESH_S)
    answers(index, "ab", "explorer")
    assert probed(index) == tuple(ks("ab"))
    break_even.advance(FRESH_S + 10)
    index.forget_request("other")
    answers(index, "cd", "second")
    assert probed(index) is None
    index.forget_request("explorer")
    assert index._explorer is None, "nothing is remembered of it"
    answers(index, "ef", "third")
    assert probed(index) == tuple(ks("ef"))


def test_hundreds_of_requests_in_one_step_are_one_exploration():
    index, break_even = measured()
    break_even.advance(FRESH_S)
    for number in range(512):
        answers(index, [f"{number}a", f"{number}b"], number)
    assert len(probed(index)) == 2
    assert break_even.explorations == 1


def test_a_request_below_the_configured_number_never_explores():
    index, break_even = measured(min_blocks=3)
    break_even.advance(FRESH_S)
    answers(index, "ab")
    assert probed(index) is None
    assert break_even.explorations == 0


def test_nobody_explores_while_the_tier_is_left_alone():
    index, break_even = measured()
    break_even.advance(FRESH_S)
    answers(index, "abc")
    index.tier_suspended()
    assert break_even.explorations == 0
    assert answers(index, "abc") == [MISS] * 3


def test_an_explorer_of_an_exact_tier_is_told_to_ask_again():
    break_even = BreakEven(RATE)
    for num_blocks, seconds in SLOW:
        break_even.load_ended(num_blocks, seconds)
    index, told = CostGatedIndex(ExactIndex(), 1, break_even), []
    index.watch(told.extend)
    index.appeared(ks("ab"))
    index.next_probe()
    break_even.advance(FRESH_S)
    assert answers(index, "ab") == [RETRY] * 2
    index.next_probe()
    assert told == ks("ab")
    assert answers(index, "ab") == [HIT] * 2


# -- what a tier tells it -----------------------------------------------------------------------


def tier_of(break_even, min_blocks=2):
    index = CostGatedIndex(ProbedIndex(2), min_blocks, break_even)
    return TierState("far", index, 10, EventLog(Medium.STORAGE, enabled=False))


def end_load(tier, job_id, names, seconds, *, failures=None, error=None):
    tier.submit(job(job_id, names, promotion=True))
    tier.take_effects()
    tier.handle(JobFinished(job_id, failures or {}, error, seconds))


def reading(tier):
    return figures_of(tier).break_even


def test_a_tier_tells_of_its_probes_and_loads():
    tier = tier_of(BreakEven(RATE))
    assert reading(tier) == BreakEvenStatistics(
        needed_blocks=2, latency_s=None, blocks_per_s=None, explorations=0
    )
    tier.tell_time(lambda: 5.0)
    for name in "abcd":
        tier.index.lookup(k(name), ReqContext("r"))
    tier.end_step()
    tier.handle(ProbeAnswered(1, frozenset(), None, 0.23))
    end_load(tier, 1, "abcd", 0.2)
    end_load(tier, 2, "abcdefghijkl", 0.6)
    tier.end_step()
    seen = reading(tier)
    assert math.isclose(seen.latency_s, 0.23)
    assert math.isclose(seen.blocks_per_s, 20.0)
    assert seen.needed_blocks == 5


def test_what_another_thread_reads_while_a_load_is_recorded_is_what_was_known_before(monkeypatch):
    _, break_even = measured([(10, 1.0)])
    add, read = _Line.add, []

    def read_by_another_thread():
        read.append((break_even.latency_s, break_even.blocks_per_s))

    def read_then_add(line, num_blocks, seconds):
        read_by_another_thread()
        add(line, num_blocks, seconds)

    monkeypatch.setattr(_Line, "add", read_then_add)
    read_by_another_thread()
    break_even.advance(FRESH_S)
    break_even.load_ended(10, 2.0)
    assert read[0] == read[1] != (None, None)


def test_that_no_number_is_enough_is_shown_as_none():
    tier = tier_of(BreakEven(RATE))
    end_load(tier, 1, "ab", 2.0)
    end_load(tier, 2, "abcdefghij", 10.0)
    tier.end_step()
    assert reading(tier).needed_blocks is None


def test_what_failed_or_was_stored_or_was_empty_tells_nothing_of_its_speed():
    tier = tier_of(BreakEven(RATE))
    end_load(tier, 1, "ab", 9.0, failures={1: BlockMissingError("gone")})
    end_load(tier, 2, "ab", 9.0, error=TierUnavailableError("down"))
    end_load(tier, 3, "", 9.0)
    tier.submit(job(4, "ab"))
    tier.take_effects()
    tier.handle(JobFinished(4, seconds=9.0))
    tier.handle(ProbeAnswered(1, frozenset(), TierTimeoutError("late"), 0.001))
    assert reading(tier).latency_s is None
    end_load(tier, 5, "ab", 0.0)
    assert reading(tier).latency_s == 0.0


def test_a_tier_that_nobody_measures_is_asked_for_no_time():
    def clock():
        raise AssertionError("nobody needs it")

    for index in CostGatedIndex(ProbedIndex(1), 2), ExactIndex():
        tier = TierState("far", index, 10, EventLog(Medium.STORAGE, enabled=False))
        tier.tell_time(clock)
        tier.handle(ProbeAnswered(1, frozenset(), None, 1.0))
        end_load(tier, 1, "a", 1.0)
        assert reading(tier) is None


def test_what_is_known_can_be_looked_at_without_asking():
    index, _ = measured([(10, 0.0)])
    assert index.peek(ks("a")) == [MISS]
    answers(index, "abc")
    assert index.peek(ks("abc")) == [RETRY] * 3
    assert probed(index) == tuple(ks("abc"))
    assert index.peek(ks("abc")) == [RETRY] * 3
    index.answered(1, frozenset(ks("a")))
    assert index.peek(ks("abc")) == [HIT, MISS, MISS]
    exact = ExactIndex()
    exact.appeared(ks("a"))
    assert exact.peek(ks("ab")) == [HIT, MISS]
