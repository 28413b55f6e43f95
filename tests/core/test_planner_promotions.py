"""The planner's promotions, and how long a request waits for one."""

from core.terms import HIT, MISS, PENDING, RETRY, k, ks, state_of
from core.world import DOWN, World, stored_below

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.types import Locality, TierMatcher

# -- promotions ---------------------------------------------------------------------------------


def test_a_block_below_is_promoted_and_read():
    world, ctx = stored_below(tiers=2)
    assert [world.lookup(ctx, name) for name in "abx"] == [PENDING, PENDING, MISS]
    assert [world.lookup(ctx, name) for name in "ab"] == [PENDING, PENDING]
    world.step()
    assert [(tier, job.keys) for tier, job in world.running.values()] == [(1, tuple(ks("ab")))]
    world.finish_job()
    assert world.lookup(ctx, "a") is HIT
    world.load(ctx, "ab")
    world.loaded()
    world.wind_down()


def test_the_first_tier_that_has_a_block_promotes_it():
    world, ctx = stored_below(tiers=2, names="a")
    world.fill(0, ks("a"))
    world.lookup(ctx, "a")
    world.step()
    assert [tier for tier, _ in world.running.values()] == [0]
    world.wind_down()


def test_a_tier_that_does_not_know_does_not_stop_the_search():
    world, ctx = stored_below(tiers=2, names="a", kinds={0: "probed"})
    assert [world.lookup(ctx, name) for name in "ax"] == [PENDING, RETRY]
    world.wind_down()


def test_a_request_may_choose_the_tiers_it_loads_from():
    world, _ = stored_below(names="a")
    choosy = world.begin("choosy", load_tier_filter=frozenset())
    remote = world.begin("remote", load_tier_filter={TierMatcher(locality=Locality.REMOTE)})
    local = world.begin("local", load_tier_filter={TierMatcher(locality=Locality.LOCAL)})
    answers = [world.lookup(ctx, "a") for ctx in (choosy, remote, local)]
    assert answers == [MISS, MISS, PENDING]
    world.wind_down()


def test_a_request_does_not_wait_for_room_that_it_takes_itself():
    world, ctx = stored_below(num_slots=2)
    assert [world.lookup(ctx, name) for name in "ab"] == [PENDING, PENDING]
    world.step()
    world.finish_job()
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, MISS]
    assert world.planner.counters.misses["no_room"] == 1
    world.wind_down()


def test_a_hit_of_an_earlier_step_may_go():
    world, ctx = stored_below(num_slots=2, names="x")
    world.store(ctx, "ab")
    world.finish_job()
    assert [world.lookup(ctx, name) for name in "abx"] == [HIT, HIT, PENDING]
    world.step()
    assert [world.lookup(ctx, name) for name in "abx"] == [HIT, HIT, MISS], (
        "a ticket leaves a slot to stores"
    )
    world.wind_down()


def test_the_good_blocks_of_a_bad_batch_are_kept_50321():
    """50321: the last of three blocks was corrupt, and the whole batch discarded."""
    world, ctx = stored_below(names="abc")
    [world.lookup(ctx, name) for name in "abc"]
    world.step()
    world.finish_job(failed={2}, error=CorruptBlockError("flipped"))
    assert [world.lookup(ctx, name) for name in "abc"] == [HIT, HIT, MISS]
    counters = world.planner.tiers[0].counters
    assert (counters.loaded_blocks, counters.failed_jobs, counters.failed_loads) == (2, 1, 1)
    world.wind_down()


def test_a_failed_load_is_not_promoted_again_for_its_request_49176_49328():
    """49176, 49328: a truncated file was promoted for ever; the request has to recompute."""
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.finish_job(failed={0}, error=DOWN)
    assert world.lookup(ctx, "a") is MISS
    assert world.primary.counts["free"] == 4
    other = world.begin("other")
    assert world.lookup(other, "a") is PENDING
    world.wind_down()


def test_a_failed_load_is_still_looked_for_in_the_next_tier():
    world, ctx = stored_below(tiers=2, names="a")
    world.fill(0, ks("a"))
    world.lookup(ctx, "a")
    world.step()
    world.finish_job(failed={0})
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    assert [tier for tier, _ in world.running.values()] == [1]
    world.wind_down()


def test_a_request_does_not_inherit_the_failures_of_an_earlier_one_of_its_id():
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.finish(ctx)
    again = world.begin(ctx.req_id)
    world.finish_job(failed={0}, error=DOWN)
    assert world.lookup(again, "a") is PENDING
    world.wind_down()


