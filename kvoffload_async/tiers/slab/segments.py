"""The segment files: preallocated, and where in them the slots are.

Thread: an I/O thread, but for what says otherwise; calls block for as long as the filesystem does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvoffload_async.block_io.contract import Run as Extent
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.ops import DirectIo, FileOps, write_all
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.manifest import Manifest, SegmentHeader
from kvoffload_async.tiers.slab.places import Run, segment_of, slot_of


@dataclass(frozen=True, slots=True)
class Segment:
    """One open segment file.

    Attributes:
        number: Never used again in the life of a store's process.
        slots: How many slots it has.
        fd: Goes through the page cache.
        direct_fd: Bypasses it; -1 where that is not wanted, or does not work.
    """

    number: int
    slots: int
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
        """Those who wait for the device now."""
        self.sync_failures = 0
        """How often waiting for the device has failed."""

    @property
    def numbers(self) -> list[int]:
        """The open segments."""
        return list(self._open)

    # -- files ----------------------------------------------------------------------------------

    def attach(self, number: int) -> Segment | None:
        """Open a segment that is there; one that was not even begun is removed, and None."""
        path = self._path(number)
        self._next = max(self._next, number + 1)
        fd = self._ops.open(path, os.O_RDWR)
        try:
            slots = self._manifest.slots_in(self._ops.fstat(fd).st_size)
            if not slots:
                self._ops.unlink(path)
                self._ops.close(fd)
                return None
            return self._adopt(number, slots, fd)
        except OSError:
            self._ops.close(fd)
            raise

    def skip_to(self, number: int) -> None:
        """Never give this number, or one below, to a new segment: the journal speaks of them."""
        self._next = max(self._next, number + 1)

    def create(self, slots: int) -> Segment:
        """Make one more segment, every byte of it allocated.

        Raises:
            OSError: It could not be made, ENOSPC included; nothing of it is left.
        """
        self._directory_identity.check()
        path, fd = self._path(self._next), None
        while fd is None:
            number, path = self._next, self._path(self._next)
            self._next += 1
            with contextlib.suppress(FileExistsError):  # somebody else's, and no segment
                fd = self._ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            header = SegmentHeader(self._manifest.store_uuid, number, self._manifest.slot_bytes)
            write_all(self._ops, fd, header.encode(), 0)
            self._ops.fallocate(fd, self._manifest.offset_of(slots))
            return self._adopt(number, slots, fd)
        except OSError:
            self._ops.close(fd)
            with contextlib.suppress(OSError):
                self._ops.unlink(path)
            raise

    def remove(self, number: int) -> None:
        """Delete a segment that nobody reads or writes; raises OSError, and then it stays."""
        self._directory_identity.check()  # else it would be another store's
        segment = self._open.pop(number)  # first: `check` must not take it for lost
        try:
            self._ops.unlink(self._path(number))
        except OSError:
            self._open[number] = segment
            raise
        self._close(segment)

    def close(self) -> None:
        """Close every file; idempotent."""
        while self._open:
            self._close(self._open.popitem()[1])

    def check(self, numbers: set[int]) -> None:
        """Raise an OSError if one of these was deleted: its open file goes on as if nothing had.

        One that was removed here is nobody's any more: whoever asks for it was cancelled meanwhile.
        """
        for number in numbers:
            segment = self._open.get(number)
            if segment is not None:
                self._directory_identity.check_file(segment.fd, segment_name(number))

    def sync(self, numbers: Iterable[int], failures_before: int | None = None) -> None:
        """Wait until what was written to these segments is on the device.

        The kernel reports that bytes could not be written only once, to whoever asks first, and
        has forgotten them then. So what was written before somebody's wait has failed is lost,
        whatever a later one says.

        Args:
            numbers: The segments.
            failures_before: What `sync_failures` was before the bytes in question were written.

        Raises:
            OSError: It is not, or may not be.
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
            others = self._waits.copy()  # one of these may have been told of what is ours
            self._syncing.wait_for(lambda: not self._waits & others)
        if failures_before is not None and failures_before != self.sync_failures:
            raise OSError(errno.EIO, "what was written beside it could not be synced")

    # -- payload --------------------------------------------------------------------------------

    @property
    def direct_flag(self) -> int:
        """The flag by which the page cache is bypassed; 0 where it is not. Thread: any."""
        return self._direct.flag

    def refuse(self, flag: int, codes: Collection[int]) -> bool:
        """Tell whether errors mean that the flag does not work here; then it is given up.

        Thread: any.
        """
        error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return errno.EINVAL in codes and self._direct.refused(flag, error)

    def extents(self, runs: Iterable[Run], *, is_direct: bool) -> list[Extent]:
        """Return where runs are, in open files. Thread: any."""
        manifest, found = self._manifest, []
        for place, _, length in runs:
            segment = self._open[segment_of(place)]
            fd = segment.direct_fd if is_direct and segment.direct_fd >= 0 else segment.fd
            found.append(Extent(fd, manifest.offset_of(slot_of(place)), length))
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _adopt(self, number: int, slots: int, fd: int) -> Segment:
        direct_fd = -1
        flag = self._direct.flag
        if flag:
            try:
                direct_fd = self._ops.open(self._path(number), os.O_RDWR | flag)
            except OSError as error:
                if not self._direct.refused(flag, error):
                    raise
        segment = self._open[number] = Segment(number, slots, fd, direct_fd)
        return segment

    def _close(self, segment: Segment) -> None:
        self._ops.close(segment.fd)
        if segment.direct_fd >= 0:
            self._ops.close(segment.direct_fd)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{segment_name(number)}"
