"""How a `slab` tier moves blocks: which calls, to which files, by which threads."""

import asyncio
from collections import Counter

from faulty_files import FaultyFileOps
from slab.stores import BLOCK, KIB, K, entered, sound

from kvoffload_async.testing.harness import make_job
from kvoffload_async.tiers.slab.addresses import segment_of


def test_a_job_is_one_write_of_its_blocks_and_one_append(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, segment_bytes=512 * KIB) as harness:
        harness.store(K[:1])
        before = len(ops.calls)
        assert harness.store(K[1:9]) == {}
        # Is the folder that of old, and have lock, journal and segment still names?
        assert ops.counts(before) == {"pwritev": 1, "pwrite": 1, "stat": 1, "fstat": 3}
        before = len(ops.calls)
        assert harness.load(K[:9], range(20, 29)) == {}
        assert ops.counts(before) == {"preadv": 1, "stat": 1, "fstat": 2}


def test_rows_and_slots_in_any_order_are_joined_where_they_are_neighbours(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:8], [9, 8, 3, 4, 5, 30, 20, 21])
        before = len(ops.calls)
        slot_of = {7: 40, 0: 3, 3: 7, 2: 6, 1: 5}
        assert harness.load([K[i] for i in slot_of], slot_of.values()) == {}
        assert ops.counts(before)["preadv"] == 2
        assert all(harness.holds(K[i], slot) for i, slot in slot_of.items())


def test_present_blocks_cost_no_call(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:5])
        before = len(ops.calls)
        assert harness.store(K[:5]) == {}
        assert not ops.calls[before:]


def test_python_threads_cut_a_large_job_into_pieces_and_share_them(slab_store, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "0")
    ops = FaultyFileOps()
    with slab_store.open(ops, piece_bytes=2 * BLOCK, segment_bytes=512 * KIB) as harness:
        harness.store(K[:20])
        assert ops.counts()["pwritev"] == 10
        hang = ops.hang(on="preadv", times=1)

        async def load():
            task = asyncio.create_task(
                harness.tier.load(make_job(900, K[:20], range(20, 40), is_promotion=True))
            )
            await entered(hang)
            while ops.counts()["preadv"] < 10:  # noqa: ASYNC110 - counted by other threads
                await asyncio.sleep(0)  # the others do the rest
            hang.release()
            return await task

        assert harness.run(load()) == {}
        assert all(harness.holds(K[i], 20 + i) for i in range(20))


def test_jobs_go_to_different_files_so_that_they_can_be_written_at_once(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, stripes=2) as harness:
        for start in range(0, 8, 2):
            harness.store(K[start : start + 2])
        assert len(harness.tier._store.catalog.segments) == 2, "made at once"
        written = [call.path for call in ops.calls if call.name == "pwritev"]
        assert written[:2] == written[2:]
        assert len(set(written)) == 2
        assert harness.load(K[:8]) == {}
    with slab_store.open(stripes=2) as harness:
        assert harness.announced() == set(K[:8])


def test_a_large_job_is_written_to_several_files(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, stripes=2, piece_bytes=2 * BLOCK) as harness:
        assert harness.store(K[:16]) == {}
        written = [call.path for call in ops.calls if call.name == "pwritev"]
        assert sorted(Counter(written).values()) == [4, 4]
        addresses = harness.tier._store.catalog.find(K[:16])
        assert [segment_of(address) for address in addresses] == [0, 0, 1, 1] * 4
        assert harness.load(K[15::-1]) == {}
        sound(harness.tier)


def test_calls_that_move_less_than_asked_are_continued(slab_store):
    ops = FaultyFileOps()
    ops.shorten(1000, on="pwritev")
    ops.shorten(1500, on="preadv")
    ops.shorten(100, on="pwrite")
    with slab_store.open(ops) as harness:
        assert harness.store(K[:6], [4, 5, 9, 1, 2, 3]) == {}
        assert harness.load(K[:6], range(20, 26)) == {}
        assert all(harness.holds(K[i], 20 + i) for i in range(6))
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:6])
