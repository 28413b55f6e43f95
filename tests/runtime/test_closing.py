"""What was opened is closed, whichever step of opening or closing fails."""

import asyncio
import fcntl
import os
import threading

import numpy as np
import pytest
from own_threads import Threadless, open_files
from scripted_tier import ScriptedTier
from virtual_runner import VirtualRunner

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.runtime import loop
from kvoffload_async.runtime.bridge import Bridge, TierLink
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.loop import LoopThread, new_event_loop
from kvoffload_async.runtime.shared_region import SharedBuffer
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.types import Medium

DEADLINE_S = 60.0


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_pool_that_cannot_have_all_its_threads_ends_those_that_it_has(monkeypatch, started):
    before = set(threading.enumerate())
    Threadless(monkeypatch, [None] * started)
    with pytest.raises(RuntimeError, match="can't start"):
        IoPool(2, 1, 1)
    assert set(threading.enumerate()) <= before


def test_a_loop_that_cannot_have_its_thread_is_closed(monkeypatch):
    Threadless(monkeypatch, [])
    loops = []

    def create():
        loops.append(new_event_loop())
        return loops[-1]

    monkeypatch.setattr(loop, "new_event_loop", create)
    with pytest.raises(RuntimeError, match="can't start"):
        LoopThread()
    assert loops[0].is_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_is_closed_although_a_task_ends_the_thread_when_it_is_cancelled():
    thread = LoopThread()

    async def stubborn():
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit(3)

    async def start():
        task = asyncio.get_running_loop().create_task(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        return task

    task = thread.run(start(), DEADLINE_S)
    thread.close(DEADLINE_S)
    assert thread._loop.is_closed()
    assert isinstance(task.exception(), SystemExit)


class Pool:
    def __init__(self):
        self.closed = 0

    def close(self, timeout_s):
        self.closed += 1
        return 0


class FailingRunner:
    """A runner whose loop gives an error of its own to whoever waits."""

    def __init__(self, runner, error):
        self._runner = runner
        self._error = error

    def __getattr__(self, name):
        return getattr(self._runner, name)  # what is not about waiting

    def run(self, coroutine, timeout_s):
        coroutine.close()
        raise self._error


@pytest.mark.parametrize("error", [OSError("loop"), TimeoutError(), RuntimeError("closed")])
def test_a_link_whose_actor_cannot_be_closed_still_closes_its_pool_and_ends_its_jobs(error):
    runner, pool = VirtualRunner(), Pool()
    bridge = Bridge(runner)
    link = TierLink(
        bridge,
        TierState("t", ExactIndex(), 16, EventLog(Medium.CPU, enabled=False)),
        ScriptedTier(),
        kv_view=memoryview(bytearray(64)).cast("B", (2, 32)),
        pool=pool,
        io_timeout_s=5.0,
        probe_timeout_s=2.0,
        identity=KVIdentity(),
    )
    link.open(1.0)
    link.state.submit(make_job(1, [key_of(1)], [0], is_promotion=False))
    bridge.runner = FailingRunner(runner, error)
    report = link.close(1.0)
    assert report.error is error
    assert error.__traceback__ is None
    assert pool.closed == 1
    assert not bridge.links
    assert [job.job_id for job, _ in link.state.jobs.take_ended()] == [1]
    runner.close()


# -- memory -------------------------------------------------------------------------------------


def join(directory):
    return SharedBuffer("t", 8192, 4096, participant=0, num_participants=2, directory=directory)


def failing(monkeypatch, module, name, error):
    def fail(*_args):
        raise error

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("name", ["ftruncate", "posix_fallocate", "pwrite", "pread", "fstat"])
def test_a_participant_that_cannot_arrive_leaves_nothing_open(tmp_path, monkeypatch, name):
    before = open_files()
    with monkeypatch.context() as patch:
        failing(patch, os, name, OSError(5, "io"))
        with pytest.raises(Exception, match="io"):
            join(tmp_path)
    assert open_files() == before


def test_a_file_that_cannot_be_locked_is_closed(tmp_path, monkeypatch):
    before = open_files()
    with monkeypatch.context() as patch:
        failing(patch, fcntl, "flock", OSError(37, "no locks"))
        with pytest.raises(OSError, match="no locks"):
            join(tmp_path)
    assert open_files() == before


@pytest.mark.parametrize("step", ["lstat", "flock"])
def test_shared_memory_goes_although_a_step_of_its_release_fails(tmp_path, monkeypatch, step):
    before = open_files()
    buffer = join(tmp_path)
    with monkeypatch.context() as patch:
        if step == "flock":
            failing(patch, fcntl, "flock", OSError(5, "io"))
        else:
            failing(patch, type(tmp_path), "lstat", OSError(5, "io"))
        with pytest.raises(OSError, match="io"):
            buffer.release()
    buffer.release()
    assert buffer.release()
    assert open_files() == before


def test_a_buffer_that_cannot_give_its_view_up_gives_it_up_later():
    buffer = PrimaryBuffer(2, 4096)
    with memoryview(np.asarray(buffer.view)):
        assert not buffer.release()
    assert buffer.release()
