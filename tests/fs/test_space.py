import asyncio
import concurrent.futures
import errno
import gc
import itertools
import os
import random
import shutil
import subprocess
import traceback

import pytest
from fs.places import BLOCK, KIB, Place

from kvoffload_async.abc.events import BlocksEvicted
from kvoffload_async.errors import ConfigError, TierFullError, TierUnavailableError
from kvoffload_async.testing.fileops import FaultyFileOps, is_temp
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.fs.usage import _parsed
from kvoffload_async.types import make_offload_key

K = [key_of(number) for number in range(400)]
# 4 KiB a block, twice that for its folders, 16 KiB for the namespace itself, 10 for growth.
ROOM_FOR_8 = 16 * KIB + 8 * 12 * KIB + 10 * KIB


def evicted(harness: TierHarness) -> set:
    return {k for event in harness.events if isinstance(event, BlocksEvicted) for k in event.keys}


def rescan(harness: TierHarness) -> None:
    keeper = harness.tier._keeper

    async def walk():
        async with keeper._walking:
            await keeper._rescan(keeper._usage, keeper._space)

    harness.run(walk())


def trim(harness: TierHarness) -> None:
    keeper = harness.tier._keeper
    harness.run(keeper._trim(keeper._usage, keeper._space))


def check(place: Place, harness: TierHarness, capacity_bytes: int) -> None:
    """What holds whenever no job runs."""
    assert place.disk_bytes() <= capacity_bytes
    assert place.counted_bytes() == place.disk_bytes()
    assert not any(place.usage().reserved_bytes.values())
    space = harness.tier._space
    assert set(space._policy.resident()) == space._known == place.blocks()
    assert not space._busy
    assert not place.temps()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("capacity_kib", [40, 100, 500])
def test_the_capacity_is_never_exceeded_and_the_count_is_the_disk(place, policy, capacity_kib):
    draw = random.Random(capacity_kib)
    with place.open(capacity_bytes=capacity_kib * KIB, policy=policy) as harness:
        for _ in range(40):
            job = draw.sample(K[:200], draw.randint(1, 12))
            if draw.random() < 0.3:
                harness.load(job)
            else:
                failures = harness.store(job)
                assert all(isinstance(error, TierFullError) for error in failures.values())
            check(place, harness, capacity_kib * KIB)
    assert place.every_block_is_whole()


