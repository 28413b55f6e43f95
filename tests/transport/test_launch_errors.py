"""Errors of the device at each single call of a transfer: one outcome, after its last copy."""

import gc
import logging
import threading
from functools import partial

import numpy as np
import pytest
import torch
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    STORE,
    Device,
    Geometry,
    Shape,
    outcome_of,
    simple,
    simulated,
    until,
)

from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.cuda import CudaError, Progress, Schedule, SimulatedCuda
from kvoffload_async.transport.cuda import CudaTransport

BLOCKS, SLOTS = (1, 2, 5, 7), (3, 4, 6, 9)
REUSED = 0x77


class World:
    """A transfer in two pieces; what it uses is another's as soon as it has an outcome."""

    def __init__(self, direction, schedule=None):
        with simulated(lambda: SimulatedCuda(schedule)):
            self.device = Device(Geometry(((Shape(8), Shape(16)),)))
        self.runtime = self.device.runtime
        self.buffer = PrimaryBuffer(24, self.device.view.shape[1])
        self.rows = np.asarray(self.buffer.view)
        self.rows[:] = self.device.rows
        self.transport = CudaTransport(
            self.device.layout,
            self.buffer.view,
            staging_bytes=2 * self.device.layout.chunk_bytes,
            runtime=self.runtime,
        )
        self.direction = direction
        self.after = self.transport.record_compute()
        self.outcomes = []
        self.ended = threading.Event()

    def submit(self):
        transfer = self.transport.submit(simple(self.direction, BLOCKS, SLOTS), self.after)
        transfer._ended.add_done_callback(self.reuse)

    def reuse(self, ended):
        self.outcomes.append(ended.result())
        self.rows[list(SLOTS)] = REUSED
        for table in self.device.tables():
            table.pages.numpy()[list(BLOCKS)] = REUSED
        self.ended.set()

    def is_reused(self):
        """Whether nothing was written after the outcome."""
        pages = [table.pages.numpy()[list(BLOCKS)] for table in self.device.tables()]
        return all((part == REUSED).all() for part in [self.rows[list(SLOTS)], *pages])

    def check_next(self):
        """A later transfer moves its bytes."""
        after = self.transport.record_compute()
        assert outcome_of(self.transport.submit(simple(STORE, (0,), (0,)), after)).error is None
        assert np.array_equal(self.rows[0, :8], self.device.tables()[0].pages.numpy()[0])

    def close(self):
        assert self.transport.close(DEADLINE_S)
        self.runtime.run_all()
        del self.rows
        assert self.buffer.release()


def count_calls(direction):
    world = World(direction)
    before = world.runtime.counts.total()
    world.submit()
    assert world.ended.wait(DEADLINE_S)
    calls = world.runtime.counts.total() - before
    world.close()
    return calls


CALLS = {direction: count_calls(direction) for direction in (STORE, LOAD)}


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("is_performed", [False, True])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(Progress.RANDOM, (3, 1, 2))])
def test_an_error_at_any_call_is_one_outcome_after_the_last_copy(direction, is_performed, schedule):
    for at in range(CALLS[direction]):
        world = World(direction, schedule)
        world.runtime.fail(at=at, is_performed=is_performed)
        world.submit()
        assert world.ended.wait(DEADLINE_S), at
        (outcome,) = world.outcomes
        assert "injected" in str(outcome.error), at
        world.runtime.run_all()
        assert world.is_reused(), at
        world.check_next()
        world.close()


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_after_an_error_for_good_the_slots_stay_held_and_the_outcome_follows_the_close(direction):
    for at in range(CALLS[direction]):
        world = World(direction)
        world.runtime.fail(at=at, is_sticky=True)
        world.submit()
        until(partial(getattr, world.transport, "_lost"))
        assert not world.outcomes, at
        assert not world.transport.close(DEADLINE_S)
        (outcome,) = world.outcomes
        assert "injected" in str(outcome.error), at
        assert not world.transport.close(0), "for good"
        del world.rows
        assert not world.buffer.release(), "a copy may still run"


def test_a_device_that_is_lost_fails_all_transfers_at_once(caplog):
    world = World(STORE)
    gate = world.runtime.hold(world.runtime.default_stream)
    world.after = world.transport.record_compute()
    first = world.transport.submit(simple(STORE, BLOCKS, SLOTS), world.after)
    until(lambda: world.runtime.counts["cudaEventSynchronize"])
    world.runtime.fail("cudaMemcpyAsync")
    world.runtime.fail("cudaStreamSynchronize")
    second = world.transport.submit(simple(STORE, (0,), (0,)), world.after)
    until(lambda: world.runtime.counts["cudaStreamSynchronize"])
    until(lambda: world.transport._lost)
    third = world.transport.submit(simple(STORE, (0,), (0,)), world.after)
    assert "is lost" in str(outcome_of(third).error)
    assert not second.synchronize(0), "its copies may run"
    gate.release()
    assert outcome_of(first).error is None, "its event says so"
    assert not world.transport.close(DEADLINE_S)
    assert "is lost" in str(outcome_of(second).error)
    (line,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "slots of its copies stay in use" in line.getMessage()


@pytest.mark.parametrize("call", ["cudaStreamCreate", "cudaMalloc", "cudaHostRegister"])
def test_a_device_that_refuses_what_a_transport_needs_is_bad_configuration(call):
    with simulated():
        device = Device()
    used = device.runtime.used_bytes
    device.runtime.fail(call)
    with pytest.raises(ConfigError):
        CudaTransport(device.layout, device.view, runtime=device.runtime, staging_bytes=1)
    gc.collect()  # the error's frames
    device.runtime.run_all()
    assert device.runtime.used_bytes == used
    assert not device.runtime.is_pinned(torch.from_numpy(device.rows))


def test_threads_that_cannot_be_started_leave_nothing_open(monkeypatch):
    with simulated():
        device = Device()
    started = []
    start = threading.Thread.start

    def fail_later(thread):
        started.append(thread)
        if len(started) == 4:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_later)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        device.transport()
    assert not any(thread.is_alive() for thread in started)
    assert not device.runtime.is_pinned(torch.from_numpy(device.rows))


def test_slots_that_cannot_be_unpinned_stay_held(caplog):
    world = World(STORE)
    world.runtime.fail("cudaHostUnregister")
    assert not world.transport.close(DEADLINE_S)
    assert not world.buffer.release()
    assert "cannot be unpinned" in caplog.text
    world.rows = None
    assert world.transport.close(DEADLINE_S), "the second attempt"
    assert world.buffer.release()


def test_a_failing_record_of_the_compute_stream_raises_and_harms_no_transfer():
    world = World(STORE)
    world.runtime.fail("cudaEventRecord")
    with pytest.raises(CudaError, match="injected"):
        world.transport.record_compute()
    world.check_next()
    world.close()


def test_a_thread_that_cannot_use_the_device_fails_its_transfers():
    with simulated():
        device = Device()
    device.runtime.fail("cudaSetDevice", at=0)
    transport = device.transport()
    until(lambda: transport._lost)
    transfer = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
    assert isinstance(outcome_of(transfer).error, TransportError)
    assert not transport.close(DEADLINE_S)
