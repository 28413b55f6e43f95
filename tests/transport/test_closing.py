"""How transports end: the host's and the simulated device's."""

import threading

import pytest
from transport.worlds import DEADLINE_S, LOAD, MOMENT_S, STORE, gate, outcome_of, simple

from kvoffload_async.runtime.buffer import PrimaryBuffer

pytestmark = pytest.mark.usefixtures("moves")


def test_closing_lets_both_directions_end(device):
    transport = device.transport()
    computing = device.computing()
    transfers = [
        transport.submit(simple(d, (i,), (i,)), computing.event)
        for i in range(3)
        for d in (STORE, LOAD)
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


def test_once_closed_it_holds_no_memory_and_until_then_it_does(device):
    buffer = PrimaryBuffer(4, 64)
    device.view = buffer.view
    transport = device.transport()
    loads = gate(transport, LOAD)
    transport.submit(simple(LOAD, (1,), (1,)), transport.record_compute())
    assert loads.arrived.wait(DEADLINE_S)
    assert not transport.close(0)
    buffer.view[3, 0] = 5
    assert not buffer.release()
    assert buffer.view[3, 0] == 5, "what is still to be copied stays as it is"
    (holder,) = buffer.view.obj.holders
    assert "transport" in holder
    loads.opened.set()
    assert transport.close(DEADLINE_S)
    assert buffer.release()
