"""Errors of the device at each single call of a transfer: one outcome, after its last copy."""

import gc
import logging
import threading

import pytest
import torch
from simulated_cuda.device import CudaError, Progress, Schedule
from transport.launches import (
    BLOCKS,
    SLOTS,
    World,
    check_all_lost,
    check_devices,
    check_errors,
    check_errors_for_good,
    check_lost,
)
from transport.worlds import DEADLINE_S, LOAD, STORE, Device, outcome_of, simple, simulated, until

from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.transport.cuda import CudaTransport


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("is_performed", [False, True])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(Progress.RANDOM, (3, 1, 2))])
def test_an_error_at_any_call_is_one_outcome_after_the_last_copy(direction, is_performed, schedule):
    check_errors(direction, schedule, is_performed=is_performed)


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_after_an_error_for_good_the_slots_stay_held_and_the_outcome_follows_the_close(direction):
    check_errors_for_good(direction)


def test_slots_stay_held_if_a_single_wait_fails_that_is_needed():
    check_lost()


def test_an_event_that_cannot_be_created_fails_its_transfer_before_the_first_copy():
    for at in (0, 1):
        with World(STORE) as world:
            world.runtime.fail("cudaEventCreate", at)
            world.submit()
            assert world.ended.wait(DEADLINE_S)
            assert "injected" in str(world.outcomes[0].error)
            assert not world.runtime.counts["cudaMemcpyAsync"]


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


def test_transfers_that_were_not_launched_when_the_device_was_lost_fail_at_once():
    check_all_lost()


def test_two_workers_of_a_process_share_pinned_slots():
    with World(STORE) as world:
        layout, runtime = world.device.layout, world.runtime
        other = CudaTransport(layout, world.buffer.view, staging_bytes=1, runtime=runtime)
        assert runtime.counts["cudaHostRegister"] == 1
        assert other.close(DEADLINE_S)
        world.check_next()
        world.check_closed()
        assert runtime.counts["cudaHostUnregister"] == 1


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
    world.check_closed()


def test_a_thread_that_cannot_use_the_device_fails_its_transfers():
    with simulated():
        device = Device()
    device.runtime.fail("cudaSetDevice", at=0)
    transport = device.transport()
    until(lambda: transport._lost)
    transfer = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
    assert isinstance(outcome_of(transfer).error, TransportError)
    assert not transport.close(DEADLINE_S)


def test_each_thread_uses_the_device_of_its_tensors():
    check_devices()
