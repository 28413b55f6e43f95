"""The simulated device: streams, events, memory and errors as CUDA has them."""

import gc
import threading

import pytest
import torch

from simulated_cuda.device import (
    POISON,
    CudaError,
    Progress,
    Schedule,
    SimulatedCuda,
)

CPU = torch.device("cpu")


@pytest.fixture
def device():
    return SimulatedCuda()


def pinned(device, values):
    return device.pin_memory(torch.tensor(values, dtype=torch.uint8))


def on_device(device, *values):
    """A tensor whose content is there already."""
    tensor = device.empty((len(values),))
    device.run_all()
    return tensor.copy_(torch.tensor(values, dtype=torch.uint8))


# -- order --------------------------------------------------------------------------------------


def test_operations_return_before_they_run_and_run_for_whoever_waits(device):
    tensor = on_device(device, 1, 2)
    with device.stream(device.default_stream):
        tensor.add_(10)
        doubled = tensor * 2
    assert tensor.tolist() == [1, 2]
    device.default_stream.synchronize()
    assert tensor.tolist() == [11, 12]
    assert doubled.tolist() == [22, 24]


def test_only_what_a_wait_needs_runs(device):
    tensor = on_device(device, 0, 0, 0)
    streams = [device.create_stream(CPU) for _ in range(3)]
    event = device.create_event()
    for at, stream in enumerate(streams):
        with device.stream(stream):
            tensor[at].fill_(1)
    event.record(streams[0])
    streams[1].wait_event(event)
    streams[1].synchronize()
    assert tensor.tolist() == [1, 1, 0]


@pytest.mark.parametrize("progress", Progress)
def test_a_stream_waits_for_the_latest_record_before_its_wait(progress):
    device = SimulatedCuda(Schedule(progress, (1, 0)))
    tensor = on_device(device, 0)
    first, second = (device.create_stream(CPU) for _ in range(2))
    event = device.create_event()
    with device.stream(first):
        tensor.fill_(1)
        event.record(first)
        second.wait_event(event)
        held = device.hold(first)
        event.record(first)  # the second stream does not wait for this one
    with device.stream(second):
        tensor.add_(1)
    second.synchronize()
    assert tensor.tolist() == [2]
    assert not event.query()
    held.release()
    event.synchronize()


def test_eager_operations_run_at_their_launch():
    device = SimulatedCuda(Schedule(Progress.EAGER))
    tensor = on_device(device, 1)
    with device.stream(device.default_stream):
        tensor.add_(1)
    assert tensor.tolist() == [2]


def test_copies_are_seen_half_done():
    device = SimulatedCuda(Schedule(Progress.RANDOM, (1, 0, 1)))
    seen = set()
    source = pinned(device, [1] * 8)
    for _ in range(8):
        target, copied = on_device(device, *[0] * 8), on_device(device, *[0] * 8)
        writer, reader = (device.create_stream(CPU) for _ in range(2))
        with device.stream(writer):
            target.copy_(source, non_blocking=True)
        with device.stream(reader):
            copied.copy_(target)
        device.run_all()
        seen.add(int(copied.sum()))
    assert seen - {0, 8}


def test_the_current_stream_is_one_of_the_thread(device):
    stream = device.create_stream(CPU)
    seen = []
    with device.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
        thread.start()
        thread.join()
        with device.stream(device.default_stream):
            seen.append(device.current_stream())
        seen.append(device.current_stream())
    assert seen == [device.default_stream, device.default_stream, stream]
    assert device.current_stream() is device.default_stream


def test_a_polled_event_is_reached_in_the_end(device):
    event = device.create_event()
    with device.stream(device.default_stream):
        on_device(device, 1).add_(1)
    event.record(device.default_stream)
    polls = 0
    while not event.query():
        polls += 1
    assert polls


def test_shapes_of_indexed_operations_come_without_the_indices(device):
    pages = on_device(device, 1, 2, 3, 4)
    index = device.empty((2,), torch.int64)
    with device.stream(device.default_stream):
        picked = pages.index_select(0, index)
        again = pages[index]
        index.copy_(device.pin_memory(torch.tensor([3, 0])), non_blocking=True)
        right = pages[index]
        assert picked.shape == again.shape == (2,)
        with pytest.raises(NotImplementedError, match="depends on values"):
            pages[pages > 1]
        with pytest.raises(NotImplementedError, match="depends on values"):
            pages.nonzero()
    del picked, again, right
    assert not device.has_failed


