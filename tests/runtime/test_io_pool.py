"""The I/O pool: who runs what, and what happens to calls when it is cancelled or closed."""

import asyncio
import gc
import os
import threading
import weakref
from contextlib import closing

import pytest
from runtime.gates import DEADLINE_S, Gate, start

from kvoffload_async.abc.tier import Direction
from kvoffload_async.config import suitable_threads
from kvoffload_async.errors import BusyError, TierClosedError, TierUnavailableError
from kvoffload_async.runtime import io_pool
from kvoffload_async.runtime.loop import LoopThread

LOAD, STORE, NONE = Direction.LOAD, Direction.STORE, Direction.METADATA


def queued(loop, pool, direction, call, *, helpers=0):
    """Queue a call and return when it is queued for certain."""
    future = start(loop, pool.run(direction, call, helpers=helpers))
    loop.run(asyncio.sleep(0), DEADLINE_S)
    return future


def test_a_call_runs_off_the_loop_and_gives_its_result(loop, pools):
    name = loop.run(pools(1, 0, 0).run(LOAD, lambda: threading.current_thread().name), DEADLINE_S)
    assert name.startswith("kvoffload-io")


def test_a_call_that_raises_gives_its_error(loop, pools):
    with pytest.raises(OSError, match="boom"):
        loop.run(pools(1, 0, 0).run(LOAD, _raise(OSError("boom"))), DEADLINE_S)


