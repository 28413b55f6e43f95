"""Blocks of queued requests are promoted before their first lookup."""

import pytest
from core.terms import HIT, MISS, PENDING, k, ks
from core.world import DOWN, World

from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.errors import StateError
from kvoffload_async.types import ReqContext, SlidingWindow


def world_of(names="abcdef", num_slots=8, **options):
    options.setdefault("tiers", 1)
    world = World(num_slots, **options)
    world.fill(options["tiers"] - 1, ks(names))
    world.planner.room.most_early = num_slots // 2
    return world


def queue(world, names, req_id="queued"):
    positions = {k(name): i for i, name in enumerate(names)}
    ctx = world.begin(req_id, key_positions=positions)
    world.planner.prefetch(list(positions), ctx)
    return ctx


def queue_windows(world, names, *windows, size=2, req_id="queued"):
    ctx = world.begin(req_id)
    world.planner.prefetch(ks(names), ctx, [SlidingWindow(ks(window), size) for window in windows])
    return ctx


def promoted(world):
    return [job.keys for _, job in world.running.values()]


def figures(world, tier=0):
    counters = world.planner.tiers[tier].counters
    return counters.prefetched_blocks, counters.unused_prefetched_blocks


def test_a_queued_request_finds_its_blocks_in_the_primary():
    world = world_of()
    ctx = queue(world, "abc")
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("abc"))]
    world.finish_job()
    world.step()
    assert world.planner.lookup_prefix(ks("abc"), ctx) == (3, False)
    world.load(ctx, "abc")
    world.loaded()
    assert figures(world) == (3, 0)
    assert world.planner.counters.lookups == 3
    world.wind_down()
    assert figures(world) == (3, 0)


def test_a_lookup_amid_the_prefetch_waits_for_it():
    world = world_of()
    ctx = queue(world, "abc")
    world.step()
    assert world.planner.lookup_prefix(ks("abc"), ctx) == (0, True)
    world.step()
    world.finish_job()
    assert not world.running, "nothing is promoted twice"
    assert world.planner.lookup_prefix(ks("abc"), ctx) == (3, False)
    world.wind_down()


def test_blocks_promoted_ahead_stay_until_their_request_is_looked_up():
    world = world_of(num_slots=4)
    ctx = queue(world, "ab")
    world.step()
    world.finish_job()
    other = world.begin("other")
    for names in ("uv", "wx", "yz"):
        world.store(other, names)
        world.step()
        world.finish_all()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, False)
    world.wind_down()


def test_requests_are_served_in_their_order_up_to_the_share():
    world = world_of(num_slots=8)
    for number, names in enumerate(["ab", "cde", "f"]):
        queue(world, names, f"r{number}")
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("ab"))], (
        "nobody passes a request that finds no room, and no part of it is promoted"
    )
    world.finish_all()
    world.finish(world.live["r0"])
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("cde")), tuple(ks("f"))]
    world.wind_down()
    assert figures(world) == (6, 6), "all requests have ended unused"


def test_of_a_prompt_longer_than_the_share_the_first_part_is_promoted():
    world = world_of(num_slots=8)
    ctx = queue(world, "abcdef")
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("abcd"))]
    world.finish_job()
    assert world.planner.lookup_prefix(ks("abcdef"), ctx) == (6, True)
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("ef"))]
    world.finish_job()
    assert world.planner.lookup_prefix(ks("abcdef"), ctx) == (6, False)
    world.wind_down()


def test_nothing_is_promoted_ahead_while_a_request_waits_for_room():
    world = world_of(num_slots=4)
    holder, waiter = world.begin("holder"), world.begin("waiter")
    assert world.planner.lookup_prefix(ks("abc"), holder) == (3, True)
    world.step()
    assert world.planner.lookup_prefix(ks("def"), waiter) == (3, True)
    world.step()
    queue(world, "a")
    world.step()
    assert len(world.running) == 1
    world.finish_all()
    world.wind_down()


def test_early_tickets_give_way_to_a_request_that_waits():
    world = world_of(num_slots=4)
    queue(world, "ab")
    world.step()
    world.finish_job()
    asking = world.begin("asking")
    assert world.planner.lookup_prefix(ks("def"), asking) == (3, True)
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("def"))]
    world.wind_down()
    assert figures(world) == (2, 2)


