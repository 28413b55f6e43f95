"""The native engine: batches of transfers, in threads that never take the interpreter's lock.

A batch is submitted and gets a ticket; when it has ended, `fd` is readable, and `take` returns its
outcome. What it was given may not change in between.

Tests have the system calls made through `FileOps`, which can let them fail; those run on the
engine's threads with the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import stat as stat_module
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, cast

import xxhash

from kvoffload_async.block_io._native import Engine as _Threads

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)


class FileOps(Protocol):
    """The tiers' own calls; they raise OSError."""

    def open(self, path: str, flags: int, /) -> int: ...
    def close(self, fd: int, /) -> None: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
    def get_xattr(self, fd: int, name: str, /) -> bytes | None: ...
    def set_xattr(self, fd: int, name: str, value: bytes, /) -> None: ...
    def truncate(self, fd: int, size_bytes: int, /) -> None: ...
    def fsync(self, fd: int, /) -> None: ...
    def stat(self, path: str, /) -> os.stat_result: ...
    def publish(self, source: str, target: str, /) -> None: ...
    def unlink(self, path: str, /) -> None: ...


class _Root(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("path", ctypes.c_char_p))


class _Buffer(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class _FileCall(ctypes.Structure):
    """`struct file_call` in block_io.h, as far as it is needed."""

    _fields_ = (
        *(("kind", ctypes.c_int), ("fd", ctypes.c_int), ("flags", ctypes.c_int)),
        *(("mode", ctypes.c_int), ("root", ctypes.POINTER(_Root))),
        *(("name", ctypes.c_char_p), ("target", ctypes.c_char_p)),
        *(("buffers", ctypes.POINTER(_Buffer)), ("num_buffers", ctypes.c_int64)),
        ("offset", ctypes.c_int64),
    )


class _Call:
    """A call of the engine.

    Attributes:
        path: Of what has a name.
        target_path: Where it is to be.
        attribute: A name of one.
        buffers: What is written or read; what an attribute, or a status, is written into.
    """

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - a pointer to a _FileCall
        found = call.contents
        self.fd: int = found.fd
        self.flags: int = found.flags
        self.offset: int = found.offset
        name, target = found.name or b"", found.target or b""
        folder = found.root.contents.path if found.root else b""
        self.path = os.fsdecode(b"%b/%b" % (folder, name))
        self.target_path = os.fsdecode(b"%b/%b" % (folder, target))
        self.attribute = os.fsdecode(name)
        self.buffers: Sequence[memoryview] = [
            _view_of(found.buffers[index].base, found.buffers[index].num_bytes, _WRITABLE)
            for index in range(found.num_buffers)
        ]


_CALLER: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(_FileCall))
_WRITABLE: Final = 0x200  # PyBUF_WRITE

