"""The stand-in for an accelerator, before a small device; with native copies, and without."""

import pytest
from transport.worlds import DEADLINE_S, FLAT, Device

from kvoffload_async.block_io import choice
from kvoffload_async.transport import host

FLAT_BYTES = sum(shape.page_items for group in FLAT.groups for shape in group)
"""Of a device block."""


@pytest.fixture(scope="module", params=["native", "python"])
def moves(request):
    """Which implementation copies; of the native one also what is large, and what is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choice.VARIABLE, {"native": "", "python": "0"}[request.param])
        if choice.implementation().name != request.param:
            pytest.skip("the native module was not built")
        patch.setattr(host, "LEAST_BYTES", 2 * FLAT_BYTES)
        yield request.param


@pytest.fixture
def device():
    return Device(FLAT)


@pytest.fixture
def transport(device):
    transport = device.transport(detects_overwrites=True)
    yield transport
    assert transport.close(DEADLINE_S)
