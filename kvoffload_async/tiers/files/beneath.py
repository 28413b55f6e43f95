"""Opening what lies beneath a directory: no symbolic link on the way is followed, nor `..`.

In one call by the kernel's `openat2`, or, where that does not exist or is not allowed, one
component after the other. Thread: any; both release the interpreter's lock.

Source: openat2(2); its number is the same on every architecture but Alpha.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Final

Opener = Callable[[int, str, int], int]
"""(descriptor of a directory, relative name, flags without O_CREAT) -> a new descriptor."""

FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OPENAT2: Final = 437
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
]


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_HOW_BYTES: Final = ctypes.sizeof(_OpenHow)


@functools.cache
def _how(flags: int) -> _OpenHow:
    """Return the kernel's argument for some flags; it is only read, so threads share it."""
    return _OpenHow(flags, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)


def open_by_kernel(root_fd: int, name: str, flags: int) -> int:
    """Open a name beneath a directory in one call; OSError with ELOOP if there is a link."""
    encoded = os.fsencode(name)
    if b"\0" in encoded:
        raise ValueError("embedded null byte")
    how = ctypes.byref(_how(flags | os.O_CLOEXEC))
    while True:
        fd: int = _syscall(_OPENAT2, root_fd, encoded, how, _HOW_BYTES)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), name)


def open_by_components(root_fd: int, name: str, flags: int) -> int:
    """Open a name beneath a directory, one folder after the other.

    Raises:
        OSError: With ENOTDIR if there is a link on the way, ELOOP if there is one at its end.
    """
    *folders, last = name.split("/")
    if ".." in {*folders, last} or name.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    folder_fd = root_fd
    try:
        for folder in folders:
            next_fd = os.open(folder, FOLDER_FLAGS, dir_fd=folder_fd)
            if folder_fd != root_fd:
                os.close(folder_fd)
            folder_fd = next_fd
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    finally:
        if folder_fd != root_fd:
            os.close(folder_fd)


def suitable_opener(root_fd: int) -> Opener:
    """Return the better of the two that works here: filters of system calls forbid what is new."""
    try:
        os.close(open_by_kernel(root_fd, ".", FOLDER_FLAGS))
    except OSError:
        return open_by_components
    return open_by_kernel
