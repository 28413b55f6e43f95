"""The native engine's binding: what it refuses, what it holds, and what a fork finds."""

import errno
import gc
import os
import re
import select
import struct
import sys
from pathlib import Path

import pytest
from native_engine import (
    ATTRIBUTE,
    PREFIX,
    VALUE_PREFIX,
    Block,
    digest,
    keys_of,
    native,
    opened_engine,
    outcomes,
)
from xxh3 import addresses

from kvoffload_async.testing.fileops import FaultyFileOps

BLOCKS = 6
ROW_BYTES = 1000


@pytest.fixture
def engine():
    with opened_engine() as engine:
        yield engine


@pytest.fixture
def block(engine, tmp_path):
    block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, 1024)
    yield block
    block.close()


# -- what it does ----------------------------------------------------------------------------------


def test_extents_come_back(engine, block):
    assert outcomes(engine, block.extents(is_store=True)) == ({}, block.digests)
    assert outcomes(engine, block.extents(is_store=False)) == ({}, block.digests)
    assert block.loaded == block.data


def test_without_keys_there_are_no_digests(engine, block):
    assert outcomes(engine, block.extents(is_store=True, keys=None)) == ({}, b"")


def test_a_file_that_ends_early_and_one_that_fails_are_told_apart(engine, block, tmp_path):
    outcomes(engine, block.extents(is_store=True))
    os.truncate(tmp_path / "extents", 1024 + ROW_BYTES)
    write_only = os.open(tmp_path / "extents", os.O_WRONLY)
    runs = [(block.fd, 0, 3), (write_only, 0, 2), (block.fd, 0, 1)]
    errors, digests = outcomes(engine, block.extents(is_store=False, runs=runs))
    os.close(write_only)
    assert errors == {2: -1, 3: errno.EBADF, 4: errno.EBADF}
    assert digests[:32] == block.digests[:32]


def test_files_come_back(engine, block, tmp_path):
    statuses, digests, disk_bytes = outcomes(engine, block.store_files())
    assert (statuses, digests) == (bytes(BLOCKS), block.digests)
    status = (tmp_path / "leaf/0.bin").stat()
    assert (status.st_blocks * 512, status.st_mode & 0o777) == (disk_bytes[0], 0o600)
    assert os.getxattr(tmp_path / "leaf/0.bin", ATTRIBUTE) == VALUE_PREFIX + block.digests[:16]
    assert outcomes(engine, block.load_files()) == (bytes(BLOCKS), block.digests)
    assert block.loaded == block.data
    assert outcomes(engine, block.store_files())[0] == b"\1" * BLOCKS
    assert outcomes(engine, engine.has_files(block.root, ["leaf/0.bin", "leaf/x", "x/y"])) == (
        b"\1\0\0"
    )


def test_without_a_digest_nothing_is_compared(engine, block, tmp_path):
    assert outcomes(engine, block.store_files(has_digest=False))[:2] == (bytes(BLOCKS), b"")
    assert os.listxattr(tmp_path / "leaf/0.bin") == []
    assert outcomes(engine, block.load_files())[0] == b"\1" * BLOCKS
    assert outcomes(engine, block.load_files(verify=False)) == (bytes(BLOCKS), b"")


def test_a_remembered_value_or_the_attribute_must_match(engine, block, tmp_path):
    outcomes(engine, block.store_files())
    values = [VALUE_PREFIX + block.digests[at : at + 16] for at in range(0, BLOCKS * 16, 16)]
    for index in (0, 1):
        os.removexattr(tmp_path / f"leaf/{index}.bin", ATTRIBUTE)
    other = b"\x02" + values[4][1:]  # the same checksum, and not as one that counts
    os.setxattr(tmp_path / "leaf/4.bin", ATTRIBUTE, other)
    expected = [values[0], values[0], values[0], None, other, b""]
    assert outcomes(engine, block.load_files(expected=expected))[0] == b"\0\1\0\0\1\0"


def test_a_recycled_file_is_overwritten_and_cut_to_its_size(engine, block, tmp_path):
    (tmp_path / "leaf/0.bin.tmp").write_bytes(b"x" * 5000)
    (tmp_path / "leaf/1.bin.tmp").write_bytes(b"x")  # is there, and not to be
    statuses, _, _ = outcomes(engine, block.store_files(recycled=b"\1\0\1\0\0\0"))
    assert statuses == b"\0\2\2\0\0\0"  # the third is to be there, and is not
    assert (tmp_path / "leaf/0.bin").read_bytes() == block.data[:ROW_BYTES]
    assert sorted(path.name for path in (tmp_path / "leaf").iterdir()) == [
        *("0.bin", "3.bin", "4.bin", "5.bin")
    ]


