"""The layout of blocks on the device and in a slot.

A KV-cache group has tensors; each is a set of pages, one per device block. A slot holds the pages
of one chunk in all tensors of its group: tensor after tensor, and within a tensor the chunk's
device blocks in order.

A page usually lies in a slot as it does on the device. It may also be scattered there, in runs of
fragments between those of other workers, so that the contents of a slot do not depend on the number
of workers. Workers with equal pages take turns in writing them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies, GroupCopies, group_copies
from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.types import BlockIds

_KEY_AND_VALUE = 2
_KEY_AND_VALUE_DIMS = 4
"""Minimum rank of a key-and-value tensor: key or value, block, token, data of a token."""


class CopyRun(NamedTuple):
    """Fragments of a page at equal distances, on the device and in a slot; all in bytes.

    Attributes:
        page_offset: Offset of the first fragment in the page.
        slot_offset: Its offset in the page's part of a slot.
        fragment_bytes: Bytes of a fragment.
        num_fragments: Number of fragments.
        page_stride: Distance of fragments in the page.
        slot_stride: Their distance in a slot.
    """

    page_offset: int
    slot_offset: int
    fragment_bytes: int
    num_fragments: int = 1
    page_stride: int = 0
    slot_stride: int = 0

    @property
    def page_end(self) -> int:
        """End of the last fragment in the page."""
        return self.page_offset + (self.num_fragments - 1) * self.page_stride + self.fragment_bytes

    @property
    def slot_end(self) -> int:
        """End of the last fragment in the page's part of a slot."""
        return self.slot_offset + (self.num_fragments - 1) * self.slot_stride + self.fragment_bytes


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of one KV-cache tensor.

    Attributes:
        pages: uint8 `[num_blocks, page_bytes]`, a view of the caller's memory; rows may be strided,
            the bytes of a row are contiguous.
        offset_bytes: Offset of the tensor's pages in a slot.
        slot_page_bytes: Bytes of a page's part of a slot; by default those of the page.
        runs: Which bytes are copied, and where they are; by default the whole page in one. Only
            bytes at the end of a page are in none.
        num_writers: Number of workers with equal pages.
        writer: This worker's number among them; it stores each `num_writers`-th page.
    """

    pages: torch.Tensor
    offset_bytes: int
    slot_page_bytes: int = 0
    runs: Sequence[CopyRun] = ()
    num_writers: int = 1
    writer: int = 0

    def __post_init__(self) -> None:
        if not self.runs:
            object.__setattr__(self, "runs", (CopyRun(0, 0, self.page_bytes),))
            object.__setattr__(self, "slot_page_bytes", self.page_bytes)
        for run in self.runs:
            if (
                min(run) < 0
                or run.page_end > self.page_bytes
                or run.slot_end > self.slot_page_bytes
            ):
                raise ConfigError(
                    f"kv_caches: {run} is not within a page of {self.page_bytes} bytes and its "
                    f"{self.slot_page_bytes} bytes of a slot"
                )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.pages.shape[1]

    @property
    def copied_bytes(self) -> int:
        """Bytes of a page that are copied."""
        return sum(run.fragment_bytes * run.num_fragments for run in self.runs)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The page tables of all KV-cache groups.

    Attributes:
        groups: The page tables of each KV-cache group.
        blocks_per_chunk: Device blocks per chunk.
        chunk_bytes: Bytes of a chunk of the largest group; the minimum size of a slot.
        block_bytes: Bytes that are copied of a device block in all tensors of each group.
        num_blocks: Device blocks of each group.
        writers: (number of workers with equal pages, this worker's number) of each group.

    Raises:
        ConfigError: The tensors of a group have different writers.
    """

    groups: Sequence[Sequence[PageTable]]
    blocks_per_chunk: int
    chunk_bytes: int
    block_bytes: Sequence[int] = field(init=False)
    num_blocks: Sequence[int] = field(init=False)
    writers: Sequence[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [sum(table.copied_bytes for table in group) for group in self.groups]
        counts = [min((len(table.pages) for table in group), default=0) for group in self.groups]
        writers = [{(table.num_writers, table.writer) for table in group} for group in self.groups]
        if any(len(found) > 1 for found in writers):
            raise ConfigError("kv_caches: the layers of a group must be on the same workers")
        object.__setattr__(self, "block_bytes", sizes)
        object.__setattr__(self, "num_blocks", counts)
        object.__setattr__(self, "writers", [next(iter(found), (1, 0)) for found in writers])

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return next(table.pages.device for group in self.groups for table in group)

    def packed(self) -> KVLayout:
        """Return a layout in which a slot holds one device block, its pages as on the device.

        A page ends with the last byte that is copied; before, all bytes must be.
        """
        groups = []
        for group in self.groups:
            used = [table.pages[:, : max(run.page_end for run in table.runs)] for table in group]
            offsets = itertools.accumulate((pages.shape[1] for pages in used), initial=0)
            groups.append([PageTable(*each) for each in zip(used, offsets, strict=False)])
        return KVLayout(groups, 1, max(sum(one.page_bytes for one in group) for group in groups))

    @property
    def is_contiguous(self) -> bool:
        """Whether this worker alone writes the whole of each chunk, page after page."""
        return all(
            table.slot_page_bytes == table.page_bytes == table.copied_bytes
            and len(table.runs) == 1 == table.runs[0].num_fragments
            and 1 in {table.num_writers, self.blocks_per_chunk}
            for group in self.groups
            for table in group
        )

    def require_room(self, slot_bytes: int, cell_offset_bytes: int) -> None:
        """Raise ConfigError unless a slot has room for a chunk at `cell_offset_bytes`."""
        if not 0 <= cell_offset_bytes <= slot_bytes - self.chunk_bytes:
            raise ConfigError(
                f"block_bytes: a slot of {slot_bytes} bytes does not hold a chunk of "
                f"{self.chunk_bytes} bytes at offset {cell_offset_bytes}"
            )

    def resolve(self, copies: BlockCopies, num_slots: int) -> Sequence[GroupCopies]:
        """Return a transfer's copies by group, with all indices checked.

        A store has only the pages that this worker writes. On a device, an out-of-range index would
        fail its kernel and all later ones; numpy accepts negative indices as other blocks.

        Raises:
            TransportError: The transfer does not match this layout, or names blocks or slots that
                do not exist.
        """
        try:
            parts = group_copies(copies, self.blocks_per_chunk)
        except ValueError as error:
            raise TransportError(str(error)) from error
        if len(parts) != len(self.groups):
            raise TransportError(f"{len(parts)} groups are given, expected {len(self.groups)}")
        for num_blocks, part in zip(self.num_blocks, parts, strict=True):
            _require_range("device block", part.blocks, num_blocks)
            _require_range("slot", part.slots, num_slots)
        if copies.direction is Direction.LOAD:
            return parts
        return [
            self._written(part, *writers) for part, writers in zip(parts, self.writers, strict=True)
        ]

    def num_bytes(self, parts: Sequence[GroupCopies]) -> int:
        """Return the number of bytes that a transfer copies."""
        num_bytes = 0
        for part, block_bytes in zip(parts, self.block_bytes, strict=True):
            num_bytes += len(part.blocks) * block_bytes
        return num_bytes

    def _written(self, part: GroupCopies, num_writers: int, writer: int) -> GroupCopies:
        """Return the pages that this worker stores: workers take turns, by the place in slots."""
        if num_writers == 1:
            return part
        places = part.slots.astype(np.int64) * self.blocks_per_chunk + part.positions
        is_mine = places % num_writers == writer
        return GroupCopies(part.blocks[is_mine], part.slots[is_mine], part.positions[is_mine])


def register_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]] | None = None,
    blocks_per_chunk: int = 1,
    block_dim: int | None = None,
) -> KVLayout:
    """Return the layout of a caller's tensors; nothing is copied.

    Args:
        kv_caches: Layer name -> tensor, of any dtype, on one device.
        groups: The layer names of each KV-cache group; by default all layers are one group.
        blocks_per_chunk: Device blocks per chunk.
        block_dim: The dimension that counts device blocks. Each index of the dimensions before it
            (layers, key and value) gets a page table of its own; the dimensions after it must be
            contiguous. None: the first one, unless it looks like key and value.

    Raises:
        ConfigError: A layer is unknown or not a tensor, its layout cannot be addressed by block, or
            the layers of a group have different numbers of blocks.
    """
    _require_tensors(kv_caches)
    if block_dim is None:
        block_dim = 0
        _require_blocks_first(kv_caches)
    given: Any = block_dim  # unchecked input
    if not isinstance(given, int) or block_dim < 0 or blocks_per_chunk < 1:
        raise ConfigError(f"{block_dim=} and {blocks_per_chunk=}: they must be at least 0 and 1")
    tables = []
    chunk_bytes = 0
    for names in [list(kv_caches)] if groups is None else groups:
        offset = 0
        group: list[PageTable] = []
        for name in names:
            if name not in kv_caches:
                raise ConfigError(f"groups: no KV cache is registered for layer {name!r}")
            for pages in _pages_of(name, kv_caches[name].detach(), block_dim):
                group.append(PageTable(pages, offset))
                offset += pages.shape[1] * blocks_per_chunk
        _require_equal_lengths(names, kv_caches, block_dim)
        tables.append(group)
        chunk_bytes = max(chunk_bytes, offset)
    devices = {table.pages.device for group in tables for table in group}
    if len(devices) != 1:
        raise ConfigError(
            f"kv_caches: the tensors must be on one device, but are on {len(devices)}"
        )
    return KVLayout(tables, blocks_per_chunk, chunk_bytes)


