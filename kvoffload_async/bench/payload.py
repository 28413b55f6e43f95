"""The bytes that are stored and loaded: the rows that tiers work on, and what must be in them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvoffload_async.runtime.buffer import PrimaryBuffer

Bytes = npt.NDArray[np.uint8]


class Payload:
    """Rows as a primary tier has them, beside a copy that nobody writes; a context manager.

    Attributes:
        view: The rows, shape `[num_rows, row_bytes]`, as a tier gets them.
        bytes: The same in one dimension, and `flat` as an array.
        truth: What stored rows hold and loaded ones must hold, as bytes in a row: random, so that
            neither compression nor deduplication helps.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        """Make both.

        Raises:
            ConfigError: The system does not give that much memory.
        """
        self._row_bytes = row_bytes
        self._buffers = [PrimaryBuffer(num_rows, row_bytes) for _ in range(2)]
        work, truth = self._buffers
        self.view: memoryview = work.view
        self.bytes = self.view.cast("B")
        self.flat: Bytes = np.asarray(self.bytes)
        self.truth: Bytes = np.asarray(truth.view).reshape(-1)
        words = self.truth.view(np.uint64)
        words[:] = np.random.default_rng().integers(2**64, size=words.size, dtype=np.uint64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        nothing: Any = np.empty(0, dtype=np.uint8)
        self.flat = self.truth = nothing  # they would keep the memory
        self.bytes.release()
        for buffer in self._buffers:
            buffer.release()

    def fill(self) -> None:
        """Put into the rows what is to be stored."""
        np.copyto(self.flat, self.truth)

    def wipe(self) -> None:
        """Empty the rows, so that only what is loaded can be right."""
        self.flat.fill(0)

    def wrong_rows(self, num_rows: int) -> int:
        """Return how many of the first rows do not hold what they must."""
        size = self._row_bytes
        return sum(
            not np.array_equal(self.flat[start : start + size], self.truth[start : start + size])
            for start in range(0, num_rows * size, size)
        )
