"""Finds and inspects the namespaces in a directory, and verifies their blocks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat as stat_module
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

from kvoffload_async.tiers.files.maintenance import BadBlock, MaintenanceIo, Verdict, folders_in
from kvoffload_async.tiers.files.ops import Entry, FileOps, names_in, read_all
from kvoffload_async.tiers.files.sealing import BlockKey
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, Origin, create_attributes
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace, counted_bytes, has_vllms_layout
from kvoffload_async.tiers.fs.usage import Usage, read_usage
from kvoffload_async.tiers.fs.walk import writer_of
from kvoffload_async.tiers.fs.writers import WriterRegistry, Writers
from kvoffload_async.types import OffloadKey

_FOLDER: Final = re.compile(
    r"(?P<base>.+_(?P<digest>[0-9a-f]{12}))_r(?P<rank>[0-9]{1,9})", re.DOTALL
)
_OWN_ENGINE: Final = "kvoffload_async"
_MAX_MANIFEST_BYTES: Final = 1 << 20


class FoundNamespace(Namespace):
    """A namespace found on disk, identified by its folder and not by its manifest.

    Attributes:
        name: Name of the folder.
        has_manifest: Whether its `config.json` was read: it is a JSON object, in `fields`.
    """

    def __init__(self, root_dir: str, match: re.Match[str], *, is_vllms: bool) -> None:
        self.name = match[0]
        self.has_manifest = False
        self.fields = {}
        self.rank = int(match["rank"])
        self.is_vllms = is_vllms
        self.digest = match["digest"]
        self.config_path = f"{root_dir}/{match['base']}/config.json"
        self.folder = f"{root_dir}/{self.name}"

    @property
    def block_bytes(self) -> int | None:
        """Length of each block, if the manifest is this package's and contains it."""
        length = self.fields.get("block_bytes")
        is_own = self.fields.get("inference_engine") == _OWN_ENGINE
        return length if is_own and type(length) is int and length > 0 else None


async def find_namespaces(io: MaintenanceIo, directory: str) -> list[FoundNamespace]:
    """Return the namespaces below an absolute directory, ordered by name.

    Raises:
        OSError: The directory cannot be read.
    """
    namespaces = await io.run(_list_namespaces, io.ops, directory)
    for namespace in namespaces:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # missing or unreadable
            fields = json.loads(await io.read_file(namespace.config_path, _MAX_MANIFEST_BYTES))
            if isinstance(fields, dict):
                namespace.fields, namespace.has_manifest = fields, True
    return namespaces


def _list_namespaces(ops: FileOps, directory: str) -> list[FoundNamespace]:
    namespaces = []
    found = (path.rpartition("/")[2] for path in folders_in(ops, directory))
    for match in filter(None, map(_FOLDER.fullmatch, found)):
        names: list[str] = []
        with contextlib.suppress(OSError):  # reported when it is walked
            names = names_in(ops, f"{directory}/{match[0]}")
        is_vllms = has_vllms_layout(names)
        namespaces.append(FoundNamespace(directory, match, is_vllms=is_vllms))
    return namespaces


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A found file; `disk_bytes` are allocated bytes, `modified_s` is in seconds since 1970."""

    path: str
    length_bytes: int
    disk_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class FoundBlock(FoundFile):
    """A block's file."""

    key: OffloadKey


