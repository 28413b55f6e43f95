"""How a batch of extents is cut into parts for Python threads."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.block_io import Run
from kvoffload_async.block_io.python_io import _Batch

SLOT = 4096
MOVER = SimpleNamespace(rows=SimpleNamespace(slot_bytes=SLOT))


def parts(runs, part_slots, idle_threads, *, is_store=True):
    rows = range(sum(run.length for run in runs))
    batch = _Batch(MOVER, part_slots, rows, runs, is_direct=False)
    batch.is_store = is_store
    return batch.parts(idle_threads)


def sizes(num_blocks, part_slots, idle_threads):
    cut = parts([Run(3, 0, num_blocks)], part_slots, idle_threads)
    assert all(part.size_bytes == SLOT * sum(run.length for run in part.runs) for part in cut)
    return [part.size_bytes // SLOT for part in cut]


@given(
    st.lists(st.tuples(st.integers(3, 5), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 64),
    st.integers(0, 8),
)
def test_parts_are_all_blocks_in_order_and_each_is_of_one_file(files, piece, threads):
    runs = [Run(fd, number * 1000 * SLOT, length) for number, (fd, length) in enumerate(files)]
    cut = parts(runs, piece, threads)
    slots = [
        (run.fd, run.offset + at * SLOT)
        for part in cut
        for run in part.runs
        for at in range(run.length)
    ]
    assert slots == [(fd, offset + at * SLOT) for fd, offset, n in runs for at in range(n)]
    starts = [part.start for part in cut]
    assert starts == [sum(p.size_bytes for p in cut[:at]) // SLOT for at in range(len(cut))]
    assert all(part.size_bytes <= piece * SLOT for part in cut)
    assert all({run.fd for run in part.runs} == {part.file} for part in cut)


def test_a_load_needs_no_file_to_itself():
    assert {part.file for part in parts([Run(3, 0, 9)], 2, 0, is_store=False)} == {None}


def test_a_batch_that_threads_wait_for_is_cut_smaller_but_not_into_scraps():
    assert sizes(64, 64, 0) == [64]
    assert sizes(128, 64, 2) == [16] * 8
    assert sizes(64, 64, 8) == [16] * 4, "a quarter of a piece at least"
    assert sizes(2048, 64, 2) == [64] * 32, "a piece at most"
    assert sizes(3, 1, 2) == [1] * 3
