"""One block, one file: writing it so that it is whole or absent, reading it so that it is right.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.seal import ATTRIBUTE, Sealer
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

UNVERIFIED_MARKER = ".unverified-readers"
"""Exists in a namespace once somebody has opened it to read without verifying."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_XATTR = {errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG, errno.EPERM}
_NOT_DIRECT = {errno.EINVAL}


class Verify(enum.StrEnum):
    """Which blocks a load serves."""

    REQUIRED = "required"
    """Those whose checksum is right."""
    WHEN_PRESENT = "when_present"
    """Those whose checksum is not wrong: a file without one is served."""
    OFF = "off"
    """All of the right length."""


class StoreStatus(enum.Enum):
    """How storing one block ended."""

    WRITTEN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()
    """It was expected to be present and is not; nothing was written."""
    VICTIM_GONE = enum.auto()
    """The file whose inode was to be reused is not there any more; nothing was written."""
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One block to store.

    Attributes:
        index: Its place in the job.
        key: Its key.
        row: Its bytes.
        may_write: False if no room was set aside: then it is only looked for.
        victim: An evicted key whose file makes room for this one.
    """

    index: int
    key: OffloadKey
    row: memoryview
    may_write: bool = True
    victim: OffloadKey | None = None


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """How storing one block ended, and what it did to the disk.

    Attributes:
        item: What was to be stored.
        status: See `StoreStatus`.
        error: Why it failed.
        folder_bytes: Disk bytes of the folders that it made, less those that it removed.
        victim_taken: Whether the victim's file is gone.
    """

    item: StoreItem
    status: StoreStatus
    error: TierError | None = None
    folder_bytes: int = 0
    victim_taken: bool = False


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How loading one block ended; `removed` if its file was deleted as bad."""

    index: int
    error: TierError | None = None
    removed: bool = False


