"""Failures are outcomes, of the host's transport and of the simulated device's."""

import pytest
from transport.worlds import (
    LOAD,
    STORE,
    Wanted,
    copies_of,
    outcome_of,
    simple,
)

from kvoffload_async.errors import StateError, TransportError

pytestmark = pytest.mark.usefixtures("moves")


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_failure_is_an_outcome_and_the_next_transfer_works(device, transport, direction):
    def fail(_copies):
        raise OSError("injected")

    transport.before_copy[direction] = fail
    outcome = outcome_of(
        transport.submit(simple(direction, (1,), (1,)), transport.record_compute())
    )
    assert isinstance(outcome.error, TransportError)
    assert isinstance(outcome.error.__cause__, OSError)
    assert outcome.num_bytes == 0
    assert device.agrees()
    transport.before_copy[direction] = None
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

    transport.before_copy[STORE] = fail
    outcome = outcome_of(transport.submit(simple(STORE, (1,), (1,)), transport.record_compute()))
    errors = [outcome.error, raised, raised.__context__]
    assert [error.__traceback__ for error in errors] == [None] * 3


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
