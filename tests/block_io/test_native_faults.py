"""The native engine when calls fail or hang: what it holds meanwhile, and what a fork finds."""

import contextlib
import errno
import gc
import os
import select
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_files import FaultyFileOps
from native_engine import (
    ATTRIBUTE,
    BLOCKS,
    ROW_BYTES,
    VALUE_PREFIX,
    Block,
    native,
    opened_engine,
    outcomes,
)
from xxh3 import addresses

from kvoffload_async.block_io.contract import FILE_NOT_BEGUN


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
        with pytest.raises(ValueError, match="memory: already released"):
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
    watched = key, name, block.source.rows[0], engine
    counts = [sys.getrefcount(one) for one in watched]
    for _ in range(3):
        outcomes(engine, block.extents(is_store=True, keys=[key] * BLOCKS))
        outcomes(engine, engine.has_files(block.root, [name] * 3))
        with pytest.raises(ValueError, match="expected"):
            block.load_files(keys=[key] * BLOCKS, memory=block.target, expected=[])
    gc.collect()
    assert counts == [sys.getrefcount(one) for one in watched]


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
        ops.fail(524, on="pwritev", times=1)  # which no byte holds
        assert set(outcomes(engine, block.extents(is_store=True))[0].values()) == {errno.EIO}
        block.close()


@pytest.mark.parametrize(
    "call", ["open", "pwritev", "set_xattr", "truncate", "fsync", "close", "stat", "publish"]
)
def test_a_store_that_fails_at_any_call_leaves_no_temporary_file(tmp_path, call):
    ops = FaultyFileOps()
    with opened_engine(ops=ops) as engine:
        block = Block(engine, tmp_path, 1, ROW_BYTES, ops=ops)
        victim = put_victim(tmp_path)
        ops.fail(errno.EIO, on=call, when=lambda found: found.path.endswith(".tmp"))
        assert outcomes(engine, block.store_files(victims=["old"], fsync=True))[0] == b"\2"
        assert not victim.exists()
        assert list((tmp_path / "leaf").iterdir()) == []
        assert ops.open_fds.keys() == {block.fd}
        block.close()


def put_victim(folder):
    victim = folder / "old"
    victim.write_bytes(bytes(2 * ROW_BYTES))
    os.setxattr(victim, ATTRIBUTE, VALUE_PREFIX + bytes(16))
    return victim


@pytest.mark.parametrize("call", ["fstat", "get_xattr"])
def test_a_victim_about_which_nothing_is_known_is_removed(tmp_path, call):
    ops = FaultyFileOps()
    with opened_engine(ops=ops) as engine:
        block = Block(engine, tmp_path, 1, ROW_BYTES, ops=ops)
        with put_victim(tmp_path).open("rb") as reader:
            ops.fail(errno.EIO, on=call, when=lambda found: found.path.endswith(".tmp"))
            assert outcomes(engine, block.store_files(victims=["old"]))[0] == b"\0"
            assert not any(reader.read())
        assert ops.open_fds.keys() == {block.fd}
        block.close()


@pytest.mark.parametrize("call", ["stat", "rename"])
def test_a_victim_that_cannot_be_taken_stays(tmp_path, call):
    ops = FaultyFileOps()
    with opened_engine(ops=ops) as engine:
        block = Block(engine, tmp_path, 1, ROW_BYTES, ops=ops)
        victim = put_victim(tmp_path)
        ops.fail(errno.EIO, on=call, when=lambda found: found.path.endswith("old"))
        statuses, _, numbers = outcomes(engine, block.store_files(victims=["old"]))
        assert (statuses, struct.unpack("2q", numbers)) == (b"\2", (0, -1))
        assert victim.exists()
        assert list((tmp_path / "leaf").iterdir()) == []
        block.close()


def test_a_defect_of_the_object_is_logged_and_fails_its_call(tmp_path, caplog):
    with opened_engine(ops=object()) as engine:
        block = Block(engine, tmp_path, 1, ROW_BYTES)
        assert outcomes(engine, block.extents(is_store=True))[0] == {0: errno.EIO}
        assert "failed in a system call" in caplog.text
        block.close()


def test_a_spare_stands_for_a_thread_that_hangs(tmp_path):
    ops = FaultyFileOps()
    with opened_engine(ops=ops, load_threads=1, spare_threads=1) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES, ops=ops)
        hang = ops.hang(on="stat", times=2)
        hung = [engine.has_files(block.root, [name]) for name in block.names[:2]]
        while ops.counts()["stat"] < 2:
            assert engine.replace_hung(3600.0) == 0
        assert engine.replace_hung(0.0) == 2
        assert engine.counters()["spares"] == 1
        assert outcomes(engine, engine.has_files(block.root, ["leaf/0.bin"])) == b"\0"
        hang.release()
        assert outcomes(engine, *hung) == [b"\0", b"\0"]
        while engine.counters()["threads"] > 2:
            assert engine.replace_hung(3600.0) == 0
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
    waiting.append(engine.copies(block.target, block.source, struct.pack("6q", 0, 0, 1, 1, 0, 0)))
    waiting.append(engine.has_files(block.root, ["leaf"]))
    assert engine.close(0.01) == 3
    loaded, stored, read, copied, found = outcomes(engine, *waiting)
    assert loaded[0] == stored[0] == bytes([FILE_NOT_BEGUN]) * BLOCKS
    assert read[0] == dict.fromkeys(range(BLOCKS), errno.ECANCELED)
    assert (copied, found) == (errno.ECANCELED, b"\0")
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
        found = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # of a thread that ends just now
                found.append((task / "comm").read_text().strip())
        return found

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
        lambda: engine.replace_hung(1.0),
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


@pytest.mark.slow
def test_without_memory_no_outcome_is_lost_and_no_unknown_batch_runs(tmp_path):
    pytest.importorskip("_testcapi")
    script = Path(__file__).with_name("out_of_memory.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
