"""Calls of an engine whose tier is left alone, or whose transport breaks its contract."""

import asyncio

import pytest
from async_engine.worlds import (
    FAR_S,
    PROBED,
    SCRIPTED,
    hashes,
    jump,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)

from kvoffload_async.abc.transport import TransferOutcome
from kvoffload_async.errors import TransportError


class OddError(BaseException):
    """An error that nobody expects."""

    def __str__(self):
        raise RuntimeError("no text")


class Ends:
    """A transfer that ends with what it is given: a result, or an error to be raised."""

    def __init__(self, end):
        self.end = end

    async def outcome(self):
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


class EndsAtOnce(Ends):
    """One whose `outcome` is no coroutine."""

    def outcome(self):
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


NO_OUTCOMES = (
    *(None, 7, "done", TransferOutcome(0, error="bad"), TransferOutcome(0, error=OddError())),
    *(KeyError("odd"), OddError(), SystemExit(1), StopIteration()),
)
NO_TRANSFERS = (None, *(kind(end) for kind in (Ends, EndsAtOnce) for end in NO_OUTCOMES))


@on_loop
async def test_a_lookup_whose_probe_is_queued_ends_when_the_tier_is_left_alone():
    async with opened(tiers=[PROBED], breaker_fault_threshold=2, breaker_retry_s=1.0) as world:

        async def looked_up(name):
            async with world.engine.request(name, hashes(name)) as request:
                return await world.engine.lookup(request, FAR_S)

        calls = []
        for name in "abc":
            calls.append(asyncio.create_task(looked_up(name)))
            await turns()
        for probe in list(world.tiers[0].parked):
            world.tiers[0].finish(probe, error=OSError("down"))
        await turns()
        await jump(0.5)
        assert [call.done() for call in calls] == [True] * 3
        assert [call.result() for call in calls] == [0] * 3


@on_loop
async def test_a_key_queued_at_a_tier_that_is_left_alone_does_not_keep_the_loop_busy():
    async with opened(tiers=[PROBED, SCRIPTED], breaker_fault_threshold=2) as world:
        await only_in_the_tier(world, "c")
        probed = world.tiers[0]

        async def looked_up(name):
            async with world.engine.request(name, hashes(name)) as request:
                return await world.engine.lookup(request, FAR_S)

        calls = []
        for name in "abc":  # as many probes run as may, so that the one for c is queued
            calls.append(asyncio.create_task(looked_up(name)))
            await turns()
        for probe in list(probed.parked):
            probed.finish(probe, error=OSError("down"))
        await turns()
        assert not calls[2].done()
        steps = world.engine.stats().runtime.step_seconds.count
        await turns(100)  # while the other tier's promotion is under way
        assert world.engine.stats().runtime.step_seconds.count - steps < 10
        await world.calm()
        assert await calls[2] == 1


@on_loop
async def test_a_transfer_that_cannot_be_followed_has_failed_and_leaves_nothing_behind(monkeypatch):
    async with opened(slots=4) as world:
        await world.put("ab")
        with monkeypatch.context() as patch:
            patch.setattr(world.engine._transport, "submit", lambda *_: object())
            async with world.engine.request("r", hashes("ab")) as request:
                for _ in range(6):
                    assert await world.engine.lookup(request) == 2
                    with pytest.raises(TransportError, match="no attribute 'outcome'"):
                        await world.engine.load(request, [0, 1])
                    assert not request.occupied_blocks
        await world.check_rest()


@pytest.mark.parametrize("number", range(len(NO_TRANSFERS)))
@on_loop
async def test_a_copy_that_ends_with_no_outcome_has_failed_and_gives_everything_back(number):
    async with opened(slots=4) as world:
        await world.put("ab")
        world.transport.odd = transfer = NO_TRANSFERS[number]
        if transfer is None:
            world.transport.submit = lambda *_: None
        async with world.engine.request("r", hashes("abc")) as request:
            for call in range(6):  # more than there are permits
                assert await world.engine.lookup(request) == 2
                with pytest.raises(TransportError):
                    await world.engine.load(request, [0, 1])
                with pytest.raises(TransportError):
                    await world.engine.store(request, [2], 2)
                assert not request.occupied_blocks
                assert world.engine.stats().failed_copies == 2 * (call + 1)
            assert world.counts == {"free": 2, "idle": 2}
        await world.check_rest()


@pytest.mark.parametrize("error", [OddError(), SystemExit(1), asyncio.CancelledError()])
@on_loop
async def test_a_copy_whose_submission_raises_anything_has_failed_and_gives_everything_back(error):
    async with opened(slots=4) as world:
        await world.put("ab")
        world.transport.refusal = error
        async with world.engine.request("r", hashes("abc")) as request:
            for _ in range(6):
                assert await world.engine.lookup(request) == 2
                with pytest.raises(TransportError, match="could not begin"):
                    await world.engine.load(request, [0, 1])
                with pytest.raises(TransportError, match="could not begin"):
                    await world.engine.store(request, [2], 2)
                assert not request.occupied_blocks
            assert world.counts == {"free": 2, "idle": 2}
        await world.check_rest()


@on_loop
async def test_an_interrupt_under_a_submission_is_the_users_and_gives_everything_back():
    async with opened(slots=4) as world:
        async with world.engine.request("r", hashes("a")) as request:
            call = world.engine.store(request, [0])
            world.transport.refusal = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                call.send(None)
            assert not request.occupied_blocks
            assert world.counts == {"free": 4}
        await world.check_rest()
