"""Both implementations move extents alike: bytes, checksums, errors, cancellation, fairness."""

import asyncio
import errno
import itertools
import os
import tempfile
import threading
from pathlib import Path

import pytest
from block_io.worlds import IMPLEMENTATIONS, ROW, is_built, key_of, run, until, world
from faulty_files import FaultyFileOps
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.abc.tier import Direction
from kvoffload_async.block_io.contract import ENDED_EARLY

MIB = 1 << 20
KEYS = [key_of(number) for number in range(64)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(data=st.data())
def test_what_is_stored_is_loaded_with_the_checksums_of_the_digester(implementation, data):
    if implementation == "native" and not is_built():
        pytest.skip("the native module is not built")
    count = data.draw(st.integers(1, 12), "blocks")
    row_bytes = data.draw(st.sampled_from([1, 512, 4096, 70_000, 600_000]), "row bytes")
    slot_bytes = row_bytes + data.draw(st.sampled_from([0, 1, 4000]), "pad")
    rows = data.draw(st.permutations(range(12)), "rows")[:count]
    lengths = []
    while sum(lengths) < count:
        lengths.append(data.draw(st.integers(1, count - sum(lengths)), "run"))
    files = [data.draw(st.integers(0, 1), "file") for _ in lengths]

    async def scenario(here):
        fds, runs, at = [here.file("a"), here.file("b")], [], 100
        for length, file in zip(lengths, files, strict=True):
            runs.append((fds[file], at, length))
            at += (length + 2) * slot_bytes
        content = here.rows.copy()
        keys = KEYS[:count]
        stored = await here.store(rows, runs, keys)
        assert stored == ({}, here.digests(rows, keys))
        here.rows[:] = 0
        targets = rows[::-1]
        assert await here.load(targets, runs, keys) == stored
        assert (here.rows[targets] == content[rows]).all()
        assert (await here.load(targets, runs)).digests == b""
        assert not here.rows[sorted(set(range(12)) - set(rows))].any()

    with tempfile.TemporaryDirectory() as folder:
        options = {"num_rows": 12, "row_bytes": row_bytes, "slot_bytes": slot_bytes}
        run(scenario, implementation, Path(folder), **options)


def test_a_pad_is_written_as_zeros(implementation, tmp_path):
    async def scenario(here):
        fd = here.file()
        os.write(fd, b"\xff" * 4 * 5000)
        assert (await here.store([3, 1], [(fd, 0, 2)])).errors == {}
        content = (tmp_path / "file").read_bytes()
        assert content[ROW:5000] == content[5000 + ROW : 10_000] == bytes(5000 - ROW)
        assert content[10_000:] == b"\xff" * 10_000

    run(scenario, implementation, tmp_path, slot_bytes=5000)


@pytest.mark.parametrize("missing", [1, ROW, ROW + 1])
def test_what_lies_behind_the_end_of_a_file_is_told_and_the_last_pad_is_not_missed(
    implementation, tmp_path, missing
):
    async def scenario(here):
        fd = here.file()
        await here.store(range(4), [(fd, 0, 4)])
        os.ftruncate(fd, 3 * 5000 + ROW)
        assert (await here.load(range(4), [(fd, 0, 4)])).errors == {}
        os.ftruncate(fd, 3 * 5000 + ROW - missing)
        moved = await here.load(range(6), [(fd, 0, 4), (fd, 5000, 2)], KEYS[:6])
        assert moved.errors == {3: ENDED_EARLY}
        assert moved.digests[: 3 * 16] == here.digests(range(3), KEYS[:3])

    run(scenario, implementation, tmp_path, slot_bytes=5000)


def test_a_run_that_fails_takes_no_other_with_it(implementation, tmp_path):
    async def scenario(here):
        fd, closed = here.file(), os.open(tmp_path, os.O_RDONLY)
        for move in (here.store, here.load):
            runs = [(fd, 0, 2), (closed, 0, 3), (fd, 2 * ROW, 2)]
            moved = await move(range(7), runs, KEYS[:7])
            assert moved.errors.keys() == {2, 3, 4}
            assert set(moved.errors.values()) <= {errno.EBADF, errno.EISDIR}
            assert moved.digests[:32] == here.digests([0, 1], KEYS[:2])
            assert moved.digests[80:] == here.digests([5, 6], KEYS[5:7])
        os.close(closed)

    run(scenario, implementation, tmp_path)


def test_calls_that_move_less_than_asked_are_continued(implementation, tmp_path):
    ops = FaultyFileOps()
    ops.shorten(1000, on="pwritev")
    ops.shorten(1500, on="preadv")

    async def scenario(here):
        fd, content = here.file(), here.rows.copy()
        assert (await here.store([5, 2, 9], [(fd, 7, 3)], KEYS[:3])).errors == {}
        moved = await here.load([1, 2, 3], [(fd, 7, 3)], KEYS[:3])
        assert moved == ({}, here.digests([1, 2, 3], KEYS[:3]))
        assert (here.rows[1:4] == content[[5, 2, 9]]).all()

    run(scenario, implementation, tmp_path, ops=ops, slot_bytes=5000)


def test_more_buffers_than_one_call_takes_are_several_calls(implementation, tmp_path):
    async def scenario(here):
        fd, content = here.file(), here.rows.copy()
        assert (await here.store(range(1500), [(fd, 0, 1500)])).errors == {}
        here.rows[:] = 0
        assert (await here.load(range(1500), [(fd, 0, 1500)])).errors == {}
        assert (here.rows == content).all()

    options = {"num_rows": 1500, "row_bytes": 16, "slot_bytes": 20}
    run(scenario, implementation, tmp_path, **options)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_a_call_is_told_by_its_number(implementation, tmp_path, call):
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store(range(3), [(fd, 0, 3)])
        ops.fail(errno.ENOSPC, on=call)
        move = here.store if call == "pwritev" else here.load
        assert (await move(range(3), [(fd, 0, 3)])).errors == dict.fromkeys(range(3), errno.ENOSPC)

    run(scenario, implementation, tmp_path, ops=ops)


def test_a_write_without_progress_is_an_error_and_a_read_an_end(implementation, tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store(range(3), [(fd, 0, 3)])
        ops.shorten(0, on="pwritev preadv")
        assert (await here.store([1], [(fd, 0, 1)])).errors == {0: errno.EIO}
        assert (await here.load([1], [(fd, 0, 1)])).errors == {0: ENDED_EARLY}

    run(scenario, implementation, tmp_path, ops=ops)


def test_a_batch_is_cancelled_once_nothing_of_it_moves(implementation, tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store(range(8), [(fd, 0, 8)])
        hang = ops.hang(on="preadv")
        moving = here.begin(Direction.LOAD, range(8, 16), [(fd, 0, 8)])
        await until(hang.entered.is_set)
        for _ in range(3):
            moving.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not moving.done(), "a call still touches the rows"
        hang.release()
        with pytest.raises(asyncio.CancelledError):
            await moving
        calls = len(ops.calls)
        assert (await here.load([0], [(fd, 0, 1)])).errors == {}
        assert len(ops.calls) == calls + 1, "what was withdrawn is not done"

    run(scenario, implementation, tmp_path, ops=ops, threads=1)


def test_a_batch_that_nobody_has_begun_is_cancelled_at_once(implementation, tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store([0], [(fd, 0, 1)])
        hang = ops.hang(on="preadv pwritev")
        busy = [here.begin(d, [n], [(fd, 0, 1)]) for n, d in enumerate(DIRECTIONS * 3)]
        await until(lambda: len(ops.calls) >= 4)
        waiting = here.begin(Direction.STORE, [1], [(fd, 0, 1)])
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=60)
        assert waiting.cancelled()
        hang.release()
        assert all(moved.errors == {} for moved in [await task for task in busy])

    run(scenario, implementation, tmp_path, ops=ops, threads=2)


DIRECTIONS = [Direction.LOAD, Direction.STORE]


@pytest.mark.parametrize("urgent", DIRECTIONS)
def test_a_batch_does_not_wait_until_all_of_the_other_direction_is_done(
    implementation, tmp_path, urgent
):
    ops = FaultyFileOps()
    other = {Direction.LOAD: Direction.STORE, Direction.STORE: Direction.LOAD}[urgent]
    calls = {Direction.LOAD: "preadv", Direction.STORE: "pwritev"}

    async def scenario(here):
        fd = here.file()
        await here.store(range(12), [(fd, 0, 12)])
        has_begun = threading.Event()
        hang = ops.hang(on=calls[other], when=lambda _call: not has_begun.is_set())
        # Native threads take turns of several calls; in Python, a direction has threads of its own.
        most = 8 if implementation == "native" else 0
        passing = itertools.count(1)
        later = ops.hang(on=calls[other], when=lambda _call: next(passing) > most)
        large = [
            here.begin(other, [row], [(fd, row * MIB, 1)]) for _ in range(8) for row in range(12)
        ]
        await until(hang.entered.is_set)
        small = here.begin(urgent, [15], [(fd, 0, 1)])
        for _ in range(5):
            await asyncio.sleep(0)
        has_begun.set()
        hang.release()
        assert (await small).errors == {}, "while the rest of the other direction hangs"
        later.release()
        for task in large:
            assert (await task).errors == {}

    run(scenario, implementation, tmp_path, ops=ops, row_bytes=MIB, threads=2)


@pytest.mark.parametrize("implementation", ["native"], indirect=True)
def test_a_thread_writes_to_another_file_than_one_that_is_slow(implementation, tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        slow, other = here.file("slow"), here.file("other")
        hang = ops.hang(on="pwritev", times=1)
        tasks = [here.begin(Direction.STORE, [0], [(slow, 0, 1)])]
        await until(hang.entered.is_set)
        hold = ops.hang(on="pwritev", times=1)
        tasks.append(here.begin(Direction.STORE, [1], [(other, 0, 1)]))
        await until(hold.entered.is_set)
        tasks += [here.begin(Direction.STORE, [n], [(slow, n * ROW, 1)]) for n in (2, 3)]
        tasks += [here.begin(Direction.STORE, [4], [(other, 4 * ROW, 1)])]
        for _ in range(5):
            await asyncio.sleep(0)
        hold.release()
        await asyncio.wait(tasks[1:], timeout=60)
        hang.release()
        assert all([(await task).errors == {} for task in tasks])
        written = [call.path.rpartition("/")[2] for call in ops.calls if call.name == "pwritev"]
        assert written == ["slow", "other", "other", "slow", "slow"]

    run(scenario, implementation, tmp_path, ops=ops, threads=2)


def test_a_large_batch_is_moved_by_several_threads(implementation, tmp_path):
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store(range(16), [(fd, 0, 16)])
        hang = ops.hang(on="preadv", times=1)
        before = len(ops.calls)
        task = here.begin(Direction.LOAD, range(16), [(fd, 0, 16)])
        await until(hang.entered.is_set)
        await until(lambda: len(ops.calls) - before >= 4)  # the others do the rest
        hang.release()
        assert (await task).errors == {}

    run(scenario, implementation, tmp_path, ops=ops, row_bytes=MIB, threads=2)


def test_when_it_is_closed_nobody_holds_the_rows(implementation, tmp_path):
    async def scenario():
        async with world(implementation, tmp_path) as here:
            await here.store([0], [(here.file(), 0, 1)])
            with pytest.raises(ValueError, match="cannot resize"):
                here.rows.resize((1, ROW))
        return here

    asyncio.run(scenario()).rows.resize((1, ROW))
