"""A primary whose rows are the memory of a host engine, plus rows allocated by this package.

A tier copies between its storage and rows of one primary, which lie at equal distances. If a host
registers its memory, each of its objects that lies at a multiple of the row's size is a row itself,
and is transferred without another copy. Everything else is copied through own rows, by native
threads that do not hold the GIL.

The primary's view spans both memories. Its rows between them belong to neither and must not be
used; so row numbers come only from `row_of` and `take`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload_async.block_io.choice import create_copies
from kvoffload_async.errors import StateError, naming_shortage
from kvoffload_async.runtime.buffer import PAGE_BYTES, map_anonymous
from kvoffload_async.types import BlockIds, as_block_ids

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_copies import Memory

_MAX_ROWS: Final = 2**31 - 1
_READ_WRITE: Final = 0x200  # PyBUF_WRITE

Numbers = npt.NDArray[np.int64]

_view_at = ctypes.PYFUNCTYPE(
    *(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int),
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


class HostMemory(NamedTuple):
    """An address range of memory that a host engine has registered.

    Attributes:
        address: The first byte.
        num_bytes: Its length; parts that the host has not allocated yet are not accessed.
    """

    address: int
    num_bytes: int


class HostRows:
    """Rows of equal size in a host engine's memory and in memory of this package.

    Thread-safe, except `close`.

    Attributes:
        view: The primary for tiers, shape `[num_rows, row_bytes]`.
        row_bytes: Bytes of a row.
        host: The host's memory; None if there is none, or if it is out of reach of row numbers.
        num_own: Number of own rows.
    """

    def __init__(self, row_bytes: int, num_own: int, host: HostMemory | None = None) -> None:
        """Map memory for this package's own rows.

        Args:
            row_bytes: Bytes of a row.
            num_own: Number of own rows, at least 1.
            host: The host's memory.

        Raises:
            ConfigError: The memory cannot be allocated.
        """
        # A row more, because the own rows are at multiples of the size from the host's first byte.
        own_bytes = (num_own + 1) * row_bytes
        self._map = map_anonymous(-(-own_bytes // PAGE_BYTES) * PAGE_BYTES, prefault=False)
        own = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        first, end = own, own + num_own * row_bytes
        if host is not None:
            first = host.address - max(0, (host.address - own) // row_bytes) * row_bytes
            end = max(own + own_bytes, host.address + host.num_bytes)
            if (end - first) // row_bytes > _MAX_ROWS:
                host, first, end = None, own, own + num_own * row_bytes
        self.host = host
        self.row_bytes = row_bytes
        self.num_own = num_own
        self._first = first
        num_rows = (end - first) // row_bytes
        flat: memoryview = _view_at(first, num_rows * row_bytes, _READ_WRITE)
        self.view = flat.cast("B", (num_rows, row_bytes))
        first_own = -(-(own - first) // row_bytes)
        self._lock = threading.Lock()
        self._free = list(range(first_own + num_own - 1, first_own - 1, -1))

    def row_of(self, address: int) -> int | None:
        """Return the row at an address of the host's memory; None if no whole row begins there."""
        host = self.host
        if host is None:
            return None
        row, rest = divmod(address - host.address, self.row_bytes)
        if rest or row < 0 or (row + 1) * self.row_bytes > host.num_bytes:
            return None
        return row + (host.address - self._first) // self.row_bytes

    def take(self, most: int) -> BlockIds:
        """Take at most `most` free rows of this package's memory. Non-blocking."""
        with self._lock:
            first = max(0, len(self._free) - most)
            taken = self._free[first:]
            del self._free[first:]
        return as_block_ids(taken[::-1])

    def give_back(self, rows: BlockIds) -> None:
        """Give back rows taken with `take`, which no copy accesses any more."""
        with self._lock:
            self._free += rows.tolist()

    @property
    def num_free(self) -> int:
        """Number of free rows of this package's memory."""
        return len(self._free)

    def close(self, *, is_idle: bool = True) -> None:
        """Unmap this package's memory, unless a copy may still access it."""
        self.view.release()
        if is_idle:
            self._map.close()


class RowCopies:
    """Copies data between rows and arbitrary memory ranges of this process.

    Not thread-safe: use one for each thread. Small copies and those without native code hold the
    GIL.
    """

    def __init__(self, rows: HostRows) -> None:
        """Start native threads, if native code is used.

        Raises:
            TierUnavailableError: Threads cannot be started.
        """
        with naming_shortage("the threads for copies cannot be started"):
            self._copies = create_copies()
        self._rows = rows
        self._flat = rows.view.cast("B", (rows.view.nbytes,))

    def gather(self, rows: BlockIds, addresses: Numbers, sizes: Numbers) -> None:
        """Fill each row with its memory pieces, concatenated; blocks until all are copied.

        Args:
            rows: The rows, `[n]`.
            addresses: Address of each piece, `[n, pieces of a row]`.
            sizes: Its bytes, likewise; those of a row are at most its size together.
        """
        self._copy(rows, addresses, sizes, is_gather=True)

    def scatter(self, rows: BlockIds, addresses: Numbers, sizes: Numbers) -> None:
        """Copy each row to its memory pieces, the reverse of `gather`."""
        self._copy(rows, addresses, sizes, is_gather=False)

    def close(self) -> None:
        """End the copy threads."""
        self._flat.release()
        if self._copies is not None:
            self._copies.close()

    def _copy(self, rows: BlockIds, addresses: Numbers, sizes: Numbers, *, is_gather: bool) -> None:
        if not sizes.size:
            return
        if (sizes < 0).any() or (sizes.sum(axis=1) > self._rows.row_bytes).any():
            raise StateError(f"the pieces of a row exceed its {self._rows.row_bytes} bytes")
        offsets = sizes.cumsum(axis=1) - sizes
        in_rows = rows.astype(np.int64)[:, None] * self._rows.row_bytes + offsets
        first, end = int(addresses.min()), int((addresses + sizes).max())
        columns = [in_rows, addresses - first, sizes, np.ones_like(sizes)]
        pieces: memoryview = _view_at(first, end - first, _READ_WRITE)
        target, source = (self._flat, pieces) if is_gather else (pieces, self._flat)
        if not is_gather:
            columns[0], columns[1] = columns[1], columns[0]
        parts = np.zeros((sizes.size, 6), dtype=np.int64)
        parts[:, : len(columns)] = np.stack([c.ravel() for c in columns], axis=1)
        if self._copies is None:
            _copy_here(target, source, parts[:, :3].tolist())
            return
        from kvoffload_async.block_io.native_copies import Copies  # noqa: PLC0415 - may be missing

        memories: list[Memory] = [
            self._copies.map(np.frombuffer(view, np.uint8)) for view in (target, source)
        ]
        try:
            self._copies.copy([Copies(memories[0], memories[1], parts)])
        finally:
            for memory in memories:
                memory.release()


def _copy_here(
    target: memoryview, source: memoryview, parts: Iterable[tuple[int, int, int]]
) -> None:
    for to, begin, num_bytes in parts:
        target[to : to + num_bytes] = source[begin : begin + num_bytes]
