"""The stand-in for an accelerator, before a small device."""

import pytest
from transport.worlds import DEADLINE_S, FLAT, Device


@pytest.fixture
def device():
    return Device(FLAT)


@pytest.fixture
def transport(device):
    transport = device.transport(detects_overwrites=True)
    yield transport
    assert transport.close(DEADLINE_S)
