"""Power cuts: file changes are recorded, and every state that a disk may have after a cut is built.

    ops = RecordingFileOps(str(root))
    with TierHarness(FsTier(FsSettings(ops=ops, ...))) as harness:
        harness.store(keys)
        ops.mark(keys)                 # acknowledged: a cut from here on must not lose them
    for state in states_of(ops.recording, ops.recording.num_steps, MetadataOrder.JOURNALLED):
        state.build(folder)

A change is recorded as *units*, the smallest pieces that reach a disk by themselves: a change of
names, an attribute, a length, a page. Nothing waits for the device: what a wait would have made
durable follows from the recording.

What somebody has waited for is there. Of what came after that, any part may be:

* Pages are written back one by one, in any order, each as it was at some moment since; one that
  is being written may be torn between two sectors of 512 bytes. A longer file may be there before
  its bytes are, which are zeros then.
* Changes of names, attributes and lengths that were asked for come in an order that depends on the
  filesystem; see `MetadataOrder`. Each is there whole or not at all.

`fdatasync` of a file covers its bytes and length, `fdatasync` of a folder the names in it.

Sources: the states that a block device may have between two flushes are those of dm-log-writes
(Linux, Documentation/admin-guide/device-mapper/log-writes.rst) and CrashMonkey (Mohan et al., OSDI
2018); what filesystems promise beyond POSIX is from ALICE (Pillai et al., "All File Systems Are Not
Created Equal", OSDI 2014). What is not modelled: stale bytes of other files behind the end of what
was written (ext4 with data=writeback), and bits that a device gets wrong.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import os
import random
import shutil
import stat as stat_module
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from faulty_files import FaultyFileOps

PAGE_BYTES: Final = 4096
"""What a page cache writes back at once."""

ROOT: Final = 0
"""The number of the folder that is recorded."""

EMPTY_PAGE: Final = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Names:
    """A change of names, whole or not at all: making, renaming or removing a file or folder.

    Attributes:
        step: When; steps count from 1.
        names: (folder, name) -> the file or folder of that name from now on, None if there is none.
        files: Every file or folder that it is about.
    """

    step: int
    names: Mapping[tuple[int, str], int | None]
    files: frozenset[int]


@dataclass(frozen=True, slots=True)
class Attribute:
    """An extended attribute of a file."""

    step: int
    file: int
    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Length:
    """A new length of a file.

    Attributes:
        is_explicit: Whether it was asked for, and is not that of a write beyond the end.
        cuts: Numbers of the units that emptied pages behind an end of this file, up to now.
    """

    step: int
    file: int
    num_bytes: int
    is_explicit: bool
    cuts: frozenset[int]


@dataclass(frozen=True, slots=True)
class Page:
    """New content of one page of a file; of several, none is there without those before."""

    step: int
    file: int
    number: int
    content: bytes


Unit = Names | Attribute | Length | Page


@dataclass(frozen=True, slots=True)
class Sync:
    """A wait for the device.

    Attributes:
        file: The file or folder.
        with_attributes: Whether for more than what reading its bytes needs (`fsync`).
    """

    step: int
    file: int
    with_attributes: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that was noted between two steps."""

    step: int
    what: object


@dataclass(slots=True)
class FileState:
    """A regular file.

    Attributes:
        pages: Number -> content, of those that are not empty.
        attributes: Extended ones.
    """

    num_bytes: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)
    attributes: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> FileState:
        """Return one that can be changed by itself."""
        return FileState(self.num_bytes, dict(self.pages), dict(self.attributes))


@dataclass(slots=True)
class Image:
    """A file system below one folder.

    Attributes:
        files: Number -> regular file.
        folders: Number -> what is in it by name.
    """

    files: dict[int, FileState] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def copy(self) -> Image:
        """Return one that can be changed by itself."""
        return Image(
            {number: file.copy() for number, file in self.files.items()},
            {number: dict(names) for number, names in self.folders.items()},
        )

    def apply(self, unit: Unit) -> None:
        """Make a change."""
        if isinstance(unit, Names):
            for (folder, name), file in unit.names.items():
                if file is None:
                    self.folders[folder].pop(name, None)
                else:
                    self.folders[folder][name] = file
        elif isinstance(unit, Attribute):
            self.files[unit.file].attributes[unit.name] = unit.value
        elif isinstance(unit, Length):
            self.files[unit.file].num_bytes = unit.num_bytes
        else:
            self.files[unit.file].pages[unit.number] = unit.content


@dataclass(slots=True)
class Recording:
    """What was done to the files below a folder.

    Attributes:
        base: What was there at the beginning, on the device.
        units: Every change, in order.
        syncs: Every wait for the device, in order.
        marks: What was noted, in order.
        num_steps: How many calls changed something, or waited.
    """

    base: Image
    units: list[Unit] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    num_steps: int = 0

    def marked(self, step: int) -> list[object]:
        """Return what was noted up to a step."""
        return [mark.what for mark in self.marks if mark.step <= step]


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


