"""An I/O pool whose loop goes away while calls hang."""

import asyncio
from concurrent.futures import CancelledError
from contextlib import closing

import pytest
from runtime.gates import DEADLINE_S, Gate, start

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import TierTimeoutError
from kvoffload_async.runtime.loop import LoopThread

NONE = Direction.METADATA


@pytest.mark.parametrize("cancels", [True, False])
def test_an_abandoned_call_ends_for_its_coroutine_and_keeps_its_thread(loop, pools, cancels):
    pool = pools(0, 0, 1)
    gate = Gate("late")
    tasks = []

    async def call():
        tasks.append(asyncio.current_task())
        return await pool.run(NONE, gate)

    running = start(loop, call())
    assert gate.entered.wait(DEADLINE_S)
    assert pool.close(0.0) == 1
    if cancels:
        loop.call_soon(tasks[0].cancel)
    pool.abandon()
    with pytest.raises(CancelledError if cancels else TierTimeoutError):
        running.result(DEADLINE_S)
    assert pool.close(0.0) == 1
    gate.opened.set()
    assert pool.close(DEADLINE_S) == 0
    loop.run(asyncio.sleep(0), DEADLINE_S)  # what it came to is delivered to nobody


def test_what_was_never_used_and_what_lost_its_loop_can_be_abandoned(pools):
    pool = pools(0, 0, 1)
    pool.abandon()
    with closing(LoopThread()) as loop:
        loop.run(pool.run(NONE, int), DEADLINE_S)
    pool.abandon()