def test_early_tickets_give_way_to_a_store():
    world = world_of(num_slots=4)
    queue(world, "ab")
    world.step()
    world.finish_job()
    output = world.store(world.begin("storing"), "wxyz")
    assert len(output.keys_to_store) == 4
    world.wind_down()


@pytest.mark.parametrize("whole", [True, False])
def test_a_failed_prefetch_is_held_against_neither_request_nor_tier(whole):
    world = world_of(breaker=BreakerSettings(1, retry_after_s=5.0))
    ctx = queue(world, "ab")
    world.step()
    world.fail() if whole else world.finish_job(failed={0}, error=DOWN)
    assert world.planner.tiers[0].health.loads.is_closed
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, True)
    world.step()
    world.finish_job()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, False)
    world.wind_down()


def test_a_lookup_that_shares_a_failed_prefetch_asks_again():
    world = world_of()
    ctx = queue(world, "ab")
    world.step()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (0, True)
    world.step()
    world.fail()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, True)
    world.step()
    world.finish_job()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, False)
    world.wind_down()


def test_a_tier_whose_prefetch_failed_is_not_asked_ahead_for_a_while():
    world = world_of(breaker=BreakerSettings(3, retry_after_s=5.0))
    queue(world, "ab", "first")
    world.step()
    world.fail()
    queue(world, "cd", "second")
    world.step()
    assert not world.running
    world.step(5.0)
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("cd"))]
    world.wind_down()


def test_a_suspended_tier_is_not_asked_ahead():
    world = world_of(breaker=BreakerSettings(1, retry_after_s=5.0))
    ctx = world.begin("asking")
    world.lookup(ctx, "a")
    world.step()
    world.fail()
    world.step(6.0)
    queue(world, "bc")
    world.step()
    assert not world.running, "a prefetch is no trial"
    world.wind_down()


def test_an_unanswered_probe_holds_up_its_request_only():
    world = world_of("", kinds={0: "probed"})
    for name in "abcd":
        world.tiers[0].contents[k(name)] = name
    queue(world, "ab", "first")
    world.step()
    assert not world.running
    world.step()
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("ab"))]
    world.wind_down()


def test_a_block_that_a_prompt_has_twice_is_promoted_once():
    world = world_of()
    ctx = world.begin()
    world.planner.prefetch(ks("aab"), ctx, [SlidingWindow(ks("cab"), 1)])
    world.step()
    assert promoted(world) == [tuple(ks("ab"))]
    world.finish_job()
    world.check()
    assert world.planner.lookup_prefix(ks("aab"), ctx) == (3, False)
    world.wind_down()


def test_a_new_prompt_is_looked_up_once():
    world = world_of()
    queue(world, "xyz")
    world.step()
    assert not world.planner.prefetcher.queued
    world.wind_down()


def test_a_step_looks_up_few_of_many_queued_requests():
    world = world_of()
    for number in range(100):
        queue(world, "xy", f"r{number}")
    world.step()
    assert len(world.planner.prefetcher.queued) == 92
    world.wind_down()


def test_an_early_ticket_ends_after_its_time():
    world = world_of(num_slots=4)
    world.planner.room.early_s = 10.0
    queue(world, "ab")
    world.step()
    world.finish_job()
    assert world.primary.counts["pinned"] == 2
    world.step(11.0)
    world.step()
    assert world.primary.counts["pinned"] == 0
    world.wind_down()


def test_a_request_that_was_looked_up_is_not_promoted_ahead():
    world = world_of()
    ctx = world.begin("asking")
    assert world.lookup(ctx, "x") is MISS
    world.planner.prefetch(ks("abc"), ctx)
    world.step()
    assert not world.running
    world.wind_down()


def test_blocks_that_another_request_has_loaded_are_not_in_vain():
    world = world_of()
    queue(world, "ab", "queued")
    world.step()
    world.finish_job()
    other = world.begin("other")
    assert [world.lookup(other, name) for name in "ab"] == [HIT, HIT]
    world.load(other, "ab")
    world.loaded()
    world.wind_down()
    assert figures(world) == (2, 0)


