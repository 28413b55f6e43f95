"""Rows over a host's memory and own memory: which addresses are rows, and copies of pieces."""

import numpy as np
import pytest

from kvoffload_async.block_io.choice import VARIABLE
from kvoffload_async.errors import StateError
from kvoffload_async.facade import host_rows
from kvoffload_async.facade.host_rows import HostMemory, HostRows, RowCopies
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.types import as_block_ids

ROW = 3 * 4096


@pytest.fixture
def host():
    buffer = PrimaryBuffer(16, 4096)
    yield np.asarray(buffer.view).reshape(-1)
    buffer.release()


def memory_of(array):
    return HostMemory(array.ctypes.data, array.nbytes)


@pytest.fixture
def make():
    made = []

    def make(*args):
        made.append(HostRows(*args))
        return made[-1]

    yield make
    for rows in made:
        rows.close()


def test_a_row_is_where_a_whole_one_begins(make, host):
    rows = make(ROW, 2, memory_of(host))
    assert rows.host == memory_of(host)
    at = host.ctypes.data
    numbers = [rows.row_of(at + offset) for offset in (0, ROW, 4 * ROW)]
    assert [n - numbers[0] for n in numbers] == [0, 1, 4]
    assert [rows.row_of(at + offset) for offset in (-ROW, 4096, 5 * ROW)] == [None] * 3
    view = np.asarray(rows.view)
    view[numbers[1]] = 7
    assert (host[ROW : 2 * ROW] == 7).all()
    assert not host[:ROW].any()
    assert not host[2 * ROW :].any()


@pytest.mark.parametrize("order", ["below", "above"])
def test_own_rows_are_own_memory_wherever_it_lies(make, monkeypatch, order):
    buffer = PrimaryBuffer(64, 4096)
    flat = np.asarray(buffer.view).reshape(-1)
    lower, upper = flat[: 128 * 1024], flat[128 * 1024 :]
    host, own = (lower, upper) if order == "above" else (upper, lower)
    host = host[4096:]
    monkeypatch.setattr(host_rows, "map_anonymous", lambda size, prefault: own[:size])
    monkeypatch.setattr(HostRows, "close", lambda self: self.view.release())
    rows = make(ROW, 2, memory_of(host))
    taken = rows.take(2)
    view = np.asarray(rows.view)
    for row in taken.tolist():
        view[row] = 9
    assert not host.any()
    assert (own == 9).sum() == 2 * ROW
    first = rows.row_of(host.ctypes.data)
    view[first] = 5
    assert (host[:ROW] == 5).all()
    del view
    buffer.release()


def test_without_memory_of_the_host_all_rows_are_own_ones(make):
    rows = make(ROW, 3)
    assert rows.view.shape == (3, ROW)
    assert rows.row_of(4096) is None
    assert sorted(rows.take(9).tolist()) == [0, 1, 2]


def test_memory_out_of_reach_of_row_numbers_is_left_out(make, host, monkeypatch):
    monkeypatch.setattr(host_rows, "_MAX_ROWS", 2)
    rows = make(ROW, 2, memory_of(host))
    assert rows.host is None
    assert rows.row_of(host.ctypes.data) is None
    assert rows.view.shape == (2, ROW)


def test_no_more_rows_are_taken_than_are_free(make):
    rows = make(ROW, 2)
    first = rows.take(2)
    assert len(first) == 2
    assert len(rows.take(1)) == 0
    assert rows.num_free == 0
    rows.give_back(first[:1])
    assert len(rows.take(0)) == 0
    assert rows.take(2).tolist() == first[:1].tolist()


@pytest.fixture(params=["native", "python"])
def copies(request, make, monkeypatch):
    if request.param == "python":
        monkeypatch.setenv(VARIABLE, "0")
    rows = make(ROW, 4)
    copies = RowCopies(rows)
    yield rows, copies
    copies.close()


def test_pieces_from_anywhere_fill_rows_and_come_back(copies):
    rows, copies = copies
    draw = np.random.default_rng(1)
    source = draw.integers(0, 256, (2, 3, 5000), dtype=np.uint8)
    target = np.zeros_like(source)
    sizes = np.array([[4096, 8000 - 4096, 1], [10, 20, 0]], dtype=np.int64)
    where = np.arange(6, dtype=np.int64).reshape(2, 3) * 5000
    taken = rows.take(2)[::-1]
    copies.gather(taken, where + source.ctypes.data, sizes)
    row = np.asarray(rows.view)[taken[0]]
    assert (row[:4096] == source[0, 0, :4096]).all()
    assert (row[4096:8000] == source[0, 1, : 8000 - 4096]).all()
    assert row[8000] == source[0, 2, 0]
    copies.scatter(taken, where + target.ctypes.data, sizes)
    for index, size in np.ndenumerate(sizes):
        assert (target[index][:size] == source[index][:size]).all()
        assert not target[index][size:].any()
    del row


def test_pieces_longer_than_a_row_are_refused(copies):
    rows, copies = copies
    wrong = np.array([[ROW, 1]], dtype=np.int64)
    with pytest.raises(StateError, match="exceed its 12288 bytes"):
        copies.gather(rows.take(1), np.zeros_like(wrong), wrong)
    copies.gather(as_block_ids([]), np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))