class BlockFiles:
    """The block files of one namespace."""

    def __init__(
        self,
        ops: FileOps,
        namespace: Namespace,
        writer_id: str,
        *,
        block_bytes: int,
        verify: Verify = Verify.WHEN_PRESENT,
        direct_io: bool = False,
        fsync: bool = False,
        reuses_inodes: bool = False,
    ) -> None:
        """Describe how files are written and read.

        Args:
            ops: The system calls.
            namespace: Where the files are.
            writer_id: Part of every temporary file's name; see `writers`.
            block_bytes: Length of every file.
            verify: See `Verify`.
            direct_io: Bypass the page cache where that works.
            fsync: Wait for the device before a file is published.
            reuses_inodes: Whether a victim's inode may be overwritten, as long as nobody reads
                this namespace without verifying: such a reader could get the new bytes under the
                old name.
        """
        self._ops = ops
        self._namespace = namespace
        self._writer_id = writer_id
        self._block_bytes = block_bytes
        self._verify = verify
        self._direct_flag = os.O_DIRECT if direct_io else 0
        self._fsync = fsync
        self._reuses_inodes = reuses_inodes
        self._unverified_marker = f"{namespace.folder}/{UNVERIFIED_MARKER}"
        self._sealer = Sealer(f"{namespace.digest}:{block_bytes}")
        self._serial = itertools.count()
        self._folders: set[str] = set()
        self._warned: set[str] = set()

    # -- storing --------------------------------------------------------------------------------

    def store(self, items: Sequence[StoreItem]) -> list[StoreOutcome]:
        """Store blocks one after the other; each is judged on its own."""
        return [self._store_one(item) for item in items]

    def _store_one(self, item: StoreItem) -> StoreOutcome:
        folder_bytes = 0
        taken = False
        try:
            path = self._namespace.get_file_name(item.key)
            if self._ops.exists(path):
                return StoreOutcome(item, StoreStatus.PRESENT)
            if not item.may_write:
                return StoreOutcome(item, StoreStatus.ABSENT)
            folder_bytes = self._ensure_folder(self._namespace.leaf_of(item.key))
            temp = f"{path}.{self._writer_id}.{next(self._serial)}{TEMP_SUFFIX}"
            recycled = False
            if item.victim is not None:
                if not self._take_victim(item.victim, temp):
                    return StoreOutcome(item, StoreStatus.VICTIM_GONE, None, folder_bytes)
                taken = True
                folder_bytes -= self.remove_empty_folder(self._namespace.leaf_of(item.victim))
                recycled = self._may_overwrite(temp)
            status = self._write(item, path, temp, recycled=recycled)
        except OSError as error:
            failed = StoreStatus.FAILED
            return StoreOutcome(item, failed, _mapped(error), folder_bytes, victim_taken=taken)
        return StoreOutcome(item, status, None, folder_bytes, victim_taken=taken)

    def _write(self, item: StoreItem, path: str, temp: str, *, recycled: bool) -> StoreStatus:
        try:
            self._fill(temp, item, recycled=recycled)
            self._ops.publish(temp, path)
        except FileExistsError:  # somebody else was faster: the same bytes, by definition
            self._discard(temp)
            return StoreStatus.PRESENT
        except OSError:
            self._discard(temp)
            raise
        return StoreStatus.WRITTEN

    def _take_victim(self, victim: OffloadKey, temp: str) -> bool:
        """Rename an evicted block's file away, so that nobody can open it under its old name."""
        try:
            self._ops.rename(self._namespace.get_file_name(victim), temp)
        except FileNotFoundError:
            return False
        return True

    def _may_overwrite(self, temp: str) -> bool:
        """Tell whether a renamed victim's inode may be overwritten; else it is removed.

        Asked after the rename: a reader that does not verify has made the marker before it opens
        anything, so one that opened the victim under its old name is seen here.
        """
        if self._reuses_inodes and not self._ops.exists(self._unverified_marker):
            return True
        self._ops.unlink(temp)
        return False

    def _fill(self, temp: str, item: StoreItem, *, recycled: bool) -> None:
        flags = os.O_WRONLY if recycled else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = self._open_temp(temp, flags | self._direct_flag)
        try:
            self._write_row(fd, item.row)
            if recycled:
                self._ops.truncate(fd, self._block_bytes)
            if self._verify is not Verify.OFF or recycled:
                self._set_seal(fd, item)
            if self._fsync:
                self._ops.fdatasync(fd)
        finally:
            self._ops.close(fd)

    def _open_temp(self, temp: str, flags: int) -> int:
        try:
            return self._ops.open(temp, flags)
        except FileNotFoundError:
            self._retry_in_new_folder(temp)
            return self._ops.open(temp, flags)
        except OSError as error:
            if not (flags & os.O_DIRECT and error.errno in _NOT_DIRECT):
                raise
            self._give_up_direct_io(error)
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(temp)  # a refused O_DIRECT may have made the file
            return self._ops.open(temp, (flags | os.O_CREAT) & ~os.O_DIRECT)

    def _write_row(self, fd: int, row: memoryview) -> None:
        done = 0
        while done < len(row):
            written = self._ops.pwrite(fd, row[done:], done)
            if written <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            done += written

    def _set_seal(self, fd: int, item: StoreItem) -> None:
        try:
            self._ops.set_xattr(fd, ATTRIBUTE, self._sealer.seal(item.key, item.row))
        except OSError as error:
            if error.errno not in _NO_XATTR or self._verify is Verify.REQUIRED:
                raise
            self._warn_once("no extended attributes: blocks are stored without a checksum")

    def _ensure_folder(self, leaf: str) -> int:
        """Make a leaf folder and its parent unless remembered; return the disk bytes made."""
        if leaf in self._folders:
            return 0
        made = 0
        for folder in (leaf.rpartition("/")[0], leaf):
            if folder in self._folders:
                continue
            with contextlib.suppress(FileExistsError):
                self._ops.mkdir(folder)
                made += disk_bytes(self._ops.stat(folder))
            self._folders.add(folder)
        return made

    def _retry_in_new_folder(self, temp: str) -> None:
        """Make a folder again that somebody removed because it was empty."""
        leaf = temp.rpartition("/")[0]
        self._folders.discard(leaf)
        self._folders.discard(leaf.rpartition("/")[0])
        self._ensure_folder(leaf)

    def _discard(self, temp: str) -> None:
        """Remove a temporary file; failing that, the next start's sweep will."""
        try:
            self._ops.unlink(temp)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("a temporary file stays behind: %s", error)

    # -- loading --------------------------------------------------------------------------------

    def load(self, items: Sequence[tuple[int, OffloadKey, memoryview]]) -> list[LoadOutcome]:
        """Load blocks one after the other; each is judged on its own."""
        return [self._load_one(index, key, row) for index, key, row in items]

    def _load_one(self, index: int, key: OffloadKey, row: memoryview) -> LoadOutcome:
        path = self._namespace.get_file_name(key)
        try:
            fd = self._open_block(path)
        except (FileNotFoundError, NotADirectoryError):
            return LoadOutcome(index, BlockMissingError(f"block {key.hex()} is not stored"))
        except OSError as error:
            return LoadOutcome(index, _mapped(error))
        try:
            bad = self._read(fd, key, row)
            if bad is None:
                return LoadOutcome(index)
            removed = not isinstance(bad, BlockMissingError) and self._remove_bad(fd, path)
            return LoadOutcome(index, bad, removed)
        except OSError as error:
            return LoadOutcome(index, _mapped(error))
        finally:
            self._ops.close(fd)

    def _open_block(self, path: str) -> int:
        try:
            return self._ops.open(path, os.O_RDONLY | self._direct_flag)
        except OSError as error:
            if not self._direct_flag or error.errno not in _NOT_DIRECT:
                raise
            self._give_up_direct_io(error)
            return self._ops.open(path, os.O_RDONLY)

    def _read(self, fd: int, key: OffloadKey, row: memoryview) -> TierError | None:
        """Read a block into the row; return why it must not be served, or None."""
        seal = None if self._verify is Verify.OFF else self._ops.get_xattr(fd, ATTRIBUTE)
        if seal is None and self._verify is Verify.REQUIRED:
            return BlockMissingError(f"block {key.hex()} has no checksum, and one is required")
        done = 0
        while done < len(row):
            count = self._ops.pread_into(fd, row[done:], done)
            if count == 0:
                return CorruptBlockError(f"block {key.hex()} ends after {done} bytes")
            done += count
        if self._ops.fstat(fd).st_size != self._block_bytes:
            return CorruptBlockError(f"block {key.hex()} is longer than {self._block_bytes} bytes")
        if seal is not None and seal != self._sealer.seal(key, row):
            return CorruptBlockError(f"block {key.hex()} has a wrong checksum")
        return None

    def _remove_bad(self, fd: int, path: str) -> bool:
        """Delete a bad file, unless its path names another file by now."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._ops.fstat(fd), self._ops.stat(path)):
                self._ops.unlink(path)
                return True
        return False

    # -- the rest -------------------------------------------------------------------------------

    def present(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a file; one that cannot be asked for counts as absent."""
        found = set()
        for key in keys:
            with contextlib.suppress(OSError):
                if self._ops.exists(self._namespace.get_file_name(key)):
                    found.add(key)
        return frozenset(found)

    def remove(self, key: OffloadKey) -> int | None:
        """Delete a block's file, and its folder if that is empty now.

        Returns:
            Disk bytes that became free, or None if the file was not there.
        """
        path = self._namespace.get_file_name(key)
        try:
            freed = disk_bytes(self._ops.stat(path))
            self._ops.unlink(path)
        except FileNotFoundError:
            return None
        return freed + self.remove_empty_folder(self._namespace.leaf_of(key))

    def remove_empty_folder(self, leaf: str) -> int:
        """Delete a leaf folder if it is empty; return the disk bytes that became free."""
        try:
            freed = disk_bytes(self._ops.stat(leaf))
            self._ops.rmdir(leaf)
        except OSError:
            return 0  # not empty, or gone already
        self._folders.discard(leaf)
        return freed

    def _give_up_direct_io(self, error: OSError) -> None:
        self._direct_flag = 0
        self._warn_once(f"direct I/O does not work here ({error}); using the page cache")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s: %s", self._namespace.folder, message)


def _mapped(error: OSError) -> TierError:
    """Return a system call's error in the vocabulary of tiers."""
    kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
    mapped = kind(str(error))
    mapped.__cause__ = error
    return mapped
