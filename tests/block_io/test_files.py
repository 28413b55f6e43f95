"""Whole files by native code: what is the plain good case, and what is left to Python."""

import asyncio
import os

import pytest
from block_io.worlds import DIGESTER, ROW, WAIT_S, is_built, key_of, run, until
from faulty_files import FaultyFileOps

from kvoffload_async.abc.tier import Direction
from kvoffload_async.block_io.contract import (
    FILE_NOT_BEGUN,
    FILE_PRESENT,
    FILE_WRITTEN,
    Attribute,
    FileBatch,
    FileStores,
    StoredFiles,
)
from kvoffload_async.errors import TierClosedError

pytestmark = pytest.mark.skipif(not is_built(), reason="the native module is not built")

ATTRIBUTE = Attribute("user.kvoffload.test", b"\x01")
KEYS = [key_of(number) for number in range(8)]
ZERO = bytes(ROW)


def value_of(key, content) -> bytes:
    return ATTRIBUTE.prefix + DIGESTER.digest(key, memoryview(content))


def put(folder, key, content, *, value=None):
    path = folder / f"{key.decode()}.bin"
    path.write_bytes(content)
    if value is not None:
        os.setxattr(path, ATTRIBUTE.name, value)
    return path


class Files:
    """Files in a folder, each about the row of its number."""

    def __init__(self, here):
        self.here = here
        self.root = os.open(here.folder, os.O_PATH | os.O_DIRECTORY)
        here.fds.append(self.root)

    def batch(self, keys=KEYS):
        names = [f"{key.decode()}.bin" for key in keys]
        return FileBatch((self.root, str(self.here.folder)), names, keys, range(len(keys)))

    async def load(self, expected=None, *, verify=True):
        self.here.rows[:] = 0
        expected = expected or [None] * len(KEYS)
        return await self.here.io.load_files(self.batch(), expected, ATTRIBUTE, verify=verify)

    async def store(self, ended=None, *, victims=None, has_digest=True, fsync=False):
        ended = [] if ended is None else ended
        batch = self.batch()
        names = [(victims or {}).get(number, "") for number in range(len(KEYS))]
        how = FileStores(
            *(names, "marker", b"\1" * len(KEYS), ".w.", 0, ATTRIBUTE, None),
            fsync=fsync,
            wants_disk_bytes=True,
            has_digest=has_digest,
        )
        await self.here.io.store_files(batch, how, ended)
        return ended[0]


def test_a_file_is_served_if_its_bytes_are_right_and_left_to_python_else(tmp_path):
    async def scenario(here):
        files, content = Files(here), here.rows.copy()
        good = [content[number].tobytes() for number in range(8)]
        values = [value_of(key, data) for key, data in zip(KEYS, good, strict=True)]
        put(tmp_path, KEYS[0], good[0], value=values[0])
        put(tmp_path, KEYS[1], good[1][:-1], value=values[1])
        put(tmp_path, KEYS[2], good[2] + b"x", value=values[2])
        put(tmp_path, KEYS[3], good[3], value=values[2])
        put(tmp_path, KEYS[4], good[4])
        (tmp_path / "key 5.bin").symlink_to(put(tmp_path, b"elsewhere", good[5], value=values[5]))
        (tmp_path / "key 6.bin").mkdir()
        statuses, digests = await files.load()
        assert statuses == bytes([0, 1, 1, 1, 1, 1, 1, 1])
        assert ATTRIBUTE.prefix + digests[:16] == values[0]
        assert here.rows[0].tobytes() == good[0]
        statuses, digests = await files.load(verify=False)
        assert statuses == bytes([0, 1, 1, 0, 0, 1, 1, 1]), "only lengths are looked at"
        assert digests == b""
        os.setxattr(tmp_path / "key 0.bin", ATTRIBUTE.name, b"\xff" + values[0][1:])
        os.setxattr(tmp_path / "key 3.bin", ATTRIBUTE.name, values[3] + b"x")
        statuses, _ = await files.load(verify=False)
        assert statuses == bytes([1, 1, 1, 1, 0, 1, 1, 1]), "and whose checksum it is"

    run(scenario, "native", tmp_path)


