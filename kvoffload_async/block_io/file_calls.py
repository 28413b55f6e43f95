"""The native engine's system calls by way of `FileOps`: for tests, which let these fail.

Thread: the engine's, with the interpreter's lock.
"""

from __future__ import annotations

import errno
import os
import stat as stat_module
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol


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
    def fstat(self, fd: int, /) -> os.stat_result: ...
    def stat(self, path: str, /) -> os.stat_result: ...
    def publish(self, source: str, target: str, /) -> None: ...
    def unlink(self, path: str, /) -> None: ...


class _Call(NamedTuple):
    """A call of the engine, as `struct file_call` in block_io.h describes it.

    Attributes:
        name: Relative to the root; an attribute's.
        buffers: What is written or read; what an attribute, or a status, is written into.
    """

    fd: int
    flags: int
    offset: int
    root: bytes | None
    name: bytes | None
    target: bytes | None
    buffers: Sequence[memoryview]

    @property
    def path(self) -> str:
        return os.fsdecode(b"%b/%b" % (self.root or b"", self.name or b""))

    @property
    def target_path(self) -> str:
        return os.fsdecode(b"%b/%b" % (self.root or b"", self.target or b""))

    @property
    def attribute(self) -> str:
        return os.fsdecode(self.name or b"")


def _get_attribute(ops: FileOps, call: _Call) -> int:
    value = ops.get_xattr(call.fd, call.attribute)
    if value is None:
        return -errno.ENODATA
    if len(value) > len(call.buffers[0]):
        return -errno.ERANGE
    call.buffers[0][: len(value)] = value
    return len(value)


def _get_status(ops: FileOps, call: _Call) -> None:
    status = ops.stat(call.path) if call.fd < 0 else ops.fstat(call.fd)
    is_regular = stat_module.S_ISREG(status.st_mode)
    struct.pack_into("3q", call.buffers[0], 0, is_regular, status.st_size, status.st_blocks * 512)


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


def adapter(ops: FileOps) -> Callable[..., int]:
    """Return what the engine calls: (kind, fields of `_Call`) -> a result, or a negative errno."""

    def make(kind: int, *fields: Any) -> int:  # noqa: ANN401 - those of _Call
        call = _Call(*fields)
        try:
            return _KINDS[kind](ops, call) or 0
        except OSError as error:
            return -(error.errno or errno.EIO)
        finally:
            for buffer in call.buffers:  # memory that the engine may give back from now on
                buffer.release()

    return make
