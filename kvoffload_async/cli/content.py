"""What a block contains: bytes that follow from its id, so that any mix-up shows.

Word i (8 bytes) of block b is `mix(b) + i * odd`, modulo 2**64. Every word depends on the id and on
its position: a block in the wrong slot, one that is shifted, half copied, or left from before all
differ from what is expected.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvoffload_async.types import BlockIds

BlockNames = npt.NDArray[np.uint64]
"""Block ids of a trace, shape `[num_blocks]`. (`BlockIds` are slots.)"""

_Words = npt.NDArray[np.uint64]

_WORD_BYTES = 8
_SCRATCH_BYTES = 512 * 1024
"""A batch that stays in a core's cache while it is computed and compared."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class BlockContent:
    """Writes and verifies blocks in the primary tier's slots.

    Exports the primary's memory until `close`.
    """

    def __init__(self, kv_view: memoryview) -> None:
        """Look at the buffer, shape `[num_slots, slot_bytes]` uint8; whole words a slot."""
        self._rows: _Words = np.asarray(kv_view).view(np.uint64)
        num_words = self._rows.shape[1]
        self._ramp: _Words = np.arange(num_words, dtype=np.uint64) * _GAMMA
        num_rows = max(1, _SCRATCH_BYTES // (num_words * _WORD_BYTES))
        self._scratch: _Words = np.empty((num_rows, num_words), dtype=np.uint64)

    def fill(self, names: BlockNames, slots: BlockIds) -> None:
        """Write blocks into slots, parallel to their names."""
        for first, scratch in self._batches(len(names)):
            last = first + len(scratch)
            np.add(_mix(names[first:last])[:, None], self._ramp, out=scratch)
            self._rows[slots[first:last]] = scratch

    def count_wrong(self, names: BlockNames, slots: BlockIds) -> int:
        """Return how many of the slots do not hold exactly the block of that name."""
        wrong = 0
        for first, scratch in self._batches(len(names)):
            last = first + len(scratch)
            np.take(self._rows, slots[first:last], axis=0, out=scratch, mode="clip")
            np.subtract(scratch, self._ramp, out=scratch)
            same = (scratch == _mix(names[first:last])[:, None]).all(axis=1)
            wrong += len(same) - int(np.count_nonzero(same))
        return wrong

    def close(self) -> None:
        """Let go of the buffer."""
        self._rows = np.empty((0, 0), dtype=np.uint64)

    def _batches(self, num_blocks: int) -> Iterator[tuple[int, _Words]]:
        """Cut blocks into (first, room for this many words) that fit into the scratch memory."""
        size = len(self._scratch)
        for first in range(0, num_blocks, size):
            yield first, self._scratch[: min(size, num_blocks - first)]


def _mix(names: BlockNames) -> _Words:
    """Scatter ids over all 64 bits; different ids stay different.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    z = (names + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
