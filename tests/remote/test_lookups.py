"""Look-ups that hang cost their callers a deadline, and nobody a thread that they have."""

import asyncio
import threading

import pytest

from kvoffload_async.tiers.remote.lookups import LookUpError, Lookups

PATIENT_S = 60.0


class Asked:
    """A name server that answers when it is told to."""

    def __init__(self):
        self.calls = 0
        self.answers = threading.Event()

    def __call__(self):
        self.calls += 1
        assert self.answers.wait(PATIENT_S)
        return "found"


async def outcomes(tasks):
    await asyncio.wait(tasks)
    return [task.exception() or task.result() for task in tasks]


@pytest.fixture
def server():
    server = Asked()
    yield server
    server.answers.set()


def test_callers_that_ask_for_the_same_share_one_look_up(server):
    async def run():
        lookups = Lookups(PATIENT_S)
        asking = [asyncio.create_task(lookups.run("name", server)) for _ in range(50)]
        await asyncio.sleep(0)
        server.answers.set()
        assert await outcomes(asking) == ["found"] * 50
        assert server.calls == 1
        assert await lookups.run("name", server) == "found"  # nothing is kept
        assert server.calls == 2

    asyncio.run(run())


def test_a_look_up_that_hangs_keeps_one_daemon_thread_and_later_callers_fail_at_once(server):
    async def run():
        before = set(threading.enumerate())
        lookups = Lookups(0.01)
        for _ in range(20):
            with pytest.raises(LookUpError, match=r"name: no answer within 0\.01 s"):
                await lookups.run("name", server)
        (thread,) = set(threading.enumerate()) - before
        assert thread.daemon
        server.answers.set()
        thread.join(PATIENT_S)
        await asyncio.sleep(0)
        assert await Lookups(PATIENT_S).run("name", server) == "found"

    asyncio.run(run())


def test_the_application_gets_its_threads_while_look_ups_hang(server):
    async def run():
        lookups = Lookups(PATIENT_S)
        asking = [asyncio.create_task(lookups.run(str(n), server)) for n in range(60)]
        assert await asyncio.to_thread(lambda: "mine") == "mine"
        server.answers.set()
        await outcomes(asking)

    asyncio.run(run())


def test_look_ups_that_hang_are_limited_and_the_limit_says_so(server):
    async def run():
        lookups = Lookups(PATIENT_S)
        asking = [asyncio.create_task(lookups.run(str(n), server)) for n in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(LookUpError, match="another: 64 other look-ups have not been answered"):
            await lookups.run("another", server)
        server.answers.set()
        await outcomes(asking)
        assert await lookups.run("another", server) == "found"

    asyncio.run(run())


def test_a_look_up_that_fails_fails_for_each_caller_with_an_error_of_its_own():
    def fail():
        raise OSError("no such name")

    async def run():
        lookups = Lookups(PATIENT_S)
        asking = [asyncio.create_task(lookups.run("name", fail)) for _ in range(3)]
        errors = await outcomes(asking)
        assert [str(error) for error in errors] == ["name: no such name"] * 3
        assert len(set(map(id, errors))) == 3

    asyncio.run(run())


def test_a_caller_that_is_cancelled_leaves_the_look_up_to_the_others(server):
    async def run():
        lookups = Lookups(PATIENT_S)
        first, second = (asyncio.create_task(lookups.run("name", server)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        server.answers.set()
        assert await second == "found"
        assert first.cancelled()

    asyncio.run(run())


def test_a_loop_ends_while_a_look_up_hangs_and_the_thread_ends_after_it(server, threads_left):
    async def run():
        with pytest.raises(LookUpError):
            await Lookups(0.01).run("name", server)

    asyncio.run(run())
    server.answers.set()
    assert threads_left() == []
