"""The planner's stores, and what they cascade."""

from core.terms import MISS, PENDING, k, ks, state_of
from core.world import World, stored_below

from kvoffload_async.errors import TierFullError

# -- storing ------------------------------------------------------------------------------------


def test_a_written_block_cascades_to_every_tier_under_a_pin_each():
    world = World(tiers=2)
    world.store(world.begin(), "ab")
    assert [(tier, job.keys) for tier, job in world.running.values()] == [
        (0, tuple(ks("ab"))),
        (1, tuple(ks("ab"))),
    ]
    world.finish_job()
    assert state_of(world.primary, k("a")) == "pinned"
    world.finish_job()
    assert state_of(world.primary, k("a")) == "idle"
    world.wind_down()


def test_a_failed_cascade_lets_go_of_its_pin():
    world = World()
    world.store(world.begin(), "a")
    world.finish_job(failed={0})
    assert state_of(world.primary, k("a")) == "idle"
    assert world.planner.tiers[0].counters.failed_jobs == 1
    world.wind_down()


def test_a_failed_write_does_not_cascade():
    world = World()
    ctx = world.begin()
    world.offer(ctx, "a")
    world.written(success=False)
    assert world.running == {}
    assert world.lookup(ctx, "a") is MISS
    world.wind_down()


def test_a_refused_submission_is_a_failed_job_and_leaks_nothing():
    """An exception out of submit leaked the pin or the reservation."""
    world, ctx = stored_below(tiers=2, names="x")
    world.refusing = {0, 1}
    world.store(ctx, "a")
    assert world.lookup(ctx, "x") is PENDING
    world.step()
    assert world.lookup(ctx, "x") is MISS
    assert world.primary.counts["free"] == 3
    world.wind_down()


def test_of_a_partly_failed_cascade_the_blocks_that_landed_are_counted():
    world = World()
    ctx = world.begin()
    world.store(ctx, "abc")
    world.finish_job(failed={1})
    counters = world.planner.tiers[0].counters
    assert (counters.stored_blocks, counters.failed_jobs) == (2, 1)
    world.store(ctx, "d")
    world.finish_job(failed={0})
    assert (counters.stored_blocks, counters.failed_jobs, counters.failed_loads) == (2, 2, 0)
    world.wind_down()


def test_what_is_over_the_bound_of_a_tier_waits_its_turn_50031_50045():
    """50031, 50045: cascades to a slow tier piled up without bound."""
    world = World(8, copies_each=3)
    ctx = world.begin()
    world.store(ctx, "ab")
    world.store(ctx, "cde")
    world.store(ctx, "f")
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("ab")), tuple(ks("c"))]
    assert world.planner.cascades.queues[0].count == 3
    assert state_of(world.primary, k("d")) == "idle"
    world.finish_job()
    world.store(ctx, "g")
    assert len(world.running) == 1, "first come, first served"
    world.end_step()
    assert world.running[2][1].keys == tuple(ks("de"))
    world.wind_down()


def test_a_tier_under_pressure_is_spared_stores_but_not_loads_50045():
    world = World(32, pressed_tier=0)
    ctx = world.begin()
    for i in range(10):
        world.store(ctx, [f"slow{i}"])
        world.finish_job(seconds=1.0)
    world.store(ctx, ["spared"])
    assert world.running == {}
    world.fill(0, [k("x")])
    assert world.lookup(ctx, "x") is PENDING
    world.step(60.0)
    world.finish_job()
    world.store(ctx, ["after the decay"])
    world.end_step()
    ((_, job),) = world.running.values()
    assert job.keys == (k("spared"), k("after the decay"))
    world.wind_down()


def test_stores_that_fail_press_a_tier_too():
    world = World(8, pressed_tier=0)
    ctx = world.begin()
    for i in range(3):
        world.store(ctx, [i])
        world.finish_job(failed={0}, error=TierFullError("full"))
    world.store(ctx, "x")
    assert world.running == {}
    world.reset()
    world.flush_reset()
    world.store(ctx, "y")
    assert len(world.running) == 1
    world.wind_down()


# -- request level ------------------------------------------------------------------------------


def test_warm_blocks_cascade_to_a_request_level_tier_though_nothing_is_new_52808():
    """52808: a request whose blocks were all present cascaded none of them."""
    world = World(8, 2, request_level=[1])
    world.store(world.begin("r"), "ab")
    world.finish_all()
    assert world.offer(world.begin("s"), "aba").keys_to_store == []
    assert [(tier, job.keys) for tier, job in world.running.values()] == [(1, tuple(ks("ab")))]
    world.wind_down()


def test_blocks_that_another_request_writes_are_parked_and_cascade_later_53329():
    """53329: the cascade of keys in flight was lost for the second of two requests."""
    world = World(8, 1, request_level=[0])
    first, second = world.begin("r"), world.begin("s")
    world.offer(first, "ab")
    world.offer(second, "abc")
    world.finish(second)
    assert world.planner.has_pending_work
    world.step()
    world.written(world.writes[1])
    world.written(world.writes[0])
    world.finish_all()
    assert world.ended == []
    world.step()
    assert [(job.req_context.req_id, job.keys) for _, job in world.running.values()] == [
        ("s", tuple(ks("ab")))
    ]
    assert world.ended == [(0, "s")]
    world.wind_down()


def test_parked_blocks_are_looked_up_when_their_write_has_ended_and_not_before():
    """Each step looked up all that was parked: 10 ms for 20,000 blocks."""
    names = "abcdefgh"
    world = World(16, 1, request_level=[0])
    first, second = world.begin("r"), world.begin("s")
    for name in names:
        world.offer(first, name)
    world.offer(second, names)
    world.offer(second, names)
    asked = []
    lookup = world.primary.lookup
    world.primary.lookup = lambda key: asked.append(key) or lookup(key)
    for _ in range(10):
        world.step()
    assert asked == []
    world.written(world.writes[0])
    for _ in range(10):
        world.step()
    assert asked == ks("a")
    while world.writes:
        world.written(world.writes[0])
    world.step()
    assert sorted(asked) == ks(names)
    world.wind_down()


def test_a_parked_block_that_is_written_anew_in_the_step_in_which_its_write_failed_stays_parked():
    world = World(8, 1, request_level=[0])
    first, second = world.begin("r"), world.begin("s")
    world.offer(first, "a")
    world.offer(second, "a")
    world.written(success=False)
    world.offer(first, "a")
    world.step()
    assert world.planner.has_pending_work
    world.written()
    world.finish_all()
    world.step()
    assert ("s", tuple(ks("a"))) in [
        (job.req_context.req_id, job.keys) for _, job in world.running.values()
    ]
    world.wind_down()


def test_a_parked_block_whose_write_fails_is_dropped():
    world = World(8, 1, request_level=[0])
    first, second = world.begin("r"), world.begin("s")
    world.offer(first, "a")
    world.offer(second, "a")
    world.written(success=False)
    world.step()
    assert world.running == {}
    assert not world.planner.has_pending_work
    world.wind_down()
