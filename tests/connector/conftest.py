"""A worker whose copies have all ended, and broken nothing, when the test ends."""

import pytest
from connector.workers import Computing
from transport.worlds import DEADLINE_S, LOAD, STORE


@pytest.fixture
def world():
    world = Computing(flush_timeout_s=DEADLINE_S)
    yield world
    world.finish()
    for direction in (STORE, LOAD):
        world.transport.faults[direction].before_copy = None
    assert world.worker.shutdown(DEADLINE_S)
    assert not world.transport.violations
