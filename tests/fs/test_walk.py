"""Walks go bucket by bucket, resume where they were, and set right what they find."""

import asyncio
import contextlib
import errno
import json
import math
import os
import shutil

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, KIB, FsDirectory
from fs.spaces import K, check, end_of, evicted, rescan, rescanned, room_for, start, trim

from kvoffload_async.abc.events import BlocksEvicted
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs import housekeeping as housekeeping_module
from kvoffload_async.tiers.fs.layout import REST
from kvoffload_async.tiers.fs.usage import UsageFile
from kvoffload_async.tiers.fs.walk import NamespaceWalk
from kvoffload_async.tiers.fs.writers import WriterRegistry, boot_id

ROOM = 4000 * KIB
MANY = 10**9


def never() -> bool:
    return False


class Surroundings:
    """A namespace with a writer and a count, and a walk over it."""

    def __init__(self, directory: FsDirectory) -> None:
        self.directory = directory
        self.ops = FaultyFileOps()
        directory.folder.mkdir(parents=True)
        self.writers = WriterRegistry(self.ops, str(directory.folder))
        self.writers.register()
        self.usage = UsageFile(
            self.ops, str(directory.folder), self.writers.writer_id, self.writers.living
        )
        self.usage.open(self.writers.entry_bytes())
        self.walk = NamespaceWalk(self.ops, directory.namespace, self.writers, self.usage)

    def cycle(self):
        while not (step := self.walk.step(math.inf, never)).ends_cycle:
            pass
        return step

    def is_right(self) -> bool:
        return self.directory.counted_bytes() == self.directory.disk_bytes()

    def close(self) -> None:
        self.usage.close()
        self.writers.unregister()


@pytest.fixture
def around(directory):
    surroundings = Surroundings(directory)
    yield surroundings
    surroundings.ops.heal()
    surroundings.close()
    assert not surroundings.ops.open_fds


def leave_dead(directory: FsDirectory, writer_id: str = "9-dead") -> None:
    path = directory.folder / ".writers" / writer_id
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"boot_id": boot_id()}), encoding="ascii")