@dataclass(slots=True)
class Scan:
    """Result of a walk over a namespace.

    Attributes:
        blocks: Files with the path of a block.
        temps: Temporary files.
        unknown_files: All other files.
        folders: Block folders.
        other_folders: Other folders.
        total_bytes: Disk bytes of all files, and the growth of folders.
        grown_bytes: The growth of folders.
        unreadable: Errors of folders that could not be walked.
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    temps: list[FoundFile] = field(default_factory=list)
    unknown_files: list[FoundFile] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    other_folders: list[str] = field(default_factory=list)
    total_bytes: int = 0
    grown_bytes: int = 0
    unreadable: list[str] = field(default_factory=list)

    def take_in(
        self, namespace: FoundNamespace, entries: list[Entry], error: OSError | None, folder: str
    ) -> None:
        """Add the entries of a folder, and the error if listing them failed."""
        if error is not None:
            self.unreadable.append(f"{folder}: {error.strerror or error}")
        for path, status in entries:
            self._take_in(namespace, path, status)

    def _take_in(self, namespace: FoundNamespace, path: str, status: os.stat_result) -> None:
        allocated_bytes = counted_bytes(status)
        self.total_bytes += allocated_bytes
        name = path[len(namespace.folder) + 1 :]
        if stat_module.S_ISDIR(status.st_mode):
            self.grown_bytes += allocated_bytes
            if namespace.is_block_folder(path):
                self.folders.append(path)
            elif name and not name.startswith("."):
                self.other_folders.append(path)
            return
        if name.startswith("."):
            return
        file = (path, status.st_size, allocated_bytes, status.st_mtime)
        is_file, key = stat_module.S_ISREG(status.st_mode), namespace.key_of(path)
        if is_file and key is not None:
            self.blocks.append(FoundBlock(*file, key))
        elif is_file and name.endswith(TEMP_SUFFIX):
            self.temps.append(FoundFile(*file))
        else:
            self.unknown_files.append(FoundFile(*file))


async def scan_namespace(io: MaintenanceIo, namespace: FoundNamespace) -> Scan:
    """Walk over a namespace; entries removed meanwhile are skipped. Incomplete if stopped."""
    scan = Scan()
    ops, folder = io.ops, namespace.folder
    top, error = await io.run(_found, lambda: [(folder, ops.stat(folder)), *ops.entries(folder)])
    scan.take_in(namespace, top, error, folder)
    folders = [path for path, status in top[1:] if stat_module.S_ISDIR(status.st_mode)]
    io.control.expect(len(folders))
    async with aclosing(
        io.share_out(iter(folders), lambda path: _found(partial(ops.walk, path)))
    ) as walked:
        async for folder, (entries, error) in walked:
            scan.take_in(namespace, entries, error, folder)
            io.control.advance(1)
    return scan


def _found(entries: Callable[[], Iterable[Entry]]) -> tuple[list[Entry], OSError | None]:
    """Return a folder's entries, none if it is missing, and the error if they are incomplete."""
    found: list[Entry] = []
    try:
        found.extend(entries())
    except FileNotFoundError:
        pass
    except OSError as error:
        return found, error
    return found, None


class Temps(NamedTuple):
    """Temporary files, grouped by the state of their writer."""

    living: list[FoundFile]
    dead: list[FoundFile]
    foreign: list[FoundFile]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of inspecting a namespace.

    Attributes:
        scan: Its files.
        problems: One line per problem.
        figures: The figures as a JSON object. Bytes are disk bytes as allocated, except the length
            of a block (`block_bytes`) and those of all blocks (`block_length_bytes`). `disk_bytes`
            leaves out temporary files of living writers; `counted_bytes`, the shared count, may
            differ by `count_tolerance_bytes`. Times are in seconds since 1970.
        rows: The figures as a table, for people.
    """

    scan: Scan
    problems: list[str]
    figures: dict[str, Any]
    rows: list[tuple[str, str]]


async def inspect_namespace(io: MaintenanceIo, namespace: FoundNamespace) -> Inspection:
    """Inspect a namespace by a walk, without changing it."""
    _, before = await io.run(_count, io.ops, namespace.folder)
    scan = await scan_namespace(io, namespace)
    # After the walk: the writers of all temporary files found have registered by now.
    writers = await io.run(
        lambda: judge_writers(WriterRegistry(io.ops, namespace.folder), time.time())
    )
    is_counted, usage = await io.run(_count, io.ops, namespace.folder)
    temps = sort_temps(scan.temps, writers)
    disk_bytes = scan.total_bytes - _disk_bytes(temps.living)
    tolerance_bytes = _tolerance_bytes(scan, writers, before, usage)
    problems = [f"cannot be walked: {reason}" for reason in scan.unreadable]
    if temps.dead:
        problems.append(f"{len(temps.dead)} temporary files of dead writers")
    if is_counted and usage is None:
        problems.append("the count of bytes is unreadable")
    elif usage is not None and not usage.is_complete:
        problems.append("the count of bytes is not complete yet: no walk has seen everything")
    elif usage is not None and abs(usage.settled_bytes - disk_bytes) > tolerance_bytes:
        problems.append(f"{usage.settled_bytes} bytes are counted and {disk_bytes} are on disk")
    times_s = [block.modified_s for block in scan.blocks]
    model = namespace.fields.get("model_name")
    figures = {
        "name": namespace.name,
        "model": model if isinstance(model, str) else None,
        "has_manifest": namespace.has_manifest,
        "block_bytes": namespace.block_bytes,
        "blocks": len(scan.blocks),
        "block_length_bytes": sum(block.length_bytes for block in scan.blocks),
        "block_disk_bytes": _disk_bytes(scan.blocks),
        "disk_bytes": disk_bytes,
        "counted_bytes": None if usage is None else usage.settled_bytes,
        "reserved_bytes": 0 if usage is None else usage.reserved_bytes,
        "count_tolerance_bytes": tolerance_bytes,
        "living_writers": len(writers.living),
        "dead_writers": len(writers.dead),
        "temps_of_living": len(temps.living),
        "temps_of_dead": len(temps.dead),
        "temps_foreign": len(temps.foreign),
        "temp_bytes": _disk_bytes(scan.temps),
        "unknown_files": len(scan.unknown_files),
        "unknown_file_bytes": _disk_bytes(scan.unknown_files),
        "oldest_s": min(times_s, default=None),
        "newest_s": max(times_s, default=None),
        "problems": problems,
    }
    return Inspection(scan, problems, figures, _rows(figures))


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    def shown(*names: str) -> str:
        return " / ".join(f"{figures[name]:,}" for name in names)

    return [
        ("model", figures["model"] or "unknown"),
        ("blocks", shown("blocks")),
        ("bytes in blocks", shown("block_length_bytes")),
        ("bytes in blocks, as allocated", shown("block_disk_bytes")),
        ("bytes on disk", shown("disk_bytes")),
        ("bytes counted", "none" if figures["counted_bytes"] is None else shown("counted_bytes")),
        ("writers, living / dead", shown("living_writers", "dead_writers")),
        (
            "temporary, of living / dead / unknown",
            shown("temps_of_living", "temps_of_dead", "temps_foreign"),
        ),
        ("bytes in temporary files", shown("temp_bytes")),
        ("unknown files", f"{shown('unknown_files')} of {shown('unknown_file_bytes')} bytes"),
        ("oldest block", _time(figures["oldest_s"])),
        ("newest block", _time(figures["newest_s"])),
    ]


def _disk_bytes(files: Iterable[FoundFile]) -> int:
    return sum(file.disk_bytes for file in files)


def judge_writers(registry: WriterRegistry, now_s: float) -> Writers:
    """Return the writers other than the registry's own; none if they cannot be listed."""
    try:
        return registry.classify(now_s)
    except OSError:
        return Writers(set(), set())