def test_an_outcome_that_finds_no_memory_fails_its_own_store_alone(tmp_path):
    class Full(list):
        def append(self, _outcome):
            raise MemoryError

    async def scenario(here):
        files = Files(here)
        with pytest.raises(MemoryError):
            await asyncio.wait_for(files.store(Full()), WAIT_S)
        assert (await asyncio.wait_for(files.store(), WAIT_S)).statuses == bytes([1] * 8)

    run(scenario, "native", tmp_path)


def test_a_checksum_that_is_known_is_not_read_and_one_that_is_outdated_is(tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        files, content = Files(here), here.rows.copy()
        for key, row in zip(KEYS, content, strict=False):
            put(tmp_path, key, row.tobytes(), value=value_of(key, row))
        known = [value_of(key, row) for key, row in zip(KEYS, content, strict=False)]
        assert (await files.load(known)).statuses == bytes(8)
        assert not ops.counts()["get_xattr"]
        known[3] = value_of(KEYS[3], ZERO)
        assert (await files.load(known)).statuses == bytes(8)
        assert ops.counts()["get_xattr"] == 1
        assert (here.rows[:8] == content[:8]).all()
        assert not [fd for fd in ops.open_fds if fd != files.root]

    run(scenario, "native", tmp_path, ops=ops)


@pytest.mark.parametrize("call", ["open", "get_xattr", "preadv", "close"])
def test_a_call_that_fails_leaves_that_file_to_python(tmp_path, call):
    ops = FaultyFileOps()

    async def scenario(here):
        files, content = Files(here), here.rows.copy()
        for key, row in zip(KEYS, content, strict=False):
            put(tmp_path, key, row.tobytes(), value=value_of(key, row))
        ops.fail(5, on=call, when=lambda call: call.path.endswith("key 2.bin"))
        assert (await files.load()).statuses == bytes([0, 0, 1, 0, 0, 0, 0, 0])
        assert not ops.open_fds

    run(scenario, "native", tmp_path, ops=ops)


def test_which_files_there_are(tmp_path):
    async def scenario(here):
        files = Files(here)
        put(tmp_path, KEYS[1], b"")
        (tmp_path / "key 2.bin").mkdir()
        (tmp_path / "key 3.bin").symlink_to(tmp_path / "key 1.bin")
        root, names, *_ = files.batch()
        assert await here.io.has_files(root, [*names, "a/b/c"]) == bytes([0, 1, *[0] * 7])
        assert await here.io.has_files(root, []) == b""

    run(scenario, "native", tmp_path)


def test_a_look_after_names_does_not_wait_until_all_is_moved(tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store(range(8), [(fd, 0, 8)])
        hangs = []
        for row in range(2):  # as many as there are threads
            hangs.append(ops.hang(on="preadv", times=1))
            here.begin(Direction.LOAD, [row], [(fd, row * ROW, 1)])
            await until(hangs[-1].entered.is_set)
        ops.hang(on="preadv")
        for row in range(2, 8):
            here.begin(Direction.LOAD, [row], [(fd, row * ROW, 1)])
        files = Files(here)
        names = ["file", *(f"{number}.bin" for number in range(40))]
        looking = asyncio.create_task(here.io.has_files((files.root, str(tmp_path)), names))
        await asyncio.sleep(0)
        hangs[0].release()
        assert await asyncio.wait_for(looking, WAIT_S) == bytes([1, *[0] * 40])
        assert not any(task.done() for task in here.tasks[1:])

    run(scenario, "native", tmp_path, ops=ops, threads=1)


def test_a_load_is_cancelled_once_nothing_of_it_moves(tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        files = Files(here)
        for key in KEYS:
            put(tmp_path, key, ZERO, value=value_of(key, ZERO))
        hang = ops.hang(on="preadv")
        task = asyncio.create_task(files.load())
        here.tasks.append(task)
        await until(hang.entered.is_set)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        hang.release()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario, "native", tmp_path, ops=ops)


def test_a_row_is_a_new_file_with_its_checksum_and_what_is_there_stays(tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        files = Files(here)
        put(tmp_path, KEYS[1], b"there")
        put(tmp_path, b"old", b"x" * 2 * ROW, value=value_of(b"old", ZERO))
        (tmp_path / "key 3.bin").mkdir()
        stored = await files.store(victims={2: "old.bin"})
        assert list(stored.statuses) == [FILE_WRITTEN, FILE_PRESENT, FILE_WRITTEN, 2, *[0] * 4]
        assert (tmp_path / "key 1.bin").read_bytes() == b"there"
        assert not list(tmp_path.glob("*.tmp"))
        for number in (0, 2, 4, 5, 6, 7):
            path, row = tmp_path / f"key {number}.bin", here.rows[number].tobytes()
            assert path.read_bytes() == row
            assert os.getxattr(path, ATTRIBUTE.name) == value_of(KEYS[number], row)
            value = ATTRIBUTE.prefix + stored.digests[16 * number : 16 * number + 16]
            assert value == value_of(KEYS[number], row)
            assert stored.disk_bytes[number] == path.stat().st_blocks * 512
        assert not ops.open_fds

    run(scenario, "native", tmp_path, ops=ops)


def test_without_an_attribute_no_checksum_is_computed(tmp_path):
    async def scenario(here):
        stored = await Files(here).store(has_digest=False)
        assert (stored.statuses, stored.digests) == (bytes(8), b"")
        assert not os.listxattr(tmp_path / "key 0.bin")

    run(scenario, "native", tmp_path)


@pytest.mark.parametrize(
    "call", ["stat", "open", "pwritev", "set_xattr", "fsync", "close", "publish"]
)
def test_a_call_that_fails_leaves_that_block_to_python_and_no_temporary_file(tmp_path, call):
    ops = FaultyFileOps()

    async def scenario(here):
        ops.fail(5, on=call, when=lambda call: call.path.endswith("key 2.bin.w.2.tmp"))
        stored = await Files(here).store(fsync=True)
        assert stored.statuses == bytes([0, 0, 2, 0, 0, 0, 0, 0])
        assert not list(tmp_path.glob("*.tmp"))
        assert not ops.open_fds

    run(scenario, "native", tmp_path, ops=ops)


def test_a_store_that_is_cancelled_says_what_became_of_it_once_nothing_of_it_moves(tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        files, ended = Files(here), []
        hang = ops.hang(on="pwritev")
        task = asyncio.create_task(files.store(ended))
        here.tasks.append(task)
        await until(hang.entered.is_set)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        assert not ended
        hang.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        (stored,) = ended
        written = {path.name for path in tmp_path.glob("*.bin")}
        names = zip(files.batch().names, stored.statuses, strict=True)
        assert written == {name for name, status in names if status == FILE_WRITTEN}
        assert set(stored.statuses) <= {FILE_WRITTEN, FILE_NOT_BEGUN}

    run(scenario, "native", tmp_path, ops=ops)


def test_a_cancellation_that_comes_with_the_end_loses_no_outcome(tmp_path):
    async def scenario(here):
        ended: list[StoredFiles] = []
        task = asyncio.create_task(Files(here).store(ended))
        here.tasks.append(task)
        deliver = here.io._deliver

        def deliver_and_cancel(engine):
            deliver(engine)
            task.cancel()

        here.io._loop.add_reader(here.io._engine.fd, deliver_and_cancel, here.io._engine)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [stored.statuses for stored in ended] == [bytes(8)]

    run(scenario, "native", tmp_path)


def test_after_closing_no_file_is_looked_at(tmp_path):
    async def scenario(here):
        files = Files(here)
        await here.io.close()
        with pytest.raises(TierClosedError):
            await files.load()
        with pytest.raises(TierClosedError):
            await files.store()
        with pytest.raises(TierClosedError):
            await here.io.has_files(*files.batch()[:2])

    run(scenario, "native", tmp_path)
