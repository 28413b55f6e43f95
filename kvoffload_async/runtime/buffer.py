"""The primary tier's memory: one mapping with a row per slot."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable
from functools import partial

import numpy as np

from kvoffload_async.errors import ConfigError

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE


def row_stride_bytes(block_bytes: int, num_workers: int = 1, page_bytes: int = PAGE_BYTES) -> int:
    """Return the bytes of one row: a cell per worker, padded to whole pages."""
    return -(-block_bytes * num_workers // page_bytes) * page_bytes


def rows_within(size_bytes: int, block_bytes: int, num_workers: int = 1) -> tuple[int, int]:
    """Return the number of rows that fit into `cpu_bytes_to_use`, and the bytes of a row.

    Raises:
        ConfigError: No row fits.
    """
    stride_bytes = row_stride_bytes(block_bytes, num_workers)
    if not 0 < stride_bytes <= size_bytes:
        raise ConfigError(
            f"cpu_bytes_to_use: {size_bytes} bytes hold no block; one takes {stride_bytes} bytes "
            "(block_bytes * num_workers, in whole pages)"
        )
    return size_bytes // stride_bytes, stride_bytes


class Pages(mmap.mmap):
    """A memory mapping that tracks the components copying to or from it; see `abc.pages`.

    Attributes:
        when_idle: Called when the last hold is released. Thread: the releasing one.
    """

    when_idle: Callable[[], object] | None = None

    @property
    def holders(self) -> list[str]:
        """Names of the components that copy to or from the memory now."""
        return list(self._holders().values())

    def hold(self, who: str) -> Callable[[], None]:
        """Mark the memory as in use by a component; see `hold_pages`."""
        token = object()
        self._holders()[token] = who

        def release() -> None:
            was_held = self._holders().pop(token, None) is not None
            if was_held and not self._holders() and self.when_idle is not None:
                self.when_idle()

        return release

    def _holders(self) -> dict[object, str]:
        # mmap objects are initialised only in __new__.
        return self.__dict__.setdefault("holders_by_token", {})  # type: ignore[no-any-return]


class PrimaryBuffer:
    """The primary's memory; `view` has shape `[num_slots, stride_bytes]` uint8."""

    def __init__(
        self,
        num_slots: int,
        stride_bytes: int,
        *,
        prefault: bool = True,
        mapping: Pages | None = None,
    ) -> None:
        """Map anonymous memory and, with `prefault`, touch its pages: first touches are slow.

        Args:
            num_slots: Number of rows.
            stride_bytes: Bytes of a row.
            prefault: Whether to touch the pages.
            mapping: Existing memory to use instead, which begins with the rows; ownership passes to
                this object.

        Raises:
            ConfigError: The memory cannot be allocated.
        """
        size_bytes = num_slots * stride_bytes
        self._map = map_anonymous(size_bytes, prefault=prefault) if mapping is None else mapping
        self.view = memoryview(self._map)[:size_bytes].cast("B", (num_slots, stride_bytes))
        self.stride_bytes = stride_bytes
        self._released = False

    def release(self, *, is_idle: bool = True) -> bool:
        """Return the memory to the system; idempotent. Call it when no job runs.

        While transports hold it, it stays mapped until the last hold is released. If other views
        exist, its pages are freed but the address range stays mapped, with a warning.

        Args:
            is_idle: Whether no holder of a view is copying.

        Returns:
            Whether it is unmapped.
        """
        if self._released:
            return True
        # Set before checking, so that a concurrent release will call it.
        self._map.when_idle = partial(self.release, is_idle=is_idle)
        if self._map.holders:
            logger.warning(
                "the primary buffer stays mapped until it is no longer in use by %s",
                ", ".join(self._map.holders),
            )
            return False
        self._map.when_idle = None
        try:
            self._unmap(is_idle=is_idle)
        except BufferError:
            self._give_pages_back(is_idle=is_idle)
            return False
        self._released = True
        return True

    def _unmap(self, *, is_idle: bool) -> None:
        """Unmap the memory.

        Raises:
            BufferError: There is a view of it.
        """
        self.view.release()
        self._map.close()

    def _give_pages_back(self, *, is_idle: bool) -> None:
        what = "its pages too, because a load or store is still running"
        if is_idle:
            what = "its pages were freed"
            try:
                self._map.madvise(mmap.MADV_DONTNEED)
            except OSError as error:  # for example, locked memory
                what = f"its pages could not be freed ({error})"
        logger.warning(
            "the primary buffer is still in use, because there are views of it, and its %d bytes "
            "of addresses stay mapped: %s; release views before closing",
            len(self._map),
            what,
        )


def map_anonymous(size_bytes: int, *, prefault: bool) -> Pages:
    """Map private memory, with huge pages if available.

    With small pages, copying or hashing whole rows is limited by TLB misses; shared anonymous
    memory has no huge pages.
    """
    try:
        mapping = Pages(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"cpu_bytes_to_use: cannot map {size_bytes} bytes of memory ({error}); use less"
        ) from error
    with contextlib.suppress(OSError):  # not supported by the kernel
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if prefault:
        np.frombuffer(mapping, dtype=np.uint8)[::PAGE_BYTES] = 0
    return mapping
