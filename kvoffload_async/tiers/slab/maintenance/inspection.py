"""Inspects a slab store and verifies its blocks against their digests.

Safe while a tier is open: a block's removal is journalled before its slot is overwritten. So a
failed verification counts only if the journal, read again, still has the block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.maintenance import Problem
from kvoffload_async.tiers.files.digests import IntegrityKey, create_digester
from kvoffload_async.tiers.files.maintenance import (
    FIGURE_OF,
    MaintenanceIo,
    Verdict,
    Verification,
    problem_of,
)
from kvoffload_async.tiers.files.ops import FileOps, read_all
from kvoffload_async.tiers.slab.addresses import SlotAddress, segment_of, slot_of
from kvoffload_async.tiers.slab.layout import BAD_JOURNAL, segment_name
from kvoffload_async.tiers.slab.maintenance.stores import (
    Contents,
    SlabStore,
    key_problem,
    read_contents,
    user_of,
)
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    NEEDS_VERIFY,
    RECORD_BYTES,
    Records,
    addresses_of,
    keys_of,
)
from kvoffload_async.types import OffloadKey


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


async def inspect_slab(io: MaintenanceIo, store: SlabStore) -> tuple[SlabInspection, Contents]:
    """Inspect a store; changes nothing.

    Raises:
        OSError: A file cannot be read.
    """
    user = await io.run(user_of, io.ops, store)
    contents = await io.run(read_contents, io.ops, store)
    return inspection_of(store, contents, user), contents


def inspection_of(store: SlabStore, contents: Contents, user: str | None) -> SlabInspection:
    """Compute a store's figures from its contents and the pid of its user."""
    manifest, scanned, flags = contents.manifest, contents.scanned, contents.live["flags"]
    is_known = manifest is not None
    slots = sum(contents.slots.values())
    return SlabInspection(
        name=store.name,
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
        torn_bytes=contents.journal_bytes - scanned.end_bytes if is_known else 0,
        temps=tuple(contents.found.temps),
        unknown_files=tuple(contents.found.unknown_files),
        problems=tuple(_problems(contents, user)),
    )


def _problems(contents: Contents, user: str | None) -> list[str]:
    problems = []
    if contents.is_newer:  # this release cannot interpret the rest
        return [str(contents.manifest_problem)]
    if contents.manifest_problem:
        problems.append(f"{contents.manifest_problem}; no tier can open the store; run repair")
    if contents.found.segments and not contents.found.has_journal:
        problems.append("the journal is missing: the blocks cannot be identified")
    if contents.scanned.lost_bytes:
        problems.append(f"{contents.scanned.lost_bytes} bytes of the journal are damaged")
    if contents.scanned.num_gaps:
        problems.append(f"frames of the journal are missing in {contents.scanned.num_gaps} places")
    if not contents.is_trusted and contents.found.has_journal:
        problems.append(
            "the store was not closed before a machine crash, or its journal has lost its end"
        )
    if contents.found.has_bad_journal:
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

Rows = npt.NDArray[np.int64]
Judgement = tuple[Verdict, str]
"""A verdict and, for a bad block, the reason."""