def test_blocks_that_were_evicted_and_promoted_again_were_first_in_vain():
    world = world_of(num_slots=4)
    ctx = queue(world, "ab")
    world.step()
    world.finish_job()
    world.store(world.begin("storing"), "wxyz")
    world.step()
    for write in list(world.writes):
        world.written(write)
    world.step()
    world.finish_all()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, True)
    world.step()
    world.finish_all()
    assert world.planner.lookup_prefix(ks("ab"), ctx) == (2, False)
    world.load(ctx, "ab")
    world.loaded()
    assert figures(world) == (2, 2)
    world.wind_down()


def test_what_lands_after_the_end_of_its_request_is_in_vain():
    world = world_of()
    ctx = queue(world, "ab")
    world.step()
    world.finish(ctx)
    world.finish_job()
    assert figures(world) == (2, 2)
    world.wind_down()


def test_a_reset_forgets_what_was_promoted_ahead():
    world = world_of()
    queue(world, "ab", "landed")
    world.step()
    world.finish_job()
    queue(world, "cd", "queued")
    world.reset()
    assert figures(world) == (2, 2)
    assert not world.planner.prefetcher.queued
    world.flush_reset()
    world.wind_down()


def test_an_unknown_request_is_refused():
    with pytest.raises(StateError, match="unknown"):
        world_of().planner.prefetch(ks("a"), ReqContext("nobody"))


def test_a_request_asking_one_by_one_uses_what_was_promoted_ahead():
    world = world_of()
    ctx = queue(world, "abcdef")
    world.step()
    world.finish_job()
    assert [world.lookup(ctx, name) for name in "abcdef"] == [HIT] * 4 + [PENDING] * 2
    world.step()
    world.finish_job()
    assert [world.lookup(ctx, name) for name in "abcdef"] == [HIT] * 6
    world.wind_down()


@pytest.mark.parametrize(
    ("below", "windows", "expected"),
    [
        ("abcd" + "wxyz", ["wxyz"], "abcdyz"),
        ("abcd" + "wxz", ["wxyz"], "abcdwx"),
        ("abc" + "wxyz", ["wxyz"], "abcxy"),
        ("abcd" + "w", ["wxyz"], "abcdw"),
        ("abcd" + "xyz", ["wxyz"], "abcdyz"),
        ("abcd" + "x", ["wxyz"], ""),
        ("abcd", ["wxyz"], ""),
        ("bcd" + "wxyz", ["wxyz"], ""),
        ("abcd" + "wxyz" + "stv", ["wxyz", "stuv"], "abcdwxst"),
        ("abcd" + "wxz" + "stuv", ["wxyz", "stuv"], "abcdwxst"),
    ],
)
def test_of_a_window_only_the_end_of_the_found_prefix_is_promoted(below, windows, expected):
    world = world_of(below, num_slots=32)
    queue_windows(world, "abcd", *windows)
    world.step()
    assert promoted(world) == ([tuple(ks(expected))] if expected else [])
    assert not world.planner.prefetcher.queued
    world.wind_down()


def test_windows_are_searched_from_the_end_only():
    world = world_of("", kinds={0: "probed"}, num_slots=32)
    for name in "abcdwxyz":
        world.tiers[0].contents[k(name)] = name
    queue_windows(world, "abcd", "wxyz")
    for _ in range(4):
        world.step()
    assert promoted(world) == [tuple(ks("abcdyz"))]
    assert world.planner.tiers[0].counters.undecided == 6
    world.wind_down()


def test_windows_count_in_the_share():
    world = world_of("abcdef" + "uvwxyz", num_slots=8)
    queue_windows(world, "abcdef", "uvwxyz")
    world.step()
    assert promoted(world) == [tuple(ks("abuv"))], "of a prompt longer than the share, a part"
    world.wind_down()


def test_windows_larger_than_the_share_are_not_promoted():
    world = world_of("ab" + "wxyz", num_slots=8)
    queue_windows(world, "ab", "wxyz", size=4)
    queue(world, "a", "other")
    world.step()
    assert promoted(world) == [tuple(ks("a"))]
    world.wind_down()
