"""No error, cancellation or race leaks room."""

import asyncio
import concurrent.futures
import errno
import gc
import itertools
import threading

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import BLOCK, TRIES, FsDirectory
from fs.spaces import ROOM_FOR_8, K, check, end_of, rescan, room_for, start
from log_records import errors_with_frames
from sweeps import shares

from kvoffload_async.errors import ConfigError, TierError, TierUnavailableError, drop_tracebacks
from kvoffload_async.testing.harness import TierHarness

SHARES = 12


def store_or_raise(harness: TierHarness, keys) -> dict:
    """Store; an error of the whole job is let go of as the tier's actor does."""
    try:
        return dict(harness.store(keys))
    except (OSError, TierError, ExceptionGroup) as error:
        drop_tracebacks(error)
        return {0: str(error)}


@shares(SHARES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_no_error_at_any_call_of_a_store_leaks_room(tmp_path, code, caplog, share):
    """Every call of a job that evicts, those of the shared count included."""
    for number in itertools.count(1 + share, SHARES):
        directory = FsDirectory(tmp_path / str(number))
        ops = FaultyFileOps()
        with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
            harness.store(K[:6])
            ops.fail(code, at=len(ops.calls) + number)
            last = len(ops.calls) + number
            failures = store_or_raise(harness, K[10:14])
            was_hit = len(ops.calls) >= last
            ops.heal()
            rescan(harness)
            rescan(harness)
            harness.tier._files.sweep_leftover_temps()
            assert harness.store(K[20:22]) == {}
            check(directory, harness, ROOM_FOR_8)
        assert directory.every_block_is_whole()
        assert not errors_with_frames(caplog.records)
        if not was_hit:
            assert failures == {}
            break
    assert number > 30


def test_a_temporary_file_that_could_not_be_removed_goes_with_the_next_heartbeat(directory):
    """Until then, its room stays reserved."""
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        ops.fail(errno.EIO, on="pwritev unlink", when=is_temp)
        assert sorted(harness.store(K[:3])) == [0, 1, 2]
        housekeeping, left = harness.tier._housekeeping, set(directory.temps())
        assert len(left) >= 3
        with pytest.raises(OSError, match="injected"):
            harness.run(housekeeping._tick())
        assert set(directory.temps()) == left
        ops.heal()
        harness.run(housekeeping._tick())
        assert not directory.temps()
        assert not harness.tier._files.leftover_temps
        check(directory, harness, ROOM_FOR_8)


@pytest.mark.parametrize("num_before", [0, 8])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_temporary_files_that_cannot_be_removed_do_not_exceed_the_capacity(
    directory, num_before, code
):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:num_before])
        ops.fail(code, on="publish")
        ops.fail(code, on="unlink", when=is_temp)
        for first in range(100, 140, 4):
            assert harness.store(K[first : first + 4])
            rescan(harness)
            assert directory.disk_bytes() <= ROOM_FOR_8
        assert directory.temps()
        ops.heal()
        harness.run(harness.tier._housekeeping._tick())
        assert harness.store(K[200:204]) == {}
        rescan(harness)
        check(directory, harness, ROOM_FOR_8)


def test_a_count_that_cannot_be_told_costs_no_block(directory, caplog):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        number = iter(range(100))
        # The first lock of a job is for the reservation, the second for the settlement, which is
        # tried with a new descriptor, too.
        ops.fail(errno.EIO, on="lock", when=lambda _call: next(number) in {1, 2})
        assert harness.store(K[:2]) == {}
        assert "was not updated" in caplog.text
        assert not errors_with_frames(caplog.records)
        assert harness.store(K[2:4]) == {}
        check(directory, harness, ROOM_FOR_8)


