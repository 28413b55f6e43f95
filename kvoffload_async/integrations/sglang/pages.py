"""Pages of SGLang's host pool: their memory, and copies between pages and rows.

A page consists of pieces: with the layout `layer_first` K and V of each layer, with others fewer
and larger ones. A row contains the pieces of one page in the order in which the pool lists them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvoffload_async.abc.tier import Direction
from kvoffload_async.block_io.choice import create_copies
from kvoffload_async.errors import ClosedError, ConfigError, StateError

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_copies import Copies

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Locations of pages, one row per page and one column per piece.

    Attributes:
        buffers: Number of the pool's buffer.
        offsets: Offset in that buffer, in bytes.
    """

    buffers: Numbers
    offsets: Numbers

    def select(self, pages: Sequence[int]) -> Pieces:
        """Return the locations of some pages."""
        return Pieces(self.buffers[pages], self.offsets[pages])


class PoolPages:
    """The pages of one host pool.

    Attributes:
        page_bytes: Bytes of a page.
        piece_bytes: Bytes of each piece of a page.
        page_indices: Token indices that SGLang passes per page.
        buffers: The pool's memory, flat and ordered by address.
    """

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - SGLang's HostKVCache
        """Examine the pool.

        Raises:
            ConfigError: Its pages cannot be accessed.
        """
        self._name = type(pool).__name__
        if not callable(getattr(pool, "get_page_buffer_meta", None)):
            raise ConfigError(
                f"host pool {self._name}: it has no get_page_buffer_meta, which returns the "
                "addresses of pages, so it cannot be offloaded; use another storage backend"
            )
        self._addresses_of = pool.get_page_buffer_meta
        self.page_indices: int = getattr(pool, "logical_page_size", pool.page_size)
        try:
            addresses, sizes = self._addresses_of(torch.arange(self.page_indices)) or ((), ())
        except Exception as error:
            raise ConfigError(
                f"--hicache-mem-layout {pool.layout}: host pool {self._name} does not return the "
                f"addresses of its pages in this layout ({error}); use page_first or layer_first"
            ) from error
        if not addresses:
            raise ConfigError(
                f"host pool {self._name}: it has no memory of its own, because the model has "
                "several kinds of KV cache; such models are not supported"
            )
        self.piece_bytes = np.array(sizes, np.int64)
        self.page_bytes = int(self.piece_bytes.sum())
        self._in_row = np.cumsum(self.piece_bytes) - self.piece_bytes
        self.buffers = _outermost(map(_flat, _tensors_of(pool)))
        self._begins = np.array([buffer.ctypes.data for buffer in self.buffers], np.int64)
        self._ends = self._begins + np.array([buffer.nbytes for buffer in self.buffers], np.int64)
        try:
            self._located(addresses)
        except StateError as error:
            raise ConfigError(f"{error}; such pools are not supported") from error

    def pieces(self, host_indices: torch.Tensor) -> Pieces:
        """Return the locations of pages.

        Args:
            host_indices: Indices of the pages' tokens, shape `[pages * page_indices]`.

        Raises:
            StateError: They are not whole pages, or the pool's pages have changed.
        """
        pages, rest = divmod(host_indices.numel(), self.page_indices)
        addresses, sizes = self._addresses_of(host_indices) if pages and not rest else ((), ())
        if rest or not np.array_equal(sizes, np.tile(self.piece_bytes, pages)):
            raise StateError(
                f"host pool {self._name}: {host_indices.numel()} indices do not name whole pages "
                f"of {self.page_indices} tokens and {self.page_bytes} bytes"
            )
        return self._located(addresses)

    def copies(self, direction: Direction, pieces: Pieces, rows: Numbers) -> Iterator[Numbers]:
        """Yield the copies of each buffer: target offset, source offset, bytes; shape `[n, 3]`.

        Args:
            direction: STORE copies from pages to rows, LOAD from rows to pages.
            pieces: The pages.
            rows: Offset of each page's row, in bytes.
        """
        in_rows = rows[:, None] + self._in_row
        both = (in_rows, pieces.offsets)
        target, source = both if direction is Direction.STORE else reversed(both)
        sizes = np.broadcast_to(self.piece_bytes, in_rows.shape)
        copies = np.stack((target, source, sizes), axis=-1)
        for number in range(len(self.buffers)):
            yield np.ascontiguousarray(copies[pieces.buffers == number])

    def _located(self, addresses: Sequence[int]) -> Pieces:
        begins = np.array(addresses, np.int64).reshape(-1, len(self.piece_bytes))
        numbers = np.searchsorted(self._begins, begins, side="right") - 1
        is_inside = (numbers >= 0) & (begins + self.piece_bytes <= self._ends[numbers])
        if not is_inside.all():
            raise StateError(f"host pool {self._name}: pages are outside of its buffers")
        return Pieces(numbers, begins - self._begins[numbers])


