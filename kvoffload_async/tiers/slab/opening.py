"""Opening a store: locking it, checking its layout, recovering its blocks.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import KVIdentity, TierLocation
from kvoffload_async.config import (
    MAX_THREADS,
    at_least,
    one_of,
    option,
    or_none,
    parse_bool,
    parse_size_bytes,
    shown,
    suitable_threads,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.tables.arrays import MAX_NUMBERS
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.files.identity import DirectoryIdentity, boot_id
from kvoffload_async.tiers.files.locks import InUseError, lock_for_process
from kvoffload_async.tiers.files.ops import DirectIo, FileOps, sync_folder, warn_of_capacity
from kvoffload_async.tiers.files.settings import DiskSettings, SealingOptions
from kvoffload_async.tiers.slab.addresses import segment_of
from kvoffload_async.tiers.slab.catalog import Catalog
from kvoffload_async.tiers.slab.encryption import create_block_digester
from kvoffload_async.tiers.slab.journal import Journal, RecordTable
from kvoffload_async.tiers.slab.layout import (
    JOURNAL,
    LOCK,
    MANIFEST,
    SESSION,
    Budget,
    StoreLayout,
    segment_name,
)
from kvoffload_async.tiers.slab.manifest import (
    Manifest,
    UnreadableManifestError,
    slot_bytes_of,
)
from kvoffload_async.tiers.slab.recovery import (
    Folder,
    Recovery,
    Session,
    list_folder,
    live_in,
    read_journal,
    read_manifest,
    replace_file,
    write_session,
)
from kvoffload_async.tiers.slab.segments import Segments

logger = logging.getLogger(__name__)


_LEAST_SEGMENTS: Final = 16
"""Minimum number of segments of a full store, unless it is small or `segment_bytes` is given."""

_LEAST_SEGMENT_BYTES: Final = 4 << 20
"""Smallest segment by default: the bytes of one system call."""

_MOST_SEGMENT_BYTES: Final = 1 << 30
"""Largest segment by default."""


class Verify(enum.StrEnum):
    """Which blocks a load returns: those with a valid checksum, or all."""

    REQUIRED = "required"
    OFF = "off"


class OnMismatch(enum.StrEnum):
    """Reaction to a store whose blocks have another layout or content."""

    FAIL = "fail"
    NEW_NAMESPACE = "new_namespace"
    REPLACE = "replace"


@dataclass(frozen=True, kw_only=True)
class SlabSettings(DiskSettings, SealingOptions):
    """The options of a `slab` tier, and the identity of its blocks.

    Attributes:
        io_threads: I/O threads of the tier.
        stripes: Segments that are filled in parallel, as the kernel lets one thread at a time
            write into a file.
        piece_bytes: Approximate bytes per system call, reduced to no less than a quarter when one
            job has all threads.
    """

    capacity_bytes: int = option(parse_size_bytes, remedy='a size such as "100GiB"')
    """Maximum allocated disk space in bytes, including the store's metadata."""
    on_mismatch: OnMismatch = option(one_of(OnMismatch), OnMismatch.FAIL)
    """Action if the folder contains blocks of another layout, content or integrity key, or
    blocks that are encrypted where these are not, or vice versa: "fail"; "new_namespace" to create
    a separate store, with a capacity of its own, next to them; or "replace" to discard them."""
    segment_bytes: int | None = option(or_none(parse_size_bytes), None)
    """Maximum size of a file; one file per I/O thread is allocated at once. By default a sixteenth
    of the capacity, 4 MiB to 1 GiB."""
    verify: Verify = option(one_of(Verify), Verify.REQUIRED)
    """Blocks that are served: only those with a valid checksum ("required"), or all ("off")."""
    fsync: bool = option(parse_bool, default=False)
    """Report a block as stored only after its bytes and its journal entry are on the device."""
    wanted_threads: int | None = option(or_none(at_least(2, MAX_THREADS)), None, key="io_threads")
    """Threads that transfer blocks; all but one prefer loads. Replaces `n_read_threads` and
    `n_write_threads`, which this tier does not accept. By default 4 with `direct_io`, else
    one per CPU that this process may use, 2 to 4."""
    io_threads: int = 3
    stripes: int = 1
    piece_bytes: int = 4 << 20

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        for name in ("n_read_threads", "n_write_threads"):
            if name in options:
                raise ConfigError(
                    f"{name}: {shown(options[name])} is not an option of this tier; use io_threads"
                )
        settings = super().of(options, identity)
        settings.check_verifies(str(settings.verify), does=settings.verifies)
        threads = settings.wanted_threads or suitable_threads(waits_for_device=settings.direct_io)
        return replace(settings, io_threads=threads, stripes=threads)

    @property
    def verifies(self) -> bool:
        """Whether checksums are computed and compared."""
        return self.verify is Verify.REQUIRED

    def locations(self, identity: KVIdentity) -> list[TierLocation]:
        if identity.block_bytes:
            self.budget(identity.block_bytes)
        return [TierLocation(self.root_dir, self.capacity_bytes)]

    def budget(self, block_bytes: int) -> Budget:
        """Return the numbers of slots and segments that fit into the capacity.

        Raises:
            ConfigError: No block fits, or more than the index can count.
        """
        num_blocks = self.capacity_bytes // block_bytes
        if num_blocks > MAX_NUMBERS:  # checked first: the segments could not be counted
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} allows {num_blocks} "
                f"blocks of {block_bytes} bytes; reduce it to at most {MAX_NUMBERS} blocks"
            )
        segment_bytes = self.segment_bytes
        if segment_bytes is None:
            share_bytes = self.capacity_bytes // _LEAST_SEGMENTS
            segment_bytes = min(max(share_bytes, _LEAST_SEGMENT_BYTES), _MOST_SEGMENT_BYTES)
            segment_bytes = max(
                segment_bytes, slot_bytes_of(block_bytes, is_encrypted=self.is_encrypted)
            )
        budget = Budget.of(
            self.capacity_bytes,
            block_bytes,
            segment_bytes,
            self.stripes,
            is_encrypted=self.is_encrypted,
        )
        if segment_bytes < budget.slot_bytes:
            raise ConfigError(
                f"segment_bytes: {segment_bytes} is less than a slot of "
                f"{budget.slot_bytes} bytes; give at least that"
            )
        if not budget.most_slots:
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} cannot hold one block of "
                f"{block_bytes} bytes and the journal; give at least {budget.least_bytes}"
            )
        if self.quotas is not None:
            self.quotas.blocks(budget.most_slots, budget.slot_bytes, "capacity_bytes")
        return budget


