"""Memory shared between the engine and a helper process.

The helper registers it with the library, so that anyone with access to the library's ports can read
and modify it at any time. Therefore data is copied out before it is verified.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from typing import Final, NamedTuple

import numpy as np

from kvoffload_async.errors import ConfigError
from kvoffload_async.system_calls import REMEDY, RefusedCallError, naming_refusal
from kvoffload_async.tiers.remote.client import Bytes

HEAD_BYTES: Final = 256
"""Maximum bytes of a header, including the key."""

_ALIGNMENT: Final = 64
_DIRECTIONS: Final = 2
_MOST_PARTS: Final = 4
_MOST_BLOCKS: Final = 256
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""File seals that prevent resizing, so that the memory stays valid during a copy."""


class Geometry(NamedTuple):
    """The division of the shared buffer into parts and cells.

    Attributes:
        cell_bytes: Bytes of a cell, for a header and a row.
        blocks: Cells of a part; one call uses one part.
        parts: Number of parts per direction.
    """

    cell_bytes: int
    blocks: int
    parts: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer that are used."""
        return self.cell_bytes * self.blocks * self.parts * _DIRECTIONS

    @classmethod
    def of(cls, buffer_bytes: int, row_bytes: int) -> Geometry:
        """Divide a buffer of `buffer_bytes` into cells for rows of `row_bytes`.

        Raises:
            ConfigError: It is too small for one block per direction.
        """
        cell_bytes = HEAD_BYTES + -(-row_bytes // _ALIGNMENT) * _ALIGNMENT
        cells = buffer_bytes // cell_bytes // _DIRECTIONS
        if not cells:
            raise ConfigError(
                f"buffer_bytes: {buffer_bytes} is not valid; one block to store and one to load "
                f"need {_DIRECTIONS * cell_bytes}: give at least that"
            )
        parts = min(_MOST_PARTS, cells)
        return cls(cell_bytes, min(_MOST_BLOCKS, cells // parts), parts)


class SharedCells:
    """Memory cells for blocks in transfer; a value is a row with its header directly before it.

    Attributes:
        file: Descriptor of the memory, until `close_file`.
        num_bytes: Size of the memory.
        geometry: Division of the memory.
    """

    def __init__(self, geometry: Geometry, row_bytes: int) -> None:
        """Allocate the memory.

        Raises:
            ConfigError: It cannot be allocated.
        """
        self.geometry = geometry
        self.num_bytes = geometry.num_bytes
        self._row_bytes = row_bytes
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            with naming_refusal("memfd_create"):
                self.file = os.memfd_create("kvoffload-mooncake", flags)
        except RefusedCallError as error:
            raise ConfigError(f"type: mooncake cannot be used here ({error}); {REMEDY}") from error
        try:
            os.ftruncate(self.file, self.num_bytes)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(self.file, self.num_bytes)
        except OSError as error:
            os.close(self.file)
            raise ConfigError(
                f"buffer_bytes: {self.num_bytes} bytes cannot be allocated ({error}); use less"
            ) from error
        cells = np.frombuffer(memory, dtype=np.uint8)
        self._cells: Bytes = cells.reshape(-1, geometry.cell_bytes)

    def parts(self, direction: int) -> asyncio.Queue[int]:
        """Return a queue of the free parts of a direction (0 or 1), each by its first cell."""
        blocks, parts = self.geometry.blocks, self.geometry.parts
        free: asyncio.Queue[int] = asyncio.LifoQueue()
        for part in range(direction * parts, (direction + 1) * parts):
            free.put_nowait(part * blocks)
        return free

    def at(self, cell: int, header_bytes: int) -> int:
        """Return the offset in the buffer of a cell's value whose header has `header_bytes`."""
        return cell * self.geometry.cell_bytes + HEAD_BYTES - header_bytes

    def value(self, cell: int, header_bytes: int) -> Bytes:
        """Return the memory of a cell's value whose header has `header_bytes`."""
        memory: Bytes = self._cells[cell, HEAD_BYTES - header_bytes : HEAD_BYTES + self._row_bytes]
        return memory

    def close_file(self) -> None:
        """Close the file descriptor; idempotent. The memory is freed with its last mapping."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
