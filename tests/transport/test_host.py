"""What only the host's transport does: native threads, timeouts, overwritten blocks."""

import pytest
from transport.watched import WatchedTransport
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    MOMENT_S,
    STORE,
    Wanted,
    gate,
    outcome_of,
    simple,
)

from kvoffload_async.transport.host import HostEvent

pytestmark = pytest.mark.usefixtures("host_moves")


@pytest.fixture
def transport(device):
    transport = device.transport(WatchedTransport)
    yield transport
    assert transport.close(DEADLINE_S)


@pytest.mark.parametrize("blocks", [1, 2])
def test_native_threads_copy_what_is_worth_waking_them(transport, host_moves, blocks, monkeypatch):
    copied = []
    copier = transport._copiers[STORE]
    if host_moves == "native":
        copy = copier._copies.copy
        monkeypatch.setattr(copier._copies, "copy", lambda b: copied.append(1) or copy(b))
    which = range(blocks)
    transfer = transport.submit(simple(STORE, which, which), transport.record_compute())
    assert outcome_of(transfer).error is None
    assert len(copied) == (host_moves == "native" and blocks == 2)


def test_an_event_that_is_never_reached_fails_its_transfer_and_no_other(device):
    transport = device.transport(compute_timeout_s=MOMENT_S)
    lost = transport.submit(simple(STORE, (1,), (1,)), HostEvent(reached=False))
    behind = transport.submit(simple(STORE, (2,), (2,)), transport.record_compute())
    assert "timed out" in str(outcome_of(lost).error)
    assert outcome_of(behind).error is None
    device.apply(STORE, [Wanted((2,), 0, (2,))])
    assert device.agrees()
    assert transport.close(DEADLINE_S)


def test_overwriting_a_block_under_a_waiting_store_is_detected(device, transport):
    stores = gate(transport, STORE)
    first = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
    second = transport.submit(simple(STORE, (2, 3), (2, 3)), transport.record_compute())
    assert stores.arrived.wait(DEADLINE_S)
    device.caches["g0l1"][3, 5] ^= 1
    stores.opened.set()
    assert second.synchronize(DEADLINE_S)
    assert first.synchronize(0)
    assert transport.violations == ["device blocks [2, 3] changed during a store"]


def test_overwriting_a_block_during_its_store_is_detected(device, transport):
    computing = HostEvent(reached=False)
    stores = gate(transport, STORE)
    transfer = transport.submit(simple(STORE, (2,), (2,)), computing)
    device.caches["g0l0"][2] = 1  # computing it, before the event: as it should be
    computing.set()
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
