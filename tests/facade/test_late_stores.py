"""What finds no room in a tier: who hears of it, under which request, and who is warned."""

import itertools
import logging

import pytest
from facade.worlds import EXCLUSIVE, Hearing, World, filled, k, ks, scripted

from kvoffload_async.core.health import BreakerEvent
from kvoffload_async.errors import StateError, TierUnavailableError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.testing.harness import make_job
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import ENGINE_REQ_ID, ReqContext


class Contract(Hearing):
    """Hears of uses too, and objects to whatever is outside of its request."""

    def __init__(self, *args, **kwargs):
        self.open = set()
        self.objections = []
        super().__init__(*args, **kwargs)

    def on_new_request(self, req_context):
        if req_context.req_id in self.open:
            self.objections.append(("twice", req_context.req_id))
        self.open.add(req_context.req_id)
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context):
        self.open.remove(req_context.req_id)
        super().on_request_finished(req_context)

    def submit_store(self, job_metadata):
        self._expect_open("store", job_metadata.req_context)
        super().submit_store(job_metadata)

    def touch(self, keys, req_context):
        self._expect_open("touch", req_context)
        self.heard.append(("touch", req_context.req_id))
        super().touch(keys, req_context)

    def _expect_open(self, what, ctx):
        if ctx.req_id not in self.open:
            self.objections.append((what, ctx.req_id))


def late_world(worlds, manager_class):
    """Four blocks are stored, of which the tier takes one at a time; their request has finished."""
    world = worlds(manager_class=manager_class, num_slots=4, copies_each=1)
    world.begin("r")
    world.store(1, 2, 3, 4)
    world.finish("r")
    return world


@pytest.mark.parametrize("manager_class", [SecondaryTierManager, Contract])
def test_a_tier_gets_all_blocks_though_it_takes_one_at_a_time(worlds, manager_class):
    world = late_world(worlds, manager_class)
    for _ in range(6):
        world.step()
        world.finish_all()
    assert set(world.tiers[0].blocks) == set(ks(1, 2, 3, 4))
    assert not world.manager.has_pending_work()
    assert world.manager.planner.tiers[0].counters.late_blocks == 3


def test_a_third_party_hears_of_no_request_after_its_end_and_of_the_engines_own_once(worlds):
    world = late_world(worlds, Contract)
    (tier,) = world.secondaries
    for _ in range(6):
        world.step()
        world.finish_all()
    world.begin("reader")
    world.load(1, req_id="reader")
    world.finish("reader")
    world.poll()
    world.manager.shutdown(1.0)
    own = ENGINE_REQ_ID
    assert tier.objections == []
    assert tier.heard == [
        ("new", "r"),
        ("store", "r"),
        ("finished", "r"),
        ("new", own),
        *[("store", own)] * 3,
        ("new", "reader"),
        ("touch", own),
        ("finished", "reader"),
        ("finished", own),
    ]


def test_a_third_party_that_nothing_is_done_for_never_hears_of_the_engines_own_request(worlds):
    world = worlds(manager_class=Contract)
    world.begin("r")
    world.store(1)
    world.finish("r")
    world.rest()
    world.manager.shutdown(1.0)
    assert ENGINE_REQ_ID not in {req_id for _, req_id in world.secondaries[0].heard}


def test_a_hook_that_raises_costs_the_third_party_nothing_but_itself(worlds, caplog):
    class Raising(Contract):
        def touch(self, keys, req_context):
            raise RuntimeError("third-party code")

    world = worlds(manager_class=Raising)
    filled(world, 1)
    world.begin("r")
    world.manager.touch(ks(1), world.contexts["r"])
    world.finish("r")
    world.step()
    assert "tier tier0: touch failed" in caplog.text


def test_shutting_down_stores_what_is_pending_first(worlds):
    tier = ExampleTier()
    world = worlds(tier, num_slots=4, copies_each=1)
    world.begin("r")
    world.store(1, 2, 3, 4)
    before_s = world.runner.now_s()
    world.manager.shutdown(10.0)
    assert set(tier._blocks) == set(ks(1, 2, 3, 4))
    assert world.runner.now_s() == before_s, "each result is taken in when it is there"
    world.tiers.clear()


def test_shutting_down_gives_up_what_a_hung_tier_is_pending_and_says_so(worlds, caplog):
    world = late_world(worlds, SecondaryTierManager)
    world.step()
    before_s = world.runner.now_s()
    world.manager.shutdown(10.0)
    assert world.runner.now_s() - before_s <= 10.0 + 1.0
    counters = world.manager.planner.tiers[0].counters
    assert (counters.dropped_blocks, counters.failed_store_blocks) == (3, 0)
    (line,) = [text for text in caplog.messages if "blocks have been lost" in text]
    assert line.startswith("tier tier0: 3 blocks have been lost")
    assert (
        "3 not stored before the shutdown (to store more of them, raise shutdown_timeout_s)" in line
    )


