"""Through the adapter too, every block that was stored reaches a tier that takes few at once."""

import string

import pytest
from connector.worlds import Desk, Request, keys
from facade.worlds import EXCLUSIVE, World

from kvoffload_async.types import ENGINE_REQ_ID

TEXT = "abcdefghijklmnopqrst"


def late_world():
    return World(EXCLUSIVE, num_slots=32, copies_each=2)


def test_all_blocks_reach_a_slow_tier_after_their_request_has_gone():
    world = late_world()
    desk = Desk(manager=world.manager)
    desk.store(TEXT, list(range(1, 22)))
    assert desk.table == {}, "the request has gone"
    steps = 0
    while desk.connector.has_pending_push_work():
        world.runner.run_ready()
        world.finish_all()
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
        world.finish_all()
        desk.step()
    assert set(world.tiers[0].blocks) == {*keys(TEXT[:8]), *keys("zyx")}
    world.end()


def store_four_prompts(write_back):
    """Compute four prompts of 32 blocks with a primary of 64; return how many reach the tier.

    The tier takes a block a step; the requests run for long after that.
    """
    world = World(EXCLUSIVE, num_slots=64, copies_each=1, write_back=write_back)
    desk = Desk(manager=world.manager)
    texts = [letter + string.ascii_letters[:31] for letter in "WXYZ"]
    requests = [Request(f"r{n}", text) for n, text in enumerate(texts)]
    jobs = []
    for number, request in enumerate(requests):
        jobs += desk.prefill(request, list(range(1 + 33 * number, 34 + 33 * number))).store_jobs
    for _ in range(200):
        desk.report(*jobs)
        world.runner.run_ready()
        world.finish_all()
        jobs = list(desk.step(dict.fromkeys(requests, 1)).store_jobs)
    for request in requests:
        desk.end(request)
    desk.report(*jobs, *desk.step().store_jobs)
    world.rest()
    (tier,) = world.tiers
    assert set(tier.blocks) <= {key for text in texts for key in keys(text)}
    assert desk.connector.counters.lost_blocks == 0
    world.end()
    return len(tier.blocks)


def test_what_has_no_room_is_offered_until_the_tier_has_taken_what_is_before_it():
    assert store_four_prompts(write_back=None) == store_four_prompts(write_back="wait") == 128
    assert store_four_prompts(write_back="drop") < 128, "blocks were evicted that the tier lacked"


@pytest.mark.parametrize(("write_back", "lost"), [(None, False), ("wait", True)])
def test_what_ends_without_room_takes_it_from_blocks_that_the_tier_lacks(write_back, lost):
    world = World(EXCLUSIVE, num_slots=4, copies_each=1, write_back=write_back)
    desk = Desk(manager=world.manager)
    desk.store("abcd", [1, 2, 3, 4, 5], req_id="first")
    request = Request("second", "xy")
    assert not desk.prefill(request, [6, 7, 8]).store_jobs, "it may be offered again"
    assert not desk.step({request: 1}).store_jobs
    desk.end(request)
    assert bool(desk.step().store_jobs) is not lost
    assert desk.connector.counters.lost_blocks == 2 * lost
    world.finish_all()
    world.end()