SECTOR_BYTES: Final = 512
"""What a device writes whole or not at all."""

_SHARES: Final = (0.1, 0.5, 0.9)
"""Which part of what may be there is, in a sample."""


class MetadataOrder(enum.Enum):
    """What is known of the order in which metadata reaches the disk."""

    JOURNALLED = "journalled"
    """All of it goes through one log: what is there is a prefix. What a write has made longer is
    logged after all that came before the write. So do ext4, xfs and others with a journal."""
    UNORDERED = "unordered"
    """Only what POSIX promises: changes of one name, and of one file, keep their order; those of a
    folder do not. A file that is waited for may still have no name."""


@dataclass(frozen=True, slots=True)
class State:
    """What is on the disk after a cut.

    Attributes:
        step: The last step before the cut.
        lost: Numbers of the units that came before the cut and are not there.
        torn: Number of a page's unit -> how many sectors of it are there.
    """

    recording: Recording
    step: int
    lost: frozenset[int]
    torn: tuple[tuple[int, int], ...] = ()

    def image(self) -> Image:
        """Return the files that are there."""
        image = self.recording.base.copy()
        torn = dict(self.torn)
        for number, unit in _until(self.recording, self.step):
            if number not in self.lost:
                image.apply(unit)
            elif number in torn and isinstance(unit, Page):
                pages = image.files[unit.file].pages
                cut = torn[number] * SECTOR_BYTES
                before = pages.get(unit.number, EMPTY_PAGE)
                pages[unit.number] = unit.content[:cut] + before[cut:]
        return image

    def build(self, folder: Path) -> None:
        """Make these files in a folder; nothing else that is there stays."""
        image = self.image()
        _build(image, ROOT, folder)

    def digest(self) -> bytes:
        """Return what is equal of equal files."""
        image = self.image()
        return hashlib.sha256(repr(list(_listing(image, ROOT, ""))).encode()).digest()

    def __str__(self) -> str:
        """Return what is lost, for the note on a failed test."""
        units = self.recording.units
        lost = ", ".join(f"{number}: {_text(units[number])}" for number in sorted(self.lost))
        return f"a cut after step {self.step}; torn: {dict(self.torn)}; lost: {lost or 'nothing'}"