class PageCopier:
    """Copies between pages and rows in one direction. Thread-safe; calls wait for each other."""

    def __init__(self, pages: PoolPages, rows: memoryview, direction: Direction) -> None:
        """Start the threads.

        Args:
            pages: The pages.
            rows: The rows, shape `[num_rows, row_bytes]`.
            direction: STORE copies from pages to rows, LOAD from rows to pages.

        Raises:
            ConfigError: Native code is required but unavailable.
            OSError: Threads cannot be started.
        """
        self._pages = pages
        self._direction = direction
        self._row_bytes = rows.nbytes // len(rows)
        self._rows = np.asarray(rows).reshape(-1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._native = create_copies()
        if self._native is not None:
            self._memory = self._native.map(self._rows)
            self._memories = [self._native.map(buffer) for buffer in pages.buffers]

    def copy(self, pieces: Pieces, rows: Sequence[int]) -> None:
        """Copy pages; blocks until no byte moves any more.

        Native threads copy without the interpreter's lock. There is no timeout: copies in memory
        always end.

        Args:
            pieces: The pages.
            rows: Number of each page's row.

        Raises:
            ClosedError: The copier is closed.
        """
        offsets = np.array(rows, np.int64) * self._row_bytes
        copies = self._pages.copies(self._direction, pieces, offsets)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the storage backend is closed")
            if self._native is not None:
                self._native.copy(self._batches(copies))
            else:
                self._copy(copies)

    def close(self) -> None:
        """Wait for a running copy, end the threads, and release the memory; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._native is not None:
                self._native.close()
                for memory in (self._memory, *self._memories):
                    memory.release()
            del self._rows, self._pages

    def _batches(self, copies: Iterator[Numbers]) -> Iterator[Copies]:
        # Imported here, because the native module may be missing.
        from kvoffload_async.block_io.native_copies import Copies  # noqa: PLC0415

        for memory, parts in zip(self._memories, copies, strict=True):
            pair = (self._memory, memory)
            target, source = pair if self._direction is Direction.STORE else reversed(pair)
            yield Copies(target, source, parts)

    def _copy(self, copies: Iterator[Numbers]) -> None:
        for buffer, parts in zip(self._pages.buffers, copies, strict=True):
            pair = (self._rows, buffer)
            to, source = pair if self._direction is Direction.STORE else reversed(pair)
            for target, begin, size in parts.tolist():
                to[target : target + size] = source[begin : begin + size]


def _tensors_of(pool: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - SGLang's HostKVCache
    """Yield the tensors that contain a pool's pages; some may be parts of others."""
    registered = getattr(pool, "get_hybrid_pool_buffer", None)
    for found in (getattr(pool, "kv_buffer", None), registered and registered()):
        tensors = found if isinstance(found, list | tuple) else (found,)
        yield from (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def _flat(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes; raises ConfigError if they are not contiguous in host memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"host pool: a buffer of shape {tuple(tensor.shape)} on {tensor.device} is not "
            "contiguous in host memory; such pools are not supported"
        )
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _outermost(buffers: Iterator[Bytes]) -> list[Bytes]:
    """Return buffers by address, without those that are parts of others."""
    outermost: list[Bytes] = []
    end = 0
    for buffer in sorted(buffers, key=lambda found: (found.ctypes.data, -found.nbytes)):
        if buffer.ctypes.data + buffer.nbytes > end:
            outermost.append(buffer)
            end = buffer.ctypes.data + buffer.nbytes
    return outermost
