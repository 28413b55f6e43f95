import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.slab.places import place_of
from kvoffload_async.tiers.slab.runs import Run, joined, spans
from kvoffload_async.tiers.slab.slots import FreeRuns

SEGMENTS = 3
SLOTS = 12
ALL = [place_of(n, i) for n in range(SEGMENTS) for i in range(SLOTS)]


def full() -> FreeRuns:
    free = FreeRuns()
    for segment in range(SEGMENTS):
        free.free(place_of(segment, 0), SLOTS)
    return free


def places_in(free: FreeRuns) -> list[int]:
    return sorted(first + i for first, count in free.runs() for i in range(count))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_place_is_free_or_taken_and_free_neighbours_are_one_run(steps):
    free, taken = full(), set()
    for gives, number in steps:
        if gives and taken:
            place = sorted(taken)[number % len(taken)]
            taken.remove(place)
            free.free(place)
        elif number > len(free):
            with pytest.raises(ValueError, match="are wanted"):
                free.take(number)
        else:
            got = free.take(number)
            assert got == sorted(got)
            assert taken.isdisjoint(got)
            taken.update(got)
        assert places_in(free) == sorted(set(ALL) - taken)
        assert len(free) == len(ALL) - len(taken)
        starts = {first for first, _ in free.runs()}
        assert not any(first + count in starts for first, count in free.runs())


def test_who_asks_for_many_gets_neighbours_where_there_are_some():
    free = FreeRuns()
    for slot, count in [(0, 1), (2, 1), (4, 1), (10, 8), (30, 3)]:
        free.free(slot, count)
    assert free.take(8) == list(range(10, 18))
    assert free.take(4) == [0, 30, 31, 32]


def test_the_slots_of_two_segments_are_no_neighbours():
    free = FreeRuns()
    free.free(place_of(0, 0), 4)
    free.free(place_of(1, 0), 4)
    assert sorted(free.runs()) == [(place_of(0, 0), 4), (place_of(1, 0), 4)]


def test_a_segment_that_is_dropped_has_no_free_slots():
    free = full()
    free.take(5)
    before = places_in(free)
    count = free.drop_segment(1)
    assert places_in(free) == [place for place in before if place not in ALL[SLOTS : 2 * SLOTS]]
    assert len(free) == len(before) - count


@given(st.sets(st.sampled_from(ALL), min_size=1))
def test_joined_runs_are_maximal_and_cover_everything_once(chosen):
    places = sorted(chosen)
    runs = list(joined(places, 0, len(places)))
    assert [run.place + i for run in runs for i in range(run.count)] == places
    assert [run.start for run in runs] == [places.index(run.place) for run in runs]
    for run, behind in itertools.pairwise(runs):
        assert run.place + run.count < behind.place


def test_a_part_is_joined_like_the_whole():
    assert list(joined([1, 2, 3, 7, 8], 1, 4)) == [Run(2, 1, 2), Run(7, 3, 1)]
    assert list(joined([1, 2, 3], 1, 1)) == []


def test_rows_behind_each_other_are_one_span():
    assert list(spans([5, 6, 7, 3, 4, 9], 0, 6)) == [(5, 3), (3, 2), (9, 1)]
    assert list(spans([5, 6, 7, 3, 4, 9], 1, 3)) == [(6, 2), (3, 1)]
