"""The stand-in for an accelerator: its failures are outcomes, and overwriting is noticed."""

import pytest
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    MOMENT_S,
    STORE,
    Wanted,
    copies_of,
    gate,
    outcome_of,
    simple,
)

from kvoffload_async.errors import StateError, TransportError
from kvoffload_async.transport.host import HostEvent

pytestmark = pytest.mark.usefixtures("moves")


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


@pytest.mark.parametrize("raised", [OSError("injected"), TransportError("injected")])
def test_the_error_of_a_failed_transfer_keeps_no_frames(transport, raised):
    def fail(_copies):
        try:
            {}[0]
        except KeyError:
            raise raised from None

    transport.faults[STORE].before_copy = fail
    outcome = outcome_of(transport.submit(simple(STORE, (1,), (1,)), transport.record_compute()))
    errors = [outcome.error, raised, raised.__context__]
    assert [error.__traceback__ for error in errors] == [None] * 3


def test_an_event_that_is_never_reached_fails_its_transfer_and_no_other(device):
    transport = device.transport(compute_timeout_s=MOMENT_S)
    lost = transport.submit(simple(STORE, (1,), (1,)), HostEvent(reached=False))
    behind = transport.submit(simple(STORE, (2,), (2,)), transport.record_compute())
    assert "timed out" in str(outcome_of(lost).error)
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
    assert transport.violations == ["device blocks [2, 3] changed during a store"]


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
