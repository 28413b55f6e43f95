"""A capacity is never exceeded, and the count is right."""

import asyncio
import errno
import random
from contextlib import ExitStack

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import KIB, FsDirectory
from fs.spaces import ROOM_FOR_8, K, check, end_of, evicted, rescan, room_for, start, trim

from kvoffload_async.errors import TierFullError
from kvoffload_async.tiers.files.ops import disk_bytes
from kvoffload_async.tiers.fs import housekeeping as housekeeping_module
from kvoffload_async.tiers.fs.usage import parsed
from kvoffload_async.types import make_offload_key


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("policy", "capacity_kib"), [("lru", 60), ("arc", 60), ("arc", 100), ("lru", 500)]
)
def test_the_capacity_is_never_exceeded_and_the_count_is_the_disk(directory, policy, capacity_kib):
    draw = random.Random(capacity_kib)
    with directory.open(capacity_bytes=capacity_kib * KIB, policy=policy) as harness:
        for _ in range(40):
            job = draw.sample(K[:200], draw.randint(1, 12))
            if draw.random() < 0.3:
                harness.load(job)
            else:
                failures = harness.store(job)
                assert all(isinstance(error, TierFullError) for error in failures.values())
            check(directory, harness, capacity_kib * KIB)
    assert directory.every_block_is_whole()


class Watching(FaultyFileOps):
    """Compares, before every call, what is on disk with what is counted and set aside."""

    def __init__(self, directory: FsDirectory) -> None:
        super().__init__()
        self._place = directory
        self.is_watching = False
        self.largest_bytes = 0
        self.uncounted: list[str] = []

    def _before(self, name, path, flags=0):
        if self.is_watching:
            usage = parsed(memoryview((self._place.folder / ".usage").read_bytes()))
            on_disk = self._place.disk_bytes()
            self.largest_bytes = max(self.largest_bytes, on_disk)
            if usage is not None and on_disk > usage.total_bytes:
                self.uncounted.append(f"{name} {path}: {on_disk} > {usage.total_bytes}")
        return super()._before(name, path, flags)


@pytest.mark.no_cover
@pytest.mark.usefixtures("folders_on_disk")
@pytest.mark.parametrize("options", [{}, {"policy": "arc"}])
def test_at_no_moment_is_more_on_disk_than_is_counted_or_than_the_capacity(directory, options):
    ops = Watching(directory)
    with directory.open(ops, capacity_bytes=ROOM_FOR_8, **options) as harness:
        ops.is_watching = True
        for first in range(0, 24, 3):
            harness.store(K[first : first + 3])
        trim(harness)
        ops.is_watching = False
        assert evicted(harness)
    assert ops.uncounted == []
    assert ops.largest_bytes <= ROOM_FOR_8


def test_one_of_four_tiers_uses_the_capacity_while_the_others_are_idle(directory):
    capacity_bytes = room_for(200)
    with ExitStack() as tiers:
        busy, *idle = [
            tiers.enter_context(directory.open(capacity_bytes=capacity_bytes)) for _ in range(4)
        ]
        for number, harness in enumerate(idle):
            harness.store(K[number : number + 1])
        for first in range(0, 300, 20):
            assert not busy.store(K[first : first + 20])
            assert directory.disk_bytes() <= capacity_bytes
        assert directory.disk_bytes() >= 0.95 * capacity_bytes


@pytest.mark.usefixtures("folders_on_disk")
def test_who_was_used_last_stays(directory):
    with directory.open(capacity_bytes=room_for(28)) as harness:
        harness.store(K[:20])
        harness.load(K[:1])
        harness.run(_touch(harness, K[1:2]))
        harness.store(K[20:30])
        assert {K[0], K[1]} <= directory.blocks()
        assert evicted(harness) == set(K[:30]) - directory.blocks()
        assert evicted(harness)


async def _touch(harness, keys):
    harness.tier.touch(keys)


def test_evicted_inodes_are_reused_for_new_blocks(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:6])
        before = {directory.path(key).stat().st_ino for key in directory.blocks()}
        ops = harness.tier._ops
        assert ops is not None
        harness.store(K[6:12])
        assert before & {directory.path(key).stat().st_ino for key in directory.blocks()}


@pytest.mark.usefixtures("folders_on_disk")
def test_inodes_are_not_reused_beside_a_reader_that_does_not_verify(directory):
    ops = FaultyFileOps()
    with (
        directory.open(verify="off"),
        directory.open(ops, capacity_bytes=ROOM_FOR_8 + 4 * KIB) as harness,
    ):
        harness.store(K[:6])
        harness.store(K[6:12])
        assert evicted(harness)
        assert not [c for c in ops.calls if c.name == "truncate" and is_temp(c)]