def leave_temp(directory: FsDirectory, key, writer_id: str = "9-dead"):
    path = directory.path(key)
    path = path.with_name(f"{path.name}.{writer_id}.0.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(BLOCK))
    return path


def test_a_cycle_finds_every_block_and_makes_the_count_right(around, directory):
    for key in K[:50]:
        directory.put(key)
    (directory.folder / "stranger").write_bytes(b"x" * 10_000)
    step = around.cycle()
    assert set(step.found) == set(K[:50])
    assert around.is_right()


def test_a_step_without_time_is_one_bucket_and_the_next_goes_on_there(around, directory):
    for key in K[:50]:
        directory.put(key)
    found, steps = [], 0
    while True:
        step = around.walk.step(0.0, never)
        steps += 1
        assert len({key[0] for key in step.found}) <= 1
        found += step.found
        if step.ends_cycle:
            break
    assert steps == REST + 1
    assert sorted(found) == sorted(K[:50])
    assert around.is_right()


def test_a_walk_that_is_stopped_leaves_its_bucket_for_later(around, directory):
    directory.put(K[0])
    asked = iter(range(MANY))
    step = around.walk.step(math.inf, lambda: next(asked) > 20)
    assert not step.ends_cycle
    found = [*step.found, *around.cycle().found]
    assert found == [K[0]]
    assert around.is_right()


def test_what_is_found_is_in_order_of_age(around, directory):
    for number, key in enumerate(K[:20]):
        os.utime(directory.put(key), (100 - number, 100 - number))
    assert list(around.cycle().found.items()) == [(K[n], 100 - n) for n in range(19, -1, -1)]


def test_a_bucket_that_cannot_be_read_is_left_out_and_the_rest_is_right(around, directory, caplog):
    for key in K[:5]:
        directory.put(key)
    bad = directory.path(K[0]).parent
    around.ops.fail(errno.EIO, on="walk", when=lambda call: call.path == str(bad))
    step = around.walk.step(math.inf, never)
    assert set(step.found) == set(K[1:5])
    assert step.unwalked == {K[0][0]}
    assert isinstance(step.error, OSError)
    assert not around.usage.read().is_complete
    around.ops.heal()
    around.cycle()
    assert around.is_right()


@pytest.mark.parametrize("number", range(1, 20))
def test_blocks_found_before_the_count_failed_are_found_by_the_cycle(around, directory, number):
    for key in K[:50]:
        directory.put(key)
    (directory.folder / "stranger").write_bytes(b"x" * 10_000)
    calls = iter(range(1, MANY))
    around.ops.fail(errno.EIO, on="pwrite", when=lambda _: next(calls) == number)
    found, failures = set(), 0
    while True:
        try:
            step = around.walk.step(math.inf, never)
        except OSError:
            failures += 1
            continue
        found |= step.found.keys()
        failures += step.error is not None
        if step.ends_cycle:
            break
    assert found == set(K[:50])
    assert failures == (number < next(calls))
    assert around.is_right()


def test_entries_of_the_dead_go_when_all_buckets_were_swept_and_not_before(around, directory):
    leave_dead(directory)
    first, last = min(K[:50]), max(K[:50])
    temps = [leave_temp(directory, key) for key in (first, last)]
    while temps[0].exists():
        around.walk.step(0.0, never)
    assert temps[1].exists()
    assert (directory.folder / ".writers" / "9-dead").exists()
    around.cycle()
    assert not temps[1].exists()
    assert not (directory.folder / ".writers" / "9-dead").exists()
    assert around.is_right()


@pytest.mark.parametrize("on", ["unlink", "walk"])
def test_the_entry_of_a_dead_writer_stays_while_something_of_it_may_be_left(around, directory, on):
    leave_dead(directory)
    temp = leave_temp(directory, K[0])
    around.ops.fail(errno.EIO, on=on, when=lambda call: call.path.startswith(str(temp.parent)))
    around.cycle()
    assert temp.exists()
    assert (directory.folder / ".writers" / "9-dead").exists()
    around.ops.heal()
    around.cycle()
    assert not temp.exists()
    assert not (directory.folder / ".writers" / "9-dead").exists()
    assert around.is_right()


def test_a_dead_writers_file_beside_the_folders_is_swept_too(around, directory):
    leave_dead(directory)
    temp = directory.folder / "config.json.9-dead.0.tmp"
    temp.write_bytes(b"{")
    around.cycle()
    assert not temp.exists()


def test_what_living_writers_are_writing_is_set_aside_and_what_unknown_ones_left_is_used(
    around, directory
):
    leave_temp(directory, K[0], around.writers.writer_id)
    other = WriterRegistry(FileOps(), str(directory.folder))
    other.register()
    leave_temp(directory, K[1], other.writer_id)
    leave_temp(directory, K[2], "9-unknown")
    around.cycle()
    assert directory.counted_bytes() == directory.disk_bytes() - 2 * BLOCK
    other.unregister()


def test_folders_are_never_removed_by_a_walk(around, directory):
    (directory.folder / "ab").mkdir(parents=True)
    (directory.folder / "empty").mkdir()
    around.cycle()
    assert (directory.folder / "ab").exists()
    assert (directory.folder / "empty").exists()


def leave_reserved(around, directory):
    """Leave a dead writer that had reserved three blocks."""
    leave_dead(directory)
    dead = UsageFile(FileOps(), str(directory.folder), "9-dead", around.writers.living)
    dead.open()
    assert dead.begin(BLOCK, 3, MANY).reserved_bytes == 3 * BLOCK


def test_a_cycle_gives_up_what_the_dead_had_reserved_at_its_end(around, directory):
    around.cycle()
    leave_reserved(around, directory)
    directory.put(K[0])
    around.walk.step(0.0, never)
    assert directory.usage().reserved_bytes == 3 * BLOCK
    around.cycle()
    assert directory.usage().reserved_bytes == 0
    assert around.is_right()


def test_a_cycle_that_could_not_walk_over_everything_corrects_nothing(around, directory):
    around.cycle()
    before = directory.counted_bytes()
    leave_reserved(around, directory)
    for key in K[:5]:
        directory.put(key)
    bad = directory.path(K[0]).parent
    around.ops.fail(errno.EIO, on="walk", when=lambda call: call.path == str(bad))
    assert around.cycle().unwalked
    assert directory.usage().reserved_bytes == 3 * BLOCK
    assert directory.counted_bytes() == before
    around.ops.heal()
    around.cycle()
    assert around.is_right()


def test_an_operation_that_never_ends_keeps_no_cycle_from_correcting_the_count(around, directory):
    around.cycle()
    around.usage.begin(BLOCK, 2)
    leave_reserved(around, directory)
    directory.put(K[0])
    around.cycle()
    assert directory.usage().reserved_bytes == 0
    assert directory.counted_bytes() == directory.disk_bytes() + 2 * BLOCK


def test_what_living_writers_are_writing_is_theirs_to_count_and_nobody_elses_is(around, directory):
    other = WriterRegistry(FileOps(), str(directory.folder))
    other.register()
    leave_temp(directory, K[0], around.writers.writer_id)
    leave_temp(directory, K[1], other.writer_id)
    leave_temp(directory, K[2], "7-nobody")
    unlike = directory.folder / "abc" / f"{other.writer_id}.0.tmp"  # no tier names a file so
    unlike.parent.mkdir()
    unlike.write_bytes(bytes(BLOCK))
    around.cycle()
    assert directory.counted_bytes() == directory.disk_bytes() - 2 * BLOCK
    other.unregister()


def test_without_dead_writers_and_without_a_count_there_is_nothing_to_walk_over(around, directory):
    walk = NamespaceWalk(around.ops, directory.namespace, around.writers, None)
    before = len(around.ops.calls)
    assert walk.step(math.inf, never).ends_cycle
    assert not any(map(directory.is_listed, around.ops.calls[before:]))
    leave_dead(directory)
    temp = leave_temp(directory, K[0])
    assert walk.step(math.inf, never).ends_cycle
    assert not temp.exists()


# -- in a tier ----------------------------------------------------------------------------------


def test_blocks_that_are_gone_are_forgotten_at_the_end_of_a_cycle(directory):
    with directory.open(capacity_bytes=ROOM, num_slots=100) as harness:
        harness.store(K[:60])
        for key in K[:60:2]:
            directory.path(key).unlink()
        rescan(harness)
        assert evicted(harness) == set(K[:60:2])
        rescan(harness)
        gone = [e for e in harness.events if isinstance(e, BlocksEvicted)]
        assert sum(len(event.keys) for event in gone) == 30, "announced twice"
        check(directory, harness, ROOM)


def test_blocks_in_a_bucket_that_cannot_be_read_are_not_taken_for_gone(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM) as harness:
        harness.store(K[:10])
        ops.fail(errno.EIO, on="walk", times=2, when=lambda call: ".writers" not in call.path)
        rescan(harness)
        assert set(harness.tier._space._policy) == set(K[:10])
        assert evicted(harness) == set()
        rescan(harness)
        check(directory, harness, ROOM)


@pytest.mark.parametrize("number", range(2, 12))
def test_blocks_found_before_the_count_failed_are_not_taken_for_gone(directory, number):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM) as harness:
        harness.store(K[:10])
        rescan(harness)
        calls = iter(range(1, MANY))
        ops.fail(errno.EIO, on="pwrite", when=lambda _: next(calls) == number)

        async def cycle(housekeeping) -> None:
            async with housekeeping._walking:
                while True:
                    with contextlib.suppress(OSError):
                        if (await housekeeping._take_step(never)).ends_cycle:
                            break

        harness.run(cycle(harness.tier._housekeeping))
        assert evicted(harness) == set()
        assert set(harness.tier._space._policy) == set(K[:10])
        check(directory, harness, ROOM)