@pytest.fixture(params=[0o000, 0o077])
def _umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "expected"),
    [
        *((0o700, -1, 0o600), (0o770, -1, 0o660), (0o775, -1, 0o660), (0o777, -1, 0o666)),
        *((0o1777, -1, 0o660), (0o700, 0o644, 0o644)),
    ],
)
def test_permissions(block, folder_mode, file_mode, expected):
    folder = Path(block.root[1]) / "leaf"
    folder.chmod(folder_mode)
    outcomes(block.engine, block.store_files(file_mode=file_mode))
    assert (folder / "0.bin").stat().st_mode & 0o777 == expected


def test_copies(engine, block):
    parts = struct.pack("6q", 10, 500, 300, 5000, 0, 1)
    assert outcomes(engine, engine.copies(block.target, block.source, parts)) is None
    assert block.loaded[10:310] == block.data[500:800]
    assert block.loaded[5000] == block.data[0]
    assert not any(block.loaded[:10])
    assert not any(block.loaded[310:5000])


def test_a_large_copy_is_cut_into_parts(tmp_path):
    with opened_engine(part_bytes=1000) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES)
        parts = struct.pack("3q", 1, 0, BLOCKS * ROW_BYTES - 1)
        outcomes(engine, engine.copies(block.target, block.source, parts))
        assert block.loaded[1:] == block.data[:-1]
        assert engine.counters()["parts"] == BLOCKS
        block.close()


def test_an_empty_batch_ends(engine, block):
    assert outcomes(engine, engine.has_files(block.root, [])) == b""
    empty = {"rows": [], "runs": [], "keys": []}
    assert outcomes(engine, block.extents(is_store=True, **empty)) == ({}, b"")


def test_one_event_for_all_that_has_ended(engine, block):
    tickets = [block.extents(is_store=True) for _ in range(5)]
    outcomes(engine, *tickets)
    assert engine.take() == []
    with pytest.raises(BlockingIOError):
        os.read(engine.fd, 8)
    counters = engine.counters()
    assert counters["batches"] == 5
    assert counters["hashed_bytes"] == 5 * BLOCKS * ROW_BYTES
    assert counters["bytes"] == 5 * BLOCKS * 1024
    assert 1 <= counters["wake_ups"] <= 5


# -- what it refuses -------------------------------------------------------------------------------

