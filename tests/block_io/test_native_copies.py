"""Copies from memory to memory by native threads."""

from functools import partial

import numpy as np
import pytest

native_copies = pytest.importorskip("kvoffload_async.block_io.native_copies")


@pytest.fixture
def copies():
    copies = native_copies.NativeCopies()
    yield copies
    copies.close()


@pytest.fixture
def memories(copies):
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, dtype=np.uint8)
    return target, copies.map(target), copies.map(source)


def batch(memories, *parts):
    """Parts are (target, source, bytes), and for several fragments (count, their distances)."""
    _, target, source = memories
    whole = [part + (1, 0, 0)[len(part) - 3 :] for part in parts]
    return native_copies.Copies(target, source, np.array(whole, dtype=np.int64).reshape(-1, 6))


def test_every_part_of_every_batch_is_copied_and_nothing_else(copies, memories):
    target = memories[0]
    copies.copy(
        [batch(memories, (0, 8, 2), (4, 20, 3)), batch(memories), batch(memories, (9, 0, 1))]
    )
    expected = np.zeros(64, dtype=np.uint8)
    expected[0:2], expected[4:7] = (8, 9), (20, 21, 22)
    assert target.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("size", "count", "num_parts"),
    [(1, 30, 1), (300, 10, 4), (1000, 4, 4), (1500, 2, 4), (6000, 1, 6)],
)
def test_a_large_copy_is_cut_into_parts_between_and_within_its_fragments(
    monkeypatch, size, count, num_parts
):
    monkeypatch.setattr(native_copies, "PART_BYTES", 1000)
    create = partial(native_copies.Engine, part_bytes=1000)
    monkeypatch.setattr(native_copies, "Engine", create)
    copies = native_copies.NativeCopies()
    source = np.random.default_rng(0).integers(0, 256, 6100, np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    memories = target, copies.map(target), copies.map(source)
    copies.copy([batch(memories, (10, 5, size, count, size + 7, size + 1))])
    for at in range(count):
        begin, end = 5 + at * (size + 1), 10 + at * (size + 7)
        expected[end : end + size] = source[begin : begin + size]
    assert np.array_equal(target, expected)
    assert copies._engine.counters()["parts"] == num_parts
    copies.close()


def test_more_batches_than_may_be_under_way_are_copied_too(monkeypatch):
    monkeypatch.setattr(native_copies, "_QUEUED", 1)  # the engine refuses what is more
    copies = native_copies.NativeCopies()
    source, target = np.arange(1 << 22, dtype=np.uint8), np.zeros(1 << 22, dtype=np.uint8)
    memories = target, copies.map(target), copies.map(source)
    copies.copy(batch(memories, (at << 20, at << 20, 1 << 20)) for at in [0, 1, 2, 3] * 8)
    assert np.array_equal(target, source)
    copies.close()


def test_a_batch_that_is_refused_leaves_none_under_way(copies, memories):
    parts = [batch(memories, (0, 1, 63)), batch(memories, (0, 0, 65))]
    with pytest.raises(ValueError, match="not within the memories"):
        copies.copy(parts)
    assert memories[0][:63].tolist() == list(range(1, 64))
    copies.copy(parts[:1])


def test_without_a_batch_it_does_not_wait(copies):
    copies.copy([])


def test_memory_that_is_not_contiguous_is_refused(copies):
    with pytest.raises(BufferError):
        copies.map(np.zeros((4, 4), dtype=np.uint8)[:, :2])
