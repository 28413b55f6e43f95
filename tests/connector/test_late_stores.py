"""Through the adapter too, every block that was stored reaches a tier that takes few at once."""

from connector.worlds import Desk, keys
from facade.worlds import EXCLUSIVE, World

from kvoffload_async.types import ENGINE_REQ_ID

TEXT = "abcdefghijklmnopqrst"


def late_world():
    return World(EXCLUSIVE, num_slots=32, cascade_fraction=2 / 32)


def test_all_blocks_reach_a_slow_tier_after_their_request_has_gone():
    world = late_world()
    desk = Desk(manager=world.manager)
    desk.store(TEXT, list(range(1, 22)))
    assert desk.table == {}, "the request has gone"
    steps = 0
    while desk.connector.has_pending_push_work():
        world.runner.run_ready()
        world.settle_all()
        desk.step()
        steps += 1
        assert steps < 100
    (tier,) = world.tiers
    assert set(tier.blocks) == set(keys(TEXT))
    counters = world.manager.planner.tiers[0].counters
    assert (counters.stored_blocks, counters.late_blocks, counters.dropped_blocks) == (20, 18, 0)
    world.end()


def test_a_request_that_comes_again_finds_its_id_free_while_its_blocks_still_go():
    world = late_world()
    desk = Desk(manager=world.manager)
    desk.store(TEXT[:8], list(range(1, 10)), req_id="w")
    assert world.manager.planner.requests == {}
    desk.store("zyx", list(range(1, 5)), req_id="w")
    contexts = {job.req_context.req_id for _, job in world.manager.planner.jobs.values()}
    assert contexts <= {"w", ENGINE_REQ_ID}
    for _ in range(20):
        world.runner.run_ready()
        world.settle_all()
        desk.step()
    assert set(world.tiers[0].blocks) == {*keys(TEXT[:8]), *keys("zyx")}
    world.end()
