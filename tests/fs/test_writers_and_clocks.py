"""Who is dead, whatever the filesystem's clock does, and whatever lies among the entries."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty_files import FaultyFileOps
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs import writers
from kvoffload_async.tiers.fs.writers import DEAD_AFTER_S, WriterRegistry

YEAR_S = 365 * 86400.0
jumps = st.sampled_from([-10 * YEAR_S, -DEAD_AFTER_S - 60, -60.0, 60.0, DEAD_AFTER_S + 60, YEAR_S])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Server(FileOps):
    """A filesystem with a clock of its own, which may jump."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 2e9

    def utime(self, path: str) -> None:
        os.utime(path, (self.now_s, self.now_s))


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "namespace"
    folder.mkdir()
    return folder


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of this host, which no jump of the filesystem's moves."""
    clock = Clock()
    monkeypatch.setattr(writers, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def registered(folder):
    made = []

    def register(ops=None, boot=None) -> WriterRegistry:
        writer = WriterRegistry(ops or FileOps(), str(folder))
        if boot is not None:
            writer._boot_id = boot
        writer.register()
        writer.heartbeat()
        made.append(writer)
        return writer

    yield register
    for writer in made:
        writer.unregister()


@given(jump_s=jumps)
def test_no_jump_of_the_clock_makes_a_living_writer_of_this_host_dead(tmp_path_factory, jump_s):
    server = Server()
    folder = str(tmp_path_factory.mktemp("namespace"))
    me, other = (WriterRegistry(server, folder) for _ in range(2))
    for writer in (me, other):
        writer.register()
        writer.heartbeat()
    server.now_s += jump_s
    for writer in (me, other):
        assert not writer.others()[1]
        writer.heartbeat()
        assert not writer.others()[1]
    for writer in (me, other):
        writer.unregister()


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, -60.0, 60.0, YEAR_S])
def test_no_jump_of_the_clock_keeps_a_dead_writer_of_this_host_alive(registered, jump_s):
    server = Server()
    me, other = registered(server), registered(server)
    other.die()
    server.now_s += jump_s
    me.heartbeat()
    assert me.others() == (set(), {other.writer_id})


def test_a_dead_writer_of_another_host_from_the_future_dies_when_it_was_seen_unchanged(
    registered, clock
):
    server = Server()
    far = registered(server, "another boot")
    far.die()
    server.now_s -= YEAR_S
    me = registered(server)
    for clock.now_s in (0.0, DEAD_AFTER_S):
        assert me.others() == ({far.writer_id}, set())
    clock.now_s += 60.0
    assert me.others() == (set(), {far.writer_id})


def test_a_living_writer_of_another_host_from_the_future_lives_on(registered, clock):
    server = Server()
    far = registered(server, "another boot")
    far.die()  # its lock cannot be seen from here
    me = registered(server)
    path = f"{me._folder}/{far.writer_id}"
    server.now_s += YEAR_S
    for _ in range(5):
        server.utime(path)
        clock.now_s += DEAD_AFTER_S - 60.0
        server.now_s += DEAD_AFTER_S - 60.0
        assert me.others() == ({far.writer_id}, set())
    server.now_s = 2e9 + 60.0
    server.utime(path)  # its clock was set back as well
    assert me.others() == ({far.writer_id}, set())
    assert not me._ahead


def test_an_entry_that_was_removed_is_not_remembered(registered, clock):
    server = Server()
    far = registered(server, "another boot")
    server.now_s -= YEAR_S
    me = registered(server)
    assert me.others() == ({far.writer_id}, set())
    assert len(me._ahead) == 1
    far.unregister()
    assert me.others() == (set(), set())
    assert not me._ahead


# -- what lies among the entries ----------------------------------------------------------------

contents = st.one_of(
    st.binary(max_size=200),
    st.integers(1, 100_000).map(lambda depth: b"[" * depth),
    st.integers(1, 5000).map(lambda depth: b'{"boot_id":' * depth),
    st.sampled_from(
        [b"Infinity", b"NaN", b'{"boot_id": Infinity}', b"1" * 5000, b"\xff\xfe[", b""]
    ),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("boot_id"), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(content=contents)
def test_an_entry_that_says_nothing_is_checked_by_its_lock_and_age(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("namespace")
    ops = FaultyFileOps()
    me = WriterRegistry(ops, str(folder))
    me.register()
    path = folder / ".writers" / "9-odd"
    path.write_bytes(content)
    assert me.others() == ({"9-odd"}, set())
    old_s = path.stat().st_mtime - DEAD_AFTER_S - 60
    os.utime(path, (old_s, old_s))
    assert me.others() == (set(), {"9-odd"})
    fd = os.open(path, os.O_RDWR)
    ops.lock(fd, wait=False)
    assert me.others() == ({"9-odd"}, set())
    os.close(fd)
    me.unregister()
    assert not ops.open_fds


def test_an_entry_that_cannot_be_read_is_checked_by_its_age(registered, folder):
    ops = FaultyFileOps()
    me = registered(ops)
    (folder / ".writers" / "9-dead").write_text(json.dumps({"boot_id": boot_id()}))
    assert me.others() == (set(), {"9-dead"})
    ops.fail(errno.EIO, on="pread_into")
    assert me.others() == ({"9-dead"}, set())


def test_what_is_no_file_of_a_writer_is_nobody(registered, folder):
    me = registered()
    inside = folder / ".writers"
    (inside / "folder").mkdir()
    (inside / "folder" / "9-deep").write_bytes(b"")
    (inside / "link").symlink_to(inside / "folder" / "9-deep")
    os.mkfifo(inside / "pipe")
    assert me.others() == (set(), set())


def test_a_look_at_a_dead_writer_keeps_no_lock_also_for_a_child(registered, folder):
    class Forking(FaultyFileOps):
        """Copies descriptors as a fork does, while they are looked at."""

        copies: list[int] = []  # noqa: RUF012 - of one test

        def pread_into(self, fd, buffer, offset):
            self.copies.append(os.dup(fd))
            return super().pread_into(fd, buffer, offset)

    ops = Forking()
    me = registered(ops)
    (folder / ".writers" / "9-dead").write_text(json.dumps({"boot_id": boot_id()}))
    for _ in range(2):
        assert me.others() == (set(), {"9-dead"})
    for copy in ops.copies:
        os.close(copy)


def test_a_registration_that_fails_half_way_leaves_no_entry(folder):
    ops = FaultyFileOps()
    writer = WriterRegistry(ops, str(folder))
    ops.fail(errno.EIO, on="fstat")
    with pytest.raises(OSError, match="cannot be locked"):
        writer.register()
    assert not list((folder / ".writers").iterdir())
    assert not ops.open_fds
    with pytest.raises(OSError, match="is not registered"):
        writer.others()