EXTENTS = [
    ({"rows": [0, BLOCKS]}, ValueError, "rows: 6 is no row of a memory of 6"),
    ({"rows": [-1]}, ValueError, "rows: -1 is no row"),
    ({"rows": ["0"]}, TypeError, "integer"),
    ({"rows": [2**80]}, OverflowError, "too big"),
    ({"rows": 3}, TypeError, "not iterable"),
    ({"runs": []}, ValueError, "runs: they cover 0 of 6 rows"),
    ({"runs": [(0, 0, BLOCKS - 1)]}, ValueError, "runs: they cover 5 of 6 rows"),
    ({"runs": [(0, 0, BLOCKS + 1)]}, ValueError, "is no extent for the 6 rows"),
    ({"runs": [(0, 0, 0)]}, ValueError, "runs: (0, 0, 0) is no extent"),
    ({"runs": [(-1, 0, BLOCKS)]}, ValueError, "runs: (-1, 0, 6) is no extent"),
    ({"runs": [(0, -1, BLOCKS)]}, ValueError, "runs: (0, -1, 6) is no extent"),
    ({"runs": [(0, 2**63 - 1, BLOCKS)]}, ValueError, "is no extent"),
    ({"runs": [(0, 0)]}, TypeError, "runs"),
    ({"runs": [3]}, TypeError, "runs: 3 is no tuple"),
    ({"keys": keys_of(BLOCKS - 1)}, ValueError, "keys: 5 items instead of 6"),
    ({"keys": ["key"] * BLOCKS}, TypeError, "expected bytes"),
    ({"prefix": "text"}, TypeError, "bytes-like"),
    ({"memory": bytearray(10)}, TypeError, "memory: not what Engine.map returns"),
]
NAMES = [
    *("/etc/passwd", "../up", "leaf/../x", "leaf//x", "leaf/", "", ".", "..", "./x"),
    *("leaf/..", "leaf/./x"),
]
FILES = [
    ({"names": ["leaf/a"]}, ValueError, "names: 1 items instead of 6"),
    ({"names": ["a\0b"] * BLOCKS}, ValueError, "null"),
    ({"names": [1] * BLOCKS}, TypeError, "PathLike"),
    ({"root": (-1, "/tmp")}, ValueError, "root: -1 is no descriptor"),
    ({"root": (0, "a\0")}, ValueError, "null"),
    ({"root": (0,)}, TypeError, "root"),
    ({"value_prefix": bytes(49)}, ValueError, "value_prefix: 49 bytes are more than 48"),
    ({"attribute": "a\0b"}, ValueError, "null"),
    ({"keys": []}, ValueError, "keys: 0 items instead of 6"),
]
STORES = [
    ({"temps": ["other/0"] * BLOCKS}, ValueError, "temps: other/0 is not in the folder of"),
    ({"temps": ["flea/0"] * BLOCKS}, ValueError, "temps: flea/0 is not in the folder of"),
    ({"temps": ["0"] * BLOCKS}, ValueError, "temps: 0 is not in the folder of leaf/0.bin"),
    ({"recycled": b""}, ValueError, "recycled: 0 bytes instead of 6"),
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
        block.store_files(**{**changed, "temps": [f"{name}.tmp" for name in block.names]})


@pytest.mark.parametrize("name", NAMES)
def test_names_that_may_lead_out_of_the_root_are_refused(engine, block, name):
    with pytest.raises(ValueError, match=r"names: .* does not lead to a file beneath the root"):
        engine.has_files(block.root, [name])
    with pytest.raises(ValueError, match=r"temps: .* does not lead to a file beneath the root"):
        block.store_files(temps=[name] * BLOCKS)


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
    ],
)
def test_copies_out_of_memory_are_refused(engine, block, part):
    packed = struct.pack("3q", *part)
    with pytest.raises(ValueError, match=r"parts: .* is not within the memories"):
        engine.copies(block.target, block.source, packed)


def test_copies_that_are_no_triples_are_refused(engine, block):
    with pytest.raises(ValueError, match="parts: 8 bytes are no triples"):
        engine.copies(block.target, block.source, bytes(8))