class OpenStore:
    """One open store with its files.

    Attributes:
        folder: Path of the store.
        settings: Options of the tier.
        manifest: Parameters of the store.
        directory_identity: Identity of the folder.
        digester: Computes checksums.
        table: Records of its blocks.
        catalog: Index of its blocks; used only by the loop after construction.
        found_keys: Keys found at opening; the caller takes ownership of the map.
        budget: Limits on its size.
    """

    def __init__(
        self,
        ops: FileOps,
        layout: StoreLayout,
        settings: SlabSettings,
        budget: Budget,
        create_policy: Callable[[int], CachePolicy],
    ) -> None:
        """Open or create the store; after a failure nothing is left open.

        Raises:
            ConfigError: It is locked, of another layout and not to be replaced, or its manifest is
                unreadable.
            OSError: The folder cannot be used.
        """
        self._ops = ops
        self.settings = settings
        self._lock_fd: int | None = None
        self._session_fd: int | None = None
        self.folder = _choose_folder(ops, layout, settings.on_mismatch)
        ops.make_folders(self.folder)
        self.directory_identity = DirectoryIdentity(ops, self.folder)
        try:
            _readable_manifest(ops, self.folder)  # a newer release's store must not be written to
            self._lock_fd = _take_lock(ops, self.folder)
            self.directory_identity.watch(self._lock_fd, LOCK)
            found = list_folder(ops, self.folder)
            self.manifest = self._check_manifest(found, layout)
        except BaseException:
            self._unlock()
            raise
        self.digester = create_block_digester(self.manifest.layout, settings.block_key)
        self.table = RecordTable()
        direct = DirectIo(wanted=settings.direct_io, where=self.folder)
        self.segments = Segments(
            ops, self.folder, self.directory_identity, direct, manifest=self.manifest
        )
        self.journal = Journal(
            ops,
            self.folder,
            self.directory_identity,
            self.table,
            self.manifest.journal_seed,
            fdatasync=settings.fsync,
        )
        try:
            recovery = Recovery(
                *(ops, self.folder, found, self.manifest, budget),
                verify=settings.verifies,
                is_keyed=self.digester.is_keyed,
            )
            self.budget = recovery.budget
            warn_of_capacity(ops, settings.root_dir, settings.capacity_bytes, found.allocated_bytes)
            for name in found.temps:
                with contextlib.suppress(FileNotFoundError):
                    ops.unlink(f"{self.folder}/{name}")
            self._attach(found, recovery)
            self.catalog = self._take_in(recovery, create_policy)
            self.found_keys = self.catalog.keys()
            self._begin_session(recovery.session)
            if settings.fsync:
                sync_folder(ops, self.folder.rpartition("/")[0])  # the store's folder may be new
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Flush the journal, close all files, release the lock; idempotent."""
        session_fd, self._session_fd = self._session_fd, None
        with contextlib.ExitStack() as closing:
            closing.callback(self._unlock)
            closing.callback(self.segments.close)
            closing.callback(self.journal.close)
            if session_fd is None:
                return
            closing.callback(self._ops.close, session_fd)
            try:
                self.journal.flush(is_awaited=lambda: False)
                self._end_session(session_fd)
            except OSError as error:
                logger.warning(
                    "%s: the journal could not be written at close: %s", self.folder, str(error)
                )

    @property
    def extent_slots(self) -> int:
        """Number of slots of an extent, the unit of adjacent allocation."""
        return max(1, self.settings.piece_bytes // self.budget.slot_bytes)

    # -- internal -------------------------------------------------------------------------------

    def _check_manifest(self, found: Folder, layout: StoreLayout) -> Manifest:
        """Check the store's layout, or create the store; return its manifest."""
        manifest = _readable_manifest(self._ops, self.folder)
        if manifest is None:
            if not found.is_empty:
                raise ConfigError(
                    f"root_dir: the store in {self.folder!r} has lost its manifest; "
                    "remove that folder, or give another directory"
                )
        elif difference := layout.difference(manifest):
            replaces = self.settings.on_mismatch is OnMismatch.REPLACE
            if not replaces or not layout.may_replace(manifest):
                raise ConfigError(
                    f"root_dir: {self.folder!r} contains incompatible blocks ({difference}); give "
                    'another directory, or on_mismatch="new_namespace" for a store next to them, '
                    'or "replace" to discard those of the same model and namespace'
                )
            self._empty(found, manifest, difference)
        else:
            return manifest
        manifest = layout.manifest.of_new_store()
        replace_file(self._ops, f"{self.folder}/{MANIFEST}", [manifest.encode()])
        sync_folder(self._ops, self.folder)  # it must exist before any file that depends on it
        return manifest

    def _empty(self, found: Folder, manifest: Manifest, difference: str) -> None:
        """Delete all blocks of the store; it keeps its layout until the manifest is replaced.

        The journal is deleted first: slots without a record are free for any later opening.
        """
        scanned = read_journal(self._ops, self.folder, manifest.journal_seed)
        num_blocks = len(live_in(found, scanned, manifest))
        logger.warning(
            "%s: incompatible blocks (%s): all %d of them, %d bytes, are discarded, because of "
            "on_mismatch",
            self.folder,
            difference,
            num_blocks,
            num_blocks * manifest.block_bytes,
        )
        if JOURNAL in found.own_files:
            self._ops.unlink(f"{self.folder}/{JOURNAL}")
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(f"{self.folder}/{SESSION}")
        while found.segments:
            number, _ = found.segments.popitem()
            self._ops.unlink(f"{self.folder}/{segment_name(number)}")

    def _attach(self, found: Folder, recovery: Recovery) -> None:
        """Open the segments; reserve the numbers that the journal or a rejected file uses."""
        for number in sorted(found.segments):
            if slots := self.segments.attach(number):
                self.table.add_segment(number, slots)
        units, rows = recovery.scanned.units, recovery.scanned.rows
        if len(rows):
            self.segments.skip_to(segment_of(int(units["address"][rows].max())))
        if found.refused:
            self.segments.skip_to(max(found.refused))

    def _take_in(self, recovery: Recovery, create_policy: Callable[[int], CachePolicy]) -> Catalog:
        """Index the blocks that may be served, and open the journal for appending."""
        catalog, is_distinct = self._filled(recovery, create_policy)
        if not is_distinct:
            recovery.drop_doubles()
            catalog, _ = self._filled(recovery, create_policy)
        scanned = recovery.scanned
        self.table.fill(scanned.units, recovery.in_order())
        self._vouches = self.journal.open(
            scanned.end_bytes, scanned.sequence, compact_now=recovery.needs_verify
        )
        self.journal.note_gone(recovery.records(recovery.gone))
        return catalog

    def _filled(
        self, recovery: Recovery, create_policy: Callable[[int], CachePolicy]
    ) -> tuple[Catalog, bool]:
        """Return the catalog of the servable blocks, and whether their keys are distinct."""
        capacity = self.settings.capacity_bytes // self.manifest.slot_bytes
        if (quotas := self.settings.quotas) is None:
            catalog = Catalog(create_policy(capacity), self.extent_slots)
        else:
            policy = quotas.policies(create_policy, capacity)
            slot_bytes, most = self.manifest.slot_bytes, self.budget.most_slots
            catalog = Catalog(
                policy, self.extent_slots, quotas.blocks(most, slot_bytes, "capacity_bytes")
            )
        addresses = recovery.scanned.units["address"][recovery.rows]
        return catalog, catalog.fill(self.table.slots(), addresses, recovery.keys())

    # -- the session ----------------------------------------------------------------------------

    def _begin_session(self, last: Session) -> None:
        """Record that a process of this boot has the store open; last uses are kept.

        The old session is kept while the journal lacks the verification marks that follow from it.
        """
        self._session_fd = self._ops.open_own(f"{self.folder}/{SESSION}", os.O_RDWR)
        if self._vouches:
            session = Session(boot_id(), self.journal.sequence, uses=last.uses)
            seed = self.manifest.journal_seed
            write_session(self._ops, self._session_fd, session, seed, sync=True)
            if not last.boot_id:  # the file may be new
                sync_folder(self._ops, self.folder)

    def _end_session(self, fd: int) -> None:
        """Record that the store was closed, and each block's last use.

        Raises:
            OSError: The session cannot be written.
        """
        if not self._vouches:
            return
        self.directory_identity.check()
        is_synced = self.settings.fsync
        if not (is_synced or self.settings.verifies):
            # Blocks without checksums cannot be verified after a power failure, so sync now.
            self.segments.sync(self.table.slots())
            self.journal.sync()
            is_synced = True
        session = Session(
            boot_id(),
            self.journal.sequence,
            is_closed=True,
            is_synced=is_synced,
            uses=self.table.uses(),
        )
        write_session(self._ops, fd, session, self.manifest.journal_seed, sync=is_synced)

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            self._ops.close(fd)


def _choose_folder(ops: FileOps, layout: StoreLayout, on_mismatch: OnMismatch) -> str:
    """Return the folder to open: a separate one if a store of another layout has the usual one."""
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
            "remove that folder, or give another directory"
        ) from error


def _take_lock(ops: FileOps, folder: str) -> int:
    """Lock a store for this tier; return the descriptor that holds the lock.

    Raises:
        ConfigError: Another process has locked it, or locks are not supported here.
    """
    try:
        return lock_for_process(ops, f"{folder}/{LOCK}")
    except InUseError as error:
        user = f"process {error}" if str(error) != str(os.getpid()) else "this process"
        raise ConfigError(
            f"root_dir: the store in {folder!r} is already opened by {user}; close it there, or "
            "give another directory"
        ) from None
