"""What the native engine refuses, before a thread could touch anything."""

import re
import struct

import pytest
from native_engine import (
    BLOCKS,
    ROW_BYTES,
    keys_of,
    opened_engine,
    outcomes,
)

EXTENTS = [
    ({"rows": [0, BLOCKS]}, ValueError, "rows: 6 is no row of a memory of 6"),
    ({"rows": [-1]}, ValueError, "rows: -1 is no row"),
    ({"rows": ["0"]}, TypeError, "integer"),
    ({"rows": [2**80]}, OverflowError, "too big"),
    ({"rows": 3}, TypeError, "not iterable"),
    ({"runs": []}, ValueError, "runs: 6 of 6 rows are in none"),
    ({"runs": [(0, 0, BLOCKS - 1)]}, ValueError, "runs: 1 of 6 rows are in none"),
    ({"runs": [(0, 0, BLOCKS + 1)]}, ValueError, "is no extent for the 6 rows"),
    ({"runs": [(0, 0, 0)]}, ValueError, "runs: (0, 0, 0) is no extent"),
    ({"runs": [(-1, 0, BLOCKS)]}, ValueError, "runs: (-1, 0, 6) is no extent"),
    ({"runs": [(0, -1, BLOCKS)]}, ValueError, "runs: (0, -1, 6) is no extent"),
    ({"runs": [(0, 2**63 - 1, BLOCKS)]}, ValueError, "is no extent"),
    ({"runs": [(0, 0)]}, ValueError, "runs: 2 items instead of 3"),
    ({"runs": [3]}, TypeError, "runs: 3 is no tuple"),
    ({"keys": keys_of(BLOCKS - 1)}, ValueError, "keys: 5 items instead of 6"),
    ({"keys": ["key"] * BLOCKS}, TypeError, "expected bytes"),
    ({"prefix": "text"}, TypeError, "bytes-like"),
    ({"keys": [bytes(4090)] * BLOCKS}, ValueError, "keys: one has 4090 bytes, more than 4096"),
]
NAMES = [
    *("/etc/passwd", "../up", "leaf/../x", "leaf//x", "leaf/", "", ".", "..", "./x"),
    *("leaf/..", "leaf/./x"),
]
FILES = [
    ({"names": ["leaf/a"]}, ValueError, "names: they are not 6"),
    ({"names": ["leaf/a"] * (BLOCKS + 1)}, ValueError, "names: they are not 6"),
    ({"names": ["a\0b"] * BLOCKS}, ValueError, "names: they are not 6, or there is a NUL in one"),
    ({"names": ["x" * 4096] * BLOCKS}, ValueError, "does not lead to a file"),
    ({"root": (-1, "/tmp")}, ValueError, "root: -1 is not a descriptor"),
    ({"root": (0, "a\0")}, ValueError, "null"),
    ({"value_prefix": bytes(49)}, ValueError, "value_prefix: 49 bytes are more than 48"),
    ({"attribute": "a\0b"}, ValueError, "null"),
    ({"keys": []}, ValueError, "keys: 0 items instead of 6"),
]
STORES = [
    ({"victims": ["leaf/a"]}, ValueError, "victims: they are not 6"),
    ({"victims": ["../up"] * BLOCKS}, ValueError, "victims: '../up' does not lead to a file"),
    ({"marker": "../up"}, ValueError, "marker, temp_stem: '../up' or '.' leads elsewhere"),
    ({"temp_stem": "/../up"}, ValueError, "marker, temp_stem: 'marker' or '/../up' leads"),
    ({"may_write": b""}, ValueError, "may_write: 0 items instead of 6"),
    ({"first_serial": -1}, ValueError, "first_serial: -1 is not between 0"),
    ({"first_serial": 2**63 + 1}, ValueError, "first_serial: 9223372036854775809 is not"),
    ({"file_mode": 0o1000}, ValueError, "file_mode: 512"),
    ({"file_mode": -2}, ValueError, "file_mode: -2"),
]
LOADS = [
    ({"expected": []}, ValueError, "expected: 0 items instead of 6"),
    ({"expected": [1] * BLOCKS}, TypeError, "expected bytes"),
]


@pytest.mark.parametrize(("changed", "error", "words"), EXTENTS)
def test_extents_refuse(block, changed, error, words):
    with pytest.raises(error, match=re.escape(words)):
        block.extents(is_store=True, **changed)