def test_waiting_requests_fill_neither_primary_nor_evict_each_others_blocks_49902():
    """49902, 49952, 50014: 50 waiters filled a small pool and evicted unread promotions."""
    world = World(16)
    names = [f"block{i}" for i in range(50)]
    world.fill(0, ks(names))
    waiters = [world.begin(f"r{i}") for i in range(50)]
    for ctx, name in zip(waiters, names, strict=True):
        world.lookup(ctx, name)
    world.step(0.1)
    assert world.primary.counts["writing"] == 15
    world.finish_all()
    assert world.primary.counts["pinned"] == 15
    runner = world.begin("runner")
    world.store(runner, "a")
    assert [world.lookup(waiters[i], names[i]) for i in (0, 14, 15)] == [HIT, HIT, PENDING]
    assert world.offer(runner, "bc") is None
    world.load(waiters[0], [names[0]])
    world.loaded()
    world.finish(waiters[1])
    world.step(0.1)
    (_, job), (_, other) = [each for each in world.running.values() if each[1].is_promotion]
    assert job.keys + other.keys == tuple(ks(names[15:17])), "in order"
    world.wind_down()


def test_promotions_for_a_request_that_has_finished_are_not_kept():
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.finish(ctx)
    world.finish_job()
    assert state_of(world.primary, k("a")) == "idle"
    world.wind_down()


# -- deferral -----------------------------------------------------------------------------------


def test_a_tier_that_never_answers_defers_for_a_bounded_time_49829_49850():
    """49829, 49850: a stalled tier deferred its requests for ever."""
    world = World(deferral_s=3.0, kinds={0: "probed"})
    world.tiers[0].is_probing = True
    ctx = world.begin()
    answers = []
    for _ in range(5):
        answers.append(world.lookup(ctx, "a"))
        world.step(1.0)
    assert answers == [RETRY, RETRY, RETRY, MISS, MISS]
    assert world.planner.counters.deferrals_expired == 1
    world.wind_down()


def test_failed_rounds_do_not_reset_the_deadline_53087():
    """53087: a tier that failed again and again began a new deadline each time."""
    names = [f"block{i}" for i in range(8)]
    world, ctx = stored_below(names=names, deferral_s=3.0)
    answers = []
    for name in names:
        answers.append(world.lookup(ctx, name))
        world.step(1.0)
        if world.running:
            world.finish_job(failed={0})
    assert answers == [PENDING] * 3 + [MISS] * 5
    world.wind_down()


def test_being_scheduled_stops_the_clock():
    world, ctx = stored_below(names="ab", deferral_s=3.0)
    world.lookup(ctx, "a")
    world.step(2.0)
    world.finish_job()
    world.lookup(ctx, "b")
    world.load(ctx, "a")
    world.step(100.0)
    assert world.lookup(ctx, "b") is PENDING
    world.wind_down()


def test_a_decided_lookup_stops_the_clock():
    world, ctx = stored_below(names="ab", deferral_s=3.0)
    world.lookup(ctx, "a")
    world.step(1.0)
    world.finish_job()
    assert world.lookup(ctx, "a") is HIT
    world.step(100.0)  # the scheduler has no room for the request
    assert world.lookup(ctx, "b") is PENDING
    world.wind_down()


def test_a_reset_stops_the_clock():
    world, ctx = stored_below(names="ab", deferral_s=3.0)
    world.lookup(ctx, "a")
    world.step(1.0)
    world.finish_job()
    world.lookup(ctx, "b")
    world.reset()
    world.step(100.0)
    world.flush_reset()
    assert world.lookup(ctx, "b") is PENDING
    world.wind_down()


def test_a_request_that_expires_amid_a_step_holds_no_room_once_it_asks_again():
    world, ctx = stored_below(names="abc", deferral_s=3.0)
    world.lookups(ctx, ks("ab"), stop_at_miss=True)
    world.step(1.0)
    for _ in range(4):
        world.lookup(ctx, "a")
        if world.planner.requests[ctx].is_expired:
            break
        world.step(1.0)
    world.lookup(world.begin("other"), "z")
    assert world.lookup(ctx, "c") is MISS
    world.check()
    assert not world.planner.room.named_blocks
    world.wind_down()


def test_for_an_expired_request_pending_means_missing_and_hits_stay_hits():
    world, ctx = stored_below(names="ab", deferral_s=1.0)
    world.store(ctx, "x")
    world.lookup(ctx, "a")
    world.step(1.0)
    assert [world.lookup(ctx, name) for name in "abx"] == [MISS, MISS, HIT]
    assert world.lookup(world.begin("other"), "b") is PENDING
    world.wind_down()


def test_an_observer_is_told_what_each_tier_has_and_lacks():
    world, ctx = stored_below(names="ab")
    told = []
    world.planner.search.on_answers = lambda *answer: told.append(answer)
    world.lookups(ctx, ks("axb"))
    assert told == [(0, ctx, ks("ab"), ks("x"))]
    world.lookup(ctx, "a")
    assert len(told) == 1, "nothing is asked of a tier while the request waits"
    world.step()
    world.finish_all()
    world.wind_down()
