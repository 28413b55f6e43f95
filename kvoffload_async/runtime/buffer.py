"""The primary tier's memory: one mapping, a row a slot."""

from __future__ import annotations

import contextlib
import logging
import mmap

import numpy as np

from kvoffload_async.errors import ConfigError

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE


def row_stride_bytes(block_bytes: int, num_workers: int = 1, page_bytes: int = PAGE_BYTES) -> int:
    """Return the bytes of one row: a cell a worker, padded to whole pages."""
    return -(-block_bytes * num_workers // page_bytes) * page_bytes


class PrimaryBuffer:
    """`num_slots` rows of `stride_bytes`; `view` has shape `[num_slots, stride_bytes]` uint8."""

    def __init__(
        self,
        num_slots: int,
        stride_bytes: int,
        *,
        prefault: bool = True,
        mapping: mmap.mmap | None = None,
    ) -> None:
        """Map anonymous memory and, with `prefault`, touch it: first touches are slow.

        Args:
            num_slots: Rows.
            stride_bytes: Bytes of a row.
            prefault: Whether to touch it.
            mapping: Memory that begins with the rows, to use instead; owned from now on.

        Raises:
            ConfigError: The system does not give that much memory.
        """
        size_bytes = num_slots * stride_bytes
        self._map = _map_anonymous(size_bytes, prefault=prefault) if mapping is None else mapping
        self.view = memoryview(self._map)[:size_bytes].cast("B", (num_slots, stride_bytes))
        self.stride_bytes = stride_bytes
        self._released = False

    def release(self) -> bool:
        """Unmap the memory; idempotent.

        Returns:
            Whether it is unmapped. While somebody still exports it, it stays mapped, with a
            warning: memory is never taken away under a copy.
        """
        if self._released:
            return True
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            logger.warning("the primary buffer is still in use and stays mapped")
            return False
        self._released = True
        return True


def _map_anonymous(size_bytes: int, *, prefault: bool) -> mmap.mmap:
    """Map private memory, in huge pages where the system has them.

    With small ones, whoever copies or hashes whole rows waits for the TLB; shared anonymous memory
    has no others.
    """
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"cpu_bytes_to_use: cannot map {size_bytes} bytes of memory ({error}); use less"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if prefault:
        np.frombuffer(mapping, dtype=np.uint8)[::PAGE_BYTES] = 0
    return mapping
