"""Directories that are removed beneath a running tier, and tiers that others took for dead."""

import asyncio
import errno
import os
import shutil
import threading

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.counted import reserved
from fs.directories import BLOCK, FsDirectory
from fs.spaces import rescan, room_for

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.fs.usage import FILE_NAME
from kvoffload_async.tiers.fs.walk import sweep_temps

K = [key_of(number) for number in range(16)]
ROOMY = {"capacity_bytes": 256 * BLOCK, "rescan_interval_s": 3600.0}
OPTIONS = [{"rescan_interval_s": 3600.0}, ROOMY]


def remove_all(directory: FsDirectory) -> None:
    shutil.rmtree(directory.folder)


def remove_writers(directory: FsDirectory) -> None:
    shutil.rmtree(directory.folder / ".writers")


def remove_count(directory: FsDirectory) -> None:
    (directory.folder / FILE_NAME).unlink(missing_ok=True)


def remove_blocks(directory: FsDirectory) -> None:
    for path in directory.folder.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path)


REMOVALS = [remove_all, remove_writers, remove_count, remove_blocks]


def beat(harness: TierHarness) -> bool:
    return harness.run(harness.tier._housekeeping._beat())


def writer_of(harness: TierHarness) -> str:
    return harness.tier._housekeeping._writers.writer_id


