"""Opening a store: taking its lock, checking what it is, finding what lies in it.

Thread: an I/O thread, for all of it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.anchor import Anchor
from kvoffload_async.tiers.files.digests import create_digester
from kvoffload_async.tiers.files.direct import DirectIo
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.tiers.files.ops import FileOps, write_all
from kvoffload_async.tiers.slab.batches import DataPath
from kvoffload_async.tiers.slab.budget import Budget
from kvoffload_async.tiers.slab.catalog import Catalog
from kvoffload_async.tiers.slab.journal import Journal
from kvoffload_async.tiers.slab.layout import (
    JOURNAL,
    LOCK,
    MANIFEST,
    TEMP_SUFFIX,
    StoreLayout,
    segment_name,
)
from kvoffload_async.tiers.slab.manifest import Manifest, UnreadableManifestError
from kvoffload_async.tiers.slab.places import segment_of
from kvoffload_async.tiers.slab.reading import (
    Folder,
    list_folder,
    live_in,
    read_journal,
    read_manifest,
)
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    SUSPECT,
    Records,
    Scan,
    keys_of,
    places_of,
    seed_of,
)
from kvoffload_async.tiers.slab.rows import Rows
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.tiers.slab.table import RecordTable
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)


class OnMismatch(enum.StrEnum):
    """What happens if the store in the folder has blocks of another layout or content."""

    FAIL = "fail"
    NEW_NAMESPACE = "new_namespace"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How a store works; see the facade's `SlabTierManager` for the options' meaning."""

    budget: Budget
    verify: bool
    integrity_key: IntegrityKey | None
    on_mismatch: OnMismatch
    direct_io: bool
    fdatasync: bool
    piece_bytes: int


