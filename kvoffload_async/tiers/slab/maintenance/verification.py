"""Reads every block of a slab store, and compares it with its digest.

Safe while a tier is at work: a block is removed from the journal before its slot is written to
again. So a block that does not verify is wrong only if the journal, read once more, still has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.maintenance import Problem
from kvoffload_async.tiers.files.digests import create_digester
from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.tiers.files.maintenance import MaintenanceIo
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.files.verdicts import Verdict, Verification
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.maintenance.stores import (
    Contents,
    SlabStore,
    key_problem,
    read_contents,
)
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.places import Place, segment_of, slot_of
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    SUSPECT,
    Records,
    keys_of,
    places_of,
)
from kvoffload_async.types import OffloadKey

BATCH_BYTES: Final = 4 << 20
"""What a thread reads before it looks whether to go on."""

_LOOKS: Final = 3
"""How often a block of a store at work is read before it is called wrong."""

Rows = npt.NDArray[np.int64]
Judgement = tuple[Verdict, str]
"""A verdict and, of a bad block, the reason."""

_DOUBTFUL: Final = frozenset({Verdict.CORRUPT, Verdict.UNREADABLE})
"""What may be only that a block was replaced meanwhile."""


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A block that is not as it should be, and why; the key in hex digits."""

    key: str
    segment: int
    slot: int
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"

    @property
    def what(self) -> str:
        """Which block."""
        return f"{self.key} (segment {self.segment}, slot {self.slot})"


@dataclass(slots=True)
class SlabVerification(Verification[BadSlot]):
    """What reading the blocks has shown; `changed` were removed or replaced meanwhile."""

    changed: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """A verification, and what it says of each of the records that were checked.

    Attributes:
        found: The figures.
        is_good: Which blocks may be kept.
        is_unreadable: Of which blocks nobody knows.
        problems: What is wrong, in the order of the records.
    """

    found: SlabVerification
    is_good: npt.NDArray[np.bool_]
    is_unreadable: npt.NDArray[np.bool_]
    problems: list[Problem] = field(default_factory=list)


async def verify_slab(
    io: MaintenanceIo, store: SlabStore, contents: Contents, key: IntegrityKey | None
) -> Judged:
    """Read and judge every block; incomplete once stopped.

    Where `key_problem` finds one, nothing is read: nobody can tell then.

    Raises:
        OSError: The journal cannot be read again.
    """
    live = contents.live
    found = SlabVerification()
    judged = Judged(found, np.zeros(len(live), dtype=np.bool_), np.zeros(len(live), dtype=np.bool_))
    if contents.manifest is None:
        return judged
    if key_problem(contents, key):
        found.other_key = len(live)
        return judged
    checker = SlotChecker(io.ops, store, contents.manifest, live, key)
    io.control.expect(len(live))
    judgements = await _check(io, checker, np.argsort(live["place"], kind="stable"))
    for _ in range(_LOOKS - 1):
        doubtful = [row for row, (verdict, _) in judgements.items() if verdict in _DOUBTFUL]
        if not doubtful or io.control.should_stop():
            break
        now = await io.run(read_contents, io.ops, store, contents.manifest)
        here = {bytes(record) for record in _identities(now.live)}
        gone = [row for row in doubtful if bytes(_identities(live[row : row + 1])[0]) not in here]
        judgements |= dict.fromkeys(gone, (Verdict.GONE, ""))
        still = np.array(sorted(set(doubtful) - set(gone)), dtype=np.int64)
        io.control.expect(len(still))
        judgements |= await _check(io, checker, still)
    for row, (verdict, reason) in sorted(judgements.items()):
        if verdict is Verdict.GONE:
            found.changed += 1
        elif problem := found.count(verdict, checker.named(row, reason)):
            judged.problems.append(problem)
        judged.is_good[row] = verdict in {Verdict.VERIFIED, Verdict.WITHOUT_DIGEST}
        judged.is_unreadable[row] = verdict is Verdict.UNREADABLE
    return judged


class SlotChecker:
    """Judges single blocks. Thread: any."""

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
        self._places: Sequence[Place] = places_of(live)
        self._flags: Sequence[int] = live["flags"].tolist()
        self._digests = live["digest"]

    def named(self, row: int, reason: str) -> BadSlot:
        """Return a block by the names that people can use."""
        place = self._places[row]
        return BadSlot(self._keys[row].hex(), segment_of(place), slot_of(place), reason)

    def batches(self, rows: Rows) -> Iterator[list[int]]:
        """Yield rows of one segment each, as many as one thread should read at a time."""
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
        """Judge blocks of one segment, each on its own."""
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
        done = 0
        try:
            while done < len(buffer):
                count = self._ops.pread_into(fd, buffer[done:], offset + done)
                if count == 0:
                    return Verdict.CORRUPT, f"ends after {done} bytes"
                done += count
        except OSError as error:
            return _unreadable(error)
        return self._compare(row, buffer)

    def _compare(self, row: int, data: memoryview) -> Judgement:
        flags, is_keyed = self._flags[row], self._digester.is_keyed
        if not flags & HAS_DIGEST:
            if flags & SUSPECT:
                return Verdict.CORRUPT, "recorded before damage, and without a checksum"
            if not is_keyed:
                return Verdict.WITHOUT_DIGEST, ""
        if bool(flags & KEYED) is not is_keyed:
            return Verdict.CORRUPT, "its checksum is made without the integrity key"
        if self._digester.digest(self._keys[row], data) != self._digests[row].tobytes():
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.VERIFIED, ""


async def _check(io: MaintenanceIo, checker: SlotChecker, rows: Rows) -> dict[int, Judgement]:
    judgements: dict[int, Judgement] = {}
    async with aclosing(io.share_out(checker.batches(rows), checker.check)) as checked:
        async for batch, judged in checked:
            judgements.update(judged)
            io.control.advance(len(batch))
    return judgements


def _identities(live: Records) -> Records:
    """Return what makes a record that of one block in one place."""
    same = live.copy()
    same["flags"] = 0
    same["spare"] = 0
    return same


def _unreadable(error: OSError) -> Judgement:
    return Verdict.UNREADABLE, error.strerror or str(error)
