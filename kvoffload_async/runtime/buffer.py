"""The primary tier's memory: one mapping, a row a slot."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable
from functools import partial

import numpy as np

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.holders import describe_holders

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE


def row_stride_bytes(block_bytes: int, num_workers: int = 1, page_bytes: int = PAGE_BYTES) -> int:
    """Return the bytes of one row: a cell a worker, padded to whole pages."""
    return -(-block_bytes * num_workers // page_bytes) * page_bytes


class Pages(mmap.mmap):
    """A mapping that knows who copies to or from it; see `abc.pages`.

    Attributes:
        when_idle: Called when the last holder lets go. Thread: the holder's.
    """

    when_idle: Callable[[], object] | None = None

    @property
    def holders(self) -> list[str]:
        """Who holds it now."""
        return list(self._holders().values())

    def hold(self, who: str) -> Callable[[], None]:
        """See `hold_pages`."""
        token = object()
        self._holders()[token] = who

        def release() -> None:
            was_held = self._holders().pop(token, None) is not None
            if was_held and not self._holders() and self.when_idle is not None:
                self.when_idle()

        return release

    def _holders(self) -> dict[object, str]:
        # mmap makes its objects in __new__ alone, with arguments that no __init__ should repeat.
        return self.__dict__.setdefault("holders_by_token", {})  # type: ignore[no-any-return]


class PrimaryBuffer:
    """`num_slots` rows of `stride_bytes`; `view` has shape `[num_slots, stride_bytes]` uint8."""

    def __init__(
        self,
        num_slots: int,
        stride_bytes: int,
        *,
        prefault: bool = True,
        mapping: Pages | None = None,
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

    def release(self, *, is_idle: bool = True) -> bool:
        """Give the memory back to the system; idempotent. To be called when no job runs.

        While a transport holds it, it stays as it is until the last one lets go: memory is never
        taken away under a copy. While somebody else has a view, its pages go and the range of
        addresses stays, with a warning that names them.

        Args:
            is_idle: Whether it is sure that whoever has a view does not copy.

        Returns:
            Whether it is unmapped.
        """
        if self._released:
            return True
        # Before asking: who lets go in between will call it.
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
            BufferError: Somebody has a view of it.
        """
        self.view.release()
        self._map.close()

    def _give_pages_back(self, *, is_idle: bool) -> None:
        what = "its pages too, as a load or a store has not ended"
        if is_idle:
            what = "its pages were given back"
            try:
                self._map.madvise(mmap.MADV_DONTNEED)
            except OSError as error:  # locked, say
                what = f"its pages could not be given back ({error})"
        if not logger.isEnabledFor(logging.WARNING):
            return  # looking for the holders takes passes over every object of the process
        logger.warning(
            "the primary buffer is still in use and its %d bytes of addresses stay mapped: %s; "
            "views of it are held by %s",
            len(self._map),
            what,
            describe_holders(self._map, ignored=(self, self.__dict__)),
        )


def _map_anonymous(size_bytes: int, *, prefault: bool) -> Pages:
    """Map private memory, in huge pages where the system has them.

    With small ones, whoever copies or hashes whole rows waits for the TLB; shared anonymous memory
    has no others.
    """
    try:
        mapping = Pages(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"cpu_bytes_to_use: cannot map {size_bytes} bytes of memory ({error}); use less"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if prefault:
        np.frombuffer(mapping, dtype=np.uint8)[::PAGE_BYTES] = 0
    return mapping
