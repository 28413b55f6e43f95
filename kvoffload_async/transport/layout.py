"""How a block's bytes lie on the device, and in a slot.

A KV-cache group has tensors; each is a set of pages, one a device block. A slot holds, for one
chunk, the pages of all tensors of its group back to back: tensor after tensor, and within a
tensor the chunk's device blocks in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvoffload_async.abc.transport import BlockCopies, GroupCopies, group_copies
from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.types import BlockIds


@dataclass(frozen=True, slots=True)
class PageTable:
    """One tensor's pages.

    Attributes:
        pages: uint8 `[num_blocks, page_bytes]`, a view of the caller's memory; rows may be
            strided, the bytes of a row are contiguous.
        offset_bytes: Where the tensor's pages begin in a slot.
    """

    pages: torch.Tensor
    offset_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.pages.shape[1]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All page tables, by group.

    Attributes:
        groups: The page tables of each KV-cache group.
        blocks_per_chunk: Device blocks of one chunk.
        chunk_bytes: Bytes of a chunk of the largest group: what a slot must hold.
    """

    groups: Sequence[Sequence[PageTable]]
    blocks_per_chunk: int
    chunk_bytes: int

    @property
    def device(self) -> torch.device:
        """Where the tensors are: on one device, all of them."""
        return next(table.pages.device for group in self.groups for table in group)

    def require_room(self, slot_bytes: int, cell_offset_bytes: int) -> None:
        """Raise ConfigError unless a slot holds a chunk at `cell_offset_bytes`."""
        if not 0 <= cell_offset_bytes <= slot_bytes - self.chunk_bytes:
            raise ConfigError(
                f"block_bytes: a slot of {slot_bytes} bytes does not hold a chunk of "
                f"{self.chunk_bytes} bytes at offset {cell_offset_bytes}"
            )

    def resolve(self, copies: BlockCopies, num_slots: int) -> Sequence[GroupCopies]:
        """Return what a transfer copies, group by group, with every index checked.

        On a device an index that is out of range would fail a kernel, and with it all that
        follows; and numpy takes a negative one for another block.

        Raises:
            TransportError: The transfer does not fit this layout, or names blocks or slots that
                do not exist.
        """
        try:
            parts = group_copies(copies, self.blocks_per_chunk)
        except ValueError as error:
            raise TransportError(str(error)) from error
        if len(parts) != len(self.groups):
            raise TransportError(f"{len(parts)} groups are given, {len(self.groups)} are there")
        for tables, part in zip(self.groups, parts, strict=True):
            blocks = min((table.pages.shape[0] for table in tables), default=0)
            _require_range("device block", part.blocks, blocks)
            _require_range("slot", part.slots, num_slots)
        return parts

    def num_bytes(self, parts: Sequence[GroupCopies]) -> int:
        """Return the bytes that a transfer moves."""
        return sum(
            len(part.blocks) * sum(table.page_bytes for table in group)
            for part, group in zip(parts, self.groups, strict=True)
        )


def register_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]] | None = None,
    blocks_per_chunk: int = 1,
    block_dim: int = 0,
) -> KVLayout:
    """Describe a caller's tensors; nothing is copied.

    Args:
        kv_caches: Layer name -> tensor, of any dtype, on one device.
        groups: The layer names of each KV-cache group; by default all layers in one.
        blocks_per_chunk: Device blocks of one chunk.
        block_dim: The dimension that counts device blocks. What comes before it (key and value,
            say) makes page tables of its own; what comes behind it must be contiguous.

    Raises:
        ConfigError: A layer is unknown, or its layout cannot be addressed by block.
    """
    if block_dim < 0 or blocks_per_chunk < 1:
        raise ConfigError(
            f"block_dim={block_dim} and blocks_per_chunk={blocks_per_chunk}: they must be at "
            "least 0 and 1"
        )
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
        tables.append(group)
        chunk_bytes = max(chunk_bytes, offset)
    devices = {table.pages.device for group in tables for table in group}
    if len(devices) != 1:
        raise ConfigError(
            f"kv_caches: the tensors must be on one device, but are on {len(devices)}"
        )
    return KVLayout(tables, blocks_per_chunk, chunk_bytes)


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
