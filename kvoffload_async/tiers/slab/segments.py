"""The segment files: preallocated, and moved to and from in few, large, vectored calls.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.anchor import Anchor
from kvoffload_async.tiers.files.direct import DirectIo
from kvoffload_async.tiers.files.ops import FileOps, write_all
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.places import Place, segment_of, slot_of
from kvoffload_async.tiers.slab.rows import Rows
from kvoffload_async.tiers.slab.segment_header import SegmentHeader

_IOV_MAX = 1024


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
        anchor: Anchor,
        rows: Rows,
        direct: DirectIo,
        *,
        manifest: Manifest,
    ) -> None:
        self._ops = ops
        self._manifest = manifest
        self._folder = folder
        self._anchor = anchor
        self._rows = rows
        self._direct = direct
        self._open: dict[int, Segment] = {}
        self._bounce: deque[mmap.mmap] = deque()
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
        self._anchor.check()
        path, fd = self._path(self._next), None
        while fd is None:
            number, path = self._next, self._path(self._next)
            self._next += 1
            with contextlib.suppress(FileExistsError):  # somebody else's, and no segment
                fd = self._ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if self._manifest.header_bytes:
                header = SegmentHeader(
                    self._manifest.store_uuid or "", number, self._manifest.slot_bytes
                )
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
        self._anchor.check()  # else it would be another store's
        self._ops.unlink(self._path(number))
        self._close(self._open.pop(number))

    def close(self) -> None:
        """Close every file; idempotent."""
        while self._open:
            self._close(self._open.popitem()[1])
        while self._bounce:
            self._bounce.pop().close()

    def check(self, numbers: set[int]) -> None:
        """Raise an OSError if one of these was deleted: its open file goes on as if nothing had."""
        for number in numbers:
            self._anchor.check_file(self._open[number].fd, segment_name(number))

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

    # -- bytes ----------------------------------------------------------------------------------

    def write(self, place: Place, rows: Sequence[memoryview]) -> None:
        """Write rows into neighbouring slots, from a place on; raises OSError."""
        segment = self._open[segment_of(place)]
        offset = self._manifest.offset_of(slot_of(place))
        if segment.direct_fd >= 0 and (direct := self._direct.flag):
            try:
                self._move_direct(segment.direct_fd, rows, offset, is_write=True)
            except OSError as error:
                if not self._direct.refused(direct, error):
                    raise
            else:
                return
        self._transfer(segment.fd, self._rows.padded(rows), offset, is_write=True)

    def read(self, place: Place, rows: Sequence[memoryview]) -> int:
        """Read neighbouring slots, from a place on, into rows; return how many blocks are whole.

        Raises:
            OSError: Some could not be read; no row may be believed.
        """
        segment = self._open[segment_of(place)]
        offset = self._manifest.offset_of(slot_of(place))
        if segment.direct_fd >= 0 and (direct := self._direct.flag):
            try:
                return self._move_direct(segment.direct_fd, rows, offset, is_write=False)
            except OSError as error:
                if not self._direct.refused(direct, error):
                    raise
        done = self._transfer(segment.fd, self._rows.padded(rows), offset, is_write=False)
        return self._whole(rows, done)

    def _whole(self, rows: Sequence[memoryview], done_bytes: int) -> int:
        """Return how many slots lie within the first bytes of a transfer; the last needs no pad."""
        slot_bytes, row_bytes = self._rows.slot_bytes, self._rows.row_bytes
        return min(len(rows), (done_bytes + slot_bytes - row_bytes) // slot_bytes)

    def _move_direct(
        self, fd: int, rows: Sequence[memoryview], offset: int, *, is_write: bool
    ) -> int:
        """Move past the page cache, by way of aligned memory where the rows are not."""
        if self._rows.is_aligned:
            return self._whole(rows, self._transfer(fd, rows, offset, is_write=is_write))
        size_bytes = len(rows) * self._rows.slot_bytes
        with self._borrowed(size_bytes) as memory:
            if is_write:
                self._stage(memory, rows)
            staged = memoryview(memory)[:size_bytes]
            try:
                count = self._whole(rows, self._transfer(fd, [staged], offset, is_write=is_write))
            finally:
                staged.release()
            if not is_write:
                self._unstage(memory, rows[:count])
            return count

    def _stage(self, memory: mmap.mmap, rows: Sequence[memoryview]) -> None:
        for index, row in enumerate(rows):
            slot = _array(memory, index * self._rows.slot_bytes, len(row))
            np.copyto(slot, np.frombuffer(row, dtype=np.uint8))

    def _unstage(self, memory: mmap.mmap, rows: Sequence[memoryview]) -> None:
        for index, row in enumerate(rows):
            slot = _array(memory, index * self._rows.slot_bytes, len(row))
            np.copyto(np.frombuffer(row, dtype=np.uint8), slot)

    @contextlib.contextmanager
    def _borrowed(self, size_bytes: int) -> Iterator[mmap.mmap]:
        """Lend page-aligned memory; extents are of about one size, so it is used again."""
        try:
            memory = self._bounce.pop()
        except IndexError:
            memory = mmap.mmap(-1, size_bytes)
        if len(memory) < size_bytes:
            memory.close()
            memory = mmap.mmap(-1, size_bytes)
        try:
            yield memory
        finally:
            self._bounce.append(memory)

    def _transfer(
        self, fd: int, buffers: Sequence[memoryview], offset: int, *, is_write: bool
    ) -> int:
        """Move all bytes; return how many, which are fewer only at the end of a file read."""
        move = self._ops.pwritev if is_write else self._ops.preadv
        done = 0
        for start in range(0, len(buffers), _IOV_MAX):
            part = buffers[start : start + _IOV_MAX]
            left = sum(map(len, part))
            while left:
                moved = move(fd, part, offset + done)
                done += moved
                left -= moved
                if not left:
                    break
                if moved <= 0:
                    if is_write:
                        raise OSError(errno.EIO, "a write made no progress")
                    return done
                part = _behind(part, moved)
        return done

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


def _array(memory: mmap.mmap, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory, dtype=np.uint8, count=size_bytes, offset=offset)


def _behind(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """Return what is left of buffers behind their first bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            rest.append(buffer[done_bytes:])
        done_bytes = max(0, done_bytes - len(buffer))
    return rest
