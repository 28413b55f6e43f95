from collections.abc import Iterator
from pathlib import Path

import pytest
from fs.directories import FsDirectory
from mounts import mounted

from kvoffload_async.tiers.files.ops import disk_bytes


@pytest.fixture
def folders_on_disk(tmp_path) -> Iterator[Path]:
    """A directory on a filesystem whose folders take disk themselves: those of tmpfs do not."""
    if disk_bytes(tmp_path.stat()):
        yield tmp_path
        return
    with mounted("ext4", tmp_path) as folder:
        yield folder


@pytest.fixture
def directory(request, tmp_path) -> FsDirectory:
    if "folders_on_disk" in request.fixturenames:
        tmp_path = request.getfixturevalue("folders_on_disk")
    return FsDirectory(tmp_path / "root")
