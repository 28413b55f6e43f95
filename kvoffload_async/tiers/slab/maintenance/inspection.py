"""Finds, reads and inspects slab stores, and verifies their blocks against their digests.

Safe while a tier is open: the journal is read before the segments are listed, so that missing
segments were removed in between; and a block's removal is journalled before its slot is
overwritten. So a failed verification counts only if the journal, read again, still has the block.
"""

from __future__ import annotations

import asyncio
import os
import stat as stat_module
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.files.locks import holder_of
from kvoffload_async.tiers.files.maintenance import BadBlock, MaintenanceIo, Verdict, folders_in
from kvoffload_async.tiers.files.ops import FileOps, NotRegularFileError, read_all
from kvoffload_async.tiers.files.sealing import SEAL_BYTES, BlockKey
from kvoffload_async.tiers.slab.addresses import SlotAddress, segment_of, slot_of
from kvoffload_async.tiers.slab.encryption import BlockCipher, create_block_digester
from kvoffload_async.tiers.slab.layout import (
    BAD_JOURNAL,
    JOURNAL,
    LOCK,
    MANIFEST,
    segment_name,
    segment_number,
)
from kvoffload_async.tiers.slab.manifest import Manifest, UnreadableManifestError
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    NEEDS_VERIFY,
    RECORD_BYTES,
    RecordRows,
    Records,
    Scan,
    addresses_of,
    keys_of,
    scan,
)
from kvoffload_async.tiers.slab.recovery import (
    Folder,
    by_use,
    is_last_of_key,
    list_folder,
    live_in,
    mark_for_verification,
    note_uses,
    read_if_there,
    read_manifest,
    read_session,
    refuse_strange_segments,
)
from kvoffload_async.types import OffloadKey


def find_slab_stores(ops: FileOps, directory: str) -> list[str]:
    """Return the folders of the stores at or directly inside an absolute directory, sorted.

    Raises:
        OSError: The directory cannot be read.

    Thread: any; blocks.
    """
    folders = folders_in(ops, directory)
    return [path for path in (directory, *folders) if _is_store(ops, path)]


def _is_store(ops: FileOps, folder: str) -> bool:
    try:
        entries = ops.entries(folder)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return False
    names = {
        path.rpartition("/")[2] for path, status in entries if stat_module.S_ISREG(status.st_mode)
    }
    return not names.isdisjoint({MANIFEST, JOURNAL}) or any(
        segment_number(name) is not None for name in names
    )


