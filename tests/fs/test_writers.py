import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from faulty_files import FaultyFileOps
from fs.directories import TRIES

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files import identity
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.walk import sweep_temps, writer_of
from kvoffload_async.tiers.fs.writers import DEAD_AFTER_S, WriterRegistry

A, B = key_of(1), key_of(2)


@pytest.fixture
def folder(directory) -> Path:
    directory.folder.mkdir(parents=True)
    return directory.folder


@pytest.fixture
def registered(folder):
    made = []

    def register(ops=None, *, host: str | None = None) -> WriterRegistry:
        writer = WriterRegistry(ops or FileOps(), str(folder))
        if host is not None:
            writer._boot_id = host
        writer.register()
        made.append(writer)
        return writer

    yield register
    for writer in made:
        writer.unregister()


def entry(folder: Path, writer_id: str, boot: str) -> Path:
    path = folder / ".writers" / writer_id
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"boot_id": boot}), encoding="ascii")
    return path


def age(path: Path, seconds: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def test_a_living_writer_is_living_whatever_its_host_and_heartbeat(registered, folder):
    me, here, elsewhere = registered(), registered(), registered(host="another boot")
    for writer in (here, elsewhere):
        age(folder / ".writers" / writer.writer_id, 10 * DEAD_AFTER_S)
    assert me.others() == ({here.writer_id, elsewhere.writer_id}, set())


def test_on_this_host_an_unlocked_entry_is_dead_at_once(registered, folder):
    me = registered()
    entry(folder, "9-dead", boot_id())
    assert me.others() == (set(), {"9-dead"})


def test_on_another_host_an_unlocked_entry_is_dead_after_the_heartbeats_stop(registered, folder):
    me = registered()
    path = entry(folder, "9-far", "another boot")
    assert me.others() == ({"9-far"}, set())
    age(path, DEAD_AFTER_S + 60)
    assert me.others() == (set(), {"9-far"})


def test_a_heartbeat_keeps_a_writer_on_another_host_alive(registered, folder):
    me, far = registered(), registered(host="another boot")
    fcntl.flock(far._fd, fcntl.LOCK_UN)  # its lock cannot be seen from here
    path = folder / ".writers" / far.writer_id
    age(path, DEAD_AFTER_S + 60)
    assert far.writer_id in me.others()[1]
    far.heartbeat()
    assert far.writer_id in me.others()[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"host": 1}'])
def test_an_entry_that_is_just_being_written_is_living(registered, folder, content):
    me = registered()
    path = entry(folder, "9-new", "")
    path.write_bytes(content)
    assert me.others() == ({"9-new"}, set())


def test_without_locks_the_heartbeat_decides_on_this_host_too(registered, folder):
    ops = FaultyFileOps()
    ops.fail(errno.ENOLCK, on="lock")
    me = registered(ops)
    path = entry(folder, "9-here", boot_id())
    assert me.others() == ({"9-here"}, set())
    age(path, DEAD_AFTER_S + 60)
    assert me.others() == (set(), {"9-here"})


def test_an_entry_that_cannot_be_opened_is_checked_by_its_heartbeat(registered, folder):
    ops = FaultyFileOps()
    me = registered(ops)
    path = entry(folder, "9-far", boot_id())
    ops.fail(errno.EACCES, on="open")
    assert me.others() == ({"9-far"}, set())
    age(path, DEAD_AFTER_S + 60)
    assert me.others() == (set(), {"9-far"})


def test_an_entry_that_goes_away_meanwhile_is_not_dead(registered, folder):
    ops = FaultyFileOps()
    me = registered(ops)
    entry(folder, "9-leaving", boot_id())
    ops.fail(errno.ENOENT, on="open")
    assert me.others()[1] == set()


def test_a_writer_waits_for_its_lock_while_another_looks_at_it(registered, folder):
    """Otherwise it would live on without a lock, and be taken for dead."""

    class LookedAt(FaultyFileOps):
        look = None

        def lock(self, fd, *, wait):
            if self.look is None:
                self.look = os.open(self.open_fds[fd][0], os.O_RDWR)
                fcntl.flock(self.look, fcntl.LOCK_EX)
            elif self.counts()["lock"] == 2:
                os.close(self.look)
            return super().lock(fd, wait=wait)

    ops = LookedAt()
    writer = registered(ops)
    assert ops.counts()["lock"] > 2
    assert registered().others() == ({writer.writer_id}, set())


def test_a_lock_that_fails_otherwise_is_an_error(folder):
    ops = FaultyFileOps()
    ops.fail(errno.EIO, on="lock")
    writer = WriterRegistry(ops, str(folder))
    with pytest.raises(OSError, match="injected"):
        writer.register()
    writer.unregister()
    assert not ops.open_fds
    assert not list((folder / ".writers").iterdir())


def test_unregistering_removes_the_entry_and_is_idempotent(registered, folder):
    writer = registered()
    writer.unregister()
    writer.unregister()
    assert not list((folder / ".writers").iterdir())


def test_dying_leaves_the_entry_for_others_to_find(registered):
    me, other = registered(), registered()
    other.die()
    other.die()
    assert me.others() == (set(), {other.writer_id})
    me.forget(other.writer_id)
    assert me.others() == (set(), set())


def test_the_entry_is_removed_from_memory_even_if_not_from_disk(registered):
    ops = FaultyFileOps()
    writer = registered(ops)
    ops.fail(errno.EIO, on="unlink", times=1)
    with pytest.raises(OSError, match="injected"):
        writer.unregister()
    assert not ops.open_fds


def test_the_boot_is_known_by_the_hosts_name_where_the_kernel_does_not_tell(tmp_path, monkeypatch):
    assert boot_id() == boot_id()
    monkeypatch.setattr(identity, "Path", lambda _path: tmp_path / "absent")
    assert boot_id() == os.uname().nodename


# -- temporary files ----------------------------------------------------------------------------


def temp_of(directory, writer_id: str, key=A) -> Path:
    path = directory.path(key).with_name(f"{directory.path(key).name}.{writer_id}.0.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return path


def test_a_temp_names_its_writer():
    assert writer_of("/a/0123.bin.77-abc.5.tmp") == "77-abc"
    assert writer_of("/a/config.json.77-abc.0.tmp") == "77-abc"
    assert writer_of("/a.b.c.d/0123.tmp") is None


def test_sweeping_takes_what_is_there_of_the_dead(directory):
    dead, living, stranger = (temp_of(directory, name) for name in ("1-d", "2-l", "x"))
    plain = dead.with_name("plain.tmp")
    plain.write_bytes(b"")
    inventory = directory.inventory()
    inventory.temps["/gone.bin.1-d.0.tmp"] = 4096
    before_bytes = inventory.total_bytes
    assert sweep_temps(FileOps(), inventory, {"1-d"})
    assert not dead.exists()
    assert inventory.total_bytes == before_bytes - 2 * 4096
    assert inventory.temps.keys() == {str(path) for path in (living, stranger, plain)}
    assert living.exists()
    assert stranger.exists()
    assert plain.exists()


@pytest.mark.parametrize("capacity_bytes", [None, 1 << 20])
def test_a_start_removes_temps_of_dead_writers_and_never_those_of_living_ones(
    directory, capacity_bytes
):
    with directory.open(capacity_bytes=capacity_bytes) as first:
        living = temp_of(directory, first.tier._housekeeping._writers.writer_id)
        entry(directory.folder, "9-dead", boot_id())
        dead = temp_of(directory, "9-dead", B)
        entry(directory.folder, "9-far", "another boot")
        far = temp_of(directory, "9-far", B)
        unknown = temp_of(directory, "9-unknown", B)
        with directory.open(capacity_bytes=capacity_bytes) as second:
            assert not dead.exists()
            assert living.exists()
            assert far.exists()
            assert unknown.exists()
            assert second.store([B]) == {}
        assert not (directory.folder / ".writers" / "9-dead").exists()
        living.unlink()


def test_a_temp_that_stays_behind_keeps_its_writers_entry_for_the_next_start(directory):
    ops = FaultyFileOps()
    harness = directory.open(ops)
    ops.fail(errno.EIO, on="publish")
    ops.fail(errno.EIO, on="unlink")
    assert sorted(harness.store([A])) == [0]
    with pytest.raises(OSError, match="injected"):
        harness.close()
    ops.heal()
    assert len(directory.temps()) == 1, "the block was tried again, without room for a second file"
    with directory.open():
        assert not directory.temps()
    assert not list((directory.folder / ".writers").iterdir())


def test_a_temp_that_stayed_behind_goes_with_the_close(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        ops.fail(errno.EIO, on="publish", times=1)
        ops.fail(errno.EIO, on="unlink", times=TRIES)  # native code's try is one more
        assert sorted(harness.store([A])) == [0]
        assert len(directory.temps()) == 1
    assert not directory.temps()
