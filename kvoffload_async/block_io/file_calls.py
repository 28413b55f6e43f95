"""The native engine's system calls by way of `FileOps`: for tests, which let these fail.

Thread: the engine's, with the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat as stat_module
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

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
