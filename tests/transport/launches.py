"""A transfer into whose calls errors are injected, one after the other."""

import contextlib
import threading
from functools import cache

import numpy as np
import torch
from simulated_cuda.device import CudaError, Progress, Schedule, SimulatedCuda
from transport.worlds import (
    DEADLINE_S,
    STORE,
    Device,
    Geometry,
    Shape,
    outcome_of,
    simple,
    simulated,
    until,
)

from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.transport.cuda import CudaTransport

BLOCKS, SLOTS = (1, 2, 5, 7), (3, 4, 6, 9)
REUSED = 0x77


STAGING_CHUNKS = 2.5


class World:
    """A transfer in two pieces; what it uses is another's as soon as it has an outcome."""

    def __init__(self, direction, schedule=None, create=CudaTransport):
        with simulated(lambda: SimulatedCuda(schedule)):
            self.device = Device(Geometry(((Shape(8), Shape(16)),)))
        self.runtime = self.device.runtime
        self.buffer = PrimaryBuffer(24, self.device.view.shape[1])
        self.rows = np.asarray(self.buffer.view)
        self.rows[:] = self.device.rows
        self.transport = create(
            self.device.layout,
            self.buffer.view,
            staging_bytes=int(STAGING_CHUNKS * self.device.layout.chunk_bytes),
            runtime=self.runtime,
        )
        self.direction = direction
        self.after = self.transport.record_compute()
        self.outcomes = []
        self.ended = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.transport.close(DEADLINE_S)
        self.rows = None
        self.buffer.release()

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

    def check_closed(self):
        assert self.transport.close(DEADLINE_S)
        self.runtime.run_all()
        self.rows = None
        assert self.buffer.release()


@cache
def count_calls(direction):
    with World(direction) as world:
        before = world.runtime.counts.total()
        world.submit()
        assert world.ended.wait(DEADLINE_S)
        return world.runtime.counts.total() - before


def check_errors(direction, schedule, create=CudaTransport, *, is_performed, deadline_s=DEADLINE_S):
    """Check that after an error at any call there is one outcome, after the last copy."""
    for at in range(count_calls(direction)):
        with World(direction, schedule, create) as world:
            world.runtime.fail(at=at, is_performed=is_performed)
            world.submit()
            assert world.ended.wait(deadline_s), at
            (outcome,) = world.outcomes
            assert "injected" in str(outcome.error), at
            world.runtime.run_all()
            assert world.is_reused(), at
            world.check_next()
            world.check_closed()


def check_errors_for_good(direction, create=CudaTransport, *, deadline_s=DEADLINE_S):
    """Check that after an error for good slots stay held, and the outcome follows the close."""
    for at in range(count_calls(direction)):
        with World(direction, create=create) as world:
            world.runtime.fail(at=at, is_sticky=True)
            world.submit()
            until(lambda w=world: w.transport._lost or w.outcomes, deadline_s)
            assert not world.outcomes, at
            assert not world.transport.close(deadline_s)
            (outcome,) = world.outcomes
            assert "injected" in str(outcome.error), at
            assert not world.transport.close(0), "for good"
            world.rows = None
            assert not world.buffer.release(), "a copy may still run"


def check_lost(create=CudaTransport, *, deadline_s=DEADLINE_S):
    """Check that slots stay held if neither event nor stream can be waited for, just once."""
    with World(STORE, create=create) as world:
        world.runtime.fail("cudaMemcpyAsync", at=2)
        world.runtime.fail("cudaStreamSynchronize")
        world.submit()
        until(lambda: world.transport._lost or world.outcomes, deadline_s)
        assert not world.transport.close(deadline_s)
        assert len(world.outcomes) == 1
        world.rows = None
        assert not world.buffer.release(), "a copy may still run"


def check_all_lost(create=CudaTransport, *, deadline_s=DEADLINE_S):
    """Check that all transfers that are not launched when the device is lost fail at once."""
    with World(STORE, create=create) as world:
        world.runtime.hold()
        world.after = world.transport.record_compute()
        launched = 2 * 4  # four transfers on each stream
        records = world.runtime.counts["cudaEventRecord"] + 3 * launched
        transfers = [
            world.transport.submit(simple(STORE, (at,), (at,)), world.after) for at in range(12)
        ]
        until(lambda: world.runtime.counts["cudaEventRecord"] == records, deadline_s)
        world.runtime.fail("cudaMemGetInfo", is_sticky=True)
        with contextlib.suppress(CudaError):
            world.runtime.free_bytes()
        # The launching thread may have taken one more.
        for transfer in transfers[launched + 1 :]:
            assert transfer.synchronize(deadline_s)
            assert "is lost" in str(outcome_of(transfer).error)
        assert not any(transfer.synchronize(0) for transfer in transfers[:launched])
        assert not world.transport.close(deadline_s)
        for transfer in transfers:
            assert transfer.synchronize(0)
            assert "is lost" in str(outcome_of(transfer).error)


def check_durations(create=CudaTransport, *, deadline_s=DEADLINE_S):
    """Check that an outcome has the seconds of the copies, without the wait for the compute."""
    with World(STORE, Schedule(Progress.EAGER), create) as world:
        runtime = world.runtime
        compute = runtime.hold(runtime.default_stream)
        transfer = world.transport.submit(
            simple(STORE, BLOCKS, SLOTS), world.transport.record_compute()
        )
        until(lambda: runtime.counts["cudaEventSynchronize"], deadline_s)
        with runtime.stream(runtime.create_stream(torch.device("cpu"))):
            memory = runtime.empty((1,))
            for _ in range(1000):
                memory.fill_(0)
        released_ms = runtime.now_ms
        compute.release()
        seconds = outcome_of(transfer).seconds
        assert seconds is not None
        assert 0 < seconds * 1000 <= runtime.now_ms - released_ms


def check_devices(create=CudaTransport):
    """Check that each thread of a transport uses the device of its tensors."""
    with World(STORE, create=create) as world:
        assert world.transport.close(DEADLINE_S)
        launching, waiting = 2, 4
        assert world.runtime.counts["cudaSetDevice"] == launching + waiting


def check_staging_bytes(create=CudaTransport):
    """Check that staging takes no more of the device's memory than its bytes on each stream."""
    with World(STORE, create=create) as world:
        tables = sum(cache.nbytes for cache in world.device.caches.values())
        staging = world.runtime.used_bytes - tables
        assert 0 < staging <= 4 * int(STAGING_CHUNKS * world.device.layout.chunk_bytes)
