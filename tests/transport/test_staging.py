"""What a device does with staging memory, on the CPU: the same operations, the same bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transport.worlds import (
    LOAD,
    STORE,
    Device,
    Geometry,
    Shape,
    Wanted,
    copies_of,
    geometries,
    wants,
)

from kvoffload_async.abc.transport import GroupCopies
from kvoffload_async.errors import ConfigError
from kvoffload_async.transport.choice import create_transport
from kvoffload_async.transport.cuda import CudaTransport, StagedCopies
from kvoffload_async.transport.host import HostTransport
from kvoffload_async.transport.layout import KVLayout, PageTable, register_kv_caches


def staged(device):
    return StagedCopies(device.layout, torch.from_numpy(device.rows), device.geometry.cell_offset)


def staging_of(copies, size_bytes):
    return torch.empty(copies.staging_shape(size_bytes), dtype=torch.uint8)


def perform(copies, device, direction, wanted, staging):
    parts = device.layout.resolve(copies_of(direction, wanted), device.geometry.slots)
    plan = copies.plan(parts, staging.shape[0])
    copies.perform(direction, plan, torch.from_numpy(plan.index), staging)
    return plan


@given(st.data())
def test_every_transfer_moves_exactly_its_bytes(data):
    device = Device(data.draw(geometries()))
    copies = staged(device)
    staging = staging_of(copies, data.draw(st.integers(1, 1000)))
    for number in range(data.draw(st.integers(1, 4))):
        direction = data.draw(st.sampled_from([STORE, LOAD]))
        wanted = data.draw(wants(device.geometry, aligned=data.draw(st.booleans())))
        device.fill(number)
        device.snapshot()
        device.apply(direction, wanted)
        perform(copies, device, direction, wanted, staging)
        assert device.agrees()


def test_a_transfer_larger_than_staging_goes_in_pieces():
    device = Device(Geometry(((Shape(8),),), blocks_per_chunk=2))
    copies = staged(device)
    staging = staging_of(copies, 2 * 16)
    assert staging.shape == (2, 16)
    wanted = [Wanted(tuple(range(10)), 0, (3, 4, 5, 9, 8))]
    device.apply(STORE, wanted)
    plan = perform(copies, device, STORE, wanted, staging)
    assert [p.slots.tolist() for p in plan.extents] == [[3, 4], [5, 9], [8]]
    assert all(p.is_whole for p in plan.extents)
    assert device.agrees()


def test_staging_holds_at_least_one_chunk():
    device = Device(Geometry(((Shape(8),),), blocks_per_chunk=2))
    assert staging_of(staged(device), 1).shape == (1, 16)


def test_only_the_piece_that_is_cut_keeps_the_rest_of_its_slot():
    device = Device(Geometry(((Shape(8),),), blocks_per_chunk=2))
    copies = staged(device)
    wanted = [Wanted((0, 1, 2), 0, (3, 4))]
    device.apply(STORE, wanted)
    plan = perform(copies, device, STORE, wanted, staging_of(copies, 16))
    assert [p.is_whole for p in plan.extents] == [True, False]
    assert device.agrees()
    assert (device.rows[4, 8:16] == 0xEE).all()


def test_nothing_to_copy_is_no_piece():
    device = Device(Geometry(((Shape(8),),)))
    plan = staged(device).plan(device.layout.resolve(copies_of(STORE, [Wanted((), 0, ())]), 4), 4)
    assert not plan.extents
    assert plan.index.dtype == np.int64


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        ((Shape(16), Shape(8)), torch.int64),
        ((Shape(16), Shape(4)), torch.int32),
        ((Shape(3, torch.bfloat16),), torch.int16),
        ((Shape(16), Shape(3)), torch.uint8),
        ((Shape(16, kind="strided"),), torch.uint8),  # a gap of three bytes between the rows
        ((Shape(8, torch.bfloat16, "strided"),), torch.int16),
    ],
)
def test_bytes_are_moved_in_the_widest_words_that_fit(shapes, dtype):
    copies = staged(Device(Geometry((shapes,))))
    assert {table.pages.dtype for table in copies._groups[0]} == {dtype}


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("address", range(8))
def test_a_tensor_in_the_middle_of_a_word_is_read_in_smaller_ones(address, offset):
    memory = np.zeros(4 * 8 + 24, dtype=np.uint8)
    begin = -memory.ctypes.data % 8 + address
    tensor = torch.from_numpy(memory[begin:])[offset:][: 4 * 8].view(4, 8)
    copies = StagedCopies(register_kv_caches({"l": tensor}), torch.zeros(4, 8).byte(), 0)
    pages = copies._groups[0][0].pages
    assert not tensor.data_ptr() % pages.element_size()
    assert not offset % pages.element_size()
    if not (address % 4 or offset % 4):
        assert pages.element_size() >= 4, "no smaller than needed"


def test_neighbouring_slots_are_copied_in_one_piece_where_rows_have_no_padding():
    device = Device(Geometry(((Shape(8),),)))
    rows = torch.zeros(16, 8, dtype=torch.uint8)
    copies = StagedCopies(device.layout, rows, 0)
    parts = device.layout.resolve(
        copies_of(STORE, [Wanted((0, 1, 2, 3, 4), 0, (4, 5, 6, 1, 2))]), 16
    )
    staging = staging_of(copies, 1000)
    plan = copies.plan(parts, staging.shape[0])
    copies.perform(STORE, plan, torch.from_numpy(plan.index), staging)
    pages = device.tables()[0].pages
    assert torch.equal(rows[[4, 5, 6, 1, 2]], pages[:5])
    assert not rows[[0, 3, 7]].any()


def test_released_copies_hold_no_slots():
    memory = bytearray(64)
    view = memoryview(memory).cast("B", (4, 16))
    device = Device(Geometry(((Shape(8),),)))
    copies = StagedCopies(device.layout, torch.from_numpy(np.asarray(view)), 0)
    copies.release()
    view.release()
    memory.clear()  # raises BufferError while somebody holds the memory


# -- which transport ----------------------------------------------------------------------------


def test_tensors_on_the_cpu_get_the_stand_in():
    device = Device()
    transport = create_transport(device.layout, device.view)
    assert isinstance(transport, HostTransport)
    assert transport.close(10)


def test_tensors_elsewhere_need_a_device():
    layout = register_kv_caches({"l": torch.zeros(4, 8, device="meta")})
    with pytest.raises(ConfigError, match="on meta; use the host transport"):
        create_transport(layout, Device().view)
    with pytest.raises(ConfigError, match="on cpu"):
        CudaTransport(Device().layout, Device().view)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_group_whose_tables_begin_behind_those_of_others_keeps_its_place(blocks_per_chunk):
    pages = torch.arange(4 * 16, dtype=torch.uint8).view(4, 16)
    position = 16 * blocks_per_chunk
    groups = [[PageTable(torch.zeros(4, 16, dtype=torch.uint8), 0)], [PageTable(pages, position)]]
    layout = KVLayout(groups, blocks_per_chunk, 2 * position)
    host = torch.zeros(3, 2 * position, dtype=torch.uint8)
    copies = StagedCopies(layout, host, 0)
    staging = staging_of(copies, 1)
    blocks = np.arange(4, dtype=np.int32)[:blocks_per_chunk]
    stored = pages.clone()
    nothing = GroupCopies(blocks[:0], blocks[:0], blocks[:0])
    moved = GroupCopies(blocks, np.full_like(blocks, 1), blocks)
    plan = copies.plan([nothing, moved], staging.shape[0])
    copies.perform(STORE, plan, torch.from_numpy(plan.index), staging)
    pages.zero_()
    assert host[1, position:].equal(stored[:blocks_per_chunk].flatten())
    assert not host[[0, 2]].any()
    copies.perform(LOAD, plan, torch.from_numpy(plan.index), staging)
    assert pages[:blocks_per_chunk].equal(stored[:blocks_per_chunk])
