"""The contract with SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvoffload_async.integrations.host_contract import HostContract

_STORAGE: Final = "sglang.srt.mem_cache.hicache_storage"

CONTRACT: Final = HostContract(
    module="sglang",
    title="SGLang",
    remedy="install SGLang for your platform",
    first=(0, 5, 23),
    beyond=(0, 5, 24),
    derived={f"{_STORAGE}:HiCacheStorage": ()},
    used={
        f"{_STORAGE}:HiCacheStorageConfig": (),
        f"{_STORAGE}:HiCacheStorageExtraInfo": (),
        f"{_STORAGE}:PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
        f"{_STORAGE}:PoolName": ("KV",),
        f"{_STORAGE}:PoolTransfer": (),
        f"{_STORAGE}:PoolTransferResult": ("empty",),
    },
    recording=Path(__file__).with_name("contract.json"),
)
