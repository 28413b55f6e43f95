"""What tiers may occupy: each its share, all together what is not reserved."""

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, k, ks
from core.world import World

from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.promotions import Promotions
from kvoffload_async.core.requests import Lines, RequestState, Retention
from kvoffload_async.core.tier_state import PlannerLimits, Shares, TierState
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import Medium, ReqContext

HUNG, WELL = 0, 1
HALF_AND_HALF = PlannerLimits(50, 50, deferral_s=1_000.0, reserved_fraction=0.25)


def tiers_of(count):
    log = EventLog(Medium.STORAGE, enabled=False)
    return [TierState(f"tier{i}", ExactIndex(), 1, log) for i in range(count)]


def shares_of(num_slots, tiers, *, promotions=1_000, cascades=1_000, reserved=0.25):
    return Shares(
        num_slots,
        tiers_of(tiers),
        promotion_slots=promotions,
        cascade_blocks=cascades,
        reserved_fraction=reserved,
    )


def promotions_of(num_slots, *, cap=1_000, tiers=2):
    primary = Primary(num_slots, LruPolicy(num_slots))
    states = tiers_of(tiers)
    shares = Shares(
        num_slots, states, promotion_slots=cap, cascade_blocks=cap, reserved_fraction=0.0
    )
    lines = Lines(tiers)
    retention = Retention(primary, shares, lines, cap, 1.0)
    return Promotions(primary, states, shares, retention, lines), retention, states


def request(req_id="r"):
    return RequestState(ReqContext(req_id), ())


# -- the division -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_slots", "tiers", "total", "each", "one_direction"),
    [
        (100, 1, 75, 75, 56),
        (100, 2, 75, 37, 27),
        (100, 3, 75, 25, 18),
        (100, 0, 75, 75, 56),
        (8, 2, 6, 3, 2),
        (4, 1, 3, 3, 2),
        (3, 1, 2, 2, 1),
        (2, 1, 1, 1, 1),
        (1, 1, 1, 1, 1),
        (1, 3, 1, 1, 1),
    ],
)
def test_what_is_not_reserved_is_divided_equally(num_slots, tiers, total, each, one_direction):
    shares = shares_of(num_slots, tiers)
    assert (shares.total, shares.each) == (total, each)
    assert shares.promotions == shares.cascades == one_direction


def test_the_caps_of_a_direction_bound_it_further():
    shares = shares_of(100, 1, promotions=50, cascades=10)
    assert (shares.promotions, shares.cascades) == (50, 10)


def test_without_a_reserve_one_direction_may_have_all():
    shares = shares_of(8, 1, reserved=0.0)
    assert (shares.total, shares.promotions, shares.cascades) == (8, 8, 8)


def test_both_directions_count_against_a_tiers_share_and_nobody_elses():
    shares = shares_of(100, 2)
    shares._tiers[0].promotion_slots, shares._tiers[0].cascading_blocks = 20, 15
    assert (shares.room_to_load(0), shares.room_to_store(0)) == (2, 2)
    assert (shares.room_to_load(1), shares.room_to_store(1)) == (27, 27)
    assert shares.occupied == 35


def test_more_tiers_than_slots_take_turns():
    shares = shares_of(2, 3)
    assert [shares.room_to_load(tier) for tier in range(3)] == [1, 1, 1]
    shares._tiers[0].cascading_blocks = 1
    assert [shares.room_to_load(tier) for tier in range(3)] == [0, 0, 0]


# -- promotions ---------------------------------------------------------------------------------


def test_a_tiers_count_is_of_what_is_under_way_and_overdue_and_the_cap_of_what_waits_too():
    promotions, retention, (tier,) = promotions_of(8, cap=3, tiers=1)
    waiting = request()
    retention.begin_round(request("other"), 0.0)
    retention.begin_round(waiting, 0.0)
    for name in "abc":
        assert promotions.reserve(0, waiting, ks(name)) == (1, PENDING)
    assert promotions.reserve(0, waiting, ks("d")) == (0, MISS)
    promotions.land(0, ks("a"), waiting)
    assert (tier.promotion_slots, promotions.outstanding_slots) == (2, 3)
    assert promotions.reserve(0, waiting, ks("d")) == (0, MISS), "the first one waits to be read"
    retention.load(waiting, ks("a"))
    assert (tier.promotion_slots, promotions.outstanding_slots) == (2, 2)
    promotions.fail(0, ks("b"))
    assert promotions.orphan(ks("c")) == [2]
    assert (tier.promotion_slots, promotions.outstanding_slots) == (1, 0)
    refused = promotions.reserve(0, waiting, ks("def"))
    assert refused == (2, RETRY), "an overdue copy is in the tier's share"


