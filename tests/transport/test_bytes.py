"""Which bytes a transfer moves, of the host's transport and of the simulated device's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    STORE,
    Device,
    Geometry,
    Shape,
    copies_of,
    geometries,
    outcome_of,
    simple,
    wants,
)

from kvoffload_async.errors import ConfigError

pytestmark = pytest.mark.usefixtures("moves")


@st.composite
def journeys(draw):
    geometry = draw(geometries(may_scatter=True))
    steps = st.tuples(st.sampled_from([STORE, LOAD]), wants(geometry))
    return geometry, draw(st.lists(steps, min_size=1, max_size=4))


@given(journeys())
def test_every_transfer_moves_exactly_its_bytes(journey):
    geometry, steps = journey
    device = Device(geometry)
    transport = device.transport()
    for number, (direction, wanted) in enumerate(steps):
        device.fill(number)
        device.snapshot()
        device.apply(direction, wanted)
        copies = copies_of(direction, wanted)
        outcome = outcome_of(transport.submit(copies, transport.record_compute()))
        assert outcome.error is None
        parts = device.layout.resolve(copies, geometry.slots)
        assert outcome.num_bytes == device.layout.num_bytes(parts)
        assert outcome.seconds >= 0
        assert device.agrees()
    assert transport.close(DEADLINE_S)


def test_a_slot_must_hold_a_chunk(device):
    with pytest.raises(ConfigError, match="does not hold a chunk"):
        device.transport(cell_offset_bytes=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_bytes_of_every_dtype_pass_unchanged(dtype):
    device = Device(Geometry(((Shape(3, dtype),),), blocks=4))
    tensor = device.caches["g0l0"]
    tensor.copy_(torch.randn(4, 3).to(dtype))
    before = tensor.view(torch.uint8).clone()
    transport = device.transport()
    for direction in (STORE, LOAD):
        outcome = outcome_of(
            transport.submit(simple(direction, range(4), range(4)), transport.record_compute())
        )
        assert outcome.error is None
        if direction is STORE:
            tensor.view(torch.uint8).zero_()
    assert torch.equal(tensor.view(torch.uint8), before)
    assert transport.close(DEADLINE_S)
