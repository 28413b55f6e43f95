"""What transfers wait for, with the host's transport and with the simulated device's."""

import asyncio

import numpy as np
import pytest
from transport.worlds import DEADLINE_S, LOAD, MOMENT_S, STORE, Wanted, gate, outcome_of, simple

pytestmark = pytest.mark.usefixtures("moves")


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_transfers_of_a_direction_start_in_order(device, transport, direction):
    hook = gate(transport, direction)
    hook.opened.set()
    transfers = [
        transport.submit(simple(direction, (i,), (i,)), transport.record_compute())
        for i in range(8)
    ]
    assert all(t.synchronize(DEADLINE_S) for t in transfers)
    assert [c.device.block_ids.tolist() for c in hook.copies] == [[i] for i in range(8)]


def test_a_store_waits_for_what_is_being_computed(device, transport):
    # vLLM issue 31341: the copy read blocks that the forward pass had not written yet.
    computing = device.computing()
    transfer = transport.submit(simple(STORE, (1, 2), (3, 4)), computing.event)
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
    computing = device.computing()
    transfer = transport.submit(simple(LOAD, (1, 2), (3, 4)), computing.event)
    assert not transfer.synchronize(MOMENT_S)
    for cache in device.caches.values():
        cache[1:3] = 0  # the zeroing
    computing.reach()
    assert outcome_of(transfer).error is None
    device.apply(LOAD, [Wanted((1, 2), 0, (3, 4))])
    assert device.agrees()


def test_the_directions_do_not_wait_for_each_other(device, transport):
    stores = gate(transport, STORE)
    store = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
    load = transport.submit(simple(LOAD, (2,), (2,)), transport.record_compute())
    assert load.synchronize(DEADLINE_S)
    assert not store.synchronize(0)
    stores.opened.set()
    assert store.synchronize(DEADLINE_S)


def test_many_transfers_are_submitted_at_once_without_waiting(device, transport, moves):
    # vLLM issue 29013: the queue of a single stream filled up and blocked who submits.
    count = 100 if moves == "simulated" else 1000
    computing = device.computing()
    transfers = [
        transport.submit(simple(d, (i % 12,), (i % 24,)), computing.event)
        for i in range(count)
        for d in (STORE, LOAD)
    ]
    assert not any(t.synchronize(0) for t in transfers)
    computing.reach()

    async def all_outcomes():
        async with asyncio.timeout(DEADLINE_S):
            return [await t.outcome() for t in transfers]

    assert all(o.error is None for o in asyncio.run(all_outcomes()))