@pytest.mark.parametrize(("changed", "error", "words"), FILES)
def test_files_refuse(block, changed, error, words):
    with pytest.raises(error, match=re.escape(words)):
        block.load_files(**changed)
    with pytest.raises(error, match=re.escape(words)):
        block.store_files(**changed)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_may_lead_out_of_the_root_are_refused(engine, block, name):
    with pytest.raises(ValueError, match=r"names: .* does not lead to a file beneath the root"):
        engine.has_files(block.root, [name])
    if name:
        with pytest.raises(ValueError, match=r"victims: .* does not lead to a file beneath"):
            block.store_files(victims=[name] * BLOCKS)


@pytest.mark.parametrize(("changed", "error", "words"), STORES)
def test_stores_refuse(block, changed, error, words):
    with pytest.raises(error, match=re.escape(words)):
        block.store_files(**changed)


@pytest.mark.parametrize(("changed", "error", "words"), LOADS)
def test_loads_refuse(block, changed, error, words):
    with pytest.raises(error, match=re.escape(words)):
        block.load_files(**changed)


SIZE = BLOCKS * ROW_BYTES


@pytest.mark.parametrize(
    "part",
    [
        *((-1, 0, 1), (0, -1, 1), (0, 0, -1), (SIZE, 0, 1), (0, SIZE, 1), (0, 0, SIZE + 1)),
        *((2**63 - 1, 0, 1), (0, 2**63 - 1, 2**63 - 1), (1, 0, SIZE)),
        *((0, 0, 1, -1, 1, 1), (0, 0, 2, 2, 1, 2), (0, 0, 2, 2, 2, 1)),
        *((1, 0, 1, SIZE, 1, 1), (0, 1, 1, SIZE, 1, 1), (0, 0, 1, 2, SIZE, 1)),
        *((0, 0, 0, 2**62, 0, 0), (0, 0, 1, 2**63 - 1, 2**62, 1), (0, 0, 1, 2, 1, 2**63 - 1)),
    ],
)
def test_copies_out_of_memory_are_refused(engine, block, part):
    packed = struct.pack("6q", *part, *(1, 0, 0)[len(part) - 3 :])
    with pytest.raises(ValueError, match=r"parts: .* is not within the memories"):
        engine.copies(block.target, block.source, packed)


def test_copies_of_another_size_are_refused(engine, block):
    with pytest.raises(ValueError, match="parts: 8 bytes are not copies of 48 bytes"):
        engine.copies(block.target, block.source, bytes(8))


@pytest.mark.parametrize(
    ("row_bytes", "slot_bytes", "words"),
    [
        (0, 0, "row_bytes: 0 is not positive"),
        (7, 7, "buffer: its 6000 bytes are not a multiple of row_bytes"),
        (1000, 999, "slot_bytes: 999"),
        (1000, 1001 + (64 << 10), "slot_bytes"),
    ],
)
def test_memories_that_do_not_fit_are_refused(engine, row_bytes, slot_bytes, words):
    with pytest.raises(ValueError, match=words):
        engine.map(bytearray(6000), row_bytes, slot_bytes)


def test_a_buffer_that_is_not_contiguous_is_refused(engine):
    with pytest.raises(BufferError):
        engine.map(memoryview(bytearray(100))[::2], 10, 10)


def test_nothing_is_loaded_into_memory_that_is_read_only(engine, block):
    frozen = engine.map(bytes(SIZE), ROW_BYTES, 1024)
    with pytest.raises(BufferError, match="not writable"):
        block.extents(is_store=False, memory=frozen)
    with pytest.raises(BufferError, match="not writable"):
        engine.copies(frozen, block.source, b"")
    assert outcomes(engine, block.extents(is_store=True, memory=frozen))[0] == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({name: 0}, f"{name}: 0 is not between 1") for name in ("load_threads", "queued")),
        *(({name: 65}, f"{name}: 65 is not") for name in ("store_threads", "spare_threads")),
        ({"piece_bytes": 0}, "piece_bytes: 0"),
        ({"part_bytes": -1}, "part_bytes: -1"),
        ({"hashes": ()}, "hashes: 0 items instead of 48"),
        ({"hashes": (1, 2, 3, 0, 5, 6)}, "hashes: address 3 is zero"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changed, words):
    with pytest.raises((ValueError, TypeError), match=words), opened_engine(**changed):
        pass


@pytest.mark.parametrize("call", ["close", "replace_hung"])
@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_what_is_no_duration_is_refused(engine, call, seconds):
    with pytest.raises(ValueError, match="is not a duration"):
        getattr(engine, call)(seconds)


def test_ticket_0_is_none(engine):
    with pytest.raises(ValueError, match="ticket: 0 is not valid"):
        engine.withdraw(0)