def test_a_neighbour_on_the_bridge_that_nobody_polls_does_not_keep_a_shutdown_from_its_end(worlds):
    world = late_world(worlds, SecondaryTierManager)
    neighbour = SecondaryTierManager(
        None, world.buffer.view, "neighbour", scripted(), runtime=world.bridge
    )
    neighbour.submit_store(make_job(1, ks(1), [0], is_promotion=False))
    world.step()
    neighbour.tier.finish_all()
    world.runner.run_ready()
    assert neighbour.link.inbox
    world.manager.shutdown(10.0)
    assert world.manager.planner.tiers[0].counters.dropped_blocks == 3
    neighbour.shutdown(1.0)


def test_shutting_down_ends_in_time_whatever_a_third_party_keeps_to_itself(worlds):
    class Silent(Contract):
        def get_finished_jobs(self):
            return ()

    world = late_world(worlds, Silent)
    world.step()
    world.finish_all()
    before_s = world.runner.now_s()
    world.manager.shutdown(10.0)
    assert world.runner.now_s() - before_s <= 10.0 + 1.0
    assert world.manager.planner.tiers[0].counters.dropped_blocks == 3


def test_tiers_that_share_no_bridge_are_not_waited_for():
    world = World(EXCLUSIVE, num_slots=4, copies_each=1)
    world.manager._bridge = None
    world.begin("r")
    world.store(1, 2)
    world.manager.shutdown(1.0)
    assert world.manager.planner.tiers[0].counters.dropped_blocks == 1
    world.end()


def test_losses_are_warned_of_at_once_and_then_once_a_minute(worlds, caplog):
    caplog.set_level(logging.WARNING)
    world = worlds(num_slots=2, copies_each=1, write_back="drop")
    numbers = itertools.count()

    def lose_some(rounds):
        for number in range(rounds):
            world.begin(f"r{number}")
            world.store(next(numbers), req_id=f"r{number}")
            world.finish(f"r{number}")
            world.step()

    def warnings():
        return [record.message for record in caplog.records if "lost" in record.message]

    lose_some(5)
    (first,) = warnings()
    assert "tier tier0: 1 blocks have been lost" in first
    assert "raise cpu_bytes_to_use" in first
    lose_some(5)
    assert len(warnings()) == 1
    world.runner.advance(60.0)
    world.poll()
    assert len(warnings()) == 2
    assert "blocks have been lost in the last 60 s" in warnings()[1]


def slow(tier):
    """Leave the tier in order."""


def suspended(tier):
    for _ in range(3):
        tier.health.stores.note(BreakerEvent.FAULTED, 0.0)


def not_open(tier):
    tier.is_available = False


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (slow, "raise cpu_bytes_to_use, set write_back to wait, or make the tier faster"),
        (suspended, "its stores are suspended"),
        (not_open, "it is not open"),
    ],
)
def test_a_warning_of_losses_says_what_helps_a_tier_in_this_state(worlds, caplog, cause, remedy):
    world = worlds(num_slots=2, copies_each=1)
    (tier,) = world.manager.planner.tiers
    cause(tier)
    tier.counters.drop("evicted", 5)
    world.manager._losses.check(1.0)
    (line,) = [text for text in caplog.messages if "blocks have been lost" in text]
    assert f"5 evicted from the primary before the tier had room for them ({remedy}" in line


def test_a_warning_of_losses_counts_each_reason_apart_and_none_of_a_reset(worlds, caplog):
    world = worlds()
    losses, counters = world.manager._losses, world.manager.planner.tiers[0].counters
    counters.drop("reset", 7)
    losses.check(1.0)
    assert "lost" not in caplog.text
    counters.drop("evicted", 1)
    counters.drop("closed", 2)
    counters.failed_store_blocks += 4
    losses.check(100.0)
    (line,) = [text for text in caplog.messages if "blocks have been lost" in text]
    assert "7 blocks have been lost in the last" in line
    for text in ("1 evicted from", "4 given up after failed", "2 not stored before the shutdown"):
        assert text in line
    assert "reset" not in line


def test_a_failed_store_is_done_again_when_the_tier_is_back(worlds):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job(error=TierUnavailableError("down"))
    world.poll()
    assert not world.parked()
    world.runner.advance(1.0)
    world.step()
    world.finish_all()
    assert list(world.tiers[0].blocks) == [k(1)]


def test_the_engines_own_request_id_is_refused_before_a_tier_hears_of_it(worlds):
    world = worlds(manager_class=Contract)
    tier = world.manager.secondary_tiers[0]
    with pytest.raises(StateError, match="the engine's own"):
        world.manager.on_new_request(ReqContext(ENGINE_REQ_ID))
    assert tier.open == set()
