"""Owner and loop are one thread: effects are executed at once; no tier calls the planner back."""

from contextlib import contextmanager

import pytest
from async_engine.worlds import SCRIPTED, Tier, hashes, on_loop, opened, register, turns

from kvoffload_async.abc.tier import TierBounds


class Prompt(Tier):
    """Refuses each job, and announces what it is told is used, within the call."""

    def __init__(self):
        super().__init__()
        self.bounds = TierBounds(queued_jobs=0)

    def touch(self, keys):
        super().touch(keys)
        self.env.blocks_evicted(keys)


@pytest.fixture
def prompt(monkeypatch):
    register(monkeypatch, "prompt", Prompt)
    return {"type": "prompt"}


@contextmanager
def watched(world):
    """Within the block, fail if a tier's report is taken in while effects are executed."""
    driver = world.engine.driver
    bridge, (state,) = driver._bridge, driver.planner.tiers
    flush, handle = bridge.flush, state.handle
    executing, reports = [], []

    def executed():
        executing.append(True)
        flush()
        executing.clear()

    def handled(event):
        assert not executing, "a tier has called the planner back"
        reports.append(type(event).__name__)
        handle(event)

    bridge.flush, state.handle = executed, handled
    try:
        yield reports
    finally:
        bridge.flush, state.handle = flush, handle


@on_loop
async def test_effects_are_executed_without_another_call_of_the_loop():
    async with opened(tiers=[SCRIPTED]) as world:
        bridge = world.engine.driver._bridge
        call_soon = bridge.runner.call_soon

        def refuse(callback, *_args):
            raise AssertionError(f"{callback} was handed over")

        bridge.runner.call_soon = refuse
        try:
            assert await world.put("ab") == 2
            (tier,) = world.tiers
            assert len(tier.blocks) == 2
            async with world.engine.request("r", hashes("ab")) as request:
                assert await world.during(world.engine.lookup(request)) == 2
        finally:
            bridge.runner.call_soon = call_soon
        assert bridge.wake_ups == 0
        await world.check_rest()


@on_loop
async def test_a_job_starts_in_the_step_that_submits_it():
    async with opened(tiers=[SCRIPTED]) as world:
        world.fill(hashes("a"), [0])
        async with world.engine.request("r", hashes("a")) as request:
            world.core.lookup(request.keys[0], request.ctx)
            granted = world.core.prepare_store(request.keys, request.ctx)
            world.core.complete_store(granted.keys_to_store, request.ctx, success=True)
            world.engine.driver.on_schedule_end()
            link = world.engine.driver.secondary_tiers[0].link
            assert len(link.actor._stores.running) == 1
        await world.check_rest()


@on_loop
async def test_a_job_that_ends_within_the_call_is_taken_in_by_the_next_step(prompt):
    async with opened(tiers=[prompt]) as world:
        with watched(world) as reports:
            world.fill(hashes("ab"), [0, 1])
            async with world.engine.request("r", hashes("ab")) as request:
                assert await world.during(world.engine.store(request, [0, 1])) == 2
            await turns()
            assert "JobFinished" in reports
        (tier,) = world.engine.stats().tiers
        assert tier.failed_jobs_by_error == {"TierBusyError": tier.finished_jobs}
        assert tier.jobs_in_flight == 0


@on_loop
async def test_what_a_tier_announces_within_a_touch_is_taken_in_by_the_next_step(prompt):
    async with opened(tiers=[prompt]) as world:
        (tier,) = world.tiers
        (state,) = world.core.tiers
        async with world.engine.request("r", hashes("a")) as request:
            state.index.appeared(request.keys)
            with watched(world) as reports:
                state.touch(request.keys)
                world.engine.driver.on_schedule_end()
                assert tier.touched == list(request.keys)
                assert not reports
                assert len(state.index) == 1
                await turns()
                assert reports == ["BlocksEvicted"]
                assert len(state.index) == 0
