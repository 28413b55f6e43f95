"""The count of bytes that bounded tiers share: compared by `inspect`, set right by `gc`."""

import asyncio
import itertools
import json
import os
import signal
from contextlib import aclosing

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import KIB
from fs.maintenance.stores import disk_bytes, truncate, usage_of
from fs.spaces import K, end_of, start

from kvoffload_async.abc.maintenance import GcOptions, MaintenanceControl, Problem
from kvoffload_async.facade.maintenance import find_stores
from kvoffload_async.testing.harness import TierHarness
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.maintenance import inspection
from kvoffload_async.tiers.fs.writers import WriterRegistry


def test_a_count_that_is_right_is_no_problem(bounded):
    found = bounded.run("inspect")
    off_bytes = abs(found["counted_bytes"] - found["disk_bytes"])
    assert off_bytes <= found["count_tolerance_bytes"] < 0.1 * found["disk_bytes"]
    assert "bytes counted" in bounded.command.run("store", "inspect", bounded.root).stdout


def test_a_count_that_is_wrong_is_one_until_gc(bounded):
    for path in bounded.blocks[::2]:
        path.unlink()
    (line,) = bounded.complaints("inspect")
    assert "bytes are counted and" in line
    collected = bounded.run("gc")
    assert collected["counted_bytes"] == usage_of(bounded).settled_bytes
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)
    assert bounded.run("inspect")["problems"] == []


def test_a_count_that_is_unreadable_is_made_anew_by_gc(bounded):
    (bounded.folder / ".usage").write_text("[1, {" + "x" * 16_384)
    (line,) = bounded.complaints("inspect")
    assert "the count of bytes is unreadable" in line
    bounded.run("gc")
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)


def test_the_count_is_right_after_gc_has_removed_something(bounded):
    for path in bounded.blocks[::3]:
        truncate(path)
    dead = bounded.writer()
    bounded.temp(dead.writer_id)
    dead.die()
    bounded.unknown_file()
    bounded.run("gc", "--corrupt", "--unknown-files")
    usage = usage_of(bounded)
    assert usage.settled_bytes == disk_bytes(bounded.folder)
    assert usage.writers == {}


def test_a_count_that_cannot_be_set_right_is_a_failure(bounded, monkeypatch):
    def refuse(self, fd, data, offset):
        raise OSError(28, "No space left on device")

    registered = WriterRegistry.register

    def register(self):
        registered(self)
        monkeypatch.setattr(FileOps, "pwrite", refuse)

    monkeypatch.setattr(WriterRegistry, "register", register)
    failures = bounded.run("gc", exit_code=1)["failures"]
    assert failures == ["the count of bytes: No space left on device"]
    assert list((bounded.folder / ".writers").iterdir()) == []


def test_ctrl_c_in_the_middle_of_gc_leaves_the_count_right(bounded, monkeypatch):
    monkeypatch.setattr(inspection, "BATCH_BYTES", 4096)
    for path in bounded.blocks:
        truncate(path)
    num_blocks = len(bounded.blocks)
    check = inspection.BlockChecker.check
    calls = itertools.count()

    def and_interrupt(self, blocks):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return check(self, blocks)

    monkeypatch.setattr(inspection.BlockChecker, "check", and_interrupt)
    result = bounded.command.run("store", "gc", bounded.root, "--corrupt", "--json")
    assert result.exit_code == 130
    (collected,) = json.loads(result.stdout)["namespaces"]
    assert len(collected["corrupt"]) == num_blocks - len(bounded.blocks) < num_blocks
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)


def test_whoever_closes_gc_in_the_middle_leaves_the_count_right(bounded, monkeypatch):
    monkeypatch.setattr(inspection, "BATCH_BYTES", 4096)
    for path in bounded.blocks:
        truncate(path)
    num_blocks = len(bounded.blocks)

    async def first_finding():
        (namespace,) = await find_stores(bounded.root)
        async with aclosing(
            namespace.gc(GcOptions(corrupt=True), MaintenanceControl())
        ) as findings:
            await anext(findings)

    asyncio.run(first_finding())
    assert 0 < len(bounded.blocks) < num_blocks
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)


def problems_of(directory):
    async def inspect():
        (store,) = await find_stores(directory.root)
        return [f async for f in store.inspect(MaintenanceControl()) if isinstance(f, Problem)]

    return asyncio.run(inspect())


@pytest.fixture
def replacing(directory):
    """A tier whose store has renamed a victim, and hangs before it overwrites it."""
    size = 1 << 16
    ops = FaultyFileOps()
    capacity_bytes = 20 * KIB + 2 * size
    with TierHarness(directory.tier(ops, capacity_bytes=capacity_bytes), 8, size) as harness:
        assert harness.store(K[:2]) == {}
        hang = ops.hang(on="pwritev", when=is_temp)
        harness.fill(K[2:3], [3])
        job = harness.job(K[2:3], [3], is_promotion=False)
        tasks = start(harness, harness.tier.store(job))
        assert hang.entered.wait(60)

        def end():
            hang.release()
            assert harness.run(end_of(tasks)) == {}

        yield end
        hang.release()


@pytest.mark.parametrize("ends", [None, 0, 1])
def test_a_block_that_is_being_replaced_is_no_problem(directory, replacing, monkeypatch, ends):
    """Regression: its file was missing on disk and still counted."""
    count, looks = inspection._count, itertools.count()

    def and_end(*arguments):
        found = count(*arguments)
        if next(looks) == ends:  # before the walk, or after it
            replacing()
        return found

    monkeypatch.setattr(inspection, "_count", and_end)
    assert problems_of(directory) == []
    if ends is None:
        replacing()
