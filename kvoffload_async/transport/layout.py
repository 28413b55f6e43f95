"""How a block's bytes lie on the device, and in a slot.

A KV-cache group has tensors; each is a set of pages, one a device block. A slot holds, for one
chunk, the pages of all tensors of its group back to back: tensor after tensor, and within a
tensor the chunk's device blocks in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvoffload_async.errors import ConfigError


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


def register_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]],
    blocks_per_chunk: int = 1,
    block_dim: int = 0,
) -> KVLayout:
    """Describe a caller's tensors; nothing is copied.

    Args:
        kv_caches: Layer name -> tensor, of any dtype, on one device.
        groups: The layer names of each KV-cache group.
        blocks_per_chunk: Device blocks of one chunk.
        block_dim: The dimension that counts device blocks. What comes before it (key and value,
            say) makes page tables of its own; what comes behind it must be contiguous.

    Raises:
        ConfigError: A layer is unknown, or its layout cannot be addressed by block.
    """
    tables = []
    chunk_bytes = 0
    for names in groups:
        offset = 0
        group: list[PageTable] = []
        for name in names:
            if name not in kv_caches:
                raise ConfigError(f"groups: no KV cache is registered for layer {name!r}")
            for pages in _pages_of(name, kv_caches[name], block_dim):
                group.append(PageTable(pages, offset))
                offset += pages.shape[1] * blocks_per_chunk
        tables.append(group)
        chunk_bytes = max(chunk_bytes, offset)
    return KVLayout(tables, blocks_per_chunk, chunk_bytes)


def _pages_of(name: str, tensor: torch.Tensor, block_dim: int) -> list[torch.Tensor]:
    """Return a tensor's page tables, as views of its memory."""
    if tensor.dim() <= block_dim + 1:
        raise ConfigError(f"kv_caches[{name!r}]: shape {tuple(tensor.shape)} has no block pages")
    if block_dim:
        return [page for part in tensor.unbind(0) for page in _pages_of(name, part, block_dim - 1)]
    page = tensor[0]
    if not page.is_contiguous():
        raise ConfigError(
            f"kv_caches[{name!r}]: the bytes of a block are not contiguous "
            f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); give another block_dim"
        )
    flat = tensor.as_strided((tensor.shape[0], page.numel()), (tensor.stride(0), 1))
    return [flat.view(torch.uint8)]
