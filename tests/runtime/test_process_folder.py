"""Folders of processes whose blocks nobody else may be served."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.process_folder import ProcessFolder

OWNER = """
import sys
from kvoffload_async.runtime.process_folder import ProcessFolder
print(ProcessFolder(sys.argv[1]).path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that has made a folder; it is killed at the end at the latest."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.folder = Path(process.stdout.readline().strip())
        yield process
        process.kill()


def test_each_has_a_folder_of_its_own_that_goes_when_it_is_closed(tmp_path):
    first, second = ProcessFolder(str(tmp_path)), ProcessFolder(str(tmp_path))
    assert first.path != second.path
    Path(first.path, "below").mkdir()
    Path(first.path, "below", "block.bin").write_bytes(b"x")
    assert Path(first.path).stat().st_mode & 0o777 == 0o700
    first.close()
    first.close()
    assert [str(path) for path in tmp_path.iterdir()] == [second.path]
    second.close()


def test_the_directory_is_made_if_it_is_not_there(tmp_path):
    folder = ProcessFolder(str(tmp_path / "a" / "b"))
    assert Path(folder.path).is_dir()
    folder.close()


def test_the_folder_of_a_living_process_stays(tmp_path, other_process):
    mine = ProcessFolder(str(tmp_path))
    assert other_process.folder.is_dir()
    mine.close()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, other_process):
    (other_process.folder / "block.bin").write_bytes(b"x")
    other_process.kill()
    other_process.wait()
    assert other_process.folder.is_dir()
    mine = ProcessFolder(str(tmp_path))
    assert not other_process.folder.exists()
    mine.close()


@pytest.mark.parametrize("name", ["blocks", "process-", f"process-{'0' * 31}", "model_c0ffee_r0"])
def test_other_folders_stay(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "in-use").touch()
    ProcessFolder(str(tmp_path)).close()
    assert (tmp_path / name / "in-use").exists()


def test_a_link_that_looks_like_a_dead_processs_folder_is_not_followed(tmp_path, caplog):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "in-use").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / f"process-{'0' * 32}").symlink_to(victim)
    ProcessFolder(str(root)).close()
    assert (victim / "in-use").exists()
    assert caplog.text == "", "it is not even opened"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_lock_that_is_no_file_is_neither_followed_nor_waited_for(tmp_path, make):
    planted = tmp_path / f"process-{'0' * 32}"
    planted.mkdir()
    make(planted / "in-use")
    ProcessFolder(str(tmp_path)).close()
    assert planted.exists()


def test_a_folder_that_is_taken_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, taken = fcntl.flock, []

    def lock_second(fd, kind):
        if not taken:
            taken.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
            shutil.rmtree(Path(taken[0]).parent)  # as another starter does
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock_second)
    folder = ProcessFolder(str(tmp_path))
    assert taken
    assert Path(folder.path, "in-use").exists()
    assert Path(folder.path) != Path(taken[0]).parent
    folder.close()


def test_a_folder_that_cannot_be_removed_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(_path):
        raise OSError(errno.EBUSY, "busy")

    dead, folder = ProcessFolder(str(tmp_path)), ProcessFolder(str(tmp_path))
    os.close(dead._lock_fd)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    ProcessFolder(str(tmp_path))
    assert f"{dead.path} of a dead process could not be removed" in caplog.text
    folder.close()
    assert f"{folder.path} could not be removed" in caplog.text


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"root_dir: .*file' cannot be used"):
        ProcessFolder(str(tmp_path / "file"))
