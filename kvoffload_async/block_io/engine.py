"""The native engine: executes batches on threads that never take the GIL.

A submitted batch gets a ticket; when it has ended, `fd` becomes readable, and `take` returns its
outcome. Its arguments must not change meanwhile.

Tests replace the system calls, to inject errors; those calls run on the engine's
threads with the GIL.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import xxhash

from kvoffload_async.block_io._native import Engine as _Threads
from kvoffload_async.block_io.contract import (
    SEAL_BYTES,
    TAG_AT,
    Attribute,
    FileBatch,
    FileCalls,
    FileStores,
)
from kvoffload_async.system_calls import naming_refusal

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)


class _Root(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("path", ctypes.c_char_p))


class _Buffer(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class _FileCall(ctypes.Structure):
    """`struct file_call` in block_io.h, except for fields not needed here."""

    _fields_ = (
        *(("kind", ctypes.c_int), ("fd", ctypes.c_int), ("flags", ctypes.c_int)),
        *(("mode", ctypes.c_int), ("root", ctypes.POINTER(_Root))),
        *(("name", ctypes.c_char_p), ("target", ctypes.c_char_p)),
        *(("buffers", ctypes.POINTER(_Buffer)), ("num_buffers", ctypes.c_int64)),
        ("offset", ctypes.c_int64),
    )


class _Call:
    """Decoded arguments of a system call that the engine requests.

    Attributes:
        root, root_fd: Path and descriptor of the root.
        path: Path of the file.
        target_path: Path to rename to.
        attribute: Name of the extended attribute.
        buffers: Data to write, or memory to read into, also for attributes and status.
    """

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - a pointer to a _FileCall
        found = call.contents
        self.fd: int = found.fd
        self.flags: int = found.flags
        self.offset: int = found.offset
        name, target = found.name or b"", found.target or b""
        self.root_fd, folder = -1, b""
        if found.root:
            self.root_fd, folder = found.root.contents.fd, found.root.contents.path
        self.root = os.fsdecode(folder)
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


def _get_attribute(ops: FileCalls, call: _Call) -> int:
    value = ops.get_xattr(call.fd, call.attribute)
    if value is None:
        return -errno.ENODATA
    if len(value) > len(call.buffers[0]):
        return -errno.ERANGE
    call.buffers[0][: len(value)] = value
    return len(value)


def _get_status(ops: FileCalls, call: _Call) -> None:
    status = ops.stat(call.path) if call.fd < 0 else ops.fstat(call.fd)
    numbers = (status.st_blocks * 512, status.st_size, status.st_nlink)
    struct.pack_into("4q", call.buffers[0], 0, stat_module.S_ISREG(status.st_mode), *numbers)


def _check_root(ops: FileCalls, call: _Call) -> int:
    found, opened = ops.leads_to(call.root), os.fstat(call.root_fd)
    return 0 if os.path.samestat(found, opened) else -errno.ESTALE


_KINDS: Final[Sequence[Callable[[FileCalls, _Call], int | None]]] = (  # order of `enum call_kind`
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
    lambda ops, call: ops.rename(call.path, call.target_path),
    _check_root,
)


def adapter(ops: FileCalls) -> tuple[int, object]:
    """Return the address of a callback that calls `ops`, and an object that keeps it alive.

    An exception other than OSError is a bug: it is logged, and fails the call.
    """

    def make(call: Any) -> int:  # noqa: ANN401 - a pointer to a _FileCall
        made = _Call(call)
        try:
            return _KINDS[call.contents.kind](ops, made) or 0
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception as error:  # noqa: BLE001 - any exception of a test's replacement
            # Formatted now: a log record with the error would keep its frames, and the buffers,
            # alive.
            trace = "".join(traceback.format_exception(error))
            logger.error("%r failed in a system call: %s", ops, trace)  # noqa: TRY400
            return -errno.EIO
        finally:
            for buffer in made.buffers:  # the engine may free this memory after the call
                buffer.release()

    caller = _CALLER(make)
    return ctypes.cast(caller, ctypes.c_void_p).value or 0, caller


PIECE_BYTES: Final = 256 << 10
"""Maximum bytes of a system call, unless a block is larger; tuned by measurement."""

PART_BYTES: Final = 1 << 20
"""Bytes that a thread processes before it takes the next part; tuned by measurement."""

_EXTENTS, _LOAD_FILES, _STORE_FILES, _HAS_FILES, _COPIES = range(5)  # order of `enum batch_kind`

_COUNTERS: Final = (  # order of `enum counter`
    *("system_calls", "pieces", "bytes", "hashed_bytes", "batches", "parts", "wake_ups"),
    *("threads", "spares"),
)

_MAX_THREADS: Final = 64
_MAX_PAD_BYTES: Final = 65536
_MAX_MODE: Final = 0o777
_MAX_SERIAL: Final = 2**63
_MAX_INT: Final = 2**31 - 1
_STORES_NOTHING: Final = (b"", b"", b"", "", 0, -1, False, False)
_NO_MEMORY: Final = (None, 1, 1)
_CHECK_MS: Final = 10_000
_COPY_BYTES: Final = 48


class Sealing(NamedTuple):
    """How an engine encrypts blocks.

    Attributes:
        ciphers: Result of `hashes.cipher_addresses`.
        secrets, info: See `Seals`.
    """

    ciphers: tuple[int, ...]
    secrets: bytes
    info: bytes

    def __repr__(self) -> str:
        return f"Sealing(info={self.info!r})"


class Memory:
    """Rows of a buffer, which is held until `release` and until no batch uses it.

    Attributes:
        rows: The buffer, bytes of a row, and bytes of a slot in a file; None after release.
    """

    __slots__ = ("rows",)

    def __init__(self, buffer: Buffer, row_bytes: int, slot_bytes: int) -> None:
        """Hold a buffer; see `Engine.map`."""
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise BufferError("buffer: not contiguous")
        if row_bytes <= 0:
            raise ValueError(f"row_bytes: {row_bytes} is not positive")
        if not 0 <= slot_bytes - row_bytes <= _MAX_PAD_BYTES:
            raise ValueError(
                f"slot_bytes: {slot_bytes} is not between row_bytes ({row_bytes}) and "
                f"row_bytes + {_MAX_PAD_BYTES}"
            )
        if view.nbytes % row_bytes:
            raise ValueError(
                f"buffer: its {view.nbytes} bytes are not a multiple of row_bytes ({row_bytes})"
            )
        self.rows: tuple[memoryview, int, int] | None = (view, row_bytes, slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer; 0 after release."""
        return 0 if self.rows is None else self.rows[0].nbytes

    def release(self) -> None:
        """Release the buffer as soon as no transfer uses it."""
        self.rows = None