def _require_tensors(kv_caches: object) -> None:
    """Raise ConfigError unless each layer has a tensor; suggest a fix."""
    if not isinstance(kv_caches, Mapping):
        raise ConfigError(
            f"kv_caches: {type(kv_caches).__name__} is not valid; give a mapping of layer names to "
            'tensors, such as {"layer0": tensor}'
        )
    for name, cache in kv_caches.items():
        if isinstance(cache, torch.Tensor):
            _require_plain_bytes(name, cache)
            continue
        remedy = "give a torch.Tensor"
        if isinstance(cache, np.ndarray):
            remedy = "give torch.from_numpy(array), which shares its memory"
        elif isinstance(cache, list | tuple):
            remedy = f"give each of its tensors a name of its own, such as {name + '.0'!r}"
        raise ConfigError(f"kv_caches[{name!r}]: {type(cache).__name__} is not a tensor; {remedy}")


def _require_plain_bytes(name: str, cache: torch.Tensor) -> None:
    """Raise ConfigError unless a tensor's memory contains its values directly."""
    if cache.layout is not torch.strided:
        raise ConfigError(
            f"kv_caches[{name!r}]: a tensor of layout {cache.layout} has no blocks of bytes; "
            "give a dense one"
        )
    if cache.is_conj() or cache.is_neg():
        lazy = "conjugation" if cache.is_conj() else "negation"
        raise ConfigError(
            f"kv_caches[{name!r}]: the tensor is a lazy {lazy}, whose memory holds other values; "
            "give the tensor that it is a view of"
        )


