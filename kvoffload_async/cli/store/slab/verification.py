"""Reads every block of a slab store, and compares it with its checksum.

Safe while a tier is at work: a block is removed from the journal before its slot is written to
again. So a block that does not verify is wrong only if the journal, read once more, still has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from kvoffload_async.cli.store.slab.stores import Contents, SlabStore, read_contents
from kvoffload_async.cli.store.survey import Walker
from kvoffload_async.tiers.fs.ops import FileOps
from kvoffload_async.tiers.sealing import BlockDigester
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.places import Place, segment_of, slot_of
from kvoffload_async.tiers.slab.records import HAS_DIGEST, SUSPECT, Records, keys_of, places_of
from kvoffload_async.types import OffloadKey

BATCH_BYTES: Final = 4 << 20
"""What a thread reads before it looks whether to go on."""

_LOOKS: Final = 3
"""How often a block of a store at work is read before it is called wrong."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A block that is not as it should be, and why; the key in hex digits."""

    key: str
    segment: int
    slot: int
    reason: str

    def __str__(self) -> str:
        return f"{self.key} (segment {self.segment}, slot {self.slot}): {self.reason}"


@dataclass(slots=True)
class SlabVerification:
    """What reading the blocks has shown.

    Attributes:
        checked: Blocks that were read.
        sealed: Those whose checksum is right.
        unsealed: Those that have none.
        corrupt: Those with a wrong checksum, or beyond the end of their file.
        unreadable: Those that could not be read.
        changed: Blocks that were removed or replaced meanwhile.
    """

    checked: int = 0
    sealed: int = 0
    unsealed: int = 0
    corrupt: list[BadSlot] = field(default_factory=list)
    unreadable: list[BadSlot] = field(default_factory=list)
    changed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each."""
        return [
            *(f"corrupt: {bad}" for bad in self.corrupt),
            *(f"unreadable: {bad}" for bad in self.unreadable),
        ]


@dataclass(frozen=True, slots=True)
class Judged:
    """A verification, and what it says of each of the records that were checked.

    Attributes:
        found: The figures.
        is_good: Which blocks may be kept.
        is_unreadable: Of which blocks nobody knows.
    """

    found: SlabVerification
    is_good: npt.NDArray[np.bool_]
    is_unreadable: npt.NDArray[np.bool_]


async def verify_slab(walker: Walker, store: SlabStore, contents: Contents) -> Judged:
    """Read and judge every block; incomplete once stopped.

    Raises:
        OSError: The journal cannot be read again.
    """
    live = contents.live
    found = SlabVerification()
    judged = Judged(found, np.zeros(len(live), dtype=np.bool_), np.zeros(len(live), dtype=np.bool_))
    if contents.manifest is None:
        return judged
    checker = SlotChecker(walker.ops, store, contents.manifest, live)
    walker.gauge.expect(len(live))
    verdicts = await _check(walker, checker, np.argsort(live["place"], kind="stable"))
    for _ in range(_LOOKS - 1):
        doubtful = [row for row, verdict in verdicts.items() if verdict.is_doubtful]
        if not doubtful or walker.should_stop():
            break
        now = await anyio.to_thread.run_sync(
            read_contents, walker.ops, store, contents.manifest, limiter=walker.limiter
        )
        here = {bytes(record) for record in _identities(now.live)}
        gone = [row for row in doubtful if bytes(_identities(live[row : row + 1])[0]) not in here]
        verdicts |= dict.fromkeys(gone, CHANGED)
        still = np.array(sorted(set(doubtful) - set(gone)), dtype=np.int64)
        verdicts |= await _check(walker, checker, still)
    for row, verdict in sorted(verdicts.items()):
        _take_in(found, checker.named(row, verdict.reason), verdict)
        judged.is_good[row] = verdict in {SEALED, UNSEALED}
        judged.is_unreadable[row] = verdict.kind == "unreadable"
    return judged


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is found about one block."""

    kind: str
    reason: str = ""

    @property
    def is_doubtful(self) -> bool:
        """Whether it may be only that the block was replaced meanwhile."""
        return self.kind in {"corrupt", "unreadable"}


SEALED: Final = Verdict("sealed")
UNSEALED: Final = Verdict("unsealed")
CHANGED: Final = Verdict("changed")


class SlotChecker:
    """Judges single blocks. Thread: any."""

    def __init__(self, ops: FileOps, store: SlabStore, manifest: Manifest, live: Records) -> None:
        self._ops = ops
        self._folder = store.folder
        self._manifest = manifest
        self._digester = BlockDigester(manifest.layout)
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

    def check(self, batch: Sequence[int]) -> dict[int, Verdict]:
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

    def _judge(self, fd: int, row: int, buffer: memoryview) -> Verdict:
        offset = slot_of(self._places[row]) * self._manifest.slot_bytes
        done = 0
        try:
            while done < len(buffer):
                count = self._ops.pread_into(fd, buffer[done:], offset + done)
                if count == 0:
                    return Verdict("corrupt", f"ends after {done} bytes")
                done += count
        except OSError as error:
            return _unreadable(error)
        if not self._flags[row] & HAS_DIGEST:
            if self._flags[row] & SUSPECT:
                return Verdict("corrupt", "recorded before damage, and without a checksum")
            return UNSEALED
        if self._digester.digest(self._keys[row], buffer) != self._digests[row].tobytes():
            return Verdict("corrupt", "wrong checksum")
        return SEALED


async def _check(walker: Walker, checker: SlotChecker, rows: Rows) -> dict[int, Verdict]:
    verdicts: dict[int, Verdict] = {}
    batches = checker.batches(rows)

    async def work() -> None:
        for batch in batches:  # shared by all: each batch goes to one
            if walker.should_stop():
                return
            verdicts.update(
                await anyio.to_thread.run_sync(checker.check, batch, limiter=walker.limiter)
            )
            walker.gauge.advance(len(batch))

    async with anyio.create_task_group() as group:
        for _ in range(int(walker.limiter.total_tokens)):
            group.start_soon(work)
    return verdicts


def _identities(live: Records) -> Records:
    """Return what makes a record that of one block in one place."""
    same = live.copy()
    same["flags"] = 0
    same["spare"] = 0
    return same


def _unreadable(error: OSError) -> Verdict:
    return Verdict("unreadable", error.strerror or str(error))


def _take_in(found: SlabVerification, block: BadSlot, verdict: Verdict) -> None:
    if verdict == CHANGED:
        found.changed += 1
    elif verdict.kind == "unreadable":
        found.unreadable.append(block)
    else:
        found.checked += 1
        if verdict.kind == "corrupt":
            found.corrupt.append(block)
        elif verdict == SEALED:
            found.sealed += 1
        else:
            found.unsealed += 1