class Watching(FaultyFileOps):
    """Compares, before every call, what is on disk with what is counted and set aside."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self.is_watching = False
        self.largest_bytes = 0
        self.uncounted: list[str] = []

    def _before(self, name, path, flags=0):
        if self.is_watching:
            usage = _parsed((self._place.folder / ".usage").read_bytes())
            on_disk = self._place.disk_bytes()
            self.largest_bytes = max(self.largest_bytes, on_disk)
            if usage is not None and on_disk > usage.total_bytes:
                self.uncounted.append(f"{name} {path}: {on_disk} > {usage.total_bytes}")
        return super()._before(name, path, flags)


@pytest.mark.parametrize("options", [{}, {"reuse_inodes": False}, {"policy": "arc"}])
def test_at_no_moment_is_more_on_disk_than_is_counted_or_than_the_capacity(place, options):
    ops = Watching(place)
    with place.open(ops, capacity_bytes=ROOM_FOR_8, **options) as harness:
        ops.is_watching = True
        for first in range(0, 60, 3):
            harness.store(K[first : first + 3])
        trim(harness)
        ops.is_watching = False
        assert evicted(harness)
    assert ops.uncounted == []
    assert ops.largest_bytes <= ROOM_FOR_8


def test_the_growth_of_the_top_folder_is_within_the_capacity(place):
    capacity_bytes = 6000 * KIB
    keys = [key_of(number) for number in range(1200)]
    with place.open(capacity_bytes=capacity_bytes) as harness:
        for start in range(0, len(keys), 60):
            assert harness.store(keys[start : start + 60]) == {}
            assert place.counted_bytes() == place.disk_bytes() <= capacity_bytes
    assert place.folder.stat().st_blocks * 512 > 4 * KIB, "it has not grown: no test"


def test_who_was_used_last_stays(place):
    with place.open(capacity_bytes=3 * ROOM_FOR_8) as harness:
        harness.store(K[:20])
        harness.load(K[:1])
        harness.run(_touch(harness, K[1:2]))
        harness.store(K[20:30])
        assert {K[0], K[1]} <= place.blocks()
        assert evicted(harness) == set(K[:30]) - place.blocks()
        assert evicted(harness)


async def _touch(harness, keys):
    harness.tier.touch(keys)


def test_evicted_inodes_are_reused_for_new_blocks(place):
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:6])
        before = {place.path(key).stat().st_ino for key in place.blocks()}
        ops = harness.tier._ops
        assert ops is not None
        harness.store(K[6:12])
        assert before & {place.path(key).stat().st_ino for key in place.blocks()}


def test_inodes_are_not_reused_beside_a_reader_that_does_not_verify(place):
    ops = FaultyFileOps()
    with place.open(verify="off"), place.open(ops, capacity_bytes=ROOM_FOR_8 + 32 * KIB) as harness:
        harness.store(K[:6])
        harness.store(K[6:12])
        assert evicted(harness)
        assert not [c for c in ops.calls if c.name == "truncate" and is_temp(c)]


def test_a_block_that_is_being_loaded_is_not_evicted(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        hang = ops.hang(on="preadv", when=lambda c: c.path == str(place.path(K[0])))
        job = harness.job(K[:1], [20], is_promotion=True)
        loading = start(harness, harness.tier.load(job))
        assert hang.entered.wait(10)
        harness.store(K[10:19], range(21, 30))
        assert evicted(harness) == set(K[1:4])
        hang.release()
        assert harness.run(end_of(loading)) == {}
        assert harness.holds(K[0], 20)
        assert K[0] in place.blocks()


def start(harness: TierHarness, operation) -> list[asyncio.Task]:
    """Start an operation on the loop; return its task once it is there."""
    tasks = []
    harness.on_loop(lambda: tasks.append(asyncio.get_running_loop().create_task(operation)))
    return tasks


async def end_of(tasks: list[asyncio.Task]):
    return await tasks[0]


def test_victims_that_strangers_have_removed_are_forgotten(place):
    capacity_bytes = 16 * ROOM_FOR_8
    with place.open(capacity_bytes=capacity_bytes, num_slots=200) as harness:
        harness.store(K[:100])
        for key in K[:100]:
            place.path(key).unlink()
        failures = harness.store(K[100:160])
        assert all(isinstance(error, TierFullError) for error in failures.values())
        rescan(harness)
        assert not set(K[:100]) & harness.tier._space._known
        assert harness.store(K[100:160]) == {}
        rescan(harness)
        check(place, harness, capacity_bytes)


def test_a_tier_goes_on_where_another_has_evicted_what_it_knew(place):
    with (
        place.open(capacity_bytes=2 * ROOM_FOR_8) as first,
        place.open(capacity_bytes=2 * ROOM_FOR_8) as second,
    ):
        first.store(K[:12])
        rescan(second)
        for start in range(20, 80, 10):
            assert second.store(K[start : start + 10]) == {}
        assert not set(K[:12]) & place.blocks()
        rescan(first)
        assert first.store(K[100:110]) == {}
        for harness in (first, second):
            rescan(harness)
            check(place, harness, 2 * ROOM_FOR_8)


def test_a_tier_that_finds_no_room_looks_for_blocks_of_others(place):
    with (
        place.open(capacity_bytes=2 * ROOM_FOR_8) as first,
        place.open(capacity_bytes=2 * ROOM_FOR_8) as second,
    ):
        while len(place.blocks()) < 15:
            assert first.store(K[len(place.blocks()) :][:1]) == {}
        assert second.store(K[20:28]) == {}
        assert set(K[20:28]) <= place.blocks()
        for harness in (first, second):
            rescan(harness)
            check(place, harness, 2 * ROOM_FOR_8)


def test_it_does_not_look_again_at_once(place, caplog):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        keeper = harness.tier._keeper
        assert harness.run(keeper.look_for_blocks())
        keeper._next_walk_s = float("inf")
        assert not harness.run(keeper.look_for_blocks())
        keeper._next_walk_s = 0.0
        ops.fail(errno.EIO, on="walk", times=1)
        assert not harness.run(keeper.look_for_blocks())
        assert "looking for room failed" in caplog.text

        async def together():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(keeper.look_for_blocks()) for _ in range(4)]
            return [task.result() for task in tasks]

        before = keeper._walks
        assert harness.run(together()) == [True] * 4
        assert keeper._walks == before + 1


def test_without_a_capacity_there_is_nothing_to_look_for(place):
    with place.open() as harness:
        assert not harness.run(harness.tier._keeper.look_for_blocks())


def test_the_growth_of_a_crowded_folder_is_within_the_capacity(place):
    """Hashes that count: all blocks lie in one folder, which grows."""
    keys = [make_offload_key(n.to_bytes(32, "big")) for n in range(600)]
    ops = Watching(place)
    capacity_bytes = 1500 * KIB
    with place.open(ops, capacity_bytes=capacity_bytes) as harness:
        for start in range(0, len(keys), 60):
            assert harness.store(keys[start : start + 60]) == {}
            assert place.counted_bytes() == place.disk_bytes() <= capacity_bytes
    leaf = place.path(keys[0]).parent
    assert leaf.stat().st_blocks * 512 > 20 * KIB, "it has not grown: no test"


# -- a full disk --------------------------------------------------------------------------------


def test_on_a_full_disk_below_the_capacity_blocks_replace_others(place):
    ops = FaultyFileOps(small_root=str(place.root), small_bytes=150 * KIB)
    with place.open(ops, capacity_bytes=10_000 * KIB) as harness:
        for start in range(0, 60, 3):
            failures = harness.store(K[start : start + 3])
            assert failures == {}
            assert set(K[start : start + 3]) <= place.blocks()
        assert evicted(harness)
        check(place, harness, 10_000 * KIB)


def test_a_full_disk_with_nothing_to_evict_fails_the_blocks(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=10_000 * KIB) as harness:
        ops.fail(errno.ENOSPC, on="pwrite", when=is_temp)
        failures = harness.store(K[:3])
        assert sorted(failures) == [0, 1, 2]
        assert all(isinstance(error, TierFullError) for error in failures.values())
        ops.heal()
        assert harness.store(K[:3]) == {}
        check(place, harness, 10_000 * KIB)


def test_a_block_is_tried_once_more_and_not_again(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=10_000 * KIB) as harness:
        harness.store(K[:20])
        before = len(ops.calls)
        ops.fail(errno.ENOSPC, on="pwrite", when=is_temp)
        assert sorted(harness.store(K[30:31])) == [0]
        tries = [c for c in ops.calls[before:] if c.name == "pwrite" and is_temp(c)]
        assert len(tries) == 2
        assert len(place.blocks()) >= 16


def test_without_a_capacity_a_full_disk_fails_the_block(place):
    ops = FaultyFileOps()
    with place.open(ops) as harness:
        ops.fail(errno.ENOSPC, on="pwrite", times=1)
        failures = harness.store(K[:3])
        assert len(failures) == 1
        assert all(isinstance(error, TierFullError) for error in failures.values())


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 256 KiB, where one may be mounted."""
    root = tmp_path / "small"
    root.mkdir()
    command = [
        shutil.which("mount") or "/bin/mount",
        "-t",
        "tmpfs",
        "-o",
        "size=256k",
        "none",
        str(root),
    ]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True, timeout=10)
    except OSError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield root
    subprocess.run(
        [shutil.which("umount") or "/bin/umount", "-l", str(root)], check=True, timeout=10
    )