def user_of(ops: FileOps, folder: str) -> str | None:
    """Return the pid of the process that has a store open, or "unknown"; None if not open."""
    try:
        return holder_of(ops, f"{folder}/{LOCK}")  # its own lock is released at once
    except (FileNotFoundError, NotRegularFileError):
        return None


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a store's files.

    Attributes:
        manifest: The manifest; None if unreadable.
        manifest_problem: Why the manifest is unreadable, and the remedy.
        found: The files.
        scanned: The valid part of the journal.
        journal_bytes: Length of the journal.
        is_trusted: Whether the journal is believed to match the slots' contents.
        live: Records of existing blocks, oldest first; those recorded before damage, or in an
            untrusted journal, are marked for verification.
    """

    manifest: Manifest | None
    manifest_problem: str | None
    found: Folder
    scanned: Scan
    journal_bytes: int
    is_trusted: bool
    live: Records


def read_known_manifest(
    ops: FileOps, folder: str, *, for_writing: bool
) -> tuple[Manifest | None, str | None]:
    """Return the manifest; or None, and why this release cannot use the store.

    Raises:
        OSError: The manifest cannot be read.

    Thread: any; blocks.
    """
    try:
        if manifest := read_manifest(ops, folder, for_writing=for_writing):
            return manifest, None
        problem = "the manifest is missing"
    except NewerFormatError as error:
        return None, f"the store is of a newer release: {error}"
    except UnreadableManifestError as error:
        problem = f"the manifest is unreadable: {error}"
    except NotRegularFileError:
        problem = "the manifest is not a regular file"
    # Other programs have files of these names, too, perhaps next to intact stores.
    return None, (
        f"{problem}; no tier can open the store: if nothing else is in it, remove the folder "
        f"{folder}"
    )


def read_contents(ops: FileOps, folder: str) -> Contents:
    """Read a store without changing it.

    Raises:
        OSError: A file cannot be read.

    Thread: any; blocks.
    """
    manifest, problem = read_known_manifest(ops, folder, for_writing=False)
    journal = read_if_there(ops, f"{folder}/{JOURNAL}")
    scanned = scan(journal if manifest else bytearray(), manifest.journal_seed if manifest else 0)
    found = list_folder(ops, folder)
    live, is_trusted = scanned.units[:0], True
    if manifest is not None:
        refuse_strange_segments(ops, folder, found, manifest)
        session = read_session(ops, folder, manifest.journal_seed)
        rows = live_in(found, scanned, manifest)
        note_uses(scanned, rows, session)
        is_trusted = mark_for_verification(scanned, rows, session)
        rows = by_use(scanned, rows)
        live = scanned.units[rows[is_last_of_key(scanned, rows)]]
    return Contents(manifest, problem, found, scanned, len(journal), is_trusted, live)


def key_problem(contents: Contents, key: BlockKey) -> str | None:
    """Return why checksums cannot be verified with this key, or None if they can be."""
    if key is not None and not isinstance(key, IntegrityKey):
        is_encrypted = contents.manifest is None or contents.manifest.is_encrypted
        return None if is_encrypted else "its blocks are not encrypted, but a key for that is given"
    key_id = contents.manifest.key_id if contents.manifest is not None else None
    if contents.manifest is not None and contents.manifest.is_encrypted:
        return "its blocks are encrypted; give --encryption-key-file"
    if contents.manifest is None or key_id == (None if key is None else key.id.hex()):
        return None
    if key is None:
        return "its checksums are made with an integrity key; give --integrity-key-file"
    if key_id is None:
        return "its checksums are made without an integrity key, but one is given"
    return f"it has another integrity key, with the id {key_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabInspection:
    """Figures of one store. Disk bytes are as allocated.

    Attributes:
        name: Name of the folder.
        model: Name of the model, if the manifest is readable.
        rank: Rank of the blocks' owner, if the manifest is readable.
        block_bytes: Bytes of a block, if the manifest is readable.
        in_use_by: Pid of the process that has the store open; None: not open.
        blocks: Number of existing blocks; `with_digest` have a checksum, `suspect` ones need
            verification.
        segments: Number of segment files; they have `slots` slots, `free_slots` of them free.
        disk_bytes: Total disk usage, including the folder.
        journal_bytes: Length of the journal; `damaged_bytes` inside it are unreadable, and
            `torn_bytes` at its end were left by a killed writer.
        temps: Temporary files; of an open store, those being written.
        unknown_files: Files and folders that are not part of a store.
        problems: Problems found, one line each.
    """

    name: str
    model: str | None
    rank: int | None
    block_bytes: int | None
    in_use_by: str | None
    blocks: int
    with_digest: int
    suspect: int
    segments: int
    slots: int
    free_slots: int
    disk_bytes: int
    journal_bytes: int
    damaged_bytes: int
    torn_bytes: int
    temps: tuple[str, ...]
    unknown_files: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each figure, for people."""
        block_bytes = "unknown" if self.block_bytes is None else f"{self.block_bytes:,}"
        return [
            ("model", "unknown" if self.model is None else self.model),
            ("bytes of a block", block_bytes),
            ("in use by process", self.in_use_by or "none"),
            ("blocks", f"{self.blocks:,}"),
            ("with a digest / suspect", f"{self.with_digest:,} / {self.suspect:,}"),
            ("slots, free of all", f"{self.free_slots:,} of {self.slots:,}"),
            ("segments", f"{self.segments:,}"),
            ("bytes on disk", f"{self.disk_bytes:,}"),
            ("bytes of the journal", f"{self.journal_bytes:,}"),
            ("damaged / torn", f"{self.damaged_bytes:,} / {self.torn_bytes:,}"),
            ("temporary files", f"{len(self.temps):,}"),
            ("unknown files", f"{len(self.unknown_files):,}"),
        ]