def test_blocks_are_not_taken_for_gone_if_others_beyond_the_capacity_cannot_be_removed(
    directory, monkeypatch
):
    monkeypatch.setattr(housekeeping_module, "_PORTION", 4)
    monkeypatch.setattr(housekeeping_module, "_STEP_S", 0.0)  # a bucket a step
    ops = FaultyFileOps()
    keys = [bytes([7]) + key[1:] for key in K[:40]]
    with directory.open(ops, capacity_bytes=room_for(12)) as harness:
        harness.store(keys[:10])
        rescan(harness)
        trim(harness)
        for key in keys[10:]:
            os.utime(directory.put(key), (100, 100))  # learned before the known ones
        space, failures = harness.tier._space, []
        remove = space.remove

        async def fail_once(victims, run_io):
            if victims and not failures:
                failures.append(OSError(errno.EIO, "injected"))
                ops.fail(failures[0], on="pwrite", times=1)
            await remove(victims, run_io)

        monkeypatch.setattr(space, "remove", fail_once)

        async def cycle(housekeeping) -> None:
            async with housekeeping._walking:
                while True:
                    with contextlib.suppress(OSError):
                        if (await housekeeping._take_step(never)).ends_cycle:
                            break

        harness.run(cycle(harness.tier._housekeeping))
        assert failures
        assert evicted(harness).isdisjoint(keys[:10])
        assert set(keys[:10]) <= set(space._policy)


