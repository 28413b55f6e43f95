"""Requests come, wait, are cancelled and fail in any order; what they read is always their own.

Hypothesis draws the order in which copies and tier operations end, and how; the loop turns only
when the machine lets it. A second test plays the same game with real threads.
"""

import asyncio
import contextlib
import random
import threading

import numpy as np
import pytest
import torch
from async_engine.beside_hung import check_work_beside_the_hung_tier
from async_engine.worlds import (
    FAR_S,
    PAGE_BYTES,
    JumpLoop,
    content,
    hashes,
    jump,
    on_loop,
    opened,
    register,
    turns,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planner_invariants import check_quiescent
from transport.watched import WatchedTransport

from kvoffload_async.abc.tier import Direction
from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.tier_state import TURN_S
from kvoffload_async.errors import (
    BusyError,
    ClosedError,
    InvalidatedError,
    TierUnavailableError,
    TransportError,
)
from kvoffload_async.testing import Fault, FaultPlan, FaultyTier
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.transport.layout import register_kv_caches

ORDINARY = (BusyError, InvalidatedError, TransportError, TimeoutError)
DEVICE_BLOCKS = 4096
THREADS_END_S = 60.0
"""On a busy machine a thread that has nothing left to do may be a while about ending."""
CLOSING_S = 20.0
"""Real seconds: only opening and closing take any, on threads that everything waits for."""
texts = st.text("ab", min_size=1, max_size=4)


class Serving:
    """One request's whole life, and what it has read: KV of the weights of its generation."""

    def __init__(self, world, name, text, blocks, plan):
        self.world, self.name, self.text = world, name, text
        self.blocks, self.plan = blocks, plan
        self.request = None
        self.outcomes = []
        """What `when_released` has said; then, which blocks were occupied, and if it had ended."""
        self.has_left = False
        self.task = asyncio.get_running_loop().create_task(self.run(), name=name)

    def note(self, outcome):
        self.outcomes.append((outcome, self.request.occupied_blocks, self.has_left))

    async def run(self):
        try:
            await self.serve()
        finally:
            self.has_left = True

    async def serve(self):
        engine, chain = self.world.engine, hashes(self.text)
        label = engine.driver.generation.label or ""
        computed = [block_hash + label.encode() for block_hash in chain]
        async with engine.request(self.name, chain) as request:
            self.request = request
            request.when_released(
                self.note, "released", if_given_up=lambda _: self.note("given up")
            )
            with contextlib.suppress(*ORDINARY):
                found = await engine.lookup(request, FAR_S)
                if "load" in self.plan:
                    loaded = await engine.load(request, self.blocks[:found], FAR_S)
                    assert self.world.holds(computed[:loaded], self.blocks[:loaded])
            with contextlib.suppress(*ORDINARY):
                if "store" in self.plan:
                    await request.released(FAR_S)  # a load that gave up still writes
                    self.world.fill(computed, self.blocks)
                    await engine.store(request, self.blocks, 0, FAR_S)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        register(self.patch)
        self.runner = asyncio.Runner(loop_factory=JumpLoop)
        self.serving, self.resets = [], []
        self.next_block = 0
        self.has_worked = False

    @initialize(
        write_back=st.sampled_from(["wait", "drop"]),
        closes_early=st.booleans(),
    )
    def open(self, write_back, closes_early):
        self.closes_early = closes_early
        bounds = EngineBounds(concurrent_loads=2, concurrent_stores=2, waiting_calls=3)
        self.opening = opened(
            slots=5,
            tiers=[{"type": "scripted"}, {"type": "scripted", "probed": True}],
            bounds=bounds,
            device_blocks=DEVICE_BLOCKS,
            shutdown_timeout_s=CLOSING_S,
            copies_each=None,
            write_back=write_back,
        )
        self.world = self.run(self.opening.__aenter__())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def turn(self, count=8):
        self.run(turns(count))
        for serving in self.serving:
            if serving.task.done() and not serving.task.cancelled():
                serving.task.result()

    @rule(text=texts, plan=st.sets(st.sampled_from(["load", "store"])), count=st.integers(0, 8))
    def begin(self, text, plan, count):
        blocks = list(range(self.next_block, self.next_block + len(text)))
        self.next_block += len(text)

        async def start():
            # Ids are used again, also beside an older request: they are names, no more.
            return Serving(self.world, f"r{len(self.serving) % 3}", text, blocks, plan)

        self.serving.append(self.run(start()))
        self.turn(count)

    @precondition(lambda self: self.world.parked)
    @rule(data=st.data(), fails=st.booleans())
    def end_copy(self, data, fails):
        index = data.draw(st.integers(0, len(self.world.parked) - 1))

        async def end():
            error = OSError("injected") if fails else None
            self.world.transport.complete(self.world.parked[index], error)

        self.run(end())
        self.turn()

    @precondition(lambda self: any(tier.parked for tier in self.world.healthy.values()))
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "error", "some"]))
    def end_operation(self, data, how):
        tier = data.draw(st.sampled_from([t for t in self.world.healthy.values() if t.parked]))
        parked = data.draw(st.sampled_from(tier.parked))

        async def end():
            if how == "error":
                tier.finish(parked, error=OSError("injected"))
            elif how == "some" and parked.job is not None:
                tier.finish(parked, {0: TierUnavailableError("injected")})
            else:
                tier.finish(parked)

        self.run(end())
        self.turn()

    @precondition(lambda self: any(not s.task.done() for s in self.serving))
    @rule(data=st.data(), count=st.integers(0, 3))
    def cancel(self, data, count):
        running = [s for s in self.serving if not s.task.done()]
        data.draw(st.sampled_from(running)).task.cancel()
        self.turn(count)

    @rule(seconds=st.sampled_from([1.0, 40.0, FAR_S + 1]))
    def time_passes(self, seconds):
        self.runner.get_loop().jump(seconds)
        self.turn()

    @rule(label=st.integers(1, 3))
    def the_weights_change(self, label):
        async def change():
            self.world.engine.invalidate(label)

        self.run(change())
        self.turn()

    @rule(timeout_s=st.sampled_from([0.5, FAR_S]))
    def reset(self, timeout_s):
        async def start():
            return asyncio.create_task(self.world.engine.reset(timeout_s))

        self.resets.append(self.run(start()))
        self.turn()

    @rule(count=st.integers(1, 3))
    def turns_pass(self, count):
        self.turn(count)

    @rule(tier=st.sampled_from([0, 1, None]))
    def hang(self, tier):
        """Nothing ends any more in a tier, or it is released, and what has hung ends."""
        self.world.hung = tier

    @precondition(lambda self: self.world.hung is not None and not self.has_worked)
    @rule()
    def work_beside_the_hung_tier(self):
        self.has_worked = True  # once a run: it costs
        calls = [*(serving.task for serving in self.serving), *self.resets]
        self.run(check_work_beside_the_hung_tier(self.world, calls, self.next_block))
        self.next_block += 8
        self.turn()

    @invariant()
    def the_invariants_hold(self):
        check_state(self.world.core)

    @invariant()
    def occupied_blocks_are_those_of_copies_under_way(self):
        copied = {block for copy in self.world.parked for block in copy.parts[0].blocks.tolist()}
        requests = [s.request for s in self.serving if s.request is not None]
        assert copied == set().union(*(request.occupied_blocks for request in requests))

    @invariant()
    def what_is_released_has_ended_and_is_not_occupied(self):
        for serving in self.serving:
            assert serving.outcomes in ([], [("released", frozenset(), True)])

    async def each_callback_is_called_once(self):
        """Close with copies under way: a request is released, or its blocks stay occupied."""
        closing = asyncio.create_task(self.world.engine.close(CLOSING_S))
        await turns()
        await jump(CLOSING_S / 2)
        while not closing.done():
            for tier in self.world.tiers:
                tier.finish_all()
            await turns()
        await closing
        for serving in self.serving:
            if serving.request is None:
                continue
            ((outcome, occupied, has_left),) = serving.outcomes
            assert occupied == serving.request.occupied_blocks
            assert outcome == ("given up" if occupied else "released")
            assert has_left or occupied
        self.world.transport.complete_all()
        await turns()
        assert all(len(serving.outcomes) <= 1 for serving in self.serving)
        calls = [*(serving.task for serving in self.serving), *self.resets]
        await self.world.until(lambda: all(call.done() for call in calls))
        errors = {type(call.exception()) for call in calls if not call.cancelled()}
        assert errors <= {type(None), ClosedError, TimeoutError}
        await self.opening.__aexit__(None, None, None)
        return asyncio.all_tasks() - {asyncio.current_task()}

    async def nobody_was_forgotten(self):
        """Who still waits, waits for good reason: looking again changes nothing."""
        waiting = [s for s in self.serving if not s.task.done()]
        self.world.engine._steps.waiters.wake_all()
        await turns()
        assert not self.world.parked
        assert [s for s in self.serving if not s.task.done()] == waiting

    async def nobody_waits_to_the_limit(self):
        """On healthy tiers, requests that come now load before their limit, beside whoever waits.

        Healthy: every copy and operation ends before time passes, which it does by half a turn.
        """
        expired, core = [], self.world.core
        defer = core._defer

        def watched(request):
            may_wait = defer(request)
            expired.extend([] if may_wait else [request.ctx.req_id])
            return may_wait

        core._defer = watched
        fresh = []
        for number, text in enumerate(("abab", "bbb", "a")):
            blocks = list(range(self.next_block, self.next_block + len(text)))
            self.next_block += len(text)
            fresh.append(Serving(self.world, f"fresh{number}", text, blocks, {"load"}))
        for _ in range(20):
            await self.world.calm()
            await jump(TURN_S / 2)
        assert all(each.task.done() for each in fresh)
        assert not {each.name for each in fresh}.intersection(expired)
        self.serving += fresh
        del core._defer

    def teardown(self):
        async def end():
            self.world.hung = None
            await self.world.calm()
            await self.nobody_was_forgotten()
            await self.nobody_waits_to_the_limit()
            await jump()  # stores may wait for room that requests who wait themselves hold
            await self.world.until(lambda: all(s.task.done() for s in self.serving))
            await self.world.until(lambda: all(reset.done() for reset in self.resets))
            assert {type(reset.exception()) for reset in self.resets} <= {type(None), TimeoutError}
            await self.world.check_rest()
            for serving in self.serving:
                assert len(serving.outcomes) == (serving.request is not None)
            await self.opening.__aexit__(None, None, None)
            return asyncio.all_tasks() - {asyncio.current_task()}

        try:
            if hasattr(self, "world"):
                assert not self.run(
                    self.each_callback_is_called_once() if self.closes_early else end()
                )
            for serving in self.serving:
                if not serving.task.cancelled() and not self.closes_early:
                    serving.task.result()
            assert not self.runner.get_loop().unhandled
        finally:
            self.runner.close()
            self.patch.undo()
        for thread in threading.enumerate():
            if "kvoffload-io" in thread.name:
                thread.join(THREADS_END_S)
                assert not thread.is_alive()