@pytest.mark.parametrize("reuse_inodes", [True, False])
def test_a_really_full_disk_is_a_normal_state(small_disk, reuse_inodes):
    place = Place(small_disk / "root")
    with place.open(capacity_bytes=10_000 * KIB, reuse_inodes=reuse_inodes) as harness:
        for start in range(0, 200, 8):
            assert harness.store(K[start : start + 8]) == {}
            assert set(K[start : start + 8]) <= place.blocks()
            assert not place.temps()
        assert evicted(harness)
        assert place.every_block_is_whole()
    with Place(small_disk / "root").open(num_slots=100) as harness:
        failures = harness.store(K[200:280])
        assert failures
        assert all(isinstance(error, TierFullError) for error in failures.values())
        assert not place.temps()


# -- what others do -----------------------------------------------------------------------------


def test_a_rescan_corrects_what_strangers_have_added_and_removed(place):
    with place.open(capacity_bytes=4 * ROOM_FOR_8) as harness:
        harness.store(K[:10])
        for key in K[:3]:
            place.path(key).unlink()
        for key in K[10:15]:
            place.put(key)
        (place.folder / "stranger").write_bytes(b"x" * 10_000)
        assert place.counted_bytes() != place.disk_bytes()
        rescan(harness)
        check(place, harness, 4 * ROOM_FOR_8)
        assert place.blocks() == set(K[3:15])


