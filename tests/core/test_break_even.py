"""From how many blocks on loading pays, by what probes and loads have taken."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.index import EXPLORATION_PAUSE_S, FRESH_S, BreakEven

SECONDS = st.floats(1e-6, 10.0)
RATES = st.floats(0.1, 1e4)
JOBS = st.lists(st.tuples(st.integers(1, 2000), SECONDS), min_size=1, max_size=30)


def measured(rate, probe_s, jobs):
    break_even = BreakEven(rate)
    break_even.probe_ended(probe_s, worked=True)
    for num_blocks, seconds in jobs:
        break_even.load_ended(num_blocks, seconds)
    return break_even


def on_a_line(fixed_s, block_s, sizes):
    return [(size, fixed_s + block_s * size) for size in sizes]


def needed(rate, probe_s, jobs):
    return measured(rate, probe_s, jobs).needed_blocks


# -- what is enough -----------------------------------------------------------------------------


def test_without_a_load_any_number_is_enough():
    break_even = BreakEven(100.0)
    break_even.probe_ended(5.0, worked=True)
    assert break_even.needed_blocks == 0
    assert break_even.latency_s is None
    assert break_even.blocks_per_s is None


def test_jobs_on_a_line_give_its_parts_and_the_break_even_point():
    # 100 blocks a second are computed, 1000 are loaded: 9 ms are won a block, for 18 ms and a probe
    break_even = measured(100.0, 0.009, on_a_line(0.018, 0.001, [8, 64, 16, 32]))
    assert break_even.latency_s == pytest.approx(0.027)
    assert break_even.blocks_per_s == pytest.approx(1000.0)
    assert break_even.needed_blocks in (3, 4)  # 3.0, as exactly as floats are


@given(
    fixed_s=SECONDS,
    block_s=st.floats(1e-6, 1.0),
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=30),
)
def test_the_line_is_found_whatever_sizes_the_jobs_have(fixed_s, block_s, sizes):
    sizes += [min(sizes), 4 * max(sizes)]
    break_even = measured(1e6, 0.0, on_a_line(fixed_s, block_s, sizes))
    assert break_even.latency_s == pytest.approx(fixed_s, rel=1e-4, abs=1e-6 * block_s * max(sizes))
    assert break_even.blocks_per_s == pytest.approx(1 / block_s, rel=1e-4, abs=1e-3 / fixed_s)


def test_no_number_is_enough_where_a_block_is_computed_as_fast_as_it_is_loaded():
    jobs = on_a_line(0.001, 0.01, [1, 10, 100])
    assert needed(101.0, 0.001, jobs) == math.inf
    assert needed(90.0, 0.001, jobs) < 20


def test_a_number_that_nobody_reaches_is_none():
    assert needed(1e12, 1e4, [(1, 1e-13), (100, 1e-13)]) == math.inf


def test_jobs_of_one_size_say_whether_that_size_pays():
    # 10 blocks take 50 ms and a probe of 10: 60 ms against what computing them takes.
    assert needed(10 / 0.061, 0.01, [(10, 0.05)] * 5) <= 10
    assert needed(10 / 0.059, 0.01, [(10, 0.05)] * 5) > 10


def test_jobs_of_one_size_rule_out_no_larger_one():
    # All of the half second may be latency: then 51 blocks at 10 ms pay.
    assert needed(100.0, 0.01, [(10, 0.5)] * 5) == 51
    assert needed(100.0, 0.01, [(10, 0.5), (1000, 50.0)] * 5) == math.inf


def test_jobs_of_one_size_rule_out_no_smaller_one():
    # All of the half second may be the blocks': then one pays that computes in 10 ms.
    assert needed(100.0, 0.001, [(100, 0.5)] * 5) == 1


def test_times_that_fall_with_the_blocks_count_as_latency():
    break_even = measured(100.0, 0.0, [(10, 0.3), (100, 0.1)] * 20)
    assert break_even.blocks_per_s is None
    assert 0.1 < break_even.latency_s < 0.3


def test_a_line_that_began_below_nothing_begins_at_nothing():
    break_even = measured(10.0, 0.5, [(10, 0.01), (100, 1.0)] * 20)
    assert break_even.latency_s == 0.5
    assert 100 < break_even.blocks_per_s < 110


def test_loads_that_take_no_time_leave_the_probe():
    break_even = measured(100.0, 0.05, [(4, 0.0), (8, 0.0)])
    assert break_even.needed_blocks == 5
    assert break_even.blocks_per_s is None
    assert measured(100.0, 0.0, [(1, 1e-320), (100, 1e-318)]).blocks_per_s is None


@given(rate=RATES, probe_s=SECONDS, jobs=JOBS, factor=st.floats(1.0, 100.0), more_s=SECONDS)
def test_a_slower_tier_never_needs_fewer_blocks(rate, probe_s, jobs, factor, more_s):
    before = needed(rate, probe_s, jobs)
    slower = [
        needed(rate, probe_s + more_s, jobs),
        needed(rate, probe_s * factor, [(size, s * factor) for size, s in jobs]),
        needed(rate, probe_s, [(size, s + more_s) for size, s in jobs]),
    ]
    assert all(later >= before * (1 - 1e-9) - 1 for later in slower)


@given(rate=RATES, probe_s=SECONDS, jobs=JOBS, factor=st.floats(1.0, 100.0))
def test_a_faster_accelerator_never_needs_fewer_blocks(rate, probe_s, jobs, factor):
    assert needed(rate * factor, probe_s, jobs) >= needed(rate, probe_s, jobs)


# -- what is forgotten --------------------------------------------------------------------------


@given(JOBS, st.floats(1e-6, 0.1), st.floats(1e-6, 0.1))
def test_later_jobs_outweigh_earlier_ones(jobs, fixed_s, block_s):
    break_even = measured(1e6, 0.0, jobs + on_a_line(fixed_s, block_s, [10, 1000] * 150))
    assert break_even.latency_s == pytest.approx(fixed_s, rel=0.01, abs=1e-4 * block_s)
    assert break_even.blocks_per_s == pytest.approx(1 / block_s, rel=0.01)


def test_probes_are_averaged_and_later_ones_outweigh_earlier_ones():
    break_even = measured(100.0, 0.1, [(10, 0.0)])
    break_even.probe_ended(0.2, worked=True)
    assert break_even.latency_s == pytest.approx(0.11)
    for _ in range(100):
        break_even.probe_ended(0.2, worked=True)
    assert break_even.latency_s == pytest.approx(0.2, rel=1e-3)


def test_after_a_while_without_one_the_next_sample_counts_alone():
    break_even = measured(100.0, 5.0, [(10, 5.0), (100, 50.0)] * 50)
    assert break_even.needed_blocks == math.inf
    break_even.advance(FRESH_S)
    break_even.probe_ended(0.01, worked=True)
    break_even.load_ended(10, 0.02)
    assert break_even.needed_blocks == 2


def test_shortly_before_that_it_counts_among_the_others():
    break_even = measured(100.0, 5.0, [(10, 5.0), (100, 50.0)] * 50)
    break_even.advance(FRESH_S - 0.001)
    break_even.probe_ended(0.01, worked=True)
    break_even.load_ended(10, 0.02)
    assert break_even.needed_blocks == math.inf


# -- what fails ---------------------------------------------------------------------------------


def test_a_probe_that_failed_makes_nothing_look_fast():
    break_even = measured(100.0, 0.5, [(10, 0.0)])
    break_even.probe_ended(0.0, worked=False)
    break_even.probe_ended(0.5, worked=False)
    assert break_even.latency_s == 0.5


def test_a_probe_that_failed_late_makes_the_tier_look_slow():
    break_even = measured(100.0, 0.5, [(10, 0.0)])
    break_even.probe_ended(2.5, worked=False)
    assert break_even.latency_s == pytest.approx(0.7)


def test_a_failed_probe_alone_says_nothing():
    break_even = BreakEven(100.0)
    break_even.probe_ended(2.0, worked=False)
    break_even.load_ended(10, 0.0)
    assert break_even.latency_s == 0.0


# -- exploring ----------------------------------------------------------------------------------


def test_nothing_is_explored_while_loads_are_measured():
    break_even = measured(100.0, 5.0, [(10, 5.0)])
    assert not break_even.may_explore
    break_even.advance(FRESH_S - 1)
    break_even.load_ended(10, 5.0)
    break_even.advance(FRESH_S)
    assert not break_even.may_explore
    break_even.advance(2 * FRESH_S - 1)
    assert break_even.may_explore


def test_one_explores_at_a_time_and_after_a_pause():
    break_even = measured(100.0, 5.0, [(10, 5.0)])
    break_even.advance(FRESH_S)
    break_even.explore()
    assert break_even.explorations == 1
    break_even.advance(FRESH_S + EXPLORATION_PAUSE_S)
    assert not break_even.may_explore
    break_even.exploration_ended()
    assert break_even.may_explore
    break_even.explore()
    break_even.exploration_ended()
    assert not break_even.may_explore


def test_an_exploration_that_never_ends_keeps_no_other_off_for_ever():
    break_even = measured(100.0, 5.0, [(10, 5.0)])
    break_even.advance(FRESH_S)
    break_even.explore()
    break_even.advance(2 * FRESH_S - 1)
    assert not break_even.may_explore
    break_even.advance(2 * FRESH_S)
    assert break_even.may_explore


def test_an_exploration_ends_with_a_load():
    break_even = measured(100.0, 5.0, [(10, 5.0)])
    break_even.advance(FRESH_S)
    break_even.explore()
    break_even.advance(FRESH_S + 1)
    break_even.load_ended(10, 5.0)
    assert not break_even.may_explore
    break_even.advance(2 * FRESH_S + 1)
    assert break_even.may_explore
