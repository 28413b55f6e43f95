"""A request is its context: its id may be used again, also while copies of an older one run."""

from facade.worlds import EXCLUSIVE, HIT, MISS, PENDING, PROBED, REQUEST_LEVEL, RETRY, k, ks

from kvoffload_async.types import ReqContext


def test_an_id_is_used_again_while_the_old_requests_store_runs(worlds):
    """The new one got a StateError out of `on_new_request`."""
    world = worlds()
    world.begin("r")
    old = world.contexts["r"]
    world.prepare_store(1)
    world.finish("r")
    world.begin("r")
    world.prepare_store(2)
    world.manager.complete_store(ks(1, 2), old)
    assert [world.lookup(1), world.lookup(2)] == [HIT, PENDING], "each ends its own"
    world.complete_store(2)
    world.finish("r")
    world.rest()
    assert not world.manager.planner.requests


def test_an_id_is_used_again_while_the_old_requests_load_runs(worlds):
    world = worlds()
    world.begin("r")
    old = world.contexts["r"]
    world.store(1)
    world.rest()
    world.lookup(1)
    world.manager.prepare_load(ks(1), old)
    world.finish("r")
    world.begin("r")
    world.load(1)
    assert world.counts["pinned"] == 1
    world.manager.complete_load(ks(1), old)
    assert world.counts["pinned"] == 0


def test_an_id_is_used_again_while_the_old_request_waits_for_anothers_block(worlds):
    """A request with parked keys stays known after its end."""
    world = worlds(REQUEST_LEVEL)
    world.begin("writer")
    world.prepare_store(1, req_id="writer")
    world.begin("r")
    world.prepare_store(1)
    world.finish("r")
    assert len(world.manager.planner.requests) == 2
    world.begin("r")
    world.finish("r")
    world.complete_store(1, req_id="writer")
    world.finish("writer")
    world.rest()
    assert not world.manager.planner.requests


def test_a_promotion_lands_for_the_request_that_asked_for_it(worlds):
    world = worlds(EXCLUSIVE)
    world.begin("filler")
    world.store(1, req_id="filler")
    world.finish("filler")
    world.evict_everything()
    world.begin("r")
    assert world.lookup(1) is PENDING
    world.step()
    world.finish("r")
    world.begin("r")
    world.finish_job()
    world.poll()
    assert world.lookup(1) is HIT
    assert world.counts["pinned"] == 0, "nothing is kept for a request that has ended"
    world.finish("r")


def test_the_verdicts_of_a_request_outlive_an_older_one_with_its_id(alone):
    world = alone(PROBED)
    old, new = ReqContext("r"), ReqContext("r")
    world.tier.blocks[k(1)] = None
    for asker in old, new:
        assert world.manager.lookup(k(1), asker) is RETRY
    world.run()
    world.finish_job()
    world.manager.on_request_finished(old)
    assert world.manager.lookup(k(1), new) is HIT
    world.manager.on_request_finished(new)
    assert world.manager.lookup(k(1), ReqContext("r")) is RETRY


# -- a driver that never polls results ----------------------------------------------------------


def test_verdicts_of_probes_are_taken_in_by_a_lookup(alone):
    """A driver that looks up and ends its steps, and never polls results, got RETRY for ever."""
    world = alone(PROBED)
    asker = ReqContext("r")
    world.tier.blocks[k(1)] = None
    assert [world.manager.lookup(key, asker) for key in ks(1, 2)] == [RETRY, RETRY]
    world.run()
    world.finish_job()
    assert [world.manager.lookup(key, asker) for key in ks(1, 2)] == [HIT, MISS]


def test_what_a_tier_has_to_tell_is_taken_in_at_the_end_of_a_step(alone):
    world = alone()
    world.tier.env.blocks_appeared(ks(1))
    assert world.manager.lookup(k(1), ReqContext("r")) is MISS
    world.manager.on_schedule_end()
    assert world.manager.lookup(k(1), ReqContext("r")) is HIT


def test_a_tier_that_announces_what_is_no_key_goes_on_as_before(alone):
    """In the owner's tables it raised, out of whatever call the owner made next."""
    world = alone()
    world.tier.env.blocks_appeared([b"abc", *ks(1)])
    world.tier.env.blocks_evicted([b""])
    world.results()
    assert world.manager.lookup(k(1), ReqContext("r")) is HIT
    assert world.manager.tier_state.counters.refused_keys == 2