class Engine:
    """A pool of native threads.

    TypeError, ValueError and BufferError name the invalid argument. BlockingIOError: the queue is
    full; RuntimeError: the engine is closed, or was opened before a fork. Not thread-safe.

    Attributes:
        fd: An eventfd, readable when a batch has ended since the last `take`.
        take: Returns (ticket, outcome) of ended batches, unordered, and clears `fd`.
    """

    def __init__(  # noqa: PLR0917 - settings of threads
        self,
        load_threads: int,
        store_threads: int,
        spare_threads: int,
        queued: int,
        hashes: tuple[int, ...],
        ops: FileCalls | None = None,
        name: str = "kvoffload",
        piece_bytes: int = PIECE_BYTES,
        part_bytes: int = PART_BYTES,
        sealing: Sealing | None = None,
    ) -> None:
        """Start the threads.

        Args:
            load_threads: Threads that prefer loads.
            store_threads: Threads that prefer stores.
            spare_threads: Maximum number of threads to replace hanging ones.
            queued: Maximum number of queued batches per direction.
            hashes: Result of `hashes.addresses`.
            ops: Called with the GIL instead of the system; for tests.
            name: Name of the threads; truncated to 15 bytes.
            piece_bytes: See `PIECE_BYTES`.
            part_bytes: See `PART_BYTES`.
            sealing: How to encrypt blocks. Then every block has a key, and a digest is a seal of
                `SEAL_BYTES`; stores get its begin, and in extents it is behind the block.

        Raises:
            OSError: Memory, threads or descriptors are exhausted.
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
        packed = None
        if sealing is not None:
            if not all(sealing.ciphers):
                raise ValueError(f"ciphers: address {sealing.ciphers.index(0)} is zero")
            ciphers = struct.pack(f"{len(sealing.ciphers)}P", *sealing.ciphers)
            packed = ciphers, sealing.secrets, sealing.info
        self._threads = _Threads(
            *(load_threads, store_threads, spare_threads, queued, piece_bytes, part_bytes),
            struct.pack(f"{len(hashes)}P", *hashes),
            *(call, callable_, name, packed),
        )
        self._submit = self._threads.submit
        self.take = self._threads.take
        self.fd = self._threads.fd

    def map(self, buffer: Buffer, row_bytes: int, slot_bytes: int) -> Memory:
        """Return the rows of a C-contiguous buffer.

        Args:
            buffer: The buffer to hold; must be writable for loads.
            row_bytes: Bytes of a row.
            slot_bytes: Distance between rows in a file: each row is followed by zero padding.
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
        seals: bytes = b"",
    ) -> int:
        """Copy rows to or from runs of slots: (descriptor, offset, number of rows), in order.

        Outcome: ({index: errno}, digests). Errno -1: the file ended early; -2: the block cannot be
        decrypted, and its row is wiped, but its seal is among the digests. If a call fails, blocks
        of its run not known to be complete fail as well; other runs continue. With `keys`, there
        are digests of 16 bytes each, seeded by the prefix and the key, undefined for failed blocks.
        """
        if keys is not None:
            keys = tuple(keys)
        held, rows, runs = memory.rows or _released(), tuple(rows), tuple(runs)
        return self._submit(
            *(_EXTENTS, is_store, len(rows), held, rows, keys, prefix, runs, None, seals)
        )

    def load_files(
        self,
        memory: Memory,
        files: FileBatch,
        prefix: bytes,
        expected: Sequence[bytes | None],
        attribute: Attribute,
        *,
        verify: bool,
    ) -> int:
        """Read a file into each row.

        Outcome: (statuses, digests). Status 0: the root's path leads to it, the file has the row's
        length and, with `verify`, the digest expected or stored in its attribute, without it no
        attribute or one that begins with the attribute's prefix; `FILE_NOT_BEGUN`; otherwise the
        caller must find the cause.
        """
        names = (*_located(files.root, files.names), *attribute, tuple(expected), *_STORES_NOTHING)
        held, rows = memory.rows or _released(), tuple(files.rows)
        keys = tuple(files.keys) if verify else None
        return self._submit(
            *(_LOAD_FILES, False, len(rows), held, rows, keys, prefix, (), names, b"")
        )

    def store_files(
        self,
        memory: Memory,
        files: FileBatch,
        prefix: bytes,
        how: FileStores,
        seals: bytes = b"",
    ) -> int:
        """Write each row to a temporary file, and rename it unless the name exists.

        A victim, unless empty, is renamed first, and overwritten if no file `marker` exists, it has
        one link, and its attribute begins with the attribute's prefix; otherwise it is removed. The
        temporary name is the name, `temp_stem`, a serial number from `first_serial` on, and ".tmp".

        Outcome: (statuses, digests, int64 disk usage of the files, and then of the victims, -1 for
        those not taken). Status 0: written; 1: the name exists; 2: the caller must find the cause,
        and the temporary file was removed if possible; 4: the victim does not exist;
        `FILE_NOT_BEGUN`.
        """
        file_mode = -1 if how.file_mode is None else how.file_mode
        _check_between("file_mode", file_mode, -1, _MAX_MODE)
        _check_between("first_serial", how.first_serial, 0, _MAX_SERIAL)
        names = (
            *(*_located(files.root, files.names), *how.attribute, ()),
            *(_joined(how.victims), os.fsencode(how.marker), how.may_write, how.temp_stem),
            *(how.first_serial, file_mode, how.fsync, how.wants_disk_bytes),
        )
        held, rows = memory.rows or _released(), tuple(files.rows)
        keys = tuple(files.keys) if how.has_digest else None
        return self._submit(
            *(_STORE_FILES, True, len(rows), held, rows, keys, prefix, (), names, seals)
        )

    def has_files(self, root: tuple[int, str], names: Sequence[str]) -> int:
        """Check if files exist. Outcome: one byte per name, 1 for a regular file, otherwise 0."""
        files = (*_located(root, names), "", b"", (), *_STORES_NOTHING)
        return self._submit(
            *(_HAS_FILES, False, len(names), _NO_MEMORY, (), None, b"", (), files, b"")
        )

    def copies(self, target: Memory, source: Memory, parts: Buffer) -> int:
        """Copy bytes between memories, in fragments at equal distances; one thread for each copy.

        Outcome: None, or ECANCELED if some were not begun.

        Args:
            target: Memory to write to.
            source: Memory to read from.
            parts: Six int64 each: offset in the target and in the source, bytes of a fragment,
                number of fragments, their distance in the target and in the source.
        """
        packed = bytes(parts)
        count, rest = divmod(len(packed), _COPY_BYTES)
        if rest:
            raise ValueError(f"parts: {len(packed)} bytes are not copies of {_COPY_BYTES} bytes")
        to, begin = (memory.rows or _released() for memory in (target, source))
        return self._submit(
            *(_COPIES, False, count, (to[0], 1, 1), (), None, b"", packed, begin[0], b""),
        )

    def withdraw(self, ticket: int) -> None:
        """Cancel the operations of a batch that have not begun (ECANCELED); others end as usual."""
        if ticket == 0:
            raise ValueError("ticket: 0 is not valid")
        self._threads.withdraw(ticket)

    def replace_hung(self, hung_after_s: float) -> int:
        """Start spare threads in place of those hanging in a call; return their number."""
        return self._threads.replace_hung(_nanoseconds("hung_after_s", hung_after_s))

    def close(self, timeout_s: float) -> int:
        """Cancel queued work, and wait for running work; return the number of hanging threads.

        Memory that hanging threads may access is kept. `take` returns the ended batches.
        """
        return self._threads.close(_nanoseconds("timeout_s", timeout_s))

    def counters(self) -> dict[str, int]:
        """Return the values of the engine's counters, by name."""
        return dict(zip(_COUNTERS, self._threads.counters(), strict=True))


