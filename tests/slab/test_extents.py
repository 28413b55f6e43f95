"""How a job's blocks are cut into extents."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.slab.batches import Blocks, LoadBatch


def extents(num_blocks, extent_slots, idle_threads):
    blocks = Blocks(*([range(num_blocks)] * 3))
    return LoadBatch(SimpleNamespace(extent_slots=extent_slots), blocks).extents(idle_threads)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 8))
def test_pieces_are_all_blocks_in_order_and_none_lies_in_two_of_the_stores_own(n, whole, threads):
    cut = extents(n, whole, threads)
    assert [index for extent in cut for index in extent] == list(range(n))
    assert all(extent.start // whole == (extent.stop - 1) // whole for extent in cut)


def test_a_job_that_threads_wait_for_is_cut_smaller_but_not_into_scraps():
    assert list(map(len, extents(64, 64, 0))) == [64]
    assert list(map(len, extents(128, 64, 2))) == [16] * 8
    assert list(map(len, extents(64, 64, 8))) == [16] * 4, "a quarter of an extent at least"
    assert list(map(len, extents(2048, 64, 2))) == [64] * 32, "an extent at most"
    assert list(map(len, extents(3, 1, 2))) == [1] * 3