@pytest.mark.parametrize(
    ("row_bytes", "slot_bytes", "words"),
    [
        (0, 0, "row_bytes: 0 is not positive"),
        (7, 7, "buffer: its 6000 bytes are no multiple of row_bytes, 7"),
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
    with pytest.raises(ValueError, match="memory: its buffer is read-only"):
        block.extents(is_store=False, memory=frozen)
    with pytest.raises(ValueError, match="target: its buffer is read-only"):
        engine.copies(frozen, block.source, b"")
    assert outcomes(engine, block.extents(is_store=True, memory=frozen))[0] == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({name: 0}, f"{name}: 0 is not between 1") for name in ("load_threads", "queued")),
        *(({name: 65}, f"{name}: 65 is not") for name in ("store_threads", "spare_threads")),
        ({"piece_bytes": 0}, "piece_bytes: 0"),
        ({"part_bytes": -1}, "part_bytes: -1"),
        ({"hashes": ()}, "hashes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changed, words):
    with pytest.raises((ValueError, TypeError), match=words), opened_engine(**changed):
        pass


@pytest.mark.parametrize("call", ["close", "tend"])
@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_what_is_no_duration_is_refused(engine, call, seconds):
    with pytest.raises(ValueError, match="is no duration"):
        getattr(engine, call)(seconds)


def test_ticket_0_is_none(engine):
    with pytest.raises(ValueError, match="ticket: 0 is none"):
        engine.withdraw(0)


# -- what it holds ---------------------------------------------------------------------------------


def resized(buffer: bytearray) -> bool:
    """Tell whether nothing holds a buffer."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


def test_the_buffer_is_held_while_anything_of_it_is_in_flight(tmp_path):
    ops = FaultyFileOps()
    with opened_engine(ops=ops) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, ops=ops)
        hang = ops.hang(on="pwritev")
        ticket = block.extents(is_store=True)
        assert hang.entered.wait(60)
        block.source.release()
        block.source.release()
        with pytest.raises(ValueError, match="memory: it is released"):
            block.extents(is_store=True)
        assert not resized(block.data)
        hang.release()
        assert outcomes(engine, ticket) == ({}, block.digests)
        assert resized(block.data)
        block.close()


def test_a_memory_that_is_released_or_forgotten_lets_go_of_its_buffer(engine):
    buffer = bytearray(10)
    released, forgotten = engine.map(buffer, 10, 10), engine.map(buffer, 5, 5)
    del forgotten
    assert not resized(buffer)
    released.release()
    assert resized(buffer)
    forgotten = engine.map(buffer, 10, 10)
    assert not resized(buffer)
    del forgotten
    assert resized(buffer)


def test_no_reference_is_lost_or_kept(engine, block):
    key, name = os.urandom(20), "leaf/" + os.urandom(20).hex()
    counts = [sys.getrefcount(one) for one in (key, name, block.source, type(block.source))]
    for _ in range(3):
        outcomes(engine, block.extents(is_store=True, keys=[key] * BLOCKS))
        outcomes(engine, engine.has_files(block.root, [name] * 3))
        with pytest.raises(ValueError, match="expected"):
            block.load_files(keys=[key] * BLOCKS, memory=block.target, expected=[])
    gc.collect()
    assert counts == [sys.getrefcount(one) for one in (key, name, block.source, type(block.source))]


# -- faults and hung calls -------------------------------------------------------------------------


def test_calls_go_through_a_python_object(tmp_path):
    ops = FaultyFileOps()
    with opened_engine(ops=ops) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, ops=ops)
        ops.shorten(300, on="pwritev preadv", times=10)
        assert outcomes(engine, block.store_files())[:2] == (bytes(BLOCKS), block.digests)
        assert outcomes(engine, block.load_files()) == (bytes(BLOCKS), block.digests)
        assert block.loaded == block.data
        assert ops.counts()["publish"] == BLOCKS
        assert ops.open_fds.keys() == {block.fd}
        ops.fail(errno.EIO, on="preadv", times=1)
        assert outcomes(engine, block.load_files())[0].count(1) == 1
        ops.fail(errno.EIO, on="pwritev", times=1)
        assert set(outcomes(engine, block.extents(is_store=True))[0].values()) == {errno.EIO}
        block.close()


@pytest.mark.parametrize(
    "call", ["open", "pwritev", "set_xattr", "truncate", "fsync", "close", "stat", "publish"]
)
def test_a_store_that_fails_at_any_call_leaves_no_temporary_file(tmp_path, call):
    ops = FaultyFileOps()
    with opened_engine(ops=ops) as engine:
        block = Block(engine, tmp_path, 1, ROW_BYTES, ops=ops)
        (tmp_path / "leaf/0.bin.tmp").touch()
        ops.fail(errno.EIO, on=call, when=lambda found: found.path.endswith(".tmp"))
        assert outcomes(engine, block.store_files(recycled=b"\1", fsync=True))[0] == b"\2"
        assert list((tmp_path / "leaf").iterdir()) == []
        assert ops.open_fds.keys() == {block.fd}
        block.close()


def test_a_defect_of_the_object_is_told_and_fails_its_call(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with opened_engine(ops=object()) as engine:
        block = Block(engine, tmp_path, 1, ROW_BYTES)
        assert outcomes(engine, block.extents(is_store=True))[0] == {0: errno.EIO}
        assert isinstance(told[0].exc_value, AttributeError)
        told.clear()
        block.close()


def test_a_spare_stands_for_a_thread_that_hangs(tmp_path):
    ops = FaultyFileOps()
    with opened_engine(ops=ops, load_threads=1, spare_threads=1) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, ops=ops)
        hang = ops.hang(on="stat", times=2)
        hung = [engine.has_files(block.root, [name]) for name in block.names[:2]]
        while ops.counts()["stat"] < 2:
            assert engine.tend(3600.0) == 0
        assert engine.tend(0.0) == 2
        assert engine.counters()["spares"] == 1
        assert outcomes(engine, engine.has_files(block.root, ["leaf/0.bin"])) == b"\0"
        hang.release()
        assert outcomes(engine, *hung) == [b"\0", b"\0"]
        while engine.counters()["threads"] > 2:
            assert engine.tend(3600.0) == 0
        assert engine.counters()["spares"] == 0
        block.close()


def test_what_nobody_has_begun_is_withdrawn(tmp_path):
    ops = FaultyFileOps()
    with opened_engine(ops=ops, load_threads=1, part_bytes=ROW_BYTES, queued=2) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, ops=ops)
        hang = ops.hang(on="pwritev")
        tickets = [block.extents(is_store=True), block.extents(is_store=True)]
        with pytest.raises(BlockingIOError):
            block.extents(is_store=True)
        while ops.counts()["pwritev"] < 2:
            assert hang.entered.wait(60)
        engine.withdraw(tickets[0])
        engine.withdraw(99)
        hang.release()
        withdrawn, whole = outcomes(engine, *tickets)
        assert withdrawn[0] == dict.fromkeys(range(2, BLOCKS), errno.ECANCELED)
        assert whole == ({}, block.digests)
        block.close()


def test_close_cancels_what_waits_and_tells_what_it_leaves_behind(tmp_path):
    ops = FaultyFileOps()
    engine = native.Engine(2, 1, 1, 8, addresses(), ops)
    block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, ops=ops)
    hang = ops.hang(on="stat")
    hung = [engine.has_files(block.root, ["leaf/x"]) for _ in range(3)]
    while ops.counts()["stat"] < 3:
        assert hang.entered.wait(60)
    waiting = [block.load_files(), block.store_files(), block.extents(is_store=False)]
    waiting.append(engine.copies(block.target, block.source, struct.pack("3q", 0, 0, 1)))
    assert engine.close(0.01) == 3
    loaded, stored, read, copied = outcomes(engine, *waiting)
    assert loaded[0] == stored[0] == b"\3" * BLOCKS
    assert read[0] == dict.fromkeys(range(BLOCKS), errno.ECANCELED)
    assert copied == errno.ECANCELED
    for call in (block.load_files, lambda: block.extents(is_store=True)):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()
    hang.release()
    assert outcomes(engine, *hung) == [b"\0"] * 3
    while engine.counters()["threads"]:
        pass
    block.close()


def test_an_engine_that_nobody_closed_ends_its_threads(tmp_path):
    def names():
        return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

    engine = native.Engine(2, 1, 1, 8, addresses(), None, "forgotten")
    block = Block(engine, tmp_path, BLOCKS, ROW_BYTES)
    block.extents(is_store=True)
    while names().count("forgotten") != 3:
        assert engine.counters()["threads"] == 3
    block.close()
    del engine, block
    gc.collect()
    assert "forgotten" not in names()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_joins_nothing(engine, block):
    calls = [
        lambda: block.extents(is_store=True),
        block.load_files,
        block.store_files,
        engine.take,
        engine.counters,
        lambda: engine.close(1.0),
        lambda: engine.tend(1.0),
        lambda: engine.withdraw(1),
        lambda: engine.has_files(block.root, []),
    ]
    child = os.fork()
    if not child:
        status = 1
        try:
            for call in calls:
                with pytest.raises(RuntimeError, match="does not work in a child"):
                    call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert outcomes(engine, block.extents(is_store=True)) == ({}, block.digests)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_engine_deallocated_in_a_forked_child_cancels_nothing(tmp_path):
    ops = FaultyFileOps()
    engines = [native.Engine(1, 1, 0, 8, addresses(), ops)]
    block = Block(engines[0], tmp_path, 1, ROW_BYTES)
    hang = ops.hang(on="stat")
    tickets = [engines[0].has_files(block.root, block.names) for _ in range(3)]
    while ops.counts()["stat"] < 2:
        assert hang.entered.wait(60)
    child = os.fork()
    if not child:
        del block
        engines.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not select.select([engines[0].fd], [], [], 0)[0]
    hang.release()
    assert outcomes(engines[0], *tickets) == [b"\0"] * 3
    assert engines[0].close(30.0) == 0
    block.close()


def test_the_prefix_is_part_of_the_seed(engine, block):
    _, digests = outcomes(engine, block.extents(is_store=True, prefix=b"other\0"))
    assert digests != block.digests
    assert block.digests[:16] == digest(keys_of(1)[0], block.data[:ROW_BYTES])
    assert PREFIX != b"other\0"
