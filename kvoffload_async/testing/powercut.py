"""What may be on a disk after a power cut, given what was recorded before; see `recording`.

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
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvoffload_async.testing.changes import (
    EMPTY_PAGE,
    PAGE_BYTES,
    ROOT,
    Attribute,
    Image,
    Length,
    Names,
    Page,
    Recording,
    Unit,
)

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
        """Make these files in a folder that is not there yet."""
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
    path.mkdir()
    for name, number in image.folders[folder].items():
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
