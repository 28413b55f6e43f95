"""What of an existing store can be served: what its journal says, of the segments that are there.

Thread: an I/O thread, for all of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.boot import boot_id
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.slab.budget import Budget
from kvoffload_async.tiers.slab.layout import BAD_JOURNAL, JOURNAL, segment_name
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.places import segment_of
from kvoffload_async.tiers.slab.reading import (
    Folder,
    by_use,
    live_in,
    note_uses,
    read_journal,
    read_session,
    refuse_strange_segments,
)
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    SUSPECT,
    RecordRows,
    Records,
    Scan,
    by_part,
    keys_of,
    picked,
)
from kvoffload_async.tiers.slab.session import Session
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_PORTION: Final = 1 << 12
"""Blocks that one step takes in: nobody waits longer than that for the interpreter."""


@dataclass(slots=True)
class Recovered:
    """What a store has.

    Attributes:
        scanned: The journal; suspect blocks are marked in its units.
        rows: The units of the blocks that may be served, the least recently used first.
        gone: The units of those that may not.
        is_suspect: Whether the journal has to be written anew, so that nobody trusts it later.
        budget: With what is kept of a journal that could not be read taken off.
        session: What is known of the last process that had the store open.
    """

    scanned: Scan
    rows: RecordRows
    gone: RecordRows
    is_suspect: bool
    budget: Budget
    session: Session | None

    def records(self, rows: RecordRows) -> Records:
        """Return some of the units."""
        return picked(self.scanned.units, rows)

    def keys(self) -> Iterator[tuple[RecordRows, list[OffloadKey]]]:
        """Yield which of the blocks that may be served, and their keys: all of them, in portions.

        Keys that are in one part of a `KeyMap` come together.
        """
        order = by_part(self.scanned.units, self.rows)
        for start in range(0, len(order), _PORTION):
            which = order[start : start + _PORTION]
            yield which, keys_of(self.records(self.rows[which]))

    def in_order(self) -> RecordRows:
        """Return the rows, ascending."""
        is_row = np.zeros(len(self.scanned.units), dtype=np.bool_)
        is_row[self.rows] = True
        return np.flatnonzero(is_row)

    def drop_doubles(self) -> None:
        """Keep one record of each key, the one that comes last in the journal.

        Several there are only after damage.
        """
        last: dict[OffloadKey, int] = {}
        in_order = self.in_order()
        for start in range(0, len(in_order), _PORTION):
            part = in_order[start : start + _PORTION]
            last.update(zip(keys_of(self.records(part)), part.tolist(), strict=True))
        is_last = np.isin(self.rows, np.fromiter(last.values(), dtype=np.int64))
        self.gone = np.concatenate([self.gone, self.rows[~is_last]])
        self.rows = self.rows[is_last]


class Recovery:
    """Reads one store, and brings it below its capacity."""

    def __init__(self, ops: FileOps, folder: str, found: Folder, manifest: Manifest) -> None:
        """Describe it.

        Args:
            ops: The system calls.
            folder: The store's.
            found: What lies there; what is given up is taken out.
            manifest: The store's.
        """
        self._ops = ops
        self._folder = folder
        self._found = found
        self._manifest = manifest

    def run(self, budget: Budget, *, verify: bool, is_keyed: bool) -> Recovered:
        """Find out what may be served; raises OSError.

        Args:
            budget: Segments that are more than it allows are given up.
            verify: Whether every block is verified, so that each needs a checksum.
            is_keyed: Whether that must be made with the integrity key.
        """
        budget = replace(budget, header_bytes=self._manifest.header_bytes)
        seed = self._manifest.journal_seed
        scanned = read_journal(self._ops, self._folder, seed)
        if is_unreadable(scanned):
            self._keep_aside(scanned)
        if self._found.has_bad_journal:
            kept = disk_bytes(self._ops.stat(f"{self._folder}/{BAD_JOURNAL}"))
            budget = replace(budget, capacity_bytes=budget.capacity_bytes - kept)
        session = read_session(self._ops, self._folder, seed)
        kept = self._refuse_segments(scanned)
        budget = replace(budget, capacity_bytes=budget.capacity_bytes - kept)
        rows = live_in(self._found, scanned, self._manifest)
        if session is not None:
            note_uses(scanned, rows, session)
        if self._fit(budget, scanned, rows):
            rows = live_in(self._found, scanned, self._manifest)
        is_trusted = session is None or session.is_trusted(boot_id(), scanned.sequence)
        suspect = rows[rows < scanned.damage_at] if is_trusted else rows
        scanned.units["flags"][suspect] |= np.uint16(SUSPECT)
        servable = _servable(scanned.units["flags"][rows], verify=verify, is_keyed=is_keyed)
        recovered = Recovered(
            scanned,
            by_use(scanned, rows[servable]),
            rows[~servable],
            scanned.is_damaged or not is_trusted,
            budget,
            session,
        )
        self._report(recovered, len(suspect), is_trusted=is_trusted)
        return recovered

    # -- inside ---------------------------------------------------------------------------------

    def _keep_aside(self, scanned: Scan) -> None:
        """Keep a journal of which nothing can be read, for whoever may find out why."""
        path = f"{self._folder}/{JOURNAL}"
        self._cut(path)  # what is allocated behind its end
        self._ops.rename(path, f"{self._folder}/{BAD_JOURNAL}")
        self._found.has_journal, self._found.has_bad_journal = False, True
        slots = sum(map(self._manifest.slots_in, self._found.segments.values()))
        logger.error(
            "%s: nothing of the journal, %d bytes, can be read: it is kept as %s, and the %d slots "
            "of the store are empty",
            self._folder,
            scanned.units.nbytes,
            BAD_JOURNAL,
            slots,
        )

    def _refuse_segments(self, scanned: Scan) -> int:
        """Refuse segments that are not this store's; those that are, under a wrong name, go.

        Returns:
            What those that stay take on disk.
        """
        before = replace(self._found, segments=dict(self._found.segments))
        refuse_strange_segments(self._ops, self._folder, self._found, self._manifest)
        if not self._found.refused:
            return 0
        kept = 0
        everything = len(live_in(before, scanned, self._manifest))
        left = len(live_in(self._found, scanned, self._manifest))
        for number, refusal in self._found.refused.items():
            name = segment_name(number)
            if refusal.is_own:
                self._ops.unlink(f"{self._folder}/{name}")
            else:
                kept += disk_bytes(self._ops.stat(f"{self._folder}/{name}"))
            logger.error(
                "%s: %s is refused: %s; it is %s",
                self._folder,
                name,
                refusal.why,
                "removed" if refusal.is_own else "left alone",
            )
        logger.error(
            "%s: %d of %d blocks are dropped with refused segments",
            self._folder,
            everything - left,
            everything,
        )
        return kept

    def _fit(self, budget: Budget, scanned: Scan, rows: RecordRows) -> bool:
        """Give up slots for which a capacity that has become smaller has no room.

        Of the segments, those whose blocks were used the longest ago, on average, go first; the
        last one is only made shorter.

        Returns:
            Whether that had to be.
        """
        slots = {n: self._manifest.slots_in(size) for n, size in self._found.segments.items()}
        if budget.cost(slots.values()) <= budget.capacity_bytes:
            return False
        rows = by_use(scanned, rows)
        of = segment_of(scanned.units["place"][rows])
        value = {n: float(np.flatnonzero(of == n).mean()) if n in of else -1.0 for n in slots}
        for number in sorted(slots, key=lambda number: (value[number], -number)):
            if budget.cost(slots.values()) <= budget.capacity_bytes:
                break
            most = slots.pop(number)
            left = budget.fitting(slots.values(), most)
            path = f"{self._folder}/{segment_name(number)}"
            if left:
                slots[number] = left
                self._found.segments[number] = self._manifest.offset_of(left)
                self._cut(path, self._found.segments[number])
            else:
                del self._found.segments[number]
                self._ops.unlink(path)
        num_left = len(live_in(self._found, scanned, self._manifest))
        logger.warning(
            "%s: the capacity is smaller than what is there: %d of %d blocks, %d bytes, are "
            "dropped, those of the segments that were used the longest ago first",
            self._folder,
            len(rows) - num_left,
            len(rows),
            (len(rows) - num_left) * self._manifest.block_bytes,
        )
        return True

    def _cut(self, path: str, size_bytes: int | None = None) -> None:
        """Make a file shorter; without a size, free what is allocated behind its end."""
        fd = self._ops.open(path, os.O_RDWR)
        try:
            if size_bytes is None:
                size_bytes = self._ops.fstat(fd).st_size
            self._ops.truncate(fd, size_bytes)
        finally:
            self._ops.close(fd)

    def _report(self, recovered: Recovered, num_suspect: int, *, is_trusted: bool) -> None:
        scanned = recovered.scanned
        if scanned.is_damaged:
            logger.warning(
                "%s: %d bytes of the journal are damaged; blocks stored before are verified (in %d "
                "more places frames are missing)",
                self._folder,
                scanned.lost_bytes,
                scanned.num_gaps,
            )
        if not is_trusted and num_suspect:
            logger.warning(
                "%s: the store was not closed before the machine went down, or its journal has "
                "lost its end: its %d blocks are verified, and %d without a checksum are dropped",
                self._folder,
                num_suspect,
                len(recovered.gone),
            )


def is_unreadable(scanned: Scan) -> bool:
    """Tell whether a journal has something, and nothing of it can be read.

    One whose only frame is torn is none of those: that is what a kill leaves.
    """
    if scanned.end_bytes or not len(scanned.units) or scanned.is_torn:
        return False
    return bool(scanned.units.view(np.uint8).any())


def _servable(
    flags: npt.NDArray[np.uint16], *, verify: bool, is_keyed: bool
) -> npt.NDArray[np.bool_]:
    """Return which blocks may be served: what must be verified needs a checksum, by the key."""
    servable: npt.NDArray[np.bool_] = flags & HAS_DIGEST != 0
    if not verify:
        servable |= flags & SUSPECT == 0
    servable &= (flags & KEYED != 0) == is_keyed
    return servable
