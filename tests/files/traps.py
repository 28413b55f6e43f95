"""What somebody who may write to a directory puts in the place of a file there."""

import os
import socket
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path


class Outside:
    """A folder beside the root, of which nothing may be read, changed or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "folder").mkdir(parents=True)
        self.file = path / "file"
        for file in (self.file, path / "folder" / "file"):
            file.write_bytes(b"somebody else's")
            os.utime(file, (1_000_000_000, 1_000_000_000))
        self._before = self._snapshot()

    def is_untouched(self) -> bool:
        return self._snapshot() == self._before

    def _snapshot(self):
        return {
            path: (status.st_mode, status.st_mtime_ns, path.is_file() and path.read_bytes())
            for path in (self.path, *sorted(self.path.rglob("*")))
            for status in [path.lstat()]
        }


def link(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.file)


def folder_link(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.path / "folder")


def dangling_link(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.path / "absent")


def pipe(path: Path, _outside: Outside) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, _outside: Outside) -> None:
    with socket.socket(socket.AF_UNIX) as made, _inside(path.parent):
        made.bind(path.name)  # an address is short


def folder(path: Path, _outside: Outside) -> None:
    path.mkdir()


Trap = Callable[[Path, Outside], None]
REMOVABLE: list[Trap] = [link, folder_link, dangling_link, pipe, unix_socket]
TRAPS: list[Trap] = [*REMOVABLE, folder]


@contextmanager
def _inside(path: Path):
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def spring(path: Path, trap: Trap, outside: Outside) -> None:
    """Put a trap in the place of whatever is at a path."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + ".away"))
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    trap(path, outside)