class OpenStore:
    """One open store: everything of it that holds a file.

    Attributes:
        folder: Where it is.
        data_path: What moves its blocks.
        manifest: What it is.
        catalog: What is in it; the loop's, once this is constructed.
    """

    def __init__(
        self,
        ops: FileOps,
        layout: StoreLayout,
        settings: StoreSettings,
        create_policy: Callable[[int], CachePolicy],
        rows: Rows,
    ) -> None:
        """Open the store, or make it; after a failure nothing is left open.

        Raises:
            ConfigError: It is somebody else's, of another layout and not to be replaced, or its
                manifest is unreadable.
            OSError: The folder cannot be used.
        """
        self._ops = ops
        self._settings = settings
        self._lock_fd: int | None = None
        self.folder = _choose_folder(ops, layout, settings.on_mismatch)
        ops.make_folders(self.folder)
        anchor = Anchor(ops, self.folder)
        table = RecordTable()
        direct = DirectIo(wanted=settings.direct_io, where=self.folder)
        text = layout.manifest.layout
        self.data_path = DataPath(
            rows=rows,
            anchor=anchor,
            segments=Segments(ops, self.folder, anchor, rows, direct),
            table=table,
            journal=Journal(
                ops,
                self.folder,
                anchor,
                table,
                seed_of(text),
                log_units=settings.budget.log_units,
                fdatasync=settings.fdatasync,
            ),
            digester=create_digester(text, settings.integrity_key),
            verify=settings.verify,
            fdatasync=settings.fdatasync,
            piece_bytes=settings.piece_bytes,
        )
        policy = create_policy(settings.budget.capacity_bytes // rows.slot_bytes)
        self.catalog = Catalog(policy, self.data_path.extent_slots)
        try:
            _readable_manifest(ops, self.folder)  # of a newer release's store nothing is written
            self._lock_fd = _take_lock(ops, self.folder)
            anchor.watch(self._lock_fd, LOCK)
            found = list_folder(ops, self.folder)
            self.manifest = self._check_manifest(found, layout)
            self._take_in(found, read_journal(ops, self.folder, text))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Write what is not yet written, close every file, give up the lock; idempotent."""
        try:
            self.data_path.journal.close()
        except OSError as error:
            logger.warning(
                "%s: the journal could not be written at the end: %s", self.folder, str(error)
            )
        finally:
            self.data_path.segments.close()
            fd, self._lock_fd = self._lock_fd, None
            if fd is not None:
                self._ops.close(fd)

    # -- inside ---------------------------------------------------------------------------------

    def _check_manifest(self, found: Folder, layout: StoreLayout) -> Manifest:
        """See to it that the store has this layout, and return what it is; a new one is made."""
        manifest = _readable_manifest(self._ops, self.folder)
        if manifest is None:
            if not found.is_empty:
                raise ConfigError(
                    f"root_dir: the store in {self.folder!r} has lost its manifest; "
                    f"run `kvoffload store repair {self.folder}`, or give another directory"
                )
        elif difference := layout.difference(manifest):
            replaces = self._settings.on_mismatch is OnMismatch.REPLACE
            if not replaces or not layout.may_replace(manifest):
                raise ConfigError(
                    f"root_dir: {self.folder!r} has other blocks ({difference}); give another "
                    'directory, or on_mismatch="new_namespace" for a store beside them, or '
                    '"replace" to discard those of the same model and namespace'
                )
            self._empty(found, manifest, difference)
        else:
            return manifest
        manifest = layout.manifest.of_new_store()
        _write_manifest(self._ops, self.folder, manifest)
        return manifest

    def _empty(self, found: Folder, manifest: Manifest, difference: str) -> None:
        """Discard every block of the store; until the manifest changes, the store is still its own.

        The journal goes first: what it does not name is free, whoever opens the store next.
        """
        scanned = read_journal(self._ops, self.folder, manifest.layout)
        num_blocks = len(live_in(found, scanned, manifest.slot_bytes))
        logger.warning(
            "%s: it has other blocks (%s): all %d of them, %d bytes, are discarded, as on_mismatch "
            "says",
            self.folder,
            difference,
            num_blocks,
            num_blocks * manifest.block_bytes,
        )
        if found.has_journal:
            self._ops.unlink(f"{self.folder}/{JOURNAL}")
        while found.segments:
            number, _ = found.segments.popitem()
            self._ops.unlink(f"{self.folder}/{segment_name(number)}")

    def _take_in(self, found: Folder, scanned: Scan) -> None:
        """Take in what the journal says of the segments that fit into the capacity."""
        for name in found.temps:
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(f"{self.folder}/{name}")
        data_path, catalog = self.data_path, self.catalog
        self._drop_surplus(found)
        for number in sorted(found.segments):
            segment = data_path.segments.attach(number)
            if segment is not None:
                data_path.table.add_segment(number, segment.slots)
                catalog.add_segment(number, segment.slots)
        if len(scanned.records):
            data_path.segments.skip_to(segment_of(int(scanned.records["place"].max())))
        rows = live_in(found, scanned, data_path.rows.slot_bytes)
        live = scanned.records
        if len(rows) < len(live):
            live = live[rows]
        live["flags"][rows < scanned.num_before_damage] |= SUSPECT
        is_keyed = data_path.digester.is_keyed
        gone = ~_is_servable(live, verify=self._settings.verify, is_keyed=is_keyed)
        lost = live[gone]
        if len(lost):
            live = live[~gone]
        live, keys, doubles = _without_doubles(live)
        data_path.table.fill(live)
        catalog.fill(keys, places_of(live))
        if scanned.num_before_damage:
            logger.warning(
                "%s: %d bytes of the journal are damaged; blocks stored before are verified",
                self.folder,
                scanned.lost_bytes,
            )
        data_path.journal.open(
            scanned.end_bytes, scanned.sequence, anew=bool(scanned.num_before_damage)
        )
        data_path.journal.note_gone(lost)
        data_path.journal.note_gone(doubles)

    def _drop_surplus(self, found: Folder) -> None:
        """Delete segments for which a capacity that has become smaller has no room."""
        budget = self._settings.budget
        slots = {n: size // budget.slot_bytes for n, size in found.segments.items()}
        while slots and budget.cost(slots.values()) > budget.capacity_bytes:
            number = max(slots)
            self._ops.unlink(f"{self.folder}/{segment_name(number)}")
            del slots[number], found.segments[number]


def _is_servable(live: Records, *, verify: bool, is_keyed: bool) -> npt.NDArray[np.bool_]:
    """Return which blocks may be served: what must be verified needs a checksum, by the key."""
    flags = live["flags"]
    servable: npt.NDArray[np.bool_] = flags & HAS_DIGEST != 0
    if not verify:
        servable |= flags & SUSPECT == 0
    servable &= (flags & KEYED != 0) == is_keyed
    return servable


def _without_doubles(live: Records) -> tuple[Records, list[OffloadKey], Records]:
    """Return the records with a key each, those keys, and the other records.

    Two records of a key only damage can bring about; the later one counts.
    """
    keys = keys_of(live)
    last = dict(zip(keys, range(len(live)), strict=True))
    if len(last) == len(live):
        return live, keys, live[:0]
    is_last = np.zeros(len(live), dtype=np.bool_)
    is_last[list(last.values())] = True
    return live[is_last], keys_of(live[is_last]), live[~is_last]


def _choose_folder(ops: FileOps, layout: StoreLayout, on_mismatch: OnMismatch) -> str:
    """Return the folder to open: the layout's own one, if another has the usual one."""
    if on_mismatch is OnMismatch.NEW_NAMESPACE:
        manifest = _readable_manifest(ops, layout.folder)
        if manifest is not None and layout.difference(manifest):
            return layout.own_folder
    return layout.folder


def _readable_manifest(ops: FileOps, folder: str) -> Manifest | None:
    try:
        return read_manifest(ops, folder)
    except NewerFormatError as error:
        raise ConfigError(
            f"root_dir: the store in {folder!r} is of a newer release: {error}; upgrade, or give "
            "another directory"
        ) from error
    except UnreadableManifestError as error:
        raise ConfigError(
            f"root_dir: the manifest of the store in {folder!r} is unreadable: {error}; "
            f"run `kvoffload store repair {folder}`, or give another directory"
        ) from error


def _write_manifest(ops: FileOps, folder: str, manifest: Manifest) -> None:
    temp = f"{folder}/{MANIFEST}{TEMP_SUFFIX}"
    fd = ops.create_anew(temp)
    try:
        write_all(ops, fd, manifest.encode(), 0)
        ops.fdatasync(fd)
    finally:
        ops.close(fd)
    ops.rename(temp, f"{folder}/{MANIFEST}")


def _take_lock(ops: FileOps, folder: str) -> int:
    """Lock a store for this tier; return the descriptor that keeps the lock.

    Raises:
        ConfigError: Somebody else has it, or there are no locks here.
    """
    fd = ops.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT)
    try:
        if ops.lock(fd, wait=False):
            ops.truncate(fd, 0)
            ops.pwrite(fd, memoryview(f"{os.getpid()}\n".encode()), 0)
            return fd
        buffer = memoryview(bytearray(32))
        holder = bytes(buffer[: ops.pread_into(fd, buffer, 0)]).decode(errors="replace").strip()
    except BaseException:
        ops.close(fd)
        raise
    ops.close(fd)
    user = "this process" if holder == str(os.getpid()) else f"process {holder or 'unknown'}"
    raise ConfigError(
        f"root_dir: the store in {folder!r} is already opened by {user}; close it there, or give "
        "another directory"
    )
