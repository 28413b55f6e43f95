"""A small device, its transport, and the implementations of the copies."""

import contextlib

import pytest
from transport.worlds import DEADLINE_S, FLAT, Device, simulated

from kvoffload_async.block_io import choice
from kvoffload_async.transport import host

FLAT_BYTES = sum(shape.page_items for group in FLAT.groups for shape in group)
"""Of a device block."""


@contextlib.contextmanager
def copying(implementation):
    """Let copies be made by one implementation."""
    device = simulated() if implementation == "simulated" else contextlib.nullcontext()
    with device, pytest.MonkeyPatch.context() as patch:
        patch.setenv(choice.VARIABLE, {"python": "0"}.get(implementation, ""))
        if implementation == "native" and choice.implementation().name != "native":
            pytest.skip("the native module was not built")
        patch.setattr(host, "LEAST_BYTES", 2 * FLAT_BYTES)
        yield implementation


@pytest.fixture(scope="module", params=["native", "python", "simulated"])
def moves(request):
    """Which implementation copies; of the native one also what is large, and what is small."""
    with copying(request.param) as implementation:
        yield implementation


@pytest.fixture(scope="module", params=["native", "python"])
def host_moves(request):
    """As `moves`, without the simulated device."""
    with copying(request.param) as implementation:
        yield implementation


@pytest.fixture
def device():
    return Device(FLAT)


@pytest.fixture
def transport(device):
    transport = device.transport()
    yield transport
    assert transport.close(DEADLINE_S)
