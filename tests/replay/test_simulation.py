"""Simulated hit ratios: equal to those of caches that are right by inspection."""

from collections import OrderedDict

import pytest
from generated_traces import GENERATED, agents, chats, loop, only_scans, regimes, zipf

from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.replay.simulation import (
    BLOCK_S,
    TOKEN_S,
    LruCurve,
    Traffic,
    optimal_hits,
    simulate,
)
from kvoffload_async.replay.source import Arrival, ChatWorkload

CHAT = list(ChatWorkload(150, seed=3))
SAMPLE = {"agents", "many agents"}
"""Generated traces of every run; the others are sweeps."""


def lru_hits(requests, capacity, first=0):
    cache, hits = OrderedDict(), 0
    for number, blocks in enumerate(requests):
        hits += sum(block in cache for block in blocks) if number >= first else 0
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def best_hits(requests, capacity):
    """The most hits by trying every content of the cache; for few blocks."""
    best = {frozenset(): 0}
    for blocks in requests:
        following = {}
        for cache, hits in best.items():
            now = hits + sum(block in cache for block in blocks)
            everything = sorted(cache | set(blocks))
            for kept in range(1 << len(everything)):
                chosen = frozenset(b for i, b in enumerate(everything) if kept >> i & 1)
                if len(chosen) <= capacity:
                    following[chosen] = max(following.get(chosen, 0), now)
        best = following
    return max(best.values())


@pytest.mark.parametrize("warm_half", [False, True])
def test_lru_at_every_capacity_is_that_of_a_cache(warm_half):
    capacities = [70, 71, 100, 150, 231, 400, 2000]
    found = simulate(CHAT, ["lru"], capacities, warm_half=warm_half)
    first = len(CHAT) // 2 if warm_half else 0
    for row in found.rows:
        hits = lru_hits(CHAT, row.capacity, first) / found.block_refs
        assert row.hit_ratio == row.prefix_hit_ratio == pytest.approx(hits)
        assert row.gap_closed in {0, None}
    assert found.block_refs == sum(map(len, CHAT[first:]))
    assert found.endless_hit_ratio == found.rows[-1].hit_ratio


def test_the_least_capacity_for_90_percent_is_the_least():
    found = simulate(CHAT, ["lru"], [])
    endless, least = lru_hits(CHAT, 10**9), found.blocks_for_90_percent
    assert lru_hits(CHAT, least) >= 0.9 * endless > lru_hits(CHAT, least - 1)
    assert found.rows[-1].capacity == found.distinct_blocks


def test_another_policy_runs_in_the_engines_accounting():
    lru, arc, hd = simulate(CHAT, ["lru", "arc", "hd"], [100]).rows
    assert arc.prefix_hit_ratio != lru.prefix_hit_ratio
    for row in (lru, arc, hd):
        assert 0 < row.prefix_hit_ratio <= row.hit_ratio
        assert row.prefix_hit_ratio <= row.optimum
        expected = (row.prefix_hit_ratio - lru.prefix_hit_ratio) / (
            lru.optimum - lru.prefix_hit_ratio
        )
        assert row.gap_closed == pytest.approx(expected)
    assert lru.writes == round((1 - lru.hit_ratio) * sum(map(len, CHAT)))


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize(
    "requests",
    [
        [[1, 2], [3], [1, 2], [3], [1]],
        [[1, 2, 3], [1, 4], [1, 2, 3], [1, 4], [1, 2]],
        [[1], [2], [3], [4], [1], [2], [3], [4]],
    ],
)
def test_the_optimum_is_that_of_all_possible_caches(requests, capacity):
    assert optimal_hits(requests, capacity, 0) == best_hits(requests, capacity)


def test_repeated_blocks_of_a_prompt_count_once():
    assert simulate([[1, 1, 2], [1, 1, 2]], ["lru"], [2]).rows[0].hit_ratio == 0.5


@pytest.mark.parametrize("trace", [[], [[]], [[1], []]])
def test_a_trace_without_blocks_to_count_is_refused(trace):
    with pytest.raises(InputError, match="leaves no block to count"):
        simulate(trace, ["lru"], [5], warm_half=len(trace) > 1)


def test_one_request_has_no_second_half():
    with pytest.raises(InputError, match="or omit --warm-half"):
        simulate([[1]], ["lru"], [5], warm_half=True)


def test_an_unknown_policy_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="'mru' is unknown"):
        simulate(CHAT, ["mru"], [5])


def test_an_interrupted_simulation_returns_the_rows_so_far():
    calls = iter(range(10_000))
    found = simulate(CHAT, ["hd"], [50, 60], should_stop=lambda: next(calls) > len(CHAT) + 20)
    assert found.interrupted
    assert len(found.rows) <= 1


def test_distances_count_distinct_blocks():
    curve = LruCurve()
    for blocks in [[1], [2], [2], [3], [1]]:
        curve.use(blocks, counts=True)
    hits, _ = curve.results()
    assert [hits.at(capacity) for capacity in range(5)] == [0, 1, 1, 2, 2]
    assert curve.distinct_blocks == 3


def prefix_hits(trace, policy, capacity):
    return simulate(trace, [policy], [capacity], warm_half=True).rows[0].prefix_hit_ratio


