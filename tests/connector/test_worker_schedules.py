"""A worker on a simulated device, under drawn steps and schedules."""

import pytest
from connector.worker_programs import programs, run
from hypothesis import given
from transport.worlds import with_schedules

pytestmark = pytest.mark.stateful


@with_schedules(share=3)
@given(programs)
def test_jobs_move_the_bytes_of_their_step_in_every_order_that_the_device_allows(program):
    assert run(program) == []