def entries(directory: FsDirectory) -> set[str]:
    return {path.name for path in (directory.folder / ".writers").iterdir()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("remove", REMOVALS)
def test_a_store_after_a_removal_succeeds(directory, options, remove):
    with directory.open(**options) as harness:
        assert harness.store(K[:4]) == {}
        remove(directory)
        assert harness.store(K[4:8]) == {}
        assert harness.load(K[4:8]) == {}
        assert set(K[4:8]) <= directory.blocks()


@pytest.mark.parametrize("remove", REMOVALS)
def test_after_a_removal_and_a_heartbeat_the_count_is_that_of_the_disk(directory, remove):
    with directory.open(**ROOMY) as harness:
        assert harness.store(K[:4]) == {}
        remove(directory)
        beat(harness)
        assert harness.store(K[4:8]) == {}
        rescan(harness)
        assert directory.counted_bytes() == directory.disk_bytes()
        assert set(harness.tier._space._policy) == directory.blocks()
        assert harness.announced() <= directory.blocks()
    assert not entries(directory)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("remove", [remove_all, remove_writers])
def test_a_tier_whose_entry_is_gone_registers_under_a_new_id(directory, options, remove, caplog):
    with directory.open(**options) as harness:
        old = writer_of(harness)
        assert not beat(harness)
        remove(directory)
        assert beat(harness)
        assert not beat(harness)
        assert entries(directory) == {writer_of(harness)} != {old}
        assert "registered again" in caplog.text
        with directory.open(**options) as other:
            assert other.tier._housekeeping._writers.others() == ({writer_of(harness)}, set())


def test_an_entry_in_whose_place_is_another_file_is_not_the_tiers_own(directory):
    with directory.open() as harness:
        old = writer_of(harness)
        path = directory.folder / ".writers" / old
        path.rename(path.with_name(f"{old}0"))
        path.write_bytes(b"")
        assert beat(harness)
        assert entries(directory) == {old, writer_of(harness)}  # what was moved is swept


@pytest.mark.parametrize("on", ["stat", "fstat", "utime"])
def test_an_entry_that_has_gone_stale_is_made_anew(directory, on):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        ops.fail(errno.ESTALE, on=on, when=lambda call: "/.writers/" in call.path, times=1)
        assert beat(harness)
        assert not beat(harness)


def test_a_heartbeat_that_fails_otherwise_is_no_reason_to_register_again(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        ops.fail(errno.EIO, on="utime")
        with pytest.raises(OSError, match="injected"):
            beat(harness)
        ops.heal()
        assert not beat(harness)


def test_a_tier_that_was_taken_for_dead_goes_on(directory):
    """Suspended for longer than ten minutes: another host has swept what it left."""
    with directory.open(**ROOMY) as sleeper, directory.open(**ROOMY) as other:
        assert sleeper.store(K[:4]) == {}
        old = writer_of(sleeper)
        other.tier._housekeeping._writers.forget(old)
        rescan(other)
        assert sleeper.store(K[4:8]) == {}
        assert beat(sleeper)
        assert entries(directory) == {writer_of(sleeper), writer_of(other)}
        assert sleeper.store(K[8:12]) == {}
        for harness in (sleeper, other):
            rescan(harness)
        assert directory.counted_bytes() == directory.disk_bytes()
        assert reserved(directory.usage()) == {writer_of(sleeper): 0, writer_of(other): 0}


class Sweeping(FaultyFileOps):
    """Sweeps temporary files the moment before a call about one, once."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.on = on
        self.directory: FsDirectory | None = None

    def _before(self, name, path, flags=0):
        if self.directory is not None and name == self.on and path.endswith(".tmp"):
            directory, self.directory = self.directory, None
            inventory = directory.inventory()
            dead = {temp.split(".")[-3] for temp in inventory.temps}
            assert sweep_temps(FaultyFileOps(), inventory, dead)
            remove_blocks(directory)
        return super()._before(name, path, flags)


@pytest.mark.parametrize("on", ["open", "pwritev", "set_xattr", "stat", "publish"])
def test_a_store_whose_temporary_file_was_swept_is_made_again(directory, on):
    ops = Sweeping(on)
    with directory.open(ops, **ROOMY) as harness:
        ops.directory = directory
        assert harness.store(K[:1]) == {}
        assert ops.directory is None
        assert harness.load(K[:1]) == {}
        assert not directory.temps()
        rescan(harness)
        assert directory.counted_bytes() == directory.disk_bytes()


@pytest.mark.usefixtures("folders_on_disk")
@pytest.mark.parametrize("on", ["get_xattr", "open", "pwritev", "publish"])
def test_a_store_in_the_place_of_a_victim_is_made_again_too(directory, on):
    ops = Sweeping(on)
    capacity_bytes = room_for(2)
    with directory.open(ops, capacity_bytes=capacity_bytes, rescan_interval_s=3600.0) as harness:
        for key in K[:3]:
            assert harness.store([key]) == {}
        ops.directory = directory
        before = len(ops.calls)
        assert harness.store(K[3:4]) == {}
        assert ops.directory is None
        assert ops.counts(before)["rename"] == 1  # of the victim
        assert harness.load(K[3:4]) == {}
        rescan(harness)
        assert directory.counted_bytes() == directory.disk_bytes() <= capacity_bytes


def test_a_store_whose_temporary_file_is_swept_again_and_again_fails(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        ops.fail(errno.ENOENT, on="publish", when=is_temp)
        failures = harness.store(K[:1])
        assert isinstance(failures[0], TierUnavailableError)
        ops.heal()
        assert harness.store(K[:1]) == {}
        assert not directory.temps()


def test_a_lost_root_is_not_made_again(directory):
    with directory.open(**ROOMY) as harness:
        away = directory.root.with_name("away")
        remove_writers(directory)
        directory.root.rename(away)
        with pytest.raises(OSError, match="is not the opened directory any more"):
            beat(harness)
        assert not directory.root.exists()
        away.rename(directory.root)
        assert beat(harness)


def test_while_it_cannot_register_again_a_store_fails_and_later_ones_do_not(directory, caplog):
    ops = FaultyFileOps()
    with directory.open(ops, **ROOMY) as harness:
        remove_all(directory)
        ops.fail(errno.EIO, on="mkdir make_folders")
        with pytest.raises(TierUnavailableError, match="No such file"):
            harness.store(K[:4])
        assert "registering again failed" in caplog.text
        ops.heal()
        assert harness.store(K[:4]) == {}


def test_several_stores_that_fail_register_once(directory):
    with directory.open(**ROOMY) as harness:
        housekeeping = harness.tier._housekeeping

        async def together():
            async with asyncio.TaskGroup() as group:
                beats = [group.create_task(housekeeping._beat()) for _ in range(3)]
            return [task.result() for task in beats]

        remove_all(directory)
        assert harness.run(together()) == [True, True, True]
        assert len(entries(directory)) == 1


def test_readers_that_do_not_verify_are_announced_again(directory):
    with directory.open(verify="off") as harness:
        remove_all(directory)
        assert beat(harness)
        assert (directory.folder / ".unverified-readers").exists()


def test_after_registering_again_temporary_files_are_named_for_the_new_id(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        assert harness.store(K[:1]) == {}
        remove_writers(directory)
        assert beat(harness)
        before = len(ops.calls)
        assert harness.store(K[1:2]) == {}
        temps = {call.path for call in ops.calls[before:] if is_temp(call)}
        assert {temp.split(".")[-3] for temp in temps} == {writer_of(harness)}


def test_registering_again_drops_the_blocks_that_are_gone(directory):
    with directory.open(**ROOMY) as harness:
        assert harness.store(K[:4]) == {}
        remove_all(directory)
        assert beat(harness)
        assert not set(harness.tier._space._policy)
        assert not harness.announced()
        assert directory.counted_bytes() == directory.disk_bytes()


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 256 * BLOCK}])
def test_housekeeping_registers_again_by_itself(directory, options):
    class Noticing(FaultyFileOps):
        """Says when an entry is made after the first."""

        num_entries = 0
        made = threading.Event()

        def open(self, path, flags):
            if "/.writers/" in path and flags & os.O_EXCL:
                self.num_entries += 1
            if self.num_entries > 1:
                self.made.set()
            return super().open(path, flags)

    ops = Noticing()
    with directory.open(ops, rescan_interval_s=0.01, **options):
        remove_writers(directory)
        assert ops.made.wait(60)
