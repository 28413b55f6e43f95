"""Integration with SGLang: this package's tiers as the storage backend of HiCache.

Importing this package does not need SGLang. The name below is resolved on first access, which
checks the installed SGLang.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

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


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of a module that is not loaded yet
    """Import the storage backend; raises ImportError without a supported SGLang."""
    if name != "KVOffloadHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    CONTRACT.require(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.hicache"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), "KVOffloadHiCache"})