@pytest.mark.parametrize(
    "error", [StopIteration(), SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_a_call_that_raises_what_a_loop_cannot_carry_fails_as_unavailable(loop, pools, error):
    pool = pools(1, 0, 0)
    with pytest.raises(TierUnavailableError) as raised:
        loop.run(pool.run(LOAD, _raise(error)), DEADLINE_S)
    assert raised.value.__cause__ is error
    assert loop.run(pool.run(LOAD, lambda: 5), DEADLINE_S) == 5, "loop and thread live on"


def test_a_finished_call_is_forgotten_with_what_it_captured(loop, pools):
    class Captured:
        pass

    captured = Captured()
    seen = weakref.ref(captured)
    loop.run(pools(1, 0, 0).run(LOAD, lambda c=captured: None), DEADLINE_S)
    del captured
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("threads", "first"), [((1, 0, 0), "load"), ((0, 1, 0), "store")], ids=["load", "store"]
)
def test_a_thread_takes_its_preferred_direction_first(loop, pools, threads, first):
    pool = pools(*threads)
    gate, order = Gate(), []
    blocked = start(loop, pool.run(LOAD, gate))
    assert gate.entered.wait(DEADLINE_S)
    futures = [
        queued(loop, pool, direction, lambda name=name: order.append(name))
        for direction, name in [(STORE, "store"), (LOAD, "load"), (STORE, "store"), (LOAD, "load")]
    ]
    gate.opened.set()
    for future in (blocked, *futures):
        future.result(DEADLINE_S)
    assert order[:2] == [first] * 2
    assert len(order) == 4, "the other direction has its turn as well"


@pytest.mark.parametrize(("flood", "other"), [(LOAD, STORE), (STORE, LOAD)])
def test_neither_direction_starves_while_the_other_floods(loop, pools, flood, other):
    pool = pools(1, 1, 0)
    gates = [Gate() for _ in range(6)]
    floods = [queued(loop, pool, flood, gate) for gate in gates]
    assert gates[0].entered.wait(DEADLINE_S)
    assert gates[1].entered.wait(DEADLINE_S)
    late = queued(loop, pool, other, lambda: "served")
    for number, gate in enumerate(gates[:3]):  # at most two more of the flood go before it
        gate.opened.set()
        assert number < 3
    assert late.result(DEADLINE_S) == "served"
    assert not gates[-1].entered.is_set()
    for gate in gates:
        gate.opened.set()
    for future in floods:
        future.result(DEADLINE_S)


def test_a_call_without_payload_never_waits_behind_transfers(loop, pools):
    pool = pools(1, 1, 1)
    gates = [Gate(), Gate()]
    blocked = [queued(loop, pool, LOAD, gate) for gate in gates]
    assert all(gate.entered.wait(DEADLINE_S) for gate in gates)
    assert loop.run(pool.run(NONE, lambda: "probed"), DEADLINE_S) == "probed"
    for gate, future in zip(gates, blocked, strict=True):
        gate.opened.set()
        future.result(DEADLINE_S)


def test_a_call_over_the_queues_bound_is_refused_at_once(loop, pools, monkeypatch):
    monkeypatch.setattr(io_pool, "MOST_QUEUED", 1)
    pool = pools(1, 0, 0)
    gate = Gate()
    blocked = start(loop, pool.run(LOAD, gate))
    assert gate.entered.wait(DEADLINE_S)
    waiting = queued(loop, pool, LOAD, int)
    with pytest.raises(BusyError):
        loop.run(pool.run(LOAD, int), DEADLINE_S)
    gate.opened.set()
    assert blocked.result(DEADLINE_S) is None
    assert waiting.result(DEADLINE_S) == 0


class Shared:
    """A call that several threads make: each takes a gate, and none is left for more of them."""

    def __init__(self, *gates):
        self._gates = iter(gates)
        self.entries = 0

    def __call__(self):
        self.entries += 1
        gate = next(self._gates, None)
        return gate() if gate else None


def test_idle_threads_help_with_a_call(loop, pools):
    together = threading.Barrier(3)
    call = Shared(*[lambda: together.wait(DEADLINE_S)] * 3)
    loop.run(pools(2, 1, 1).run(LOAD, call, helpers=2), DEADLINE_S)
    assert call.entries == 3


def test_a_call_has_no_more_helpers_than_it_asked_for(loop, pools):
    pool = pools(3, 0, 0)
    gates = [Gate(), Gate()]
    call = Shared(*gates)
    shared = start(loop, pool.run(LOAD, call, helpers=1))
    assert all(gate.entered.wait(DEADLINE_S) for gate in gates)
    assert loop.run(pool.run(LOAD, lambda: "taken"), DEADLINE_S) == "taken", "the third is free"
    for gate in gates:
        gate.opened.set()
    shared.result(DEADLINE_S)
    assert call.entries == 2


def test_a_call_ends_when_the_last_of_its_threads_has_left_it(loop, pools):
    pool = pools(2, 0, 0)
    first, last = Gate(), Gate()
    shared = queued(loop, pool, LOAD, Shared(first, last), helpers=1)
    assert first.entered.wait(DEADLINE_S)
    assert last.entered.wait(DEADLINE_S)
    first.opened.set()
    assert loop.run(pool.run(LOAD, lambda: "free"), DEADLINE_S) == "free"
    assert not shared.done(), "the call still touches memory"
    last.opened.set()
    shared.result(DEADLINE_S)


def test_nobody_helps_with_a_call_that_somebody_has_returned_from(loop, pools):
    pool = pools(3, 0, 0)
    other, first, last = Gate(), Gate(), Gate()
    blocked = start(loop, pool.run(LOAD, other))
    assert other.entered.wait(DEADLINE_S)
    call = Shared(first, last)
    shared = start(loop, pool.run(LOAD, call, helpers=2))
    assert first.entered.wait(DEADLINE_S)
    assert last.entered.wait(DEADLINE_S)
    first.opened.set()
    assert loop.run(pool.run(LOAD, lambda: "free"), DEADLINE_S) == "free"
    assert not pool._wanting
    other.opened.set()
    blocked.result(DEADLINE_S)
    last.opened.set()
    shared.result(DEADLINE_S)
    assert call.entries == 2


def test_a_queued_call_is_made_before_anybody_helps(loop, pools):
    pool = pools(2, 0, 0)
    other, share = Gate(), Gate()
    blocked = start(loop, pool.run(LOAD, other))
    assert other.entered.wait(DEADLINE_S)
    call = Shared(share)
    shared = start(loop, pool.run(LOAD, call, helpers=1))
    assert share.entered.wait(DEADLINE_S)
    late = queued(loop, pool, STORE, lambda: call.entries)
    other.opened.set()
    assert late.result(DEADLINE_S) == 1
    share.opened.set()
    shared.result(DEADLINE_S)
    blocked.result(DEADLINE_S)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_error_of_any_thread_is_raised_when_all_have_left(loop, pools, order):
    gates = [Gate(), Gate()]

    def fail():
        gates[1]()
        raise OSError("boom")

    shared = queued(loop, pools(2, 0, 0), LOAD, Shared(gates[0], fail), helpers=1)
    assert all(gate.entered.wait(DEADLINE_S) for gate in gates)
    for number in order:
        assert not shared.done()
        gates[number].opened.set()
    with pytest.raises(OSError, match="boom"):
        shared.result(DEADLINE_S)


def test_a_cancelled_call_is_waited_for_until_it_has_ended(loop, pools):
    pool = pools(1, 0, 0)
    gate = Gate()

    async def cancel_twice():
        task = asyncio.get_running_loop().create_task(pool.run(LOAD, gate), name="call")
        await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        was_done = task.done()
        gate.opened.set()
        await asyncio.wait({task})
        return was_done, task.cancelled()

    assert loop.run(cancel_twice(), DEADLINE_S) == (False, True)


def test_a_call_whose_wait_is_cancelled_ends_at_once_if_it_is_withdrawn(loop, pools):
    pool = pools(1, 0, 0)
    gate, made, answers = Gate(), [], [False, True]

    async def scenario():
        running = asyncio.create_task(pool.run(LOAD, gate))
        waiting = asyncio.create_task(
            pool.run(LOAD, lambda: made.append(1), withdraw=lambda: answers.pop(0))
        )
        await asyncio.sleep(0)
        for is_cancelled in (False, True):
            waiting.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert waiting.done() is is_cancelled
        assert not running.done()
        gate.opened.set()
        await running
        assert await pool.run(LOAD, lambda: 5) == 5

    loop.run(scenario(), DEADLINE_S)
    assert made == [1], "the pool makes it all the same"


def test_a_cancelled_call_that_fails_is_still_a_cancelled_one(loop, pools):
    pool = pools(1, 0, 0)
    entered, opened = threading.Event(), threading.Event()

    def fail():
        entered.set()
        opened.wait(DEADLINE_S)
        raise OSError("late")

    async def cancel():
        task = asyncio.get_running_loop().create_task(pool.run(LOAD, fail), name="call")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        opened.set()
        await asyncio.wait({task})
        return task.cancelled()

    assert loop.run(cancel(), DEADLINE_S)


def test_close_fails_the_queued_calls_and_lets_the_running_one_end(loop, pools):
    pool = pools(1, 0, 0)
    gate = Gate("done")
    running = start(loop, pool.run(LOAD, gate))
    assert gate.entered.wait(DEADLINE_S)
    waiting = [queued(loop, pool, direction, int) for direction in (LOAD, STORE, NONE)]
    assert pool.close(0.0) == 1
    for future in waiting:
        with pytest.raises(TierClosedError):
            future.result(DEADLINE_S)
    gate.opened.set()
    assert running.result(DEADLINE_S) == "done"
    assert pool.close(DEADLINE_S) == 0


def test_a_call_after_close_is_refused(loop, pools):
    pool = pools(1, 0, 0)
    pool.close(DEADLINE_S)
    with pytest.raises(TierClosedError):
        loop.run(pool.run(LOAD, int), DEADLINE_S)


def test_a_hung_call_is_left_behind_and_may_end_after_its_loop(pools):
    pool = pools(1, 0, 0)
    gate = Gate()
    with closing(LoopThread()) as loop:
        start(loop, pool.run(LOAD, gate))
        assert gate.entered.wait(DEADLINE_S)
        assert pool.close(0.0) == 1
    gate.opened.set()  # its loop is gone; nothing breaks
    assert pool.close(DEADLINE_S) == 0


def test_many_calls_all_end(loop, pools):
    pool = pools(2, 1, 1)

    async def flood():
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(pool.run((LOAD, STORE, NONE)[i % 3], lambda i=i: i))
                for i in range(500)
            ]
        return [task.result() for task in tasks]

    assert loop.run(flood(), DEADLINE_S) == list(range(500))


