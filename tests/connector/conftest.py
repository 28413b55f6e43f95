"""A worker whose copies have all ended, and broken nothing, when the test ends."""

import contextlib

import pytest
from connector.workers import Computing
from transport.worlds import DEADLINE_S, LOAD, STORE, simulated


@pytest.fixture(params=["host", "simulated"])
def each_device(request):
    """The device is host memory alone, or simulated with streams."""
    with simulated() if request.param == "simulated" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def world(each_device):
    world = Computing(flush_timeout_s=DEADLINE_S)
    yield world
    world.finish()
    for direction in (STORE, LOAD):
        world.transport.before_copy[direction] = None
    assert world.worker.shutdown(DEADLINE_S)
    assert not world.transport.violations
