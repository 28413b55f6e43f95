"""Durations by bucket."""

import math

import pytest

from kvoffload_async.core.counters import Histogram
from kvoffload_async.statistics import BUCKET_BOUNDS_S, HistogramStatistics


def observed(*seconds):
    histogram = Histogram()
    for each in seconds:
        histogram.observe(each)
    return histogram.read()


def test_nothing_observed_is_nothing():
    assert observed() == HistogramStatistics()
    assert observed().count == 0


@pytest.mark.parametrize("index", range(len(BUCKET_BOUNDS_S)))
def test_a_bound_belongs_to_its_bucket_and_what_is_above_it_to_the_next(index):
    bound = BUCKET_BOUNDS_S[index]
    assert observed(bound).counts.index(1) == index
    assert observed(math.nextafter(bound, math.inf)).counts.index(1) == index + 1


def test_sum_and_count_are_those_of_all():
    read = observed(0.5, 1.5, 100.0)
    assert (read.count, read.sum_s) == (3, 102.0)


def test_a_clock_that_goes_back_adds_nothing():
    read = observed(-1.0)
    assert (read.count, read.sum_s, read.counts[0]) == (1, 0.0, 1)


def test_it_says_how_much_it_has_seen():
    histogram = Histogram()
    histogram.observe(1.5)
    assert repr(histogram) == "Histogram(1 durations, 1.5 s)"


def test_cumulative_buckets_end_with_everything():
    buckets = list(observed(0.0, 0.02, 100.0).cumulative())
    assert buckets[0] == (BUCKET_BOUNDS_S[0], 1)
    assert buckets[-1] == (math.inf, 3)
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)


def test_what_was_read_does_not_change_and_what_is_read_next_does():
    histogram = Histogram()
    histogram.observe(1.0)
    first = histogram.read()
    histogram.observe(1.0)
    assert (first.count, histogram.read().count) == (1, 2)