def sort_temps(temps: Sequence[FoundFile], writers: Writers) -> Temps:
    """Group temporary files by the state of their writer."""
    found = Temps([], [], [])
    for temp in temps:
        writer = writer_of(temp.path)
        if writer in writers.living:
            found.living.append(temp)
        else:
            (found.dead if writer in writers.dead else found.foreign).append(temp)
    return found


def _count(ops: FileOps, folder: str) -> tuple[bool, Usage | None]:
    """Return whether a namespace has a shared count, and the count if readable. Thread-safe."""
    with contextlib.suppress(OSError):
        return True, read_usage(ops, folder)
    return False, None


_ENTRY_BYTES = 4096


def _tolerance_bytes(
    scan: Scan, writers: Writers, before: Usage | None, after: Usage | None
) -> int:
    """Return the allowed error of the shared count: changes during the walk, and uncounted bytes.

    Uncounted are the growth of folders, entries of writers that came and went, operations in
    flight, also of dead writers, and what was in doubt when the count was corrected last; the next
    walks of a bounded tier correct them.
    """
    num_entries = len(writers.living) + len(writers.dead) + 1
    tolerance_bytes = scan.grown_bytes + num_entries * _ENTRY_BYTES
    if after is not None:
        tolerance_bytes += after.total.doubt_bytes
        tolerance_bytes += after.reserved_bytes + after.moving_bytes
        if before is not None:
            tolerance_bytes += before.reserved_bytes + before.moving_bytes
            tolerance_bytes += max(0, after.changed_bytes - before.changed_bytes)
    return tolerance_bytes


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


BATCH_BYTES = 4 << 20
"""Bytes that a thread reads before it checks whether to stop."""


