"""Identity of a page in storage beyond its key: everything that its bytes depend on.

SGLang's keys are chained hashes of token ids. Ranks whose pages differ have different identities,
with the same distinctions as SGLang's `HiCacheFile`: with MHA each TP rank has its own pages; with
MLA all TP ranks have the same pages, which one of them stores; PP, CP and DCP ranks have their own.
Unlike `HiCacheFile`, pages of another memory layout, dtype, page size or shape never match.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.integrations.sglang.pages import PoolPages

logger = logging.getLogger(__name__)


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
        """Return the shard of a rank."""
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
    """Return a tier's configuration, completed with the identity of its pages.

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
            "part_bytes": summary_of(pages),
            "is_mla": config.is_mla_model,
            **shard.sizes,
        },
    }


def summary_of(pages: PoolPages) -> list[list[int]]:
    """Return the sizes of a page's parts, run-length encoded: pairs of bytes and count."""
    runs: list[list[int]] = []
    for size in pages.part_bytes.tolist():
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return runs


def check_sharing(tier: Mapping[str, Any], config: Any) -> None:  # noqa: ANN401 - SGLang's
    """Check that all ranks with the same pages can use a tier.

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
