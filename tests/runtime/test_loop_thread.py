"""The loop thread, the bridge over it, and the memory that both hand to tiers."""

import asyncio
import contextlib
import gc
import threading

import numpy as np
import pytest
from scripted_tier import ScriptedTier
from virtual_runner import VirtualRunner

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import ClosedError, ConfigError, StateError
from kvoffload_async.runtime.bridge import Bridge, TierLink
from kvoffload_async.runtime.buffer import PAGE_BYTES, PrimaryBuffer, row_stride_bytes
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.testing import InlineIo
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.types import Medium

DEADLINE_S = 60.0


class UnpooledIo(InlineIo):
    def close(self, timeout_s):
        return 0


@pytest.fixture
def loop():
    with contextlib.closing(LoopThread()) as thread:
        yield thread


async def value_of(value):
    return value


# -- the loop thread ----------------------------------------------------------------------------


def test_run_gives_a_coroutines_result_and_its_error(loop):
    async def fail():
        raise OSError("boom")

    assert loop.run(value_of(5), DEADLINE_S) == 5
    with pytest.raises(OSError, match="boom"):
        loop.run(fail(), DEADLINE_S)


def test_run_past_its_deadline_cancels_the_coroutine(loop):
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        loop.run(hang(), 0.01)
    assert cancelled.wait(DEADLINE_S)


def test_run_passes_on_a_timeout_of_the_coroutine_itself(loop):
    async def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.run(fail(), DEADLINE_S)


def test_run_refuses_the_loops_own_thread(loop):
    async def nested():
        return loop.run(value_of(1), DEADLINE_S)

    with pytest.raises(StateError, match="own thread"):
        loop.run(nested(), DEADLINE_S)


def test_a_closed_loop_thread_refuses_work():
    loop = LoopThread()
    loop.close()
    loop.close()
    with pytest.raises(ClosedError):
        loop.run(value_of(1), DEADLINE_S)
    with pytest.raises(ClosedError):
        loop.call_soon(print)


def test_wait_until_gives_up_at_its_deadline(loop):
    assert loop.wait_until(lambda: False, 0.01) is False


def test_wait_until_sees_what_was_true_before(loop):
    loop.notify()  # nobody waits: nothing to wake
    assert loop.wait_until(lambda: True, 0.0) is True


def test_wait_until_is_woken_by_notify(loop):
    done = []

    def finish():
        done.append(1)
        loop.notify()

    loop.call_soon(finish)
    assert loop.wait_until(lambda: bool(done), DEADLINE_S)


def test_time_goes_forward(loop):
    assert loop.now_s() <= loop.now_s()


def test_closing_with_tasks_left_cancels_and_names_them(caplog):
    loop = LoopThread()

    async def leave_behind():
        task = asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="forgotten")
        await asyncio.sleep(0)
        return task

    task = loop.run(leave_behind(), DEADLINE_S)
    loop.close()
    assert "forgotten" in caplog.text
    assert task.cancelled()


def test_a_task_that_outlives_its_loop_is_named_once_and_not_complained_of_when_it_goes(caplog):
    loop = LoopThread()

    async def hold_on():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def leave_behind():
        asyncio.get_running_loop().create_task(hold_on(), name="stubborn")

    loop.run(leave_behind(), DEADLINE_S)
    loop.close()
    gc.collect()
    assert caplog.text.count("stubborn") == 1


def test_a_task_left_behind_that_fails_is_complained_of(caplog):
    loop = LoopThread()

    async def fail_when_cancelled():
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("lost")

    async def leave_behind():
        asyncio.get_running_loop().create_task(fail_when_cancelled())
        await asyncio.sleep(0)

    loop.run(leave_behind(), DEADLINE_S)
    loop.close()
    gc.collect()
    assert "lost" in caplog.text


def test_closing_does_not_wait_for_a_loop_that_is_stuck(caplog):
    loop = LoopThread()
    stuck, free = threading.Event(), threading.Event()

    def block():
        stuck.set()
        free.wait(DEADLINE_S)

    loop.call_soon(block)
    assert stuck.wait(DEADLINE_S)
    loop.close(0.01)
    assert "did not stop" in caplog.text
    free.set()
    loop._thread.join(DEADLINE_S)
    assert not loop._thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_has_died_can_still_be_closed():
    loop = LoopThread()

    def die():
        raise KeyboardInterrupt

    loop.call_soon(die)
    loop._thread.join(DEADLINE_S)
    loop.close()
    with pytest.raises(ClosedError):
        loop.call_soon(print)


