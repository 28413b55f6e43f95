import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.slab.addresses import Run, address_of, joined
from kvoffload_async.tiers.slab.catalog import FreeRuns

EXTENT = 1 << 20
"""Longer than any job, where it is not about extents."""
SEGMENTS = 3
SLOTS = 12
ALL = [address_of(n, i) for n in range(SEGMENTS) for i in range(SLOTS)]


def full(extent: int = EXTENT) -> FreeRuns:
    free = FreeRuns(extent)
    for segment in range(SEGMENTS):
        free.free(address_of(segment, 0), SLOTS)
    return free


def addresses_in(free: FreeRuns) -> list[int]:
    return sorted(first + i for first, count in free.runs() for i in range(count))


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_place_is_free_or_taken_and_free_neighbours_are_one_run(extent, steps):
    free, taken = full(extent), set()
    for gives, number in steps:
        if gives and taken:
            address = sorted(taken)[number % len(taken)]
            taken.remove(address)
            free.free(address)
        elif number > free.num_free:
            with pytest.raises(ValueError, match="are wanted"):
                free.take(number)
        else:
            got = free.take(number)
            for start in range(0, number, extent):
                part = got[start : start + extent]
                assert part == sorted(part)
            assert taken.isdisjoint(got)
            taken.update(got)
        assert addresses_in(free) == sorted(set(ALL) - taken)
        assert free.num_free == len(ALL) - len(taken)
        starts = {first for first, _ in free.runs()}
        assert not any(first + count in starts for first, count in free.runs())


def test_who_asks_for_many_gets_neighbours_where_there_are_some():
    free = FreeRuns(EXTENT)
    for slot, count in [(0, 1), (2, 1), (4, 1), (10, 8), (30, 3)]:
        free.free(slot, count)
    assert free.take(8) == list(range(10, 18))
    assert free.take(4) == [0, 30, 31, 32]


def test_jobs_lie_behind_each_other_where_there_is_much_room():
    free = FreeRuns(EXTENT)
    free.free(0, 1000)
    assert [free.take(count)[0] for count in (5, 16, 3)] == [0, 5, 21]


def test_what_is_left_of_a_shorter_run_is_no_scrap_between_jobs_of_one_size():
    free = FreeRuns(EXTENT)
    free.free(11, 21)
    assert free.take(16) == list(range(16, 32))
    assert list(free.runs()) == [(11, 5)]
    assert not free.has_run(6)
    free.free(0, 11)
    assert free.has_run(16), "the rest of its neighbour has come back"
    assert free.take(16) == list(range(16))


def test_what_is_taken_one_after_the_other_lies_in_different_segments():
    free = full()
    firsts = [address_of(segment, slot) for slot in (0, 4) for segment in range(SEGMENTS)]
    assert [free.take(4)[0] for _ in firsts] == firsts


def test_a_large_job_lies_in_different_segments_piece_by_piece():
    free = full(extent=4)
    taken = free.take(10)
    expected = [(0, 0, 4), (1, 0, 4), (2, 0, 2)]
    assert taken == [address_of(n, slot + i) for n, slot, count in expected for i in range(count)]


def test_no_more_neighbours_are_worth_having_than_a_piece():
    free = FreeRuns(4)
    free.free(0, 4)
    assert free.has_run(100)
    free.take(1)
    assert not free.has_run(100)


def test_the_lowest_run_that_is_long_enough_is_taken():
    free = FreeRuns(EXTENT)
    for first, count in [(100, 9), (50, 9), (0, 8), (200, 30), (20, 9)]:
        free.free(first, count)
    assert free.take(9) == list(range(20, 29))
    free.free(20, 9)
    assert free.take(8) == list(range(8))
    assert [free.take(9)[0] for _ in range(3)] == [20, 50, 100]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20), st.integers(1, 800))
def test_a_run_that_is_surely_there_is_taken_whole(lengths, count):
    free, first = FreeRuns(EXTENT), 0
    for length in lengths:
        free.free(first, length)
        first += length + 1
    assert not free.has_run(max(lengths) + 1)
    if count <= 64:
        assert free.has_run(count) == (max(lengths) >= count)
    if free.has_run(count):
        taken = free.take(count)
        assert taken == list(range(taken[0], taken[0] + count))


@given(st.integers(2, 40), st.data())
def test_jobs_of_one_size_stay_whole_in_whatever_order_they_go(size, data):
    free, jobs = FreeRuns(EXTENT), []
    free.free(0, 20 * size + data.draw(st.integers(0, size - 1)))
    while free.has_run(size):
        jobs.append(free.take(size))
    for _ in range(30):
        for _ in range(data.draw(st.integers(1, 4))):
            job = jobs.pop(data.draw(st.integers(0, len(jobs) - 1)))
            free.free(job[0], size)
        while free.has_run(size):
            job = free.take(size)
            assert job == list(range(job[0], job[0] + size))
            jobs.append(job)
        assert len(jobs) == 20, "no address is lost to scraps"


def test_runs_that_come_and_go_leave_nothing_behind_in_memory():
    free = FreeRuns(EXTENT)
    free.free(0, 3)
    free.free(100, 3)
    for _ in range(1000):
        assert free.take(3) == [0, 1, 2]
        free.free(0, 3)
    assert sum(len(runs._heap) for runs in free._classes.values()) < 200


def test_the_slots_of_two_segments_are_no_neighbours():
    free = FreeRuns(EXTENT)
    free.free(address_of(0, 0), 4)
    free.free(address_of(1, 0), 4)
    assert sorted(free.runs()) == [(address_of(0, 0), 4), (address_of(1, 0), 4)]


@given(st.sets(st.sampled_from(ALL), min_size=1))
def test_joined_runs_are_maximal_and_cover_everything_once(chosen):
    addresses = sorted(chosen)
    runs = list(joined(addresses, 0, len(addresses)))
    assert [run.address + i for run in runs for i in range(run.length)] == addresses
    assert [run.start for run in runs] == [addresses.index(run.address) for run in runs]
    for run, behind in itertools.pairwise(runs):
        assert run.address + run.length < behind.address


def test_a_part_is_joined_like_the_whole():
    assert list(joined([1, 2, 3, 7, 8], 1, 4)) == [Run(2, 1, 2), Run(7, 3, 1)]
    assert list(joined([1, 2, 3], 1, 1)) == []
