"""A wait for the device that fails: a later one that succeeds proves nothing."""

import asyncio
import errno

import pytest
from faulty_files import FaultyFileOps
from slab.stores import K, SlabStore, entered, is_journal, is_segment, sound

from kvoffload_async.testing.harness import make_job


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("what", [is_segment, is_journal], ids=["segment", "journal"])
def test_blocks_that_may_not_be_on_the_device_fail_and_those_before_them_stay(
    slab_store, what, code
):
    ops = FaultyFileOps()
    with slab_store.open(ops, fsync=True) as harness:
        assert harness.store(K[:4]) == {}
        ops.fail(code, on="fdatasync", when=what, times=1)
        failures = harness.store(K[4:8])
        assert sorted(failures) == [0, 1, 2, 3]
        assert harness.contains(K[:8]) == set(K[:4])
        assert harness.load(K[:4]) == {}
        assert harness.store(K[4:8]) == {}
        assert harness.load(K[4:8]) == {}
        sound(harness.tier)
    with SlabStore(slab_store.root).open() as harness:
        assert harness.announced() == set(K[:8])
        assert harness.load(K[:8]) == {}


def test_a_failed_wait_fails_every_job_that_has_written_to_that_segment_since_the_last_good_one(
    slab_store,
):
    ops = FaultyFileOps()
    with slab_store.open(ops, fsync=True, io_threads=4) as harness:
        assert harness.store(K[:4]) == {}
        harness.fill(K[4:8], range(4, 8))
        hang = ops.hang(on="fdatasync", when=is_segment, times=1)

        async def both():
            jobs = [
                make_job(900 + i, K[i : i + 2], range(i, i + 2), is_promotion=False) for i in (4, 6)
            ]
            first = asyncio.create_task(harness.tier.store(jobs[0]))
            await entered(hang)
            ops.fail(errno.EIO, on="fdatasync", when=is_segment, times=1)
            second = await harness.tier.store(jobs[1])
            hang.release()
            return await first, second

        for failures in harness.run(both()):
            assert sorted(failures) == [0, 1]
        sound(harness.tier)
