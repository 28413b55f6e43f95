"""Shared memory belongs to its user: what others put beside it is neither used nor touched."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
import warnings
from pathlib import Path

import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.shared_region import SharedBuffer, file_name

DEADLINE_S = 60.0
VICTIM, ATTACKER = 64_001, 64_002
"""Users that need no entry anywhere."""
SLOTS, STRIDE = 5, 8192
SIZE = 45_056
"""Bytes of the file for two participants."""

processes = multiprocessing.get_context("fork")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")


@pytest.fixture
def shared():
    """A directory like /dev/shm, where everybody may make files and remove their own ones."""
    place = Path(tempfile.mkdtemp(prefix="test-shared-users-", dir="/dev/shm"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


class User:
    """A process of another user that runs one function and meets us at points on its way."""

    def __init__(self, uid, function, *args):
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=self._run, args=(theirs, uid, function, args))
        with warnings.catch_warnings():
            # From Python 3.12 on: the test's own timer is a thread, which the child does not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    @staticmethod
    def _run(pipe, uid, function, args):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            pipe.send(function(pipe, *args))
        except Exception as error:  # noqa: BLE001 - the test judges it
            pipe.send(error)

    def reported(self):
        """Return the next thing that it has reported; at the end what the function returned."""
        assert self._pipe.poll(DEADLINE_S), "it hangs"
        return self._pipe.recv()

    def go_on(self):
        self._pipe.send("go on")

    def close(self):
        self._pipe.close()
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._process.close()


@pytest.fixture
def run_as():
    """Start functions as other users; they end with the test."""
    users = []

    def run(uid, function, *args):
        users.append(User(uid, function, *args))
        return users[-1]

    yield run
    for user in users:
        user.close()


def plant(_pipe, path, kind):
    """Put something there, as an attacker would."""
    if kind == "fifo":
        os.mkfifo(path)
        path.chmod(0o666)
    elif kind == "symlink":
        path.symlink_to("/dev/null")
    elif kind == "directory":
        path.mkdir(0o777)
    else:
        with path.open("xb") as file:
            os.fchmod(file.fileno(), 0o600 if kind == "private" else 0o666)
            file.truncate(SIZE)


def join(directory, participant, num_participants):
    return SharedBuffer(
        "t",
        SLOTS,
        STRIDE,
        participant=participant,
        num_participants=num_participants,
        directory=directory,
        join_timeout_s=DEADLINE_S,
    )


PLANTS = ["public", "private", "fifo", "symlink", "directory"]


def start(_pipe, directory):
    """Start an engine with one participant; return whether it made its file."""
    buffer = join(directory, 0, 1)
    return buffer.is_creator and buffer.release()


def start_stopping(pipe, directory, module, name, times=1):
    """Start an engine; it stops before the n-th call of a function and tells its first argument."""
    stops = iter(range(times))
    original = getattr(module, name)

    def stopping(first, *args):
        if next(stops, None) == times - 1:
            pipe.send(first)
            pipe.recv()
        return original(first, *args)

    setattr(module, name, stopping)
    return start(pipe, directory)


def state_of(path):
    found = path.lstat()
    return found.st_ino, found.st_uid, found.st_mode, found.st_nlink, found.st_mtime_ns


# -- orphans ------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("victim", [0, VICTIM])
def test_another_users_file_with_our_prefix_stops_nobody_and_stays(shared, run_as, kind, victim):
    planted = [
        shared / "kvoffload-x",
        shared / f"kvoffload-{victim}-x",
        shared / f"kvoffload-{ATTACKER}-x",
    ]
    for path in planted:
        assert run_as(ATTACKER, plant, path, kind).reported() is None
    before = [state_of(path) for path in planted]
    assert run_as(victim, start, shared).reported() is True
    assert [state_of(path) for path in planted] == before
    assert sorted(shared.iterdir()) == sorted(planted)


@needs_root
def test_another_users_file_is_not_even_opened(shared, run_as):
    path = shared / f"kvoffload-{VICTIM}-x"
    assert run_as(ATTACKER, plant, path, "public").reported() is None
    victim = run_as(VICTIM, start_stopping, shared, os, "open")
    assert victim.reported() == named(shared, VICTIM)  # and not that path
    victim.go_on()
    assert victim.reported() is True


@needs_root
@pytest.mark.parametrize("kind", PLANTS)
def test_what_takes_the_place_of_an_orphan_is_not_touched(shared, run_as, kind):
    path = shared / f"kvoffload-{VICTIM}-x"
    assert run_as(VICTIM, plant, path, "private").reported() is None
    victim = run_as(VICTIM, start_stopping, shared, os, "open")
    assert victim.reported() == path
    path.unlink()  # another participant was faster
    assert run_as(ATTACKER, plant, path, kind).reported() is None
    before = state_of(path)
    victim.go_on()
    assert victim.reported() is True
    assert state_of(path) == before


@needs_root
@pytest.mark.parametrize(
    ("victim", "module", "name"),
    [(0, fcntl, "flock"), (VICTIM, fcntl, "flock"), (VICTIM, os.path, "samestat")],
)
def test_what_takes_an_orphans_name_before_it_is_removed_stays(
    shared, run_as, victim, module, name
):
    path = shared / f"kvoffload-{victim}-x"
    assert run_as(victim, plant, path, "private").reported() is None
    starting = run_as(victim, start_stopping, shared, module, name)
    starting.reported()
    path.unlink()
    assert run_as(ATTACKER, plant, path, "public").reported() is None
    before = state_of(path)
    starting.go_on()
    assert starting.reported() is True
    assert state_of(path) == before


@needs_root
def test_a_users_own_orphan_goes_and_what_only_looks_like_one_stays(shared, run_as):
    orphan, public, linked = (shared / f"kvoffload-{VICTIM}-{name}" for name in "abc")
    for path, kind in ((orphan, "private"), (public, "public"), (linked, "private")):
        assert run_as(VICTIM, plant, path, kind).reported() is None
    os.link(linked, shared / "somewhere else")
    assert run_as(VICTIM, start, shared).reported() is True
    assert sorted(shared.iterdir()) == sorted([public, linked, shared / "somewhere else"])


# -- the file itself ----------------------------------------------------------------------------


def named(shared, uid):
    """Return where the file of a user's engine lies."""
    return shared / file_name("t").replace(f"-{os.geteuid()}-", f"-{uid}-")


