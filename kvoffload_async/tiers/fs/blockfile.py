"""The block files of one namespace: verified reading, existence checks, removal.

Blocks on filesystem calls; run on I/O threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat as stat_module
from collections.abc import Iterable, Sequence

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierError
from kvoffload_async.tiers.files.ops import NotRegularFileError, disk_bytes, mapped
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, Origin
from kvoffload_async.tiers.fs.layout import bucket_of
from kvoffload_async.tiers.fs.operations import DiskChange, LoadFailure, Verify
from kvoffload_async.tiers.fs.writing import BlockWriter
from kvoffload_async.types import OffloadKey, block_text

logger = logging.getLogger(__name__)

_SPARE = memoryview(bytearray(1))
"""Buffer for a byte beyond the end of a block; its content is not used."""

_INCOMPARABLE = {
    Origin.NEWER: "of a newer release",
    Origin.OTHER_KEY: "that is not made with this tier's key, or lack of one",
}
"""Origins whose checksums cannot be compared here, with the reason."""


class BlockFiles(BlockWriter):
    """Reads, writes and removes the block files of one namespace."""

    # -- loading --------------------------------------------------------------------------------

    def load(
        self, items: Iterable[tuple[int, OffloadKey, memoryview]], failures: list[LoadFailure]
    ) -> None:
        """Load blocks one by one; append failures to `failures`, and load the other blocks."""
        path_of, recall = self.namespace.get_file_name, self.digest_cache.recall
        # Everything that needs no file comes first: the less work between two system calls,
        # the less the threads wait for the GIL.
        for index, key, row, path, digest in [
            (index, key, row, path_of(key), recall(key)) for index, key, row in items
        ]:
            direct = self._direct.flag
            try:
                try:
                    bad = self._load_one(key, row, path, digest, direct)
                except OSError as error:
                    if not self._direct.refused(direct, error):
                        raise
                    bad = self._load_one(key, row, path, digest, 0)
            except OSError as error:
                bad = mapped(error), None
            if bad is not None:
                failures.append(LoadFailure(index, *bad))

    def _load_one(
        self, key: OffloadKey, row: memoryview, path: str, remembered: bytes | None, direct: int
    ) -> tuple[TierError, int | None] | None:
        """Load a block; return None, or the error and the bytes freed by deleting the file."""
        try:
            fd = self.ops.open(path, os.O_RDONLY | direct)
        except (FileNotFoundError, NotADirectoryError, NotRegularFileError):
            return BlockMissingError(f"{block_text(key)} is not stored"), 0
        except PermissionError:  # owned by another user
            return BlockMissingError(f"{block_text(key)} may not be read"), None
        try:
            if remembered is not None:
                count = self.ops.preadv(fd, (row,) if direct else (row, _SPARE), 0)
                # Matching bytes are valid, whatever the file's attribute says. Others may be, too:
                # another process may have stored different bytes for the same key.
                if count == len(row) and self.digester.matches(key, remembered, row):
                    return None
            bad = self._read(fd, key, row, direct)
            if isinstance(bad, CorruptBlockError):
                return bad, self._remove_bad(fd, path)
            return None if bad is None else (bad, None)
        finally:
            self.ops.close(fd)

    def _read(self, fd: int, key: OffloadKey, row: memoryview, direct: int) -> TierError | None:
        """Read a block into the row; return the error if it must not be served, else None."""
        # Read before the bytes, so that a file overwritten meanwhile does not match.
        digest = self.ops.get_xattr(fd, ATTRIBUTE)
        if digest is not None and (why := _INCOMPARABLE.get(self.digester.origin_of(digest))):
            return BlockMissingError(f"{block_text(key)} has a checksum {why}")  # the file stays
        if self.settings.verify is Verify.OFF:
            digest = None
        lacks_digest = digest is None and self.settings.verify is Verify.REQUIRED
        # An incomplete file is corrupt, and a direct read past its end would be misaligned.
        if direct or lacks_digest:
            size_bytes = self.ops.fstat(fd).st_size
            if size_bytes != len(row):
                return CorruptBlockError(
                    f"{block_text(key)} has {size_bytes} bytes instead of {len(row)}"
                )
        if lacks_digest:
            return BlockMissingError(f"{block_text(key)} has no checksum, and one is required")
        done = self._read_row(fd, row, beyond=not direct)
        if done != len(row):
            how = "ends" if done < len(row) else "goes on"
            return CorruptBlockError(f"{block_text(key)} {how} after {min(done, len(row))} bytes")
        if digest is not None:
            if not self.digester.matches(key, digest, row):
                return CorruptBlockError(f"{block_text(key)} has a wrong checksum")
            self.digest_cache.remember(key, digest)
        return None

    def _read_row(self, fd: int, row: memoryview, *, beyond: bool) -> int:
        """Read a file into the row, with `beyond` one more byte; return the number of bytes read.

        With `beyond`, one more byte is requested to detect a file that is too long. That is free,
        while a stat is a system call.
        """
        spare = (_SPARE,) if beyond else ()
        done = self.ops.preadv(fd, (row, *spare), 0)
        while 0 < done < len(row):
            count = self.ops.preadv(fd, (row[done:], *spare), done)
            if not count:
                break
            done += count
        return done

    def _remove_bad(self, fd: int, path: str) -> int | None:
        """Delete a corrupt file if its path still names it; return the bytes freed, or None."""
        try:
            status = self.ops.fstat(fd)
            if os.path.samestat(status, self.ops.stat(path)):
                self.ops.unlink(path)
                return disk_bytes(status)
        except FileNotFoundError:
            return 0
        except OSError as error:
            # As text: a log record with the error would keep its frames, and the primary's memory.
            logger.warning("a corrupt block was not removed: %s", str(error))
        return None

    # -- the rest -------------------------------------------------------------------------------

    def present(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a file; a key whose check fails counts as absent."""
        found = set()
        for key in keys:
            with contextlib.suppress(OSError):
                if self.ops.has_file(self.namespace.get_file_name(key)):
                    found.add(key)
        return frozenset(found)

    def left(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, OSError | None]:
        """Return the keys that have a file, or whose check fails, with the error of the check."""
        left: dict[OffloadKey, OSError | None] = {}
        for key in keys:
            try:
                if self.ops.has_file(self.namespace.get_file_name(key)):
                    left[key] = None
            except OSError as error:
                left[key] = error
        return left

    def remove(self, keys: Iterable[OffloadKey]) -> list[DiskChange]:
        """Delete the files of blocks; return the changes of disk usage, and log errors."""
        changes: list[DiskChange] = []
        for key in keys:
            path = self.namespace.get_file_name(key)
            try:
                status = self.ops.stat(path)
                if not stat_module.S_ISREG(status.st_mode):
                    continue  # not a block
                self.ops.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                logger.warning("an evicted block was not removed: %s", str(error))
                continue
            changes.append((bucket_of(key), -disk_bytes(status)))
        return changes
