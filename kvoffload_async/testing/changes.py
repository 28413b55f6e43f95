"""Changes of files as they reach a disk, and the files that come of them; see `powercut`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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
