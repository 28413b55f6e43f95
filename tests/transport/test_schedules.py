"""The CUDA transport under drawn schedules of a simulated device."""

import pytest
from hypothesis import given
from transport.programs import programs, run
from transport.worlds import with_schedules

pytestmark = pytest.mark.stateful


@with_schedules()
@given(programs())
def test_bytes_are_right_in_every_order_that_streams_and_events_allow(program):
    assert run(program) == []


@with_schedules()
@given(programs(has_faults=True))
def test_failed_transfers_write_nothing_after_their_outcome(program):
    assert run(program) == []
