"""Cancellation, closing, opening, events: nothing is ever half-owned, and nothing hangs."""

import asyncio
import threading
import time
from functools import partial

import numpy as np
import pytest
from async_engine.worlds import (
    FAR_S,
    SCRIPTED,
    Tier,
    content,
    hashes,
    key,
    on_loop,
    opened,
    register,
    seed,
    turns,
)
from own_threads import Threadless
from scripted_tier import ScriptedTier

from kvoffload_async.async_engine.surface import OffloadEngine, on_helper
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import (
    ClosedError,
    ConfigError,
    OffloadError,
    StateError,
    TierUnavailableError,
    TransportError,
)
from kvoffload_async.runtime.helper_thread import HelperThread

CONFIG = {"cpu_bytes_to_use": 4 * 4096, "block_bytes": 32, "model": "test"}
DEADLINE_S = 60.0


# -- events -------------------------------------------------------------------------------------


async def read(engine, into, limit=None):
    async for event in engine.events():
        into.append(event)
        if limit is not None and len(into) == limit:
            return


@on_loop
async def test_events_tell_what_comes_and_goes_and_end_with_the_engine():
    seen = []
    async with opened(slots=2, tiers=[{**SCRIPTED, "enable_kv_events": True}]) as world:
        reader = asyncio.create_task(read(world.engine, seen))
        await turns()
        await world.put("ab")
        await world.put("xy", "again")
        assert {(e.medium.value, e.removed) for e in seen} == {
            ("CPU", False),
            ("CPU", True),
            ("STORAGE", False),
        }
    await asyncio.wait_for(reader, DEADLINE_S)


@on_loop
async def test_readers_do_not_take_each_others_place():
    first, second = [], []
    async with opened() as world:
        short = asyncio.create_task(read(world.engine, first, limit=2))
        long = asyncio.create_task(read(world.engine, second))
        await turns()
        await world.put("a")
        await short
        await world.put("b", "more")
        await turns()
        assert len(first) == 2
        assert len(second) == 3
    await asyncio.wait_for(long, DEADLINE_S)


@on_loop
async def test_a_slow_reader_gets_the_contents_instead_of_what_it_missed():
    async with opened(slots=2, bounds=EngineBounds(unread_events=2)) as world:
        await world.put("a")
        events = world.engine.events()
        event = await anext(events)
        assert (event.restarts, list(event.keys)) == (True, [key("a")])
        await world.put("bc")
        event = await anext(events)
        assert (event.restarts, event.removed, list(event.keys)) == (False, True, [key("a")])
        assert world.engine.stats().missed_events == 0
        for number, text in enumerate(["de", "fg"]):
            await world.put(text, f"put{number}")
        assert world.engine.stats().missed_events == 3
        event = await anext(events)
        assert (event.restarts, set(event.keys)) == (True, {key("f"), key("fg")})
        assert not event.removed
        sequence = event.sequence
        await world.put("h", "last")
        event = await anext(events)
        assert (event.removed, event.sequence) == (True, sequence + 1), "no gap"
        assert world.engine.stats().missed_events == 3
        await events.aclose()


@on_loop
async def test_a_reader_that_begins_within_a_step_reads_nothing_twice():
    async with opened() as world:
        primary = world.engine._driver.planner.primary
        await turns()
        primary.reserve([key("a")])
        primary.complete_write([key("a")], success=True)
        assert primary.event_log.entries
        events = world.engine.events()
        assert list((await anext(events)).keys) == [key("a")]
        await world.put("b")
        assert list((await anext(events)).keys) == [key("b")]
        await events.aclose()


@on_loop
async def test_a_reader_that_begins_late_learns_what_another_knows():
    tier = {**SCRIPTED, "enable_kv_events": True}
    replays = [{}, {}]

    async def replay(number):
        async for event in world.engine.events():
            location = (event.medium, event.ownership)
            if event.restarts:
                replays[number][location] = set()
            present = replays[number][location]
            if event.removed:
                assert present.issuperset(event.keys)
                present.difference_update(event.keys)
            else:
                assert present.isdisjoint(event.keys)
                present.update(event.keys)

    async with opened(slots=2, tiers=[tier]) as world:
        first = asyncio.create_task(replay(0))
        await world.put("ab")
        await world.put("cd", "again")
        second = asyncio.create_task(replay(1))
        await turns()
        await world.put("ef", "last")
    for reader in (first, second):
        await asyncio.wait_for(reader, DEADLINE_S)
    assert replays[0] == replays[1]
    assert all(replays[0].values())


