"""How Python threads share a batch of extents."""

import asyncio
from types import SimpleNamespace

import pytest
from block_io.worlds import world
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.block_io.contract import Run
from kvoffload_async.block_io.python_io import _Batch
from kvoffload_async.errors import BusyError, TierUnavailableError
from kvoffload_async.tiers.files.digests import BlockDigester

SLOT = 4096


def batch_of(mover, rows):
    return _Batch(mover, rows, BlockDigester("d:0:4"), None, is_store=True, is_direct=False)


def parts(runs, part_slots, idle_threads):
    rows = range(sum(run.length for run in runs))
    batch = batch_of(SimpleNamespace(slot_bytes=SLOT), rows)
    batch.divide(runs, part_slots, idle_threads)
    return list(batch.parts)


def sizes(num_blocks, part_slots, idle_threads):
    cut = parts([Run(3, 0, num_blocks)], part_slots, idle_threads)
    assert all(part.num_bytes == SLOT * sum(run.length for run in part.runs) for part in cut)
    return [part.num_bytes // SLOT for part in cut]


@given(
    st.lists(st.tuples(st.integers(3, 5), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 64),
    st.integers(0, 8),
)
def test_parts_are_all_blocks_in_order_and_each_is_of_one_file(files, piece, threads):
    runs = [Run(fd, number * 1000 * SLOT, length) for number, (fd, length) in enumerate(files)]
    cut = parts(runs, piece, threads)
    slots = [
        (run.fd, run.offset + at * SLOT)
        for part in cut
        for run in part.runs
        for at in range(run.length)
    ]
    assert slots == [(fd, offset + at * SLOT) for fd, offset, n in runs for at in range(n)]
    starts = [part.start for part in cut]
    assert starts == [sum(p.num_bytes for p in cut[:at]) // SLOT for at in range(len(cut))]
    assert all(part.num_bytes <= piece * SLOT for part in cut)
    assert all(len({run.fd for run in part.runs}) == 1 for part in cut)


def test_a_batch_that_threads_wait_for_is_cut_smaller_but_not_into_scraps():
    assert sizes(64, 64, 0) == [64]
    assert sizes(128, 64, 2) == [16] * 8
    assert sizes(64, 64, 8) == [16] * 4, "a quarter of a piece at least"
    assert sizes(2048, 64, 2) == [64] * 32, "a piece at most"
    assert sizes(3, 1, 2) == [1] * 3


class Mover:
    """Moves nothing; other threads come in while a run is written."""

    def __init__(self, others):
        self.slot_bytes, self.rows = SLOT, list
        self.written = []
        self.others = others

    def move(self, run, rows, encode, *, is_write, is_direct):
        for other in [self.others.pop()] if self.others else []:
            other(self.batch)
        self.written += rows
        return len(rows)


OTHERS = st.lists(st.sampled_from([_Batch.move, _Batch.withdraw, lambda batch: None]), max_size=8)


@given(st.integers(1, 30), OTHERS)
def test_several_threads_move_every_part_once_unless_it_is_withdrawn(num_rows, others):
    withdraws = _Batch.withdraw in others[-num_rows:]
    mover = Mover(others)
    batch = mover.batch = batch_of(mover, range(num_rows))
    batch.divide([Run(3, 0, num_rows)], 1, 0)
    batch.move()
    assert len(set(mover.written)) == len(mover.written)
    assert withdraws or sorted(mover.written) == list(range(num_rows))
    assert not batch.parts
    assert batch.withdraw(), "no thread is in it any more"


def test_a_batch_is_withdrawn_once_no_thread_moves_a_part_of_it():
    seen = []
    mover = Mover([lambda batch: seen.append(batch.withdraw())])
    batch = mover.batch = batch_of(mover, range(4))
    batch.divide([Run(3, 0, 4)], 1, 0)
    batch.move()
    assert (seen, mover.written) == ([False], [0])


def test_a_defect_fails_its_batch_and_no_other(tmp_path):
    async def scenario():
        async with world("python", tmp_path) as here:
            fd = here.file()
            keys = [b"not as many keys as rows"]
            with pytest.raises(TierUnavailableError, match="copying blocks raised"):
                await here.store(range(12), [(fd, 0, 12)], keys)
            assert (await here.store(range(12), [(fd, 0, 12)])).errors == {}

    asyncio.run(scenario())


def test_a_batch_that_the_pool_refuses_fails(tmp_path, monkeypatch):
    async def refuse(*_args, **_options):
        raise BusyError("full")

    async def scenario():
        async with world("python", tmp_path) as here:
            fd = here.file()
            with monkeypatch.context() as patch:
                patch.setattr(here.io._io, "run", refuse)
                with pytest.raises(BusyError):
                    await here.store(range(2), [(fd, 0, 2)])
            assert (await here.store(range(2), [(fd, 0, 2)])).errors == {}

    asyncio.run(scenario())