DOUBTFUL: Final = frozenset({Verdict.CORRUPT, Verdict.UNREADABLE})
"""Verdicts that a concurrent replacement of the block can also cause."""


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A block that failed verification; the key in hex digits."""

    key: str
    segment: int
    slot: int
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"

    @property
    def what(self) -> str:
        """Key and place of the block."""
        return f"{self.key} (segment {self.segment}, slot {self.slot})"


@dataclass(slots=True, kw_only=True)
class SlabVerification(Verification[BadSlot]):
    """Result of a verification; `changed` blocks were removed or replaced meanwhile."""

    changed: int = 0


class Judged:
    """Verification results of all records, in a few bytes each.

    Not thread-safe.
    """

    def __init__(self, checker: SlotChecker | None, count: int) -> None:
        """Start without results; without a checker there never are any."""
        self._checker = checker
        self._verdicts = np.zeros(count, dtype=np.uint8)  # value of a `Verdict`, 0: none yet
        self._reasons: dict[int, str] = {}

    def take_in(self, judgements: Mapping[int, Judgement]) -> None:
        """Store results by row, replacing earlier ones."""
        for row, (verdict, reason) in judgements.items():
            self._verdicts[row] = verdict.value
            if reason:
                self._reasons[row] = reason

    def are(self, *verdicts: Verdict) -> npt.NDArray[np.bool_]:
        """Return for each row whether its verdict is one of these."""
        return np.isin(self._verdicts, [verdict.value for verdict in verdicts])

    def bad(self, *verdicts: Verdict) -> Iterator[tuple[Verdict, BadSlot]]:
        """Yield the blocks with these verdicts, in record order."""
        if self._checker is not None:
            for row in np.flatnonzero(self.are(*verdicts)).tolist():
                bad = self._checker.named(row, self._reasons.get(row, ""))
                yield Verdict(self._verdicts[row]), bad

    @property
    def is_good(self) -> npt.NDArray[np.bool_]:
        """Which blocks may be kept."""
        return self.are(Verdict.VERIFIED, Verdict.WITHOUT_DIGEST)

    @property
    def problems(self) -> Iterator[Problem]:
        """The bad blocks as problems, in record order."""
        for verdict, bad in self.bad(*DOUBTFUL):
            yield problem_of(verdict, bad)

    def verification(self, max_listed: int | None) -> SlabVerification:
        """Return the figures, with at most `max_listed` blocks listed per kind."""
        counts = {verdict: int(self.are(verdict).sum()) for verdict in Verdict}
        read = (Verdict.VERIFIED, Verdict.WITHOUT_DIGEST, Verdict.CORRUPT)
        return SlabVerification(
            max_listed=max_listed,
            checked=sum(counts[verdict] for verdict in read),
            corrupt=[bad for _, bad in islice(self.bad(Verdict.CORRUPT), max_listed)],
            unreadable=[bad for _, bad in islice(self.bad(Verdict.UNREADABLE), max_listed)],
            changed=counts[Verdict.GONE],
            **{name: counts[verdict] for verdict, name in FIGURE_OF.items()},
        )


async def verify_slab(
    io: MaintenanceIo, store: SlabStore, contents: Contents, key: IntegrityKey | None
) -> Judged:
    """Read and verify every block; incomplete if stopped.

    Reads nothing if `key_problem` reports a problem, because checksums cannot be compared.

    Raises:
        OSError: The journal cannot be read again.
    """
    live = contents.live
    if contents.manifest is None:
        return Judged(None, len(live))
    if key_problem(contents, key):
        judged = Judged(None, len(live))
        judged.take_in(dict.fromkeys(range(len(live)), (Verdict.OTHER_KEY, "")))
        return judged
    checker = await io.run(SlotChecker, io.ops, store, contents.manifest, live, key)
    judged = Judged(checker, len(live))
    io.control.expect(len(live))
    await _check(io, checker, judged, np.argsort(live["address"], kind="stable"))
    for _ in range(_LOOKS - 1):
        doubtful = np.flatnonzero(judged.are(*DOUBTFUL))
        if not len(doubtful) or io.control.should_stop():
            break
        now = await io.run(read_contents, io.ops, store, contents.manifest)
        is_here = await io.run(_are_in, live[doubtful], now.live)
        judged.take_in(dict.fromkeys(doubtful[~is_here].tolist(), (Verdict.GONE, "")))
        io.control.expect(int(is_here.sum()))
        await _check(io, checker, judged, doubtful[is_here])
    return judged


class SlotChecker:
    """Verifies single blocks. Thread: any."""

    def __init__(
        self,
        ops: FileOps,
        store: SlabStore,
        manifest: Manifest,
        live: Records,
        key: IntegrityKey | None,
    ) -> None:
        self._ops = ops
        self._folder = store.folder
        self._manifest = manifest
        self._digester = create_digester(manifest.layout, key)
        self._keys: Sequence[OffloadKey] = keys_of(live)
        self._places: Sequence[SlotAddress] = addresses_of(live)
        self._flags: Sequence[int] = live["flags"].tolist()
        self._digests = live["digest"]

    def named(self, row: int, reason: str) -> BadSlot:
        """Return a block's key and place with a reason."""
        place = self._places[row]
        return BadSlot(self._keys[row].hex(), segment_of(place), slot_of(place), reason)

    def batches(self, rows: Rows) -> Iterator[list[int]]:
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

    def check(self, batch: Sequence[int]) -> dict[int, Judgement]:
        """Verify blocks of one segment, each on its own."""
        path = f"{self._folder}/{segment_name(segment_of(self._places[batch[0]]))}"
        try:
            fd = self._ops.open(path, os.O_RDONLY)
        except OSError as error:
            return dict.fromkeys(batch, _unreadable(error))
        try:
            buffer = memoryview(bytearray(self._manifest.block_bytes))
            return {row: self._judge(fd, row, buffer) for row in batch}
        finally:
            self._ops.close(fd)

    def _judge(self, fd: int, row: int, buffer: memoryview) -> Judgement:
        offset = self._manifest.offset_of(slot_of(self._places[row]))
        try:
            num_bytes = read_all(self._ops, fd, buffer, offset)
        except OSError as error:
            return _unreadable(error)
        if num_bytes < len(buffer):
            return Verdict.CORRUPT, f"ends after {num_bytes} bytes"
        return self._compare(row, buffer)

    def _compare(self, row: int, data: memoryview) -> Judgement:
        flags, is_keyed = self._flags[row], self._digester.is_keyed
        if not flags & HAS_DIGEST:
            if flags & NEEDS_VERIFY:
                return Verdict.CORRUPT, "needs verification, but has no checksum"
            if not is_keyed:
                return Verdict.WITHOUT_DIGEST, ""
        if bool(flags & KEYED) is not is_keyed:
            return Verdict.CORRUPT, "its checksum is made without the integrity key"
        if self._digester.digest(self._keys[row], data) != self._digests[row].tobytes():
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.VERIFIED, ""


async def _check(io: MaintenanceIo, checker: SlotChecker, judged: Judged, rows: Rows) -> None:
    async with aclosing(io.share_out(checker.batches(rows), checker.check)) as checked:
        async for batch, judgements in checked:
            judged.take_in(judgements)
            io.control.advance(len(batch))


def _are_in(records: Records, live: Records) -> npt.NDArray[np.bool_]:
    """Return for each record whether `live` has the same block at the same place."""
    if not len(live):
        return np.zeros(len(records), dtype=np.bool_)
    by_place = np.argsort(live["address"], kind="stable")
    at = np.searchsorted(live["address"], records["address"], sorter=by_place)
    there = live[by_place[np.minimum(at, len(live) - 1)]]
    is_same: npt.NDArray[np.bool_] = (_identities(records) == _identities(there)).all(axis=1)
    return is_same


def _identities(records: Records) -> npt.NDArray[np.uint8]:
    """Return the bytes of records that identify block and place."""
    same = records.copy()
    same["flags"] = 0
    same["use"] = 0
    return same.view(np.uint8).reshape(-1, RECORD_BYTES)


def _unreadable(error: OSError) -> Judgement:
    return Verdict.UNREADABLE, error.strerror or str(error)
