"""The block files of one namespace: reading them so that they are right, finding, removing them.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierError
from kvoffload_async.tiers.fs.direct import DirectIo
from kvoffload_async.tiers.fs.folders import LeafFolders
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.outcome import DiskChange, LoadFailure, Verify, mapped
from kvoffload_async.tiers.fs.seal import ATTRIBUTE, Sealer, sealed
from kvoffload_async.tiers.fs.writing import BlockWriter
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 10
"""What is read and hashed at a time: little enough to be in the processor's cache for the hash."""


class BlockFiles:
    """The block files of one namespace.

    Attributes:
        writer: Writes them.
    """

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
        counts_bytes: bool = True,
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
            counts_bytes: Whether a store says what it did to the disk; asking takes system calls.
        """
        self._ops = ops
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._verify = verify
        self._folders = LeafFolders(ops, counts_bytes=counts_bytes)
        self._direct = DirectIo(wanted=direct_io, where=namespace.folder)
        self._sealer = Sealer(namespace.layout_of(block_bytes))
        self.writer = BlockWriter(
            ops,
            namespace,
            self._folders,
            self._direct,
            writer_id,
            block_bytes=block_bytes,
            verify=verify,
            fsync=fsync,
            reuses_inodes=reuses_inodes,
            counts_bytes=counts_bytes,
        )

    # -- loading --------------------------------------------------------------------------------

    def load(
        self, items: Iterable[tuple[int, OffloadKey, memoryview]], failures: list[LoadFailure]
    ) -> None:
        """Load blocks one after the other; each is judged on its own, its failure appended."""
        for index, key, row in items:
            direct = self._direct.flag
            try:
                try:
                    failure = self._load_one(index, key, row, direct)
                except OSError as error:
                    if not self._direct.refused(direct, error):
                        raise
                    failure = self._load_one(index, key, row, 0)
            except OSError as error:
                failure = LoadFailure(index, mapped(error))
            if failure is not None:
                failures.append(failure)

    def _load_one(
        self, index: int, key: OffloadKey, row: memoryview, direct: int
    ) -> LoadFailure | None:
        path = self._namespace.get_file_name(key)
        try:
            fd = self._ops.open(path, os.O_RDONLY | direct)
        except (FileNotFoundError, NotADirectoryError):
            return LoadFailure(index, BlockMissingError(f"block {key.hex()} is not stored"), 0)
        try:
            bad = self._read(fd, key, row, direct)
            if bad is None:
                return None
            is_corrupt = isinstance(bad, CorruptBlockError)
            return LoadFailure(index, bad, self._remove_bad(fd, path) if is_corrupt else None)
        finally:
            self._ops.close(fd)

    def _read(self, fd: int, key: OffloadKey, row: memoryview, direct: int) -> TierError | None:
        """Read a block into the row; return why it must not be served, or None."""
        # Before the bytes: of a file that is overwritten meanwhile, they must not match.
        seal = None if self._verify is Verify.OFF else self._ops.get_xattr(fd, ATTRIBUTE)
        if seal is None and self._verify is Verify.REQUIRED:
            return BlockMissingError(f"block {key.hex()} has no checksum, and one is required")
        if direct:  # behind the end of a short file such a read is misaligned
            size_bytes = self._ops.fstat(fd).st_size
            if size_bytes != self._block_bytes:
                return CorruptBlockError(
                    f"block {key.hex()} has {size_bytes} bytes instead of {self._block_bytes}"
                )
        if seal is None or direct or self._block_bytes <= _PIECE_BYTES:
            bad = self._fill(fd, key, row, beyond=not direct)
            found = seal if bad or seal is None else self._sealer.seal(key, row)
        else:
            running = self._sealer.begin(key)
            bad = self._fill(fd, key, row, piece_bytes=_PIECE_BYTES, take_in=running.update)
            found = sealed(running)
        if bad is None and found != seal:
            return CorruptBlockError(f"block {key.hex()} has a wrong checksum")
        return bad

    def _fill(
        self,
        fd: int,
        key: OffloadKey,
        row: memoryview,
        *,
        beyond: bool = True,
        piece_bytes: int = sys.maxsize,
        take_in: Callable[[memoryview], object] | None = None,
    ) -> TierError | None:
        """Read a file into the row, and hand on each piece while it is in the processor's cache.

        With `beyond`, one byte more is asked for at the end, so that a file that is too long is
        found out: that costs nothing, where a stat is a system call.
        """
        done = more = 0
        while done < self._block_bytes:
            piece = row[done : done + piece_bytes]
            buffers = [piece]
            if beyond and done + len(piece) == self._block_bytes:
                buffers.append(memoryview(bytearray(1)))
            count = self._ops.preadv(fd, buffers, done)
            if not count:
                return CorruptBlockError(f"block {key.hex()} ends after {done} bytes")
            more = count - len(piece)
            if more < 0:
                piece = piece[:count]
            if take_in is not None:
                take_in(piece)
            done += len(piece)
        if more > 0:
            return CorruptBlockError(f"block {key.hex()} goes on after {done} bytes")
        return None

    def _remove_bad(self, fd: int, path: str) -> int | None:
        """Delete a bad file, unless its path names another by now; see `LoadFailure`."""
        try:
            status = self._ops.fstat(fd)
            if os.path.samestat(status, self._ops.stat(path)):
                self._ops.unlink(path)
                return disk_bytes(status)
        except FileNotFoundError:
            return 0
        except OSError as error:
            # As text: who keeps the log must not keep the frames, and the primary's memory.
            logger.warning("a bad block stays behind: %s", str(error))
        return None

    # -- the rest -------------------------------------------------------------------------------

    def present(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a file; one that cannot be asked for counts as absent."""
        found = set()
        for key in keys:
            with contextlib.suppress(OSError):
                if self._ops.exists(self._namespace.get_file_name(key)):
                    found.add(key)
        return frozenset(found)

    def remove(self, keys: Sequence[OffloadKey]) -> DiskChange:
        """Delete blocks' files, and folders that are empty then; what cannot be, stays."""
        change = DiskChange()
        for key in keys:
            path = self._namespace.get_file_name(key)
            try:
                freed_bytes = disk_bytes(self._ops.stat(path))
                self._ops.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("an evicted block stays behind: %s", error)
                continue
            change.removed_bytes += freed_bytes
            self._folders.remove_empty(self._namespace.leaf_of(key), change)
        return change
