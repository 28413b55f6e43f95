"""Where the pages of SGLang's host pool lie.

A page consists of parts: with the layout `layer_first` K and V of each layer, with others fewer
and larger ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload_async.errors import ConfigError, StateError

Numbers = npt.NDArray[np.int64]


class PoolPages:
    """The pages of one host pool.

    Attributes:
        page_bytes: Bytes of a page.
        part_bytes: Bytes of each part of a page, in the pool's order.
        page_indices: Number of token indices with which SGLang names a page.
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
        if pool.device != "cpu":
            raise ConfigError(
                f"host pool {self._name}: its memory is on {pool.device}; only pools in host "
                "memory can be offloaded"
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
        self.part_bytes: Numbers = np.array(sizes, np.int64)
        self.page_bytes = int(self.part_bytes.sum())

    def addresses(self, host_indices: torch.Tensor) -> Numbers:
        """Return the address of each part of pages, shape `[pages, parts]`.

        Args:
            host_indices: Indices of the pages' tokens, shape `[pages * page_indices]`.

        Raises:
            StateError: They are not whole pages, or the pool's pages have changed.
        """
        pages, rest = divmod(host_indices.numel(), self.page_indices)
        addresses, sizes = self._addresses_of(host_indices) if pages and not rest else ((), ())
        if rest or not np.array_equal(sizes, np.tile(self.part_bytes, pages)):
            raise StateError(
                f"host pool {self._name}: {host_indices.numel()} indices do not name whole pages "
                f"of {self.page_indices} tokens and {self.page_bytes} bytes"
            )
        return np.array(addresses, np.int64).reshape(pages, len(self.part_bytes))