@on_loop
async def test_without_events_enabled_there_are_none():
    seen = []
    async with opened(enable_kv_cache_events=False) as world:
        reader = asyncio.create_task(read(world.engine, seen))
        await world.put("a")
    await asyncio.wait_for(reader, DEADLINE_S)
    assert not seen


@on_loop
async def test_there_are_no_events_of_a_closed_engine():
    async with opened() as world:
        pass
    with pytest.raises(ClosedError):
        await anext(world.engine.events())


# -- closing ------------------------------------------------------------------------------------


@on_loop
async def test_closing_ends_every_call_under_way():
    bounds = EngineBounds(concurrent_stores=1, concurrent_loads=1)
    async with opened(slots=4, tiers=[SCRIPTED], bounds=bounds, reserved=0) as world:
        await seed(world)
        engine = world.engine
        async with (
            engine.request("l", hashes("ab")) as loading,
            engine.request("p", hashes("xy")) as promoting,
            engine.request("s", hashes("stuv")) as storing,
        ):
            await engine.lookup(loading)
            looking = asyncio.create_task(engine.lookup(promoting, FAR_S))
            await turns()
            calls = {
                "load": asyncio.create_task(engine.load(loading, [8, 9])),
                "lookup": looking,
                "no room": asyncio.create_task(engine.store(storing, [0, 1, 2, 3], 0, FAR_S)),
                "in line": asyncio.create_task(engine.store(storing, [0], 0, FAR_S)),
            }
            await turns()
            assert not [name for name, task in calls.items() if task.done()]
            closing = [asyncio.create_task(engine.close(DEADLINE_S)) for _ in range(2)]
            await turns()
            world.finish_everything()
            for task in closing:
                await task
            done, pending = await asyncio.wait(calls.values(), timeout=DEADLINE_S)
            assert not pending
            assert await calls["load"] == 2, "what had begun has ended well"
            for name in ("lookup", "no room", "in line"):
                assert isinstance(calls[name].exception(), ClosedError), name
            assert len(done) == 4
            for call in (
                engine.lookup(loading),
                engine.load(loading, [8]),
                engine.store(storing, [0]),
            ):
                with pytest.raises(ClosedError):
                    await call
        await engine.close()


@on_loop
async def test_lookups_that_the_closing_wakes_leave_the_planner_to_its_thread():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("a")
        await world.engine.reset()
        proceed, threads = world.core._proceed, []
        world.core._proceed = lambda of: threads.append(threading.get_ident()) or proceed(of)
        async with world.engine.request("r", hashes("a")) as request:
            looking = asyncio.create_task(world.engine.lookup(request))
            await turns()
            assert not looking.done()
            threads.clear()
            await world.during(asyncio.create_task(world.engine.close(DEADLINE_S)))
            with pytest.raises(ClosedError):
                await looking
        assert threads
        assert threading.get_ident() not in threads


@on_loop
async def test_what_was_stored_last_still_reaches_the_tiers():
    async with opened(tiers=[SCRIPTED]) as world:
        world.fill(hashes("a"), [0])
        async with world.engine.request("r", hashes("a")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            closing = asyncio.create_task(world.engine.close(DEADLINE_S))
            await turns()
            world.transport.complete()
            await world.during(closing)
            assert await storing == 1
        assert key("a") in world.tiers[0].blocks


@on_loop
async def test_a_tier_that_hangs_holds_the_closing_up_for_its_time_only():
    async with opened(tiers=[SCRIPTED]) as world:
        world.fill(hashes("a"), [0])
        async with world.engine.request("r", hashes("a")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            world.transport.complete()
            assert await storing == 1
        await turns()
        assert world.tiers[0].parked
        began_s = time.monotonic()
        await world.engine.close(0.1)
        assert time.monotonic() - began_s < DEADLINE_S
        assert not world.transport.parked
    await turns()


@on_loop
async def test_a_copy_that_hangs_is_given_up_and_the_memory_stays():
    async with opened(slots=2) as world:
        world.fill(hashes("ab"), [0, 1])
        async with world.engine.request("r", hashes("ab")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0, 1], 0, FAR_S))
            await turns()
            began_s = time.monotonic()
            await world.engine.close(0.1)
            assert time.monotonic() - began_s < DEADLINE_S
            with pytest.raises(TransportError, match="closed before the copy had ended"):
                await storing
        world.transport.complete()  # writes into the slots, much later
        await turns()
        assert np.array_equal(world.transport.rows[0, :32], content(hashes("ab")[0]))
        assert world.counts == {"writing": 2}, "nobody was told"
    assert world.transport.rows.base.obj.holders == ["a copy that has not ended"]


