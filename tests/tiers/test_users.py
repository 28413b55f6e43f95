"""Two users and one directory."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from crashes import Process
from fs.directories import KIB, FsDirectory

from kvoffload_async.testing.harness import key_of

FIRST, SECOND, GROUP = 1000, 65534, 4242

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


@pytest.fixture(scope="module")
def server():
    with Process(Path(__file__).with_name("users_server.py")) as process:
        yield process


@pytest.fixture
def common():
    """A folder that everybody can reach, which one of pytest's is not."""
    folder = Path(tempfile.mkdtemp(prefix="kvoffload-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def shared(common):
    """A directory that is a group's."""
    root = common / "root"
    root.mkdir()
    os.chown(root, 0, GROUP)
    root.chmod(0o2770)
    return root


def run(server, kind: str, root: Path, user: int, blocks=((), ()), **options) -> dict:
    """Store the first of these numbers of blocks as a user, and then load the others."""
    stored, wanted = blocks
    said = server.run(
        "work",
        tier=kind,
        root=str(root),
        user=user,
        group=GROUP,
        numbers=list(stored),
        wanted=list(wanted),
        **options,
    )
    assert said[-1] == {"killed": False, "status": 0}, said
    return said[0]


FINE = {"not_stored": {}, "not_loaded": {}}
OPTIONS = {
    "fs": {"capacity_bytes": 1024 * KIB, "fsync": True},
    "fs unbounded": {"verify": "required", "direct_io": True},
    "slab": {"fsync": True, "direct_io": True},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_users_of_one_group_share_a_directory_that_is_the_groups(server, shared, kind):
    tier, options = kind.split()[0], OPTIONS[kind]
    assert run(server, tier, shared, FIRST, (range(4), range(4)), **options) == FINE
    assert run(server, tier, shared, SECOND, (range(2, 8), range(8)), **options) == FINE
    assert run(server, tier, shared, FIRST, (range(8, 10), range(10)), **options) == FINE


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_directory_of_one_user_is_refused_to_another_in_one_line(server, common, kind):
    tier, options = kind.split()[0], OPTIONS[kind]
    common.chmod(0o1777)
    root = common / "root"
    assert run(server, tier, root, FIRST, (range(4), range(4)), **options) == FINE
    said = run(server, tier, root, SECOND, (range(4, 6), range(4)), **options)
    assert "root_dir" in said["refused"]
    assert str(root) in said["refused"]
    assert "\n" not in said["refused"]
    assert run(server, tier, root, FIRST, ((), range(4)), **options) == FINE


def test_a_file_that_may_not_be_read_is_a_miss_and_stays(server, shared):
    assert run(server, "fs", shared, FIRST, (range(4), ())) == FINE
    path = FsDirectory(shared).path(key_of(2))
    path.chmod(0)
    said = run(server, "fs", shared, SECOND, ((), range(4)))
    assert said["not_loaded"] == {"2": "BlockMissingError"}
    assert path.exists()
