"""Blocks that are retained for a request that waits."""

from core.terms import PENDING, RETRY, k, ks
from core.world import World

from kvoffload_async.core.primary import BlockState
from kvoffload_async.core.tier_state import PlannerLimits

IDLE, PINNED, ABSENT = BlockState.IDLE, BlockState.PINNED, BlockState.ABSENT


def world_of(num_slots, *, cap=1_000, below="", resident="", deferral_s=1_000.0, **options):
    """Blocks in the primary, and blocks in the tier alone."""
    limits = PlannerLimits(cap, 1_000, deferral_s, options.pop("reserved", 0.0))
    world = World(num_slots, limits=limits, **options)
    world.fill(0, ks(below))
    if resident:
        writer = world.begin("writer")
        world.store(writer, resident)
        world.settle_all()
        world.finish(writer)
        world.step()
    return world


def states(world, names):
    return [world.primary.state_of(k(name)) for name in names]


def waiting_for(world, below, req_id="r"):
    """A request whose blocks were promoted, and are retained for it."""
    ctx = world.begin(req_id)
    if RETRY in [world.lookup(ctx, name) for name in below]:
        world.step()
    assert [world.lookup(ctx, name) for name in below] == [PENDING] * len(below)
    world.step()
    world.settle_all()
    assert states(world, below) == [PINNED] * len(below)
    return ctx
