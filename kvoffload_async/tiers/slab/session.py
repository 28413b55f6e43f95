"""The session: whether the store was closed as it should be, by a process of which boot.

A process that is killed loses nothing that it has written: the page cache has it. A machine that
goes down may lose any of it, so what the journal then says of slots need not be what is in them.
The file also keeps, from one session to the next, when each block was last used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload_async.tiers.files.ops import FileOps, write_all

Uses = npt.NDArray[np.uint32]

_MAGIC: Final = b"KVSLABO1"
_HEADER = struct.Struct("<8sIIQQ40s")
_CHECK = struct.Struct("<Q")
_HEADER_BYTES: Final = 128
_SEGMENT = struct.Struct("<qq")

_CLOSED: Final = 1
_SYNCED: Final = 2


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of the last process that had the store open.

    Attributes:
        boot_id: Of the kernel that it ran on; empty if that cannot be read.
        sequence: The journal's highest number when this was written.
        is_closed: Whether the process closed the store.
        is_synced: Whether, then, everything was on the device.
        uses: Segment -> the tick of each slot's last use, when the store was last closed.
    """

    boot_id: str = ""
    sequence: int = 0
    is_closed: bool = False
    is_synced: bool = False
    uses: Mapping[int, Uses] = field(default_factory=dict)

    def is_trusted(self, boot_id: str, sequence: int) -> bool:
        """Tell whether what a journal up to this number says of slots is what is in them."""
        if sequence < self.sequence:
            return False  # its end is gone
        if self.boot_id == boot_id:
            return True
        return self.is_closed and self.is_synced and sequence == self.sequence

    def encode(self, seed: int) -> tuple[bytes, bytes]:
        """Return the header, and what follows it."""
        body = b"".join(
            _SEGMENT.pack(number, len(uses)) + uses.astype("<u4").tobytes()
            for number, uses in self.uses.items()
        )
        flags = _CLOSED * self.is_closed | _SYNCED * self.is_synced
        check = xxhash.xxh3_64_intdigest(body, seed)
        boot = self.boot_id.encode()[:40]
        fields = _HEADER.pack(_MAGIC, flags, len(self.uses), self.sequence, check, boot)
        header = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields, seed))
        return header.ljust(_HEADER_BYTES, b"\0"), body

    @classmethod
    def decode(cls, content: bytes | memoryview, seed: int) -> Self:
        """Return what a file says; one that is damaged is of no boot."""
        if len(content) < _HEADER_BYTES:
            return cls()
        magic, flags, num_segments, sequence, body_check, boot = _HEADER.unpack_from(content)
        (check,) = _CHECK.unpack_from(content, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(content[: _HEADER.size], seed):
            return cls()
        uses = _uses(memoryview(content)[_HEADER_BYTES:], num_segments, body_check, seed)
        return cls(
            boot.rstrip(b"\0").decode(errors="replace"),
            sequence,
            bool(flags & _CLOSED),
            bool(flags & _SYNCED),
            uses,
        )


def write_header(ops: FileOps, fd: int, session: Session, seed: int) -> None:
    """Write a session over the one in a file, whose uses stay; it is on the device then.

    Raises:
        OSError: It is not.
    """
    header, _ = session.encode(seed)
    write_all(ops, fd, header, 0)
    ops.fdatasync(fd)


def write_session(ops: FileOps, fd: int, session: Session, seed: int, *, sync: bool) -> None:
    """Write a session over the one in a file, its header last; raises OSError."""
    header, body = session.encode(seed)
    write_all(ops, fd, body, len(header))
    write_all(ops, fd, header, 0)
    if sync:
        ops.fdatasync(fd)


def _uses(body: memoryview, num_segments: int, check: int, seed: int) -> dict[int, Uses]:
    """Return the ticks in a file; none if they are not those that were written."""
    uses: dict[int, Uses] = {}
    end = 0
    for _ in range(num_segments):
        if end + _SEGMENT.size > len(body):
            return {}
        number, slots = _SEGMENT.unpack_from(body, end)
        start = end + _SEGMENT.size
        end = start + 4 * slots
        if not slots >= 0 or end > len(body):
            return {}
        uses[number] = np.frombuffer(body[start:end], dtype="<u4")
    return uses if xxhash.xxh3_64_intdigest(body[:end], seed) == check else {}
