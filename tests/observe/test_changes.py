"""Rates, shares and latencies between readings."""

from dataclasses import replace
from operator import attrgetter

import pytest
from facade.worlds import EXCLUSIVE, World
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.counters import Histogram
from kvoffload_async.statistics import BUCKET_BOUNDS_S, HistogramStatistics
from kvoffload_async.status.changes import WINDOW_S, Readings, quantile
from kvoffload_async.status.client import EngineReport

STORED = attrgetter("primary.stored_blocks")
ASKED = attrgetter("primary.lookups")
HITS = attrgetter("primary.hits")
NUM_BUCKETS = len(BUCKET_BOUNDS_S) + 1


@pytest.fixture(scope="module")
def stats():
    world = World(EXCLUSIVE)
    world.begin("r")
    world.store(1)
    world.rest()
    found = world.manager.stats()
    world.end()
    return found


@pytest.fixture
def readings(stats):
    return Series(stats)


class Series:
    """Readings of one engine, with figures as a test wants them."""

    def __init__(self, stats):
        self.stats = stats
        self.readings = Readings()

    def add(self, uptime_s, *, pid=1, tiers=None, **primary):
        stats = replace(self.stats, primary=replace(self.stats.primary, **primary))
        if tiers is not None:
            stats = replace(stats, tiers=tiers)
        self.readings.add(
            EngineReport(
                version=1,
                pid=pid,
                model="m",
                time_s=0.0,
                uptime_s=uptime_s,
                statistics=stats,
            )
        )
        return self.readings


def test_the_first_reading_is_compared_with_the_engines_begin(readings):
    first = readings.add(10.0, stored_blocks=50, lookups=10, hits=5)
    assert first.rate(STORED) == 5.0
    assert first.share(HITS, ASKED) == 0.5
    assert first.grown(STORED) == 50


def test_a_rate_is_that_since_the_reading_before_and_a_share_that_of_the_window(readings):
    readings.add(10.0, stored_blocks=50, lookups=10, hits=5)
    readings.add(20.0, stored_blocks=150, lookups=20, hits=5)
    now = readings.add(22.0, stored_blocks=154, lookups=30, hits=25)
    assert now.rate(STORED) == 2.0
    assert now.share(HITS, ASKED) == 1.0
    assert now.grown(STORED) == 104


def test_what_is_older_than_the_window_is_forgotten(readings):
    readings.add(0.0, stored_blocks=0)
    readings.add(5.0, stored_blocks=7)
    now = readings.add(5.0 + WINDOW_S, stored_blocks=10)
    assert now.grown(STORED) == 3


def test_two_readings_are_kept_however_far_apart_they_are(readings):
    readings.add(0.0, stored_blocks=0)
    assert readings.add(10 * WINDOW_S, stored_blocks=600).rate(STORED) == 1.0


def test_readings_are_bounded(readings):
    for number in range(2000):
        now = readings.add(number / 1000, stored_blocks=number)
    assert len(now._readings) == 600


@pytest.mark.parametrize("change", [{"pid": 2}, {"uptime_s": 1.0}, {"tiers": ()}])
def test_another_engine_begins_anew(readings, change):
    readings.add(10.0, stored_blocks=50)
    now = readings.add(**({"uptime_s": 20.0, "stored_blocks": 3} | change))
    assert now.grown(STORED) == 3


def test_where_nothing_was_asked_there_is_no_share(readings):
    assert readings.add(0.0, lookups=0).share(HITS, ASKED) is None
    assert readings.add(0.0, lookups=0).rate(ASKED) == 0.0


def test_phases_are_those_that_ended_and_the_slowest_is_first(readings):
    now = readings.add(1.0)
    latencies = now.latencies()
    assert {"tier0: store", "tier0: store, copy", "scheduler thread: step"} <= {
        latency.phase for latency in latencies
    }
    assert latencies == sorted(latencies, key=lambda latency: -latency.p99_s)
    assert readings.add(2.0).latencies() == []


# -- quantiles ----------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 29.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_duration_that_it_stands_for(durations, fraction):
    histogram = Histogram()
    for duration_s in durations:
        histogram.observe(duration_s)
    rank = max(1, -(-len(durations) * fraction // 1))
    exact_s = sorted(durations)[int(rank) - 1]
    high = next(bound for bound in BUCKET_BOUNDS_S if exact_s <= bound)
    low = max((bound for bound in BUCKET_BOUNDS_S if bound < high), default=0.0)
    assert low <= quantile(histogram.read().counts, fraction) <= high * 1.000001


def test_above_the_last_bound_a_quantile_is_that_bound():
    counts = (0,) * (NUM_BUCKETS - 1) + (4,)
    assert quantile(counts, 0.5) == BUCKET_BOUNDS_S[-1]


def test_counters_that_went_backwards_count_as_none(stats):
    series = Series(stats)
    series.add(1.0)
    series.stats = replace(
        stats, planner=replace(stats.planner, decision_seconds=HistogramStatistics())
    )
    assert all(latency.count > 0 for latency in series.add(2.0).latencies())
