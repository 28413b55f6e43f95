"""The Python threads' queue: who moves which part, and when a batch has ended."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.abc.tier import Direction
from kvoffload_async.block_io.transfer_queue import Part, TransferQueue
from kvoffload_async.errors import BusyError, TierUnavailableError

MIB = 1 << 20
THREADS = 2


class SteppedIo:
    """An `IoRunner` whose calls run when the test says so, in the order that it says."""

    def __init__(self):
        self.queued = []
        self.is_full = False

    async def run(self, direction, call, *, helpers=0):
        assert direction is Direction.STORE
        if self.is_full:
            raise BusyError("full")
        future = asyncio.get_running_loop().create_future()
        self.queued.append((call, future))
        return await future

    def step(self, index=0):
        call, future = self.queued.pop(index % len(self.queued))
        future.set_result(call())


class Batch:
    """A batch that moves nothing, and counts it."""

    def __init__(self, num_parts, defect=None):
        self._count = num_parts
        self._defect = defect
        self.moved = []
        self.times_ended = 0
        self.error = None
        self.file = None
        self.on_move = None
        self.idle_threads = None

    def parts(self, idle_threads):
        self.idle_threads = idle_threads
        return [Part(index, (), self.file, MIB) for index in range(self._count)]

    def move(self, part):
        assert not self.times_ended
        self.moved.append(part.start)
        if self.on_move is not None:
            self.on_move()
        if self._defect is not None:
            self.fail(self._defect)

    def fail(self, error):
        self.error = self.error or error


class World:
    """A queue, the batches in it, and how they were ended."""

    def __init__(self):
        self.io = SteppedIo()
        self.queue = TransferQueue(Direction.STORE, self.io, THREADS, MIB)
        self.reported = []
        self._report, self.queue._report = self.queue._report, self.report
        self.tasks = []

    def report(self, ended):
        self.reported.append(len(ended))
        for transfer in ended:
            transfer.batch.times_ended += 1
        self._report(ended)

    def submit(self, *args, file=None):
        batch = Batch(*args)
        batch.file = file
        self.tasks.append((batch, asyncio.create_task(self.queue.move(batch))))
        return batch

    def apply(self, step, argument):
        """Take one of the steps that hypothesis draws."""
        if step == "submit":
            self.submit(argument)
        elif step == "step" and self.io.queued:
            self.io.step(argument)
        elif step == "cancel" and argument < len(self.tasks):
            self.tasks[argument][1].cancel()
        elif step == "refuse":
            self.io.is_full = argument

    async def settle(self, iterations=6):
        for _ in range(iterations):
            await asyncio.sleep(0)

    async def drain(self):
        await self.settle()
        while self.io.queued:
            self.io.step()
            await self.settle()
        assert all(task.done() for _, task in self.tasks), "a job is never ended"
        await self.queue.close()


def run(scenario):
    async def perform():
        world = World()
        await scenario(world)
        await world.drain()
        return world

    return asyncio.run(perform())


def test_small_jobs_that_wait_together_are_ended_together():
    async def scenario(world):
        for _ in range(4):
            world.submit(1)
        await world.settle()
        world.io.step()

    world = run(scenario)
    assert world.reported == [4]


def test_only_a_job_that_finds_nothing_to_do_is_shared_by_all_threads():
    async def scenario(world):
        idle, behind_another = world.submit(1), world.submit(1)
        await world.settle()
        world.io.step()
        world.queue._num_serving = 1
        beside_another = world.submit(1)
        await world.settle()
        world.queue._num_serving = 0
        assert idle.idle_threads == THREADS
        assert behind_another.idle_threads == beside_another.idle_threads == 0

    run(scenario)


def test_a_thread_moves_several_quanta_and_what_ends_is_reported_after_each():
    async def scenario(world):
        log: list[str] = []
        for name, num_parts in [("large", 6), *[("small", 1)] * 6]:
            batch = world.submit(num_parts)
            batch.on_move = lambda name=name: log.append(f"{name} {world.reported}")
        await world.settle()
        world.io.step()
        assert world.reported == [3, 4], "two of the last quantum's parts are large"
        assert log[:8] == ["large []"] * 6 + ["small []"] * 2
        assert set(log[8:]) == {"small [3]"}, "reported before the rest is moved"

    assert all(batch.times_ended == 1 for batch, _ in run(scenario).tasks)


def test_a_thread_leaves_after_a_while_so_that_something_more_urgent_may_come():
    async def scenario(world):
        large = world.submit(70)
        await world.settle()
        world.io.step()
        assert (len(large.moved), large.times_ended) == (64, 0)
        world.io.step()
        assert (len(large.moved), large.times_ended) == (70, 1)

    run(scenario)


def test_a_thread_leaves_after_a_quantum_while_the_other_direction_is_starved():
    async def scenario(world):
        world.queue.other_direction = SimpleNamespace(is_starved=True)
        large = world.submit(20)
        await world.settle()
        world.io.step()
        assert len(large.moved) == 8
        world.queue.other_direction.is_starved = False
        world.io.step()
        assert len(large.moved) == 20

    run(scenario)


def test_a_queue_is_starved_while_something_waits_and_no_thread_is_there():
    async def scenario(world):
        assert not world.queue.is_starved
        batch = world.submit(2)
        await world.settle()
        assert world.queue.is_starved
        seen = []
        batch.on_move = lambda: seen.append(world.queue.is_starved)
        world.io.step()
        assert seen == [False, False]
        world.submit(1)
        await world.settle()
        assert world.queue.is_starved, "whoever was there has left"

    run(scenario)


def test_a_piece_whose_file_is_busy_lets_others_go_first_and_goes_if_there_are_none():
    async def scenario(world):
        moved = []

        def first_moves():
            moved.append("first")
            if len(world.io.queued) and len(moved) == 1:
                world.io.step()  # another thread comes in meanwhile

        for name, file in [("first", 1), ("second", 1), ("third", 2)]:
            batch = world.submit(1, file=file)
            batch.on_move = first_moves if name == "first" else lambda n=name: moved.append(n)
        await world.settle()
        world.io.step()
        assert moved == ["first", "third", "second"]
        for file in (1, 2, 1, 2):
            batch = world.submit(1, file=file)
            batch.on_move = lambda n=file: moved.append(n)
        await world.settle()
        world.io.step()
        assert moved[3:] == [1, 2, 1, 2], "nobody is busy with either any more"

    run(scenario)


def test_what_ends_after_the_loop_has_gone_is_no_error():
    async def make_queue():
        return TransferQueue(Direction.STORE, SteppedIo(), THREADS, MIB)

    queue = asyncio.run(make_queue())
    queue._report([None])


def test_no_more_threads_are_called_than_there_are_and_one_call_behind_them():
    async def scenario(world):
        world.submit(1)
        await world.settle()
        assert len(world.io.queued) == 1
        world.submit(1)
        await world.settle()
        assert len(world.io.queued) == 2
        for _ in range(150):
            world.submit(1)
        await world.settle()
        assert len(world.io.queued) == THREADS + 1

    run(scenario)


def test_what_comes_while_the_last_quanta_end_is_moved():
    async def scenario(world):
        for _ in range(THREADS):
            world.submit(1)
        await world.settle()
        for _ in range(THREADS):
            world.io.step()
        world.submit(1)

    assert sum(run(scenario).reported) == THREADS + 1


def test_a_defect_fails_its_job_and_no_other():
    async def scenario(world):
        world.submit(2, TierUnavailableError("broken"))
        world.submit(2)

    (_, bad), (good, fine) = run(scenario).tasks
    with pytest.raises(TierUnavailableError, match="broken"):
        bad.result()
    assert fine.result() is None
    assert len(good.moved) == 2


class Failing(Batch):
    """A batch with a defect, whose frames hold the batch that holds it."""

    def move(self, part):
        try:
            super().move(part)
            {}[part.start]
        except KeyError as error:
            self.fail(error)


def test_a_batch_that_is_cancelled_after_a_defect_is_freed_at_once():
    async def perform():
        world = World()
        batch = Failing(2)
        alive = weakref.ref(batch)
        tasks = [asyncio.create_task(world.queue.move(batch))]
        batch.on_move = lambda: [task.cancel() for task in tasks]
        del batch
        await world.settle()
        while world.io.queued:
            world.io.step()
            await world.settle()
        assert tasks.pop().cancelled()
        await world.queue.close()
        del world
        return alive()

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(perform()) is None
    finally:
        gc.enable()


def test_what_waits_for_a_pool_that_takes_no_more_fails():
    async def scenario(world):
        world.io.is_full = True
        world.submit(3)

    ((batch, task),) = run(scenario).tasks
    assert isinstance(task.exception(), BusyError)
    assert not batch.moved


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9)),
        st.tuples(st.just("step"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("refuse"), st.booleans()),
        st.tuples(st.just("settle"), st.integers(1, 6)),
    ),
    max_size=40,
)


@given(STEPS)
def test_every_batch_ends_once_when_all_of_it_that_was_begun_has_been_moved(steps):
    async def scenario(world):
        for step, argument in steps:
            world.apply(step, argument)
            if step == "settle":
                await world.settle(argument)
        world.io.is_full = False

    world = run(scenario)
    cancelled = {argument for step, argument in steps if step == "cancel"}
    is_refusing = ("refuse", True) in steps
    for index, (batch, task) in enumerate(world.tasks):
        assert len(set(map(str, batch.moved))) == len(batch.moved), "a part was moved twice"
        assert batch.times_ended <= 1
        if not task.cancelled() and task.exception() is None:
            assert batch.moved == list(range(batch._count))
            assert batch.times_ended == 1
        else:
            assert index in cancelled or is_refusing
    assert not world.queue._waiting
    assert not world.queue._calls