TestEngineMachine = pytest.mark.stateful(EngineMachine.TestCase)


# -- the same with threads ----------------------------------------------------------------------


class Faulty(FaultyTier):
    """An example tier whose jobs meet a seed's faults."""

    def __init__(self, seed=0):
        weights = {
            Fault.NONE: 6.0,
            Fault.IO_ERROR_BEFORE: 1.0,
            Fault.IO_ERROR_AFTER: 1.0,
            Fault.SOME_BLOCKS: 1.0,
            Fault.SLOW: 1.0,
            Fault.CANCELLED: 0.5,
        }
        super().__init__(ExampleTier(), FaultPlan(seed, weights, slow_s=0.002))


class Game:
    """A device, an engine's transport over it, and requests with a seed's habits."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.tensor = torch.zeros(2048, PAGE_BYTES, dtype=torch.uint8)
        self.device = self.tensor.numpy()
        self.layout = register_kv_caches({"l": self.tensor})
        self.transport = None
        self.read = 0

    def create_transport(self, view):
        self.transport = WatchedTransport(self.layout, view)
        self.transport.before_copy = dict.fromkeys(Direction, self.sometimes_fail)
        return self.transport

    def sometimes_fail(self, _copies):
        if self.draw.random() < 0.1:
            raise OSError("injected")

    async def serve(self, engine, number):
        chain = hashes("".join(self.draw.choices("abc", [6, 2, 1], k=self.draw.randint(1, 6))))
        blocks = list(range(8 * number, 8 * number + len(chain)))
        async with engine.request(f"r{number}", chain) as request:
            with contextlib.suppress(*ORDINARY):
                found = await engine.lookup(request)
                loaded = await engine.load(request, blocks[:found])
                self.check(chain[:loaded], blocks[:loaded])
            await engine.quiesce()  # a load that failed may not write under the computing
            for block, block_hash in zip(blocks, chain, strict=True):
                self.device[block] = content(block_hash)
            with contextlib.suppress(*ORDINARY):
                await engine.store(request, blocks, 0, 1.0)

    def check(self, chain, blocks):
        for block, block_hash in zip(blocks, chain, strict=True):
            assert np.array_equal(self.device[block], content(block_hash)), "not its own bytes"
        self.read += len(blocks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_concurrent_requests_over_threads_read_their_own_bytes(seed, monkeypatch):
    register(monkeypatch, "faulty", Faulty)
    game = Game(seed)
    config = {
        "cpu_bytes_to_use": 16 * 4096,
        "block_bytes": PAGE_BYTES,
        "model": "test",
        "check_invariants": True,
        "breaker_retry_s": 0.05,
        "secondary_tiers": [{"type": "faulty", "seed": seed}],
    }
    bounds = EngineBounds(concurrent_loads=2)
    async with OffloadEngine(config, game.create_transport, bounds) as engine:
        tasks = []
        for number in range(150):
            tasks.append(asyncio.create_task(game.serve(engine, number)))
            await turns(game.draw.randint(0, 12))
            if game.draw.random() < 0.2:
                game.draw.choice(tasks).cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert await engine.quiesce()
        core = engine.driver.planner
        while core.jobs or core.cascades.has_pending:
            await engine._steps.next_progress(engine._loop.time() + 1.0)
        check_quiescent(core)
    assert game.read > 20
    assert not game.transport.violations