def test_strangers_are_evicted_in_their_turn_and_loaded_before(place):
    for number, key in enumerate(K[:20]):
        path = place.put(key)
        os.utime(path, (number, number))
    with place.open(capacity_bytes=3 * ROOM_FOR_8) as harness:
        assert harness.load(K[:1]) == {}
        harness.store(K[30:42])
        assert K[0] in place.blocks()
        assert K[1] not in place.blocks()
        check(place, harness, 3 * ROOM_FOR_8)


def test_room_is_made_at_the_start_the_oldest_first(place):
    for number, key in enumerate(K[:50]):
        path = place.put(key)
        os.utime(path, (number, number))
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
        check(place, harness, ROOM_FOR_8)
        kept = place.blocks()
        assert kept
        assert kept == set(K[50 - len(kept) : 50])
        assert harness.store(K[60:63]) == {}
        check(place, harness, ROOM_FOR_8)


def test_the_count_is_right_after_a_restart_whatever_the_file_says(place):
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
    (place.folder / ".usage").write_text('[7, {"9-dead": 99999}, 0]', encoding="ascii")
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
        check(place, harness, ROOM_FOR_8)


def test_what_was_stored_during_a_walk_is_not_forgotten_nor_what_was_evicted_learned(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        keeper = harness.tier._keeper
        space = harness.tier._space
        before = space.known()
        inventory = keeper._take_stock()
        harness.store(K[4:10])
        assert not set(K[:4]) & place.blocks()
        assert space.learn(inventory, before) == []
        assert space._known == place.blocks()


def test_a_bad_block_that_a_load_removed_is_given_back(place):
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        place.path(K[0]).write_bytes(b"x" * BLOCK)
        place.path(K[1]).unlink()
        assert sorted(harness.load(K[:4])) == [0, 1]
        assert harness.tier._space._known == set(K[2:4])
        rescan(harness)
        check(place, harness, ROOM_FOR_8)


def test_a_file_that_has_shrunk_and_is_removed_does_not_make_the_count_too_small(place):
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        os.truncate(place.path(K[0]), 0)
        rescan(harness)
        harness.load(K[:1])
        assert place.counted_bytes() == place.disk_bytes()


# -- watermarks ---------------------------------------------------------------------------------


def test_room_is_made_from_the_high_down_to_the_low_watermark(place):
    capacity_bytes = 500 * KIB
    with place.open(capacity_bytes=capacity_bytes, high=0.5, low=0.3) as harness:
        harness.store(K[:15])
        trim(harness)
        assert evicted(harness) == set()
        harness.store(K[15:30])
        assert place.disk_bytes() > 0.5 * capacity_bytes
        trim(harness)
        assert place.disk_bytes() <= 0.3 * capacity_bytes
        assert place.disk_bytes() > 0.2 * capacity_bytes
        check(place, harness, capacity_bytes)
        assert K[29] in place.blocks()


def test_the_house_is_kept_in_the_background(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8, rescan_interval_s=0.02) as harness:
        harness.store(K[:4])
        hang = ops.hang(on="walk", times=1)
        assert hang.entered.wait(10)
        place.path(K[0]).unlink()
        hang.release()
        again = ops.hang(on="walk", times=1)
        assert again.entered.wait(10)
        again.release()
        rescan(harness)
        check(place, harness, ROOM_FOR_8)


def test_keeping_house_survives_errors(place, caplog):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8, rescan_interval_s=0.02) as harness:
        ops.fail(errno.EIO, on="utime walk", times=3)
        seen = ops.hang(on="walk", times=1)
        assert seen.entered.wait(10)
        seen.release()
        assert harness.store(K[:4]) == {}
    assert "keeping house failed" in caplog.text


def test_without_a_capacity_the_heartbeat_goes_on(place):
    ops = FaultyFileOps()
    with place.open(ops, rescan_interval_s=0.02):
        hang = ops.hang(on="utime", times=1)
        assert hang.entered.wait(10)
        hang.release()


# -- errors -------------------------------------------------------------------------------------