async def inspect_slab(io: MaintenanceIo, folder: str) -> tuple[SlabInspection, Contents]:
    """Inspect a store without changing it.

    Raises:
        OSError: A file cannot be read.
    """
    user = await io.run(user_of, io.ops, folder)
    contents = await io.run(read_contents, io.ops, folder)
    manifest, scanned, flags = contents.manifest, contents.scanned, contents.live["flags"]
    slots = sum(map(manifest.slots_in, contents.found.segments.values())) if manifest else 0
    inspection = SlabInspection(
        name=folder.rpartition("/")[2],
        model=str(manifest.fields.get("model_name")) if manifest else None,
        rank=manifest.rank if manifest else None,
        block_bytes=manifest.block_bytes if manifest else None,
        in_use_by=user,
        blocks=len(contents.live),
        with_digest=int((flags & HAS_DIGEST != 0).sum()),
        suspect=int((flags & NEEDS_VERIFY != 0).sum()),
        segments=len(contents.found.segments),
        slots=slots,
        free_slots=slots - len(contents.live),
        disk_bytes=contents.found.allocated_bytes,
        journal_bytes=contents.journal_bytes,
        damaged_bytes=scanned.lost_bytes,
        torn_bytes=contents.journal_bytes - scanned.end_bytes if manifest else 0,
        temps=tuple(contents.found.temps),
        unknown_files=tuple(contents.found.unknown_files),
        problems=tuple(_problems(contents, user)),
    )
    return inspection, contents


def _problems(contents: Contents, user: str | None) -> list[str]:
    if contents.manifest_problem:  # the rest cannot be interpreted
        return [contents.manifest_problem]
    problems = []
    if contents.found.segments and JOURNAL not in contents.found.own_files:
        problems.append("the journal is missing: the blocks cannot be identified")
    if contents.scanned.lost_bytes:
        problems.append(f"{contents.scanned.lost_bytes} bytes of the journal are damaged")
    if contents.scanned.num_gaps:
        problems.append(f"frames of the journal are missing in {contents.scanned.num_gaps} places")
    if not contents.is_trusted and JOURNAL in contents.found.own_files:
        problems.append(
            "the store was not closed before a machine crash, or its journal has lost its end"
        )
    if BAD_JOURNAL in contents.found.own_files:
        problems.append(f"{BAD_JOURNAL}: an unreadable journal that was kept")
    for number, refusal in sorted(contents.found.refused.items()):
        name = segment_name(number)
        problems.append(f"{name} is unusable: {refusal.why}; find its owner, or remove it")
    if contents.found.temps and user is None:
        problems.append(f"{len(contents.found.temps)} files left by a killed writer")
    return problems


BATCH_BYTES: Final = 4 << 20
"""Bytes that a thread reads between checks whether to stop."""

_LOOKS: Final = 3
"""Number of verification attempts for a block of an open store."""

_BAD_AT_ONCE: Final = 1000
"""Number of bad blocks reported before the loop may run other tasks."""

_UNNAMED: Final = BadBlock("", "")

VerdictAndReason = tuple[Verdict, str]
"""A verdict and, for a bad block, the reason."""

_DOUBTFUL: Final = frozenset({Verdict.CORRUPT, Verdict.UNREADABLE})
"""Verdicts that a concurrent replacement of the block can also cause."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict on the block in one row of `Contents.live`; `bad` is set only for a bad block."""

    row: int
    verdict: Verdict
    bad: BadBlock = _UNNAMED


async def verify_slab(
    io: MaintenanceIo, folder: str, contents: Contents, key: BlockKey
) -> AsyncGenerator[Outcome, None]:
    """Read and verify every block; yield the outcomes. Incomplete if stopped.

    Bad blocks come last, because those replaced by a tier meanwhile do not count. `key_problem`
    must be None, so that checksums can be compared.

    Raises:
        OSError: The journal cannot be read again.
    """
    if contents.manifest is None:
        return
    live = contents.live
    checker = await io.run(SlotChecker, io.ops, folder, contents.manifest, live, key)
    rows: RecordRows = np.argsort(live["address"], kind="stable")
    doubtful: dict[int, VerdictAndReason] = {}
    for _ in range(_LOOKS):
        io.control.expect(len(rows))
        async with aclosing(io.share_out(checker.batches(rows), checker.check)) as checked:
            async for batch, results in checked:
                io.control.advance(len(batch))
                for row, (verdict, reason) in results.items():
                    if verdict in _DOUBTFUL:
                        doubtful[row] = verdict, reason
                    else:
                        doubtful.pop(row, None)
                        yield Outcome(row, verdict)
        if not doubtful or io.control.should_stop():
            break
        rows = np.array(sorted(doubtful), dtype=np.int64)
        now = await io.run(read_contents, io.ops, folder)
        is_here = await io.run(_are_in, live[rows], now.live)
        for row in rows[~is_here].tolist():
            del doubtful[row]
            yield Outcome(row, Verdict.GONE)
        rows = rows[is_here]
    for number, (row, (verdict, reason)) in enumerate(sorted(doubtful.items())):
        if number % _BAD_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield Outcome(row, verdict, BadBlock(_name_of(live[row : row + 1]), reason))


