"""Shared memory belongs to its user: what others put beside it is neither used nor touched."""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from runtime.users import lease, plant, start, start_stopping, start_two

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.shared_region import file_name

VICTIM, ATTACKER = 64_001, 64_002
"""Users that need no entry anywhere."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")


@pytest.fixture
def shared():
    """A directory like /dev/shm, where everybody may make files and remove their own ones."""
    directory = Path(tempfile.mkdtemp(prefix="test-shared-users-", dir="/dev/shm"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def run_as(run_beside):
    """Start functions as other users."""
    return lambda uid, function, *args: run_beside(function, *args, uid=uid)


PLANTS = ["public", "private", "fifo", "symlink", "directory"]


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
    assert run_as(ATTACKER, plant, kind, *planted).reported() is None
    before = [state_of(path) for path in planted]
    assert run_as(victim, start, shared).reported() is True
    assert [state_of(path) for path in planted] == before
    assert sorted(shared.iterdir()) == sorted(planted)


@needs_root
def test_another_users_file_is_not_even_opened(shared, run_as):
    path = shared / f"kvoffload-{VICTIM}-x"
    assert run_as(ATTACKER, plant, "public", path).reported() is None
    victim = run_as(VICTIM, start_stopping, shared, "os", "open")
    assert victim.reported() == named(shared, VICTIM)  # and not that path
    victim.go_on()
    assert victim.reported() is True


@needs_root
@pytest.mark.parametrize("kind", PLANTS)
def test_what_takes_the_place_of_an_orphan_is_not_touched(shared, run_as, kind):
    path = shared / f"kvoffload-{VICTIM}-x"
    assert run_as(VICTIM, plant, "private", path).reported() is None
    victim = run_as(VICTIM, start_stopping, shared, "os", "open")
    assert victim.reported() == path
    path.unlink()  # another participant was faster
    assert run_as(ATTACKER, plant, kind, path).reported() is None
    before = state_of(path)
    victim.go_on()
    assert victim.reported() is True
    assert state_of(path) == before


@needs_root
@pytest.mark.parametrize(
    ("victim", "module", "name"),
    [(0, "fcntl", "flock"), (VICTIM, "fcntl", "flock"), (VICTIM, "os.path", "samestat")],
)
def test_what_takes_an_orphans_name_before_it_is_removed_stays(
    shared, run_as, victim, module, name
):
    path = shared / f"kvoffload-{victim}-x"
    assert run_as(victim, plant, "private", path).reported() is None
    starting = run_as(victim, start_stopping, shared, module, name)
    starting.reported()
    path.unlink()
    assert run_as(ATTACKER, plant, "public", path).reported() is None
    before = state_of(path)
    starting.go_on()
    assert starting.reported() is True
    assert state_of(path) == before


@needs_root
def test_a_users_own_orphan_goes_and_what_only_looks_like_one_stays(shared, run_as):
    orphan, public, linked = (shared / f"kvoffload-{VICTIM}-{name}" for name in "abc")
    for path, kind in ((orphan, "private"), (public, "public"), (linked, "private")):
        assert run_as(VICTIM, plant, kind, path).reported() is None
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
    assert run_as(ATTACKER, plant, kind, path).reported() is None
    before = state_of(path)
    refused = run_as(victim, start, shared).reported()
    assert isinstance(refused, ConfigError)
    assert str(path) in str(refused)
    assert "remove it, or choose another engine_id" in str(refused)
    assert state_of(path) == before


@needs_root
def test_a_planted_file_under_a_lease_keeps_nobody_waiting(shared, run_as):
    path = named(shared, VICTIM)
    attacker = run_as(ATTACKER, lease, path)
    assert attacker.reported() == "has it"
    refused = run_as(VICTIM, start, shared).reported()
    assert isinstance(refused, ConfigError)
    attacker.go_on()


@needs_root
def test_a_primary_that_is_planted_at_the_last_moment_is_refused(shared, run_as):
    path = named(shared, VICTIM)
    assert run_as(VICTIM, plant, "private", path).reported() is None
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # no orphan
        # Opened as an orphan, opened to make it, opened to join it.
        victim = run_as(VICTIM, start_stopping, shared, "os", "open", 3)
        assert victim.reported() == path
    path.unlink()
    assert run_as(ATTACKER, plant, "public", path).reported() is None
    victim.go_on()
    refused = victim.reported()
    assert isinstance(refused, ConfigError)
    assert f"it belongs to user {ATTACKER}" in str(refused)


def test_a_file_that_others_may_write_is_refused(tmp_path):
    plant(None, "public", tmp_path / file_name("t"))
    with pytest.raises(ConfigError, match=r"its mode 666 gives rights to other users"):
        start(None, tmp_path)


def test_a_file_with_a_second_name_is_refused(tmp_path):
    plant(None, "private", tmp_path / "private")
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
    plant(None, kind, tmp_path / file_name("t"))
    with pytest.raises(ConfigError, match=why):
        start(None, tmp_path)


@needs_root
def test_engines_of_two_users_under_one_id_do_not_meet(shared, run_as):
    users = [run_as(uid, start_two, shared) for uid in (0, VICTIM, ATTACKER)]
    assert [user.reported() for user in users] == [True] * 3
    modes = {path.stat().st_uid: stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()}
    assert modes == {0: 0o600, VICTIM: 0o600, ATTACKER: 0o600}
    for user in users:
        user.go_on()
    assert [user.reported() for user in users] == [True] * 3
    assert list(shared.iterdir()) == []
