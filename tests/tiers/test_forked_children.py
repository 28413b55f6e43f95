"""Children that were forked while a store was open, and outlive the process that opened it."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_files import FaultyFileOps
from fs.directories import FsDirectory
from slab.stores import SlabStore

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.process_folder import ProcessFolder
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.files import locks
from kvoffload_async.tiers.files.locks import LockedFile, locked
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.tiers.slab.layout import LOCK

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

DEADLINE_S = 60
KEYS = [key_of(number) for number in range(4)]
OPEN: dict[str, Callable[[Path], TierHarness]] = {
    "fs": lambda root: FsDirectory(root).open(capacity_bytes=1 << 20),
    "slab": lambda root: SlabStore(root).open(),
}


@contextlib.contextmanager
def orphan_of(
    begin: Callable[[], object], go_on: Callable[[object], object] | None = None
) -> Iterator[None]:
    """Have a process begin something, fork a child, and go on; it is killed, the child lives."""
    reads, writes = os.pipe()
    opener = os.fork()
    if not opener:
        signal.alarm(DEADLINE_S)  # ends the process if anything here fails or hangs
        kept = begin()
        begins, begun = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(DEADLINE_S)
            os.write(begun, b"!")
            signal.pause()
        os.read(begins, 1)  # the child's handlers of the fork have run
        if go_on is not None:
            go_on(kept)
        os.write(writes, b"%d" % child)
        signal.pause()
    os.close(writes)
    try:
        child = int(os.read(reads, 32))
    finally:
        os.kill(opener, signal.SIGKILL)
        os.waitpid(opener, 0)
        os.close(reads)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)


def in_child(check: Callable[[], bool]) -> bool:
    """Return what a check says in a forked child."""
    child = os.fork()
    if not child:
        signal.alarm(DEADLINE_S)
        is_right = False
        try:
            is_right = check()
        finally:  # whatever it raised: a child must not go on as a test run
            os._exit(not is_right)
    _, status = os.waitpid(child, 0)
    return status == 0


def stores_and_loads(harness: TierHarness) -> bool:
    return harness.store(KEYS) == {} == harness.load(KEYS)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("tier", OPEN)
def test_a_child_of_a_process_that_used_a_tier_opens_one_of_its_own(tmp_path, tier, is_open):
    def used_in_child() -> bool:
        return in_child(lambda: stores_and_loads(OPEN[tier](tmp_path / "child")))

    with OPEN[tier](tmp_path / "parent") as harness:
        assert stores_and_loads(harness)
        if is_open:
            assert used_in_child()
            assert stores_and_loads(harness), "the parent goes on"
    if not is_open:
        assert used_in_child()


@pytest.mark.parametrize("tier", OPEN)
def test_a_store_whose_process_was_killed_opens_although_a_child_of_that_lives(tmp_path, tier):
    def begin():
        harness = OPEN[tier](tmp_path)
        harness.store(KEYS)
        return harness

    with orphan_of(begin), OPEN[tier](tmp_path) as harness:
        assert harness.load(KEYS) == {}


def test_a_writer_that_was_killed_is_dead_although_a_child_of_it_lives(tmp_path):
    def begin():
        writers = WriterRegistry(FileOps(), str(tmp_path))
        writers.register()
        return writers

    with orphan_of(begin):
        writers = WriterRegistry(FileOps(), str(tmp_path))
        writers.register()
        living, dead = writers.others()
        assert (len(living), len(dead)) == (0, 1)
        writers.unregister()


def test_a_lock_taken_after_the_fork_is_not_the_childs_either(tmp_path):
    """A kept descriptor is the same open file in parent and child."""
    path = str(tmp_path / "count")

    def begin():
        file = LockedFile(FileOps(), path)
        with file.locked():
            return file

    with (
        orphan_of(begin, lambda file: file.locked().__enter__()),
        locked(FileOps(), path, timeout_s=0.0),
    ):
        pass


@pytest.mark.parametrize("full", [False, True])
def test_a_child_neither_releases_its_parents_lock_nor_reuses_its_number(tmp_path, full):
    """What the child inherited may be collected there, which unlocks and closes."""
    ops = FileOps()
    path = tmp_path / "lock"
    lower = os.open(os.devnull, os.O_RDONLY)
    fd = ops.open(str(path), os.O_RDWR | os.O_CREAT)
    os.close(lower)  # a free number below
    assert ops.lock(fd, wait=False)

    def check() -> bool:
        is_taken = stat.S_ISCHR(os.fstat(fd).st_mode)
        if full:
            opened = list(fill_descriptors())
            assert opened
        own = os.open(path, os.O_RDWR) if not full else -1
        with contextlib.suppress(OSError):
            ops.unlock(fd)
        ops.close(fd)
        return is_taken and own != fd

    assert in_child(check)
    other = ops.open(str(path), os.O_RDWR)
    assert not ops.lock(other, wait=False)
    ops.close(fd)
    assert ops.lock(other, wait=False)
    ops.close(other)


def fill_descriptors() -> Iterator[int]:
    with contextlib.suppress(OSError):
        while True:
            yield os.open(os.devnull, os.O_RDONLY)


def test_a_writer_collected_in_a_child_stays_registered_in_the_parent(tmp_path):
    kept = [WriterRegistry(FileOps(), str(tmp_path))]
    kept[0].register()

    def check() -> bool:
        kept.clear()
        gc.collect()
        return True

    assert in_child(check)
    other = WriterRegistry(FileOps(), str(tmp_path))
    other.register()
    assert other.others() == ({kept[0].writer_id}, set())
    for writers in (*kept, other):
        writers.unregister()


def test_a_descriptor_that_was_closed_is_nobodys_lock_any_more(tmp_path):
    ops = FileOps()
    with locked(ops, str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT) as fd:
        pass
    (tmp_path / "other").write_bytes(b"mine")
    other = os.open(tmp_path / "other", os.O_RDONLY)
    assert other == fd, "the number is used again"
    assert in_child(lambda: os.read(other, 4) == b"mine")
    os.close(other)


def test_closing_releases_a_lock_that_a_concurrent_fork_has_copied(tmp_path):
    ops, path = FileOps(), str(tmp_path / "lock")
    fd = ops.open(path, os.O_RDWR | os.O_CREAT)
    assert ops.lock(fd, wait=False)
    copy = os.dup(fd)  # the same open file, as in a child
    ops.close(fd)
    with locked(ops, path, timeout_s=0.0):
        os.close(copy)


def test_the_folder_of_a_process_that_was_killed_is_removed_although_a_child_lives(tmp_path):
    with orphan_of(lambda: ProcessFolder(str(tmp_path))):
        (left,) = tmp_path.iterdir()
        own = ProcessFolder(str(tmp_path))
        assert not left.exists()
        own.close()


def test_a_failed_unlock_does_not_keep_a_file_open(tmp_path, monkeypatch):
    ops = FileOps()
    fd = ops.open(str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT)
    ops.lock(fd, wait=False)

    def fail(_fd, _operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    ops.close(fd)
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_the_process_that_holds_a_store_is_named_not_the_one_that_locked_it(tmp_path):
    """A child of C code inherits the lock: at-fork handlers are Python's."""
    store = SlabStore(tmp_path)
    with store.open() as harness:
        harness.store(KEYS)
    lock = store.folder / LOCK
    fd = os.open(lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    script = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        os.close(fd)
        lock.write_text("4194304\n")  # a process that has ended: no pid is as large
        assert child.stdout.readline()
        with pytest.raises(ConfigError, match=f"already opened by process {child.pid}; close"):
            store.open()
        child.stdin.close()
    with store.open() as harness:
        assert harness.load(KEYS) == {}


def test_a_holder_that_cannot_be_seen_is_named_as_recorded(tmp_path, monkeypatch):
    """One on another host, in another container, or of another user."""
    store = SlabStore(tmp_path)
    ops = FaultyFileOps()
    with store.open(ops):
        monkeypatch.setattr("kvoffload_async.tiers.files.locks.glob.iglob", lambda _pattern: ())
        (store.folder / LOCK).write_text("123\n")
        with pytest.raises(ConfigError, match="already opened by process 123; close"):
            store.open()
        (store.folder / LOCK).write_text("")
        with pytest.raises(ConfigError, match="already opened by process unknown; close"):
            store.open()


def test_a_child_can_wait_for_a_lock_though_another_thread_was_about_to_wait_at_the_fork():
    shared = getattr(locks._pause, "__self__", threading.Event())
    with shared._cond:
        assert in_child(lambda: locks._pause(0.001) is None)