class PowerCuts:
    """The states after cuts of one recording. Thread: one."""

    def __init__(self, recording: Recording, order: MetadataOrder) -> None:
        self._recording = recording
        self._order = order
        self._needs = self._requirements()

    def all_states(self, step: int, limit: int, draw: random.Random) -> Iterator[State]:
        """Yield the states after a cut behind a step, each once.

        Those are all that there are, torn pages aside, if there are at most `limit`. Otherwise:
        nothing is lost, all is, everything but one unit, nothing but one, and a sample of the rest.
        """
        seen: set[bytes] = set()
        for state in itertools.islice(self._candidates(step, limit, draw), limit):
            digest = state.digest()
            if digest not in seen:
                seen.add(digest)
                yield state

    def sample(self, step: int, draw: random.Random) -> State:
        """Return one of the states after a cut behind a step."""
        pending = self.pending(step)
        share = draw.choice(_SHARES)
        lost: set[int] = set()
        torn = []
        for number in pending:
            if self._needs[number] & lost:
                lost.add(number)
            elif draw.random() >= share:
                lost.add(number)
                if isinstance(self._recording.units[number], Page) and draw.random() < share:
                    torn.append((number, draw.randrange(1, PAGE_BYTES // SECTOR_BYTES)))
        return State(self._recording, step, frozenset(lost), tuple(torn))

    def pending(self, step: int) -> list[int]:
        """Return the numbers of the units that may or may not be there after a cut."""
        durable = self._durable(step)
        return [n for n, _ in _until(self._recording, step) if n not in durable]

    # -- inside ---------------------------------------------------------------------------------

    def _candidates(self, step: int, limit: int, draw: random.Random) -> Iterator[State]:
        pending = self.pending(step)
        few = list(itertools.islice(self._lost_sets(pending), limit))
        if len(few) < limit:
            yield from (State(self._recording, step, lost) for lost in few)
        else:
            yield State(self._recording, step, frozenset())
            yield State(self._recording, step, frozenset(pending))
            # Not in order: where the limit ends it, the last units have had their turn, too.
            for number in draw.sample(pending, len(pending)):
                yield State(self._recording, step, self._with_dependents(pending, number))
                there = self._closure([number])
                yield State(self._recording, step, frozenset(set(pending) - there))
        for number in pending:
            if isinstance(self._recording.units[number], Page):
                lost = self._with_dependents(pending, number)
                for sectors in (1, PAGE_BYTES // SECTOR_BYTES // 2):
                    yield State(self._recording, step, lost, ((number, sectors),))
        if len(few) >= limit:
            for _ in range(limit):
                yield self.sample(step, draw)

    def _lost_sets(self, pending: list[int]) -> Iterator[frozenset[int]]:
        """Yield every set of units that can be lost together."""
        stack: list[tuple[int, frozenset[int]]] = [(0, frozenset())]
        while stack:
            index, lost = stack.pop()
            if index == len(pending):
                yield lost
                continue
            number = pending[index]
            stack.append((index + 1, lost | {number}))
            if not self._needs[number] & lost:
                stack.append((index + 1, lost))

    def _with_dependents(self, pending: list[int], first: int) -> frozenset[int]:
        """Return a unit and all that cannot be there without it."""
        lost = {first}
        for number in pending:
            if self._needs[number] & lost:
                lost.add(number)
        return frozenset(lost)

    def _durable(self, step: int) -> set[int]:
        """Return the numbers of the units that are there after a cut, whatever else is."""
        waited = [
            number
            for sync in self._recording.syncs
            if sync.step <= step
            for number, unit in _until(self._recording, sync.step)
            if _covers(unit, sync.file, with_attributes=sync.with_attributes)
        ]
        return self._closure(waited)

    def _closure(self, numbers: Collection[int]) -> set[int]:
        """Return units and all that they cannot be there without."""
        found: set[int] = set()
        stack = list(numbers)
        while stack:
            number = stack.pop()
            if number not in found:
                found.add(number)
                stack += self._needs[number]
        return found

    def _requirements(self) -> list[frozenset[int]]:
        """Return without which others each unit cannot be there, one step deep."""
        last: dict[Hashable, int] = {}
        needs = []
        for number, unit in enumerate(self._recording.units):
            chains = list(self._chains(unit))
            before = {last[chain] for chain in chains if chain in last}
            if isinstance(unit, Length):
                before |= unit.cuts
                if self._order is MetadataOrder.JOURNALLED and "log" in last:
                    before.add(last["log"])
            needs.append(frozenset(before - {number}))
            last.update(dict.fromkeys(chains, number))
        return needs

    def _chains(self, unit: Unit) -> Iterator[Hashable]:
        """Yield the orders that a unit keeps with others."""
        if isinstance(unit, Page):
            yield "page", unit.file, unit.number
            return
        if isinstance(unit, Length):
            yield "length", unit.file
        if self._order is MetadataOrder.JOURNALLED:
            if not isinstance(unit, Length) or unit.is_explicit:
                yield "log"
        elif isinstance(unit, Names):
            yield from (("name", *name) for name in unit.names)
            yield from (("file", file) for file in unit.files)
        elif isinstance(unit, Attribute):
            yield "attribute", unit.file


def _covers(unit: Unit, file: int, *, with_attributes: bool) -> bool:
    """Tell whether a wait for a file or folder is one for this unit."""
    if isinstance(unit, Names):
        return any(folder == file for folder, _ in unit.names)
    if isinstance(unit, Attribute):
        return with_attributes and unit.file == file
    return unit.file == file


def _until(recording: Recording, step: int) -> Iterator[tuple[int, Unit]]:
    """Yield the units of the first steps, with their numbers."""
    is_before = functools.partial(_is_before, step)
    return itertools.takewhile(is_before, enumerate(recording.units))


def _is_before(step: int, numbered: tuple[int, Unit]) -> bool:
    return numbered[1].step <= step


def _text(unit: Unit) -> str:
    if isinstance(unit, Names):
        return " and ".join(
            f"{folder}/{name} -> {'nothing' if file is None else file}"
            for (folder, name), file in unit.names.items()
        )
    if isinstance(unit, Page):
        return f"page {unit.number} of {unit.file}"
    if isinstance(unit, Length):
        return f"length {unit.num_bytes} of {unit.file}"
    return f"{unit.name} of {unit.file}"


def _build(image: Image, folder: int, path: Path) -> None:
    path.mkdir(exist_ok=True)
    names = image.folders[folder]
    for entry in os.scandir(path):
        if not entry.is_dir(follow_symlinks=False):
            Path(entry).unlink()
        elif names.get(entry.name) not in image.folders:  # to make many folders anew takes long
            shutil.rmtree(entry)
    for name, number in names.items():
        if number in image.folders:
            _build(image, number, path / name)
            continue
        state = image.files[number]
        fd = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for page, content in state.pages.items():
                os.pwrite(fd, content, page * PAGE_BYTES)
            os.ftruncate(fd, state.num_bytes)
            for attribute, value in state.attributes.items():
                os.setxattr(fd, attribute, value)
        finally:
            os.close(fd)


def _listing(image: Image, folder: int, path: str) -> Iterator[tuple[object, ...]]:
    for name, number in sorted(image.folders[folder].items()):
        if number in image.folders:
            yield path, name
            yield from _listing(image, number, f"{path}/{name}")
        else:
            state = image.files[number]
            pages = [
                (page, hashlib.sha256(content).digest())
                for page, content in sorted(state.pages.items())
                if page * PAGE_BYTES < state.num_bytes and content != EMPTY_PAGE
            ]
            yield path, name, state.num_bytes, pages, sorted(state.attributes.items())