# -- events -------------------------------------------------------------------------------------


def test_an_event_that_was_never_recorded_is_reached(device):
    event = device.create_event(timed=True)
    assert event.query()
    event.synchronize()
    device.default_stream.wait_event(event)
    assert not device.num_queued


def test_the_device_creates_an_event_at_its_first_record(device):
    device.fail("cudaEventCreate")
    event = device.create_event()
    with pytest.raises(CudaError, match="cudaEventCreate"):
        event.record(device.default_stream)
    assert event.query()
    event.record(device.default_stream)
    event.record(device.default_stream)
    assert device.counts["cudaEventCreate"] == 2


def test_the_time_between_two_events_is_that_of_the_steps(device):
    begin, end = (device.create_event(timed=True) for _ in range(2))
    tensor = on_device(device, 1)
    begin.record(device.default_stream)
    with device.stream(device.default_stream):
        tensor.add_(1)
    end.record(device.default_stream)
    with pytest.raises(CudaError, match="not reached"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    with pytest.raises(CudaError, match="without timing"):
        begin.elapsed_time(device.create_event())


def test_waits_that_spin_are_counted(device):
    for blocking in (True, False):
        event = device.create_event(blocking=blocking)
        event.record(device.default_stream)
        event.synchronize()
    assert device.counts["spinning waits"] == 1


def test_an_event_belongs_to_its_device(device):
    event = device.create_event()
    assert device.is_event(event)
    assert not SimulatedCuda().is_event(event)
    assert not device.is_event(object())


# -- memory -------------------------------------------------------------------------------------


def test_memory_is_poisoned_when_allocated_in_the_order_of_its_stream(device):
    tensor = device.empty((4,))
    assert (tensor == POISON).all()
    tensor.zero_()  # on no stream, so before other users of the memory have ended
    device.run_all()
    assert (tensor == POISON).all()


def test_released_memory_is_poisoned_in_the_order_of_its_stream(device):
    other = device.create_stream(CPU)
    target, late = on_device(device, 0, 0), on_device(device, 0, 0)
    used = device.used_bytes
    with device.stream(device.default_stream):
        temporary = device.empty((2,)).fill_(5)
        target.copy_(temporary)
        event = device.create_event()
        event.record(device.default_stream)
    other.wait_event(event)
    with device.stream(other):
        late.copy_(temporary)
    del temporary
    gc.collect()
    device.default_stream.synchronize()
    device.run_all()
    assert device.used_bytes == used
    assert target.tolist() == [5, 5], "the same stream used it before"
    device.default_stream.synchronize()
    assert set(late.tolist()) <= {5, POISON}


def test_what_another_stream_still_reads_is_overwritten_when_released():
    device = SimulatedCuda()
    other = device.create_stream(CPU)
    late = on_device(device, 0, 0)
    held = device.hold(other)
    with device.stream(device.default_stream):
        temporary = device.empty((2,)).fill_(5)
    with device.stream(other):
        late.copy_(temporary)
    del temporary
    device.create_event().record(device.default_stream)
    device.default_stream.synchronize()
    held.release()
    other.synchronize()
    assert late.tolist() == [POISON, POISON]


def test_pinned_memory_is_kept_until_its_last_copy(device):
    target = on_device(device, 0, 0)
    source = pinned(device, [1, 2])
    with device.stream(device.default_stream):
        target.copy_(source, non_blocking=True)
    del source
    device.default_stream.synchronize()
    assert target.tolist() == [1, 2]


def test_memory_runs_out(device):
    device = SimulatedCuda(memory_bytes=100)
    kept = device.empty((60,))
    assert device.free_bytes() == 40
    with pytest.raises(torch.OutOfMemoryError, match="60 bytes of 100, of which 60 are in use"):
        device.empty((60,))
    del kept
    assert device.empty((60,)).shape == (60,)


@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("to_host", [True, False])
def test_copies_are_asynchronous_between_pinned_and_device_memory(
    device, non_blocking, is_pinned, to_host
):
    tensor = on_device(device, 1, 2)
    host = torch.tensor([8, 9], dtype=torch.uint8)
    host = device.pin_memory(host) if is_pinned else host
    assert device.is_pinned(host) == is_pinned
    source, target = (tensor, host) if to_host else (host, tensor)
    with device.stream(device.default_stream):
        target.copy_(source, non_blocking=non_blocking)
    is_synchronous = not (is_pinned and non_blocking)
    assert torch.equal(target, source) == is_synchronous
    assert device.counts["synchronous copies"] == is_synchronous
    device.run_all()
    assert torch.equal(target, source)


def test_copies_of_memory_that_is_not_contiguous_are_synchronous(device):
    host = device.pin_memory(torch.zeros(2, 3, dtype=torch.uint8))
    tensor = device.empty((2, 2))
    with device.stream(device.default_stream):
        host[:, :2].copy_(tensor.fill_(4), non_blocking=True)
    assert host.tolist() == [[4, 4, 0], [4, 4, 0]]
    assert device.counts["synchronous copies"] == 1


def test_registered_memory_is_pinned_until_it_is_unregistered(device):
    memory = bytearray(64)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    address = host.data_ptr()
    assert device.cudart().cudaHostRegister(address, 64, 0) == 0
    assert device.is_pinned(host[10:20])
    tensor = on_device(device, *range(64))
    with device.stream(device.default_stream):
        host.copy_(tensor, non_blocking=True)
    assert device.cudart().cudaHostUnregister(address) == 0
    assert not device.is_pinned(host)
    assert device.cudart().cudaHostUnregister(address) != 0
    with pytest.raises(CudaError, match="no longer pinned"):
        device.default_stream.synchronize()
    assert not any(memory)


def test_an_operation_takes_no_tensor_of_the_host(device):
    tensor = on_device(device, 1, 2)
    with device.stream(device.default_stream):
        with pytest.raises(CudaError, match="on the host"):
            tensor + torch.ones(2, dtype=torch.uint8)
        assert (torch.ones(2) + 1).tolist() == [2, 2], "the host's own runs at once"
        assert int((tensor + torch.tensor(1, dtype=torch.uint8)).sum()) == 5


# -- launches and errors ------------------------------------------------------------------------


def test_a_launch_into_a_full_stream_waits_for_room():
    device = SimulatedCuda(queue_length=2)
    tensor = on_device(device, 0)
    with device.stream(device.default_stream):
        for _ in range(5):
            tensor.add_(1)
    assert device.counts["blocked launches"] == 3
    assert tensor.tolist() == [3]


def test_a_launch_behind_a_hold_blocks_until_it_is_released():
    device = SimulatedCuda(queue_length=1)
    held = device.hold()
    timer = threading.Timer(0.01, held.release)
    timer.start()
    device.create_event().record(device.default_stream)
    timer.join()
    assert held.is_released


@pytest.mark.parametrize("is_performed", [False, True])
def test_an_error_is_that_of_one_call(device, is_performed):
    tensor = on_device(device, 0)
    device.fail("launch", at=1, is_performed=is_performed)
    with device.stream(device.default_stream):
        tensor.add_(1)
        with pytest.raises(CudaError, match="injected into launch 1"):
            tensor.add_(10)
        tensor.add_(100)
    device.default_stream.synchronize()
    assert tensor.tolist() == [111 if is_performed else 101]


def test_after_a_sticky_error_all_calls_fail_and_what_is_queued_may_run(device):
    tensor = on_device(device, 0)
    with device.stream(device.default_stream):
        tensor.add_(1)
    device.fail(error=CudaError("gone"), is_sticky=True)
    calls = [
        lambda: device.create_stream(CPU),
        lambda: device.empty((1,)),
        lambda: device.set_device(CPU),
        device.default_stream.synchronize,
        lambda: device.create_event().record(device.default_stream),
        device.free_bytes,
    ]
    for call in calls:
        with pytest.raises(CudaError, match="gone"):
            call()
    assert device.has_failed
    assert device.cudart().cudaHostRegister(0, 1, 0) != 0
    assert tensor.tolist() == [0]
    device.run_all()
    assert tensor.tolist() == [1]


def test_an_operation_that_fails_on_the_device_is_reported_by_the_next_call(device):
    pages = on_device(device, 1, 2)
    index = device.empty((1,), torch.int64)
    with device.stream(device.default_stream):
        pages.index_select(0, index)  # its index is poison
    with pytest.raises(CudaError, match="index_select"):
        device.default_stream.synchronize()
    assert device.has_failed


def test_a_wait_ends_when_the_device_fails_meanwhile(device):
    device.hold()
    errors = []

    def wait():
        try:
            device.default_stream.synchronize()
        except CudaError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    device.fail(error=CudaError("gone"), is_sticky=True)
    with pytest.raises(CudaError):
        device.free_bytes()
    thread.join(10)
    assert errors == ["gone"]
