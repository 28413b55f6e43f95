"""Copies between page tables and slots by way of staging memory, in few operations.

A store gathers blocks into staging memory with the layout of the slots, one operation per page
table, and copies each run of adjacent slots at once; loads use the reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import GroupCopies
from kvoffload_async.transport.layout import KVLayout, PageTable
from kvoffload_async.types import BlockIds

# One thread moves an element of a gather: bytes would take eight times as long as words.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class _Words:
    """A page table viewed as the widest possible words: `[num_blocks, page_words]`."""

    pages: torch.Tensor
    offset_words: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a transfer that fits into staging memory, of one group.

    Attributes:
        group: Index of the group.
        slots: The slots, one per row of staging memory.
        begin: Start of its rows, positions and blocks in the plan's index, `count` each.
        count: Number of device blocks.
        is_whole: Whether they fill all rows, in order.
    """

    group: int
    slots: BlockIds
    begin: int
    count: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One transfer, divided into extents.

    Attributes:
        extents: The extents, in order of copying.
        index: All indices of the extents, int64, in one array to be copied to the device at once.
    """

    extents: Sequence[Extent]
    index: npt.NDArray[np.int64]


class StagedCopies:
    """Copies between a layout's page tables and a worker's cells in the slots.

    Thread: any, one at a time for each staging buffer.
    """

    def __init__(self, layout: KVLayout, host: torch.Tensor, cell_offset_bytes: int) -> None:
        """Use the layout's tables, and `host`: the slots, uint8 `[num_slots, slot_bytes]`."""
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._host = host
        self._cell_offset_bytes = cell_offset_bytes
        self._word_bytes, self._dtype = _widest_words(layout)
        self._row_bytes = -(-layout.chunk_bytes // self._word_bytes) * self._word_bytes
        # Includes gaps between a group's tables, but no bytes of other workers.
        self._group_bytes = [
            max(
                (t.offset_bytes + t.page_bytes * layout.blocks_per_chunk for t in group),
                default=0,
            )
            for group in layout.groups
        ]
        self._groups = [
            [
                _Words(table.pages.view(self._dtype), table.offset_bytes // self._word_bytes)
                for table in group
            ]
            for group in layout.groups
        ]

    def staging_shape(self, size_bytes: int) -> tuple[int, int]:
        """Return the shape of staging memory of about this size: rows and bytes, uint8."""
        return max(1, size_bytes // self._row_bytes), self._row_bytes

    def plan(self, parts: Sequence[GroupCopies], staging_rows: int) -> Plan:
        """Divide a transfer into extents of at most `staging_rows` slots."""
        extents: list[Extent] = []
        index: list[npt.NDArray[np.integer[Any]]] = []
        begin = 0
        for group, part in enumerate(parts):
            rows, slots = _rows_of(part)
            for first in range(0, len(slots), staging_rows):
                mine = slots[first : first + staging_rows]
                chosen = (rows >= first) & (rows < first + len(mine))
                count = int(chosen.sum())
                is_whole = count == len(mine) * self._blocks_per_chunk
                extents.append(Extent(group, mine, begin, count, is_whole))
                index += [(rows - first)[chosen], part.positions[chosen], part.blocks[chosen]]
                begin += 3 * count
        joined = np.concatenate(index) if index else np.empty(0)
        return Plan(extents, joined.astype(np.int64))

    def perform(
        self, direction: Direction, plan: Plan, index: torch.Tensor, staging: torch.Tensor
    ) -> None:
        """Queue a transfer's copies; `index` is the plan's, on the device."""
        for extent in plan.extents:
            where = index[extent.begin : extent.begin + 3 * extent.count].view(3, extent.count)
            used = staging[: len(extent.slots), : self._group_bytes[extent.group]]
            if direction is Direction.LOAD or not extent.is_whole:
                # A partially stored chunk keeps the other bytes of its slot.
                self._copy_rows(used, extent.slots, to_host=False)
            for table in self._groups[extent.group]:
                cells = self._cells_of(staging, table, len(extent.slots))
                if direction is Direction.STORE:
                    _gather(table.pages, cells, where, is_whole=extent.is_whole)
                else:
                    _scatter(table.pages, cells, where, is_whole=extent.is_whole)
            if direction is Direction.STORE:
                self._copy_rows(used, extent.slots, to_host=True)

    def release(self) -> None:
        """Release the reference to the slots' memory; its owner may unmap it now."""
        self._host = torch.empty((0, 0), dtype=torch.uint8)

    def _cells_of(self, staging: torch.Tensor, table: _Words, rows: int) -> torch.Tensor:
        """Return a table's part of staging: words `[rows, blocks_per_chunk, page_words]`."""
        words = staging.view(self._dtype)
        page_words = table.pages.shape[1]
        return words.as_strided(
            (rows, self._blocks_per_chunk, page_words),
            (words.stride(0), page_words, 1),
            words.storage_offset() + table.offset_words,
        )

    def _copy_rows(self, staging: torch.Tensor, slots: BlockIds, *, to_host: bool) -> None:
        """Copy between staging rows and slots, each run of adjacent slots in one call."""
        begin, end = self._cell_offset_bytes, self._cell_offset_bytes + staging.shape[1]
        # Copies are asynchronous only between contiguous memories: a run must not skip padding.
        is_joined = staging.is_contiguous() and staging.shape[1] == self._host.shape[1]
        for row, slot, count in _runs(slots, len(slots) if is_joined else 1):
            device_rows = staging[row : row + count]
            host_rows = self._host[slot : slot + count, begin:end]
            if to_host:
                host_rows.copy_(device_rows, non_blocking=True)
            else:
                device_rows.copy_(host_rows, non_blocking=True)


def _gather(
    pages: torch.Tensor, cells: torch.Tensor, where: torch.Tensor, *, is_whole: bool
) -> None:
    rows, positions, blocks = where
    if is_whole and cells.shape[1] == 1:
        torch.index_select(pages, 0, blocks, out=cells[:, 0])
    elif is_whole:
        cells.copy_(pages.index_select(0, blocks).view(cells.shape))
    else:
        cells[rows, positions] = pages.index_select(0, blocks)


def _scatter(
    pages: torch.Tensor, cells: torch.Tensor, where: torch.Tensor, *, is_whole: bool
) -> None:
    rows, positions, blocks = where
    source = cells.reshape(-1, cells.shape[2]) if is_whole else cells[rows, positions]
    pages.index_copy_(0, blocks, source)


def _rows_of(part: GroupCopies) -> tuple[npt.NDArray[np.int64], BlockIds]:
    """Return each device block's index among the part's slots, and those slots in order."""
    is_new = np.ones(len(part.slots), dtype=bool)
    is_new[1:] = part.slots[1:] != part.slots[:-1]
    return np.cumsum(is_new, dtype=np.int64) - 1, part.slots[is_new]


def _runs(slots: BlockIds, longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, slot, count) for each run of consecutive, increasing slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        is_cut = end == len(slots) or end - begin == longest or slots[end] != slots[end - 1] + 1
        if is_cut:
            yield begin, int(slots[begin]), end - begin
            begin = end


def _widest_words(layout: KVLayout) -> tuple[int, torch.dtype]:
    """Return the widest words that fit all tables: their size and type."""
    tables = [table for group in layout.groups for table in group]
    return next(word for word in _WORDS if all(_is_aligned(table, word[0]) for table in tables))


def _is_aligned(table: PageTable, word_bytes: int) -> bool:
    pages = table.pages
    numbers = (
        table.page_bytes,
        table.offset_bytes,
        pages.stride(0),
        pages.storage_offset(),
        pages.data_ptr(),
    )
    return not any(number % word_bytes for number in numbers)
