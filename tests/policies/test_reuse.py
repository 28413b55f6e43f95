"""The estimates of reuse, against a computation that follows the definition number by number."""

import math
import random

import pytest
from policies.naive_hd import known_blocks

from kvoffload_async.policies.reuse import (
    NUM_CLASSES,
    ReuseModel,
    ReuseTables,
    bin_of,
)
from kvoffload_async.types import make_offload_key

EDGES = [0.0, *(2 ** (i / 2) for i in range(26))]
NUM_BINS = 26


def naive_estimates(arrivals, hits):
    def smooth(row):
        padded = [row[0], *row, row[-1]]
        return [(padded[i] + 2 * padded[i + 1] + padded[i + 2]) / 4 for i in range(len(row))]

    arrivals, hits = smooth(smooth(arrivals)), smooth(smooth(hits))
    mean = (sum(hits) + 1.8) / (sum(arrivals) + 60)
    hazard = [
        min(1, (hit + 60 * mean) / (arrival + 60))
        for hit, arrival in zip(hits, arrivals, strict=True)
    ]
    density = []
    for first in range(NUM_BINS):
        survives, expected, occupied, best = 1.0, 0.0, 0.0, 0.0
        for later in range(first, NUM_BINS):
            width = EDGES[later + 1] - EDGES[later]
            expected += survives * hazard[later]
            occupied += survives * width * (1 - hazard[later] / 2)
            best = max(best, expected / occupied)
            survives *= 1 - hazard[later]
        density.append(best)
    return hazard, density


def tables_of(arrivals, hits):
    tables = ReuseTables()
    for kind in range(NUM_CLASSES):
        for which_bin in range(NUM_BINS):
            tables.arrive(kind, which_bin, arrivals[which_bin])
            tables.hit(kind, which_bin, hits[which_bin])
    tables.update()
    return tables


@pytest.mark.parametrize("seed", range(5))
def test_the_estimates_are_those_of_the_definition(seed):
    chance = random.Random(seed)
    arrivals = [chance.random() * 10 ** chance.uniform(0, 5) for _ in range(NUM_BINS)]
    hits = [arrival * chance.random() for arrival in arrivals]
    hazard, density = naive_estimates(arrivals, hits)
    tables = tables_of(arrivals, hits)
    assert tables.density == [pytest.approx(density)] * NUM_CLASSES
    for num_requests in (0, 0.5, 1, 3, 100, 10_000):
        unused = 1.0
        for which, each in enumerate(hazard):
            width = EDGES[which + 1] - EDGES[which]
            unused *= (1 - each) ** min(1, max(0, (num_requests - EDGES[which]) / width))
        assert tables.reuse_within(3, num_requests) == pytest.approx(1 - unused)


def test_a_block_that_is_always_hit_at_once_is_worth_a_hit_a_request():
    tables = tables_of([1e9] + [0.0] * 25, [1e9] + [0.0] * 25)
    assert tables.density[0][0] == pytest.approx(1 / (1 - 0.5), rel=0.5)
    assert all(math.isfinite(value) for row in tables.density for value in row)


def test_bins_cover_all_ages():
    assert [bin_of(age) for age in (-3, 0, 1, 2, 3, 4, 4095, 4096, 10**9)] == [
        *(0, 0, 1, 3, 4, 5, 24, 25, 25)
    ]


def test_the_class_tells_new_blocks_by_their_prompt_and_known_ones_by_their_uses():
    model = ReuseModel(10, 1000)
    keys = [make_offload_key(f"{n:04}".encode()) for n in range(80)]
    positions = {key: n for n, key in enumerate(keys)}
    assert model.classes(keys[:2], model.prompt({}, keys[:3])) == [9, 9]
    assert model.classes(keys[:3], model.prompt({}, keys[:3])) == [9, 9, 0]
    assert model.classes(keys[:3], model.prompt(positions, keys[:3])) == [11, 11, 11]
    assert model.classes(keys[:1], model.prompt({}, keys[:16])) == [10]
    for uses, kind in enumerate([1, 2, 3, 3, 4, 4, 4, 4, 4, 5, 5], 2):
        model.record(keys[:2], model.prompt({}, keys[:2]), [False, False])
        assert model.classes(keys[:1], model.prompt({}, keys[:1])) == [kind], uses
    assert model.classes(keys[2:3], model.prompt({}, keys[:5])) == [6]


def test_a_damaged_model_says_so():
    model = ReuseModel(4, 10)
    keys = [make_offload_key(f"{n:04}".encode()) for n in range(4)]
    model.record(keys, model.prompt({}, keys), [True, False, False, False])
    assert list(model.violations()) == []
    model._alive[0] += 1
    model._is_cached[0] = 0
    model._free_groups.take(1)
    assert len(list(model.violations())) == 3


def test_what_was_used_longest_ago_is_forgotten_first():
    model = ReuseModel(0, 3)
    keys = [make_offload_key(f"{n:04}".encode()) for n in range(5)]
    for key in (*keys[:3], keys[0], keys[3]):
        model.record([key], model.prompt({}, [key]), [False])
    assert known_blocks(model).keys() == {keys[2], keys[0], keys[3]}
    assert list(model.violations()) == []
