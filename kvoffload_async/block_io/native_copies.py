"""Copies from memory to memory by native threads, for a thread that waits for them."""

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
"""Batches under way."""

_CLOSE_S: Final = 5.0
"""For threads that have nothing to do."""


class Copies(NamedTuple):
    """A batch.

    Attributes:
        target: Where bytes are written to.
        source: Where they come from.
        parts: Offset in the target, offset in the source, bytes: int64 `[n, 3]`.
    """

    target: Memory
    source: Memory
    parts: npt.NDArray[np.int64]


class NativeCopies:
    """Copies by a native engine of its own. Thread: one at a time."""

    def __init__(self) -> None:
        """Start two threads: one alone does not use all of the memory's bandwidth.

        Raises:
            OSError: There are no more threads.
        """
        self._engine = Engine(1, 1, 0, _QUEUED, addresses(), name="kvoffload-copy")
        self._ends = select.poll()
        self._ends.register(self._engine.fd, select.POLLIN)

    def map(self, view: npt.NDArray[np.uint8]) -> Memory:
        """Return contiguous memory, which is held until it is released."""
        return self._engine.map(view.data, view.nbytes, view.nbytes)

    def copy(self, batches: Iterable[Copies]) -> None:
        """Copy batches, in no order; returns when no byte moves any more.

        It has no deadline of its own: what copies memory ends, and who waits for it has one.

        Raises:
            ValueError: A part is not within the memories; others may have been copied.
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
        """End the threads; nothing may be under way."""
        self._ends.unregister(self._engine.fd)
        self._engine.close(_CLOSE_S)

    def _ended(self) -> set[int]:
        self._ends.poll()
        return {ticket for ticket, _ in self._engine.take()}