def test_a_cancelled_store_is_accounted_for(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        hang = ops.hang(on="pwritev", when=is_temp)
        harness.fill(K[:3], range(3))
        job = harness.job(K[:3], range(3), is_promotion=False)
        storing = start(harness, harness.tier.store(job))
        assert hang.entered.wait(60)
        harness.on_loop(storing[0].cancel)
        hang.release()
        with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
            harness.run(end_of(storing))
        storing.clear()
        harness.on_loop(gc.collect)  # there, so that the loop has let go of the task
        assert directory.blocks() == set(K[:3])
        check(directory, harness, ROOM_FOR_8)


def test_a_store_that_is_cancelled_before_its_end_has_begun_leaves_no_temporary_file(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        if harness.tier._native is None:
            pytest.skip("a job that Python writes has no end of its own")
        end_waits = threading.Event()

        async def run(_call):
            end_waits.set()
            await asyncio.get_running_loop().create_future()

        harness.tier._native._run_store = run
        harness.fill(K[:1], range(1))
        ops.fail(errno.EIO, on="pwritev unlink", when=is_temp, times=2)
        storing = start(harness, harness.tier.store(harness.job(K[:1], [0], is_promotion=False)))
        assert end_waits.wait(60)
        harness.on_loop(storing[0].cancel)
        with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
            harness.run(end_of(storing))
        storing.clear()
        assert directory.temps()
        harness.tier._files.sweep_leftover_temps()
        assert not directory.temps()


def test_a_store_that_the_pool_refuses_gives_its_room_back(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:6])
        io = harness.tier._env.io
        real = io.run
        for refused in range(3):
            number = itertools.count()

            async def run(direction, call, *, helpers=0, number=number, refused=refused):
                if next(number) == refused:
                    raise TierUnavailableError("refused")
                return await real(direction, call, helpers=helpers)

            io.run = run
            first = 10 * (refused + 1)
            store_or_raise(harness, K[first : first + 4])
            assert next(number) > min(refused, 1)  # native code needs no third call
            io.run = real
            rescan(harness)
            check(directory, harness, ROOM_FOR_8)


def test_two_jobs_that_store_the_same_new_blocks_both_succeed(directory):
    with directory.open(capacity_bytes=room_for(41)) as harness:
        harness.fill(K[:8], range(8))

        async def both():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        harness.tier.store(harness.job(K[:8], range(8), is_promotion=False))
                    )
                    for _ in range(3)
                ]
            return [task.result() for task in tasks]

        assert harness.run(both()) == [{}, {}, {}]
        check(directory, harness, room_for(41))


def test_a_job_that_loses_the_race_for_a_block_that_then_fails_does_not_claim_it(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=room_for(41)) as harness:
        harness.fill(K[:1], [0])
        hang = ops.hang(on="pwritev", when=is_temp, times=1)

        jobs = [harness.job(K[:1], [0], is_promotion=False) for _ in range(2)]
        first = start(harness, harness.tier.store(jobs[0]))
        assert hang.entered.wait(60)
        ops.fail(errno.EIO, on="publish", times=2 * TRIES)
        assert sorted(harness.run(harness.tier.store(jobs[1]))) == [0]
        hang.release()
        assert sorted(harness.run(end_of(first))) == [0]
        assert not directory.blocks()
        check(directory, harness, room_for(41))


@pytest.mark.usefixtures("folders_on_disk")
@pytest.mark.parametrize("capacity_bytes", [1, BLOCK, BLOCK + 5 * 4096 - 1])
def test_a_capacity_below_one_block_is_refused(directory, capacity_bytes):
    with pytest.raises(ConfigError, match=r"capacity_bytes: .* give at least \d+"):
        directory.open(capacity_bytes=capacity_bytes)
    assert not list((directory.folder / ".writers").iterdir())


def test_the_least_capacity_holds_a_block(directory):
    with pytest.raises(ConfigError) as raised:
        directory.open(capacity_bytes=1)
    least = int(str(raised.value).rpartition(" ")[2])
    with directory.open(capacity_bytes=least) as harness:
        for key in K[:5]:
            assert harness.store([key]) == {}
            assert directory.blocks() == {key}
            check(directory, harness, least)
