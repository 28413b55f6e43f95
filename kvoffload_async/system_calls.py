"""System calls that the package makes: their purpose, and what happens if one is refused.

The seccomp profile of a container, or a kernel such as gVisor's, may refuse a call with EPERM or
ENOSYS. The table has every call beyond opening, reading, writing, mapping and naming files.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

REFUSALS: Final = frozenset({errno.EPERM, errno.ENOSYS})
"""Errors of a refused call; a call that is permitted may also fail with them."""

REMEDY: Final = "permit this system call, for instance in the container's seccomp profile"


class SystemCall(NamedTuple):
    """A system call that the kernel or a sandbox may refuse.

    Attributes:
        purpose: What it is made for.
        instead: What happens without it; empty if a tier cannot be opened without it.
    """

    purpose: str
    instead: str = ""


CALLS: Final[Mapping[str, SystemCall]] = {
    "openat2": SystemCall(
        "open a file below `root_dir` without following links",
        "each folder on the way is opened separately",
    ),
    "renameat2": SystemCall(
        "publish a file of `fs` without replacing another",
        "the name is looked up first, and then replaced",
    ),
    "fallocate": SystemCall(
        "allocate the segments of `slab`, and the files of `fs`",
        "`slab` writes zeros; `fs` allocates while it writes. Shared memory of several processes "
        "cannot be created",
    ),
    "fsetxattr": SystemCall(
        "keep the checksums of `fs`",
        "blocks are stored without a checksum, with a warning; `verify: required` is refused at "
        "the start",
    ),
    "fgetxattr": SystemCall(
        "read the checksums of `fs`",
        "blocks count as stored without a checksum; `verify: required` is refused at the start",
    ),
    "fchmod": SystemCall(
        "give new files the permissions of their directory",
        "the umask applies; `status_socket` is refused at the start",
    ),
    "fchown": SystemCall("give new files the group of their directory", "they keep their own"),
    "utimensat": SystemCall(
        "renew the age of the files by which writers of `fs` are known",
        "a byte of the file is written again",
    ),
    "statfs": SystemCall("know the size of a filesystem", "its size is unknown; nothing is warned"),
    "fstatfs": SystemCall("know the free space of a filesystem", "it is unknown"),
    "sched_getaffinity": SystemCall(
        "choose the number of I/O threads", "the number of all processors counts"
    ),
    "eventfd2": SystemCall("wake the loop from native threads", "Python threads move the blocks"),
    "memfd_create": SystemCall(
        "check the native engine; the buffer of `mooncake`",
        "Python threads move the blocks; `mooncake` is refused at the start",
    ),
    "madvise": SystemCall("use huge pages; free shared pages early", "neither happens"),
    "prctl": SystemCall("end helper processes with their parent", "they notice it a little later"),
    "flock": SystemCall("lock a `slab` store, the count of an `fs` tier with `capacity_bytes`"),
    "fsync": SystemCall("sync the folders of `slab`; files of `fs` with `fsync`"),
    "fdatasync": SystemCall("sync the journal of `slab`"),
}


class RefusedCallError(OSError):
    """The system refuses a call that a tier needs."""


@contextlib.contextmanager
def naming_refusal(call: str) -> Iterator[None]:
    """Convert the error of a refused call to one that names the call, a key of `CALLS`."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise RefusedCallError(error.errno, f"{call}: {error.strerror}") from error