def _raise(error):
    def call():
        raise error

    return call


# -- what errors keep ---------------------------------------------------------------------------


class Payload:
    """What a call has in its hands."""


@pytest.mark.parametrize("cancels", [False, True])
def test_a_call_that_fails_leaves_nothing_for_the_collector(loop, pools, cancels):
    pool = pools(1, 0, 0)
    alive = []

    def fail():
        payload = Payload()
        alive.append(weakref.ref(payload))
        raise OSError("boom")

    async def call():
        task = asyncio.get_running_loop().create_task(pool.run(LOAD, fail), name="call")
        await asyncio.sleep(0)
        if cancels:
            task.cancel()
        await asyncio.wait({task})
        return None if task.cancelled() else str(task.exception())

    gc.collect()
    gc.disable()
    try:
        assert loop.run(call(), DEADLINE_S) == (None if cancels else "boom")
        loop.run(asyncio.sleep(0), DEADLINE_S)
        assert alive[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("cpus", "threads"), [(1, 2), (2, 2), (3, 3), (4, 4), (16, 4)])
def test_threads_that_copy_from_memory_are_as_many_as_cpus_and_those_that_wait_are_four(
    monkeypatch, cpus, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert suitable_threads() == threads
    assert suitable_threads(waits_for_device=True) == 4