@on_loop
async def test_those_whose_copies_are_given_up_are_told_in_the_order_in_which_they_came():
    names, told = "abcdefghijklmnopqrst", []

    async def store(world, name):
        async with world.engine.request(name, hashes(name)) as request:
            with pytest.raises(TransportError, match="closed before the copy had ended"):
                await world.engine.store(request, [0], 0, FAR_S)
        told.append(name)

    async with opened(slots=20, bounds=EngineBounds(concurrent_stores=20)) as world:
        storing = [asyncio.create_task(store(world, name)) for name in names]
        await turns()
        await world.engine.close(0.1)
        await asyncio.wait(storing)
        assert "".join(told) == names
        world.transport.complete_all()


@on_loop
async def test_an_error_of_a_tier_is_raised_and_everything_else_is_closed():
    class Stubborn(Tier):
        def __init__(self):
            super().__init__()
            self._close_error = OSError("will not")

    async with opened() as world:
        pass
    with pytest.MonkeyPatch.context() as patch:
        register(patch, "stubborn", Stubborn)
        with pytest.raises(OffloadError, match="will not"):
            async with opened(tiers=[{"type": "stubborn"}, SCRIPTED]) as world:
                pass
        assert world.transport.closed_with
        assert not world.tiers[1].is_open
        await world.engine.close()


@on_loop
async def test_a_cancelled_close_closes_all_the_same():
    async with (
        opened(tiers=[SCRIPTED]) as world,
        world.engine.request("r", hashes("a")) as request,
    ):
        storing = asyncio.create_task(world.engine.store(request, [0]))
        await turns()
        closing = asyncio.create_task(world.engine.close(DEADLINE_S))
        await turns()
        for _ in range(2):
            closing.cancel()
            await turns()
        assert not closing.done()
        with pytest.raises(asyncio.CancelledError):
            await world.during(closing)
        assert not world.tiers[0].is_open
        assert await storing == 1


@on_loop
async def test_a_defect_in_the_last_step_is_raised_when_all_is_closed():
    async with opened(tiers=[SCRIPTED]) as world:

        def defective():
            raise StateError("a defect")

        world.engine.driver.on_schedule_end = defective
        with pytest.raises(StateError, match="a defect"):
            await world.engine.close()
        assert not world.tiers[0].is_open


@on_loop
async def test_a_tier_that_reports_while_the_engine_closes_begins_no_step():
    async with opened() as world:
        closing = asyncio.create_task(world.engine.close())
        await turns(1)
        world.engine.driver._bridge.runner.notify()
        await closing
        await turns()


# -- opening ------------------------------------------------------------------------------------


class SlowTier(ScriptedTier):
    """Opens when it is told to."""

    opening = threading.Event()

    async def open(self, env):
        SlowTier.gate = asyncio.Event()
        SlowTier.opening.set()
        await SlowTier.gate.wait()
        await super().open(env)
        SlowTier.instance = self


@on_loop
async def test_cancelling_the_opening_closes_what_it_has_opened():
    with pytest.MonkeyPatch.context() as patch:
        register(patch, "slow", SlowTier)
        engine = OffloadEngine(
            {**CONFIG, "secondary_tiers": [{"type": "slow"}]}, lambda _view: pytest.fail("made")
        )

        async def use():
            async with engine:
                pytest.fail("opened")

        task = asyncio.create_task(use())
        await asyncio.to_thread(SlowTier.opening.wait, DEADLINE_S)
        task.cancel()
        await turns()
        assert not task.done()
        engine._create_transport = lambda _view: Closing()
        SlowTier.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not SlowTier.instance.is_open
        assert Closing.closed == 1


