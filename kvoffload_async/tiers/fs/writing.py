"""Writing block files, each complete or absent.

Blocks on filesystem calls; run on I/O threads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat as stat_module
from collections.abc import Callable, Sequence

from kvoffload_async.system_calls import REFUSALS
from kvoffload_async.tiers.files.ops import (
    DirectIo,
    FileOps,
    NotRegularFileError,
    disk_bytes,
    mapped,
    sync_folder,
)
from kvoffload_async.tiers.fs.digest_attribute import (
    ATTRIBUTE,
    DigestCache,
    Origin,
    create_attributes,
)
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.operations import STORED, StoreItem, StoreStatus, Verify
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

UNVERIFIED_MARKER = ".unverified-readers"
"""Marker file: exists once a process has opened the namespace to read without verification."""

_SERIALS = 1 << 20
"""Serial numbers reserved for a batch of temporary files; a batch has fewer files."""

_TRIES = 8
"""Maximum attempts to write to a folder that others keep removing."""

_WORTHLESS = {Origin.OTHER_KEY, Origin.UNKNOWN}

# ENOSPC is not included: on a full disk the store fails.
_NO_XATTR = REFUSALS | {errno.EOPNOTSUPP, errno.E2BIG}


class BlockWriter:
    """Writes the block files of one namespace.

    Attributes:
        ops: The system calls.
        namespace: Location of the files.
        settings: How the files are written and read.
        block_bytes: Length of every file.
        writers: The writers of the namespace; this one's id is part of its temporary files' names.
        digester: Computes the values of checksum attributes.
        digest_cache: Cached checksum attributes.
        lacks_attributes: Whether a checksum attribute could not be set.
        leftover_temps: Temporary files that could not be removed; `sweep_leftover_temps` retries.
    """

    def __init__(
        self,
        ops: FileOps,
        namespace: Namespace,
        writers: WriterRegistry,
        settings: FsSettings,
        block_bytes: int,
    ) -> None:
        self.ops = ops
        self.namespace = namespace
        self.settings = settings
        self.block_bytes = block_bytes
        self.writers = writers
        layout = namespace.layout_of(block_bytes)
        self.digester = create_attributes(layout, settings.block_key)
        self.digest_cache = DigestCache()
        self._direct = DirectIo(wanted=settings.direct_io, where=namespace.folder)
        self._unverified_marker = f"{namespace.folder}/{UNVERIFIED_MARKER}"
        self._serials = itertools.count(step=_SERIALS)
        self._synced: set[str] = set()
        self.lacks_attributes = False
        self.leftover_temps: list[str] = []

    def store(self, items: Sequence[StoreItem], row_of: Callable[[int], memoryview]) -> None:
        """Store blocks one by one; a failure does not affect other blocks.

        Args:
            items: The blocks. Results are filled in one by one, so that none is lost if the caller
                is cancelled. A retry with `freed_bytes` takes no second victim.
            row_of: Returns the bytes of a slot.
        """
        for item in items:
            try:
                with self.ops.batch():
                    item.status = self._store_one(item, row_of(item.slot))
            except OSError as error:
                item.error = mapped(error)
        self.sync_names(items)

    def sync_names(self, items: Sequence[StoreItem]) -> None:
        """With `fsync`, wait until the names of stored blocks are durable."""
        folders: dict[str, list[StoreItem]] = {}
        for item in items if self.settings.fsync else ():
            if item.status in STORED:
                path = self.namespace.get_file_name(item.key)
                folders.setdefault(path.rpartition("/")[0], []).append(item)
        for folder, stored in folders.items():
            try:
                self._sync_folder(folder)
            except OSError as error:  # the names may not be durable, now or ever
                for item in stored:
                    self._take_back(item)
                    item.status, item.error = StoreStatus.FAILED, mapped(error)

    def _sync_folder(self, folder: str) -> None:
        """Sync a folder, so that its names survive a power cut; the first time also its parents."""
        sync_folder(self.ops, folder)
        if folder not in self._synced:
            above = folder
            while above != self.namespace.folder:
                above = above.rpartition("/")[0]
                sync_folder(self.ops, above)
            self._synced.add(folder)

    def make_folder(self, path: str) -> None:
        """Create the missing folders of a block or temporary file.

        A link, pipe, socket or device in the place of a folder is removed.

        Raises:
            OSError: A folder cannot be created.
        """
        folder = self.namespace.folder
        self.ops.make_folders(folder)
        for name in path[len(folder) + 1 :].split("/")[:-1]:
            folder = f"{folder}/{name}"
            self._synced.discard(folder)
            with contextlib.suppress(FileExistsError):
                self.ops.mkdir_own(folder)

    def forget_synced(self) -> None:
        """Forget which folders were synced, because they may have been removed."""
        self._synced.clear()

    def _take_back(self, item: StoreItem) -> None:
        """Remove a block that was written, because its name may never be durable."""
        if item.status is StoreStatus.WRITTEN:
            try:
                self._unlink(item)
            except OSError as error:
                logger.warning("a block that may not be durable was not removed: %s", str(error))

    def _unlink(self, item: StoreItem) -> None:
        path = self.namespace.get_file_name(item.key)
        freed_bytes = disk_bytes(self.ops.stat(path))
        self.ops.unlink(path)
        item.removed_bytes += freed_bytes

    def sync_root(self) -> None:
        """With `fsync`, wait until the namespace's folder is durable; raises OSError."""
        if self.settings.fsync:
            sync_folder(self.ops, self.namespace.folder.rpartition("/")[0])

    def sweep_leftover_temps(self) -> None:
        """Retry the removal of leftover temporary files. Thread-safe.

        Raises:
            OSError: Files could not be removed; they are kept for the next attempt.
        """
        failures: list[OSError] = []
        for temp in tuple(self.leftover_temps):  # other threads append
            try:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self.ops.unlink(temp)
            except OSError as error:  # others may be removable
                failures = [error]
                continue
            with contextlib.suppress(ValueError):  # another sweep was faster
                self.leftover_temps.remove(temp)  # last: its bytes are counted until then
        if failures:
            raise failures.pop()  # which breaks the cycle with its frame

    def _store_one(self, item: StoreItem, row: memoryview) -> StoreStatus:
        path = self.namespace.get_file_name(item.key)
        is_there = self.ops.has_file(path)
        if is_there and not self._is_worthless(path):
            return StoreStatus.PRESENT
        if not item.may_write:
            return StoreStatus.ABSENT
        if is_there:
            with contextlib.suppress(FileNotFoundError):
                self._unlink(item)
        try:
            return self._store_by_way_of(self._temp_of(path), path, item, row)
        except FileNotFoundError:
            # Swept by a writer that assumed this one dead, or removed with its folder.
            return self._store_by_way_of(self._temp_of(path), path, item, row)

    def temp_names(self) -> tuple[str, int]:
        """Return the middle part of new temporary names, and the first of `_SERIALS` numbers.

        A name is the block's, the middle part, a number and `TEMP_SUFFIX`. Thread-safe.
        """
        return f".{self.writers.writer_id}.", next(self._serials)

    def _temp_of(self, path: str) -> str:
        stem, serial = self.temp_names()
        return f"{path}{stem}{serial}{TEMP_SUFFIX}"

    def _store_by_way_of(
        self, temp: str, path: str, item: StoreItem, row: memoryview
    ) -> StoreStatus:
        try:
            recycled = False
            if item.victim is not None and item.freed_bytes is None:
                if not self._take_victim(item, item.victim, temp):
                    return StoreStatus.VICTIM_GONE
                recycled = self._may_overwrite(temp)
                if not recycled:
                    self.ops.unlink(temp)
            digest = self._fill(temp, item.key, row, recycled=recycled)
            is_counted = self.settings.capacity_bytes is not None
            file_bytes = disk_bytes(self.ops.stat(temp)) if is_counted else 0
            is_published = self._publish(temp, path)
        except OSError:
            self.discard_temp(temp)
            raise
        if not is_published:
            self.discard_temp(temp)
            return StoreStatus.PRESENT
        item.added_bytes += file_bytes
        if digest is not None:
            self.digest_cache.remember(item.key, digest)
        return StoreStatus.WRITTEN

    def _publish(self, temp: str, path: str) -> bool:
        for _ in range(_TRIES):
            try:
                self.ops.publish(temp, path)
            except FileExistsError:
                if self.ops.has_file(path):
                    return False  # another writer was faster; equal keys mean equal bytes
                with contextlib.suppress(FileNotFoundError):
                    self.ops.clear(path)
            else:
                return True
        raise NotRegularFileError(path)

    # -- existing files that may not be served -----------------------------------------

    def _is_worthless(self, path: str) -> bool:
        """Return whether a file must be replaced because no tier with this key serves it.

        Without a key no file is replaced: it may be valid for tiers with a key. Files of
        newer releases are kept.
        """
        if self.settings.key_option is None:
            return False
        try:
            with self.ops.opened(path, os.O_RDONLY) as fd:
                value = self.ops.get_xattr(fd, ATTRIBUTE)
        except FileNotFoundError:
            return True
        return value is None or self.digester.origin_of(value) in _WORTHLESS

    # -- the victim -----------------------------------------------------------------------------

    def _take_victim(self, item: StoreItem, victim: OffloadKey, temp: str) -> bool:
        """Rename an evicted block's file, so that it cannot be opened under its old name."""
        old = self.namespace.get_file_name(victim)
        try:
            status = self.ops.stat(old)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if stat_module.S_ISDIR(status.st_mode):
            return False  # not a block; a link or pipe is renamed itself
        for _ in range(_TRIES):
            try:
                self.ops.rename(old, temp)
                break
            except FileNotFoundError:  # the victim or the destination folder is missing
                if not self.ops.exists(old):
                    return False
                self.make_folder(temp)
        else:
            return False
        item.freed_bytes = disk_bytes(status)
        return True

    def _may_overwrite(self, temp: str) -> bool:
        """Return whether a renamed victim's inode may be overwritten.

        Must be called after the rename. A reader without verification creates the marker before it
        opens any file, so one that opened the victim under its old name is detected here; vLLM's
        tier neither verifies nor creates the marker. A file without a checksum may be open in a
        reader that accepts such files, and one with another kind of checksum in a reader that does
        not compare it. A file with several hard links may be open under another name.
        """
        if self.settings.trust_vllm_directory or self.ops.exists(self._unverified_marker):
            return False
        try:
            status = self.ops.stat(temp)
            if not stat_module.S_ISREG(status.st_mode) or status.st_nlink > 1:
                return False
            with self.ops.opened(temp, os.O_RDWR) as fd:
                value = self.ops.get_xattr(fd, ATTRIBUTE)
            return value is not None and self.digester.origin_of(value) is Origin.OWN
        except PermissionError:
            return False

    # -- the bytes ------------------------------------------------------------------------------

    def _fill(self, temp: str, key: OffloadKey, row: memoryview, *, recycled: bool) -> bytes | None:
        """Write a block's bytes and digest to a new or recycled file; return the digest."""
        flags = os.O_WRONLY | os.O_CREAT
        direct = self._direct.flag
        try:
            exclusive = 0 if recycled else os.O_EXCL
            fd = self._open_temp(temp, flags | exclusive | direct)
            return self._fill_opened(fd, key, row, recycled=recycled)
        except OSError as error:
            if not self._direct.refused(direct, error):
                raise
            fd = self._open_temp(temp, flags)  # the refused call may have created it
            return self._fill_opened(fd, key, row, recycled=recycled)

    def _open_temp(self, temp: str, flags: int) -> int:
        for _ in range(_TRIES):
            try:
                return self.ops.open(temp, flags)
            except (FileNotFoundError, NotADirectoryError):
                self.make_folder(temp)
        return self.ops.open(temp, flags)

    def _fill_opened(
        self, fd: int, key: OffloadKey, row: memoryview, *, recycled: bool
    ) -> bytes | None:
        try:
            digest = None
            if (
                self.settings.verify is not Verify.OFF or recycled
            ):  # a victim's digest must be replaced
                # Before the write, so that the write finds the row in the CPU cache.
                digest, row = self.digester.encoded(key, row)
            self._write_row(fd, row)
            if recycled:
                self.ops.truncate(fd, len(row))
            if digest is not None:
                self._set_digest(fd, digest, is_vital=recycled)
            if self.settings.fsync:
                self.ops.fsync(fd)  # not fdatasync, which does not sync attributes
            return digest
        finally:
            self.ops.close(fd)

    def _write_row(self, fd: int, row: memoryview) -> None:
        done = 0
        while done < len(row):
            written = self.ops.pwritev(fd, (row[done:] if done else row,), done)
            if written <= 0:
                raise OSError(errno.EIO, "write returned 0 bytes")
            done += written

    def _set_digest(self, fd: int, digest: bytes, *, is_vital: bool) -> None:
        try:
            self.ops.set_xattr(fd, ATTRIBUTE, digest)
        except OSError as error:
            if is_vital or error.errno not in _NO_XATTR or self.settings.verify is Verify.REQUIRED:
                raise
            if not self.lacks_attributes:
                self.lacks_attributes = True
                logger.warning(
                    "%s: no extended attributes: blocks are stored without a checksum",
                    self.namespace.folder,
                )

    def discard_temp(self, temp: str) -> None:
        """Remove a temporary file, or queue it for a later attempt."""
        try:
            self.ops.unlink(temp)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # the file was never created
                return
            self.leftover_temps.append(temp)
            # As text: a log record with the error would keep its frames, and the primary's memory.
            logger.warning("a temporary file was not removed yet: %s", str(error))
