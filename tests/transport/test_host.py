"""The stand-in for an accelerator: the contract of a transport, without one."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    STORE,
    Device,
    Geometry,
    Shape,
    Wanted,
    copies_of,
    geometries,
    outcome_of,
    simple,
    wants,
)

from kvoffload_async.abc.transport import TransferOutcome
from kvoffload_async.errors import ConfigError, StateError, TransportError
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.loop_thread import LoopThread
from kvoffload_async.transport.host import HostEvent, HostTransport
from kvoffload_async.transport.layout import register_kv_caches
from kvoffload_async.transport.settling import SettlingTransfer, failed

FLAT = Geometry(((Shape(8), Shape(8)),))
MOMENT_S = 0.02


class Gate:
    """Holds every copy of a direction until it is opened; notes what has arrived."""

    def __init__(self):
        self.opened = threading.Event()
        self.arrived = threading.Event()
        self.copies = []

    def __call__(self, copies):
        self.copies.append(copies)
        self.arrived.set()
        assert self.opened.wait(DEADLINE_S)


@pytest.fixture
def device():
    return Device(FLAT)


@pytest.fixture
def transport(device):
    transport = device.transport(detects_overwrites=True)
    yield transport
    assert transport.close(DEADLINE_S)


def gate(transport, direction):
    hook = Gate()
    transport.faults[direction].before_copy = hook
    return hook


# -- bytes --------------------------------------------------------------------------------------


@st.composite
def journeys(draw):
    geometry = draw(geometries())
    steps = st.tuples(st.sampled_from([STORE, LOAD]), wants(geometry))
    return geometry, draw(st.lists(steps, min_size=1, max_size=4))


@given(journeys())
def test_every_transfer_moves_exactly_its_bytes(journey):
    geometry, steps = journey
    device = Device(geometry)
    transport = device.transport()
    for number, (direction, wanted) in enumerate(steps):
        device.fill(number)
        device.snapshot()
        device.apply(direction, wanted)
        copies = copies_of(direction, wanted)
        outcome = outcome_of(transport.submit(copies, transport.record_compute()))
        assert outcome.error is None
        parts = device.layout.resolve(copies, geometry.slots)
        assert outcome.num_bytes == device.layout.num_bytes(parts)
        assert outcome.seconds >= 0
        assert device.agrees()
    assert transport.close(DEADLINE_S)


def test_a_slot_must_hold_a_chunk(device):
    with pytest.raises(ConfigError, match="does not hold a chunk"):
        HostTransport(device.layout, device.view, cell_offset_bytes=10)


# -- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_transfers_of_a_direction_run_in_order(device, transport, direction):
    hook = gate(transport, direction)
    hook.opened.set()
    transfers = [
        transport.submit(simple(direction, (i,), (i,)), transport.record_compute())
        for i in range(8)
    ]
    assert transfers[-1].synchronize(DEADLINE_S)
    assert all(t.synchronize(0) for t in transfers)
    assert [c.device.block_ids.tolist() for c in hook.copies] == [[i] for i in range(8)]


def test_a_store_waits_for_what_is_being_computed(device, transport):
    # vLLM issue 31341: the copy read blocks that the forward pass had not written yet.
    computing = HostEvent(reached=False)
    transfer = transport.submit(simple(STORE, (1, 2), (3, 4)), computing)
    assert not transfer.synchronize(MOMENT_S)
    device.fill(1)  # the forward pass
    device.snapshot()
    device.apply(STORE, [Wanted((1, 2), 0, (3, 4))])
    computing.reach()
    assert outcome_of(transfer).error is None
    assert device.agrees()


def test_a_load_waits_for_the_zeroing_of_its_blocks(device, transport):
    # vLLM issue 50696: a zeroing that was still queued wiped what the load had brought.
    device.rows[3:5] = np.arange(device.rows.shape[1], dtype=np.uint8)
    device.snapshot()
    computing = HostEvent(reached=False)
    transfer = transport.submit(simple(LOAD, (1, 2), (3, 4)), computing)
    assert not transfer.synchronize(MOMENT_S)
    for cache in device.caches.values():
        cache[1:3] = 0  # the zeroing
    computing.reach()
    assert outcome_of(transfer).error is None
    device.apply(LOAD, [Wanted((1, 2), 0, (3, 4))])
    assert device.agrees()


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_the_transfer_behind_a_delayed_one_waits_too(device, transport, direction):
    computing = HostEvent(reached=False)
    first = transport.submit(simple(direction, (1,), (1,)), computing)
    second = transport.submit(simple(direction, (2,), (2,)), transport.record_compute())
    assert not second.synchronize(MOMENT_S)
    computing.reach()
    assert second.synchronize(DEADLINE_S)
    assert first.synchronize(0)


def test_the_directions_do_not_wait_for_each_other(device, transport):
    stores = gate(transport, STORE)
    store = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
    load = transport.submit(simple(LOAD, (2,), (2,)), transport.record_compute())
    assert load.synchronize(DEADLINE_S)
    assert not store.synchronize(0)
    stores.opened.set()
    assert store.synchronize(DEADLINE_S)


def test_two_thousand_transfers_are_submitted_at_once_without_waiting(device, transport):
    # vLLM issue 29013: the queue of a single stream filled up and blocked who submits.
    computing = HostEvent(reached=False)
    transfers = [
        transport.submit(simple(d, (i % 12,), (i % 24,)), computing)
        for i in range(1000)
        for d in (STORE, LOAD)
    ]
    assert not any(t.synchronize(0) for t in transfers)
    computing.reach()

    async def all_outcomes():
        async with asyncio.timeout(DEADLINE_S):
            return [await t.outcome() for t in transfers]

    assert all(o.error is None for o in asyncio.run(all_outcomes()))


# -- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_failure_is_an_outcome_and_the_next_transfer_works(device, transport, direction):
    def fail(_copies):
        raise OSError("injected")

    transport.faults[direction].before_copy = fail
    outcome = outcome_of(
        transport.submit(simple(direction, (1,), (1,)), transport.record_compute())
    )
    assert isinstance(outcome.error, TransportError)
    assert isinstance(outcome.error.__cause__, OSError)
    assert outcome.num_bytes == 0
    assert device.agrees()
    transport.faults[direction].before_copy = None
    wanted = Wanted((1,), 0, (1,))
    device.apply(direction, [wanted])
    again = transport.submit(copies_of(direction, [wanted]), transport.record_compute())
    assert outcome_of(again).error is None
    assert device.agrees()


def test_an_event_that_is_never_reached_fails_its_transfer_and_no_other(device):
    transport = device.transport(compute_timeout_s=MOMENT_S)
    lost = transport.submit(simple(STORE, (1,), (1,)), HostEvent(reached=False))
    behind = transport.submit(simple(STORE, (2,), (2,)), transport.record_compute())
    assert "not reached in time" in str(outcome_of(lost).error)
    assert outcome_of(behind).error is None
    device.apply(STORE, [Wanted((2,), 0, (2,))])
    assert device.agrees()
    assert transport.close(DEADLINE_S)


@pytest.mark.parametrize(
    "copies",
    [
        simple(STORE, (12,), (0,)),
        simple(LOAD, (-1,), (0,)),
        simple(LOAD, (0,), (24,)),
        simple(STORE, (0, 1), (0,)),
        copies_of(STORE, [Wanted((0,), 0, (0,)), Wanted((0,), 0, (1,))]),
    ],
)
def test_a_transfer_that_makes_no_sense_is_an_outcome_too(device, transport, copies):
    outcome = outcome_of(transport.submit(copies, transport.record_compute()))
    assert isinstance(outcome.error, TransportError)
    assert device.agrees()


def test_an_event_of_another_transport_is_misuse(transport):
    with pytest.raises(StateError, match="another transport"):
        transport.submit(simple(STORE, (1,), (1,)), object())


def test_overwriting_a_block_under_a_waiting_store_is_detected(device, transport):
    stores = gate(transport, STORE)
    first = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
    second = transport.submit(simple(STORE, (2, 3), (2, 3)), transport.record_compute())
    assert stores.arrived.wait(DEADLINE_S)
    device.caches["g0l1"][3, 5] ^= 1
    stores.opened.set()
    assert second.synchronize(DEADLINE_S)
    assert first.synchronize(0)
    assert transport.violations == ["device blocks [2, 3] changed under a store"]


def test_overwriting_a_block_during_its_store_is_detected(device, transport):
    computing = HostEvent(reached=False)
    stores = gate(transport, STORE)
    transfer = transport.submit(simple(STORE, (2,), (2,)), computing)
    device.caches["g0l0"][2] = 1  # computing it, before the event: as it should be
    computing.reach()
    assert stores.arrived.wait(DEADLINE_S)
    assert not transport.violations
    device.caches["g0l0"][2] = 2
    stores.opened.set()
    assert transfer.synchronize(DEADLINE_S)
    assert len(transport.violations) == 1


def test_neither_loads_nor_untouched_stores_are_violations(device, transport):
    for direction in (STORE, LOAD, STORE):
        outcome_of(transport.submit(simple(direction, (1,), (1,)), transport.record_compute()))
    assert not transport.violations


def test_without_detection_nothing_is_hashed(device):
    transport = device.transport()
    stores = gate(transport, STORE)
    transfer = transport.submit(simple(STORE, (2,), (2,)), transport.record_compute())
    assert stores.arrived.wait(DEADLINE_S)
    device.fill(3)
    stores.opened.set()
    assert transfer.synchronize(DEADLINE_S)
    assert not transport.violations
    assert transport.close(DEADLINE_S)


# -- the end ------------------------------------------------------------------------------------


def test_closing_lets_both_directions_end(device):
    transport = device.transport()
    computing = HostEvent(reached=False)
    transfers = [
        transport.submit(simple(d, (i,), (i,)), computing) for i in range(3) for d in (STORE, LOAD)
    ]
    timer = threading.Timer(MOMENT_S, computing.reach)
    timer.start()
    assert transport.close(DEADLINE_S)
    timer.join()
    assert all(outcome_of(t).error is None for t in transfers)
    assert transport.close(0)


def test_a_hung_copy_does_not_hold_the_closing_up(device):
    transport = device.transport()
    loads = gate(transport, LOAD)
    hung = transport.submit(simple(LOAD, (1,), (1,)), transport.record_compute())
    assert loads.arrived.wait(DEADLINE_S)
    assert not transport.close(MOMENT_S)
    assert not hung.synchronize(0)
    loads.opened.set()
    assert transport.close(DEADLINE_S)
    assert outcome_of(hung).error is None


def test_a_transfer_after_the_closing_fails(device):
    transport = device.transport()
    assert transport.close(DEADLINE_S)
    outcome = outcome_of(transport.submit(simple(STORE, (1,), (1,)), transport.record_compute()))
    assert "closed" in str(outcome.error)


def test_once_closed_it_holds_no_memory_and_until_then_it_does():
    layout = Device(FLAT).layout
    buffer = PrimaryBuffer(4, 64)
    transport = HostTransport(layout, buffer.view)
    loads = gate(transport, LOAD)
    transport.submit(simple(LOAD, (1,), (1,)), transport.record_compute())
    assert loads.arrived.wait(DEADLINE_S)
    assert not transport.close(0)
    assert not buffer.release()
    loads.opened.set()
    assert transport.close(DEADLINE_S)
    assert buffer.release()


# -- awaiting -----------------------------------------------------------------------------------


def test_a_cancelled_wait_ends_nothing(device, transport):
    stores = gate(transport, STORE)
    transfer = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())

    async def impatient():
        waiting = asyncio.create_task(transfer.outcome())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        patient = asyncio.create_task(transfer.outcome())
        await asyncio.sleep(0)
        stores.opened.set()
        return await asyncio.wait_for(patient, DEADLINE_S)

    assert asyncio.run(impatient()).error is None
    device.apply(STORE, [Wanted((1,), 0, (1,))])
    assert device.agrees()


def test_who_waits_on_a_loop_that_is_gone_harms_nobody():
    transfer = SettlingTransfer()

    async def begin():
        asyncio.get_running_loop().create_task(transfer.outcome())
        await asyncio.sleep(0)

    gone = asyncio.new_event_loop()
    gone.run_until_complete(begin())
    (waiting,) = asyncio.all_tasks(gone)
    with LoopThread() as loop:
        other = asyncio.run_coroutine_threadsafe(transfer.outcome(), loop._loop)
        loop.run(asyncio.sleep(0), DEADLINE_S)
        gone.close()
        transfer.end(TransferOutcome(7))
        assert other.result(DEADLINE_S).num_bytes == 7
    assert transfer.synchronize(0)
    waiting._log_destroy_pending = False
    waiting.get_coro().close()


def test_an_error_of_the_transport_stays_what_it_is():
    error = TransportError("x")
    assert failed(error).error is error
    other = failed(KeyError("x")).error
    assert str(other) == "KeyError: 'x'"


def test_the_bytes_of_every_dtype_pass_unchanged():
    values = torch.randn(4, 3).to(torch.bfloat16)
    other = values.to(torch.float8_e4m3fn)
    for tensor in (values.clone(), other.clone()):
        before = tensor.view(torch.uint8).clone()
        layout = register_kv_caches({"l": tensor})
        memory = memoryview(bytearray(4 * 64)).cast("B", (4, 64))
        transport = HostTransport(layout, memory)
        for direction in (STORE, LOAD):
            outcome = outcome_of(
                transport.submit(simple(direction, range(4), range(4)), transport.record_compute())
            )
            assert outcome.error is None
            if direction is STORE:
                tensor.view(torch.uint8).zero_()
        assert torch.equal(tensor.view(torch.uint8), before)
        assert transport.close(DEADLINE_S)