# -- a tier that hangs --------------------------------------------------------------------------


def beside_a_hung_tier():
    """100 slots; all that the first tier was asked for is overdue and runs for ever."""
    world = World(100, 2, limits=HALF_AND_HALF)
    world.fill(HUNG, ks(f"hung{i}" for i in range(100)))
    world.fill(WELL, ks(f"well{i}" for i in range(100)))
    ctx = world.begin("hung")
    for i in range(100):
        world.lookup(ctx, f"hung{i}")
        world.store(ctx, [f"stored{i}"])
        if i % 10 == 9:
            world.step()
            for job_id in [j for j, (tier, _) in world.running.items() if tier == HUNG]:
                world.orphan(job_id)
            world.settle_all()
    world.finish(ctx)
    return world


def test_a_hung_tier_occupies_its_share_and_the_primary_goes_on():
    """48 slots were held and 48 pinned, and with 4 free of 100 every store was refused."""
    world = beside_a_hung_tier()
    counts = world.primary.counts
    assert 0 < counts["held"] + counts["pinned"] <= 37
    ctx = world.begin()
    assert world.offer(ctx, [f"new{i}" for i in range(60)]) is not None
    world.wind_down()


def test_a_healthy_tier_has_all_of_its_share_beside_a_hung_one():
    world = beside_a_hung_tier()
    ctx = world.begin()
    answers = [world.lookup(ctx, f"well{i}") for i in range(28)]
    assert answers == [PENDING] * 27 + [RETRY]
    world.step()
    world.settle_all()
    assert world.lookup(ctx, "well0") is HIT
    world.store(ctx, ["new"])
    assert [tier for tier, _ in world.running.values()] == [WELL]
    world.wind_down()


def test_a_tier_whose_stores_hang_goes_on_loading():
    world = World(100, 1, limits=HALF_AND_HALF)
    world.fill(0, ks("x"))
    ctx = world.begin()
    for i in range(100):
        world.store(ctx, [f"stored{i}"])
    while world.running:
        world.orphan()
    assert world.primary.counts["pinned"] == 50
    assert world.lookup(ctx, "x") is PENDING
    world.step()
    world.settle()
    assert world.lookup(ctx, "x") is HIT
    world.wind_down()


def test_slots_that_a_reset_left_to_overdue_copies_still_count():
    world = World(8, 1, limits=PlannerLimits(8, 8, 1_000.0))
    world.fill(0, ks("abc"))
    ctx = world.begin()
    for name in "ab":
        world.lookup(ctx, name)
    world.step()
    world.store(ctx, "x")
    world.orphan(0)
    world.orphan(1)
    world.lookup(ctx, "c")
    world.reset()
    world.flush_reset()
    (tier,) = world.planner.tiers
    assert (tier.promotion_slots, tier.cascading_blocks) == (2, 1)
    world.release()
    world.release()
    assert (tier.promotion_slots, tier.cascading_blocks) == (0, 0)
    world.wind_down()


# -- what is retained ---------------------------------------------------------------------------


def test_what_is_retained_keeps_out_of_the_reserve_and_tiers_wait_for_its_end():
    world = World(8, 1, limits=PlannerLimits(8, 8, 1_000.0, reserved_fraction=0.25))
    writer, waiting = world.begin("writer"), world.begin("waiting")
    world.store(writer, "abcdef")
    while world.running:
        world.settle_all()
        world.step()
    world.fill(0, ks("z"))
    answers = [world.lookup(waiting, name) for name in "abcdefz"]
    assert answers == [HIT] * 6 + [PENDING]
    world.step()
    retention, shares = world.planner.retention, world.planner.shares
    assert (shares.total, retention.in_flight, retention.retained_slots) == (6, 1, 5)
    world.store(writer, "x")
    assert [job.keys for _, job in world.running.values()] == [(k("z"),)], "x has to wait"
    world.settle()
    assert retention.retained_slots == 6
    world.finish(waiting)
    world.step()
    assert [job.keys for _, job in world.running.values()] == [(k("x"),)]
    world.wind_down()
