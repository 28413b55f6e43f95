"""A directory with a `slab` store on it, and what lies there."""

import asyncio
import os
from functools import partial
from pathlib import Path

import numpy as np
from faulty_files import Hang
from sealed_names import TEXT

from kvoffload_async.registry import create_policy
from kvoffload_async.testing.harness import ManagerHarness, TierHarness, content_of, key_of
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.files.sealing import SEAL_BYTES, EncryptionKey
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import JOURNAL, MANIFEST, StoreLayout, segment_name
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.opening import OnMismatch, Verify
from kvoffload_async.tiers.slab.records import Records, Scan, addresses_of, keys_of
from kvoffload_async.tiers.slab.recovery import (
    by_use,
    list_folder,
    live_in,
    note_uses,
    read_journal,
    read_manifest,
    read_session,
)
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier
from kvoffload_async.types import OffloadKey

BLOCK = 4096
KIB = 1024
FIELDS = {"model_name": "m/x"}
OTHER_FIELDS = {"model_name": "m/x", "fingerprint": "other"}
"""Another identity, whose store has the same folder."""
FIXED = 96 * KIB
"""Enough for everything but the slots of a small store."""


def records_of(scanned: Scan) -> Records:
    """Return a journal's valid records, in order."""
    return scanned.units[scanned.rows]


class OtherHarness(TierHarness):
    """Another identity's blocks: other bytes under the same keys."""

    def fill(self, keys, slots) -> None:
        for key, slot in zip(keys, slots, strict=True):
            self.rows[slot] = ~content_of(key, self.slot_bytes)

    def holds(self, key, slot) -> bool:
        return np.array_equal(self.rows[slot], ~content_of(key, self.slot_bytes))


class SlabStore:
    """One store below one directory."""

    def __init__(self, root: Path, *, block_bytes: int = BLOCK) -> None:
        self.root = root
        self.block_bytes = block_bytes
        self.layout = StoreLayout(str(root), FIELDS, 0, block_bytes)
        self.folder = Path(self.layout.folder)
        self.journal = self.folder / JOURNAL
        self.manifest = self.folder / MANIFEST

    def tier(
        self,
        ops: FileOps | None = None,
        *,
        capacity_bytes: int = 1024 * KIB,
        policy: str = "lru",
        segment_bytes: int = 64 * KIB,
        on_mismatch: str = "fail",
        verify: bool | str = True,
        fields: dict | None = None,
        **settings,
    ) -> SlabTier:
        """Create a tier; its blocks are encrypted if `verify` is "encrypted"."""
        if verify == "encrypted":
            settings["encryption_keys"] = (EncryptionKey(TEXT.encode()),)
        return SlabTier(
            SlabSettings(
                root_dir=str(self.root),
                run_config=fields or FIELDS,
                capacity_bytes=capacity_bytes,
                segment_bytes=segment_bytes,
                on_mismatch=OnMismatch(on_mismatch),
                verify=Verify.REQUIRED if verify else Verify.OFF,
                **settings,
            ),
            partial(create_policy, policy),
            ops,
        )

    def open(self, ops: FileOps | None = None, *, num_slots: int = 64, **options) -> TierHarness:
        return TierHarness(self.tier(ops, **options), num_slots, self._row_bytes(**options))

    def open_other(self, ops: FileOps | None = None, **options) -> OtherHarness:
        """Open the store as that of the other identity."""
        tier = self.tier(ops, fields=OTHER_FIELDS, **options)
        return OtherHarness(tier, 64, self._row_bytes(**options))

    def _row_bytes(self, *, verify: bool | str = True, **_options) -> int:
        """Return the bytes of a block for which a slot is as long as without encryption."""
        return self.block_bytes - SEAL_BYTES * (verify == "encrypted")

    def manage(self, ops: FileOps | None = None, **options) -> ManagerHarness:
        return ManagerHarness(self.tier(ops, **options), 64, self.block_bytes)

    def disk_bytes(self) -> int:
        """What the whole directory takes, itself included."""
        ops = FileOps()
        if not self.root.exists():
            return 0
        total = disk_bytes(self.root.stat())
        return total + sum(disk_bytes(status) for _, status in ops.walk(str(self.root)))

    def addresses(self) -> dict[OffloadKey, int]:
        """What the files say, without a tier: key -> address, the least recently used first."""
        found = list_folder(FileOps(), str(self.folder))
        manifest = self.own_manifest()
        scanned = read_journal(FileOps(), str(self.folder), manifest.journal_seed)
        rows = live_in(found, scanned, manifest)
        session = read_session(FileOps(), str(self.folder), manifest.journal_seed)
        if session is not None:
            note_uses(scanned, rows, session)
        live = scanned.units[by_use(scanned, rows)]
        return dict(zip(keys_of(live), addresses_of(live), strict=True))

    def own_manifest(self) -> Manifest:
        return read_manifest(FileOps(), str(self.folder))

    def size_of(self, slots: int) -> int:
        """Return how long a segment with so many slots is."""
        return self.own_manifest().offset_of(slots)

    def damage(self, key: OffloadKey, *, byte: int = 7) -> None:
        """Flip a bit of a stored block."""
        address = self.addresses()[key]
        path = self.folder / segment_name(segment_of(address))
        flip(path, self.size_of(slot_of(address)) + byte)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip a bit of a file, in address."""
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), offset)
    finally:
        os.close(fd)


async def entered(hang: Hang) -> None:
    """Wait until a call hangs; the harness has the deadline."""
    while not hang.entered.is_set():  # noqa: ASYNC110 - it is set by another thread
        await asyncio.sleep(0)


def sound(tier: SlabTier) -> None:
    """Check the invariants of an open tier that is at rest."""
    store = tier._store
    catalog, table = store.catalog, store.table
    assert not list(catalog.violations())
    assert not catalog._pins
    assert not catalog._claimed
    assert not tier._writing
    live = {}
    for segment in table.slots():
        records = table.records_in(segment)
        live |= zip(keys_of(records), addresses_of(records), strict=True)
    assert live == dict(catalog.items())
    assert table.slots() == dict(catalog.segments)


K = [key_of(number) for number in range(80)]


def is_segment(call) -> bool:
    return "segment-" in call.path


def is_journal(call) -> bool:
    return f"/{JOURNAL}" in call.path