def _require_blocks_first(kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError if key and value seem to precede the device blocks."""
    for name, cache in kv_caches.items():
        if cache.dim() >= _KEY_AND_VALUE_DIMS and cache.shape[0] == _KEY_AND_VALUE < cache.shape[1]:
            raise ConfigError(
                f"kv_caches[{name!r}]: shape {tuple(cache.shape)} looks like key and value with "
                f"{cache.shape[1]} device blocks each; give block_dim=1, or block_dim=0 if there "
                "are two device blocks"
            )


def _require_equal_lengths(
    names: Sequence[str], kv_caches: Mapping[str, torch.Tensor], block_dim: int
) -> None:
    """Raise ConfigError unless the layers of a group have equal numbers of device blocks."""
    lengths = {kv_caches[name].shape[block_dim]: name for name in reversed(names)}
    if len(lengths) > 1:
        listed = ", ".join(f"{name!r} has {count}" for count, name in sorted(lengths.items()))
        raise ConfigError(
            f"kv_caches: layers differ in device blocks along dimension {block_dim} ({listed}); "
            "give the block_dim that counts blocks, or layers of another size in a group of "
            "their own"
        )


def _pages_of(name: str, tensor: torch.Tensor, block_dim: int) -> list[torch.Tensor]:
    """Return a tensor's page tables, as views of its memory."""
    if tensor.dim() <= block_dim + 1 or not tensor.numel():
        raise ConfigError(f"kv_caches[{name!r}]: shape {tuple(tensor.shape)} has no block pages")
    if block_dim:
        return [page for part in tensor.unbind(0) for page in _pages_of(name, part, block_dim - 1)]
    page = tensor[0]
    if not page.is_contiguous():
        raise ConfigError(
            f"kv_caches[{name!r}]: the bytes of a block are not contiguous "
            f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); give another block_dim"
        )
    if tensor.shape[0] > 1 and tensor.stride(0) < page.numel():
        raise ConfigError(
            f"kv_caches[{name!r}]: its blocks overlap "
            f"(shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        )
    flat = tensor.as_strided((tensor.shape[0], page.numel()), (tensor.stride(0), 1))
    return [flat.view(torch.uint8)]


def _require_range(what: str, ids: BlockIds, count: int) -> None:
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise TransportError(f"there is no {what} {np.unique(wrong).tolist()}: there are {count}")
