"""One block, one file: writing it so that it is whole or absent.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat as stat_module
from collections.abc import Sequence

from kvoffload_async.tiers.files.direct import DirectIo
from kvoffload_async.tiers.files.failure import mapped
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester, DigestCache
from kvoffload_async.tiers.fs.folders import LeafFolders
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace, bucket_of
from kvoffload_async.tiers.fs.outcome import StoreItem, StoreOutcome, StoreStatus, Verify
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

UNVERIFIED_MARKER = ".unverified-readers"
"""Exists in a namespace once somebody has opened it to read without verifying."""

_TRIES = 8
"""How often a folder may vanish before something is put there: others remove empty ones."""

# A full disk is not among them: a block without its checksum is no way out of that.
_NO_XATTR = {errno.EOPNOTSUPP, errno.E2BIG, errno.EPERM}


class BlockWriter:
    """Writes the block files of one namespace.

    Attributes:
        litter: Temporary files that could not be removed; `sweep_litter` tries again.
    """

    def __init__(
        self,
        ops: FileOps,
        namespace: Namespace,
        folders: LeafFolders,
        direct: DirectIo,
        writer_id: str,
        *,
        digest_cache: DigestCache,
        block_bytes: int,
        verify: Verify,
        fsync: bool,
        reuses_inodes: bool,
        counts_bytes: bool,
    ) -> None:
        """Describe how files are written; see `BlockFiles`."""
        self._ops = ops
        self._namespace = namespace
        self._folders = folders
        self._direct = direct
        self._digest_cache = digest_cache
        self._writer_id = writer_id
        self._block_bytes = block_bytes
        self._verify = verify
        self._fsync = fsync
        self._reuses_inodes = reuses_inodes
        self._counts_bytes = counts_bytes
        self._unverified_marker = f"{namespace.folder}/{UNVERIFIED_MARKER}"
        self._digester = AttributeDigester(namespace.layout_of(block_bytes))
        self._serial = itertools.count()
        self._warned = False
        self.litter: list[str] = []

    def store(self, items: Sequence[StoreItem], outcomes: list[StoreOutcome]) -> None:
        """Store blocks one after the other; each is judged on its own.

        The outcomes are appended one by one, so that none is lost if the caller is.
        """
        for item in items:
            outcome = StoreOutcome(item)
            try:
                outcome.status = self._store_one(item, outcome)
            except OSError as error:
                outcome.error = mapped(error)
            outcomes.append(outcome)

    def sweep_litter(self) -> None:
        """Try again to remove what could not be removed.

        Raises:
            OSError: Something stays behind.
        """
        while self.litter:
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(self.litter[-1])
            self.litter.pop()

    def _store_one(self, item: StoreItem, outcome: StoreOutcome) -> StoreStatus:
        path = self._namespace.get_file_name(item.key)
        if self._ops.exists(path):
            return StoreStatus.PRESENT
        if not item.may_write:
            return StoreStatus.ABSENT
        temp = f"{path}.{self._writer_id}.{next(self._serial)}{TEMP_SUFFIX}"
        leaf = path.rpartition("/")[0]
        self._folders.ensure(leaf, outcome.change)
        with self._folders.growing(leaf, outcome.change):
            return self._store_by_way_of(temp, path, item, outcome)

    def _store_by_way_of(
        self, temp: str, path: str, item: StoreItem, outcome: StoreOutcome
    ) -> StoreStatus:
        try:
            recycled = False
            if item.victim is not None:
                if not self._take_victim(item.key, item.victim, temp, outcome):
                    return StoreStatus.VICTIM_GONE
                recycled = self._may_overwrite(temp)
            digest = self._fill(temp, item, outcome, recycled=recycled)
            file_bytes = disk_bytes(self._ops.stat(temp)) if self._counts_bytes else 0
            is_published = self._publish(temp, path)
        except OSError:
            self.discard(temp)
            raise
        if not is_published:
            self.discard(temp)
            return StoreStatus.PRESENT
        outcome.change.add(bucket_of(item.key), file_bytes)
        if digest is not None:
            self._digest_cache.remember(item.key, digest)
        return StoreStatus.WRITTEN

    def _publish(self, temp: str, path: str) -> bool:
        try:
            self._ops.publish(temp, path)
        except FileExistsError:
            return False  # somebody else was faster: the same bytes, by definition
        return True

    # -- the victim -----------------------------------------------------------------------------

    def _take_victim(
        self, key: OffloadKey, victim: OffloadKey, temp: str, outcome: StoreOutcome
    ) -> bool:
        """Rename an evicted block's file away, so that nobody can open it under its old name."""
        old = self._namespace.get_file_name(victim)
        leaf = self._namespace.leaf_of(key)
        try:
            freed_bytes = disk_bytes(self._ops.stat(old))
        except FileNotFoundError:
            return False
        for _ in range(_TRIES):
            try:
                self._ops.rename(old, temp)
                break
            except FileNotFoundError:  # the victim, or the folder that it was to go to
                if not self._ops.exists(old):
                    return False
                self._folders.make_again(leaf, outcome.change)
        else:
            return False
        outcome.victim_taken = True
        outcome.change.remove(bucket_of(victim), freed_bytes)
        self._folders.remove_empty(self._namespace.leaf_of(victim), outcome.change)
        return True

    def _may_overwrite(self, temp: str) -> bool:
        """Tell whether a renamed victim's inode may be overwritten; else it is removed.

        Asked after the rename: a reader that does not verify has made the marker before it opens
        anything, so one that opened the victim under its old name is seen here. A file without a
        checksum may be in the hands of a reader that serves such files, one with several names
        has a reader under another.
        """
        if self._reuses_inodes and self._is_sole_file_with_digest(temp):
            return True
        self._ops.unlink(temp)
        return False

    def _is_sole_file_with_digest(self, temp: str) -> bool:
        if self._ops.exists(self._unverified_marker):
            return False
        try:
            status = self._ops.stat(temp)
            if not stat_module.S_ISREG(status.st_mode) or status.st_nlink > 1:
                return False
            fd = self._ops.open(temp, os.O_RDWR)
            try:
                return self._ops.get_xattr(fd, ATTRIBUTE) is not None
            finally:
                self._ops.close(fd)
        except PermissionError:
            return False

    # -- the bytes ------------------------------------------------------------------------------

    def _fill(
        self, temp: str, item: StoreItem, outcome: StoreOutcome, *, recycled: bool
    ) -> bytes | None:
        """Write a block's bytes and its digest into a new or recycled file; return the digest."""
        flags = os.O_WRONLY | os.O_CREAT
        direct = self._direct.flag
        try:
            exclusive = 0 if recycled else os.O_EXCL
            fd = self._open_temp(temp, flags | exclusive | direct, outcome)
            return self._fill_opened(fd, item, recycled=recycled)
        except OSError as error:
            if not self._direct.refused(direct, error):
                raise
            fd = self._open_temp(temp, flags, outcome)  # the refused call may have made it
            return self._fill_opened(fd, item, recycled=recycled)

    def _open_temp(self, temp: str, flags: int, outcome: StoreOutcome) -> int:
        for _ in range(_TRIES):
            try:
                return self._ops.open(temp, flags)
            except FileNotFoundError:
                self._folders.make_again(temp.rpartition("/")[0], outcome.change)
        return self._ops.open(temp, flags)

    def _fill_opened(self, fd: int, item: StoreItem, *, recycled: bool) -> bytes | None:
        try:
            digest = None
            if self._verify is not Verify.OFF or recycled:  # else the victim's would stay
                # Before the write, which then finds the row in the processor's cache.
                digest = self._digester.attribute_value(item.key, item.row)
            self._write_row(fd, item.row)
            if recycled:
                self._ops.truncate(fd, self._block_bytes)
            if digest is not None:
                self._set_digest(fd, digest, is_vital=recycled)
            if self._fsync:
                self._ops.fdatasync(fd)
            return digest
        finally:
            self._ops.close(fd)

    def _write_row(self, fd: int, row: memoryview) -> None:
        done = 0
        while done < len(row):
            written = self._ops.pwrite(fd, row[done:] if done else row, done)
            if written <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            done += written

    def _set_digest(self, fd: int, digest: bytes, *, is_vital: bool) -> None:
        try:
            self._ops.set_xattr(fd, ATTRIBUTE, digest)
        except OSError as error:
            if is_vital or error.errno not in _NO_XATTR or self._verify is Verify.REQUIRED:
                raise
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s: no extended attributes: blocks are stored without a checksum",
                    self._namespace.folder,
                )

    def discard(self, temp: str) -> None:
        """Remove a temporary file; failing that, later."""
        try:
            self._ops.unlink(temp)
        except FileNotFoundError:
            return
        except OSError as error:
            self.litter.append(temp)
            # As text: who keeps the log must not keep the frames, and the primary's memory.
            logger.warning("a temporary file stays behind for now: %s", str(error))