_NOT_COMPARED = {None: Verdict.WITHOUT_DIGEST, Origin.OTHER_KEY: Verdict.OTHER_KEY}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict on one block, and whether its file was removed."""

    block: FoundBlock
    verdict: Verdict
    reason: str = ""
    is_removed: bool = False

    @property
    def bad(self) -> BadBlock:
        """The path of the bad block, and the reason."""
        return BadBlock(self.block.path, self.reason)


class BlockChecker:
    """Reads and verifies blocks; optionally removes corrupt ones."""

    def __init__(
        self,
        ops: FileOps,
        namespace: FoundNamespace,
        blocks: Sequence[FoundBlock],
        key: BlockKey = None,
        *,
        remove_corrupt: bool = False,
    ) -> None:
        """Take the length of a block from the manifest or, without one, the most common length.

        Args:
            ops: The system calls.
            namespace: The blocks' namespace.
            blocks: All its blocks.
            key: The key of the blocks.
            remove_corrupt: Whether to remove the files of corrupt blocks.
        """
        self._key = key
        self._ops = ops
        self._namespace = namespace
        self._blocks = blocks
        self._remove_corrupt = remove_corrupt
        self._block_bytes = namespace.block_bytes
        lengths = Counter(block.length_bytes for block in blocks).most_common(1)
        self._usual_bytes = lengths[0][0] if lengths else 0

    async def outcomes(self, io: MaintenanceIo) -> AsyncGenerator[Outcome, None]:
        """Check all blocks in parallel; yield an outcome for each."""
        io.control.expect(sum(block.length_bytes for block in self._blocks))
        async with aclosing(io.share_out(_batches(self._blocks), self.check)) as checked:
            async for batch, outcomes in checked:
                io.control.advance(sum(block.length_bytes for block in batch))
                for outcome in outcomes:
                    yield outcome

    def check(self, blocks: Sequence[FoundBlock]) -> list[Outcome]:
        """Verify blocks one by one; a failure does not affect other blocks. Thread-safe."""
        return [self._check(block) for block in blocks]

    def _check(self, block: FoundBlock) -> Outcome:
        try:
            with self._ops.opened(block.path, os.O_RDONLY) as fd:
                verdict, reason = self._classify(fd, block)
                if verdict is Verdict.CORRUPT:
                    return self._corrupt(fd, block, reason)
                return Outcome(block, verdict, reason)
        except FileNotFoundError:
            return Outcome(block, Verdict.GONE)
        except MemoryError:  # a sparse file can have any length
            return Outcome(block, Verdict.UNREADABLE, "more bytes than fit into memory")
        except OSError as error:
            return Outcome(block, Verdict.UNREADABLE, error.strerror or str(error))

    def _classify(self, fd: int, block: FoundBlock) -> tuple[Verdict, str]:
        length = self._ops.fstat(fd).st_size
        # Read before the bytes, so that a file overwritten meanwhile does not match.
        digest = self._ops.get_xattr(fd, ATTRIBUTE)
        digester = create_attributes(self._namespace.layout_of(length), self._key)
        origin = None if digest is None else digester.origin_of(digest)
        if origin is Origin.NEWER:  # its blocks may have another length
            return Verdict.NEWER, ""
        wanted = self._block_bytes
        if wanted is None and digest is None:
            wanted = self._usual_bytes
        if wanted is not None and length != wanted:
            return Verdict.CORRUPT, f"{length} bytes instead of {wanted}"
        data = memoryview(bytearray(length))
        if (done := read_all(self._ops, fd, data)) < length:
            return Verdict.CORRUPT, f"ends after {done} bytes"
        if verdict := _NOT_COMPARED.get(origin):
            return verdict, ""
        if digest is None or not digester.matches(block.key, digest, data):
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.VERIFIED, ""

    def _corrupt(self, fd: int, block: FoundBlock, reason: str) -> Outcome:
        """Return the outcome for a corrupt file, which is removed if requested and not replaced."""
        status = self._ops.fstat(fd)
        if not os.path.samestat(status, self._ops.stat(block.path)):
            return Outcome(block, Verdict.GONE)
        if not self._remove_corrupt:
            return Outcome(block, Verdict.CORRUPT, reason)
        try:
            self._ops.unlink(block.path)
        except FileNotFoundError:
            return Outcome(block, Verdict.GONE)
        except OSError as error:
            reason = f"{reason}, and cannot be removed: {error.strerror or error}"
            return Outcome(block, Verdict.CORRUPT, reason)
        return Outcome(block, Verdict.CORRUPT, reason, is_removed=True)


def _batches(blocks: Sequence[FoundBlock]) -> Iterator[Sequence[FoundBlock]]:
    first, size_bytes = 0, 0
    for index, block in enumerate(blocks, 1):
        size_bytes += block.length_bytes
        if size_bytes >= BATCH_BYTES:
            yield blocks[first:index]
            first, size_bytes = index, 0
    if first < len(blocks):
        yield blocks[first:]