def check_hashes(hashes: tuple[int, ...]) -> None:
    """Check the engine's digests against Python's, for blocks hashed in one and in several pieces.

    Raises:
        OSError: The engine cannot be opened.
        RuntimeError: The digests differ, or the check does not end.
    """
    data, key, prefix = bytes(range(256)) * 16, b"key", b"prefix\0"
    seed = xxhash.xxh3_64_intdigest(prefix + key)
    with _checked(hashes) as (engine, fd):
        for size in (1, 100, 1000, len(data)):
            memory, runs = engine.map(data[:size], size, size), ((fd, 0, 1),)
            engine.extents(memory, True, (0,), runs, (key,), prefix)
            _, digest = _outcome(engine)
            if digest != xxhash.xxh3_128_digest(data[:size], seed):
                raise RuntimeError("hashes: the functions do not compute XXH3")


def check_ciphers(hashes: tuple[int, ...], ciphers: tuple[int, ...]) -> None:
    """Check that the engine makes a known seal, of a block in several pieces, and opens the block.

    Raises:
        OSError: The engine cannot be opened.
        RuntimeError: It does not, or the check does not end.
    """
    data, begin = bytes(range(256)) * 16, bytes(range(TAG_AT))
    size, key, prefix = len(data), b"key", b"prefix"
    sealing = Sealing(ciphers, struct.pack("8sQ64s", begin[:8], 4, b"test"), b"info\1")
    loaded = bytearray(size)
    with _checked(hashes, sealing) as (engine, fd):
        for memory, is_store in ((data, True), (loaded, False)):
            rows = engine.map(memory, size, size + SEAL_BYTES)
            runs, seals = ((fd, 0, 1),), begin if is_store else b""
            engine.extents(rows, is_store, (0,), runs, (key,), prefix, seals)
            if _outcome(engine) != ({}, begin + _KNOWN_TAG):
                raise RuntimeError("ciphers: the functions do not compute AES-256-GCM")
    if loaded != data:
        raise RuntimeError("ciphers: the functions do not decrypt what they encrypt")


