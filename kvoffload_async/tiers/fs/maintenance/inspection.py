"""Inspection of a namespace: figures and problems."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvoffload_async.tiers.files.maintenance import MaintenanceIo
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.counts import Usage
from kvoffload_async.tiers.fs.inventory import writer_of
from kvoffload_async.tiers.fs.maintenance.namespaces import FoundNamespace
from kvoffload_async.tiers.fs.maintenance.scan import FoundFile, Scan, scan_namespace
from kvoffload_async.tiers.fs.usage import read_usage
from kvoffload_async.tiers.fs.writers import WriterRegistry


@dataclass(frozen=True, slots=True)
class Writers:
    """The ids of a namespace's writers."""

    living: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Temps:
    """Temporary files, grouped by the state of their writer."""

    living: tuple[FoundFile, ...]
    dead: tuple[FoundFile, ...]
    foreign: tuple[FoundFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Figures of one namespace. Bytes are allocated disk bytes unless documented otherwise.

    Attributes:
        name: Name of its folder.
        model: Name of the model, from the manifest.
        has_manifest: Whether there is a readable `config.json`.
        block_bytes: Length of a block, from the manifest.
        blocks: Number of block files; `block_length_bytes` and `block_disk_bytes` are their sizes.
        disk_bytes: All files and folders, without temporary files of living writers.
        counted_bytes: `disk_bytes` according to the shared count; None if it is missing or
            unreadable.
        reserved_bytes: Bytes reserved by writers for blocks being written.
        count_tolerance_bytes: Allowed difference between `disk_bytes` and `counted_bytes`.
        living_writers: Number of open tiers.
        dead_writers: Number of tiers that were not closed.
        temps_of_living: Temporary files of living writers.
        temps_of_dead: Temporary files of dead writers.
        temps_foreign: Temporary files of unknown writers.
        temp_bytes: Disk bytes of all temporary files.
        unknown_files: Number of files that are not blocks; `unknown_file_bytes` is their size.
        oldest_s: Modification time of the oldest block in seconds since 1970; `newest_s` likewise.
        problems: One line per problem.
    """

    name: str
    model: str | None
    has_manifest: bool
    block_bytes: int | None
    blocks: int
    block_length_bytes: int
    block_disk_bytes: int
    disk_bytes: int
    counted_bytes: int | None
    reserved_bytes: int
    count_tolerance_bytes: int
    living_writers: int
    dead_writers: int
    temps_of_living: int
    temps_of_dead: int
    temps_foreign: int
    temp_bytes: int
    unknown_files: int
    unknown_file_bytes: int
    oldest_s: float | None
    newest_s: float | None
    problems: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Rows of the table of figures."""
        temps = (self.temps_of_living, self.temps_of_dead, self.temps_foreign)
        count = "none" if self.counted_bytes is None else f"{self.counted_bytes:,}"
        return [
            ("model", "unknown" if self.model is None else self.model),
            ("blocks", f"{self.blocks:,}"),
            ("bytes in blocks", f"{self.block_length_bytes:,}"),
            ("bytes in blocks, as allocated", f"{self.block_disk_bytes:,}"),
            ("bytes on disk", f"{self.disk_bytes:,}"),
            ("bytes counted", count),
            ("writers, living / dead", f"{self.living_writers:,} / {self.dead_writers:,}"),
            ("temporary, of living / dead / unknown", " / ".join(f"{n:,}" for n in temps)),
            ("bytes in temporary files", f"{self.temp_bytes:,}"),
            ("unknown files", f"{self.unknown_files:,} of {self.unknown_file_bytes:,} bytes"),
            ("oldest block", _time(self.oldest_s)),
            ("newest block", _time(self.newest_s)),
        ]


async def inspect_namespace(
    io: MaintenanceIo, namespace: FoundNamespace
) -> tuple[Inspection, Scan]:
    """Inspect a namespace with a walk; changes nothing."""
    before = await io.run(_count, io.ops, namespace.folder)
    scan = await scan_namespace(io, namespace)
    # After the walk: the writers of all temporary files found have registered by now.
    writers = await io.run(judge_writers, io.ops, namespace.folder)
    after = await io.run(_count, io.ops, namespace.folder)
    return _inspection(namespace, scan, writers, before, after), scan


def judge_writers(ops: FileOps, folder: str, now_s: float | None = None) -> Writers:
    """Return the writers; `now_s` defaults to this host's clock. Thread-safe."""
    registry = WriterRegistry(ops, folder)
    try:
        living, dead = registry.judged(time.time() if now_s is None else now_s)
    except OSError:
        return Writers()
    return Writers(frozenset(living), frozenset(dead))


def sort_temps(temps: Sequence[FoundFile], writers: Writers) -> Temps:
    """Group temporary files by the state of their writer."""
    by_owner: dict[str, list[FoundFile]] = {"living": [], "dead": [], "foreign": []}
    for temp in temps:
        writer = writer_of(temp.path)
        if writer in writers.living:
            by_owner["living"].append(temp)
        else:
            by_owner["dead" if writer in writers.dead else "foreign"].append(temp)
    return Temps(**{owner: tuple(files) for owner, files in by_owner.items()})


def _count(ops: FileOps, folder: str) -> tuple[bool, Usage | None]:
    """Return (whether there is a shared count, its content). Thread-safe."""
    with contextlib.suppress(OSError):
        return True, read_usage(ops, folder)
    return False, None


def _inspection(
    namespace: FoundNamespace,
    scan: Scan,
    writers: Writers,
    before: tuple[bool, Usage | None],
    after: tuple[bool, Usage | None],
) -> Inspection:
    temps = sort_temps(scan.temps, writers)
    disk_bytes = scan.total_bytes - sum(temp.disk_bytes for temp in temps.living)
    is_counted, usage = after
    tolerance_bytes = _tolerance_bytes(scan, writers, before[1], usage)
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
    return Inspection(
        name=namespace.name,
        model=None if model is None else str(model),
        has_manifest=namespace.has_manifest,
        block_bytes=namespace.block_bytes,
        blocks=len(scan.blocks),
        block_length_bytes=sum(block.length_bytes for block in scan.blocks),
        block_disk_bytes=sum(block.disk_bytes for block in scan.blocks),
        disk_bytes=disk_bytes,
        counted_bytes=None if usage is None else usage.settled_bytes,
        reserved_bytes=0 if usage is None else usage.all_reserved_bytes,
        count_tolerance_bytes=tolerance_bytes,
        living_writers=len(writers.living),
        dead_writers=len(writers.dead),
        temps_of_living=len(temps.living),
        temps_of_dead=len(temps.dead),
        temps_foreign=len(temps.foreign),
        temp_bytes=sum(temp.disk_bytes for temp in scan.temps),
        unknown_files=len(scan.unknown_files),
        unknown_file_bytes=sum(file.disk_bytes for file in scan.unknown_files),
        oldest_s=min(times_s, default=None),
        newest_s=max(times_s, default=None),
        problems=tuple(problems),
    )


_ENTRY_BYTES = 4096


def _tolerance_bytes(
    scan: Scan, writers: Writers, before: Usage | None, after: Usage | None
) -> int:
    """Return the allowed error of the count: changes during the walk, and uncounted bytes.

    Uncounted are the growth of folders, entries of writers that came and went, and reservations of
    dead writers; the next walks of a bounded tier correct them.
    """
    num_entries = len(writers.living) + len(writers.dead) + 1
    tolerance_bytes = scan.grown_bytes + num_entries * _ENTRY_BYTES
    if after is not None:
        tolerance_bytes += after.all_reserved_bytes + after.presumed_bytes
        if before is not None:
            tolerance_bytes += before.all_reserved_bytes
            tolerance_bytes += max(0, after.changed_bytes - before.changed_bytes)
    return tolerance_bytes


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
