"""Python implementation of block I/O: vectored calls and hashing on an `IoRunner`'s threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.block_io.contract import (
    DIGEST_BYTES,
    ENDED_EARLY,
    SEAL_BYTES,
    TAG_AT,
    BlockDigests,
    BlockIo,
    Cipher,
    FileCalls,
    Moved,
    Run,
    not_opened,
)
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.types import OffloadKey

_ALIGNMENT_BYTES: Final = 4096
"""Maximum memory alignment that O_DIRECT requires."""

_IOV_MAX: Final = 1024

_SHARES: Final = 4
"""Approximate number of parts per idle thread when a batch is divided."""

_LEAST_SHARE: Final = 4
"""A part has at least a full part's slots divided by this."""

_CALL_BYTES: Final = 16 << 20
"""Bytes that a thread copies before it takes the next call, possibly of the other direction."""


class PythonBlockIo(BlockIo):
    """Copies blocks with a `FileOps`, on the threads of an `IoRunner`.

    Idle threads share a batch: each takes one part after the other.
    """

    name: ClassVar[str] = "python"

    def __init__(
        self,
        io: IoRunner,
        calls: FileCalls,
        kv_view: memoryview,
        digests: BlockDigests,
        slot_bytes: int,
        *,
        threads: int,
        piece_bytes: int,
    ) -> None:
        """Map the rows of `kv_view`; see `create_block_io`."""
        self._io = io
        self._digests = digests
        tail_bytes = 0 if digests.cipher is None else digests.cipher.tail_bytes
        self._mover = _Mover(calls, kv_view, slot_bytes, tail_bytes)
        self._threads = threads
        self._part_slots = max(1, piece_bytes // slot_bytes)
        self._num_under_way = 0

    async def extents(
        self,
        direction: Direction,
        rows: Sequence[int],
        runs: Sequence[Run],
        keys: Sequence[OffloadKey] | None,
        *,
        is_direct: bool = False,
    ) -> Moved:
        is_store = direction is Direction.STORE
        batch = _Batch(
            self._mover, rows, self._digests, keys, is_store=is_store, is_direct=is_direct
        )
        batch.divide(runs, self._part_slots, 0 if self._num_under_way else self._threads)
        self._num_under_way += 1
        try:
            while batch.parts:
                helpers = min(self._threads, len(batch.parts)) - 1
                await self._io.run(direction, batch.move, helpers=helpers, withdraw=batch.withdraw)
        finally:
            self._num_under_way -= 1
        return Moved(batch.errors, b"".join(batch.digests))

    @property
    def is_aligned(self) -> bool:
        """Whether rows can bypass the page cache without a bounce buffer."""
        return self._mover.is_aligned

    async def close(self) -> None:
        self.release()

    def release(self) -> None:
        """Release the buffer; no batch may be running."""
        self._mover.close()


class _Part(NamedTuple):
    """A part of a batch: index of its first block, its runs, and its bytes."""

    start: int
    runs: Sequence[Run]
    num_bytes: int


class _Batch:
    """A batch of blocks being copied.

    Attributes:
        parts: Parts that no thread has begun.
        errors: See `Moved`.
        digests: The checksums; empty if not requested.
    """

    def __init__(
        self,
        mover: _Mover,
        rows: Sequence[int],
        digester: BlockDigests,
        keys: Sequence[OffloadKey] | None,
        *,
        is_store: bool,
        is_direct: bool,
    ) -> None:
        self.parts: deque[_Part] = deque()
        self.errors: dict[int, int] = {}
        self.digests = [bytes(DIGEST_BYTES)] * len(keys or ())
        self._mover = mover
        self._numbers = rows
        self._digester = digester
        self._keys = keys
        self._is_store = is_store
        self._is_direct = is_direct
        self._num_moving = 0
        self._mutex = threading.Lock()
        """Guards the taking of parts; held only briefly."""

    def divide(self, runs: Sequence[Run], part_slots: int, idle_threads: int) -> None:
        """Divide the batch into parts; smaller ones if threads are idle."""
        size = part_slots
        if idle_threads:
            share = -(-len(self._numbers) // (_SHARES * idle_threads))
            size = max(1, part_slots // _LEAST_SHARE, min(part_slots, share))
        self.parts.extend(_parts(runs, size, self._mover.slot_bytes))

    def move(self) -> None:
        """Copy parts of the batch, up to `_CALL_BYTES`. Thread: I/O threads, several at once."""
        left_bytes = _CALL_BYTES
        while left_bytes > 0 and (part := self._begin_part()) is not None:
            try:
                start = part.start
                for run in part.runs:
                    self._move(start, run)
                    start += run.length
            except BaseException as error:
                self.withdraw()
                raise TierUnavailableError(f"copying blocks raised {error!r}") from error
            finally:
                with self._mutex:
                    self._num_moving -= 1
            left_bytes -= part.num_bytes

    def withdraw(self) -> bool:
        """Begin no further part; return whether no part is being copied. Thread: any."""
        with self._mutex:
            self.parts.clear()
            return not self._num_moving

    def _begin_part(self) -> _Part | None:
        with self._mutex:
            if not self.parts:
                return None
            self._num_moving += 1
            return self.parts.popleft()

    def _move(self, start: int, run: Run) -> None:
        stop = start + run.length
        rows = self._mover.rows(self._numbers[start:stop])
        cipher = self._digester.cipher
        encode = None if cipher is None else self._coder(cipher, start)
        if self._is_store:
            self._hash(start, rows)  # first, so that the write finds the bytes in the CPU cache
        try:
            whole = self._mover.move(
                run, rows, encode, is_write=self._is_store, is_direct=self._is_direct
            )
        except OSError as error:
            code = errno.EIO if error.errno is None else error.errno
            self.errors.update(dict.fromkeys(range(start, stop), code))
            return
        if not self._is_store:
            self.errors.update(dict.fromkeys(range(start + whole, stop), ENDED_EARLY))
            self._hash(start, rows[:whole])

    def _hash(self, start: int, rows: Sequence[memoryview]) -> None:
        if self._keys is not None and self._digester.cipher is None:
            part = slice(start, start + len(rows))
            self.digests[part] = self._digester.digests(self._keys[part], rows)

    def _coder(self, cipher: Cipher, start: int) -> Stage:
        """Return what encrypts rows into slots, or decrypts them, and notes the checksums."""
        keys = self._keys
        if keys is None:
            raise ValueError("encrypted blocks need their keys")

        def encrypt(index: int, slot: memoryview, row: memoryview) -> None:
            self.digests[start + index] = cipher.encrypt(keys[start + index], row, slot)

        def decrypt(index: int, slot: memoryview, row: memoryview) -> None:
            seal = bytes(slot[len(row) : len(row) + SEAL_BYTES])
            self.digests[start + index] = seal[TAG_AT:]
            if cipher.decrypt(keys[start + index], slot, row) is None:
                self.errors[start + index] = not_opened(cipher.seals, seal)

        return encrypt if self._is_store else decrypt


Stage = Callable[[int, memoryview, memoryview], None]
"""Fills a slot from a row, or the other way round; also gets the row's index in the run."""


def _parts(runs: Sequence[Run], size: int, slot_bytes: int) -> Iterator[_Part]:
    """Divide runs into parts of at most `size` slots in one file."""
    start = count = 0
    part: list[Run] = []
    for fd, first, length in runs:
        offset, left = first, length
        while left:
            if part and (count == size or part[0].fd != fd):
                yield _Part(start, part, count * slot_bytes)
                start, count, part = start + count, 0, []
            taken = min(left, size - count)
            part.append(Run(fd, offset, taken))
            count += taken
            left -= taken
            offset += taken * slot_bytes
    if part:
        yield _Part(start, part, count * slot_bytes)


class _Mover:
    """Copies rows of the primary to and from files, in as few system calls as possible.

    Thread: any.

    Attributes:
        slot_bytes: Bytes of a slot.
        is_aligned: Whether rows can be passed to O_DIRECT calls directly.
    """

    def __init__(
        self, calls: FileCalls, kv_view: memoryview, slot_bytes: int, tail_bytes: int
    ) -> None:
        self.slot_bytes = slot_bytes
        self._row_bytes = kv_view.nbytes // len(kv_view)
        self._stored_bytes = self._row_bytes + tail_bytes
        self._calls = calls
        self._flat = kv_view.cast("B", (kv_view.nbytes,))
        self._pad = memoryview(bytearray(slot_bytes - self._row_bytes))
        self.is_aligned = not self._pad and _address_of(self._flat) % _ALIGNMENT_BYTES == 0
        self._bounce: deque[mmap.mmap] = deque()

    def close(self) -> None:
        """Unmap the bounce buffers, and release the primary's memory."""
        while self._bounce:
            self._bounce.pop().close()
        self._flat.release()

    def rows(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return a view of each row."""
        flat, size = self._flat, self._row_bytes
        return [flat[number * size : (number + 1) * size] for number in numbers]

    def move(
        self,
        run: Run,
        rows: list[memoryview],
        encode: Stage | None,
        *,
        is_write: bool,
        is_direct: bool,
    ) -> int:
        """Write or read the rows of one run; return the number of complete blocks.

        With `encode`, blocks go through staging memory.

        Raises:
            OSError: A call failed; after a read, no row is valid.
        """
        if encode is None and (not is_direct or self.is_aligned):
            buffers = rows
            if self._pad:
                buffers = [buffer for row in rows for buffer in (row, self._pad)]
            return self._whole(rows, self._transfer(run, buffers, is_write=is_write))
        size_bytes = len(rows) * self.slot_bytes
        with self._borrowed(size_bytes) as memory:
            if is_write:
                self._stage(memory, rows, encode or _fill_slot)
            with memoryview(memory) as whole, whole[:size_bytes] as staged:
                count = self._whole(rows, self._transfer(run, [staged], is_write=is_write))
            if not is_write:
                self._stage(memory, rows[:count], encode or _fill_row)
            return count

    def _whole(self, rows: Sequence[memoryview], done_bytes: int) -> int:
        """Return the number of complete blocks in a transfer's bytes; the last needs no padding."""
        slot_bytes = self.slot_bytes
        return min(len(rows), (done_bytes + slot_bytes - self._stored_bytes) // slot_bytes)

    def _stage(self, memory: mmap.mmap, rows: Sequence[memoryview], stage: Stage) -> None:
        """Fill the slots in borrowed memory from rows, or the other way round."""
        with memoryview(memory) as whole:
            for index, row in enumerate(rows):
                begin = index * self.slot_bytes
                with whole[begin : begin + self.slot_bytes] as slot:
                    stage(index, slot, row)

    @contextlib.contextmanager
    def _borrowed(self, size_bytes: int) -> Iterator[mmap.mmap]:
        """Borrow page-aligned memory; it is reused, because parts have similar sizes."""
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

    def _transfer(self, run: Run, buffers: Sequence[memoryview], *, is_write: bool) -> int:
        """Transfer all bytes; return their number, which is smaller only at the end of a file."""
        move = self._calls.pwritev if is_write else self._calls.preadv
        done = 0
        for start in range(0, len(buffers), _IOV_MAX):
            part = buffers[start : start + _IOV_MAX]
            left = sum(map(len, part))
            while left:
                moved = move(run.fd, part, run.offset + done)
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


def _fill_slot(_: int, slot: memoryview, row: memoryview) -> None:
    np.copyto(np.asarray(slot[: len(row)]), np.asarray(row))  # releases the GIL


def _fill_row(_: int, slot: memoryview, row: memoryview) -> None:
    np.copyto(np.asarray(row), np.asarray(slot[: len(row)]))


def _address_of(view: memoryview) -> int:
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def _behind(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """Return the remaining buffers after the first `done_bytes`."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            rest.append(buffer[done_bytes:])
        done_bytes = max(0, done_bytes - len(buffer))
    return rest