_KNOWN_TAG: Final = bytes.fromhex("c92d1c9a8d9fc12ca5dbb5f51710dca4")
"""Computed by `cryptography`."""


@contextmanager
def _checked(
    hashes: tuple[int, ...], sealing: Sealing | None = None
) -> Iterator[tuple[Engine, int]]:
    """Open an engine with small pieces, and a file in memory."""
    with naming_refusal("memfd_create"):
        fd = os.memfd_create("check")
    with os.fdopen(fd, "wb"):
        with naming_refusal("eventfd2"):
            engine = Engine(1, 1, 0, 8, hashes, piece_bytes=1000, sealing=sealing)
        try:
            yield engine, fd
        finally:
            engine.close(1.0)


def _outcome(engine: Engine) -> tuple[dict[int, int], bytes]:
    """Wait until the batch of extents has ended."""
    ends = select.poll()  # select.select is limited to small descriptors
    ends.register(engine.fd, select.POLLIN)
    if not ends.poll(_CHECK_MS):
        raise RuntimeError("the check of the native functions timed out")
    outcome: tuple[dict[int, int], bytes]
    ((_, outcome),) = engine.take()
    return outcome


def _released() -> NoReturn:
    raise ValueError("memory: already released")


def _check_between(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise ValueError(f"{name}: {number} is not between {least} and {most}")


def _nanoseconds(name: str, seconds: float) -> int:
    if not seconds >= 0:
        raise ValueError(f"{name}: {seconds} is not a duration")
    return int(min(seconds, 1e9) * 1e9)


def _located(root: tuple[int, str], names: Sequence[str]) -> tuple[int, bytes, bytes]:
    fd, path = root
    if fd < 0:
        raise ValueError(f"root: {fd} is not a descriptor")
    return fd, os.fsencode(path), _joined(names)


def _joined(names: Sequence[str]) -> bytes:
    return os.fsencode("\0".join(names))