def test_a_block_that_was_loaded_is_known_before_a_walk_has_found_it(directory):
    with directory.open(capacity_bytes=ROOM) as harness:
        directory.put(K[0])
        assert harness.load(K[:1]) == {}
        assert set(harness.tier._space._policy) == {K[0]}


def test_under_load_a_count_that_is_wrong_becomes_right(directory):
    """Jobs run beside the walks, one after the other, and evict.

    A walk corrects what exceeds its doubt: here the bytes that the jobs beside it add and remove.
    """
    room = 500 * KIB
    jobs_each, others = 3, 40
    assert others > (jobs_each + 1) * 2 * 4, "one job more may have begun before the walk"
    with directory.open(capacity_bytes=room) as harness:
        permits, stopping, is_full = asyncio.Semaphore(40), [], asyncio.Event()

        async def jobs() -> int:
            number = 0
            while True:
                await permits.acquire()
                if stopping:
                    return number
                keys = [K[4 * number % 200 + i] for i in range(4)]
                await harness.tier.store(harness.job(keys, range(4), is_promotion=False))
                number += 1
                if number == 40:
                    is_full.set()

        def permit(count: int) -> None:
            for _ in range(count):
                permits.release()

        running = start(harness, jobs())
        harness.run(is_full.wait())
        for number in range(300, 300 + others):
            directory.put(key_of(number))  # behind the count's back
        for _ in range(2):
            harness.on_loop(lambda: permit(jobs_each))
            harness.run(rescanned(harness.tier._housekeeping))
        harness.on_loop(lambda: stopping.append(True))
        harness.on_loop(lambda: permit(1))
        harness.run(end_of(running))
        usage = directory.usage()
        in_doubt_bytes = usage.total.doubt_bytes + 4 * BLOCK
        assert 0 <= usage.settled_bytes - directory.disk_bytes() <= in_doubt_bytes
        rescan(harness)
        trim(harness)  # what others have added is too much
        check(directory, harness, room)


def test_an_unreadable_count_refuses_new_blocks_until_walks_have_seen_everything(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM, rescan_interval_s=3600.0) as harness:
        harness.store(K[:5])
        (directory.folder / ".usage").write_bytes(b"what is this")
        ops.fail(errno.EIO, when=directory.is_listed)
        assert sorted(harness.store(K[5:8])) == [0, 1, 2]
        assert directory.blocks() == set(K[:5]), "something was evicted in vain"
        assert harness.load(K[:5]) == {}
        ops.heal()
        harness.tier._housekeeping._next_look_s = 0.0
        assert harness.store(K[5:8]) == {}
        check(directory, harness, ROOM)


def test_opening_looks_at_no_more_than_it_has_time_for_and_goes_on_in_the_background(
    directory, monkeypatch
):
    for key in K[:40]:
        directory.put(key)
    monkeypatch.setattr(housekeeping_module, "_OPENING_S", 0.0)
    ops = FaultyFileOps()
    hang = ops.hang(when=directory.is_listed, times=1)
    with directory.open(ops, capacity_bytes=ROOM, rescan_interval_s=0.02) as harness:
        assert hang.entered.wait(60)
        assert not set(harness.tier._space._policy)
        hang.release()
        harness.run(_end_of_first_cycle(harness.tier._space.blocks))
        assert set(harness.tier._space._policy) == set(K[:40])
        check(directory, harness, ROOM)


async def _end_of_first_cycle(blocks) -> None:
    async with asyncio.timeout(60):
        while blocks.is_first_cycle:  # noqa: ASYNC110 - the walk sets no event
            await asyncio.sleep(0.005)


def test_a_namespace_that_was_taken_away_is_walked_anew(directory):
    with directory.open(capacity_bytes=ROOM) as harness:
        harness.store(K[:5])
        for path in directory.folder.iterdir():
            if path.name != ".writers":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        harness.run(harness.tier._housekeeping._begin_anew())
        assert evicted(harness) == set(K[:5])
        assert harness.store(K[:5]) == {}
        check(directory, harness, ROOM)
