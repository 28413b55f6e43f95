"""A tier that never answers again: the scheduler goes on, and so does everything else."""

from connector.beside_hung import check_work_beside_the_hung_tier
from connector.serving import Serving
from facade.worlds import EXCLUSIVE

from kvoffload_async.facade.connector.protocol import KVGroup

HUNG, WELL = 0, 1
STEPS, STEP_S = 300, 0.1
SLOTS = 32


def test_hundreds_of_steps_go_by_beside_a_tier_that_hangs_for_ever():
    serving = Serving(
        (KVGroup(2),),
        num_blocks=24,
        num_slots=SLOTS,
        tiers=(EXCLUSIVE, EXCLUSIVE),
        limits={"copies_each": SLOTS // 4, "io_timeout_s": 5.0},
    )
    world = serving.world
    begun_s = world.runner.now_s()
    for step in range(STEPS):
        if len(serving.live) < 4:  # a prompt comes back when the primary has long forgotten it
            stem = "abcdefghijklmnop"[step % 16]
            serving.arrive(stem * 6)
        serving.step()
        for copy in [c for c in serving.copies if c.outcome is None]:
            serving.perform(copy)
        serving.report(*serving.copies)
        for copy in list(world.tiers[WELL].parked):
            world.tiers[WELL].finish(copy)
        world.runner.advance(STEP_S)
    assert world.runner.now_s() - begun_s < STEPS * STEP_S + 1, "a hook has waited"
    served = len(serving.known) - len(serving.live)
    assert served > STEPS / 16
    assert serving.tally["loaded"] > served, "others' prefixes still come back"
    assert len(world.tiers[HUNG].parked) <= SLOTS / 4
    assert world.counts["pinned"] <= SLOTS / 4, "what hangs holds its share, and no more"
    well = world.manager.planner.tiers[WELL].counters
    assert well.stored_blocks
    assert well.loaded_blocks

    begun_s = world.runner.now_s()
    world.manager.shutdown(5.0)
    assert world.runner.now_s() - begun_s < 6
    counters = world.manager.planner.counters
    assert counters.jobs_submitted == counters.job_results
    serving.end()


def test_stores_go_on_beside_a_hung_tier_after_a_reset_with_copies_in_flight():
    serving = Serving((KVGroup(2),), num_blocks=24, num_slots=16, tiers=(EXCLUSIVE, EXCLUSIVE))
    try:
        requests = [serving.arrive(text) for text in ("abcdab", "ababab")]
        serving.step()
        serving.connector.reset_cache()
        assert serving.connector._jobs.has_stale
        for request in requests:
            serving.finish(request)
        serving.world.hung = HUNG
        check_work_beside_the_hung_tier(serving)
        assert serving.world.tiers[HUNG].parked
        serving.rest()
    finally:
        serving.end()
