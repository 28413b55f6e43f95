"""How the host transport moves bytes: by native threads, or by numpy where these are not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import GroupCopies
from kvoffload_async.block_io import create_copies
from kvoffload_async.transport.layout import KVLayout, PageTable

if TYPE_CHECKING:
    import torch

    from kvoffload_async.block_io.native_copies import Copies, Memory, NativeCopies

Bytes = npt.NDArray[np.uint8]

LEAST_BYTES = 256 << 10
"""Less than that is copied sooner than another thread is woken, and wakes this one again."""


class Copier(Protocol):
    """Copies between a layout's tensors and slots. Thread: one at a time."""

    def copy(self, direction: Direction, group: int, part: GroupCopies) -> None:
        """Copy the part of a transfer that concerns one group; returns when it is copied."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


def create_copier(layout: KVLayout, rows: Bytes, cell_offset_bytes: int) -> Copier:
    """Return a new copier.

    Args:
        layout: The tensors.
        rows: The slots, `[num_slots, slot_bytes]`.
        cell_offset_bytes: Where this worker's cell begins in a slot.

    Raises:
        ConfigError: Native code is required and cannot be used.
        OSError: There are no more threads.
    """
    copies = create_copies()
    if copies is None:
        return _NumpyCopier(layout, rows, cell_offset_bytes)
    return _NativeCopier(copies, layout, rows, cell_offset_bytes)


class _NumpyCopier:
    """Copies by numpy, with the interpreter's lock."""

    def __init__(self, layout: KVLayout, rows: Bytes, cell_offset_bytes: int) -> None:
        per_chunk = layout.blocks_per_chunk
        self._groups = [
            [
                (table.pages.numpy(), _cells(rows, cell_offset_bytes, table, per_chunk))
                for table in group
            ]
            for group in layout.groups
        ]

    def copy(self, direction: Direction, group: int, part: GroupCopies) -> None:
        for device, host in self._groups[group]:
            if direction is Direction.STORE:
                host[part.slots, part.places] = device[part.blocks]
            else:
                device[part.blocks] = host[part.slots, part.places]

    def close(self) -> None:
        self._groups.clear()


class _Table(NamedTuple):
    """One tensor's pages.

    Attributes:
        device: All of its bytes, gaps between pages included.
        stride_bytes: From one page to the next.
        page_bytes: Of a page.
        cell_bytes: Where its first page is in a slot.
    """

    device: Memory
    stride_bytes: int
    page_bytes: int
    cell_bytes: int


class _NativeCopier:
    """Copies by native threads, all tensors of a group at once, and by numpy what is small.

    It owns `copies`.
    """

    def __init__(
        self, copies: NativeCopies, layout: KVLayout, rows: Bytes, cell_offset_bytes: int
    ) -> None:
        self._copies = copies
        self._small = _NumpyCopier(layout, rows, cell_offset_bytes)
        self._slot_bytes = rows.shape[1]
        self._host = copies.map(rows)
        self._groups = [
            [
                _Table(
                    copies.map(_flat(table.pages)),
                    table.pages.stride(0),
                    table.page_bytes,
                    cell_offset_bytes + table.offset_bytes,
                )
                for table in group
            ]
            for group in layout.groups
        ]

    def copy(self, direction: Direction, group: int, part: GroupCopies) -> None:
        tables = self._groups[group]
        if len(part.blocks) * sum(table.page_bytes for table in tables) < LEAST_BYTES:
            self._small.copy(direction, group, part)
        else:
            self._copies.copy(self._batches(direction, tables, part))

    def close(self) -> None:
        self._copies.close()
        self._small.close()
        for memory in (self._host, *(table.device for group in self._groups for table in group)):
            memory.release()

    def _batches(
        self, direction: Direction, tables: Sequence[_Table], part: GroupCopies
    ) -> Iterator[Copies]:
        # Not before it is known that the module it needs is there.
        from kvoffload_async.block_io.native_copies import Copies  # noqa: PLC0415

        is_store = direction is Direction.STORE
        blocks, places = part.blocks.astype(np.int64), part.places.astype(np.int64)
        slots = part.slots.astype(np.int64) * self._slot_bytes
        for table in tables:
            parts = np.empty((len(blocks), 3), dtype=np.int64)
            on_device, on_host = (1, 0) if is_store else (0, 1)
            parts[:, on_device] = blocks * table.stride_bytes
            parts[:, on_host] = slots + places * table.page_bytes + table.cell_bytes
            parts[:, 2] = table.page_bytes
            memories = (self._host, table.device) if is_store else (table.device, self._host)
            yield Copies(*memories, parts)


def _flat(pages: torch.Tensor) -> Bytes:
    """Return all bytes from the first page to the last, and what is between them."""
    size = (pages.shape[0] - 1) * pages.stride(0) + pages.shape[1]
    flat: Bytes = pages.as_strided((size,), (1,)).numpy()
    return flat


def _cells(rows: Bytes, offset_bytes: int, table: PageTable, blocks_per_chunk: int) -> Bytes:
    """Return a tensor's part of every slot: `[num_slots, blocks_per_chunk, page_bytes]`, a view."""
    begin = offset_bytes + table.offset_bytes
    part = rows[:, begin : begin + blocks_per_chunk * table.page_bytes]
    return np.lib.stride_tricks.as_strided(
        part,
        (rows.shape[0], blocks_per_chunk, table.page_bytes),
        (rows.strides[0], table.page_bytes, 1),
    )
