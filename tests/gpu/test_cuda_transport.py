"""The transport on a CUDA device: bytes, order, many at once, failures.

The same questions are asked of the simulated device, under many schedules, in `tests/transport`.
"""

import contextlib

import numpy as np
import pytest
import torch
from transport.worlds import LOAD, STORE, Shape, Wanted, copies_of, outcome_of, simple

from kvoffload_async.errors import StateError, TransportError
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.transport.choice import create_transport
from kvoffload_async.transport.cuda import CudaTransport
from kvoffload_async.transport.layout import register_kv_caches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

DEADLINE_S = 60.0
SLOTS, BLOCKS = 24, 12
SLEEP_CYCLES = 200_000_000  # about a tenth of a second
MIB = 1 << 20


@contextlib.contextmanager
def opened(layout, slots=SLOTS, cell_offset=0, slot_bytes=None, **options):
    """A transport over pinned slots; at the end nothing holds the memory."""
    width = slot_bytes or -(-(cell_offset + layout.chunk_bytes) // 4096) * 4096
    buffer = PrimaryBuffer(slots, width)
    transport = CudaTransport(layout, buffer.view, cell_offset_bytes=cell_offset, **options)
    try:
        yield transport, buffer
    finally:
        assert transport.close(DEADLINE_S)
    assert buffer.release()


def run(transport, copies):
    outcome = outcome_of(transport.submit(copies, transport.record_compute()))
    if outcome.error is not None:
        raise outcome.error
    return outcome


def rows_of(buffer):
    return np.asarray(buffer.view)


def randomise(tensor):
    tensor.copy_(torch.randint(0, 256, tensor.shape, device=tensor.device).to(tensor.dtype))


SHAPES = [
    [Shape(64)],
    [Shape(64, torch.bfloat16), Shape(64, torch.bfloat16)],
    [Shape(33, torch.float8_e4m3fn)],
    [Shape(16, torch.int8, "strided"), Shape(24, torch.int8, "strided")],
    [Shape(16, torch.float32, "pairs")],
    [Shape(5), Shape(7)],
]


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("cell_offset", [0, 4096])
@pytest.mark.parametrize("shapes", SHAPES)
def test_bytes_make_the_round_trip_in_every_layout(shapes, cell_offset, per_chunk):
    caches = {f"l{i}": shape.tensor(BLOCKS, "cuda") for i, shape in enumerate(shapes)}
    layout = register_kv_caches(
        caches, blocks_per_chunk=per_chunk, block_dim=int(shapes[0].kind == "pairs")
    )
    tables = layout.groups[0]
    for table in tables:
        randomise(table.pages)
    with opened(layout, cell_offset=cell_offset) as (transport, buffer):
        assert isinstance(transport, CudaTransport)
        blocks = [7, 2, 9, 3, 0, 11][: 2 * per_chunk]
        slots = [5, 6]
        stored = run(transport, simple(STORE, blocks, slots))
        assert stored.num_bytes == sum(t.page_bytes for t in tables) * len(blocks)
        assert stored.seconds >= 0
        rows = rows_of(buffer)
        for at, block in enumerate(blocks):
            slot, position = slots[at // per_chunk], at % per_chunk
            for table in tables:
                begin = cell_offset + table.offset_bytes + position * table.page_bytes
                cell = rows[slot, begin : begin + table.page_bytes]
                assert np.array_equal(cell, table.pages[block].cpu().numpy())
        expected = [table.pages.clone() for table in tables]
        for table in tables:
            table.pages[blocks] = 0
        run(transport, simple(LOAD, blocks, slots))
        for table, pages in zip(tables, expected, strict=True):
            assert torch.equal(table.pages, pages)
        del rows, cell


def test_partial_chunks_keep_the_rest_of_their_slots_and_groups_have_their_own():
    caches = {"a": torch.zeros(BLOCKS, 64, dtype=torch.uint8, device="cuda")}
    caches["b"] = torch.zeros(BLOCKS, 24, dtype=torch.uint8, device="cuda")
    for cache in caches.values():
        randomise(cache)
    layout = register_kv_caches(caches, [["a"], ["b"]], blocks_per_chunk=4)
    with opened(layout) as (transport, buffer):
        rows = rows_of(buffer)
        rows[:] = 0xEE
        wanted = [Wanted((1, 2, 3), 6, (3, 4)), Wanted((5,), 1, (8,))]
        run(transport, copies_of(STORE, wanted))
        a, b = caches["a"].cpu().numpy(), caches["b"].cpu().numpy()
        assert np.array_equal(rows[3, 128:192], a[1])
        assert np.array_equal(rows[3, 192:256], a[2])
        assert np.array_equal(rows[4, 0:64], a[3])
        assert np.array_equal(rows[8, 24:48], b[5])
        assert (rows[3, :128] == 0xEE).all()
        assert (rows[4, 64:] == 0xEE).all()
        caches["a"][[9, 10, 11]] = 0
        wanted = [Wanted((9, 10, 11), 6, (3, 4)), Wanted((), 0, ())]
        run(transport, copies_of(LOAD, wanted))
        assert np.array_equal(caches["a"][9:12].cpu().numpy(), a[1:4])
        del rows


def test_a_transfer_larger_than_staging_goes_in_pieces():
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    randomise(cache)
    layout = register_kv_caches({"l": cache})
    with opened(layout, staging_bytes=3 * 4096) as (transport, buffer):
        run(transport, simple(STORE, range(BLOCKS), range(4, 4 + BLOCKS)))
        assert np.array_equal(rows_of(buffer)[4 : 4 + BLOCKS], cache.cpu().numpy())


def test_a_store_is_ordered_after_a_delayed_compute_stream():
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    with opened(register_kv_caches({"l": cache})) as (transport, buffer):
        torch.cuda._sleep(SLEEP_CYCLES)
        cache.fill_(7)
        transfer = transport.submit(simple(STORE, (1, 2), (1, 2)), transport.record_compute())
        assert not transfer.synchronize(0)
        assert transfer.synchronize(DEADLINE_S)
        assert (rows_of(buffer)[1:3] == 7).all()


def test_a_load_is_ordered_after_a_delayed_zeroing():
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    with opened(register_kv_caches({"l": cache})) as (transport, buffer):
        rows_of(buffer)[1] = 9
        torch.cuda._sleep(SLEEP_CYCLES)
        cache.zero_()
        transfer = transport.submit(simple(LOAD, (1,), (1,)), transport.record_compute())
        assert not transfer.synchronize(0)
        assert transfer.synchronize(DEADLINE_S)
        assert (cache[1] == 9).all()


def test_two_thousand_transfers_are_submitted_at_once_without_waiting():
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    with opened(register_kv_caches({"l": cache})) as (transport, _buffer):
        torch.cuda._sleep(4 * SLEEP_CYCLES)
        after = transport.record_compute()
        transfers = [
            transport.submit(simple(d, (i % BLOCKS,), (i % SLOTS,)), after)
            for i in range(1000)
            for d in (STORE, LOAD)
        ]
        assert not after.query(), "submitting took longer than the compute stream"
        assert all(outcome_of(t).error is None for t in transfers)


@pytest.mark.parametrize(
    "copies",
    [simple(STORE, (BLOCKS,), (0,)), simple(LOAD, (-1,), (0,)), simple(LOAD, (0,), (SLOTS,))],
)
def test_a_bad_index_is_an_outcome_and_the_device_goes_on(copies):
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    randomise(cache)
    with opened(register_kv_caches({"l": cache})) as (transport, buffer):
        outcome = outcome_of(transport.submit(copies, transport.record_compute()))
        assert isinstance(outcome.error, TransportError)
        run(transport, simple(STORE, (3,), (3,)))
        assert np.array_equal(rows_of(buffer)[3], cache[3].cpu().numpy())


def test_a_failure_in_mid_launch_is_reported_only_when_nothing_moves_any_more():
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    randomise(cache)
    with opened(register_kv_caches({"l": cache})) as (transport, buffer):
        copies = [staged.copies for staged in transport._streams[STORE]]
        perform = copies[0].perform

        def failing(*args):
            torch.cuda._sleep(SLEEP_CYCLES)
            perform(*args)
            raise RuntimeError("injected")

        for each in copies:
            each.perform = failing
        outcome = outcome_of(
            transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())
        )
        assert "injected" in str(outcome.error)
        assert np.array_equal(rows_of(buffer)[1], cache[1].cpu().numpy()), "it had been launched"
        for each in copies:
            del each.perform
        run(transport, simple(STORE, (2,), (2,)))


def test_events_of_another_transport_are_misuse_and_a_closed_one_fails():
    cache = torch.zeros(BLOCKS, 4096, dtype=torch.uint8, device="cuda")
    layout = register_kv_caches({"l": cache})
    with opened(layout) as (transport, _buffer):
        with pytest.raises(StateError):
            transport.submit(simple(STORE, (1,), (1,)), object())
        after = transport.record_compute()
    outcome = outcome_of(transport.submit(simple(STORE, (1,), (1,)), after))
    assert "closed" in str(outcome.error)


def test_two_workers_of_a_process_share_pinned_slots():
    caches = [torch.full((BLOCKS, 4096), i + 1, dtype=torch.uint8, device="cuda") for i in range(2)]
    layouts = [register_kv_caches({"l": cache}) for cache in caches]
    buffer = PrimaryBuffer(SLOTS, 8192)
    workers = [
        create_transport(layout, buffer.view, cell_offset_bytes=4096 * i)
        for i, layout in enumerate(layouts)
    ]
    for worker in workers:
        run(worker, simple(STORE, (1,), (1,)))
    row = rows_of(buffer)[1]
    assert (row[:4096] == 1).all()
    assert (row[4096:] == 2).all()
    del row
    assert all(worker.close(DEADLINE_S) for worker in reversed(workers))
    assert buffer.release()


def test_pinned_pages_go_back_when_the_transport_is_closed_although_a_view_is_held():
    cache = torch.zeros((BLOCKS, 4096), dtype=torch.uint8, device="cuda")
    buffer = PrimaryBuffer(SLOTS, 4096)
    rows = rows_of(buffer)
    rows[:] = 7
    transport = create_transport(register_kv_caches({"l": cache}), buffer.view)
    assert not buffer.release()
    assert rows.all(), "a copy may still run"
    assert transport.close(DEADLINE_S)
    assert not rows.any(), "unpinned, and then given back"
    del rows
    assert buffer.release()
