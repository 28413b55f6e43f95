"""The primary's rows as buffers: what is moved in one vectored call, and hashed one by one.

Where a slot is longer than a row, a pad follows each row, so that a run of slots is still one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

_ALIGNMENT_BYTES: Final = 4096
"""What O_DIRECT asks of memory, at most."""


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
        self.is_aligned = not self._pad and _address_of(self._flat) % _ALIGNMENT_BYTES == 0

    def each(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return rows one by one."""
        flat, size = self._flat, self.row_bytes
        return [flat[number * size : (number + 1) * size] for number in numbers]

    def padded(self, rows: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return what as many slots are written from, or read into."""
        if not self._pad:
            return rows
        return [buffer for row in rows for buffer in (row, self._pad)]

    def release(self) -> None:
        """Let go of the primary's memory."""
        self._flat.release()


def _address_of(view: memoryview) -> int:
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