@on_loop
async def test_an_opening_that_is_cancelled_at_every_await_keeps_no_thread(threads_left):
    engine = OffloadEngine({**CONFIG, "secondary_tiers": [SCRIPTED]}, lambda _view: Closing())
    opening = asyncio.create_task(engine.__aenter__())
    await asyncio.sleep(0)
    while not opening.done():
        opening.cancel()
        await asyncio.sleep(0)
    assert opening.cancelled()
    assert not threads_left()


class Closing:
    closed = 0

    def close(self, timeout_s):
        Closing.closed += 1
        return True


@on_loop
async def test_a_transport_that_cannot_be_made_closes_the_tiers():
    def refuse(_view):
        raise ConfigError("device: none")

    Tier.made.clear()
    with pytest.raises(ConfigError, match="device: none"):
        async with OffloadEngine({**CONFIG, "secondary_tiers": [SCRIPTED]}, refuse):
            pytest.fail("opened")
    (tier,) = Tier.made
    assert not tier.is_open
    assert tier.close_count == 1


@on_loop
async def test_a_call_beside_the_loop_is_awaited_to_its_end():
    release = threading.Event()
    helper = HelperThread("kvoffload-test")
    task = asyncio.create_task(on_helper(helper, partial(release.wait, DEADLINE_S)))
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await on_helper(helper, fail)
    helper.end(DEADLINE_S)


class Once(Closing):
    """A transport that fails the first time that it is closed."""

    def close(self, timeout_s):
        if not super().close(timeout_s) or Closing.closed == 1:
            raise RuntimeError("not yet")
        return True


@on_loop
async def test_a_close_that_failed_is_repeated_and_then_completes(threads_left):
    Closing.closed = 0
    Tier.made.clear()
    engine = OffloadEngine({**CONFIG, "secondary_tiers": [SCRIPTED]}, lambda _view: Once())
    await engine.__aenter__()
    attempts = [asyncio.create_task(engine.close()) for _ in range(3)]
    await asyncio.wait(attempts)
    assert {str(one.exception()) for one in attempts} == {"not yet"}, "all wait for the same one"
    assert Closing.closed == 1
    await engine.close()
    await engine.close()
    assert Closing.closed == 2
    (tier,) = Tier.made
    assert (tier.is_open, tier.close_count) == (False, 1)
    assert not threads_left()


@on_loop
async def test_closing_on_another_loop_is_refused_and_changes_nothing():
    async with opened() as world:
        elsewhere = HelperThread("kvoffload-test")
        with pytest.raises(StateError, match="another event loop"):
            await on_helper(elsewhere, lambda: asyncio.run(world.engine.close()))
        elsewhere.end(DEADLINE_S)
        assert await world.put("abc") == 3


@on_loop
async def test_closing_starts_no_thread_and_a_failed_start_keeps_none(monkeypatch, threads_left):
    for allowed in range(3):
        with monkeypatch.context() as patch:
            Threadless(patch, [None] * allowed)
            with pytest.raises(TierUnavailableError, match=r"ulimit -u.*is \d"):
                await OffloadEngine(
                    {**CONFIG, "secondary_tiers": [SCRIPTED]}, lambda _view: pytest.fail("made")
                ).__aenter__()
        assert not threads_left()
    engine = OffloadEngine({**CONFIG, "secondary_tiers": [SCRIPTED]}, lambda _view: Closing())
    await engine.__aenter__()
    Threadless(monkeypatch, [])
    await engine.close()
    assert not threads_left()


# -- several ------------------------------------------------------------------------------------


@on_loop
async def test_several_engines_share_a_loop():
    async with opened(tiers=[SCRIPTED]) as one, opened(slots=3) as two:
        assert await one.put("abc") == 3
        assert await two.put("xy") == 2
        for world, text, found in (
            (one, "xy", 0),
            (one, "abc", 3),
            (two, "xy", 2),
            (two, "abc", 0),
        ):
            async with world.engine.request("r", hashes(text)) as request:
                assert await world.engine.lookup(request) == found
        await two.engine.close()
        async with one.engine.request("s", hashes("abc")) as request:
            assert await one.engine.lookup(request) == 3
