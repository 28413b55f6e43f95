"""Blocking memory-to-memory copies by native threads."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvoffload_async.block_io.engine import PART_BYTES, Engine, Memory
from kvoffload_async.block_io.hashes import addresses

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Copies", "Memory", "NativeCopies"]

_QUEUED: Final = 1024
"""Maximum number of batches in flight."""

_CLOSE_S: Final = 5.0
"""Timeout for idle threads to end, in seconds."""


class Copies(NamedTuple):
    """A batch of copies between two memories.

    Attributes:
        target: Memory to write to.
        source: Memory to read from.
        parts: See `Engine.copies`; int64 `[n, 6]`.
    """

    target: Memory
    source: Memory
    parts: npt.NDArray[np.int64]


class NativeCopies:
    """Copies memory with its own native engine. Not thread-safe."""

    def __init__(self) -> None:
        """Start two threads: one does not use the full memory bandwidth.

        Raises:
            OSError: Threads cannot be started.
        """
        self._engine = Engine(1, 1, 0, _QUEUED, addresses(), name="kvoffload-copy")
        self._ends = select.poll()
        self._ends.register(self._engine.fd, select.POLLIN)

    def map(self, view: npt.NDArray[np.uint8]) -> Memory:
        """Return contiguous memory as a `Memory`, which holds it until it is released."""
        return self._engine.map(view.data, view.nbytes, view.nbytes)

    def copy(self, batches: Iterable[Copies]) -> None:
        """Execute batches of copies, in any order; blocks until all copying has ended.

        Has no timeout: memory copies always end, and the caller of the transfer has a deadline.

        Raises:
            ValueError: A part is outside the memories; others may have been copied.
        """
        waiting: set[int] = set()
        try:
            for target, source, parts in batches:
                while len(waiting) == _QUEUED:
                    waiting -= self._ended()
                largest = (parts[:, 2] * parts[:, 3]).max(initial=0)
                is_cut = PART_BYTES < largest <= target.num_bytes  # what is larger is refused
                packed = _cut(parts) if is_cut else parts
                waiting.add(self._engine.copies(target, source, packed.data))
        finally:
            while waiting:
                waiting -= self._ended()

    def close(self) -> None:
        """End the threads; no copy may be running."""
        self._ends.unregister(self._engine.fd)
        self._engine.close(_CLOSE_S)

    def _ended(self) -> set[int]:
        self._ends.poll()
        return {ticket for ticket, _ in self._engine.take()}


def _cut(parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Split copies into copies of at most `PART_BYTES`, for several threads."""
    most = PART_BYTES
    cut = [
        (
            target + first * target_stride + at,
            source + first * source_stride + at,
            min(size - at, most),
            min(count - first, most // size or 1),
            target_stride,
            source_stride,
        )
        for target, source, size, count, target_stride, source_stride in parts.tolist()
        for first in range(0, count, most // (size or 1) or 1)
        for at in range(0, size, most)
    ]
    return np.array(cut, dtype=np.int64)