def store_or_raise(harness: TierHarness, keys) -> dict:
    """Store; an error of the whole job is let go of as the tier's actor does."""
    try:
        return dict(harness.store(keys))
    except (OSError, TierUnavailableError, ExceptionGroup) as error:
        traceback.clear_frames(error.__traceback__)
        return {0: str(error)}
    finally:
        gc.collect()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_no_error_at_any_call_of_a_store_leaks_room(tmp_path, code):
    """Every call of a job that evicts, those of the shared count included."""
    for number in itertools.count(1, 3):
        place = Place(tmp_path / str(number))
        ops = FaultyFileOps()
        with place.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
            harness.store(K[:6])
            ops.fail(code, at=len(ops.calls) + number)
            last = len(ops.calls) + number
            failures = store_or_raise(harness, K[10:14])
            was_hit = len(ops.calls) >= last
            ops.heal()
            rescan(harness)
            rescan(harness)
            harness.tier._files.writer.sweep_litter()
            assert harness.store(K[20:22]) == {}
            check(place, harness, ROOM_FOR_8)
        assert place.every_block_is_whole()
        if not was_hit:
            assert failures == {}
            break
    assert number > 30


def test_a_count_that_cannot_be_told_costs_no_block(place, caplog):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        number = iter(range(100))
        # The first lock of a job is for the reservation, the second for the settlement.
        ops.fail(errno.EIO, on="lock", when=lambda _call: next(number) == 1)
        assert harness.store(K[:2]) == {}
        assert "was not told" in caplog.text
        assert harness.store(K[2:4]) == {}
        check(place, harness, ROOM_FOR_8)


def test_a_cancelled_store_is_accounted_for(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        hang = ops.hang(on="pwrite", when=is_temp)
        harness.fill(K[:3], range(3))
        job = harness.job(K[:3], range(3), is_promotion=False)
        storing = start(harness, harness.tier.store(job))
        assert hang.entered.wait(10)
        harness.on_loop(storing[0].cancel)
        hang.release()
        with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
            harness.run(end_of(storing))
        storing.clear()
        harness.on_loop(gc.collect)  # there, so that the loop has let go of the task
        assert place.blocks() == set(K[:3])
        check(place, harness, ROOM_FOR_8)


def test_a_store_that_the_pool_refuses_gives_its_room_back(place):
    with place.open(capacity_bytes=ROOM_FOR_8) as harness:
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
            store_or_raise(harness, K[10 * refused : 10 * refused + 4])
            assert next(number) > refused
            io.run = real
            rescan(harness)
            check(place, harness, ROOM_FOR_8)


def test_two_jobs_that_store_the_same_new_blocks_both_succeed(place):
    with place.open(capacity_bytes=4 * ROOM_FOR_8) as harness:
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
        check(place, harness, 4 * ROOM_FOR_8)


def test_a_job_that_loses_the_race_for_a_block_that_then_fails_does_not_claim_it(place):
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=4 * ROOM_FOR_8) as harness:
        harness.fill(K[:1], [0])
        hang = ops.hang(on="pwrite", when=is_temp, times=1)

        jobs = [harness.job(K[:1], [0], is_promotion=False) for _ in range(2)]
        first = start(harness, harness.tier.store(jobs[0]))
        assert hang.entered.wait(10)
        ops.fail(errno.EIO, on="publish", times=2)
        assert sorted(harness.run(harness.tier.store(jobs[1]))) == [0]
        hang.release()
        assert sorted(harness.run(end_of(first))) == [0]
        assert not place.blocks()
        check(place, harness, 4 * ROOM_FOR_8)


@pytest.mark.parametrize("capacity_bytes", [1, BLOCK, BLOCK + 6 * 4096 - 1])
def test_a_capacity_below_one_block_is_refused(place, capacity_bytes):
    with pytest.raises(ConfigError, match=r"capacity_bytes: .* give at least \d+"):
        place.open(capacity_bytes=capacity_bytes)
    assert not list((place.folder / ".writers").iterdir())


def test_the_least_capacity_holds_a_block(place):
    with pytest.raises(ConfigError) as raised:
        place.open(capacity_bytes=1)
    least = int(str(raised.value).rpartition(" ")[2])
    with place.open(capacity_bytes=least) as harness:
        for key in K[:5]:
            assert harness.store([key]) == {}
            assert place.blocks() == {key}
            check(place, harness, least)
