"""The primary's rows as buffers for vectored calls.

Rows that lie behind each other become one buffer, unless a slot is longer than a row: then a pad
follows each row, so that a run of slots is still one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvoffload_async.tiers.slab.budget import PAGE_BYTES
from kvoffload_async.tiers.slab.runs import Run, spans


class Rows:
    """The primary's buffer, row by row. Thread: any, until `release`.

    Attributes:
        row_bytes: Bytes of a row.
        slot_bytes: Bytes of a slot.
        is_aligned: Whether rows may be given to O_DIRECT as they are.
    """

    def __init__(self, kv_view: memoryview, slot_bytes: int) -> None:
        self.row_bytes = kv_view.nbytes // len(kv_view)
        self.slot_bytes = slot_bytes
        self._flat = kv_view.cast("B", (kv_view.nbytes,))
        self._pad = memoryview(bytearray(slot_bytes - self.row_bytes))
        self.is_aligned = not self._pad and _address_of(self._flat) % PAGE_BYTES == 0

    def row(self, number: int) -> memoryview:
        """Return one row."""
        start = number * self.row_bytes
        return self._flat[start : start + self.row_bytes]

    def each(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return rows one by one."""
        flat, size = self._flat, self.row_bytes
        return [flat[number * size : (number + 1) * size] for number in numbers]

    def buffers(self, rows: Sequence[int], run: Run) -> list[memoryview]:
        """Return what a run's slots are written from, or read into; `rows` as in the run."""
        size = self.row_bytes
        if not self._pad:
            return [
                self._flat[first * size : (first + count) * size]
                for first, count in spans(rows, run.start, run.count)
            ]
        buffers: list[memoryview] = []
        for number in rows[run.start : run.start + run.count]:
            buffers += (self.row(number), self._pad)
        return buffers

    def release(self) -> None:
        """Let go of the primary's memory."""
        self._flat.release()


def _address_of(view: memoryview) -> int:
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
