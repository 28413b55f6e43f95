"""What only native threads do: they are replaced while they hang, and queued work is bounded."""

import asyncio

import pytest
from block_io.worlds import is_built, run, until
from faulty_files import FaultyFileOps

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import BusyError, TierClosedError

if not is_built():
    pytest.skip("the native module is not built", allow_module_level=True)

from kvoffload_async.block_io import native_io


def test_threads_that_hang_are_replaced_and_what_they_hold_ends_when_they_return(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(native_io, "_HUNG_AFTER_S", 0.02)
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        await here.store(range(8), [(fd, 0, 8)])
        hang = ops.hang(on="preadv", times=2)
        stuck = [here.begin(Direction.LOAD, [row], [(fd, 0, 1)]) for row in range(2)]
        await until(lambda: sum(call.name == "preadv" for call in ops.calls) == 2)
        assert (await here.load(range(2, 8), [(fd, 0, 6)])).errors == {}
        assert not any(task.done() for task in stuck)
        hang.release()
        assert all([(await task).errors == {} for task in stuck])

    run(scenario, "native", tmp_path, ops=ops, threads=1)


def test_a_batch_over_the_bound_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(native_io, "_QUEUED", 1)
    ops = FaultyFileOps()

    async def scenario(here):
        fd = here.file()
        hang = ops.hang(on="pwritev")
        here.begin(Direction.STORE, range(4), [(fd, 0, 4)])
        await until(hang.entered.is_set)
        tasks = [here.begin(Direction.STORE, [row], [(fd, 0, 1)]) for row in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="1 batches are queued"):
            await tasks[-1]
        hang.release()

    run(scenario, "native", tmp_path, ops=ops, threads=1)


def test_after_closing_nothing_is_moved(tmp_path):
    async def scenario(here):
        fd = here.file()
        await here.io.close()
        with pytest.raises(TierClosedError):
            await here.store([0], [(fd, 0, 1)])

    run(scenario, "native", tmp_path)


def test_a_defect_in_the_arguments_is_an_error_of_that_batch(tmp_path):
    async def scenario(here):
        fd = here.file()
        with pytest.raises(ValueError, match="rows: 99 is no row"):
            await here.store([99], [(fd, 0, 1)])
        assert (await here.store([0], [(fd, 0, 1)])).errors == {}

    run(scenario, "native", tmp_path)