def test_hd_keeps_most_of_a_loop_that_does_not_fit():
    trace = loop(400, rounds=16)
    assert prefix_hits(trace, "lru", 300) == 0
    assert prefix_hits(trace, "hd", 300) > 0.55


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [300, pytest.param(1000, marks=pytest.mark.sweep)])
def test_hd_is_near_arc_where_documents_are_independent(capacity):
    trace = zipf()
    assert prefix_hits(trace, "hd", capacity) > prefix_hits(trace, "arc", capacity) - 0.01


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(chats(talks=25, active=10), id="chats"),
        pytest.param(agents(sessions=6, steps=15, active=3), id="agents"),
        pytest.param(only_scans(requests=200), id="only scans"),
    ],
)
def test_hd_loses_little_against_lru_where_lru_is_good(trace):
    for capacity in (300, 900):
        lost = prefix_hits(trace, "lru", capacity) - prefix_hits(trace, "hd", capacity)
        assert lost < 0.003


@pytest.mark.sweep
@pytest.mark.parametrize("capacity", [900, 2000])
def test_a_change_of_regime_costs_nothing_lasting(capacity):
    trace = regimes()
    assert prefix_hits(trace, "hd", capacity) > prefix_hits(trace, "lru", capacity) - 0.003


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.sweep)
        for name in sorted(GENERATED)
    ],
)
def test_hd_is_nowhere_more_than_a_little_below_lru(name):
    trace = GENERATED[name]()
    distinct = len({block for request in trace for block in request})
    capacities = [int(distinct * part) for part in (0.05, 0.15, 0.4)]
    found = simulate(trace, ["lru", "hd"], capacities, warm_half=True)
    for lru, hd in zip(found.rows[::2], found.rows[1::2], strict=True):
        assert hd.prefix_hit_ratio > lru.prefix_hit_ratio - 0.003, lru.capacity


def test_a_tier_adds_its_capacity_and_reuse_writes_less():
    trace = chats(talks=60, active=20)
    (alone,) = simulate(trace, ["lru"], [100]).rows
    (both,) = simulate(trace, ["lru"], [100], tier_blocks=700).rows
    (large,) = simulate(trace, ["lru"], [800]).rows
    assert alone.prefix_hit_ratio < both.prefix_hit_ratio <= large.prefix_hit_ratio
    assert both.optimum == large.optimum


def test_a_tier_that_admits_only_reuse_is_written_less():
    trace = only_scans(requests=900)
    (every,) = simulate(trace, ["lru"], [100], tier_blocks=700).rows
    (likely,) = simulate(trace, ["lru"], [100], tier_blocks=700, only_reuse=True).rows
    assert every.writes == 9000
    assert likely.writes < every.writes / 2


def test_an_interrupt_during_the_first_pass_leaves_no_row():
    found = simulate(CHAT, ["lru"], [50], warm_half=True, should_stop=lambda: True)
    assert (found.interrupted, found.rows) == (True, ())


def with_traffic(requests, capacity, tier_blocks, *, speed=1.0, concurrency=1, apart_s=0.0):
    """Simulate requests that arrive `apart_s` apart; return the rows without prefetch and with."""
    arrivals = [Arrival(apart_s * n, ids, 10) for n, ids in enumerate(requests)]
    traffic = Traffic(arrivals, speed, concurrency)
    options = {"tier_blocks": tier_blocks, "traffic": traffic}
    return simulate(requests, ["lru"], [capacity], **options).rows


@pytest.mark.parametrize("apart_s", [0.0, 0.3, 100.0])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_traffic_without_prefetch_has_the_hits_of_the_order_of_arrival(apart_s, concurrency):
    plain = simulate(CHAT, ["lru"], [100], tier_blocks=400).rows[0]
    without, prefetching = with_traffic(CHAT, 100, 400, apart_s=apart_s, concurrency=concurrency)
    assert without.prefix_hit_ratio == plain.prefix_hit_ratio
    assert without.writes == plain.writes
    assert without.prefetched is without.in_vain is None
    assert prefetching.prefix_hit_ratio >= 0.999 * plain.prefix_hit_ratio
    assert (prefetching.prefetched > 0) == (prefetching.waited_s > 0)
    assert prefetching.prefetched > 0 or apart_s
    assert prefetching.in_vain <= 0.02 * prefetching.prefetched


def test_requests_wait_for_a_place_first_come_first_served():
    rows = with_traffic([[1, 2], [1, 2], [3]], 8, 8)
    runs_s = 2 * BLOCK_S + 10 * TOKEN_S, 10 * TOKEN_S
    assert rows[0].waited_s == pytest.approx((runs_s[0] + sum(runs_s)) / 3)
    twice_as_fast = with_traffic([[1, 2], [1, 2], [3]], 8, 8, apart_s=0.1, speed=2.0)
    assert twice_as_fast[0].waited_s == pytest.approx(rows[0].waited_s - (0.05 + 0.1) / 3)


def test_a_waiting_request_is_prefetched_up_to_a_quarter_of_the_primary():
    requests = [list(range(8)), list(range(10, 18)), [20], list(range(8))]
    _, row = with_traffic(requests, 8, 100, apart_s=0.25)
    assert (row.prefetched, row.in_vain) == (2, 0)


def test_prefetched_blocks_give_way_to_a_store_and_are_then_in_vain():
    requests = [list(range(8)), list(range(10, 18)), list(range(20, 28)), list(range(8))]
    without, row = with_traffic(requests, 8, 100, apart_s=0.25)
    assert (row.prefetched, row.in_vain) == (2, 2)
    assert row.prefix_hit_ratio == without.prefix_hit_ratio == 0.25