def _name_of(record: Records) -> str:
    """Return a block's key in hex digits, and its address."""
    (key,), (address,) = keys_of(record), addresses_of(record)
    return f"{key.hex()} (segment {segment_of(address)}, slot {slot_of(address)})"


class SlotChecker:
    """Verifies single blocks. Thread: any."""

    def __init__(
        self,
        ops: FileOps,
        folder: str,
        manifest: Manifest,
        live: Records,
        key: BlockKey,
    ) -> None:
        self._ops = ops
        self._folder = folder
        self._manifest = manifest
        self._digester = create_block_digester(manifest.layout, key)
        self._keys: Sequence[OffloadKey] = keys_of(live)
        self._places: Sequence[SlotAddress] = addresses_of(live)
        self._flags: Sequence[int] = live["flags"].tolist()
        self._digests = live["digest"]

    def batches(self, rows: RecordRows) -> Iterator[list[int]]:
        """Yield batches of rows, each of one segment and of limited size."""
        size = max(1, BATCH_BYTES // self._manifest.block_bytes)
        batch: list[int] = []
        for row in rows.tolist():
            is_other = batch and segment_of(self._places[row]) != segment_of(self._places[batch[0]])
            if is_other or len(batch) == size:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def check(self, batch: Sequence[int]) -> dict[int, VerdictAndReason]:
        """Verify blocks of one segment, each on its own."""
        path = f"{self._folder}/{segment_name(segment_of(self._places[batch[0]]))}"
        try:
            fd = self._ops.open(path, os.O_RDONLY)
        except OSError as error:
            return dict.fromkeys(batch, _unreadable(error))
        try:
            tail_bytes = SEAL_BYTES if self._manifest.is_encrypted else 0
            buffer = memoryview(bytearray(self._manifest.block_bytes + tail_bytes))
            return {row: self._check_slot(fd, row, buffer) for row in batch}
        finally:
            self._ops.close(fd)

    def _check_slot(self, fd: int, row: int, buffer: memoryview) -> VerdictAndReason:
        offset = self._manifest.offset_of(slot_of(self._places[row]))
        try:
            num_bytes = read_all(self._ops, fd, buffer, offset)
        except OSError as error:
            return _unreadable(error)
        if num_bytes < len(buffer):
            return Verdict.CORRUPT, f"ends after {num_bytes} bytes"
        return self._compare(row, buffer)

    def _compare(self, row: int, data: memoryview) -> VerdictAndReason:
        flags, is_keyed = self._flags[row], self._digester.is_keyed
        if not flags & HAS_DIGEST:
            if flags & NEEDS_VERIFY:
                return Verdict.CORRUPT, "needs verification, but has no checksum"
            if not is_keyed:
                return Verdict.WITHOUT_DIGEST, ""
        if bool(flags & KEYED) is not is_keyed:
            return Verdict.CORRUPT, "its checksum is made without the integrity key"
        if isinstance(self._digester, BlockCipher):
            if not self._digester.has_key(data):
                return Verdict.OTHER_KEY, ""
            digest = self._digester.decrypt(self._keys[row], data, data[:-SEAL_BYTES])
        else:
            digest = self._digester.digest(self._keys[row], data)
        if digest != self._digests[row].tobytes():
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.VERIFIED, ""


def _are_in(records: Records, live: Records) -> npt.NDArray[np.bool_]:
    """Return for each record whether `live` has the same block at the same address."""
    return np.isin(_identities(records), _identities(live))


def _identities(records: Records) -> npt.NDArray[np.void]:
    """Return the bytes of records that identify block and address."""
    same = records.copy()
    same["flags"] = 0
    same["use"] = 0
    return same.view(f"V{RECORD_BYTES}")


def _unreadable(error: OSError) -> VerdictAndReason:
    return Verdict.UNREADABLE, error.strerror or str(error)
