"""The pages of SGLang's host pool: their addresses, and the identity of their contents.

A page consists of parts: with the layout `layer_first` K and V of each layer, with others fewer
and larger ones.

SGLang's keys are chained hashes of token ids. The identity of a page in storage has everything else
that its bytes depend on. Ranks whose pages differ have different identities, with the same
distinctions as SGLang's `HiCacheFile`: with MHA each TP rank has its own pages; with MLA all TP
ranks have the same pages, which one of them stores; PP, CP and DCP ranks have their own. Unlike
`HiCacheFile`, pages of another memory layout, dtype, page size or shape never match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory

Numbers = npt.NDArray[np.int64]


class PoolPages:
    """Addresses the pages of one host pool.

    Attributes:
        page_bytes: Bytes of a page.
        part_bytes: Bytes of each part of a page, in the pool's order.
        page_indices: Number of token indices with which SGLang names a page.
    """

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - SGLang's HostKVCache
        """Examine the pages of the host pool.

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
        """Return the addresses of the parts of each page, shape `[pages, parts]`.

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


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the KV cache that a rank's pages contain.

    Attributes:
        rank: Number of the part; ranks with the same number have the same pages.
        count: Number of parts.
        holders: Number of ranks with the same pages.
        replica: Number of the data-parallel replica. All replicas have the same pages.
        sizes: The sizes that the division depends on.
    """

    rank: int
    count: int
    holders: int
    replica: int
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, config: Any) -> Shard:  # noqa: ANN401 - SGLang's HiCacheStorageConfig
        """Return the shard that a rank's pages contain."""
        if not config.is_mla_model:
            shard, shards = config.tp_rank, config.tp_size
        else:
            shard, shards = config.dcp_rank, config.dcp_size
        sizes = {"pp_size": config.pp_size, "cp_size": config.attn_cp_size}
        if not config.is_mla_model or config.dcp_size > 1:
            sizes |= {"tp_size": config.tp_size, "dcp_size": config.dcp_size}
        stage = config.pp_rank * config.attn_cp_size + config.attn_cp_rank
        return cls(
            rank=stage * shards + shard,
            count=config.pp_size * config.attn_cp_size * shards,
            holders=config.tp_size // shards,
            replica=config.dp_rank,
            sizes=sizes,
        )


def identified(
    tier: Mapping[str, Any],
    config: Any,  # noqa: ANN401 - SGLang's HiCacheStorageConfig
    pool: Any,  # noqa: ANN401 - SGLang's HostKVCache
    pages: PoolPages,
    kv_cache_dtype: str | None,
) -> dict[str, Any]:
    """Return a tier's configuration, completed with the identity of the pages.

    Args:
        tier: As the user gave it.
        config: Gives model and ranks.
        pool: Gives layout and dtype.
        pages: Gives the shape of pages.
        kv_cache_dtype: SGLang's setting; the pool contains FP8 values of every kind as bytes.
    """
    shard = Shard.of(config)
    is_private = SecondaryTierFactory.is_private(tier)
    return {
        **tier,
        "enable_kv_events": True,  # so that pages can be listed, and cleared
        "rank": shard.rank + (shard.replica * shard.count if is_private else 0),
        "run_config": {
            "inference_engine": "sglang",
            **({"model_name": config.model_name} if config.model_name else {}),
            "pool": type(pool).__name__,
            "layout": pool.layout,
            "dtype": str(pool.dtype).removeprefix("torch."),
            "kv_cache_dtype": kv_cache_dtype,
            "page_size": pages.page_indices,
            "part_bytes": [  # run-length encoded
                [size, len(list(run))] for size, run in groupby(pages.part_bytes.tolist())
            ],
            "is_mla": config.is_mla_model,
            **shard.sizes,
        },
    }


def check_sharing(tier: Mapping[str, Any], config: Any) -> None:  # noqa: ANN401 - SGLang's
    """Check that all ranks with the same pages can share a tier.

    Raises:
        ConfigError: They cannot.
    """
    holders = Shard.of(config).holders
    if holders > 1 and SecondaryTierFactory.is_private(tier):
        raise ConfigError(
            f"type: {tier['type']!r} is for one process, but {holders} TP ranks load the pages of "
            "an MLA model, and one of them stores these; use a tier that processes share, such as "
            '"fs" or "valkey"'
        )
