"""The stand-in for an accelerator: which bytes a transfer moves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transport.worlds import (
    DEADLINE_S,
    LOAD,
    STORE,
    Device,
    copies_of,
    geometries,
    outcome_of,
    simple,
    wants,
)

from kvoffload_async.errors import ConfigError
from kvoffload_async.transport.host import HostTransport
from kvoffload_async.transport.layout import register_kv_caches

pytestmark = pytest.mark.usefixtures("moves")


@st.composite
def journeys(draw):
    geometry = draw(geometries())
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
        HostTransport(device.layout, device.view, cell_offset_bytes=10)


def test_the_bytes_of_every_dtype_pass_unchanged():
    values = torch.randn(4, 3).to(torch.bfloat16)
    other = values.to(torch.float8_e4m3fn)
    for tensor in (values.clone(), other.clone()):
        before = tensor.view(torch.uint8).clone()
        layout = register_kv_caches({"l": tensor})
        memory = memoryview(bytearray(4 * 64)).cast("B", (4, 64))
        transport = HostTransport(layout, memory)
        for direction in (STORE, LOAD):
            outcome = outcome_of(
                transport.submit(simple(direction, range(4), range(4)), transport.record_compute())
            )
            assert outcome.error is None
            if direction is STORE:
                tensor.view(torch.uint8).zero_()
        assert torch.equal(tensor.view(torch.uint8), before)
        assert transport.close(DEADLINE_S)


@pytest.mark.parametrize("blocks", [1, 2])
def test_native_threads_copy_what_is_worth_waking_them(transport, moves, blocks, monkeypatch):
    copied = []
    copier = transport._directions[STORE].copier
    if moves == "native":
        copy = copier._copies.copy
        monkeypatch.setattr(copier._copies, "copy", lambda b: copied.append(1) or copy(b))
    which = range(blocks)
    transfer = transport.submit(simple(STORE, which, which), transport.record_compute())
    assert outcome_of(transfer).error is None
    assert len(copied) == (moves == "native" and blocks == 2)