@pytest.mark.usefixtures("folders_on_disk")
def test_a_block_that_is_being_loaded_is_not_evicted(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        hang = ops.hang(on="preadv", when=lambda c: c.path == str(directory.path(K[0])))
        job = harness.job(K[:1], [20], is_promotion=True)
        loading = start(harness, harness.tier.load(job))
        assert hang.entered.wait(60)
        harness.store(K[10:19], range(21, 30))
        assert evicted(harness) == set(K[1:4])
        hang.release()
        assert harness.run(end_of(loading)) == {}
        assert harness.holds(K[0], 20)
        assert K[0] in directory.blocks()


def test_victims_that_strangers_have_removed_are_forgotten(directory):
    capacity_bytes = room_for(175)
    with directory.open(capacity_bytes=capacity_bytes, num_slots=200) as harness:
        harness.store(K[:100])
        for key in K[:100]:
            directory.path(key).unlink()
        failures = harness.store(K[100:160])
        assert all(isinstance(error, TierFullError) for error in failures.values())
        rescan(harness)
        assert not set(K[:100]) & set(harness.tier._space._policy)
        assert harness.store(K[100:160]) == {}
        rescan(harness)
        check(directory, harness, capacity_bytes)


@pytest.mark.usefixtures("folders_on_disk")
def test_a_tier_goes_on_where_another_has_evicted_what_it_knew(directory):
    with (
        directory.open(capacity_bytes=room_for(19)) as first,
        directory.open(capacity_bytes=room_for(19)) as second,
    ):
        first.store(K[:12])
        rescan(second)
        for start in range(20, 80, 10):
            assert second.store(K[start : start + 10]) == {}
        assert not set(K[:12]) & directory.blocks()
        rescan(first)
        assert first.store(K[100:110]) == {}
        for harness in (first, second):
            rescan(harness)
            check(directory, harness, room_for(19))


@pytest.mark.parametrize("step_s", [0.0, 30.0])
def test_a_tier_that_finds_no_room_looks_for_blocks_of_others(directory, step_s, monkeypatch):
    """With the shortest steps, which walk one folder each, it looks on until it has enough."""
    monkeypatch.setattr(housekeeping_module, "_STEP_S", step_s)
    with (
        directory.open(capacity_bytes=room_for(19)) as first,
        directory.open(capacity_bytes=room_for(19)) as second,
    ):
        while len(directory.blocks()) < 15:
            assert first.store(K[len(directory.blocks()) :][:1]) == {}
        assert second.store(K[20:28]) == {}
        assert set(K[20:28]) <= directory.blocks()
        for harness in (first, second):
            rescan(harness)
            check(directory, harness, room_for(19))


def test_it_does_not_look_again_at_once(directory, caplog):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        housekeeping = harness.tier._housekeeping
        assert harness.run(housekeeping.look_for_blocks(harness.tier._space, 1))
        housekeeping._next_look_s = float("inf")
        assert not harness.run(housekeeping.look_for_blocks(harness.tier._space, 1))
        housekeeping._next_look_s = 0.0
        ops.fail(errno.EIO, when=directory.is_listed, times=1)
        assert not harness.run(housekeeping.look_for_blocks(harness.tier._space, 1))
        assert "looking for room failed" in caplog.text

        async def together():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(housekeeping.look_for_blocks(harness.tier._space, 1))
                    for _ in range(4)
                ]
            return [task.result() for task in tasks]

        before = housekeeping._walks
        assert harness.run(together()) == [True] * 4
        assert housekeeping._walks == before + 1


@pytest.mark.usefixtures("folders_on_disk")
def test_the_growth_of_a_crowded_folder_is_counted_by_the_next_walk(directory):
    """Hashes that count: all blocks lie in one folder, which grows."""
    keys = [make_offload_key(n.to_bytes(32, "big")) for n in range(600)]
    capacity_bytes = 1500 * KIB
    with directory.open(capacity_bytes=capacity_bytes) as harness:
        for start in range(0, len(keys), 60):
            assert harness.store(keys[start : start + 60]) == {}
        folder = directory.path(keys[0]).parent.stat()
        assert (
            directory.disk_bytes() - directory.counted_bytes() == disk_bytes(folder) - 4 * KIB > 0
        )
        rescan(harness)
        trim(harness)
        check(directory, harness, capacity_bytes)


@pytest.mark.usefixtures("folders_on_disk")
def test_a_tier_that_opens_on_a_full_namespace_evicts_nothing(directory):
    """Regression: its entry took the count above the capacity, and a twentieth was evicted."""
    capacity_bytes = 1000 * KIB
    with directory.open(capacity_bytes=capacity_bytes) as harness:
        for first in range(0, 360, 30):
            assert harness.store(K[first : first + 30]) == {}
        before = directory.blocks()
        assert len(before) * 4 * KIB > 0.95 * capacity_bytes
        with directory.open(capacity_bytes=capacity_bytes) as other:
            trim(other)
            assert directory.blocks() == before
            assert directory.disk_bytes() <= capacity_bytes
            assert other.store(K[399:]) == {}
