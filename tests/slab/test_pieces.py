"""How a job's blocks are cut into pieces."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.slab.batches import Blocks, LoadBatch


def pieces(num_blocks, piece_slots, idle_threads):
    blocks = Blocks(*([range(num_blocks)] * 3))
    return LoadBatch(SimpleNamespace(piece_slots=piece_slots), blocks).pieces(idle_threads)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 8))
def test_pieces_are_all_blocks_in_order_and_none_lies_in_two_of_the_stores_own(n, whole, threads):
    cut = pieces(n, whole, threads)
    assert [index for piece in cut for index in piece] == list(range(n))
    assert all(piece.start // whole == (piece.stop - 1) // whole for piece in cut)


def test_a_job_that_threads_wait_for_is_cut_smaller_but_not_into_scraps():
    assert list(map(len, pieces(64, 64, 0))) == [64]
    assert list(map(len, pieces(128, 64, 2))) == [16] * 8
    assert list(map(len, pieces(64, 64, 8))) == [16] * 4, "a quarter of a piece at least"
    assert list(map(len, pieces(2048, 64, 2))) == [64] * 32, "a piece at most"
    assert list(map(len, pieces(3, 1, 2))) == [1] * 3