_view_of = ctypes.PYFUNCTYPE(
    *(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int),
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def _get_attribute(ops: FileOps, call: _Call) -> int:
    value = ops.get_xattr(call.fd, call.attribute)
    if value is None:
        return -errno.ENODATA
    if len(value) > len(call.buffers[0]):
        return -errno.ERANGE
    call.buffers[0][: len(value)] = value
    return len(value)


def _get_status(ops: FileOps, call: _Call) -> None:
    status = ops.stat(call.path)
    is_regular = stat_module.S_ISREG(status.st_mode)
    struct.pack_into("2q", call.buffers[0], 0, is_regular, status.st_blocks * 512)


_KINDS: Final[Sequence[Callable[[FileOps, _Call], int | None]]] = (  # as `enum call_kind`
    lambda ops, call: ops.open(call.path, call.flags),
    lambda ops, call: ops.close(call.fd),
    lambda ops, call: ops.preadv(call.fd, call.buffers, call.offset),
    lambda ops, call: ops.pwritev(call.fd, call.buffers, call.offset),
    _get_attribute,
    lambda ops, call: ops.set_xattr(call.fd, call.attribute, bytes(call.buffers[0])),
    lambda ops, call: ops.truncate(call.fd, call.offset),
    lambda ops, call: ops.fsync(call.fd),
    _get_status,
    lambda ops, call: ops.publish(call.path, call.target_path),
    lambda ops, call: ops.unlink(call.path),
)


def adapter(ops: object) -> tuple[int, object]:
    """Return the address of a function that the engine calls, and what must live as long.

    What is raised and is no OSError is a defect: it is logged, and fails the call.
    """

    def make(call: Any) -> int:  # noqa: ANN401 - a pointer to a _FileCall
        made = _Call(call)
        try:
            return _KINDS[call.contents.kind](cast("FileOps", ops), made) or 0
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception as error:  # noqa: BLE001 - whatever a stand-in raises
            # As text: a log record that kept the error would keep its frames, and the buffers.
            trace = "".join(traceback.format_exception(error))
            logger.error("%r cannot make a system call: %s", ops, trace)  # noqa: TRY400
            return -errno.EIO
        finally:
            for buffer in made.buffers:  # memory that the engine may give back from now on
                buffer.release()

    caller = _CALLER(make)
    return ctypes.cast(caller, ctypes.c_void_p).value or 0, caller


PIECE_BYTES: Final = 256 << 10
"""What one system call moves at most, where blocks are no smaller; measured."""

PART_BYTES: Final = 1 << 20
"""What one thread moves before it looks what is next; measured."""

NOT_BEGUN: Final = 3
"""The status of a file that was withdrawn."""

_EXTENTS, _LOAD_FILES, _STORE_FILES, _HAS_FILES, _COPIES = range(5)  # as `enum batch_kind`

_COUNTERS: Final = (  # as `enum counter`
    *("system_calls", "pieces", "bytes", "hashed_bytes", "batches", "parts", "wake_ups"),
    *("threads", "spares"),
)

_MAX_THREADS: Final = 64
_MAX_PAD_BYTES: Final = 65536
_MAX_MODE: Final = 0o777
_MAX_INT: Final = 2**31 - 1
_NO_MEMORY: Final = (None, 1, 1)
_CHECK_MS: Final = 10_000
_TRIPLE: Final = struct.Struct("3q")


class Memory:
    """Rows of a buffer, which is held until `release` and until no batch uses it any more.

    Attributes:
        rows: The buffer, bytes of a row, and bytes of a slot in a file; None once it is released.
    """

    __slots__ = ("rows",)

    def __init__(self, buffer: Buffer, row_bytes: int, slot_bytes: int) -> None:
        """Hold a buffer; see `Engine.map`."""
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise BufferError("buffer: it is not contiguous")
        if row_bytes <= 0:
            raise ValueError(f"row_bytes: {row_bytes} is not positive")
        if not 0 <= slot_bytes - row_bytes <= _MAX_PAD_BYTES:
            raise ValueError(
                f"slot_bytes: {slot_bytes} is not between row_bytes, {row_bytes}, and "
                f"{_MAX_PAD_BYTES} more"
            )
        if view.nbytes % row_bytes:
            raise ValueError(
                f"buffer: its {view.nbytes} bytes are no multiple of row_bytes, {row_bytes}"
            )
        self.rows: tuple[memoryview, int, int] | None = (view, row_bytes, slot_bytes)

    def release(self) -> None:
        """Let go of the buffer as soon as nothing of it is in flight."""
        self.rows = None


class Engine:
    """A pool of threads.

    TypeError, ValueError and BufferError name the argument that is wrong. BlockingIOError: as many
    batches wait as may; RuntimeError: the engine is closed, or was opened by a parent of this
    process. Thread: one at a time.

    Attributes:
        fd: An eventfd, readable when a batch has ended since the last `take`.
        take: Returns (ticket, outcome) of what has ended, in no order, and clears `fd`.
    """

    def __init__(  # noqa: PLR0917 - settings of threads
        self,
        load_threads: int,
        store_threads: int,
        spare_threads: int,
        queued: int,
        hashes: tuple[int, ...],
        ops: object | None = None,
        name: str = "kvoffload",
        piece_bytes: int = PIECE_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Start the threads.

        Args:
            load_threads: Those that prefer loads.
            store_threads: Those that prefer stores.
            spare_threads: How many more may stand for those that hang.
            queued: Batches of each direction of which something may wait.
            hashes: What `hashes.addresses` returns.
            ops: Has the methods of `FileOps`, called in place of the system, with the interpreter's
                lock; for tests.
            name: Of the threads; 15 bytes of it count.
            piece_bytes: See `PIECE_BYTES`.
            part_bytes: See `PART_BYTES`.

        Raises:
            OSError: No memory, thread or descriptor.
        """
        _check_between("load_threads", load_threads, 1, _MAX_THREADS)
        _check_between("store_threads", store_threads, 1, _MAX_THREADS)
        _check_between("spare_threads", spare_threads, 0, _MAX_THREADS)
        _check_between("queued", queued, 1, _MAX_INT)
        _check_between("piece_bytes", piece_bytes, 1, _MAX_INT)
        _check_between("part_bytes", part_bytes, 1, _MAX_INT)
        if not all(hashes):
            raise ValueError(f"hashes: address {hashes.index(0)} is zero")
        call, callable_ = (0, None) if ops is None else adapter(ops)
        self._part_bytes = part_bytes
        self._threads = _Threads(
            *(load_threads, store_threads, spare_threads, queued, piece_bytes, part_bytes),
            struct.pack(f"{len(hashes)}P", *hashes),
            *(call, callable_, name),
        )
        self._submit = self._threads.submit
        self.take = self._threads.take
        self.fd = self._threads.fd

    def map(self, buffer: Buffer, row_bytes: int, slot_bytes: int) -> Memory:
        """Return the rows of a C-contiguous buffer.

        Args:
            buffer: Is held, and must be writable to load into it.
            row_bytes: Of a row.
            slot_bytes: From one row to the next in a file: a pad of zeros follows each row.
        """
        return Memory(buffer, row_bytes, slot_bytes)

    def extents(  # noqa: PLR0917 - of a batch
        self,
        memory: Memory,
        is_store: bool,
        rows: Sequence[int],
        runs: Sequence[tuple[int, int, int]],
        keys: Sequence[bytes] | None,
        prefix: bytes,
    ) -> int:
        """Move rows to or from runs of slots: (descriptor, offset, number of rows), in order.

        Outcome: ({index: errno}, digests). -1 in place of an errno: the file ended early. If a
        call fails, so do the blocks of its run that are not known to be whole; other runs go on.
        Digests are there if `keys` are, 16 bytes each, seeded by the prefix and the key; that of a
        failed block means nothing.
        """
        if keys is not None:
            keys = tuple(keys)
        held, rows, runs = memory.rows or _released(), tuple(rows), tuple(runs)
        return self._submit(_EXTENTS, is_store, len(rows), held, rows, keys, prefix, runs, None)

    def load_files(  # noqa: PLR0917 - of a batch
        self,
        memory: Memory,
        root: tuple[int, str],
        names: Sequence[str],
        rows: Sequence[int],
        keys: Sequence[bytes],
        prefix: bytes,
        attribute: str,
        value_prefix: bytes,
        expected: Sequence[bytes | None],
        *,
        verify: bool,
    ) -> int:
        """Read a file into each row.

        Outcome: (statuses, digests). Status 0: it has the row's length and, with `verify`, the
        digest that is expected, or that its attribute has; `NOT_BEGUN`; else judge it yourself.
        """
        files = (
            *(*_checked(root), _joined(names), attribute, value_prefix, tuple(expected)),
            *(b"", b"", -1, False, False),
        )
        return self._submit(
            *(_LOAD_FILES, False, len(rows), memory.rows or _released(), tuple(rows)),
            *(tuple(keys) if verify else None, prefix, (), files),
        )

    def store_files(  # noqa: PLR0917 - of a batch
        self,
        memory: Memory,
        root: tuple[int, str],
        temps: Sequence[str],
        names: Sequence[str],
        rows: Sequence[int],
        keys: Sequence[bytes],
        prefix: bytes,
        attribute: str,
        value_prefix: bytes,
        recycled: bytes,
        *,
        file_mode: int,
        fsync: bool,
        wants_disk_bytes: bool,
        has_digest: bool,
    ) -> int:
        """Write each row to a temporary file, and rename that, if its name is not there yet.

        `recycled` has 1 for each temporary file that is there, and is overwritten. `file_mode`
        is -1 where it follows from the folder. Outcome: (statuses, digests, disk_bytes). Status
        0: written; 1: a file is there already; 2: judge it yourself, the temporary file is
        removed, if it can be; `NOT_BEGUN`.
        """
        if not -1 <= file_mode <= _MAX_MODE:
            raise ValueError(f"file_mode: {file_mode} is neither permissions nor -1")
        # Whether they are as many is checked with the rest.
        for temp, name in zip(temps, names, strict=False):
            if os.path.dirname(temp) != os.path.dirname(name):  # noqa: PTH120 - for every file
                raise ValueError(f"temps: {temp} is not in the folder of {name}")
        files = (
            *(*_checked(root), _joined(names), attribute, value_prefix, ()),
            *(_joined(temps), recycled, file_mode, fsync, wants_disk_bytes),
        )
        return self._submit(
            *(_STORE_FILES, True, len(rows), memory.rows or _released(), tuple(rows)),
            *(tuple(keys) if has_digest else None, prefix, (), files),
        )

    def has_files(self, root: tuple[int, str], names: Sequence[str]) -> int:
        """Look for files. Outcome: a byte each, 1 for a regular file, 0 for all else."""
        files = (
            *(*_checked(root), _joined(names), "", b"", ()),
            *(b"", b"", -1, False, False),
        )
        return self._submit(_HAS_FILES, False, len(names), _NO_MEMORY, (), None, b"", (), files)

    def copies(self, target: Memory, source: Memory, parts: Buffer) -> int:
        """Copy bytes between memories: int64 triples (target offset, source offset, bytes).

        Outcome: None, or ECANCELED if some of it was not begun.
        """
        packed = bytes(parts)
        count, rest = divmod(len(packed), _TRIPLE.size)
        if rest:
            raise ValueError(f"parts: {len(packed)} bytes are no triples of int64")
        to, begin = (memory.rows or _released() for memory in (target, source))
        numbers = memoryview(packed).cast("q")
        is_large = max(numbers[2::3], default=0) > self._part_bytes
        if is_large and max(numbers) <= max(to[0].nbytes, begin[0].nbytes):  # else it is refused
            packed = _cut(packed, self._part_bytes)
            count = len(packed) // _TRIPLE.size
        return self._submit(
            *(_COPIES, False, count, (to[0], 1, 1), (), None, b"", packed, begin[0]),
        )

    def withdraw(self, ticket: int) -> None:
        """Take back what of a batch nobody has begun, with ECANCELED; the rest ends as usual."""
        if ticket == 0:
            raise ValueError("ticket: 0 is none")
        self._threads.withdraw(ticket)

    def replace_hung(self, hung_after_s: float) -> int:
        """Start spare threads for those that hang in one call; return how many hang."""
        return self._threads.replace_hung(_nanoseconds("hung_after_s", hung_after_s))

    def close(self, timeout_s: float) -> int:
        """Cancel what waits, and wait for what runs; return how many threads are left behind.

        What these may touch is kept for as long as they hang. `take` returns what has ended.
        """
        return self._threads.close(_nanoseconds("timeout_s", timeout_s))

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start."""
        return dict(zip(_COUNTERS, self._threads.counters(), strict=True))


def check_hashes(hashes: tuple[int, ...]) -> None:
    """Compare an engine's digests with those of Python, of blocks in one piece and in several.

    Raises:
        OSError: No engine can be opened.
        RuntimeError: They differ, or are not computed.
    """
    data, key, prefix = bytes(range(256)) * 16, b"key", b"prefix\0"
    seed = xxhash.xxh3_64_intdigest(prefix + key)
    engine = Engine(1, 1, 0, 8, hashes, piece_bytes=1000)
    fd = os.memfd_create("check")
    try:
        sizes = {}
        for size in (1, 100, 1000, len(data)):
            memory = engine.map(data[:size], size, size)
            sizes[engine.extents(memory, True, (0,), ((fd, 0, 1),), (key,), prefix)] = size
        ends = select.poll()  # for descriptors of any number
        ends.register(engine.fd, select.POLLIN)
        while sizes:
            if not ends.poll(_CHECK_MS):
                raise RuntimeError("hashes: their check does not end")
            for ticket, (_, digest) in engine.take():
                if digest != xxhash.xxh3_128_digest(data[: sizes.pop(ticket)], seed):
                    raise RuntimeError("hashes: they do not compute XXH3")
    finally:
        engine.close(1.0)
        os.close(fd)


def _cut(copies: bytes, most: int) -> bytes:
    """Return copies of so many bytes at most, for several threads."""
    return b"".join(
        _TRIPLE.pack(target + at, source + at, min(size - at, most))
        for target, source, size in _TRIPLE.iter_unpack(copies)
        for at in range(0, size, most)
    )


def _released() -> NoReturn:
    raise ValueError("memory: it is released")


def _check_between(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise ValueError(f"{name}: {number} is not between {least} and {most}")


def _nanoseconds(name: str, seconds: float) -> int:
    if not seconds >= 0:
        raise ValueError(f"{name}: {seconds} is no duration")
    return int(min(seconds, 1e9) * 1e9)


def _checked(root: tuple[int, str]) -> tuple[int, bytes]:
    fd, path = root
    if fd < 0:
        raise ValueError(f"root: {fd} is no descriptor")
    return fd, os.fsencode(path)


def _joined(names: Sequence[str]) -> bytes:
    return os.fsencode("\0".join(names))
