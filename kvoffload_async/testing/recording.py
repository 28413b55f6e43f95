"""The system calls of the tiers on disk, with every change recorded; see `powercut`.

    ops = RecordingFileOps(str(root))
    with TierHarness(FsTier(settings, create_policy, ops)) as harness:
        harness.store(keys)
        ops.mark(keys)                 # acknowledged: a cut from here on must not lose them
    for state in states_of(ops.recording, ops.recording.num_steps, MetadataOrder.JOURNALLED):
        state.build(folder)

A change is recorded as *units*, the smallest pieces that reach a disk by themselves: a change of
names, an attribute, a length, a page. Nothing waits for the device: what a wait would have made
durable follows from the recording.
"""

from __future__ import annotations

import os
import stat as stat_module
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvoffload_async.testing.changes import (
    EMPTY_PAGE,
    PAGE_BYTES,
    ROOT,
    Attribute,
    FileState,
    Image,
    Length,
    Mark,
    Names,
    Page,
    Recording,
    Sync,
    Unit,
)
from kvoffload_async.testing.fileops import FaultyFileOps


class RecordingFileOps(FaultyFileOps):
    """The operating system's calls, with faults, and with every change below a folder recorded.

    Attributes:
        recording: What was done so far.
    """

    def __init__(self, root: str) -> None:
        """Begin with what is in a folder now; it is made if it is not there."""
        super().__init__()
        Path(root).mkdir(parents=True, exist_ok=True)
        self._root = root
        self._next = ROOT + 1
        self._now = Image()
        self._fds: dict[int, int] = {}
        self._cuts: dict[int, set[int]] = {}
        self._order = threading.RLock()  # `publish` may rename by way of `rename`
        self._take_in(Path(root), ROOT)
        self.recording = Recording(self._now.copy())

    def mark(self, what: object) -> None:
        """Note something that is so from now on."""
        with self._order:
            self.recording.marks.append(Mark(self.recording.num_steps, what))

    # -- the calls ------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        with self._order:
            fd = super().open(path, flags)
            parent, name = self._place(path)
            file = self._find(path)
            if file is None and parent is not None and flags & os.O_CREAT:
                file = self._new_file()
                self._change_names({(parent, name): file})
            if file is not None:
                self._fds[fd] = file
                if flags & os.O_TRUNC:
                    self._set_length(file, 0)
            return fd

    def close(self, fd: int) -> None:
        with self._order:
            self._fds.pop(fd, None)
            super().close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._order:
            count = super().pwrite(fd, data, offset)
            self._write(fd, bytes(data[:count]), offset)
            return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._order:
            count = super().pwritev(fd, buffers, offset)
            self._write(fd, b"".join(buffers)[:count], offset)
            return count

    def fallocate(self, fd: int, size_bytes: int) -> None:
        with self._order:
            super().fallocate(fd, size_bytes)
            file = self._fds.get(fd)
            if file is not None and size_bytes > self._now.files[file].num_bytes:
                self._set_length(file, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        with self._order:
            super().truncate(fd, size_bytes)
            file = self._fds.get(fd)
            if file is not None and size_bytes != self._now.files[file].num_bytes:
                self._set_length(file, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Record it; nothing waits."""
        with self._order:
            self._before_fd("fdatasync", fd)
            self._sync(fd, with_attributes=False)

    def fsync(self, fd: int) -> None:
        """Record it; nothing waits."""
        with self._order:
            self._before_fd("fsync", fd)
            self._sync(fd, with_attributes=True)

    def set_xattr(self, fd: int, name: str, value: bytes) -> None:
        with self._order:
            super().set_xattr(fd, name, value)
            file = self._fds.get(fd)
            if file is not None:
                self._changed(Attribute(self._step(), file, name, value))

    def rename(self, source: str, target: str) -> None:
        with self._order:
            super().rename(source, target)
            self._renamed(source, target)

    def publish(self, source: str, target: str) -> None:
        with self._order:
            super().publish(source, target)
            self._renamed(source, target)

    def unlink(self, path: str) -> None:
        with self._order:
            super().unlink(path)
            self._removed(path)

    def mkdir(self, path: str) -> None:
        with self._order:
            super().mkdir(path)
            self._made(path)

    def make_folders(self, path: str) -> None:
        with self._order:
            super().make_folders(path)
            below = path.removeprefix(self._root).strip("/").split("/")
            for depth in range(1, len(below) + 1):
                self._made("/".join([self._root, *below[:depth]]))

    def rmdir(self, path: str) -> None:
        with self._order:
            super().rmdir(path)
            self._removed(path)

    # -- inside ---------------------------------------------------------------------------------

    def _take_in(self, folder: Path, number: int) -> None:
        """Take in what lies in a folder, as it is."""
        for path in sorted(folder.iterdir()):
            status = path.lstat()
            own = self._next
            self._now.folders[number][path.name] = own
            self._next += 1
            if stat_module.S_ISDIR(status.st_mode):
                self._now.folders[own] = {}
                self._take_in(path, own)
            else:
                names = os.listxattr(path)
                pages = _pages(path.read_bytes(), 0)
                self._now.files[own] = FileState(
                    status.st_size,
                    {number: piece.ljust(PAGE_BYTES, b"\0") for number, piece in pages},
                    {name: os.getxattr(path, name) for name in names},
                )

    def _place(self, path: str) -> tuple[int | None, str]:
        """Return the folder of a path, None if it is not below the root, and the last name."""
        if not path.startswith(self._root + "/"):
            return None, ""
        *above, name = path.removeprefix(self._root).strip("/").split("/")
        folder: int | None = ROOT
        for part in above:
            folder = None if folder is None else self._now.folders.get(folder, {}).get(part)
        return folder, name

    def _find(self, path: str) -> int | None:
        if path.rstrip("/") == self._root:
            return ROOT
        folder, name = self._place(path)
        return None if folder is None else self._now.folders.get(folder, {}).get(name)

    def _step(self) -> int:
        self.recording.num_steps += 1
        return self.recording.num_steps

    def _changed(self, *units: Unit) -> None:
        for unit in units:
            self._now.apply(unit)
            self.recording.units.append(unit)

    def _new_file(self) -> int:
        number = self._next
        self._next += 1
        # It is there, empty, in every image: what is not on disk is its name.
        self._now.files[number] = FileState()
        self.recording.base.files[number] = FileState()
        return number

    def _change_names(self, names: dict[tuple[int, str], int | None]) -> None:
        before = {self._now.folders[folder].get(name) for folder, name in names}
        files = frozenset(number for number in {*before, *names.values()} if number is not None)
        self._changed(Names(self._step(), names, files))

    def _made(self, path: str) -> None:
        parent, name = self._place(path)
        if parent is not None and self._find(path) is None:
            number = self._next
            self._next += 1
            self._now.folders[number] = {}
            self.recording.base.folders[number] = {}
            self._change_names({(parent, name): number})

    def _removed(self, path: str) -> None:
        parent, name = self._place(path)
        if parent is not None:
            self._change_names({(parent, name): None})

    def _renamed(self, source: str, target: str) -> None:
        (from_folder, from_name), (to_folder, to_name) = self._place(source), self._place(target)
        file = self._find(source)
        if file is not None and from_folder is not None and to_folder is not None:
            self._change_names({(from_folder, from_name): None, (to_folder, to_name): file})

    def _sync(self, fd: int, *, with_attributes: bool) -> None:
        path, _ = self.open_fds[fd]
        file = self._fds.get(fd, self._find(path))
        if file is not None:
            self.recording.syncs.append(Sync(self._step(), file, with_attributes))

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        file = self._fds.get(fd)
        if file is None or not data:
            return
        step, state = self._step(), self._now.files[file]
        for number, piece in _pages(data, offset):
            page = state.pages.get(number, EMPTY_PAGE)
            start = max(0, offset - number * PAGE_BYTES)
            content = page[:start] + piece + page[start + len(piece) :]
            if content != page:
                self._changed(Page(step, file, number, content))
        if offset + len(data) > state.num_bytes:
            self._changed(self._length(step, file, offset + len(data), is_explicit=False))

    def _set_length(self, file: int, num_bytes: int) -> None:
        """Set a length; what is behind it is empty, also if the file grows again."""
        step, state = self._step(), self._now.files[file]
        for number, page in sorted(state.pages.items()):
            content = page[: max(0, num_bytes - number * PAGE_BYTES)].ljust(PAGE_BYTES, b"\0")
            if content != page:
                self._cuts.setdefault(file, set()).add(len(self.recording.units))
                self._changed(Page(step, file, number, content))
        self._changed(self._length(step, file, num_bytes, is_explicit=True))

    def _length(self, step: int, file: int, num_bytes: int, *, is_explicit: bool) -> Length:
        cuts = frozenset(self._cuts.get(file, ()))
        return Length(step, file, num_bytes, is_explicit, cuts)


def _pages(data: bytes, offset: int) -> Iterable[tuple[int, bytes]]:
    """Yield the pages that bytes at an offset touch, each with the part that lies in it."""
    done = 0
    while done < len(data):
        number, start = divmod(offset + done, PAGE_BYTES)
        piece = data[done : done + PAGE_BYTES - start]
        yield number, piece
        done += len(piece)
