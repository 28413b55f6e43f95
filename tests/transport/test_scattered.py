"""Pages that are scattered in their slots, and workers with equal pages that take turns."""

import random

import numpy as np
import pytest
import torch
from own_threads import open_files
from simulated_cuda.device import SimulatedCuda
from transport.worlds import (
    LOAD,
    STORE,
    Device,
    Geometry,
    Shape,
    Wanted,
    copies_of,
    simple,
    simulated,
)

from kvoffload_async.errors import ConfigError
from kvoffload_async.transport.host import Copier
from kvoffload_async.transport.layout import CopyRun, KVLayout, PageTable

MAPPINGS = 10_000


def table(*, pages=4, page_bytes=8, **options):
    return PageTable(torch.zeros(pages, page_bytes, dtype=torch.uint8), **options)


@pytest.mark.slow
@pytest.mark.usefixtures("host_moves")
def test_ten_thousand_drawn_mappings_move_exactly_the_bytes_of_the_plain_model():
    for seed in range(MAPPINGS):
        rng = random.Random(seed)
        per_chunk, num_writers = rng.randint(1, 3), rng.randint(1, 3)
        geometry = Geometry(
            ((Shape(rng.randint(1, 20)), Shape(rng.randint(1, 20))),),
            blocks_per_chunk=per_chunk,
            scatter=seed,
            writers=(num_writers, rng.randrange(num_writers)),
        )
        device = Device(geometry)
        copier = Copier(device.layout, device.rows, 0)
        count, first = rng.randint(1, 9), rng.randrange(per_chunk)
        slots = rng.sample(range(geometry.slots), -(-(first + count) // per_chunk))
        wanted = [Wanted(tuple(rng.sample(range(geometry.blocks), count)), first, tuple(slots))]
        for direction in (STORE, LOAD):
            device.fill(seed)
            device.snapshot()
            device.apply(direction, wanted)
            copies = copies_of(direction, wanted)
            (part,) = device.layout.resolve(copies, geometry.slots)
            copier.copy(direction, 0, part)
            assert device.agrees(), seed
        copier.close()


@pytest.mark.parametrize("num_writers", [1, 2, 3, 8])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_of_workers_with_equal_pages_exactly_one_stores_each_page(num_writers, per_chunk):
    copies = simple(STORE, range(12), range(0, 24 // per_chunk, 2)[: 12 // per_chunk])
    stored = []
    for writer in range(num_writers):
        one = table(pages=12, offset_bytes=0, num_writers=num_writers, writer=writer)
        layout = KVLayout([[one]], per_chunk, 8 * per_chunk)
        (part,) = layout.resolve(copies, 24)
        assert layout.num_bytes([part]) == 8 * len(part.blocks)
        stored += part.blocks.tolist()
        loads = simple(LOAD, range(12), copies.host.block_ids)
        assert len(layout.resolve(loads, 24)[0].blocks) == 12
    assert sorted(stored) == list(range(12))


def test_workers_of_a_group_must_be_the_same_for_all_its_tensors():
    tables = [table(offset_bytes=0), table(offset_bytes=8, num_writers=2)]
    with pytest.raises(ConfigError, match="must be on the same workers"):
        KVLayout([tables], 1, 16)


@pytest.mark.parametrize(
    "run",
    [
        CopyRun(1, 0, 8),
        CopyRun(0, 9, 8),
        CopyRun(-1, 0, 2),
        CopyRun(0, 0, 2, 4, 3, 4),
        CopyRun(0, 0, 2, 4, 2, 5),
        CopyRun(0, 0, 2, 2, -1, 2),
    ],
)
def test_runs_must_be_within_their_page(run):
    with pytest.raises(ConfigError, match="is not within a page of 8 bytes and its 16 bytes"):
        table(offset_bytes=0, slot_page_bytes=16, runs=[run])


def test_a_device_without_memory_leaves_no_native_threads_of_scattered_copies():
    with simulated(lambda: SimulatedCuda(memory_bytes=1000)):
        device = Device(Geometry(((Shape(8),),), scatter=3))
    before = open_files()
    with pytest.raises(ConfigError, match="cannot create streams with staging memory") as caught:
        device.transport(staging_bytes=600)  # enough for loads
    assert open_files() == before, f"nothing was collected: {caught}"


@pytest.mark.parametrize(
    ("options", "per_chunk", "expected"),
    [
        ({}, 2, True),
        ({"num_writers": 2}, 1, True),
        ({"num_writers": 2}, 2, False),  # another worker writes a part of the chunk
        ({"slot_page_bytes": 8, "runs": [CopyRun(0, 0, 8)]}, 2, True),
        ({"slot_page_bytes": 9, "runs": [CopyRun(0, 0, 8)]}, 1, False),
        ({"slot_page_bytes": 8, "runs": [CopyRun(0, 0, 4), CopyRun(4, 4, 4)]}, 1, False),
        ({"slot_page_bytes": 8, "runs": [CopyRun(0, 0, 4, 2, 4, 4)]}, 1, False),
    ],
)
def test_a_layout_is_contiguous_only_if_one_worker_writes_whole_chunks(
    options, per_chunk, expected
):
    layout = KVLayout([[table(offset_bytes=0, **options)]], per_chunk, 32)
    assert layout.is_contiguous is expected


def test_a_packed_layout_has_one_device_block_in_a_slot():
    tables = [table(offset_bytes=40), table(page_bytes=5, offset_bytes=90, slot_page_bytes=5)]
    packed = KVLayout([tables, [table(offset_bytes=7)]], 4, 200).packed()
    assert [[one.offset_bytes for one in group] for group in packed.groups] == [[0, 8], [0]]
    assert (packed.blocks_per_chunk, packed.chunk_bytes) == (1, 13)
    assert packed.is_contiguous
    assert np.shares_memory(packed.groups[0][1].pages, tables[1].pages)
