"""Refuses system calls to this process, as a container's seccomp profile does."""

import ctypes
import os
import struct

NUMBERS = {
    "openat2": 437,
    "renameat2": 316,
    "fallocate": 285,
    "fsetxattr": 190,
    "fgetxattr": 193,
    "fchmod": 91,
    "fchown": 93,
    "utimensat": 280,
    "statfs": 137,
    "fstatfs": 138,
    "sched_getaffinity": 204,
    "eventfd2": 290,
    "memfd_create": 319,
    "madvise": 28,
    "prctl": 157,
    "flock": 73,
    "fsync": 74,
    "fdatasync": 75,
}
"""On x86-64."""

_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(call: str, code: int) -> None:
    """Make a call fail with an error from now on, in this process and its children."""
    steps = [
        (_LOAD_NUMBER, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, NUMBERS[call]),
        (_RETURN, 0, 0, _ERROR | code),
        (_RETURN, 0, 0, _ALLOW),
    ]
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.cast(content, ctypes.c_void_p))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
