"""Blocking memory-to-memory copies by native threads."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvoffload_async.block_io.engine import Engine, Memory
from kvoffload_async.block_io.hashes import addresses

if TYPE_CHECKING:
    import numpy as np
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
                waiting.add(self._engine.copies(target, source, parts.data))
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
