"""The preallocated segment files, and the offsets of slots in them.

Thread: an I/O thread unless stated otherwise; calls block as long as the filesystem does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvoffload_async.block_io.contract import Run as Extent
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.ops import DirectIo, FileOps, write_all
from kvoffload_async.tiers.slab.addresses import Run, segment_of, slot_of
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.manifest import Manifest, SegmentHeader


class Segment(NamedTuple):
    """One open segment file.

    Attributes:
        fd: Descriptor for buffered I/O.
        direct_fd: Descriptor with O_DIRECT; -1 if not configured or not supported.
    """

    fd: int
    direct_fd: int


class Segments:
    """The open segment files of one store."""

    def __init__(
        self,
        ops: FileOps,
        folder: str,
        directory_identity: DirectoryIdentity,
        direct: DirectIo,
        *,
        manifest: Manifest,
    ) -> None:
        self._ops = ops
        self._manifest = manifest
        self._folder = folder
        self._directory_identity = directory_identity
        self._direct = direct
        self._open: dict[int, Segment] = {}
        self._next = 0
        self._syncing = threading.Condition()
        self._waits: set[object] = set()
        """Syncs in progress."""
        self.sync_failures = 0
        """Number of failed syncs."""

    # -- files ----------------------------------------------------------------------------------

    def attach(self, number: int) -> int:
        """Open an existing segment; return its number of slots. A file without slots is removed."""
        path = self._path(number)
        self.skip_to(number)
        fd = self._ops.open(path, os.O_RDWR)
        try:
            slots = self._manifest.slots_in(self._ops.fstat(fd).st_size)
            if slots:
                self._adopt(number, fd)
            else:
                self._ops.unlink(path)
        except OSError:
            self._ops.close(fd)
            raise
        if not slots:
            self._ops.close(fd)
        return slots

    def skip_to(self, number: int) -> None:
        """Do not use this number or lower ones for new segments: the journal refers to them."""
        self._next = max(self._next, number + 1)

    def create(self, slots: int) -> int:
        """Create and fully allocate a segment; return its number, which is never reused.

        Raises:
            OSError: It could not be created (e.g. ENOSPC); nothing of it is left.
        """
        self._directory_identity.check()
        path, fd = self._path(self._next), None
        while fd is None:
            number, path = self._next, self._path(self._next)
            self._next += 1
            with contextlib.suppress(FileExistsError):  # an unrelated file with this name
                fd = self._ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            header = SegmentHeader(self._manifest.store_uuid, number, self._manifest.slot_bytes)
            write_all(self._ops, fd, header.encode(), 0)
            self._ops.fallocate(fd, self._manifest.offset_of(slots))
            self._adopt(number, fd)
        except OSError:
            self._ops.close(fd)
            with contextlib.suppress(OSError):
                self._ops.unlink(path)
            raise
        return number

    def close(self) -> None:
        """Close all files; idempotent."""
        with contextlib.ExitStack() as closing:
            while self._open:
                closing.callback(self._close, self._open.popitem()[1])

    def check(self, numbers: set[int]) -> None:
        """Check that these segment files still exist: writes to a deleted one would succeed.

        Raises:
            OSError: One was deleted or replaced.
        """
        for number in numbers:
            self._directory_identity.check_file(self._open[number].fd, segment_name(number))

    def sync(self, numbers: Iterable[int], failures_before: int | None = None) -> None:
        """Sync these segments to the device.

        The kernel reports a lost write only once, to the first caller. Therefore any failed sync
        invalidates all writes before it, even if a later sync succeeds.

        Args:
            numbers: The segments.
            failures_before: Value of `sync_failures` before the bytes in question were written.

        Raises:
            OSError: Syncing failed, or an overlapping sync did.
        """
        mine = object()
        try:
            with self._syncing:
                self._waits.add(mine)
            for number in sorted(numbers):
                self._ops.fdatasync(self._open[number].fd)
        except OSError:
            self.sync_failures += 1
            raise
        finally:
            with self._syncing:
                self._waits.remove(mine)
                self._syncing.notify_all()
        with self._syncing:
            others = self._waits.copy()  # one of these syncs may have got the error of our writes
            self._syncing.wait_for(lambda: not self._waits & others)
        if failures_before is not None and failures_before != self.sync_failures:
            raise OSError(errno.EIO, "a concurrent sync failed")

    # -- payload --------------------------------------------------------------------------------

    @property
    def direct_flag(self) -> int:
        """The open flag O_DIRECT, or 0 if it is not used. Thread: any."""
        return self._direct.flag

    def refuse(self, flag: int, codes: Collection[int]) -> bool:
        """Return whether errors mean that O_DIRECT is unsupported; then it is no longer used.

        Thread: any.
        """
        error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return errno.EINVAL in codes and self._direct.refused(flag, error)

    def extents(self, runs: Iterable[Run], *, is_direct: bool) -> list[Extent]:
        """Return the file extents of runs. Thread: any."""
        manifest, found = self._manifest, []
        for address, _, length in runs:
            segment = self._open[segment_of(address)]
            fd = segment.direct_fd if is_direct and segment.direct_fd >= 0 else segment.fd
            found.append(Extent(fd, manifest.offset_of(slot_of(address)), length))
        return found

    # -- internal -------------------------------------------------------------------------------

    def _adopt(self, number: int, fd: int) -> None:
        direct_fd = -1
        flag = self._direct.flag
        if flag:
            try:
                direct_fd = self._ops.open(self._path(number), os.O_RDWR | flag)
            except OSError as error:
                if not self._direct.refused(flag, error):
                    raise
        self._open[number] = Segment(fd, direct_fd)

    def _close(self, segment: Segment) -> None:
        try:
            self._ops.close(segment.fd)
        finally:
            if segment.direct_fd >= 0:
                self._ops.close(segment.direct_fd)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{segment_name(number)}"