def test_a_closed_bridge_has_ended_its_thread():
    with contextlib.closing(Bridge(LoopThread())) as bridge:
        assert bridge.runner.run(value_of(3), DEADLINE_S) == 3
    with pytest.raises(ClosedError):
        bridge.runner.call_soon(print)


# -- the bridge ---------------------------------------------------------------------------------


class Links:
    def __init__(self, count):
        self.runner = VirtualRunner()
        self.bridge = Bridge(self.runner, lambda *_: UnpooledIo())
        self.view = memoryview(bytearray(8 * 16)).cast("B", (8, 16))
        self.tiers = [ScriptedTier() for _ in range(count)]
        self.links = [self._link(tier) for tier in self.tiers]

    def _link(self, tier):
        state = TierState("t", ExactIndex(), 16, EventLog(Medium.CPU, enabled=False))
        link = TierLink(
            self.bridge,
            state,
            tier,
            kv_view=self.view,
            pool=UnpooledIo(),
            io_timeout_s=30.0,
            probe_timeout_s=2.0,
            identity=KVIdentity(),
        )
        link.open(1.0)
        return link


def test_a_flush_wakes_the_loop_once_whatever_the_number_of_jobs_and_tiers():
    world = Links(3)
    for number in range(30):
        world.links[number % 3].state.submit(make_job(number, [key_of(1)], [0], is_promotion=False))
    before = world.runner.callbacks
    world.bridge.flush()
    assert world.runner.callbacks - before == 1
    assert world.bridge.wake_ups == 1
    world.bridge.flush()
    assert world.bridge.wake_ups == 1, "nothing to hand over: no wake-up"
    world.runner.run_ready()
    assert sum(len(tier.parked) for tier in world.tiers) == 12, "four at once in each tier"
    _end(world)


def test_progress_is_waited_for_with_a_deadline():
    world = Links(1)
    world.links[0].state.submit(make_job(1, [key_of(1)], [0], is_promotion=False))
    assert world.bridge.wait_for_progress(5.0) is False
    world.tiers[0].finish_all()
    assert world.bridge.wait_for_progress(5.0) is True
    _end(world)


def test_a_link_whose_loop_is_gone_still_gives_every_job_a_result():
    world = Links(1)
    link = world.links[0]
    link.state.submit(make_job(1, [key_of(1)], [0], is_promotion=False))
    world.runner.close()
    report = link.close(1.0)
    assert isinstance(report.error, ClosedError)
    assert [job.job_id for job, _ in link.state.jobs.take_ended()] == [1]


def _end(world):
    for tier in world.tiers:
        while tier.parked:
            tier.finish_all()
            world.runner.run_ready()
    for link in world.links:
        assert link.close(1.0).is_clean
        assert link.close(1.0).unfinished_jobs == ()
    assert not world.bridge.links
    world.runner.close()


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "workers", "stride"),
    [(1, 1, 4096), (4096, 1, 4096), (4097, 1, 8192), (3000, 2, 8192)],
)
def test_a_row_holds_a_cell_for_each_worker_in_whole_pages(block, workers, stride):
    assert row_stride_bytes(block, workers, page_bytes=4096) == stride


@pytest.mark.parametrize("prefault", [True, False])
def test_the_view_has_a_row_a_slot_and_starts_as_zeros(prefault):
    buffer = PrimaryBuffer(3, 4096, prefault=prefault)
    assert buffer.view.shape == (3, 4096)
    assert buffer.view.strides == (4096, 1)
    assert buffer.view.c_contiguous
    assert not any(bytes(buffer.view))
    assert buffer.release()


def test_memory_that_somebody_exports_stays_mapped_until_it_is_let_go(caplog):
    buffer = PrimaryBuffer(2, PAGE_BYTES)
    rows = np.asarray(buffer.view)
    assert not buffer.release()
    assert "still in use" in caplog.text
    rows[0] = 7  # a late copy still has somewhere to go
    del rows
    assert buffer.release()
    assert buffer.release()


def test_too_much_memory_is_a_config_error_that_names_the_key():
    with pytest.raises(ConfigError, match="cpu_bytes_to_use: cannot map"):
        PrimaryBuffer(2**40, 2**20)