@needs_root
@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("victim", [0, VICTIM])
def test_a_planted_primary_is_refused_and_stays(shared, run_as, kind, victim):
    path = named(shared, victim)
    assert run_as(ATTACKER, plant, path, kind).reported() is None
    before = state_of(path)
    refused = run_as(victim, start, shared).reported()
    assert isinstance(refused, ConfigError)
    assert str(path) in str(refused)
    assert "have it removed, or choose another engine_id" in str(refused)
    assert state_of(path) == before


@needs_root
def test_a_planted_file_under_a_lease_keeps_nobody_waiting(shared, run_as):
    path = named(shared, VICTIM)

    def lease(pipe):
        plant(pipe, path, "public")
        with path.open("rb+") as file:
            signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the kernel asks it to give up with
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            pipe.send("has it")
            pipe.recv()

    attacker = run_as(ATTACKER, lease)
    assert attacker.reported() == "has it"
    refused = run_as(VICTIM, start, shared).reported()
    assert isinstance(refused, ConfigError)
    attacker.go_on()


@needs_root
def test_a_primary_that_is_planted_at_the_last_moment_is_refused(shared, run_as):
    path = named(shared, VICTIM)
    assert run_as(VICTIM, plant, path, "private").reported() is None
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # no orphan
        # Opened as an orphan, opened to make it, opened to join it.
        victim = run_as(VICTIM, start_stopping, shared, os, "open", 3)
        assert victim.reported() == path
    path.unlink()
    assert run_as(ATTACKER, plant, path, "public").reported() is None
    victim.go_on()
    refused = victim.reported()
    assert isinstance(refused, ConfigError)
    assert f"it belongs to user {ATTACKER}" in str(refused)


def test_a_file_that_others_may_write_is_refused(tmp_path):
    plant(None, tmp_path / file_name("t"), "public")
    with pytest.raises(ConfigError, match=r"its mode 666 gives rights to other users"):
        start(None, tmp_path)


def test_a_file_with_a_second_name_is_refused(tmp_path):
    plant(None, tmp_path / "private", "private")
    os.link(tmp_path / "private", tmp_path / file_name("t"))
    before = state_of(tmp_path / "private")
    with pytest.raises(ConfigError, match="it has 2 names"):
        start(None, tmp_path)
    assert state_of(tmp_path / "private") == before


@pytest.mark.parametrize(
    ("kind", "why"),
    [("fifo", "not a regular file"), ("symlink", "symbolic links"), ("directory", "directory")],
)
def test_what_is_no_file_is_refused(tmp_path, kind, why):
    plant(None, tmp_path / file_name("t"), kind)
    with pytest.raises(ConfigError, match=why):
        start(None, tmp_path)


@needs_root
def test_engines_of_two_users_under_one_id_do_not_meet(shared, run_as):
    def both(pipe, directory):
        first = join(directory, 0, 2)
        pipe.send(first.is_creator)
        pipe.recv()
        second = join(directory, 1, 2)
        first.view[0, 0] = os.geteuid() % 251
        return second.view[0, 0] == os.geteuid() % 251 and not second.is_creator

    users = [run_as(uid, both, shared) for uid in (0, VICTIM, ATTACKER)]
    assert [user.reported() for user in users] == [True] * 3
    modes = {path.stat().st_uid: stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()}
    assert modes == {0: 0o600, VICTIM: 0o600, ATTACKER: 0o600}
    for user in users:
        user.go_on()
    assert [user.reported() for user in users] == [True] * 3
    assert list(shared.iterdir()) == []
